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

from .. import ops
from ..stores.base import Shape, Store, compute_dtype
from ..stores.clusters import Clusters
from ..stores.slots import Slots
from .base import Method, Traffic, check
from .lm_infinite import LMInfinite


def k_centres(x: Tensor, k: int) -> Tensor:
    """Greedy k-centre (Dyer and Frieze): the first point, then ever the farthest from those chosen.

    x (H,m,D), k <= m -> indices (H,k); at most twice the optimal radius.
    """
    x = x.to(compute_dtype(x.dtype))
    x = x - x.nan_to_num(0, 0, 0).mean(1, keepdim=True)  # small norms: |x - c|^2 below is a difference of products
    norm = x.square().sum(-1)
    x, norm = x.nan_to_num(0, 0, 0), norm.nan_to_num(torch.inf, torch.inf)  # not finite: far from all
    columns = x.transpose(1, 2).contiguous()  # (H,D,m)
    head = torch.arange(x.shape[0], device=x.device)
    chosen = torch.zeros(k, x.shape[0], dtype=torch.int64, device=x.device)
    distance = torch.full_like(norm, torch.inf)
    for i in range(1, k):
        last = chosen[i - 1]
        there = torch.baddbmm(norm[:, None], x[head, last][:, None], columns, alpha=-2)[:, 0] + norm[head, last, None]
        torch.minimum(distance, there.clamp_min_(0), out=distance)
        distance[head, last] = -1  # never twice, equal points or not
        chosen[i] = distance.argmax(-1)
    return chosen.T


@dataclass(frozen=True, repr=False)
class SubGen(Method):
    """k centres of the keys, chosen once after the prompt, and the `recent` last tokens: 2(k + recent)D + 2D.

    A prompt shorter than the budget keeps everything; its first k tokens are then the centres. A later prompt
    block is clustered anew with the centres that are held.
    """

    k: int
    recent: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check("k", self.k, 1)
        check("recent", self.recent, 1)

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Slots:
        return Slots(shape, dtype, device, self.k + self.recent, fixed=self.k, kv=self.kv)

    def take(
        self,
        store: Store,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        pad: Sequence[int] | None = None,
        softcap: float | None = None,
    ) -> None:
        assert isinstance(store, Slots)
        pads = store.check(k, v, pad)
        store.reserve(store.capacity)
        for b, p in enumerate(pads):
            keys, values = self._ordered(store, b, k[b, :, p:], v[b, :, p:])
            seen = store.lengths[b] + k.shape[2] - p
            if seen <= store.capacity:
                index = torch.arange(seen, device=k.device).expand(store.shape.H, -1)
            else:
                m = keys.shape[1]
                # ring slot of token t is fixed + (t - fixed) % recent: the last `recent` in that order
                ring = sorted(range(seen - self.recent, seen), key=store.ring_slot)
                last = torch.tensor([t - seen + m for t in ring], device=k.device).expand(store.shape.H, -1)
                known = store.form.decode(keys[:, : m - self.recent], k.dtype)
                index = torch.cat([k_centres(known, self.k), last], 1)
            store.keep(b, index, keys, values)
            store.lengths[b] = seen

    def decode(
        self, store: Store, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None
    ) -> Tensor:
        return ops.slots(store, q, k, v, scale, softcap)

    def _ordered(self, store: Slots, b: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What row b holds, oldest first, then the block, as held: the centres, the ring in order of time, the new."""
        k, v = store.form.encode(k), store.form.encode(v)
        c, n = store.filled[b], store.lengths[b]
        order = list(range(min(c, self.k))) + [store.ring_slot(t) for t in range(max(self.k, n - self.recent), n)]
        return torch.cat([store.k[b, :, order], k], 1), torch.cat([store.v[b, :, order], v], 1)

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype) -> Traffic:
        return LMInfinite(self.k + self.recent, 0, kv=self.kv).traffic(n, shape, dtype)

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        return LMInfinite(self.k + self.recent, 0, kv=self.kv).bound(n, shape, dtype)


@dataclass(frozen=True, repr=False)
class SubGenStream(Method):
    """Algorithm 1 whole: clusters of keys within `delta`, t samples of each, s samples of (k, v) by |v|^2.

    y = z / tau estimates dense attention; theorem 1 bounds the error for t = Omega(e^(2 delta |q|) log n / eps^2)
    and s = Omega(D / eps^2). q carries the 1/sqrt(D). The current token is sampled like any other.
    A prompt block is dense; a block that follows it is decoded token by token, for no history is held.
    """

    delta: float
    t: int
    s: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kv is not None:
            raise ValueError(f"SubGenStream holds samples, of which none is coded: kv = {self.kv!r} must be None")
        number = isinstance(self.delta, int | float) and not isinstance(self.delta, bool)
        if not (number and 0 <= self.delta < math.inf):
            raise ValueError(f"delta = {self.delta!r} must be a finite number of at least 0")
        check("t", self.t, 1)
        check("s", self.s, 1)
        check("seed", self.seed, 0)

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Clusters:
        return Clusters(shape, dtype, device, float(self.delta), self.t, self.s, self.seed)

    def prefill(
        self,
        store: Store,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        pad: Sequence[int] | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        if not any(store.lengths):
            return super().prefill(store, q, k, v, scale=scale, pad=pad, softcap=softcap)
        if pad is not None and any(pad):
            raise ValueError("SubGenStream holds no history: padding cannot follow the first block of a prompt")
        steps = [
            self.decode(store, q[..., i, :], k[:, :, i], v[:, :, i], scale=scale, softcap=softcap)
            for i in range(k.shape[2])
        ]
        return torch.stack(steps, 3)

    def decode(
        self, store: Store, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None
    ) -> Tensor:
        if softcap is not None:
            raise ValueError(f"SubGenStream estimates exp(<q,k>) and cannot cap logits at {softcap}")
        return ops.stream(store, q, scale, (k, v))

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype, clusters: int | None = None) -> Traffic:
        """`clusters`: how many there are after the step, over all heads and rows; None: the worst case, n + 1 each."""
        D, heads = shape.D, shape.B * shape.H
        m = heads * (n + 1) if clusters is None else clusters
        cache = m * (1 + self.t) * D + heads * (self.t * D + 4 * self.s * D)
        paper = D * (m * self.t + heads * self.s)
        return Traffic.of(1, paper, (cache, dtype.itemsize), (m + heads, 4), (2 * heads, 8))

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        heads, size = shape.B * shape.H, dtype.itemsize
        return heads * (n * ((1 + self.t) * shape.D * size + 4) + 2 * self.s * shape.D * size + 16)
