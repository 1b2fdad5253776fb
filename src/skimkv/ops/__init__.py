"""The operations below the methods: which backend computes, attention of a prompt, scores of keys, products.

A method's own algorithm stands in its file in `methods`; the kernels that `cpu` (C++) and `gpu` (Triton) offer for it
are said in `step.py`.
"""

from .argmax import argmax
from .backends import BACKENDS, backend, backend_for, forced_backend, graphable, named_backend, select_backend
from .cpu.layers import Decoder, Layer, Layers, Norm
from .cpu.linear import Matrix
from .fixed_keys import move_fixed
from .key_scores import key_scores
from .linear import Product, Rows, library_multiplies, linear, matrix, multiply_floats, tokens_of_prompt
from .prefill import append_block, causal_attention
from .rms_norm import norm_matrix, rms_norm
from .step import Backend, KernelStep, SoftmaxOptions, Token, kernel_step

__all__ = [
    "BACKENDS", "Backend", "Decoder", "KernelStep", "Layer", "Layers", "Matrix", "Norm", "Product", "Rows",
    "SoftmaxOptions", "Token", "append_block", "argmax", "backend", "backend_for", "causal_attention", "forced_backend",
    "graphable", "kernel_step", "key_scores", "library_multiplies", "linear", "matrix", "move_fixed", "multiply_floats",
    "named_backend", "norm_matrix", "rms_norm", "select_backend", "tokens_of_prompt",
]  # fmt: skip
