"""Dense causal attention of a block of new tokens over a store's history: the prompt, for every method."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..stores.base import Store

BLOCK = 512  # queries at a time where a mask is needed: memory stays O(BLOCK * N)


def block_mask(start: int, stop: int, history: int, device: torch.device) -> Tensor:
    """(stop-start, history+stop) bool: query i of the block sees the history and tokens 0..i."""
    i = torch.arange(start, stop, device=device)[:, None]
    return torch.arange(history + stop, device=device) <= history + i


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(logits / softcap), Gemma 2's bound on logits."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _rows(store: Store, rows: slice, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Rows of one length, without padding: q (b,H,G,n,D) · k, v (b,H,n,D) -> (b,H,G,n,D)."""
    G, n = q.shape[2:4]
    m = 0
    if store.lengths[rows.start]:
        past = store.history(rows)
        m = past[0].shape[2]
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    # one KV head a batch entry, its G query heads beside each other: K and V are expanded, never copied
    q1, k1, v1 = (t.expand(-1, -1, G, -1, -1).flatten(0, 1) for t in (q, k.unsqueeze(2), v.unsqueeze(2)))
    if m == 0 and softcap is None:
        return F.scaled_dot_product_attention(q1, k1, v1, is_causal=True, scale=scale).reshape(q.shape)
    out = []
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        mask = block_mask(start, stop, m, q.device)
        qb, kb, vb = q1[:, :, start:stop], k1[:, :, : m + stop], v1[:, :, : m + stop]
        if softcap is None:
            out.append(F.scaled_dot_product_attention(qb, kb, vb, attn_mask=mask, scale=scale))
        else:
            logits = softcapped(qb @ kb.transpose(-1, -2) * scale, softcap).masked_fill(~mask, -torch.inf)
            out.append(logits.softmax(-1, dtype=torch.float32).to(vb.dtype) @ vb)
    return torch.cat(out, 2).reshape(q.shape)


def causal(
    store: Store,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    pad: Sequence[int] | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(scale * q K^T) V over the store's tokens and, causally, the block's own; nothing is appended.

    q (B,H,G,n,D) · k, v (B,H,n,D), left padded by pad[b] -> (B,H,G,n,D); padding rows come out zero.
    """
    B = q.shape[0]
    if not pad or not any(pad):
        if len(set(store.lengths)) == 1:
            return _rows(store, slice(0, B), q, k, v, scale, softcap)
        pad = [0] * B
    y = torch.zeros_like(q)
    for b, p in enumerate(pad):
        row = slice(b, b + 1)
        if p < q.shape[3]:
            y[row, :, :, p:] = _rows(store, row, q[row, :, :, p:], k[row, :, p:], v[row, :, p:], scale, softcap)
    return y
