"""The bundled model, the folder `tiny` in Hugging Face format, and its training: python -m skimkv.models.train."""
