"""Exact top-k: FlexGen's sparse attention (Sheng et al. 2023; SparQ appendix G) and SparQ's oracle (fig. 7a).

With mean_value it is SparQ's equation 6, which gives the mass of the values that were not read to their mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops import KernelStep, SoftmaxOptions, Token, kernel_step
from ..ops.blocks import attend_rows, choose_positions, take
from ..stores.base import Shape, compute_dtype
from ..stores.full import Full
from ..stores.mean_value import MeanValue
from .base import Method, Traffic, check_whole
from .sparq import covered_mass


@dataclass(frozen=True, repr=False)
class TopK(Method[Full]):
    """Exact scores over all positions, then the k best values, not renormalised. Reads ND + kD + 2D elements.

    oracle: an upper bound, not a method one could use: the selection is free, and the softmax is over the chosen
    positions. Reads 2kD + 2D elements.
    mean_value: add the mean of all values times the scores' mass that the k values do not have (SparQ eq. 6). It has no
    kernel.
    """

    k: int
    oracle: bool = False
    mean_value: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("k", self.k, 1)
        for name, value in (("oracle", self.oracle), ("mean_value", self.mean_value)):
            if not isinstance(value, bool):
                raise ValueError(f"{name} = {value!r} must be True or False")
        if self.oracle and self.mean_value:
            raise ValueError("mean_value = True belongs to exact scores; the oracle divides by the chosen mass instead")

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Full:
        """An empty store of every token, with the mean of the values if this setting uses it."""
        return Full(shape, dtype, device, mean=self.mean_value, kv=self.kv)

    def step(self, store: Full, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Rank by the softmax weights summed over the group, and attend to the k best and the current token."""
        if token is not None:
            store.append_token(*token)
        x = q.to(compute_dtype(store.dtype))
        keys = store.uncounted("k") if self.oracle else store.read_keys()
        _, weights = attend_rows(x, keys, keys, store.valid(), **softmax)
        index, valid = choose_positions(weights.sum(2), store.lengths, self.k, 0)
        if self.oracle:
            keys, values = store.read_keys(index, valid), store.read_values(index, valid)
            y, _ = attend_rows(x, keys, values, valid, **softmax)
            return y.masked_fill(weights[..., :1].isnan(), torch.nan).to(q.dtype)
        top = take(weights, index).masked_fill(~valid[:, :, None], 0)
        y = top @ store.read_values(index, valid)
        if self.mean_value:
            y = y + (1 - covered_mass(weights, index, valid, softmax.get("sinks"))) * store.read_mean()[:, :, None]
        return y.to(q.dtype)

    def kernel(self, store: Full) -> KernelStep | None:
        """The kernel of the same step; none gives mass to the mean value."""
        return None if self.mean_value else kernel_step("oracle" if self.oracle else "top_k", k=self.k)

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype) -> Traffic:
        """Count ND + kD + 2D elements, for the oracle 2kD + 2D; the mean value adds 2D in float32."""
        k = min(self.k, n)
        rows = 2 + (2 * k if self.oracle else n + k)
        mean = MeanValue.traffic(shape.D) if self.mean_value else []
        paper = rows * shape.D + sum(count for count, _ in mean)
        return Traffic.of(shape.B * shape.H, paper, *self.row_format(shape.D).traffic(rows, dtype), *mean)

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        """The bytes of K and V, 2ND elements per KV head, and of the mean value."""
        mean = MeanValue.nbytes(shape.D) if self.mean_value else 0
        return shape.B * shape.H * (self.row_format(shape.D).nbytes(2 * n, dtype) + mean)
