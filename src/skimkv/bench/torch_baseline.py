"""PyTorch's own dense attention for one decode step: every way to it that the device and the number format have."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .machine import Call

BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


def dense_calls(q: Tensor, k: Tensor, v: Tensor, dtypes: Iterable[torch.dtype], spare_bytes: int) -> dict[str, Call]:
    """Return the calls by name, `torch:WAY:DTYPE`: plain products, and every backend of SDPA that takes the inputs.

    q (B,H,G,D) · k, v (B,H,N,D). PyTorch's MATH backend copies K and V for every query head: it is left out where
    these copies would take more than a quarter of `spare_bytes`.
    """
    calls: dict[str, Call] = {}
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        inputs = q.to(dtype), k.to(dtype), v.to(dtype)
        calls[f"torch:matmul:{name}"] = partial(_products, *inputs)
        copies = 8 * q.shape[2] * inputs[1].nbytes
        for backend in BACKENDS if copies < spare_bytes else BACKENDS[:-1]:
            call = partial(_sdpa, getattr(SDPBackend, backend), *inputs)
            try:
                call()
            except RuntimeError:  # no kernel for this type or shape, or no memory for it
                continue
            calls[f"torch:sdpa-{backend.split('_')[0].lower()}:{name}"] = call
    return calls


def dtype_of(name: str) -> torch.dtype:
    """Return the number format in which a call of this name reads K and V."""
    dtype: torch.dtype = getattr(torch, name.rpartition(":")[2])
    return dtype


def _products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = ((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)).softmax(-1)
    y: Tensor = weights @ v
    return y


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    B, H, G, D = q.shape
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q.reshape(B, H * G, 1, D), k, v, enable_gqa=G > 1)
