"""Stores as the GPU kernels see them: tables of addresses, lengths in device memory, and scratch space.

A page is PAGE_TOKENS tokens, and chunks are whole pages. A table with one row for each page says where the page lies,
so a cache grows by a chunk without a copy, and a kernel that walks over positions never asks the host where they are.
Lengths lie beside the table, one for each row and KV head, and the kernels that append advance them: a captured graph
of a step stays right as the cache grows. The host keeps its own numbers, and writes the device's only where they differ
(after a prompt, `crop` or `select`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...stores.base import LastingView, Shape, Store, Workspace
from ...stores.chunks import Chunk
from ...stores.full import Full
from ...stores.quantise import BLOCK, GROUP
from ...stores.slots import Slots

PAGE_TOKENS = GROUP
INT4_BLOCK = BLOCK  # tokens whose 4-bit codes lie interleaved
TABLE_COLUMNS = 8  # of which the last are padding: a row is 64 bytes
LEAST_PAGES = 32  # rows of a new table

# Columns of a table: where the page begins in row 0 of the batch and KV head 0, of each tensor of its chunk.
COLUMN_K, COLUMN_V, COLUMN_INDEX, COLUMN_SCALE = 0, 1, 2, 3
COLUMN_CAPACITY = 4  # tokens in the whole chunk: the distance between its KV heads


class Batch(NamedTuple):
    """The rows of a store, or those that an engine decodes, as launches are told of them.

    dtype: of K and V. row_bits: of a number of K and V where they are kept as codes, for which there is no kernel.
    """

    shape: Shape
    dtype: torch.dtype
    device: torch.device
    workspace: Workspace
    row_bits: int | None = None

    @classmethod
    def of(cls, store: Store) -> Batch:
        """Return the rows of a store."""
        return cls(store.shape, store.dtype, store.device, store.workspace, store.row_format.bits)

    @property
    def heads(self) -> int:
        """The KV heads of all rows: each is the work of programs of its own."""
        return self.shape.B * self.shape.H


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def current_stream(device: torch.device) -> int:
    """Return a number that tells the device's streams apart; 0 where there are none."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def require_no_capture(device: torch.device) -> None:
    """Raise RuntimeError while a CUDA graph is captured: a captured step must find all in its place."""
    if is_capturing(device):
        raise RuntimeError("the host would have to write inside a captured step; prepare() the store, run one before")


