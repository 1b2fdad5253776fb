"""LM-Infinite (Han et al. 2023) as in SparQ appendix G; with initial=0 the "Local" baseline of H2O section 5.

With positions="cache" it is StreamingLLM (Xiao et al. 2023, arXiv 2309.17453, section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops import Kernels, SoftmaxOptions, Token
from ..stores.base import Shape
from ..stores.slots import Slots
from .base import Traffic, check_whole
from .slots import SlotMethod, needed

POSITIONS = ("text", "cache")


@dataclass(frozen=True, repr=False)
class LMInfinite(SlotMethod):
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
        check_whole("k", self.k, 1)
        check_whole("initial", self.initial, 0, self.k - 1)
        if self.positions not in POSITIONS:
            raise ValueError(f"positions = {self.positions!r} must be 'text' or 'cache'")

    def positions_used(self, n: int) -> int:
        """At most k + 1 with positions="cache", otherwise n + 1."""
        return min(n, self.k) + 1 if self.positions == "cache" else n + 1

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Slots:
        """An empty store of k slots, of which the first `initial` are never overwritten.

        With positions="cache" its `rotation` must be set before it drops a token; skimkv.Cache sets the model's.
        """
        moves = self.positions == "cache"
        return Slots(shape, dtype, device, self.k, fixed=self.initial, kv=self.kv, moves_fixed=moves)

    def step(self, store: Slots, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Attend to the kept tokens and to the current one, which then takes the slot of the oldest recent one.

        Rotary embeddings turn a key by its position and a query by its own, and their product depends on the difference
        only. So with positions="cache" the recent keys and the query stay as they are, at positions of the text, and
        the initial keys are turned on by the number of dropped tokens: each step anew from the keys as they came, so
        that no rounding adds up.
        """
        self._place_initial(store, token)
        return super().step(store, q, token, **softmax)

    def fused(
        self, kernels: Kernels, store: Slots, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]
    ) -> Tensor:
        """The same step by a backend's kernel, after PyTorch has turned the initial keys."""
        self._place_initial(store, token)
        return super().fused(kernels, store, q, token, **softmax)

    def _place_initial(self, store: Slots, token: Token | None) -> None:
        """Bring the initial keys to where positions="cache" wants them. Raises ValueError if the token does not fit."""
        k, v = needed(token)
        store.validate(k[:, :, None], v[:, :, None])
        store.move_fixed()

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype) -> Traffic:
        """Count 2kD + 2D elements, and with positions="cache" the initial keys that are kept or turned."""
        step = super().traffic(n, shape, dtype)
        if self.positions == "text":
            return step
        kept = 1 if n < self.initial else 0  # the key of a new initial token is written twice
        turned = 2 * self.initial if n > self.k else 0
        moved = Traffic.of(shape.B * shape.H, 0, *self.row_format(shape.D).traffic(kept + turned, dtype))
        return Traffic(step.elements + moved.elements, step.bytes + moved.bytes, step.paper)

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        """The bytes of at most k rows of K and V, and with positions="cache" of the initial keys as they came."""
        kept = min(self.initial, n) if self.positions == "cache" else 0
        return super().bound(n, shape, dtype) + self.row_format(shape.D).nbytes(shape.B * shape.H * kept, dtype)
