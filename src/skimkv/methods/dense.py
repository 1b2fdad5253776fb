"""Dense attention: the baseline that reads everything."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops import KernelStep, SoftmaxOptions, Token, kernel_step
from ..ops.blocks import attend_rows
from ..stores.base import Shape, compute_dtype
from ..stores.full import Full
from .base import Method, Traffic


@dataclass(frozen=True, repr=False)
class Dense(Method[Full]):
    """Attention over all positions, softmax(q K^T / sqrt(D)) V. Reads 2ND + 2D elements (SparQ eq. 3)."""

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Full:
        """An empty store of every token."""
        return Full(shape, dtype, device, kv=self.kv)

    def step(self, store: Full, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """SparQ eq. 2 over all positions."""
        if token is not None:
            store.append_token(*token)
        x = q.to(compute_dtype(store.dtype))
        y, _ = attend_rows(x, store.read_keys(), store.read_values(), store.valid(), **softmax)
        return y.to(q.dtype)

    def kernel(self, store: Full) -> KernelStep:
        """The kernel of the same step."""
        return kernel_step("dense")

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype) -> Traffic:
        """Count 2ND + 2D elements (SparQ eq. 3)."""
        rows = 2 * n + 2
        return Traffic.of(shape.B * shape.H, rows * shape.D, *self.row_format(shape.D).traffic(rows, dtype))

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        """The bytes of K and V: 2ND elements per KV head."""
        return self.row_format(shape.D).nbytes(shape.B * shape.H * 2 * n, dtype)
