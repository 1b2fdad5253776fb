"""What bytes exist. A store is one layer's cache; three kinds hold all methods.

Letters used everywhere: B batch, H KV heads, G query heads per KV head, N cached tokens, D head size,
R index channels, C slots. Rows are left-aligned and ragged: padding never enters a store, so row b of the
batch holds its real tokens at positions 0 .. lengths[b]-1.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .rows import Rows


class Shape(NamedTuple):
    """Batch, KV heads, query heads per KV head, head size."""

    B: int
    H: int
    G: int
    D: int


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays (the oracle of the tests), everything else is computed in float32."""
    return dtype if dtype == torch.float64 else torch.float32


def _map(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Apply fn to every tensor of a (nested) store; each has the batch in front."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, list):
        return [_map(item, fn) for item in value]
    if isinstance(value, Part):
        clone = copy.copy(value)
        for name, item in vars(clone).items():
            setattr(clone, name, item if name in value.batchless else _map(item, fn))
        return clone
    return value


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    items = vars(value).values() if isinstance(value, Part) else value if isinstance(value, list) else ()
    for item in items:
        found += [item] if isinstance(item, Tensor) else _tensors(item)
    return found


class Part:
    """Anything whose tensors `_map` walks: a store or a piece of one."""

    batchless: frozenset[str] = frozenset()  # tensors without a batch dimension


class Store(Part):
    """Tokens seen, traffic counted, and the batch operations that beam search and friends need.

    `elements` and `bytes` count what passes through the accessors and `append`: scalars read besides the
    current token's, and scalars written. The native kernels fuse these reads; then `Method.traffic` counts.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu", kv: str | None = None
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        self.form = Rows(shape.D, kv)  # of rows of K and V; what is derived from them is made from the decoded rows
        self.lengths = [0] * shape.B
        self.elements = 0
        self.bytes = 0
        self.pointers: Any = None  # a backend's own, of addresses: never copied

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "pointers": None}

    def count(self, elements: int, itemsize: int) -> None:
        """Add scalars that were read or written to the counted traffic."""
        self.elements += elements
        self.bytes += elements * itemsize

    def count_rows(self, n: int) -> None:
        """Add n rows of K or V, each of one KV head."""
        for elements, size in self.form.parts(n, self.dtype):
            self.elements += elements
            self.bytes += int(elements * size)

    def check(self, k: Tensor, v: Tensor, pad: Sequence[int] | None = None) -> list[int]:
        """The padding of every row. Raises ValueError if shapes, dtype or pad do not fit."""
        B, H, _, D = self.shape
        n = k.shape[2] if k.ndim == 4 else 0
        if k.shape != (B, H, n, D) or v.shape != k.shape:
            raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} must both be ({B}, {H}, n, {D})")
        if k.dtype != self.dtype or v.dtype != self.dtype:
            raise ValueError(f"k is {k.dtype}, v is {v.dtype}; the store holds {self.dtype}")
        pads = [0] * B if pad is None else list(pad)
        if len(pads) != B or any(not 0 <= p <= n for p in pads):
            raise ValueError(f"pad {pads} must be {B} numbers from 0 to {n}")
        return pads

    def append(self, k: Tensor, v: Tensor, pad: Sequence[int] | None = None) -> None:
        """Take n tokens: k, v (B,H,n,D); the first pad[b] of row b are padding and are dropped."""
        pads = self.check(k, v, pad)
        B, n = self.shape.B, k.shape[2]
        if len(set(self.lengths)) == 1 and not any(pads):
            self._append(slice(0, B), self.lengths[0], k, v)
        else:
            for b, p in enumerate(pads):
                self._append(slice(b, b + 1), self.lengths[b], k[b : b + 1, :, p:], v[b : b + 1, :, p:])
        self.lengths = [length + n - p for length, p in zip(self.lengths, pads, strict=True)]

    def _append(self, rows: slice, start: int, k: Tensor, v: Tensor) -> None:
        raise NotImplementedError

    def history(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Keys and values held for these rows, all of one length: (b,H,m,D) twice."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Live bytes: what the cached tokens occupy."""
        raise NotImplementedError

    @property
    def allocated(self) -> int:
        """Bytes of all tensors, room for growth included."""
        return sum(t.nbytes for t in _tensors(self))

    def select(self, index: Tensor) -> None:
        """Batch rows become rows[index]: reorder (beam search), repeat and select in one."""
        order = index.to(self.device)
        vars(self).update(vars(_map(self, lambda t: t.index_select(0, order))))
        self.lengths = [self.lengths[i] for i in order.tolist()]
        self.shape = self.shape._replace(B=len(self.lengths))

    def fork(self) -> Store:
        """An independent copy: every tensor and every list of numbers."""
        clone: Store = _map(self, torch.clone)
        return clone

    def crop(self, n: int) -> None:
        """Forget the last n tokens of every row."""
        raise ValueError(f"{type(self).__name__} cannot forget tokens: others were dropped for them")

    def mask(self) -> Tensor:
        """(B,1,N) bool: which positions up to the longest row are held."""
        lengths = torch.tensor(self.lengths, device=self.device)
        return torch.arange(max(self.lengths), device=self.device) < lengths[:, None, None]
