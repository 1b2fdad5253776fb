"""What all stores have in common. A store is the cache of one attention layer.

Letters used everywhere: B batch, H KV heads, G query heads per KV head, N cached tokens, D head size, R channels of an
index, C slots. Rows are left-aligned and ragged: padding never enters a store, so row b of the batch keeps its real
tokens at positions 0 .. lengths[b]-1.
"""

from __future__ import annotations

import abc
import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor

from .memory import ordinary_tensors
from .quantise import RowFormat


class Shape(NamedTuple):
    """The sizes of one layer: B batch, H KV heads, G query heads per KV head, D head size."""

    B: int
    H: int
    G: int
    D: int


class Workspace:
    """Scratch buffers of the kernels, by device, stream and name.

    The stores of one cache may share one; two caches never do. stream: where the last step that no graph captured ran.
    """

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.stream = 0

    def __deepcopy__(self, memo: object) -> Workspace:
        return Workspace()


class LastingView:
    """A backend's view that looks the store's tensors up in every step, so it stays in use when all are replaced."""


class ExclusiveUse:
    """A context that one thread can be in at a time; another one is refused, it does not wait.

    free: has one item while no thread is inside. A list's `pop` and `append` are atomic, and unlike a lock's methods
    they are code that every other step of Python runs too.
    """

    def __init__(self) -> None:
        self.free = [True]

    def begin_if_free(self) -> bool:
        """Enter; False if a thread is inside."""
        try:
            return self.free.pop()
        except IndexError:
            return False

    def begin(self) -> None:
        """Enter. Raises RuntimeError if a thread is inside."""
        if not self.begin_if_free():
            self.refuse()

    def end(self) -> None:
        """Leave."""
        self.free.append(True)

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *exception: object) -> None:
        self.end()

    def refuse(self) -> NoReturn:
        """Raise the RuntimeError that says that another thread is inside."""
        raise RuntimeError("this cache is in use by another thread; give every request a cache of its own")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that a reference computes in: float64 stays (the tests' oracle), everything else becomes float32."""
    return dtype if dtype == torch.float64 else torch.float32


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor of a (nested) store whose first dimension is the batch, and return a copy."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, function) for item in value)
    if isinstance(value, Part):
        clone = copy.copy(value)
        own = vars(clone)  # written to directly, because a part may be immutable
        own.update({name: map_tensors(x, function) for name, x in own.items() if name not in value.without_batch})
        return clone
    return value


def _tensors(value: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    items = vars(value).values() if isinstance(value, Part) else value if isinstance(value, list | tuple) else ()
    for item in items:
        tensors += [item] if isinstance(item, Tensor) else _tensors(item)
    return tensors


class Part:
    """Anything whose tensors `map_tensors` visits: a store, or a piece of one."""

    without_batch: ClassVar[frozenset[str]] = frozenset()  # names of tensors that have no batch dimension


class Store(Part, abc.ABC):
    """The cached tokens of one layer, the traffic counted so far, and what beam search and its relatives need.

    `elements` and `bytes` count what passes through the counted accessors (`read_*`) and `append`: scalars that are
    read, besides those of the current token, and scalars that are written. Kernels fuse these reads; what they move is
    given by `Method.traffic`.

    A store owns its numbers. lengths: the tokens that each row of the batch has seen; do not change this list, it
    changes only through `append`, `advance` (and `Full.advance_by`), `crop`, `select` and `rewind`.
    `view` is what a backend remembers of this store (addresses, tables on a device), and `workspace` is the scratch
    memory of its kernels. Neither is copied.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu", kv: str | None = None
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self.device = torch.empty(0, device=device).device  # with its number, which those of tensors have
        self.row_format = RowFormat(shape.D, kv)
        self.lengths = [0] * shape.B
        self.elements = 0
        self.bytes = 0
        self.view: Any = None
        self.workspace = Workspace()
        self._in_use = ExclusiveUse()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "view": None, "workspace": Workspace(), "_in_use": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _in_use=ExclusiveUse())

    def exclusive(self) -> ExclusiveUse:
        """A context for a thread that changes this store. Entering raises RuntimeError if another thread is inside."""
        return self._in_use

    def detach_from_saved(self) -> None:
        """Put copies in the place of all tensors, so that what autograd saved of them is not overwritten."""
        with ordinary_tensors():
            self._become(map_tensors(self, torch.clone))

    @property
    def requires_grad(self) -> bool:
        """Whether a cached number depends on a tensor that requires a gradient."""
        return any(t.requires_grad for t in _tensors(self))

    def count(self, elements: int, itemsize: float) -> None:
        """Add scalars that were read or written, of `itemsize` bytes each, to the counted traffic."""
        self.elements += elements
        self.bytes += math.ceil(elements * itemsize)

    def count_rows(self, n: int) -> None:
        """Add n rows of K or V, each of one KV head, to the counted traffic."""
        for amount in self.row_format.traffic(n, self.dtype):
            self.count(*amount)

    def validate(self, k: Tensor, v: Tensor, pad: Sequence[int] | None = None) -> list[int]:
        """The padding of every row of a block: k, v (B,H,n,D), pad[b] from 0 to n.

        Raises ValueError if shapes, types or padding do not fit this store.
        """
        B, H, _, D = self.shape
        n = k.shape[2] if k.ndim == 4 else 0
        if k.shape != (B, H, n, D) or v.shape != k.shape:
            raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} must both be ({B}, {H}, n, {D})")
        if k.dtype != self.dtype or v.dtype != self.dtype:
            raise ValueError(f"k is {k.dtype} and v is {v.dtype}; both must be {self.dtype}, the type of the cache")
        pads = [0] * B if pad is None else list(pad)
        if len(pads) != B or any(not 0 <= p <= n for p in pads):
            raise ValueError(f"pad {pads} must be {B} numbers from 0 to {n}")
        return pads

    def append(self, k: Tensor, v: Tensor, pad: Sequence[int] | None = None) -> None:
        """Take a block of n tokens: k, v (B,H,n,D); the first pad[b] of row b are padding and are dropped.

        Raises ValueError if shapes, types or padding do not fit.
        """
        pads = self.validate(k, v, pad)
        B, n = self.shape.B, k.shape[2]
        if len(set(self.lengths)) == 1 and not any(pads):
            self._append(slice(0, B), self.lengths[0], k, v)
        else:
            for b, p in enumerate(pads):
                self._append(slice(b, b + 1), self.lengths[b], k[b : b + 1, :, p:], v[b : b + 1, :, p:])
        self.lengths = [length + n - p for length, p in zip(self.lengths, pads, strict=True)]

    def append_token(self, k: Tensor, v: Tensor) -> None:
        """Take one token per row: k, v (B,H,D)."""
        self.append(k[:, :, None], v[:, :, None])

    @abc.abstractmethod
    def _append(self, rows: slice, start: int, k: Tensor, v: Tensor) -> None: ...

    @abc.abstractmethod
    def reserve(self, n: int = 1) -> None:
        """Make room for n more tokens in every row, so that a kernel can write them."""

    def advance(self) -> None:
        """Note that a kernel has written one token into every row."""
        lengths = self.lengths  # of one row: no loop, whose code would come from memory at every step
        self.lengths = [lengths[0] + 1] if len(lengths) == 1 else [n + 1 for n in lengths]

    @property
    def traffic_depends_on_data(self) -> bool:
        """Whether a step's traffic depends on what the tokens are, and not only on how many; see `observed`."""
        return False

    def observed(self, row: int | None = None) -> dict[str, int]:
        """What the traffic of the last step depends on besides the number of tokens, as keywords of `Method.traffic`.

        Of one row of the batch, or of all. Empty for most stores: their traffic follows from the number of tokens.
        """
        return {}

    def mark(self) -> Any:
        """The store's numbers as they are now, for `rewind`."""
        return list(self.lengths)

    def rewind(self, mark: Any) -> None:
        """Take the store's numbers back to a mark; what was written since stays in memory and is ignored."""
        self.lengths = list(mark)

    @property
    def has_even_rows(self) -> bool:
        """Whether all rows hold equally many tokens, so that `history` may be asked for all of them together."""
        return len(set(self.lengths)) == 1

    def history(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The cached keys and values of these rows, which all have one length: (b,H,m,D) twice; not counted.

        Raises TypeError for a store that does not keep the tokens' own keys and values, as Clusters.
        """
        raise TypeError(f"{type(self).__name__} does not keep the keys and values that it has taken")

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Live bytes: what the cached tokens occupy."""

    @property
    def allocated(self) -> int:
        """Bytes of all tensors, room for growth included."""
        return sum(t.nbytes for t in _tensors(self))

    def select(self, index: Tensor) -> None:
        """Replace the batch by its rows index (B',): reorders, repeats and drops rows in one step."""
        order = index.to(self.device)
        with ordinary_tensors():
            self._become(map_tensors(self, lambda t: t.index_select(0, order)))
        self.lengths = [self.lengths[i] for i in order.tolist()]
        self.shape = self.shape._replace(B=len(self.lengths))

    def _become(self, twin: Store) -> None:
        """Take over the tensors and numbers of a copy. The workspace stays, and so does a view that can."""
        view = self.view if isinstance(self.view, LastingView) else None
        own = {"view": view, "workspace": self.workspace, "_in_use": self._in_use}
        vars(self).update({**vars(twin), **own})

    def fork(self) -> Store:
        """An independent copy: every tensor and every list of numbers."""
        with ordinary_tensors():
            clone: Store = map_tensors(self, torch.clone)
        return clone

    def crop(self, n: int) -> None:
        """Forget the last n tokens of every row.

        Raises ValueError if this kind of store cannot, or if a row has fewer tokens.
        """
        raise ValueError(f"{type(self).__name__} cannot forget tokens: others were dropped to make room for them")

    def valid(self) -> Tensor:
        """Which positions, up to the longest row, are cached tokens: (B,1,N) bool."""
        lengths = torch.tensor(self.lengths, device=self.device)
        return torch.arange(max(self.lengths), device=self.device) < lengths[:, None, None]