def _zeros(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    require_no_capture(device)
    return torch.zeros(n, dtype=dtype, device=device)


def scratch(batch: Batch, name: str, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return at least n elements that outlive the call, zero at first; stores that share a workspace share them.

    Steps on two streams have two of them. A graph is captured on a stream of its own, and takes those of the last step
    before it.
    """
    workspace = batch.workspace
    if not is_capturing(batch.device):
        workspace.stream = current_stream(batch.device)
    buffers, key = workspace.buffers, f"{batch.device} {workspace.stream} {name}"
    buffer = buffers.get(key)
    if buffer is None or buffer.numel() < n:
        buffer = buffers[key] = _zeros(n + n // 4, dtype, batch.device)
    return buffer


class Numbers:
    """Whole numbers on the device that kernels advance, and what the host knows of them.

    tensor: int32; every known number stands there `repeats` times, as often as a row has KV heads.
    """

    def __init__(self, n: int, repeats: int, device: torch.device) -> None:
        self.tensor = torch.zeros(n * repeats, dtype=torch.int32, device=device)
        self.known, self.repeats = [0] * n, repeats

    def write(self, numbers: Sequence[int]) -> None:
        """Write the host's numbers where the device's differ."""
        if list(numbers) != self.known:
            require_no_capture(self.tensor.device)
            self.tensor.copy_(torch.tensor(numbers, dtype=torch.int32).repeat_interleave(self.repeats))
            self.known = list(numbers)


class View(LastingView):
    """What the host told the device about a store. lengths: of the rows."""

    def __init__(self, store: Store) -> None:
        self.shape, self.device = store.shape, store.device
        self.lengths = Numbers(store.shape.B, store.shape.H, store.device)

    def fits(self, store: Store) -> bool:
        """Return whether the store still has the shape and the device that this view was made for."""
        return self.shape == store.shape and self.device == store.device

    def device_tensors(self) -> list[Tensor]:
        """Return what a captured step points into."""
        return [numbers.tensor for numbers in self.counts()]

    def counts(self) -> list[Numbers]:
        """Return the numbers that a step advances."""
        return [self.lengths]

    def advance(self, store: Store) -> None:
        """Note the store's numbers, after a step that has advanced the device's as well."""
        self.lengths.known = [*store.lengths]


class PageView(View):
    """A Full store: pages of PAGE_TOKENS tokens.

    table: (pages, TABLE_COLUMNS) int64, on the device, and flat. tensors: those of the chunks that it tells of.
    """

    def __init__(self, store: Full) -> None:
        super().__init__(store)
        self.table = torch.zeros(0, dtype=torch.int64, device=store.device)
        self.tensors: list[weakref.ref[Tensor]] = []

    @property
    def room(self) -> int:
        """Return how many tokens the table and the scratch memory have place for."""
        return self.table.numel() // TABLE_COLUMNS * PAGE_TOKENS

    def device_tensors(self) -> list[Tensor]:
        """Return what a captured step points into."""
        return [self.table, *super().device_tensors()]

    def update(self, store: Full) -> None:
        """Point at the store's chunks as they are now; the table is replaced only where they do not fit."""
        if self._replaced(store):
            require_no_capture(self.device)
            chunks = tuple(map(_contiguous, store.chunks))
            if any(new is not old for new, old in zip(chunks, store.chunks, strict=True)):
                store.chunks = chunks
                self._replaced(store)
            rows = torch.cat([_page_rows(store, chunk) for chunk in chunks]).flatten()
            if rows.numel() > self.table.numel():
                self.table = _zeros(max(2 * rows.numel(), LEAST_PAGES * TABLE_COLUMNS), torch.int64, self.device)
            self.table[: rows.numel()].copy_(rows)
        self.lengths.write(store.lengths)

    def _replaced(self, store: Full) -> bool:
        """Note the tensors of the store's chunks, and return True if they are others than before."""
        tensors = [t for c in store.chunks for t in (c.k, c.v, c.index, c.scale) if t is not None]
        same = len(tensors) == len(self.tensors)
        if same and all(ref() is tensor for ref, tensor in zip(self.tensors, tensors, strict=True)):
            return False
        self.tensors = [weakref.ref(tensor) for tensor in tensors]
        return True


def _contiguous(chunk: Chunk) -> Chunk:
    """The chunk with its tensors in the order that the kernels assume; the same object if they are."""
    changed: dict[str, Any] = {}
    for name in ("k", "v", "index"):
        tensor = getattr(chunk, name)
        if tensor is not None and not tensor.is_contiguous():
            changed[name] = tensor.contiguous()
    # a channel's scales lie together: (B,H,pages,2,R) in memory as (B,H,R,2,pages)
    if chunk.scale is not None and not chunk.scale.permute(0, 1, 4, 3, 2).is_contiguous():
        changed["scale"] = chunk.scale.permute(0, 1, 4, 3, 2).contiguous().permute(0, 1, 4, 3, 2)
    return replace(chunk, **changed) if changed else chunk


def _page_rows(store: Full, chunk: Chunk) -> Tensor:
    """The table's rows for the pages of a chunk: (pages, TABLE_COLUMNS) int64."""
    size = store.dtype.itemsize
    row_of_page = PAGE_TOKENS * store.shape.D * size
    channel_of_page = PAGE_TOKENS * store.bits // 8 if store.bits else PAGE_TOKENS * size
    steps = {
        COLUMN_K: (chunk.k, row_of_page),
        COLUMN_V: (chunk.v, row_of_page),
        COLUMN_INDEX: (chunk.index, channel_of_page),
        COLUMN_SCALE: (chunk.scale, torch.float32.itemsize),
    }
    return table_rows(chunk.cap, {c: (t.data_ptr(), step) for c, (t, step) in steps.items() if t is not None})


def table_rows(capacity: int, columns: dict[int, tuple[int, int]]) -> Tensor:
    """The table's rows for the pages of `capacity` tokens: (pages, TABLE_COLUMNS) int64.

    columns: for each of them where the first page begins, and the bytes from a page to the next.
    """
    page = torch.arange(capacity // PAGE_TOKENS)
    rows = torch.zeros(len(page), TABLE_COLUMNS, dtype=torch.int64)
    for column, (start, step) in columns.items():
        rows[:, column] = start + page * step
    rows[:, COLUMN_CAPACITY] = capacity
    return rows


class SlotView(View):
    """A Slots store, whose slots need no table.

    filled: slots in use. limits: the budgets and then the recent windows of all rows. order: on the device in int32,
    the slots of tokens 0, 1, ... where the store has an order.
    """

    def __init__(self, store: Slots) -> None:
        super().__init__(store)
        self.filled = Numbers(store.shape.B, store.shape.H, store.device)
        self.limits = Numbers(2 * store.shape.B, 1, store.device)
        self.order = torch.zeros(0, dtype=torch.int32, device=store.device)

    def device_tensors(self) -> list[Tensor]:
        """Return what a captured step points into."""
        return [*super().device_tensors(), self.limits.tensor, self.order]

    def counts(self) -> list[Numbers]:
        """Return the numbers that a step advances."""
        return [self.lengths, self.filled]

    def advance(self, store: Store) -> None:
        """Note the store's numbers, after a step that has advanced the device's as well."""
        assert isinstance(store, Slots)
        super().advance(store)
        self.filled.known = [*store.filled]

    def update(self, store: Slots, recent: Sequence[int] | None) -> None:
        """Write the host's numbers where the device's differ. recent: the window of every row; None: as it was."""
        self.lengths.write(store.lengths)
        self.filled.write(store.filled)
        if recent is not None:
            self.limits.write([*store.budget, *recent])
        if store.order is not None and max(store.lengths) >= self.order.numel():
            n = 2 * max(store.lengths) + 1024
            self.order = _zeros(n, torch.int32, self.device)
            self.order.copy_(torch.tensor([store.order(store.capacity, p) for p in range(n)], dtype=torch.int32))
