"""The oracle: every decode step in readable PyTorch, float32 (float64 in, float64 out), any device.

`token`, the current k and v (B,H,D), is appended first; None: it has been already. It is position lengths[b]-1 of row
b, always attended, never counted as fetched. `k` counts positions besides it. A NaN logit makes its head's output NaN,
as it does in dense attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..stores.base import Store, compute_dtype
from ..stores.clusters import Clusters
from ..stores.full import Full
from ..stores.slots import Slots
from .prefill import softcapped

Token = tuple[Tensor, Tensor]


def unavailable() -> str | None:
    """The reference is always there."""
    return None


def append(store: Store, k: Tensor, v: Tensor) -> None:
    """One token per row: k, v (B,H,D)."""
    store.append(k[:, :, None], v[:, :, None])


def _first(store: Store, token: Token | None) -> None:
    if token is not None:
        append(store, *token)


def top_channels(q: Tensor, r: int) -> Tensor:
    """i1: the r channels with the largest sum over the group of |q| (SparQ sec. 4). q (B,H,G,D) -> (B,H,r)."""
    return q.abs().sum(2).topk(r, -1).indices.sort(-1).values


def temperature_scale(q: Tensor, index: Tensor, scale: float, temperature: str) -> Tensor:
    """1/tau per query head (B,H,G,1). SparQ eq. 9: tau = sqrt(D |q[i1]|_1 / |q|_1), scale being 1/sqrt(D).

    A head without any of |q| in i1 has logits of 0 at every temperature; its tau is sqrt(D).
    """
    D, r = q.shape[-1], index.shape[-1]
    if temperature == "coverage":
        chosen = q.abs().gather(-1, index[:, :, None].expand(-1, -1, q.shape[2], -1)).sum(-1, keepdim=True)
        coverage = chosen / q.abs().sum(-1, keepdim=True)
        return scale / torch.where(chosen > 0, coverage, 1).sqrt()
    return torch.full_like(q[..., :1], scale if temperature == "sqrt_d" else scale * (D / r) ** 0.5)


def choose(score: Tensor, lengths: list[int], k: int, local: int) -> tuple[Tensor, Tensor]:
    """The current token, the `local` before it, and the largest scores: k besides the current.

    score (B,H,N) -> index (B,H,m) and held (B,H,m), False where a short row has fewer than m tokens.
    """
    last = torch.tensor(lengths, device=score.device)[:, None, None] - 1
    position = torch.arange(score.shape[-1], device=score.device)
    rank = score.masked_fill((position >= last - local) & (position <= last), torch.inf)
    rank = rank.masked_fill(position > last, -torch.inf)
    index = rank.topk(min(k + 1, score.shape[-1]), -1).indices
    return index, index <= last


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, held: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Softmax over rows: q (B,H,G,D) · k, v (B,H,m,D) · held (B,1|H,m) -> y (B,H,G,D), weights (B,H,G,m)."""
    logits = softcapped(q @ k.transpose(-1, -2) * scale, softcap).masked_fill(~held[:, :, None], -torch.inf)
    weights = logits.softmax(-1)
    return weights @ v, weights


def dense(store: Full, q: Tensor, scale: float, softcap: float | None, token: Token | None = None) -> Tensor:
    """SparQ eq. 2 over all positions. Reads 2ND elements per KV head."""
    _first(store, token)
    x = q.to(compute_dtype(store.dtype))
    return attend_rows(x, store.rows("k"), store.rows("v"), store.mask(), scale, softcap)[0].to(q.dtype)


