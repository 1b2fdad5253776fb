"""What each key of a prompt received: H2O's score, in O(block * m) memory."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from .cpu import library as native
from .prefill import block_mask, softcapped

BLOCK = 128  # queries at a time


class CColumns(Structure):
    _fields_ = native._fields(
        a=("H G D dtype parts", c_int32),
        b=("scale softcap", c_float),
        c=("n m", c_int64),
        d=("q k", c_void_p),
        e=("q_h q_g q_n k_h k_n", c_int64),
        f=("sum", c_void_p),
    )


def _check(q: Tensor, k: Tensor) -> None:
    H, _, n, D = q.shape
    if k.ndim != 3 or k.shape[0] != H or k.shape[2] != D or k.shape[1] < n or k.dtype != q.dtype:
        raise ValueError(f"k is {k.dtype} {tuple(k.shape)}; must be {q.dtype} ({H}, at least {n}, {D})")


def reference(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Sum over queries of softmax weights, mean over the group, causal (H2O alg. 1: its accumulated score).

    q (H,G,n,D) the last n of the m positions · k (H,m,D) -> (H,m) float32, float64 for float64.
    Raises ValueError if shapes or dtypes do not fit.
    """
    _check(q, k)
    n, m = q.shape[2], k.shape[1]
    to = torch.float64 if k.dtype == torch.float64 else torch.float32
    total = torch.zeros(k.shape[:2], dtype=to, device=k.device)
    k, q = k.to(to), q.to(to) * scale
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        seen = m - n + stop
        logits = softcapped(q[:, :, start:stop] @ k[:, None, :seen].transpose(-1, -2), softcap)
        logits[..., m - n + start :].masked_fill_(~block_mask(0, stop - start, 0, k.device), -torch.inf)
        total[:, :seen] += logits.softmax(-1).sum(2).mean(1)
    return total


@functools.cache
def _library() -> ctypes.CDLL:
    lib = native.library()
    lib.skimkv_columns_check.argtypes, lib.skimkv_columns_check.restype = [POINTER(CColumns)], c_char_p
    lib.skimkv_columns_run.argtypes = [POINTER(CColumns), c_int, c_void_p]
    return lib


def fast(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """The same in C++ for float32, bfloat16 and float16 on the CPU."""
    _check(q, k)
    H, G, n, D = q.shape
    m, dtype = k.shape[1], native.DTYPES.get(k.dtype)
    if dtype is None or q.device.type != "cpu" or k.device.type != "cpu":
        raise ValueError(f"no CPU kernel for {k.dtype} on {q.device} and {k.device}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap = {softcap} must be positive")
    if not n:
        return torch.zeros(H, m)
    q, k = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k))
    threads, team = torch.get_num_threads(), native.parallel()
    parts = -(-threads // H) if team else 1
    sums = torch.empty(H, parts, m)
    op = CColumns(
        H, G, D, dtype, parts, scale, softcap or 0, n, m, q.data_ptr(), k.data_ptr(),
        *q.stride()[:3], *k.stride()[:2], sums.data_ptr(),
    )  # fmt: skip
    lib = _library()
    error: bytes | None = lib.skimkv_columns_check(op)
    if error is not None:
        raise ValueError(error.decode())
    if lib.skimkv_columns_run(op, threads if team else 1, team):
        raise MemoryError("no memory for the column sums of a prompt")
    return sums.sum(1)
