"""The running mean of all values, for methods that give it the weight of what they do not read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Part, Shape

MOST_FORGOTTEN = 100  # times the sum of the values that stay: more costs the mean more than two of its seven digits


@dataclass(frozen=True, eq=False)
class MeanValue(Part):
    """The mean of V over the tokens of each row: value (B,H,D) float32, 0 before the first token."""

    value: Tensor

    @classmethod
    def empty(cls, shape: Shape, device: torch.device) -> MeanValue:
        """The mean of a store that has no token yet."""
        return cls(torch.zeros(shape.B, shape.H, shape.D, dtype=torch.float32, device=device))

    def append(self, rows: slice, start: int, v: Tensor) -> int:
        """Take values v (b,H,n,D) after `start` others. Returns how many numbers were read and written."""
        mean, n = self.value[rows], v.shape[2]
        if n:
            mean += (v.float().sum(2) - n * mean) / (start + n)
        return 2 * mean.numel() if n else 0

    def forget(self, row: slice, n: int, v: Tensor, first: Callable[[], Tensor]) -> None:
        """Forget all but the first n values of a row, of which v (1,H,m,D) are the others.

        first: gives those n values (1,H,n,D). They are read only where the others are so large, or not finite, that
        little would be left of the mean's digits without them.
        """
        others = v.float()
        kept = self.value[row] * (n + v.shape[2]) - others.sum(2)
        is_exact = bool((MOST_FORGOTTEN * kept.norm(dim=-1) > others.abs().sum(2).norm(dim=-1)).all())
        self.value[row] = 0 if not n else kept / n if is_exact else first().float().mean(2)

    @staticmethod
    def traffic(D: int) -> list[tuple[int, float]]:
        """What a step reads and writes of it per KV head: pairs of a number of scalars and the bytes of each."""
        return [(2 * D, 4)]

    @staticmethod
    def nbytes(D: int) -> int:
        """The bytes of it per KV head and row."""
        return 4 * D
