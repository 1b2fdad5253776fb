"""Exact top-k: FlexGen's sparse attention (Sheng et al. 2023; SparQ appendix G) and SparQ's oracle (fig. 7a)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops import Kernels, SoftmaxOptions, Token
from ..ops.blocks import attend_rows, choose_positions, take
from ..stores.base import Shape, compute_dtype
from ..stores.full import Full
from .base import Method, Traffic, check_whole


@dataclass(frozen=True, repr=False)
class TopK(Method[Full]):
    """Exact scores over all positions, then the k best values, not renormalised. Reads ND + kD + 2D elements.

    oracle: an upper bound, not a method one could use: the selection is free, and the softmax is over the chosen
    positions. Reads 2kD + 2D elements.
    """

    k: int
    oracle: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("k", self.k, 1)
        if not isinstance(self.oracle, bool):
            raise ValueError(f"oracle = {self.oracle!r} must be True or False")

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Full:
        """An empty store of every token."""
        return Full(shape, dtype, device, kv=self.kv)

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
        return (top @ store.read_values(index, valid)).to(q.dtype)

    def fused(
        self, kernels: Kernels, store: Full, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]
    ) -> Tensor:
        """The same step by a backend's kernel."""
        return kernels.top_k(store, q, token, k=self.k, oracle=self.oracle, **softmax)

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype) -> Traffic:
        """Count ND + kD + 2D elements; for the oracle 2kD + 2D."""
        k = min(self.k, n)
        rows = 2 + (2 * k if self.oracle else n + k)
        return Traffic.of(shape.B * shape.H, rows * shape.D, *self.row_format(shape.D).traffic(rows, dtype))

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        """The bytes of K and V: 2ND elements per KV head."""
        return self.row_format(shape.D).nbytes(shape.B * shape.H * 2 * n, dtype)
