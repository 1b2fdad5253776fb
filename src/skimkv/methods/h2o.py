"""H2O: the heavy-hitter oracle (Zhang et al., NeurIPS 2023, arXiv 2306.14048), algorithm 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from .. import ops
from ..ops import Kernels, SoftmaxOptions, Token
from ..stores.base import Shape, compute_dtype
from ..stores.slots import Slots
from .base import Method, Traffic, check_whole
from .slots import attend_slots, best, budget_in_tokens, check_budget, needed

SCORES = ("sum", "mean")


@dataclass(frozen=True, repr=False)
class H2O(Method[Slots]):
    """Keep the tokens that were attended to most and the most recent ones; the rest is dropped for good.

    k: the budget, of which `local` tokens are the most recent (None: k//4, as in SparQ appendix G). Floats are
    fractions of the prompt (then local None is half of k, as in the H2O paper). A score is the accumulated softmax
    weight, averaged over the group, prompt included; after every step each KV head drops the lowest score outside the
    recent window. Positions stay the original ones. Moves 2kD + 2D elements and 2N of scores by the paper; here only
    the k kept scores exist: 2k are read and written, k positions are read, and one of each is written.
    score: "sum" is algorithm 1. "mean" is the attempt of appendix B.2 to favour old tokens less: the accumulated weight
    is divided by the number of queries that gave it, which are those from the token's own on. It has no kernel.
    """

    k: int | float
    local: int | float | None = None
    score: str = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget("k", self.k)
        if isinstance(self.local, float):
            check_budget("local", self.local)
        if self.score not in SCORES:
            raise ValueError(f"score = {self.score!r} must be one of {', '.join(SCORES)}")
        if isinstance(self.k, float):
            if self.local is not None and (not isinstance(self.local, float) or self.local > self.k):
                raise ValueError(f"local = {self.local!r} must be a fraction of at most k = {self.k}")
        elif self.local is not None:
            check_whole("local", self.local, 0, self.k)

    def budget(self, prompt: int) -> int:
        """Give k in tokens, for a prompt of so many tokens."""
        return budget_in_tokens(self.k, prompt)

    def recent(self, budget: int) -> int:
        """Give local in tokens, for a budget of so many tokens."""
        if isinstance(self.k, int):
            return self.k // 4 if self.local is None else int(self.local)
        share = 0.5 if self.local is None else self.local / self.k
        return min(budget, math.ceil(round(share * budget, 6)))

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Slots:
        """An empty store of scored slots; `take` sets their number."""
        return Slots(shape, dtype, device, self.budget(1), scored=True, kv=self.kv)

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
        """Score the kept tokens and the block by the block's attention, and keep the best within the budget."""
        n, pads = k.shape[2], store.validate(k, v, pad)
        seen = [length + n - p for length, p in zip(store.lengths, pads, strict=True)]
        store.set_budget([self.budget(length) for length in seen])
        for b, p in enumerate(pads):
            kept_k, kept_v, kept_score, kept_pos = store.stored(b)
            new_pos = torch.arange(store.lengths[b], seen[b], dtype=torch.int32, device=k.device)
            keys = torch.cat([kept_k, store.row_format.encode(k[b, :, p:])], 1)
            values = torch.cat([kept_v, store.row_format.encode(v[b, :, p:])], 1)
            pos = torch.cat([kept_pos, new_pos.expand(store.shape.H, -1)], 1)
            score = ops.key_scores(q[b, :, :, p:], store.row_format.decode(keys, k.dtype), **softmax).float()
            score[:, : kept_score.shape[1]] += kept_score
            is_recent = pos >= seen[b] - self.recent(store.budget[b])
            rank = self._rank(score, pos, seen[b]).masked_fill(is_recent, torch.inf)
            chosen = best(rank, pos, min(store.budget[b], rank.shape[1]))
            store.replace(b, chosen, (keys, values, score, pos), seen[b])

    def step(self, store: Slots, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Algorithm 1, one iteration: attend, add the weights to the scores, and evict one token if the budget is
        full.
        """
        recent = [self.recent(budget) for budget in store.budget]
        return attend_score_evict(store, q, needed(token), recent, self._rank, **softmax)

    def fused(
        self, kernels: Kernels, store: Slots, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]
    ) -> Tensor:
        """The same step by a backend's kernel."""
        assert self.score == "sum"
        recent = [self.recent(budget) for budget in store.budget]
        return kernels.scored_slots(store, q, needed(token), recent=recent, **softmax)

    def uses_kernel(self, backend: str | None = None) -> bool:
        """Whether this setting has a kernel, in this backend or in any: kernels rank by sums."""
        return self.score == "sum" and super().uses_kernel(backend)

    def _rank(self, score: Tensor, pos: Tensor, seen: int) -> Tensor:
        """What a token is kept for, by its accumulated weight and its position, after `seen` tokens. All (H,m)."""
        return score if self.score == "sum" else score / (seen - pos)

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype) -> Traffic:
        """Count 2kD + 2D elements and the scores. For a fractional budget, n is also taken as the length of the
        prompt.
        """
        k, D = self.budget(n), shape.D
        kept = min(k, n)
        scores = 2 * kept + (kept if kept == k else 0) + 2
        paper = 2 * k * D + 2 * D + 2 * n
        return Traffic.of(shape.B * shape.H, paper, *self.row_format(D).traffic(2 * kept + 2, dtype), (scores, 4))

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        """The bytes of at most k rows of K and V, with their scores and positions."""
        kept = shape.B * shape.H * min(self.budget(n), n)
        return self.row_format(shape.D).nbytes(2 * kept, dtype) + 8 * kept


def attend_score_evict(
    store: Slots,
    q: Tensor,
    token: Token,
    recent: Sequence[int],
    rank: Callable[[Tensor, Tensor, int], Tensor] = lambda score, pos, seen: score,
    **softmax: Unpack[SoftmaxOptions],
) -> Tensor:
    """One iteration of algorithm 1, where the recent[b] latest tokens of row b are never evicted.

    rank: the token with the least rank(scores, positions, tokens seen) is evicted; of (H,C) and (H,C) it gives (H,C).
    q (B,H,G,D) -> (B,H,G,D) in q's dtype. Reads 2kD elements of K and V, and moves the scores.
    """
    y, weights = attend_slots(store, q.to(compute_dtype(store.dtype)), token, **softmax)
    weights = weights.mean(2)  # (B,H,C'+1), the current token last
    store.add_scores(weights[..., :-1])
    slot, keep = victims(store, weights[..., -1], recent, rank)
    store.put(slot, keep, *token, weights[..., -1])
    return y.to(q.dtype)


def victims(
    store: Slots, weight: Tensor, recent: Sequence[int], rank: Callable[[Tensor, Tensor, int], Tensor]
) -> tuple[Tensor, Tensor | None]:
    """The slot (B,H) that the current token takes: a free one, or that of the lowest rank that is not recent.

    Of equal ranks the older token goes. Scores that differ by less than 2^-20 relative to each other may be equal on
    one backend and not on another, because their sums are rounded.

    weight (B,H): what the current token received. Without a recent window, the token that algorithm 1 drops from S
    and i may be the current token i itself: then the slot keeps what it has (second result, (B,H) bool).
    """
    assert store.score is not None
    slot = torch.empty(weight.shape, dtype=torch.int64, device=weight.device)
    keep: Tensor | None = None
    for b, now in enumerate(store.lengths):
        if store.filled[b] < store.budget[b]:
            slot[b] = store.filled[b]
            continue
        pos = store.read_positions(b)
        protected = (pos > now - recent[b]) | (pos < 0)
        score = rank(store.score[b], pos, now + 1).masked_fill(protected, torch.inf)
        lowest = score.amin(-1)
        oldest = pos.masked_fill(protected | (score > lowest[:, None]), torch.iinfo(pos.dtype).max)
        slot[b] = oldest.argmin(-1)
        if recent[b] == 0:
            keep = torch.zeros_like(slot, dtype=torch.bool) if keep is None else keep
            keep[b] = weight[b] < lowest
    return slot, keep
