"""Dense attention: the baseline that reads everything."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..full import Full
from ..method import Method, Traffic
from ..store import Shape, Store


@dataclass(frozen=True, repr=False)
class Dense(Method):
    """softmax(q K^T / sqrt(D)) V over all positions. Reads 2ND + 2D elements (SparQ eq. 3)."""

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Full:
        return Full(shape, dtype, device)

    def decode(
        self, store: Store, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None
    ) -> Tensor:
        return ops.dense(store, q, scale, softcap, (k, v))

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype) -> Traffic:
        total = 2 * n * shape.D + 2 * shape.D
        return Traffic.of(shape.B * shape.H, total, (total, dtype.itemsize))

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        return shape.B * shape.H * 2 * n * shape.D * dtype.itemsize
