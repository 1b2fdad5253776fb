"""The memory of any store in the C structures of skimkv.h: checked when they are made, made anew when a tensor changes.

A store keeps its tokens in tensors of its own (`StoreMemory`), or in blocks that a serving engine owns (`BlocksMemory`,
`SlotBlocksMemory`). Every memory has the operation of its store's steps, and says where the next token goes.
"""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ...stores.blocks import Blocks
from ...stores.full import CHANNELS, Full
from ...stores.pages import PageBounds
from ...stores.quantise import BITS, GROUP
from ...stores.slot_blocks import SlotBlocks
from ...stores.slots import Slots
from . import library
from .structs import CCache, CChunk, COp, CPaged

CHANNEL_NUMBERS = {name: number for number, name in enumerate(CHANNELS)}


def expect(name: str, t: Tensor, shape: tuple[int, ...], dtype: torch.dtype, rows: bool = True) -> None:
    """Raise ValueError unless t has this shape and type and lies on the CPU.

    With `rows`, its last dimension must be contiguous as well.
    """
    if t.shape != shape or t.dtype != dtype or t.device.type != "cpu":
        raise ValueError(f"{name} is {t.dtype} {tuple(t.shape)} on {t.device}; must be {dtype} {shape} on cpu")
    if rows and t.shape[-1] > 1 and t.stride(-1) != 1:
        raise ValueError(f"{name} has stride {t.stride(-1)} in its last dimension; must be 1")
    if t.data_ptr() % t.element_size():
        raise ValueError(f"{name} is not aligned to its elements of {t.element_size()} bytes")


def dtype_number(what: str, dtype: torch.dtype) -> int:
    """The C library's number for a type. Raises ValueError if no kernel takes it."""
    if dtype not in library.DTYPES:
        raise ValueError(f"no CPU kernel for {what} of {dtype}; there are some for float32, bfloat16 and float16")
    return library.DTYPES[dtype]


class Memory(abc.ABC):
    """The memory of a store as a skimkv_cache, and the operation of its steps.

    described: what the operation was last filled in with, apart from addresses and numbers of tokens; None: nothing.
    copies: whether tensors of this form must be copied for it.
    Raises ValueError if no kernel takes the head size or the type.
    """

    def __init__(self, H: int, G: int, D: int, dtype: torch.dtype) -> None:
        if D > library.MAX_HEAD_SIZE:
            raise ValueError(f"no CPU kernel for D = {D}; it must be at most {library.MAX_HEAD_SIZE}")
        self.cache, self.op = CCache(H=H, G=G, D=D, dtype=dtype_number("a cache", dtype)), COp()
        self.op.cache = ctypes.addressof(self.cache)
        self.address = ctypes.addressof(self.op)
        self.described: object = None
        self.take: Callable[..., bytes | None]  # the function that takes the step; known when it is described
        self.copies = self.has_sinks = False

    def set_sinks(self, address: int) -> None:
        """Let the next step have attention sinks, whose memory must stay until it is taken."""
        self.op.sinks, self.has_sinks = address, True

    def remove_sinks(self) -> None:
        """Let the next step have no attention sinks."""
        if self.has_sinks:
            self.op.sinks, self.has_sinks = None, False

    def is_current(self, store: Any) -> bool:
        """Whether the store still has the tensors that this memory points into; blocks of an engine stay."""
        return True

    @abc.abstractmethod
    def place(self, store: Any, recent: Sequence[int], more: int) -> bool:
        """Set how many tokens the rows have and where the next one goes; False if there is no room for it.

        recent: as of KernelStep. more: 1 if a step takes a token, or else 0.
        Raises ValueError if the numbers do not fit the store.
        """


