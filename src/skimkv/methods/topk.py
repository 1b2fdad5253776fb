"""Exact top-k: FlexGen's sparse attention (Sheng et al. 2023; SparQ appendix G) and SparQ's oracle (fig. 7a)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..stores.base import Shape, Store
from .base import Traffic, check
from .dense import Dense


@dataclass(frozen=True, repr=False)
class TopK(Dense):
    """Exact scores, then the k best values, not renormalised: ND + kD + 2D elements.

    oracle: an upper bound, not a method: the selection is free, the softmax is over the chosen: 2kD + 2D.
    """

    k: int
    oracle: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check("k", self.k, 1)
        if not isinstance(self.oracle, bool):
            raise ValueError(f"oracle = {self.oracle!r} must be True or False")

    def decode(
        self, store: Store, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None
    ) -> Tensor:
        return ops.topk(store, q, scale, softcap, self.k, self.oracle, (k, v))

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype) -> Traffic:
        k = min(self.k, n)
        rows = 2 + (2 * k if self.oracle else n + k)
        return Traffic.of(shape.B * shape.H, rows * shape.D, *self.form(shape.D).parts(rows, dtype))
