"""A block of new tokens, as a prompt is: its dense causal attention over a store, and how it enters the store."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..stores.base import Store, compute_dtype
from ..stores.full import Full
from .backends import select_backend
from .blocks import apply_softcap, block_mask, softmax_with_sinks
from .cpu import prompt_attention
from .cpu import run as cpu
from .key_scores import key_scores

BLOCK = 512  # queries at a time where a mask is needed, so that memory stays O(BLOCK * N)


def _attend_even_rows(
    store: Store,
    rows: slice,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    scores: list[Tensor] | None,
) -> Tensor:
    """`causal_attention` of rows of one length, without padding: q (b,H,G,n,D) · k, v (b,H,n,D) -> (b,H,G,n,D).

    The key scores (H,m) of each row are added to `scores`.
    """
    m = 0
    if store.lengths[rows.start]:
        past = store.history(rows)
        m = past[0].shape[2]
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    return attend_after(m, q, k, v, scale=scale, softcap=softcap, sinks=sinks, scores=scores)


def attend_after(
    m: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scores: list[Tensor] | None = None,
) -> Tensor:
    """Compute causal attention of n queries after m earlier tokens: q (b,H,G,n,D) · k, v (b,H,m+n,D) -> (b,H,G,n,D).

    By the CPU's library or PyTorch, whichever is faster here: PyTorch where a processor multiplies tiles of 16-bit
    numbers. sinks, scores: as of `causal_attention`.
    """
    if _attends_in_library(q, k, v, sinks):
        if scores is None:
            return prompt_attention.attend(q, k, v, scale=scale, softcap=softcap, sinks=sinks)
        y, received = prompt_attention.attend_and_score(q, k, v, scale=scale, softcap=softcap, sinks=sinks)
        scores += received
        return y
    if scores is not None:
        scores += [key_scores(*row, scale, softcap, sinks) for row in zip(q, k, strict=True)]
    return _attend_in_torch(q, k, v, m, scale, softcap, sinks)


def _attend_in_torch(
    q: Tensor, k: Tensor, v: Tensor, m: int, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Causal attention by PyTorch, of queries after m earlier tokens: q (b,H,G,n,D) · k, v (b,H,m+n,D)."""
    G, n = q.shape[2:4]
    if not n:
        return torch.empty_like(q)
    if scale <= 0:  # PyTorch's attention may take the root of a scale, and multiply by it what hides later tokens
        q, scale = (-q, -scale) if scale < 0 else (q * 0, 1.0)
    if not m and q.device.type == "cpu":
        k, v = k.contiguous(), v.contiguous()  # a model's rows of one head lie apart, and each is read many times
    # one KV head a batch entry, its G query heads beside each other: K and V are expanded, never copied
    q1, k1, v1 = (t.expand(-1, -1, G, -1, -1).flatten(0, 1) for t in (q, k.unsqueeze(2), v.unsqueeze(2)))
    if m == 0 and softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q1, k1, v1, is_causal=True, scale=scale).reshape(q.shape)
    if sinks is not None:
        sinks = sinks.repeat(q.shape[0], 1)[..., None]  # (b*H,G,1)
    out = []
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        mask = block_mask(start, stop, m, q.device)
        qb, kb, vb = q1[:, :, start:stop], k1[:, :, : m + stop], v1[:, :, : m + stop]
        if softcap is None and sinks is None:
            out.append(F.scaled_dot_product_attention(qb, kb, vb, attn_mask=mask, scale=scale))
        else:
            logits = apply_softcap(qb @ kb.transpose(-1, -2) * scale, softcap).masked_fill(~mask, -torch.inf)
            weights = softmax_with_sinks(logits.to(compute_dtype(logits.dtype)), sinks)
            out.append(weights.to(vb.dtype) @ vb)
    return torch.cat(out, 2).reshape(q.shape)


def _attends_in_library(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> bool:
    """Whether the CPU's library attends: where it is the backend, has a kernel, and is faster than PyTorch's."""
    if not prompt_attention.takes_prompt(q, k, v, sinks) or select_backend()[0] != "cpu":
        return False
    return prompt_attention.is_fast(q.dtype)


def causal_attention(
    store: Store,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    pad: Sequence[int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scores: list[Tensor] | None = None,
) -> Tensor:
    """Compute softmax(scale * q K^T) V over the cached tokens and, causally, those of the block; nothing is appended.

    q (B,H,G,n,D) · k, v (B,H,n,D), of which the first pad[b] of row b are padding · sinks (H,G) -> (B,H,G,n,D), zero
    at padding. scores: a list to which the key scores of every row are added, (H,m) of its m tokens, as of
    `ops.key_scores`; where the CPU's library attends, they come from the attention itself and cost little more.
    """
    B = q.shape[0]
    if not pad or not any(pad):
        if store.has_even_rows:
            return _attend_even_rows(store, slice(0, B), q, k, v, scale, softcap, sinks, scores)
        pad = [0] * B
    y = torch.zeros_like(q)
    for b, p in enumerate(pad):
        row = slice(b, b + 1)
        if p < q.shape[3]:
            y[row, :, :, p:] = _attend_even_rows(
                store, row, q[row, :, :, p:], k[row, :, p:], v[row, :, p:], scale, softcap, sinks, scores
            )
        elif scores is not None:
            scores.append(q.new_zeros(q.shape[1], 0))
    return y


def append_block(store: Store, k: Tensor, v: Tensor, pad: Sequence[int] | None = None) -> None:
    """Append a block of n tokens to a store, by the CPU's library where that is the backend and can: k, v (B,H,n,D).

    The first pad[b] tokens of row b are padding. The library counts no traffic, and passes no gradient on, so that
    `Store.append` does it where one is needed. Raises ValueError if shapes, types or padding do not fit.
    """
    needs_gradient = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad or store.requires_grad)
    is_on_cpu = all(device.type == "cpu" for device in (store.device, k.device, v.device))
    if is_on_cpu and not needs_gradient and cpu.appends_blocks(store) and select_backend()[0] == "cpu":
        assert isinstance(store, Full)
        cpu.append_block(store, k, v, pad)
    else:
        store.append(k, v, pad)
