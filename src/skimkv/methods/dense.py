"""Dense attention: the baseline that reads everything."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..stores.base import Shape, Store
from ..stores.full import Full
from .base import Method, Traffic


@dataclass(frozen=True, repr=False)
class Dense(Method):
    """softmax(q K^T / sqrt(D)) V over all positions. Reads 2ND + 2D elements (SparQ eq. 3)."""

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Full:
        return Full(shape, dtype, device, kv=self.kv)

    def decode(
        self, store: Store, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None
    ) -> Tensor:
        return ops.dense(store, q, scale, softcap, (k, v))

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype) -> Traffic:
        rows = 2 * n + 2
        return Traffic.of(shape.B * shape.H, rows * shape.D, *self.form(shape.D).parts(rows, dtype))

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        return self.form(shape.D).nbytes(shape.B * shape.H * 2 * n, dtype)
