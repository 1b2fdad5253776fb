"""LM-Infinite (Han et al. 2023) as in SparQ appendix G; with initial=0 the "Local" baseline of H2O section 5."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..stores.base import Shape, Store
from ..stores.slots import Slots
from .base import Method, Traffic, check


@dataclass(frozen=True, repr=False)
class LMInfinite(Method):
    """The first `initial` tokens and the most recent k - initial, at their original positions: 2kD + 2D elements."""

    k: int
    initial: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check("k", self.k, 1)
        check("initial", self.initial, 0, self.k - 1)

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Slots:
        return Slots(shape, dtype, device, self.k, fixed=self.initial, kv=self.kv)

    def decode(
        self, store: Store, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None
    ) -> Tensor:
        return ops.slots(store, q, k, v, scale, softcap)

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype) -> Traffic:
        rows = self.form(shape.D).parts(2 * min(self.k, n) + 2, dtype)
        return Traffic.of(shape.B * shape.H, 2 * self.k * shape.D + 2 * shape.D, *rows)

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        return self.form(shape.D).nbytes(shape.B * shape.H * 2 * min(self.k, n), dtype)
