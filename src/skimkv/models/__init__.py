"""The bundled model: the folder `tiny` in Hugging Face format."""
