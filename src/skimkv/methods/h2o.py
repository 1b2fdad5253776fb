"""H2O: the heavy-hitter oracle (Zhang et al., NeurIPS 2023, arXiv 2306.14048), algorithm 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..stores.base import Shape, Store
from ..stores.slots import Slots
from .base import Method, Traffic, check


@dataclass(frozen=True, repr=False)
class H2O(Method):
    """Keep the tokens that were attended to most, and the most recent; the rest is dropped for good.

    k: the budget, of which `local` are the most recent (None: k//4 as in SparQ appendix G). Floats are fractions
    of the prompt (local None: half of k, as in the H2O paper). A score is the accumulated softmax weight, mean
    over the group, prompt included; after every step each KV head drops its lowest outside the recent window.
    2kD + 2D elements and 2N of scores by the paper; here only the k kept scores exist: 2k read and written,
    k positions read, one of each written.
    """

    k: int | float
    local: int | float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("k", self.k), ("local", self.local)):
            if isinstance(value, float) and not 0 < value <= 1:
                raise ValueError(f"{name} = {value} must be a fraction from 0 to 1, or a whole number of tokens")
        if isinstance(self.k, float):
            if self.local is not None and (not isinstance(self.local, float) or self.local > self.k):
                raise ValueError(f"local = {self.local!r} must be a fraction of at most k = {self.k}")
        else:
            check("k", self.k, 1)
            if self.local is not None:
                check("local", self.local, 0, self.k)

    def budget(self, prompt: int) -> int:
        """k in tokens."""
        return max(1, math.ceil(round(self.k * prompt, 6))) if isinstance(self.k, float) else self.k  # 0.07 of 100: 7

    def recent(self, budget: int) -> int:
        """local in tokens."""
        if isinstance(self.k, int):
            return self.k // 4 if self.local is None else int(self.local)
        share = 0.5 if self.local is None else self.local / self.k
        return min(budget, math.ceil(round(share * budget, 6)))

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Slots:
        return Slots(shape, dtype, device, self.budget(1), scored=True, kv=self.kv)

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
        n, pads = k.shape[2], store.check(k, v, pad)
        seen = [length + n - p for length, p in zip(store.lengths, pads, strict=True)]
        store.budget = [self.budget(length) for length in seen]
        store.reserve(max(store.capacity, *store.budget))
        assert store.score is not None and store.pos is not None
        for b, p in enumerate(pads):
            old, c = store.lengths[b], store.filled[b]
            block = (store.form.encode(x[b, :, p:]) for x in (k, v))
            keys, values = (torch.cat([t[b, :, :c], x], 1) for t, x in zip((store.k, store.v), block, strict=True))
            new = torch.arange(old, seen[b], dtype=torch.int32, device=k.device).expand(store.shape.H, -1)
            pos = torch.cat([store.pos[b, :, :c], new], 1)
            score = ops.columns(q[b, :, :, p:], store.form.decode(keys, k.dtype), scale, softcap).float()
            score[:, :c] += store.score[b, :, :c]
            rank = score.masked_fill(pos >= seen[b] - self.recent(store.budget[b]), torch.inf)
            kept = rank.topk(min(store.budget[b], rank.shape[1]), -1).indices.sort(-1).values
            store.keep(b, kept, keys, values, score, pos)
        store.lengths = seen

    def decode(
        self, store: Store, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None
    ) -> Tensor:
        assert isinstance(store, Slots)
        return ops.slots(store, q, k, v, scale, softcap, [self.recent(budget) for budget in store.budget])

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype) -> Traffic:
        """For a fractional budget n is also taken as the prompt."""
        k, D = self.budget(n), shape.D
        held = min(k, n)
        scores = 2 * held + (held if held == k else 0) + 2
        paper = 2 * k * D + 2 * D + 2 * n
        return Traffic.of(shape.B * shape.H, paper, *self.form(D).parts(2 * held + 2, dtype), (scores, 4))

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        held = shape.B * shape.H * min(self.budget(n), n)
        return self.form(shape.D).nbytes(2 * held, dtype) + 8 * held
