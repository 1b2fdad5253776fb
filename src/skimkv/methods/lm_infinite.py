"""LM-Infinite (Han et al. 2023) as in SparQ appendix G; with initial=0 the "Local" baseline of H2O section 5."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..stores.base import Shape
from ..stores.slots import Slots
from .base import check_whole
from .slots import SlotMethod


@dataclass(frozen=True, repr=False)
class LMInfinite(SlotMethod):
    """The first `initial` tokens and the most recent k - initial, at their original positions.

    Reads 2kD + 2D elements.
    """

    initial: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("k", self.k, 1)
        check_whole("initial", self.initial, 0, self.k - 1)

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Slots:
        """An empty store of k slots, of which the first `initial` are never overwritten."""
        return Slots(shape, dtype, device, self.k, fixed=self.initial, kv=self.kv)
