"""SubGen (Zandieh, Han, Mirrokni, Karbasi 2024, arXiv 2402.06082): cluster the keys, sample by the values.

The paper has two forms: algorithm 1, a stream with error bounds (theorem 1), and the greedy k-centre selection
with a recent window that its experiments run (section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops import SoftmaxOptions, Token
from ..ops.hashing import hash_words
from ..stores.base import Shape, compute_dtype
from ..stores.clusters import Clusters
from ..stores.slots import Slots
from .base import Method, Traffic, check_whole
from .slots import SlotMethod


def k_centres(x: Tensor, k: int) -> Tensor:
    """Greedy k-centre (Dyer and Frieze): the first point, then ever the farthest from those chosen.

    x (H,m,D), k <= m -> indices (H,k); at most twice the optimal radius.
    """
    x = x.detach().to(compute_dtype(x.dtype))
    x = x - x.nan_to_num(0, 0, 0).mean(1, keepdim=True)  # small norms: |x - c|^2 below is a difference of products
    norm = x.square().sum(-1)
    x, norm = x.nan_to_num(0, 0, 0), norm.nan_to_num(torch.inf, torch.inf)  # not finite: far from all
    transposed = x.transpose(1, 2).contiguous()  # (H,D,m)
    head = torch.arange(x.shape[0], device=x.device)
    chosen = torch.zeros(k, x.shape[0], dtype=torch.int64, device=x.device)
    distance = torch.full_like(norm, torch.inf)
    for i in range(1, k):
        last = chosen[i - 1]
        there = (
            torch.baddbmm(norm[:, None], x[head, last][:, None], transposed, alpha=-2)[:, 0] + norm[head, last, None]
        )
        torch.minimum(distance, there.clamp_min_(0), out=distance)
        distance[head, last] = -1  # never twice, equal points or not
        chosen[i] = distance.argmax(-1)
    return chosen.T


@dataclass(frozen=True, repr=False)
class SubGen(SlotMethod):
    """Keep k centres of the keys, chosen once after the prompt, and the `recent` last tokens. Reads 2(k + recent)D +
    2D.

    A prompt shorter than the budget keeps everything; its first k tokens are then the centres. A later prompt block is
    clustered anew together with the centres that the store has.
    """

    recent: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("k", self.k, 1)
        check_whole("recent", self.recent, 1)

    def slots(self, prompt: int) -> int:
        """The centres and the recent tokens, for a prompt of any length."""
        return self.budget(prompt) + self.recent

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Slots:
        """An empty store of k + recent slots, of which the first k are never overwritten."""
        k = self.budget(1)
        return Slots(shape, dtype, device, k + self.recent, fixed=k, kv=self.kv)

    def take(
        self,
        store: Slots,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        pad: Sequence[int] | None = None,
        **softmax: Unpack[SoftmaxOptions],
    ) -> None:
        """Choose k centres of the keys that the store has and those of the block, and keep the most recent tokens."""
        pads, centres = store.validate(k, v, pad), store.fixed
        store.reserve()
        for b, p in enumerate(pads):
            keys, values = self._in_order_of_time(store, b, k[b, :, p:], v[b, :, p:])
            seen = store.lengths[b] + k.shape[2] - p
            if seen <= store.capacity:
                index = torch.arange(seen, device=k.device).expand(store.shape.H, -1)
            else:
                m = keys.shape[1]
                # the ring slot of token t is fixed + (t - fixed) % recent: put the last `recent` in that order
                ring = sorted(range(seen - self.recent, seen), key=lambda t: store.slot_of(t, store.capacity))
                last = torch.tensor([t - seen + m for t in ring], device=k.device).expand(store.shape.H, -1)
                candidates = store.row_format.decode(keys[:, : m - self.recent], k.dtype)
                index = torch.cat([k_centres(candidates, centres), last], 1)
            store.replace(b, index, (keys, values), seen)

    def _in_order_of_time(self, store: Slots, b: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stored rows of what row b keeps and of the block: the centres, the ring, oldest first, and the new tokens."""
        c, n, centres = store.filled[b], store.lengths[b], store.fixed
        order = list(range(min(c, centres)))
        order += [store.slot_of(t, store.capacity) for t in range(max(centres, n - self.recent), n)]
        keys, values = store.stored(b, order)
        return torch.cat([keys, store.row_format.encode(k)], 1), torch.cat([values, store.row_format.encode(v)], 1)


