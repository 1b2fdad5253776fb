"""The Triton kernels: `shared` is what they have in common, every other module is one step of a method."""
