"""The operations below the methods: which backend computes, attention of a prompt, scores of keys, products.

A method's own algorithm stands in its file in `methods`; the kernels that `cpu` (C++) and `gpu` (Triton) offer for it
are declared in `protocol.py`.
"""

from .backends import BACKENDS, backend, forced_backend, graphable, kernels_for, select_backend
from .cpu.backend import RepeatedStep
from .cpu.layers import Layer, Layers, Norm
from .cpu.linear import Matrix
from .key_scores import key_scores
from .linear import Product, linear, matrix
from .prefill import append_block, causal_attention
from .protocol import Again, Kernels, SkimKernels, SoftmaxOptions, Token
from .rms_norm import norm_matrix, rms_norm

__all__ = [
    "BACKENDS", "Again", "Kernels", "Layer", "Layers", "Matrix", "Norm", "Product", "RepeatedStep", "SkimKernels",
    "SoftmaxOptions", "Token", "append_block", "backend", "causal_attention", "forced_backend", "graphable",
    "kernels_for", "key_scores", "linear", "matrix", "norm_matrix", "rms_norm", "select_backend",
]  # fmt: skip
