"""LM-Infinite (Han et al. 2023) as in SparQ appendix G; with initial=0 the "Local" baseline of H2O section 5.

With positions counted in the cache it is StreamingLLM (Xiao et al. 2023, arXiv 2309.17453, section 3.2).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import ops
from ..ops import Token
from ..stores.base import Shape
from ..stores.slots import Slots
from .base import Traffic
from .slots import SlotMethod, check_at_most

POSITIONS = ("text", "cache")


class FirstAndRecent(SlotMethod):
    """The first tokens and the most recent ones, k in all: the algorithm of LMInfinite and StreamingLLM."""

    @property
    @abc.abstractmethod
    def first(self) -> int:
        """How many of the first tokens are kept."""

    @property
    @abc.abstractmethod
    def counts_in_cache(self) -> bool:
        """Whether positions are counted in the cache, and not in the text."""

    @property
    def least(self) -> int:
        """The least number of tokens with which the method works: the first ones and another."""
        return self.first + 1

    def positions_used(self, n: int) -> int:
        """How many of the model's positions a step uses: k + 1 at most if they are counted in the cache, else n + 1."""
        return min(n, self.budget(n)) + 1 if self.counts_in_cache else n + 1

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Slots:
        """An empty store of k slots, of which the first ones are never overwritten.

        Where positions are counted in the cache, its `rotation` must be set before it drops a token; skimkv.Cache sets
        the model's.
        """
        return Slots(
            shape, dtype, device, self.budget(1), fixed=self.first, kv=self.kv, moves_fixed=self.counts_in_cache,
            budget_of=self.budget_of,
        )  # fmt: skip

    def prepare(self, stores: Sequence[Slots], token: Token | None = None) -> None:
        """Bring the first keys to their positions in the cache, where positions are counted there.

        Rotary embeddings turn a key by its position and a query by its own, and their product depends on the difference
        only. So the recent keys and the query stay as they are, at positions of the text, and the first keys are turned
        on by the number of dropped tokens: each step anew from the keys as they came, so that no rounding adds up.
        """
        if self.counts_in_cache:
            if token is not None:
                stores[0].validate(token.k[:, :, None], token.v[:, :, None])
            ops.move_fixed(stores)

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype) -> Traffic:
        """Count 2kD + 2D elements, and with positions in the cache the first keys that are kept or turned."""
        step = super().traffic(n, shape, dtype)
        if not self.counts_in_cache:
            return step
        kept = 1 if n < self.first else 0  # the key of a new first token is written twice
        turned = 2 * self.first if n > self.budget(n) else 0
        moved = Traffic.of(shape.B * shape.H, 0, *self.row_format(shape.D).traffic(kept + turned, dtype))
        return Traffic(step.elements + moved.elements, step.bytes + moved.bytes, step.paper)

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        """The bytes of at most k rows of K and V, and with positions in the cache of the first keys as they came."""
        kept = min(self.first, n) if self.counts_in_cache else 0
        return super().bound(n, shape, dtype) + self.row_format(shape.D).nbytes(shape.B * shape.H * kept, dtype)


@dataclass(frozen=True, repr=False)
class LMInfinite(FirstAndRecent):
    """The first `initial` tokens and the most recent k - initial.

    positions: "text" leaves every key at the position that its token has in the text. "cache" counts positions in the
    cache, where the recent tokens follow the initial ones without a gap: no distance is larger than k, so a model with
    rotary position embeddings decodes texts of any length.

    Reads 2kD + 2D elements; with positions="cache" it reads and writes another 2·initial·D once it drops tokens.
    """

    initial: int = 16
    positions: str = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_most("initial", self.initial, 0, self.k, 1)
        if self.positions not in POSITIONS:
            raise ValueError(f"positions = {self.positions!r} must be 'text' or 'cache'")

    @property
    def first(self) -> int:
        """How many of the first tokens are kept."""
        return self.initial

    @property
    def counts_in_cache(self) -> bool:
        """Whether positions are counted in the cache, and not in the text."""
        return self.positions == "cache"
