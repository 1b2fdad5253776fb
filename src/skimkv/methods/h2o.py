"""H2O: the heavy-hitter oracle (Zhang et al., NeurIPS 2023, arXiv 2306.14048), algorithm 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import Self, Unpack

from .. import ops
from ..ops import KernelStep, SoftmaxOptions, Token
from ..stores.base import Shape, compute_dtype
from ..stores.slots import Slots
from .base import Traffic, check_whole
from .slots import ChoosingMethod, attend_slots, best, check_budget, needed
from .sparse_transformer import fixed, strided

SCORES = ("sum", "mean")
RECENT, STRIDED, FIXED, TOP = PATTERNS = ("recent", "strided", "fixed", "top")

Rank = Callable[[Tensor, Tensor, int], Tensor]
Protect = Callable[[int, Tensor, Tensor, int], Tensor]


@dataclass(frozen=True, repr=False)
class H2O(ChoosingMethod):
    """Keep the tokens that were attended to most and the most recent ones; the rest is dropped for good.

    k: the budget, of which `local` tokens are the most recent (None: k//4, as in SparQ appendix G). Floats are
    fractions of the prompt (then local None is half of k, as in the H2O paper). A score is the accumulated softmax
    weight, averaged over the group, prompt included; after every step each KV head drops the lowest score outside the
    recent window. Positions stay the original ones. Moves 2kD + 2D elements and 2N of scores by the paper; here only
    the k kept scores exist: 2k are read and written, k positions are read, and one of each is written.
    score: "sum" is algorithm 1. "mean" is the attempt of appendix B.2 to favour old tokens less: the accumulated weight
    is divided by the number of queries that gave it, which are those from the token's own on. It has no kernel.
    pattern: what the `local` tokens are. "recent" is algorithm 1. With "strided" and "fixed" they are the Sparse
    Transformer's patterns (section 5, table 1; see `Strided` and `Fixed`), and with "top" those that the last query
    attended to most (appendix C.3, table 8). The paper does not say how these share a budget with the heavy hitters:
    here local None is half of k for them, the even split that it uses for the recent tokens. They have no kernel.
    """

    local: int | float | None = None
    score: str = "sum"
    pattern: str = RECENT

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.local, float):
            check_budget("local", self.local)
        for name, value, known in (("score", self.score, SCORES), ("pattern", self.pattern, PATTERNS)):
            if value not in known:
                raise ValueError(f"{name} = {value!r} must be one of {', '.join(known)}")
        if isinstance(self.k, float):
            if self.local is not None and (not isinstance(self.local, float) or self.local > self.k):
                raise ValueError(f"local = {self.local!r} must be a fraction of at most k = {self.k}")
        elif self.local is not None:
            check_whole("local", self.local, 0 if self.pattern == RECENT else 1, self.k)

    def recent(self, budget: int) -> int:
        """Give local in tokens, for a budget in tokens."""
        if isinstance(self.k, int):
            default = self.k // 4 if self.pattern == RECENT else max(1, self.k // 2)
            return default if self.local is None else int(self.local)
        share = 0.5 if self.local is None else self.local / self.k
        return min(budget, math.ceil(round(share * budget, 6)))

    def in_tokens(self, budget: int) -> Self:
        """The method with both k and local in tokens."""
        return replace(self, k=budget, local=self.recent(budget))

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Slots:
        """An empty store of scored slots; `take` sets their number."""
        return Slots(shape, dtype, device, self.budget(1), scored=True, kv=self.kv)

    def attend_and_take(
        self,
        store: Slots,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        pad: Sequence[int] | None,
        **softmax: Unpack[SoftmaxOptions],
    ) -> Tensor:
        """Attend, and take by what the keys received in it; quantised keys are scored afterwards, as they are kept."""
        if self.kv is not None:
            return super().attend_and_take(store, q, k, v, pad=pad, **softmax)
        scores: list[Tensor] = []
        y = ops.causal_attention(store, q, k, v, pad=pad, scores=scores, **softmax)
        self.keep_chosen(store, q, k, v, pad, scores, **softmax)
        return y

    def choose(
        self,
        store: Slots,
        b: int,
        q: Tensor,
        keys: Tensor,
        seen: int,
        scores: Tensor | None,
        **softmax: Unpack[SoftmaxOptions],
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Add the weights of the block's queries to the scores, and keep the best within the budget."""
        _, _, kept_score, kept_pos = store.stored(b)
        new_pos = torch.arange(store.lengths[b], seen, dtype=torch.int32, device=keys.device)
        pos = torch.cat([kept_pos, new_pos.expand(store.shape.H, -1)], 1)
        score = (ops.key_scores(q, keys, **softmax) if scores is None else scores).float()
        score[:, : kept_score.shape[1]] += kept_score
        last = ops.key_scores(q[:, :, -1:], keys, **softmax) if self.pattern == TOP else score
        protected = self._protected(self.recent(store.budget[b]), pos, last, seen)
        rank = self._rank(score, pos, seen).masked_fill(protected, torch.inf)
        return best(rank, pos, min(store.budget[b], rank.shape[1])), (score, pos)

    def step(self, store: Slots, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Algorithm 1, one iteration: attend, add the weights to the scores, and evict one token if the budget is
        full.
        """
        recent = [self.recent(budget) for budget in store.budget]
        return attend_score_evict(store, q, needed(token), recent, self._rank, self._protected, **softmax)

    def kernel(self, store: Slots) -> KernelStep | None:
        """The kernel of the same step, which ranks by sums and keeps recent tokens; other settings have none."""
        if self.score != "sum" or self.pattern != RECENT:
            return None
        return KernelStep("scored_slots", recent=tuple(map(self.recent, store.budget)))

    def _rank(self, score: Tensor, pos: Tensor, seen: int) -> Tensor:
        """What a token is kept for, by its accumulated weight and its position, after `seen` tokens. All (H,m)."""
        return score if self.score == "sum" else score / (seen - pos)

    def _protected(self, local: int, pos: Tensor, weight: Tensor, seen: int) -> Tensor:
        """Which tokens are never evicted, by their positions and the last query's weights, after `seen` tokens: (H,m).

        A pattern has one token more after another, and loses at most one of those before: none is missing.
        """
        if self.pattern == RECENT:
            return pos >= seen - local
        if self.pattern == TOP:
            most = min(local, pos.shape[-1] - 1)  # one must go
            return torch.zeros_like(pos, dtype=torch.bool).scatter(-1, best(weight, pos, most), True)
        block = max(1, local // 2)
        order = strided(local, block) if self.pattern == STRIDED else fixed(local, block, max(1, block // 16))
        return torch.isin(pos, torch.tensor(order.kept(seen), dtype=pos.dtype, device=pos.device))

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype) -> Traffic:
        """Count 2kD + 2D elements and the scores.

        For a fractional budget, n is also taken as the length of the prompt; `as_in` gives the method after it.
        """
        k, D = self.budget(n), shape.D
        kept = min(k, n)
        scores = 2 * kept + (kept if kept == k else 0) + 2
        paper = 2 * k * D + 2 * D + 2 * n
        return Traffic.of(shape.B * shape.H, paper, *self.row_format(D).traffic(2 * kept + 2, dtype), (scores, 4))

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        """The bytes of at most k rows of K and V, with their scores and positions."""
        return super().bound(n, shape, dtype) + 8 * shape.B * shape.H * min(self.budget(n), n)


def attend_score_evict(
    store: Slots,
    q: Tensor,
    token: Token,
    recent: Sequence[int],
    rank: Rank,
    protect: Protect,
    **softmax: Unpack[SoftmaxOptions],
) -> Tensor:
    """One iteration of algorithm 1, where recent[b] tokens of row b are never evicted: the latest, or by `protect`.

    rank: the token with the least rank(scores, positions, tokens seen) is evicted; of (H,C) and (H,C) it gives (H,C).
    protect: which are never evicted, by (recent[b], positions, the last query's weights, tokens seen), all (H,C).
    q (B,H,G,D) -> (B,H,G,D) in q's dtype. Reads 2kD elements of K and V, and moves the scores.
    """
    y, weights = attend_slots(store, q.to(compute_dtype(store.dtype)), token, **softmax)
    weights = weights.mean(2)  # (B,H,C'+1), the current token last
    store.add_scores(weights[..., :-1])
    slot, keep = victims(store, weights, recent, rank, protect)
    store.put(slot, keep, *token, weights[..., -1])
    return y.to(q.dtype)


def victims(
    store: Slots, weights: Tensor, recent: Sequence[int], rank: Rank, protect: Protect
) -> tuple[Tensor, Tensor | None]:
    """The slot (B,H) that the current token takes: a free one, or that of the lowest rank that is not protected.

    Of equal ranks the older token goes. Scores that differ by less than 2^-20 relative to each other may be equal on
    one backend and not on another, because their sums are rounded.

    weights (B,H,C'+1): what the current query gave, to the current token last. Without a recent window, the token that
    algorithm 1 drops from S and i may be the current token i itself: then the slot keeps what it has (second result,
    (B,H) bool).
    """
    assert store.score is not None
    slot = torch.empty(weights.shape[:2], dtype=torch.int64, device=weights.device)
    keep: Tensor | None = None
    for b, now in enumerate(store.lengths):
        if store.filled[b] < store.budget[b]:
            slot[b] = store.filled[b]
            continue
        m = store.filled[b]
        pos, score = store.read_positions(b)[:, :m], store.score[b][:, :m]
        protected = protect(recent[b], pos, weights[b][:, :m], now + 1)
        score = rank(score, pos, now + 1).masked_fill(protected, torch.inf)
        lowest = score.amin(-1)
        oldest = pos.masked_fill(protected | (score > lowest[:, None]), torch.iinfo(pos.dtype).max)
        slot[b] = oldest.argmin(-1)
        if recent[b] == 0:
            keep = torch.zeros_like(slot, dtype=torch.bool) if keep is None else keep
            keep[b] = weights[b, :, -1] < lowest
    return slot, keep
