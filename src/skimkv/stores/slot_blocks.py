"""Slots in memory that a serving engine owns: every request has one block for its whole budget, whatever its length."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .base import Shape
from .quantise import round_up
from .slots import Slots


class SlotParts(NamedTuple):
    """The parts of all blocks as tensors on the engine's memory.

    k, v (blocks,H,slots,width of a stored row) · score float32, pos int32 (blocks,H,slots) for a store with scores.
    """

    k: Tensor
    v: Tensor
    score: Tensor | None
    pos: Tensor | None


def bytes_of_slot(store: Slots) -> int:
    """The bytes that a block has for each slot of one KV head, a multiple of 8: K, V, and score and position."""
    rows = 2 * store.row_format.width * store.row_format.storage_dtype(store.dtype).itemsize
    return round_up(rows + (0 if store.score is None else 8), 8)


class SlotBlocks:
    """The slots of one layer of an engine, and which blocks the rows of the current batch have.

    Of one KV head, a block has the scores and the positions of its slots where there are any, then the stored rows of
    K, then those of V. lengths: tokens of each row before the current one, of which as many as there are slots are
    kept. numbers (B,) int32: the block of each row. Both change with every batch; the memory stays.

    memory: (blocks,H,tokens,C) of any type, where each block of a head is contiguous and has at least
    bytes_of_slot(empty()) bytes for each of the slots. empty: makes the empty store of one request, whose budget is the
    same for all. Raises ValueError if the memory does not fit.
    """

    def __init__(self, memory: Tensor, empty: Callable[[], Slots]) -> None:
        self.empty, self.example = empty, empty()
        self.parts = _parts_of(memory, self.example)
        self.distance = memory.stride(0) * memory.element_size()
        self.count = memory.shape[0]
        self.lengths: list[int] = []
        self.numbers = torch.zeros(0, dtype=torch.int32)
        self.view: object = None  # of a backend

    @property
    def shape(self) -> Shape:
        """The sizes of the current batch."""
        return self.example.shape._replace(B=len(self.lengths))

    @property
    def capacity(self) -> int:
        """The slots of a block, which are the budget of a request."""
        return self.example.capacity

    @property
    def filled(self) -> list[int]:
        """Slots in use in each row of the batch."""
        return [min(n, self.capacity) for n in self.lengths]

    @property
    def budget(self) -> list[int]:
        """Slots that each row of the batch may use: as many as a block has."""
        return [self.capacity] * len(self.lengths)

    def next_slots(self) -> list[int]:
        """The slot that the next token of every row takes in blocks without scores."""
        return [self.example.slot_of(n, self.capacity) for n in self.lengths]

    def free_slots(self) -> list[int]:
        """The next free slot of every row; -1 where all are in use, and a slot is chosen by the scores."""
        return [n if n < self.capacity else -1 for n in self.lengths]

    def new_request(self, number: int) -> Slots:
        """The empty store of a request whose slots are block `number`. Raises ValueError if there is no such block."""
        if not 0 <= number < self.count:
            raise ValueError(f"block {number} is not one of {self.count}")
        store = self.empty()
        k, v, score, pos = (None if part is None else part[number : number + 1] for part in self.parts)
        assert k is not None and v is not None
        store.use_memory(k, v, score, pos)
        return store


def _parts_of(memory: Tensor, store: Slots) -> SlotParts:
    _, H, tokens, C = memory.shape
    size, slots = memory.element_size(), store.capacity
    needed = bytes_of_slot(store)
    if memory.stride()[1:] != (tokens * C, C, 1) or H != store.shape.H or tokens < slots or C * size < needed:
        raise ValueError(
            f"the cache is {memory.dtype} {tuple(memory.shape)} with strides {memory.stride()}; a block must be "
            f"contiguous in each of {store.shape.H} heads and have {slots} slots of {needed} bytes"
        )
    flat = memory.flatten(2).view(torch.uint8)  # (blocks,H,bytes)
    at = 0

    def take(count: int, kind: torch.dtype) -> Tensor:
        """The next `count` numbers of this type in every block."""
        nonlocal at
        at += count * kind.itemsize
        return flat[..., at - count * kind.itemsize : at].view(kind)

    score = pos = None
    if store.score is not None:
        score, pos = take(slots, torch.float32), take(slots, torch.int32)
    width, stored = store.row_format.width, store.row_format.storage_dtype(store.dtype)
    k, v = (take(slots * width, stored).unflatten(-1, (slots, width)) for _ in "kv")
    return SlotParts(k, v, score, pos)
