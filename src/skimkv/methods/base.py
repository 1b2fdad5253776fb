"""What is read or dropped. A method is a frozen dataclass whose fields are its hyperparameters.

Its repr is its spec: `parse(repr(method)) == method`; the command line, result files and Python share it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..stores import rows
from ..stores.base import Shape, Store


@dataclass(frozen=True)
class Traffic:
    """Scalars and bytes that one decode step of one layer reads and writes, for the whole batch.

    `paper` is the paper's own formula in elements. The current token's k and v are written, never fetched.
    """

    elements: int
    bytes: int
    paper: int

    @classmethod
    def of(cls, times: int, paper: int, *parts: tuple[int, float]) -> Traffic:
        """parts: (elements, bytes of each) per KV head; `times` KV heads in the batch; paper per KV head."""
        total = sum(math.ceil(n * times * size) for n, size in parts)
        return cls(sum(n for n, _ in parts) * times, total, paper * times)


def check(name: str, value: Any, low: int, high: int = 2**31 - 1) -> None:
    """ValueError unless value is an int from low to high."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} = {value!r} must be an integer of at least {low}")
    if value > high:
        raise ValueError(f"{name} = {value} must be at most {high}")


@dataclass(frozen=True, repr=False)
class Method:
    """One way to decode. Subclasses give `store`, `decode`, `traffic` and `bound`.

    kv: how the store holds K and V: None (in the model's type), "int8" or "int4" (rows.py).
    """

    kv: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        rows.check(self.kv)

    def form(self, D: int) -> rows.Rows:
        """Of the rows of K and V that the store holds."""
        return rows.Rows(D, self.kv)

    def __repr__(self) -> str:
        shown = []
        for item in sorted(dataclasses.fields(self), key=lambda f: f.kw_only is True):
            value = getattr(self, item.name)
            if item.default is dataclasses.MISSING or value != item.default:
                shown.append(f"{item.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Store:
        """The empty cache of one layer. Raises ValueError if the parameters do not fit the shape."""
        raise NotImplementedError

    def prefill(
        self,
        store: Store,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        pad: Sequence[int] | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Dense and causal over what the store holds and this block; then the block is appended.

        q (B,H,G,n,D) · k, v (B,H,n,D), the first pad[b] of row b padding -> (B,H,G,n,D).
        """
        store.check(k, v, pad)
        y = ops.causal(store, q, k, v, scale=scale, pad=pad, softcap=softcap)
        self.take(store, q, k, v, scale=scale, pad=pad, softcap=softcap)
        return y

    def take(
        self,
        store: Store,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        pad: Sequence[int] | None = None,
        softcap: float | None = None,
    ) -> None:
        """What `prefill` leaves in the store: the block, or what the method keeps of it. Shapes as there."""
        store.append(k, v, pad)

    def decode(
        self, store: Store, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None
    ) -> Tensor:
        """Append the current token, k and v (B,H,D), and attend with q (B,H,G,D) -> (B,H,G,D)."""
        raise NotImplementedError

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype) -> Traffic:
        """One step with n cached tokens besides the current one, in closed form."""
        raise NotImplementedError

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        """An upper bound of `store.nbytes` after n tokens."""
        raise NotImplementedError
