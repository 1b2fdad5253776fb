"""The GPU backend: Triton kernels, and what the host tells the device for them."""
