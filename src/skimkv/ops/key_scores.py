"""The softmax weight that each key of a prompt received: H2O's score, in O(block * m) memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ..stores.base import compute_dtype
from .backends import backend_for
from .blocks import apply_softcap, block_mask, softmax_with_sinks
from .cpu import key_scores as cpu

BLOCK = 128  # queries at a time


def key_scores(q: Tensor, k: Tensor, scale: float, softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
    """Sum the causal softmax weights over the queries, and average over the group: H2O alg. 1, accumulated score.

    q (H,G,n,D), the last n of the m positions · k (H,m,D) · sinks (H,G) -> (H,m) float32, or float64 for float64.
    In C++ where the backend is cpu. Raises ValueError if shapes or dtypes do not fit.
    """
    backend = backend_for(q.device, q.shape[-1])
    if backend is not None and backend.name == "cpu" and k.dtype != torch.float64:
        return cpu.key_scores(q, k, scale, softcap, sinks)
    return reference(q, k, scale, softcap, sinks)


def reference(q: Tensor, k: Tensor, scale: float, softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
    """Compute `key_scores` in PyTorch, block by block: nothing of size m * m ever exists."""
    cpu.check_shapes(q, k, sinks)
    n, m, to = q.shape[2], k.shape[1], compute_dtype(k.dtype)
    total = torch.zeros(k.shape[:2], dtype=to, device=k.device)
    k, q = k.to(to), q.to(to) * scale
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        seen = m - n + stop
        logits = apply_softcap(q[:, :, start:stop] @ k[:, None, :seen].transpose(-1, -2), softcap)
        logits[..., m - n + start :].masked_fill_(~block_mask(0, stop - start, 0, k.device), -torch.inf)
        weights = softmax_with_sinks(logits, None if sinks is None else sinks[..., None])
        total[:, :seen] += weights.sum(2).mean(1)
    return total