@dataclass(frozen=True, repr=False)
class SubGenStream(Method[Clusters]):
    """Algorithm 1: clusters of keys of radius `delta`, t samples of each, and s samples of (k, v) by |v|^2.

    y = z / tau estimates dense attention; theorem 1 bounds the error for t = Omega(e^(2 delta |q|) log n / eps^2)
    and s = Omega(D / eps^2). q carries the 1/sqrt(D). The current token is sampled like any other.
    A prompt's first block is dense; a later block is decoded token by token, because no history is kept.
    """

    delta: float
    t: int
    s: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kv is not None:
            raise ValueError(f"SubGenStream keeps samples and no rows to quantise: kv = {self.kv!r} must be None")
        number = isinstance(self.delta, int | float) and not isinstance(self.delta, bool)
        if not (number and 0 <= self.delta < math.inf):
            raise ValueError(f"delta = {self.delta!r} must be a finite number of at least 0")
        check_whole("t", self.t, 1)
        check_whole("s", self.s, 1)
        check_whole("seed", self.seed, 0)

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Clusters:
        """An empty store of clusters."""
        return Clusters(shape, dtype, device, float(self.delta), self.t, self.s, self.seed, update_data_structure)

    def attend_and_take(
        self,
        store: Clusters,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        pad: Sequence[int] | None,
        **softmax: Unpack[SoftmaxOptions],
    ) -> Tensor:
        """Dense causal attention of the first block; later blocks are decoded token by token.

        Raises ValueError if a later block is padded, because no history is kept, or if logits are capped.
        """
        refuse_softcap(softmax.get("softcap"))
        if not any(store.lengths):
            return super().attend_and_take(store, q, k, v, pad=pad, **softmax)
        if pad is not None and any(pad):
            raise ValueError("SubGenStream keeps no history: padding cannot follow the first block of a prompt")
        steps = [self.step(store, q[..., i, :], Token(k[:, :, i], v[:, :, i]), **softmax) for i in range(k.shape[2])]
        return torch.stack(steps, 3)

    def step(self, store: Clusters, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """QueryStreamAttn: y = z / tau, with exp() kept in range by the common maximum. Reads O(D(mt + s)) elements.

        z = sum over M of mu / (s |v|^2) exp(<q,k>) v, and tau = sum over clusters of n_i / t times the sum over S_i of
        exp(<q,k>), and of exp(sink). Where no S_i has the keys that dominate z, y has no bound; it stops at +-2^63
        (float16: 65504), to stay finite.
        """
        scale, sinks = softmax["scale"], softmax.get("sinks")
        refuse_softcap(softmax.get("softcap"))
        if token is not None:
            store.append_token(*token)
        samples, size, k, v = store.read()
        x = q.to(k.dtype) * scale
        B, H, G, _ = x.shape
        normaliser = (x @ samples.flatten(2, 3).transpose(-1, -2)).reshape(B, H, G, *samples.shape[2:4])
        normaliser = normaliser.masked_fill((size == 0)[:, :, None, :, None], -torch.inf)
        norm = v.double().square().sum(-1)
        product = (x @ k.transpose(-1, -2)).masked_fill((norm == 0)[:, :, None], -torch.inf)  # (B,H,G,s); 0: empty
        weight = torch.where(norm > 0, store.mu[..., None] / (store.s * norm), 0).to(x.dtype)  # (B,H,s)
        top = torch.maximum(normaliser.flatten(3).amax(-1), product.amax(-1))  # (B,H,G)
        if sinks is not None:
            top = torch.maximum(top, sinks.to(top.dtype))
        top = top[..., None]
        z = ((product - top).exp() * weight[:, :, None]) @ v
        tau = ((normaliser - top[..., None]).exp().sum(-1) * size[:, :, None]).sum(-1, keepdim=True) / store.t
        if sinks is not None:
            tau = tau + (sinks[..., None] - top).exp()
        limit = min(2.0**63, torch.finfo(q.dtype).max)
        return (z / tau.clamp_min(torch.finfo(tau.dtype).tiny)).clamp(-limit, limit).to(q.dtype)

    def traffic(
        self,
        n: int,
        shape: Shape,
        dtype: torch.dtype,
        clusters: int | None = None,
        accepted_rows: int | None = None,
    ) -> Traffic:
        """Count O(D(mt + s)) elements, as this code moves them.

        clusters: how many there are after the step, over all heads and rows; None: the worst case, n + 1 each.
        accepted_rows: rows of D numbers that the step writes into samples and the reservoir; None: the number
        expected of keys that join a cluster in proportion to its size and values of equal norms, (t m + 2 s) / (n +
        1) per head.
        """
        D, heads = shape.D, shape.B * shape.H
        m = heads * (n + 1) if clusters is None else clusters
        if accepted_rows is None:
            accepted_rows = math.ceil((self.t * m + 2 * self.s * heads) / (n + 1))
        cache = m * (1 + self.t) * D + (2 * self.s * heads + accepted_rows) * D
        paper = D * (m * self.t + heads * self.s)
        return Traffic.of(1, paper, (cache, dtype.itemsize), (m + heads, 4), (2 * heads, 8))

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        """The bytes of one cluster a token, the reservoir, mu and m."""
        heads, size = shape.B * shape.H, dtype.itemsize
        return heads * (n * ((1 + self.t) * shape.D * size + 4) + 2 * self.s * shape.D * size + 16)


TOKENS = 256  # of a block that enter the clusters at once


def update_data_structure(store: Clusters, rows: slice, start: int, k: Tensor, v: Tensor) -> None:
    """Let tokens start, start+1, ... of these rows enter the store, in blocks: k, v (b,H,n,D)."""
    for a in range(0, k.shape[2], TOKENS):
        block_k, block_v = k[:, :, a : a + TOKENS], v[:, :, a : a + TOKENS]
        update_softmax_normalizer(store, rows, start + a, block_k)
        update_matrix_product(store, rows, start + a, block_k, block_v)


def update_softmax_normalizer(store: Clusters, rows: slice, start: int, k: Tensor) -> None:
    """UpdateSoftmaxNormalizer for a block of n tokens, k (b,H,n,D); equal to taking them one by one.

    A key within delta of a representative joins the nearest one's cluster; otherwise it founds a cluster. In a cluster
    that has now n_i members, the key becomes each of the t samples with probability 1/n_i.
    """
    n, H = k.shape[2], k.shape[1]
    x, m = k.to(compute_dtype(store.dtype)), store.m[rows]
    exact = "donot_use_mm_for_euclid_dist"
    store.reserve_clusters(1)
    reps = (block.rep[rows].to(x.dtype) for block in store.blocks)
    old = torch.cat([torch.cdist(x, rep, compute_mode=exact) for rep in reps], -1)
    old = old.masked_fill(torch.arange(old.shape[-1], device=k.device) >= m[..., None, None], torch.inf)
    new = torch.cdist(x, x, compute_mode=exact)  # (b,H,n,n)
    far, near = ~(old <= store.delta).any(-1), new <= store.delta
    founds = torch.zeros_like(far)
    for j in range(n):
        founds[..., j] = far[..., j] & ~(near[..., j, :j] & founds[..., :j]).any(-1)
    number = m[..., None] + founds.cumsum(-1) - 1
    store.reserve_clusters(int(number.max()) + 1)
    before = torch.ones(n, n, dtype=torch.bool, device=k.device).tril()  # [i, j]: j <= i
    new = new.masked_fill(~(before & founds[..., None, :]), torch.inf)
    nearest = torch.cat([old, new], -1).nan_to_num(torch.inf).argmin(-1)
    M = old.shape[-1]
    founder = number.gather(-1, (nearest - M).clamp_min(0))
    cluster = torch.where(founds, number, torch.where(nearest < M, nearest, founder))
    same = cluster[..., :, None] == cluster[..., None, :]  # (b,H,n,n)
    members = store.uncounted("size")[rows].long().gather(-1, cluster) + (same & before).sum(-1)
    accepted = coins(store.seed, 0, start, H, n, store.t, k.device) < 1 / members.double()[..., None]  # (b,H,n,t)
    later = (same & ~before).to(x.dtype) @ accepted.to(x.dtype)
    store.assign(rows, k, cluster, founds, accepted, accepted & (later == 0))


def update_matrix_product(store: Clusters, rows: slice, start: int, k: Tensor, v: Tensor) -> None:
    """UpdateMatrixProduct for a block of n tokens, k, v (b,H,n,D); equal to taking them one by one.

    Each of the s pairs becomes (k, v) with probability |v|^2 / (mu + |v|^2), and mu grows by |v|^2.
    """
    n, H = k.shape[2], k.shape[1]
    norm = v.double().square().sum(-1)
    mu = torch.cat([store.mu[rows][..., None], norm], -1).cumsum(-1)[..., 1:]  # (b,H,n), added in order of time
    p = torch.where(mu > 0, norm / mu, 0)
    accepted = coins(store.seed, 1, start, H, n, store.s, k.device) < p[..., None]  # (b,H,n,s)
    store.resample(rows, k, v, accepted, mu[..., -1])


def founding_keys(near: Tensor) -> Tensor:
    """Which keys found a cluster in algorithm 1: those that no earlier founder is near. Needs at most n rounds.

    near (n,n) bool: whether two keys are within delta of each other; a key that is not finite is near none. -> (n,)
    bool.
    """
    covered, founds = (torch.zeros(len(near), dtype=torch.bool, device=near.device) for _ in range(2))
    while not bool(covered.all()):
        i = int(covered.int().argmin())
        founds[i] = covered[i] = True
        covered |= near[i]
    return founds


def count_founders(k: Tensor, delta: float) -> int:
    """How many of the keys (n,D) found a cluster of radius delta in algorithm 1.

    Distances are computed as differences of products, and never between all pairs of keys at once.
    """
    founders = k[:0]
    for block in k.split(TOKENS):
        far = block[~(torch.cdist(block, founders) <= delta).any(-1)]
        founders = torch.cat([founders, far[founding_keys(torch.cdist(far, far) <= delta)]])
    return len(founders)


def coins(seed: int, stream: int, start: int, H: int, n: int, slots: int, device: torch.device) -> Tensor:
    """Draw (H,n,slots) uniform float64 in [0,1), a function of (seed, stream, token, head, slot) and of nothing else.

    So a replay, a padded batch and another batch size flip the same coins.
    """
    token = torch.arange(start, start + n, device=device)[None, :, None]
    head = torch.arange(H, device=device)[:, None, None]
    words = hash_words(seed, stream, token, head, torch.arange(slots, device=device))
    return words.double() / 2**32


def refuse_softcap(softcap: float | None) -> None:
    """Raise ValueError if logits are capped: the estimate is of exp(<q,k>)."""
    if softcap is not None:
        raise ValueError(f"SubGenStream estimates exp(<q,k>) and cannot cap logits at {softcap}")
