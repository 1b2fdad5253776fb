"""Stores as the GPU kernels see them: addresses of pages and lengths in device memory, and scratch space.

A page is GROUP tokens, and chunks are whole pages: a table with one row a page says where it lies, so a cache grows
by a chunk without a copy, and a kernel that walks over positions never asks the host where it is. Lengths live beside
the table, one per row and KV head, and the append kernels advance them: a captured graph of a step stays right as the
cache grows. The host keeps its own numbers and writes the device's only where they differ (prompt, crop, select).
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ...stores.base import Store
from ...stores.clusters import Block, Clusters
from ...stores.codes import GROUP
from ...stores.full import Chunk, Full
from ...stores.slots import Slots

COLUMNS = 8  # of the table: addresses of k, v, index and scale; tokens in the chunk; the rest is padding
CAP = 4
_epoch = 0  # counts replaced tables and scratch: a graph captured before holds stale addresses


def epoch() -> int:
    """How often device memory that kernels point into was replaced; a captured graph is valid for one epoch."""
    return _epoch


def _outside(device: torch.device) -> None:
    """A captured step must find all in its place: RuntimeError if it does not."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the host would have to write inside a captured step; prepare() the store, run one before")


def _fresh(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    global _epoch
    _outside(device)
    _epoch += 1
    return torch.zeros(n, dtype=dtype, device=device)


_scratch: dict[tuple[torch.device, str], Tensor] = {}


def scratch(device: torch.device, name: str, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """At least n elements that outlive the call, zero at first; all layers of a device share them."""
    held = _scratch.get((device, name))
    if held is None or held.numel() < n:
        held = _scratch[device, name] = _fresh(n + n // 4, dtype, device)
    return held


class View:
    """What the host told the device, and the tensors it told of."""

    def __init__(self, store: Store) -> None:
        global _epoch
        _epoch += 1
        self.shape, self.device = store.shape, store.device
        self.refs: list[weakref.ref[Tensor]] = []
        self.lengths = torch.zeros(store.shape.B * store.shape.H, dtype=torch.int32, device=store.device)
        self.known = [0] * store.shape.B

    def fits(self, store: Store) -> bool:
        return self.shape == store.shape and self.device == store.device

    def stale(self, now: list[Tensor]) -> bool:
        """True, and these are noted, if the store has other tensors than before."""
        if len(now) == len(self.refs) and all(ref() is t for ref, t in zip(self.refs, now, strict=True)):
            return False
        self.refs = [weakref.ref(t) for t in now]
        return True

    def tell(self, lengths: list[int]) -> None:
        """Write the host's lengths where the device's differ."""
        if lengths != self.known:
            _outside(self.device)
            self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32).repeat_interleave(self.shape.H))
            self.known = list(lengths)


class Pages(View):
    """Full: `table` (pages, COLUMNS) int64. `room`: tokens that the table and the scratch have place for."""

    def __init__(self, store: Full) -> None:
        super().__init__(store)
        self.table = torch.zeros(0, dtype=torch.int64, device=store.device)

    @property
    def room(self) -> int:
        return self.table.numel() // COLUMNS * GROUP

    def update(self, store: Full) -> None:
        """Point at the store's chunks as they are now."""
        now = [t for c in store.chunks for t in (c.k, c.v, c.index, c.scale) if t is not None]
        if self.stale(now):
            _outside(self.device)
            if sum(map(_relaid, store.chunks)):
                self.stale([t for c in store.chunks for t in (c.k, c.v, c.index, c.scale) if t is not None])
            rows = torch.cat([_addresses(store, chunk) for chunk in store.chunks]).flatten()
            if rows.numel() > self.table.numel():
                self.table = _fresh(max(2 * rows.numel(), 32 * COLUMNS), torch.int64, store.device)
            self.table[: rows.numel()].copy_(rows)
        self.tell(store.lengths)


def _relaid(chunk: Chunk) -> bool:
    """Make the chunk's tensors dense in the order that the kernels assume; True if one was not."""
    changed = False
    for name in ("k", "v", "index"):
        t = getattr(chunk, name)
        if t is not None and not t.is_contiguous():
            setattr(chunk, name, t.contiguous())
            changed = True
    if chunk.scale is not None and not chunk.scale.permute(0, 1, 4, 3, 2).is_contiguous():
        chunk.scale = chunk.scale.permute(0, 1, 4, 3, 2).contiguous().permute(0, 1, 4, 3, 2)
        changed = True
    return changed


def _addresses(store: Full, chunk: Chunk) -> Tensor:
    """(pages of the chunk, COLUMNS): where each page of row 0, KV head 0 begins."""
    page = torch.arange(chunk.cap // GROUP)
    rows = torch.zeros(len(page), COLUMNS, dtype=torch.int64)
    size = store.dtype.itemsize
    step = {"k": GROUP * store.shape.D * size, "v": GROUP * store.shape.D * size}
    step |= {"index": GROUP * store.bits // 8 if store.bits else GROUP * size, "scale": 4}
    for column, (name, stride) in enumerate(step.items()):
        t = getattr(chunk, name)
        if t is not None:
            rows[:, column] = page * stride + t.data_ptr()
    rows[:, CAP] = chunk.cap
    return rows


class Units(View):
    """Clusters: `table` with one row per 8 of them."""

    def __init__(self, store: Clusters) -> None:
        super().__init__(store)
        self.table = torch.zeros(0, dtype=torch.int64, device=store.device)
        self.seed = torch.tensor([store.seed & 0xFFFFFFFF], dtype=torch.int64, device=store.device)
        self.counted, self.at = 0, 0  # so many clusters at most after so many tokens

    def make_room(self, store: Clusters) -> None:
        """For one more cluster; the device is asked how many there are only when the room may be used up."""
        room, now = sum(block.cap for block in store.blocks), max(store.lengths)
        if self.counted + now - self.at + 1 > room:
            self.counted, self.at = int(store.m.max()), now
            if self.counted + 1 > room:
                store._reserve(self.counted + max(64, self.counted // 8))

    def update(self, store: Clusters) -> None:
        now = [t for block in store.blocks for t in (block.rep, block.samples, block.size)]
        if self.stale(now):
            _outside(self.device)
            rows = torch.cat([_clusters(store, block) for block in store.blocks]).flatten()
            if rows.numel() > self.table.numel():
                self.table = _fresh(max(2 * rows.numel(), 32 * COLUMNS), torch.int64, store.device)
            self.table[: rows.numel()].copy_(rows)
        self.tell(store.lengths)


def _clusters(store: Clusters, block: Block) -> Tensor:
    """(a row per 8 clusters of the block, COLUMNS): where they begin in KV head 0 of row 0."""
    rows = torch.zeros(block.cap // 8, COLUMNS, dtype=torch.int64)
    unit, row = torch.arange(block.cap // 8), store.shape.D * store.dtype.itemsize
    for column, (t, size) in enumerate(((block.rep, row), (block.samples, row * store.t), (block.size, 4))):
        assert t.is_contiguous()
        rows[:, column] = unit * 8 * size + t.data_ptr()
    rows[:, 3] = block.cap
    return rows


class Held(View):
    """Slots: `filled` beside the lengths, per row and KV head, and each row's budget and recent window.

    `order`: the slots of tokens 0, 1, ..., where the store has an order.
    """

    def __init__(self, store: Slots) -> None:
        super().__init__(store)
        self.filled, self.limits = torch.zeros_like(self.lengths), torch.zeros(2 * store.shape.B, dtype=torch.int32)
        self.limits = self.limits.to(store.device)
        self.known_filled, self.known_limits = [0] * store.shape.B, [0] * (2 * store.shape.B)
        self.order = torch.zeros(0, dtype=torch.int32, device=store.device)

    def update(self, store: Slots, recent: list[int] | None) -> None:
        self.tell(store.lengths)
        if store.filled != self.known_filled:
            _outside(self.device)
            self.filled.copy_(torch.tensor(store.filled, dtype=torch.int32).repeat_interleave(self.shape.H))
            self.known_filled = list(store.filled)
        limits = self.known_limits if recent is None else [*store.budget, *recent]
        if limits != self.known_limits:
            _outside(self.device)
            self.limits.copy_(torch.tensor(limits, dtype=torch.int32))
            self.known_limits = limits
        if store.order is not None and max(store.lengths) >= self.order.numel():
            n = 2 * max(store.lengths) + 1024
            self.order = _fresh(n, torch.int32, store.device)
            self.order.copy_(torch.tensor([store.order(p) for p in range(n)], dtype=torch.int32))
