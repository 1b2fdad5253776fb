"""Causal attention of a prompt in C++ (csrc: skimkv_prompt_attention_run)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..blocks import check_sinks, check_softcap
from . import library
from .structs import CPrompt

# Instruction sets with which the library was faster than PyTorch's attention wherever it was measured. It was not
# measured on ARM, and the portable set has vectors of four numbers.
FAST = ("avx512bf16", "avx512vnni", "avx512", "avx2")


def takes_prompt(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> bool:
    """Whether the library attends with these: tensors on the CPU of one type that it has, which need no gradient."""
    if not q.numel() or not (q.device.type == k.device.type == v.device.type == "cpu"):
        return False
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks)):
        return False
    return q.dtype == k.dtype == v.dtype and q.dtype in library.DTYPES and q.shape[-1] <= library.MAX_HEAD_SIZE


def is_fast(dtype: torch.dtype) -> bool:
    """Whether the library is faster than PyTorch's attention for this type, with the instruction set in use.

    PyTorch multiplies 16-bit numbers with matrix units where a processor has them, and the library does not.
    """
    return library.isa() in FAST and (dtype == torch.float32 or not library.has_matrix_units())


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Compute causal attention, of queries that are the last of m positions: q (B,H,G,n,D) · k, v (B,H,m,D).

    sinks (H,G) -> (B,H,G,n,D), whose tokens lie together in memory, as the next linear layer reads them.
    Raises ValueError if shapes, types or devices do not fit.
    """
    return _run(q, k, v, scale, softcap, sinks, parts=0)[0]


def attend_and_score(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `attend` and, with it, the key scores of every row of the batch (see ops/key_scores.py).

    Returns (B,H,G,n,D) and (B,H,m) float32. Shapes and errors: as of `attend`.
    """
    y, received = _run(q, k, v, scale, softcap, sinks, parts=parts_of(q.shape[0] * q.shape[1], q.shape[2] * q.shape[3]))
    return y, received.sum(2)


def parts_of(units: int, queries: int) -> int:
    """Return in how many parts the key scores of a KV head are added up, so that all threads have as much to do."""
    threads, pool = library.threads()
    return min(-(-8 * threads // units), -(-queries // 48)) if pool and threads > 1 else 1


def _run(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, sinks: Tensor | None, parts: int
) -> tuple[Tensor, Tensor]:
    """Attend; parts: in how many parts what the keys receive is added up, (B,H,parts,m) float32; 0: it is not."""
    B, H, G, n, D = q.shape
    m = k.shape[2]
    check_sinks(sinks, H, G, q.device)
    if k.shape != (B, H, m, D) or v.shape != k.shape:
        raise ValueError(f"k is {tuple(k.shape)}, v {tuple(v.shape)}; both must be {(B, H, m, D)}")
    if not takes_prompt(q, k, v, sinks):
        raise ValueError(f"no CPU kernel for q {_kind(q)}, k {_kind(k)}, v {_kind(v)}; at most 576 numbers a head")
    check_softcap(softcap)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    sinks = None if sinks is None else sinks.contiguous()
    y = q.new_empty(B, n, H, G, D).permute(0, 2, 3, 1, 4)
    received = torch.empty(B, H, parts, m, dtype=torch.float32, device="cpu")
    op = CPrompt(
        B, H, G, D, library.DTYPES[q.dtype], parts, scale, softcap or 0, n, m,
        q.data_ptr(), k.data_ptr(), v.data_ptr(), y.data_ptr(),
        *q.stride()[:4], *k.stride()[:3], *v.stride()[:3], *y.stride()[:4], None if sinks is None else sinks.data_ptr(),
        received.data_ptr() if parts else None,
    )  # fmt: skip
    library.raise_error(library.library().skimkv_prompt_attention_run(ctypes.addressof(op), *library.threads()))
    return y, received


def _kind(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)} on {x.device}{' with a gradient' if x.requires_grad else ''}"
