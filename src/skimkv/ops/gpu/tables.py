"""Stores as the GPU kernels see them: tables of addresses, lengths in device memory, and scratch space.

A page is PAGE_TOKENS tokens, and chunks are whole pages. A table with one row for each page says where the page lies,
so a cache grows by a chunk without a copy, and a kernel that walks over positions never asks the host where they are.
Lengths lie beside the table, one for each row and KV head, and the kernels that append advance them: a captured graph
of a step stays right as the cache grows. The host keeps its own numbers, and writes the device's only where they differ
(after a prompt, `crop` or `select`).
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ...stores.base import LastingView, Shape, Store, Workspace
from ...stores.chunks import Chunk
from ...stores.clusters import UNIT, Block, Clusters
from ...stores.full import Full
from ...stores.quantise import BLOCK, GROUP
from ...stores.slots import Slots

PAGE_TOKENS = GROUP
INT4_BLOCK = BLOCK  # tokens whose 4-bit codes lie interleaved
PAGE_CLUSTERS = UNIT
TABLE_COLUMNS = 8  # of which the last are padding: a row is 64 bytes
LEAST_PAGES = 32  # rows of a new table

# Columns of a table: where the page begins in row 0 of the batch and KV head 0, of each tensor of its chunk.
COLUMN_K, COLUMN_V, COLUMN_INDEX, COLUMN_SCALE = 0, 1, 2, 3
COLUMN_REPRESENTATIVES, COLUMN_SAMPLES, COLUMN_SIZES = 0, 1, 2
COLUMN_CAPACITY = 4  # tokens (or clusters) in the whole chunk: the distance between its KV heads


class Cached(Protocol):
    """What a launch is told of a store, or of the blocks that a batch has in an engine."""

    @property
    def shape(self) -> Shape:
        """The sizes of the batch."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of K and V."""

    @property
    def device(self) -> torch.device:
        """Where the kernels run."""

    @property
    def workspace(self) -> Workspace:
        """The scratch memory of the kernels."""


class CachedKeys(Cached, Protocol):
    """What a method that scores keys is told besides."""

    @property
    def R(self) -> int:
        """The channels of the index."""

    @property
    def bits(self) -> int | None:
        """The bits of a code of the index; None where it is not quantised."""


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