def sparq(
    store: Full,
    q: Tensor,
    scale: float,
    softcap: float | None,
    r: int,
    k: int,
    local: int,
    temperature: str,
    mean: bool,
    token: Token | None = None,
) -> Tensor:
    """SparQ alg. 1, grouped as in sec. 4. Reads Nr + 2kD elements per KV head, and v_mean."""
    _first(store, token)
    x = q.to(compute_dtype(store.dtype))
    i1 = top_channels(x, r)
    queries = x.gather(-1, i1[:, :, None].expand(-1, -1, x.shape[2], -1))
    logits = queries @ store.columns(i1) * temperature_scale(x, i1, scale, temperature)
    s_hat = softcapped(logits, softcap).masked_fill(~store.mask()[:, :, None], -torch.inf).softmax(-1)
    return _chosen(store, x, s_hat, scale, softcap, k, local, mean).to(q.dtype)


def lowrank(store: Full, q: Tensor, scale: float, softcap: float | None, k: int, token: Token | None = None) -> Tensor:
    """Scores from a fixed random projection of K (SparQ fig. 7a), then the k best rows. Reads Nr + 2kD."""
    _first(store, token)
    x = q.to(compute_dtype(store.dtype))
    assert store.projection is not None
    P = store.projection.to(x.dtype)  # (H,D,r)
    store.count(P.numel(), 4)
    every = torch.arange(store.R, device=q.device).expand(*q.shape[:2], -1)
    logits = (x @ P) @ store.columns(every) * scale
    s_hat = softcapped(logits, softcap).masked_fill(~store.mask()[:, :, None], -torch.inf).softmax(-1)
    return _chosen(store, x, s_hat, scale, softcap, k, 0, False).to(q.dtype)


def _chosen(
    store: Full, q: Tensor, s_hat: Tensor, scale: float, softcap: float | None, k: int, local: int, mean: bool
) -> Tensor:
    """Steps 2 and 3 of SparQ: attend to the chosen rows; alpha y + (1 - alpha) v_mean."""
    index, held = choose(s_hat.sum(2), store.lengths, k, local)
    y, _ = attend_rows(q, store.rows("k", index, held), store.rows("v", index, held), held, scale, softcap)
    mass = s_hat.gather(-1, index[:, :, None].expand(-1, -1, q.shape[2], -1))
    alpha = mass.masked_fill(~held[:, :, None], 0).sum(-1, keepdim=True).clamp(max=1)
    if mean:
        return alpha * y + (1 - alpha) * store.mean()[:, :, None]
    return y.masked_fill(alpha.isnan(), torch.nan)


def topk(
    store: Full, q: Tensor, scale: float, softcap: float | None, k: int, oracle: bool, token: Token | None = None
) -> Tensor:
    """FlexGen: exact scores over all N, then the k best values, not renormalised. Reads ND + kD.

    oracle: the selection is free and the softmax is over the chosen (SparQ fig. 7a). Reads 2kD.
    """
    _first(store, token)
    x = q.to(compute_dtype(store.dtype))
    keys = store.whole("k") if oracle else store.rows("k")
    _, weights = attend_rows(x, keys, keys, store.mask(), scale, softcap)
    index, held = choose(weights.sum(2), store.lengths, k, 0)
    if oracle:
        y, _ = attend_rows(x, store.rows("k", index, held), store.rows("v", index, held), held, scale, softcap)
        return y.masked_fill(weights[..., :1].isnan(), torch.nan).to(q.dtype)
    top = weights.gather(-1, index[:, :, None].expand(-1, -1, x.shape[2], -1)).masked_fill(~held[:, :, None], 0)
    return (top @ store.rows("v", index, held)).to(q.dtype)


