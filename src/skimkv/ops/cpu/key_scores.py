"""The scores of a prompt's keys in C++ (csrc: skimkv_columns_run)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..blocks import check_sinks, check_softcap
from . import library
from .prompt_attention import parts_of
from .structs import CColumns


def check_shapes(q: Tensor, k: Tensor, sinks: Tensor | None) -> None:
    """Raise ValueError unless q is (H,G,n,D) and k (H,m,D) with m >= n, of one dtype, and sinks (H,G) float32."""
    H, G, n, D = q.shape
    check_sinks(sinks, H, G, q.device)
    if k.ndim != 3 or k.shape[0] != H or k.shape[2] != D or k.shape[1] < n or k.dtype != q.dtype:
        raise ValueError(f"k is {k.dtype} {tuple(k.shape)}; must be {q.dtype} ({H}, at least {n}, {D})")


def key_scores(q: Tensor, k: Tensor, scale: float, softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
    """Sum the causal softmax weights over the queries, and average over the group (see ops/key_scores.py).

    q (H,G,n,D) · k (H,m,D), float32, bfloat16 or float16 on the CPU · sinks (H,G) -> (H,m) float32.
    Raises ValueError if shapes, types or devices do not fit.
    """
    check_shapes(q, k, sinks)
    H, G, n, D = q.shape
    m, dtype = k.shape[1], library.DTYPES.get(k.dtype)
    if dtype is None or q.device.type != "cpu" or k.device.type != "cpu":
        raise ValueError(f"no CPU kernel for {k.dtype} on {q.device} and {k.device}")
    check_softcap(softcap)
    if not n:
        return torch.zeros(H, m, dtype=torch.float32, device="cpu")
    q, k = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k))
    sinks = None if sinks is None else sinks.contiguous()
    threads, pool = library.threads()
    parts = parts_of(H, G * n)
    sums = torch.empty(H, parts, m, dtype=torch.float32, device="cpu")
    op = CColumns(
        H, G, D, dtype, parts, scale, softcap or 0, n, m, q.data_ptr(), k.data_ptr(),
        *q.stride()[:3], *k.stride()[:2], sums.data_ptr(), None if sinks is None else sinks.data_ptr(),
    )  # fmt: skip
    lib, address = library.library(), ctypes.addressof(op)
    library.raise_error(lib.skimkv_columns_check(address))
    if lib.skimkv_columns_run(address, threads, pool):
        raise MemoryError("no memory for the scores of a prompt's keys")
    return sums.sum(1)