def scratch(store: Cached, name: str, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return at least n elements that outlive the call, zero at first; stores that share a workspace share them.

    Steps on two streams have two of them. A graph is captured on a stream of its own, and takes those of the last step
    before it.
    """
    workspace = store.workspace
    if not is_capturing(store.device):
        workspace.stream = current_stream(store.device)
    buffers, key = workspace.buffers, f"{store.device} {workspace.stream} {name}"
    buffer = buffers.get(key)
    if buffer is None or buffer.numel() < n:
        buffer = buffers[key] = _zeros(n + n // 4, dtype, store.device)
    return buffer


class View(LastingView):
    """What the host told the device about a store, and the tensors that it told of.

    lengths (B*H,) int32, on the device. known_lengths: what they are, one for each row of the batch.
    """

    def __init__(self, store: Store) -> None:
        self.shape: Shape = store.shape
        self.device: torch.device = store.device
        self.tensors: list[weakref.ref[Tensor]] = []
        self.lengths = torch.zeros(store.shape.B * store.shape.H, dtype=torch.int32, device=store.device)
        self.known_lengths = [0] * store.shape.B

    def fits(self, store: Store) -> bool:
        """Return whether the store still has the shape and the device that this view was made for."""
        return self.shape == store.shape and self.device == store.device

    def device_tensors(self) -> list[Tensor]:
        """Return what a captured step points into."""
        return [self.lengths]

    def counts(self, store: Store) -> list[Tensor]:
        """Return the numbers on the device that a step changes."""
        return [self.lengths]

    def known(self) -> dict[str, list[int]]:
        """Return what the host knows of the numbers on the device, by attribute."""
        return {"known_lengths": self.known_lengths}

    def replaced(self, tensors: list[Tensor]) -> bool:
        """Note the store's tensors, and return True if they are others than before."""
        same = len(tensors) == len(self.tensors)
        if same and all(ref() is tensor for ref, tensor in zip(self.tensors, tensors, strict=True)):
            return False
        self.tensors = [weakref.ref(tensor) for tensor in tensors]
        return True

    def advance(self, store: Store) -> None:
        """Note the store's numbers, after a step that has advanced the device's as well."""
        self.known_lengths = [*store.lengths]

    def write_lengths(self, lengths: list[int]) -> None:
        """Write the host's lengths where the device's differ."""
        if lengths != self.known_lengths:
            self.write(self.lengths, lengths)
            self.known_lengths = [*lengths]

    def write(self, target: Tensor, numbers: list[int]) -> None:
        """Write one number for each row of the batch to (B*H,) on the device."""
        require_no_capture(self.device)
        target.copy_(torch.tensor(numbers, dtype=torch.int32).repeat_interleave(self.shape.H))


class TableView(View):
    """A store in pieces. table: (pages, TABLE_COLUMNS) int64, on the device, and flat."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.table = torch.zeros(0, dtype=torch.int64, device=store.device)

    @property
    def pages(self) -> int:
        """Return how many pages the table has place for."""
        return self.table.numel() // TABLE_COLUMNS

    def device_tensors(self) -> list[Tensor]:
        """Return what a captured step points into."""
        return [self.table, self.lengths]

    def write_table(self, parts: list[Tensor]) -> None:
        """Write rows (n, TABLE_COLUMNS); the table is replaced only where they do not fit."""
        require_no_capture(self.device)
        rows = torch.cat(parts).flatten()
        if rows.numel() > self.table.numel():
            self.table = _zeros(max(2 * rows.numel(), LEAST_PAGES * TABLE_COLUMNS), torch.int64, self.device)
        self.table[: rows.numel()].copy_(rows)


class PageView(TableView):
    """A Full store: pages of PAGE_TOKENS tokens."""

    @property
    def room(self) -> int:
        """Return how many tokens the table and the scratch memory have place for."""
        return self.pages * PAGE_TOKENS

    def update(self, store: Full) -> None:
        """Point at the store's chunks as they are now."""
        if self.replaced(_chunk_tensors(store)):
            require_no_capture(self.device)
            chunks = tuple(map(_contiguous, store.chunks))
            if any(new is not old for new, old in zip(chunks, store.chunks, strict=True)):
                store.chunks = chunks
                self.replaced(_chunk_tensors(store))
            self.write_table([_page_rows(store, chunk) for chunk in store.chunks])
        self.write_lengths(store.lengths)


def _chunk_tensors(store: Full) -> list[Tensor]:
    return [t for c in store.chunks for t in (c.k, c.v, c.index, c.scale) if t is not None]


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
    page = torch.arange(chunk.cap // PAGE_TOKENS)
    rows = torch.zeros(len(page), TABLE_COLUMNS, dtype=torch.int64)
    size = store.dtype.itemsize
    row_of_page = PAGE_TOKENS * store.shape.D * size
    channel_of_page = PAGE_TOKENS * store.bits // 8 if store.bits else PAGE_TOKENS * size
    for column, tensor, stride in (
        (COLUMN_K, chunk.k, row_of_page),
        (COLUMN_V, chunk.v, row_of_page),
        (COLUMN_INDEX, chunk.index, channel_of_page),
        (COLUMN_SCALE, chunk.scale, torch.float32.itemsize),
    ):
        if tensor is not None:
            rows[:, column] = page * stride + tensor.data_ptr()
    rows[:, COLUMN_CAPACITY] = chunk.cap
    return rows


class ClusterView(TableView):
    """A Clusters store: pages of PAGE_CLUSTERS clusters.

    seed (1,) int64, on the device. counted: the most clusters of a row and KV head when they were last counted, which
    was after `counted_at` tokens; since then each token has made at most one.
    """

    def __init__(self, store: Clusters) -> None:
        super().__init__(store)
        self.seed = torch.tensor([store.seed & 0xFFFFFFFF], dtype=torch.int64, device=store.device)
        self.counted, self.counted_at = 0, 0

    @property
    def room(self) -> int:
        """Return how many clusters the table has place for."""
        return self.pages * PAGE_CLUSTERS

    def device_tensors(self) -> list[Tensor]:
        """Return what a captured step points into."""
        return [*super().device_tensors(), self.seed]

    def counts(self, store: Store) -> list[Tensor]:
        """Return the numbers on the device that a step changes."""
        assert isinstance(store, Clusters)
        return [self.lengths, store.m]

    def update(self, store: Clusters, more: bool) -> None:
        """Point at the store's blocks as they are now. more: with room for a cluster that the next token may make."""
        if store.lengths != self.known_lengths or not store.blocks:
            self.counted = self.counted_at = max(store.lengths)
            store.reserve_clusters(1)
        if more:
            self._make_room(store)
        tensors = [t for block in store.blocks for t in (block.rep, block.samples, block.size)]
        if self.replaced(tensors):
            self.write_table([_cluster_rows(store, block) for block in store.blocks])
        self.write_lengths(store.lengths)

    def _make_room(self, store: Clusters) -> None:
        """Make room for one more cluster. The device is asked how many there are only when room may have run out."""
        room, now = sum(block.cap for block in store.blocks), max(store.lengths)
        if self.counted + now - self.counted_at + 1 > room:
            self.counted, self.counted_at = int(store.m.max()), now
            if self.counted + 1 > room:
                store.reserve_clusters(self.counted + max(64, self.counted // 8))


def _cluster_rows(store: Clusters, block: Block) -> Tensor:
    """The table's rows for the pages of a block: (pages, TABLE_COLUMNS) int64."""
    page = torch.arange(block.cap // PAGE_CLUSTERS)
    rows = torch.zeros(len(page), TABLE_COLUMNS, dtype=torch.int64)
    row = store.shape.D * store.dtype.itemsize
    for column, tensor, size in (
        (COLUMN_REPRESENTATIVES, block.rep, row),
        (COLUMN_SAMPLES, block.samples, row * store.t),
        (COLUMN_SIZES, block.size, block.size.itemsize),
    ):
        assert tensor.is_contiguous()
        rows[:, column] = page * PAGE_CLUSTERS * size + tensor.data_ptr()
    rows[:, COLUMN_CAPACITY] = block.cap
    return rows


class SlotView(View):
    """A Slots store, whose slots need no table.

    On the device, in int32: filled (B*H,), as `lengths`; limits (2,B), the budget and the recent window of every row;
    order, the slots of tokens 0, 1, ... where the store has an order.
    """

    def __init__(self, store: Slots) -> None:
        super().__init__(store)
        B = store.shape.B
        self.filled, self.known_filled = torch.zeros_like(self.lengths), [0] * B
        self.limits = torch.zeros(2 * B, dtype=torch.int32, device=store.device)
        self.known_limits = [0] * (2 * B)
        self.order = torch.zeros(0, dtype=torch.int32, device=store.device)

    def device_tensors(self) -> list[Tensor]:
        """Return what a captured step points into."""
        return [self.lengths, self.filled, self.limits, self.order]

    def counts(self, store: Store) -> list[Tensor]:
        """Return the numbers on the device that a step changes."""
        return [self.lengths, self.filled]

    def known(self) -> dict[str, list[int]]:
        """Return what the host knows of the numbers on the device, by attribute."""
        return {"known_lengths": self.known_lengths, "known_filled": self.known_filled}

    def advance(self, store: Store) -> None:
        """Note the store's numbers, after a step that has advanced the device's as well."""
        assert isinstance(store, Slots)
        super().advance(store)
        self.known_filled = [*store.filled]

    def update(self, store: Slots, recent: list[int] | None) -> None:
        """Write the host's numbers where the device's differ. recent: the window of every row; None: as it was."""
        self.write_lengths(store.lengths)
        if store.filled != self.known_filled:
            self.write(self.filled, store.filled)
            self.known_filled = [*store.filled]
        limits = self.known_limits if recent is None else [*store.budget, *recent]
        if limits != self.known_limits:
            require_no_capture(self.device)
            self.limits.copy_(torch.tensor(limits, dtype=torch.int32))
            self.known_limits = limits
        if store.order is not None and max(store.lengths) >= self.order.numel():
            n = 2 * max(store.lengths) + 1024
            self.order = _zeros(n, torch.int32, self.device)
            self.order.copy_(torch.tensor([store.order(store.capacity, p) for p in range(n)], dtype=torch.int32))
