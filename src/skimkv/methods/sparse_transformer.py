"""The Sparse Transformer's two patterns (Child et al. 2019, arXiv 1904.10509, section 4.2), baselines of H2O section 5.

There, query i attends to a window and to positions (columns of the attention matrix) that reach over the whole past and
grow in number with i. Here k tokens are kept, and one is dropped for every new one: the columns thin out by powers of
two, and always span the past. A dropped token is gone, so the columns lie at fixed positions, not at fixed distances
from the query.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

import torch

from ..stores.base import Shape
from ..stores.slots import Slots
from .slots import SlotMethod, check_at_most


def exponent(p: int) -> int:
    """The largest e for which 2^e divides p; 63 for 0."""
    return (p & -p).bit_length() - 1 if p else 63


class Order:
    """The slot of every token: new token n takes that of the token p < free(n) with the least (level(p), p).

    It is a function of n whose values are remembered, so that all stores and threads may share one.
    """

    def __init__(self, k: int, free: Callable[[int], int], level: Callable[[int], int]) -> None:
        self.k, self.free, self.level = k, free, level
        self._slots: list[int] = []
        self._droppable: list[tuple[int, int]] = []  # a heap of (level, token)
        self._seen = 0  # tokens that were put into the heap
        self._lock = threading.Lock()

    def __call__(self, n: int) -> int:
        """Return the slot of token n."""
        if n >= len(self._slots):
            with self._lock:
                self._extend(n)
        return self._slots[n]

    def _extend(self, n: int) -> None:
        for new in range(len(self._slots), n + 1):
            if new < self.k:
                self._slots.append(new)
                continue
            for p in range(self._seen, self.free(new)):
                heappush(self._droppable, (self.level(p), p))
            self._seen = max(self._seen, self.free(new))
            self._slots.append(self._slots[heappop(self._droppable)[1]])

    @functools.lru_cache(256)  # noqa: B019 (every order lives as long as the process, in the caches below)
    def kept(self, seen: int) -> list[int]:
        """The positions of the tokens that are kept after `seen` tokens, the least first."""
        if seen:
            self(seen - 1)
        last = dict(zip(self._slots[:seen], range(seen), strict=True))  # of each slot
        return sorted(last.values())

    def __deepcopy__(self, memo: object) -> Order:
        return self


@functools.lru_cache(64)
def strided(k: int, local: int) -> Order:
    """The order of `Strided`: {j > i - local} and {j : j mod s = 0}, k in all."""
    return Order(k, lambda n: n - local + 1, exponent)


@functools.lru_cache(64)
def fixed(k: int, block: int, c: int) -> Order:
    """The order of `Fixed`: the block of the query and c columns at the end of each block, k in all."""

    def level(p: int) -> int:
        """-1 for a token that is no column, which goes first; for a column, the larger the longer it stays."""
        return -1 if p % block < block - c else exponent(p // block + 1)

    return Order(k, lambda n: n // block * block, level)


@dataclass(frozen=True, repr=False)
class Strided(SlotMethod):
    """A window and a stride: {j > i - local} and {j : j mod s = 0}, k in all; s is a power of two that grows.

    local: the window, of the k (None: k//2). As s becomes 2s, its odd multiples are dropped, the oldest first, one for
    each new multiple of 2s. Reads 2kD + 2D elements.
    """

    local: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local is not None:
            check_at_most("local", self.local, 1, self.k)

    @property
    def least(self) -> int:
        """The least number of tokens with which the method works: the window."""
        return self.local or 1

    def slot(self, budget: int, p: int) -> int:
        """The slot of token p of a budget."""
        return strided(budget, max(1, budget // 2) if self.local is None else self.local)(p)

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Slots:
        """An empty store of k slots, in the order of this pattern."""
        return Slots(shape, dtype, device, self.budget(1), order=self.slot, kv=self.kv, budget_of=self.budget_of)


@dataclass(frozen=True, repr=False)
class Fixed(SlotMethod):
    """The block of the query and the summaries of earlier ones: {j : j div l = i div l} and {j : j mod l >= l - c}.

    l: tokens in a block (None: k//2). c: columns at the end of each (None: l//16, at least 1). The k are always full:
    as a block is written, it takes the places of what is no column, the oldest first; where there are columns only,
    those of every second block go, then of every fourth, the oldest first. Reads 2kD + 2D elements.
    """

    l: int | None = None
    c: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.l is not None:
            check_at_most("l", self.l, 1, self.k)
        if self.c is not None:
            half = self.k if isinstance(self.k, float) else max(1, self.k // 2)
            check_at_most("c", self.c, 1, self.l or half)

    @property
    def least(self) -> int:
        """The least number of tokens with which the method works: a block, which has the columns at its end."""
        return self.l or 2 * (self.c or 0) or 1

    def slot(self, budget: int, p: int) -> int:
        """The slot of token p of a budget."""
        size = max(1, budget // 2) if self.l is None else self.l
        return fixed(budget, size, max(1, size // 16) if self.c is None else self.c)(p)

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Slots:
        """An empty store of k slots, in the order of this pattern."""
        return Slots(shape, dtype, device, self.budget(1), order=self.slot, kv=self.kv, budget_of=self.budget_of)