class StoreMemory(Memory):
    """The memory of a store that owns its tensors.

    numbers: lengths, and for a store of slots those that the token takes, the token's position and the recent tokens,
    of every row; all in one array, so that they are set at once.
    """

    def __init__(self, store: Full | Slots) -> None:
        B, H, G, D = store.shape
        super().__init__(H, G, D, store.dtype)
        self.shape, self.places = store.shape, places_of(store)
        self.turn: Any = None  # the operation that turns the fixed keys of a store of slots
        self.numbers = (ctypes.c_int64 * (4 * B))()
        start, c = ctypes.addressof(self.numbers), self.cache
        lengths, *self.of_slots = (start + 8 * B * part for part in range(4))
        c.B, c.bits = B, store.row_format.bits or 0
        chunks = self._slots(store) if isinstance(store, Slots) else self._full(store)
        self.chunks = (CChunk * len(chunks))(*chunks)
        c.lengths, c.chunks, c.n_chunks = lengths, ctypes.addressof(self.chunks), len(chunks)
        self.capacity: int = sum(chunk.cap for chunk in chunks)

    def is_current(self, store: Full | Slots) -> bool:
        """Whether the store still has the shape and the tensors that this memory points into."""
        return store.shape is self.shape and all(map(is_, self.places, places_of(store)))

    def place(self, store: Full | Slots, recent: Sequence[int], more: int) -> bool:
        """Set lengths, and of slots all that a step needs. Shapes, arguments and errors: as of `Memory`."""
        if type(store) is not Slots:
            lengths = store.lengths
            if len(lengths) == 1:  # no loops, whose code would come from memory at every step
                self.numbers[0] = length = lengths[0]
                return length + more <= self.capacity
            self.numbers[: len(lengths)] = lengths  # type: ignore[assignment]
            return max(lengths) + more <= self.capacity
        if not more:
            raise ValueError("a step over slots needs the current token")
        numbers, slots = slot_numbers(store, recent)
        if max(slots) >= self.capacity:
            return False
        self.numbers[:] = numbers  # type: ignore[assignment]
        return True

    def _rows(self, store: Full | Slots, start: int, k: Tensor, v: Tensor) -> CChunk:
        """Rows of K and V (B,H,tokens,width of a stored row) that begin at position `start`."""
        shape, dtype = (
            (*store.shape[:2], k.shape[2], store.row_format.width),
            store.row_format.storage_dtype(store.dtype),
        )
        expect("k", k, shape, dtype)
        expect("v", v, shape, dtype)
        chunk = CChunk(start=start, cap=k.shape[2], k=k.data_ptr(), v=v.data_ptr())
        chunk.k_b, chunk.k_h, chunk.k_n, _ = k.stride()
        chunk.v_b, chunk.v_h, chunk.v_n, _ = v.stride()
        return chunk

    def _slots(self, store: Slots) -> list[CChunk]:
        C, op = store.k.shape[2], self.op
        op.slot, op.now, op.recent = self.of_slots
        if store.score is not None:
            assert store.pos is not None
            expect("score", store.score, (*store.shape[:2], C), torch.float32)
            expect("pos", store.pos, (*store.shape[:2], C), torch.int32)
            if store.pos.stride() != store.score.stride():
                raise ValueError(f"pos has strides {store.pos.stride()}, score {store.score.stride()}; must be equal")
            op.score, op.pos = store.score.data_ptr(), store.pos.data_ptr()
            op.c_b, op.c_h, _ = store.score.stride()
        return [self._rows(store, 0, store.k, store.v)] if C else []

    def _full(self, store: Full) -> list[CChunk]:
        B, H, _, D = store.shape
        R, c, chunks = store.R, self.cache, list[CChunk]()
        c.R, c.channels = R, CHANNEL_NUMBERS[store.channels]
        if store.bits != BITS.get(store.channels):
            raise ValueError(f"an index of channels={store.channels!r} has {store.bits} bits")
        for chunk in store.chunks:
            start = chunks[-1].start + chunks[-1].cap if chunks else 0
            if chunk.start != start or chunk.cap != chunk.k.shape[2]:
                raise ValueError(
                    f"a chunk of {chunk.cap} positions from {chunk.start} has {chunk.k.shape[2]}, and begins at {start}"
                )
            to = self._rows(store, chunk.start, chunk.k, chunk.v)
            if chunk.index is not None:
                width = chunk.cap * store.bits // 8 if store.bits else chunk.cap
                expect("index", chunk.index, (B, H, R, width), torch.uint8 if store.bits else store.dtype)
                to.index = chunk.index.data_ptr()
                to.x_b, to.x_h, to.x_r, _ = chunk.index.stride()
            if chunk.scale is not None:
                expect("scale", chunk.scale, (B, H, chunk.cap // GROUP, 2, R), torch.float32, rows=False)
                to.scale = chunk.scale.data_ptr()
                to.s_b, to.s_h, to.s_g, to.s_z, to.s_r = chunk.scale.stride()
            if chunk.means is not None:
                expect("means", chunk.means, (B, H, chunk.cap // GROUP, R), store.dtype)
                to.means = chunk.means.data_ptr()
                to.e_b, to.e_h, to.e_g, _ = chunk.means.stride()
            chunks.append(to)
        if store.pages is not None:
            c.page, self.page_chunks = store.pages.page, self._pages(store.pages, store.dtype)
            c.pages, c.n_pages = ctypes.addressof(self.page_chunks), len(self.page_chunks)
        if store.rows_read is not None:
            expect("rows_read", store.rows_read, (B, 2), torch.int64)
            self.op.rows_read = _contiguous("rows_read", store.rows_read).data_ptr()
        if store.tail is not None:
            expect("tail", store.tail, (B, H, R, GROUP), store.dtype)
            c.tail = store.tail.data_ptr()
            c.t_b, c.t_h, c.t_r, _ = store.tail.stride()
        if store.v_mean is not None:
            expect("v_mean", store.v_mean, (B, H, D), torch.float32)
            c.mean = store.v_mean.data_ptr()
            c.m_b, c.m_h, _ = store.v_mean.stride()
        if store.projection is not None:
            expect("projection", store.projection, (H, D, R), torch.float32)
            c.projection = _contiguous("projection", store.projection).data_ptr()
        return chunks

    def _pages(self, pages: PageBounds, dtype: torch.dtype) -> ctypes.Array[CChunk]:
        """The bounds of pages."""
        chunks, (B, H, _, D) = list[CChunk](), self.shape
        for piece in pages.bounds:
            expect("bounds", piece, (B, H, piece.shape[2], 2, D), dtype)
            if piece.stride(3) != D:
                raise ValueError(f"bounds have stride {piece.stride(3)} between the smallest and largest; must be {D}")
            start = chunks[-1].start + chunks[-1].cap if chunks else 0
            chunk = CChunk(start=start, cap=piece.shape[2], k=piece.data_ptr())
            chunk.k_b, chunk.k_h, chunk.k_n = piece.stride()[:3]
            chunks += [chunk] if chunk.cap else []
        return (CChunk * len(chunks))(*chunks)


class BlocksMemory(Memory):
    """Blocks of tokens. Lengths and the table of blocks are the store's own tensors, and change with every batch."""

    def __init__(self, store: Blocks) -> None:
        layout, parts = store.layout, store.parts
        super().__init__(store.H, store.G, layout.D, layout.dtype)
        self.cache.B, self.cache.R, self.cache.channels = 1, layout.D, CHANNEL_NUMBERS[layout.channels]
        self.paged = p = CPaged(bytes=store.distance, blocks=store.count)
        p.block = _block_of_rows(layout.tokens, parts.k, parts.v)
        block = p.block
        self.cache.bits = layout.row_format.bits or 0
        if parts.codes is None:
            if parts.channels is not None:
                block.index = parts.channels.data_ptr()
                _, block.x_h, block.x_r, _ = parts.channels.stride()
        else:
            assert parts.scales is not None and parts.channels is not None
            block.index, block.scale = parts.codes.data_ptr(), parts.scales.data_ptr()
            _, block.x_h, block.x_r, _ = parts.codes.stride()
            _, block.s_h, block.s_r, block.s_z, block.s_g = parts.scales.stride()
            p.open = parts.channels.data_ptr()
            _, p.o_h, p.o_r, _ = parts.channels.stride()
        if parts.means is not None:
            assert parts.coded is not None
            block.means, p.coded = parts.means.data_ptr(), parts.coded.data_ptr()
            _, block.e_h, block.e_g, _ = parts.means.stride()
        if parts.mean is not None:
            assert parts.counts is not None
            p.mean, p.counts = parts.mean.data_ptr(), parts.counts.data_ptr()
            p.m_h, p.n_h = parts.mean.stride(1), parts.counts.stride(1)
        self.op.paged = ctypes.addressof(p)

    def place(self, store: Blocks, recent: Sequence[int], more: int) -> bool:
        """Take the rows of the batch. Arguments and errors: as of `Memory`."""
        if more:
            raise ValueError("tokens are written to blocks by append_slots, before the step")
        lengths, table = store.lengths, store.table
        B = lengths.shape[0]
        expect("lengths", lengths, (B,), torch.int64)
        expect("table", table, (B, table.shape[1]), torch.int32)
        self.table = table.contiguous()  # rows that follow each other; a copy lives as long as this
        self.cache.B, self.cache.lengths = B, lengths.data_ptr()
        self.paged.table, self.paged.table_b = self.table.data_ptr(), table.shape[1]
        if store.rows_read is not None:
            expect("rows_read", store.rows_read, (B, 2), torch.int64)
            self.op.rows_read = store.rows_read.data_ptr()
        return True


class SlotBlocksMemory(Memory):
    """Blocks of slots, of which each row of a batch has one."""

    def __init__(self, store: SlotBlocks) -> None:
        example, parts = store.example, store.parts
        _, H, G, D = example.shape
        super().__init__(H, G, D, example.dtype)
        self.cache.bits = example.row_format.bits or 0
        self.paged = CPaged(bytes=store.distance, blocks=store.count, table_b=1)
        self.paged.block = _block_of_rows(store.capacity, parts.k, parts.v)
        self.op.paged = ctypes.addressof(self.paged)
        if parts.score is not None:
            assert parts.pos is not None
            self.op.score, self.op.pos, self.op.c_h = (
                parts.score.data_ptr(),
                parts.pos.data_ptr(),
                parts.score.stride(1),
            )

    def place(self, store: SlotBlocks, recent: Sequence[int], more: int) -> bool:
        """Take the rows of the batch. Arguments and errors: as of `Memory`."""
        if not more:
            raise ValueError("a step over slots needs the current token")
        B = len(store.lengths)
        expect("numbers", store.numbers, (B,), torch.int32)
        numbers, _ = slot_numbers(store, recent)
        self.numbers = (ctypes.c_int64 * (4 * B))(*numbers)
        start = ctypes.addressof(self.numbers)
        self.cache.lengths, self.op.slot, self.op.now, self.op.recent = (start + 8 * B * part for part in range(4))
        self.cache.B, self.paged.table = B, store.numbers.data_ptr()
        return True


def slot_numbers(store: Slots | SlotBlocks, recent: Sequence[int]) -> tuple[list[int], list[int]]:
    """What a step over slots needs: slots in use, the token's slot, its position and the recent tokens, of every row.

    And the token's slots alone: -1 where the kernel chooses by the scores. Raises ValueError if `recent` does not fit.
    """
    if not recent:
        slots = store.next_slots()
        return [*store.filled, *slots, *store.lengths, *[0] * len(slots)], slots
    if len(recent) != len(store.lengths):
        raise ValueError(f"recent = {recent} must be {len(store.lengths)} numbers, one for each row of the batch")
    slots = store.free_slots()
    return [*store.filled, *slots, *store.lengths, *recent], slots


def places_of(store: Full | Slots) -> tuple[object, ...]:
    """The objects of a store that its memory points into; a chunk never changes, so their tuple stands for all."""
    if type(store) is not Slots:  # isinstance enters a function of Python where a class is abstract
        assert isinstance(store, Full)
        return store.chunks, store.index, store.mean, store.rows_read, store.pages
    return store.k, store.v, store.score, store.pos


def memory_of(store: Full | Slots | Blocks | SlotBlocks) -> Memory:
    """The memory of a store, which the store remembers until one of its tensors is replaced."""
    memory: Any = store.view
    if type(memory) not in (StoreMemory, BlocksMemory, SlotBlocksMemory) or not memory.is_current(store):
        if isinstance(store, Blocks):
            memory = BlocksMemory(store)
        else:
            memory = SlotBlocksMemory(store) if isinstance(store, SlotBlocks) else StoreMemory(store)
        store.view = memory
    current: Memory = memory
    return current


def placed_memory(store: Full | Slots | Blocks | SlotBlocks, recent: Sequence[int] = (), more: int = 0) -> Memory:
    """The memory of a store with the numbers of its next step, for which room is made. Raises as `Memory.place`."""
    memory = memory_of(store)
    if memory.place(store, recent, more):
        return memory
    if isinstance(memory, StoreMemory) and not more:
        raise ValueError(f"a row of {max(store.lengths)} tokens exceeds the capacity of {memory.capacity}")
    assert isinstance(store, Full | Slots)
    store.reserve(more)
    memory = memory_of(store)
    if not memory.place(store, recent, more):
        raise ValueError("a slot is beyond the memory of the store")
    return memory


def _block_of_rows(tokens: int, k: Tensor, v: Tensor) -> CChunk:
    """Block number 0 of an engine's memory: k, v (blocks,H,tokens,width of a stored row)."""
    block = CChunk(cap=tokens, k=k.data_ptr(), v=v.data_ptr())
    _, block.k_h, block.k_n, _ = k.stride()
    _, block.v_h, block.v_n, _ = v.stride()
    return block


def _contiguous(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; must be contiguous")
    return tensor