def slots(
    store: Slots,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None,
    recent: Sequence[int] | None = None,
) -> Tensor:
    """Attend to the slots in use and the current token k, v (B,H,D), then put it into its slot. Reads 2CD.

    Scored stores: the weights, averaged over the group, are added to store.score, C read and written; where row b's
    budget is full, the token takes the slot of the lowest score outside the recent[b] latest positions (H2O alg. 1).
    """
    store.check(k[:, :, None], v[:, :, None])
    store.reserve(store.capacity)
    x = q.to(compute_dtype(store.dtype))
    keys, values = store.rows()
    k1, v1 = store.form.encode(k), store.form.encode(v)  # the current token is attended as it will be held
    keys, values = (
        torch.cat([t, store.form.decode(new, x.dtype)[:, :, None]], 2) for t, new in ((keys, k1), (values, v1))
    )
    held = torch.cat([store.mask(), store.mask().new_ones(len(store.filled), 1, 1)], 2)
    y, weights = attend_rows(x, keys, values, held, scale, softcap)
    if store.score is None:
        append(store, k, v)
        return y.to(q.dtype)
    if recent is None or len(recent) != len(store.lengths):
        raise ValueError(f"recent = {recent} must be {len(store.lengths)} numbers where slots are scored")
    w = weights.mean(2)
    store.score[:, :, : w.shape[-1] - 1] += w[..., :-1]
    store.count(2 * sum(store.filled) * store.shape.H, 4)
    _evict(store, k1, v1, w[..., -1], recent)
    return y.to(q.dtype)


def _evict(store: Slots, k: Tensor, v: Tensor, weight: Tensor, recent: Sequence[int]) -> None:
    """The current token, encoded, which received `weight` (B,H), into a free slot or that of the heads' victims."""
    assert store.score is not None and store.pos is not None
    slot = torch.empty(k.shape[:2], dtype=torch.int64, device=k.device)
    lost: Tensor | None = None
    for b, now in enumerate(store.lengths):
        if store.filled[b] < store.budget[b]:
            slot[b] = store.filled[b]
            store.filled[b] += 1
        else:
            safe = (store.pos[b] > now - recent[b]) | (store.pos[b] < 0)
            lowest, slot[b] = store.score[b].masked_fill(safe, torch.inf).min(-1)
            if recent[b] == 0:  # algorithm 1 drops one of S and i, here perhaps the current token i itself
                lost = torch.zeros_like(slot, dtype=torch.bool) if lost is None else lost
                lost[b] = weight[b] < lowest
            store.count(store.budget[b] * store.shape.H, 4)
    position = torch.tensor(store.lengths, dtype=torch.int32, device=k.device)[:, None].expand_as(slot)
    store.write(slot, lost, k, v, weight.to(store.score.dtype), position)
    store.lengths = [n + 1 for n in store.lengths]


def stream(store: Clusters, q: Tensor, scale: float, token: Token | None = None) -> Tensor:
    """SubGen alg. 1, QueryStreamAttn: y = z / tau, exp() kept in range by the common maximum. Reads O(D(mt + s)).

    z = sum over M of mu / (s |v|^2) exp(<q,k>) v ; tau = sum over clusters of n_i / t sum over S_i of exp(<q,k>).
    Where no S_i holds the keys that dominate z, y has no bound; it stops at +-2^63 (float16: 65504), to stay finite.
    """
    _first(store, token)
    samples, size, k, v = store.read()
    x = q.to(k.dtype) * scale
    B, H, G, _ = x.shape
    normaliser = (x @ samples.flatten(2, 3).transpose(-1, -2)).reshape(B, H, G, *samples.shape[2:4])
    normaliser = normaliser.masked_fill((size == 0)[:, :, None, :, None], -torch.inf)
    norm = v.double().square().sum(-1)
    product = (x @ k.transpose(-1, -2)).masked_fill((norm == 0)[:, :, None], -torch.inf)  # (B,H,G,s); 0: M is empty
    weight = torch.where(norm > 0, store.mu[..., None] / (store.s * norm), 0).to(x.dtype)  # (B,H,s)
    top = torch.maximum(normaliser.flatten(3).amax(-1), product.amax(-1))[..., None]  # (B,H,G,1)
    z = ((product - top).exp() * weight[:, :, None]) @ v
    tau = ((normaliser - top[..., None]).exp().sum(-1) * size[:, :, None]).sum(-1, keepdim=True) / store.t
    limit = min(2.0**63, torch.finfo(q.dtype).max)
    return (z / tau.clamp_min(torch.finfo(tau.dtype).tiny)).clamp(-limit, limit).to(q.dtype)
