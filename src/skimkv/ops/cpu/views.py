"""Stores as the C structures of skimkv.h: checked when they are made, and made anew when a tensor is replaced.

After a step that was like the one before, little more than the code of the library has to come into the processor's
caches: what a view remembers of a store and of its last step is therefore compared by identity, or in one comparison.
"""

from __future__ import annotations

import ctypes
import math
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...stores.clusters import Clusters
from ...stores.full import Full
from ...stores.quantise import GROUP
from ...stores.slots import Slots
from . import library
from .library import CBlock, CCache, CChunk, CClusters, COp, CTensorForm, CTensorStep, CTokens


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


def tensor_form(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> CTensorForm:
    """The form of a tensor of at most 4 dimensions whose type the library has."""
    form = CTensorForm(dtype_number("a tensor", dtype), len(shape))
    form.shape[: len(shape)], form.strides[: len(shape)] = shape, strides
    return form


SPARE_BYTES = 1 << 17  # of outputs that are allocated together


class Outputs:
    """Tensors (B,H,G,D) for the results of a store's steps. Each is given away once: a result stays what it is.

    The first allocation after a model has read its weights takes as long as ten that follow it, so several are made
    together. spare: those that were not given away, all of one type; always the same list.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.dtype: torch.dtype | None = None
        self.spare: list[Tensor] = []

    def take(self, dtype: torch.dtype) -> Tensor:
        """A tensor of this type whose numbers are not set."""
        if dtype is not self.dtype or not self.spare:
            self.dtype = dtype
            many = max(1, min(16, SPARE_BYTES // (math.prod(self.shape) * dtype.itemsize)))
            with torch.inference_mode(False):  # such tensors may be used everywhere
                self.spare[:] = [torch.empty(self.shape, dtype=dtype, device="cpu") for _ in range(many)]
        return self.spare.pop()


Settings = tuple[int, int, int, int, int, int]  # of a method: the fields of skimkv_op from `method` on


class Arguments(NamedTuple):
    """All that a step was asked for, apart from addresses and lengths.

    keep: what becomes of the current token. forms: shapes, strides, types and devices of q, k and v, scale and softcap.
    """

    settings: Settings
    keep: int
    no_token: bool
    no_sinks: bool
    forms: tuple[object, ...]


class CacheView:
    """A Full or Slots store as one skimkv_cache, with an operation and an append that point to it.

    It stays right as long as the store's shape and tensors are the same objects, which `is_current` tells.
    numbers: lengths, and for a store of slots those that the token takes, the token's position and the recent tokens,
    of every row: all in one array, so that they can be set at once. arguments: all that was checked before the last
    step; while they are the same, so are the operation's fields.
    """

    def __init__(self, store: Full | Slots) -> None:
        self.shape, self.places = store.shape, places_of(store)
        B, H, G, D = store.shape
        if D > library.MAX_HEAD_SIZE:
            raise ValueError(f"no CPU kernel for D = {D}; it must be at most {library.MAX_HEAD_SIZE}")
        self.cache, self.op, self.tokens = CCache(), COp(), CTokens()
        self.numbers, row = (ctypes.c_int64 * (4 * B))(), ctypes.c_int64 * B
        self.lengths, self.slots, self.now, self.recent = (row.from_buffer(self.numbers, 8 * B * i) for i in range(4))
        c = self.cache
        c.B, c.H, c.G, c.D, c.dtype = B, H, G, D, dtype_number("a cache", store.dtype)
        c.bits = store.row_format.bits or 0
        self.chunks = self._slots(store) if isinstance(store, Slots) else self._full(store)
        c.lengths, c.chunks, c.n_chunks = (
            ctypes.addressof(self.lengths),
            ctypes.addressof(self.chunks),
            len(self.chunks),
        )
        self.op.cache = self.tokens.cache = ctypes.addressof(c)
        self.tokens.n = 1
        self.capacity = sum(int(chunk.cap) for chunk in self.chunks)
        self.address = ctypes.addressof(self.op)
        self.arguments: Arguments | None = None
        self.outputs = Outputs(tuple(store.shape))
        self.pool = library.thread_pool()
        self.take_step: Any = library.library().skimkv_step
        slots = isinstance(store, Slots)
        self.tensor_step = CTensorStep(
            op=self.address, parallel=self.pool, numbers=ctypes.addressof(self.numbers), count=4 * B if slots else B,
            place=B if slots else 0, rows=B, room=self.capacity,
        )  # fmt: skip

    def is_current(self, store: Full | Slots) -> bool:
        """Whether the store still has the shape and the tensors that this view points into."""
        return store.shape is self.shape and all(map(is_, self.places, places_of(store)))

    def expect_forms(self, q: CTensorForm, k: CTensorForm, v: CTensorForm) -> bool:
        """Let `tensor_step` expect tensors of these forms. False if PyTorch cannot describe tensors to it."""
        functions, step = library.tensor_descriptions(), self.tensor_step
        if functions is None:
            return False
        step.q, step.k, step.v = q, k, v
        (
            step.describe, step.item_of_list, step.integer, step.release_python, step.take_python, step.clear_error
        ) = functions  # fmt: skip
        return True

    def forget_rows_read(self) -> None:
        """Set the rows that a step read to none, for a step that counts them."""
        ctypes.memset(self.op.rows_read, 0, 16 * self.shape.B)

    def _rows(self, store: Full | Slots, to: CChunk, start: int, k: Tensor, v: Tensor) -> None:
        shape, dtype = (
            (*store.shape[:2], k.shape[2], store.row_format.width),
            store.row_format.storage_dtype(store.dtype),
        )
        to.start, to.cap = start, k.shape[2]
        expect("k", k, shape, dtype)
        expect("v", v, shape, dtype)
        to.k, to.v = k.data_ptr(), v.data_ptr()
        to.k_b, to.k_h, to.k_n, _ = k.stride()
        to.v_b, to.v_h, to.v_n, _ = v.stride()

    def _slots(self, store: Slots) -> ctypes.Array[CChunk]:
        C = store.k.shape[2]
        chunks = (CChunk * min(C, 1))()
        if C:
            self._rows(store, chunks[0], 0, store.k, store.v)
        if store.score is not None:
            assert store.pos is not None
            expect("score", store.score, (*store.shape[:2], C), torch.float32)
            expect("pos", store.pos, (*store.shape[:2], C), torch.int32)
            if store.pos.stride() != store.score.stride():
                raise ValueError(f"pos has strides {store.pos.stride()}, score {store.score.stride()}; must be equal")
            self.op.score, self.op.pos = store.score.data_ptr(), store.pos.data_ptr()
            self.op.c_b, self.op.c_h, _ = store.score.stride()
            self.op.now, self.op.recent = ctypes.addressof(self.now), ctypes.addressof(self.recent)
        self.op.slot = ctypes.addressof(self.slots)
        return chunks

    def _full(self, store: Full) -> ctypes.Array[CChunk]:
        B, H, _, D = store.shape
        R, c = store.R, self.cache
        c.R, c.channels = R, library.CHANNEL_NUMBERS[store.channels]
        chunks = (CChunk * len(store.chunks))()
        for chunk, to in zip(store.chunks, chunks, strict=True):
            self._rows(store, to, chunk.start, chunk.k, chunk.v)
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
        if store.rows_read is not None:
            expect("rows_read", store.rows_read, (B, 2), torch.int64)
            if not store.rows_read.is_contiguous():
                raise ValueError(f"rows_read has strides {store.rows_read.stride()}; must be contiguous")
            self.op.rows_read = store.rows_read.data_ptr()
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
            if not store.projection.is_contiguous():
                raise ValueError(f"projection has strides {store.projection.stride()}; must be contiguous")
            c.projection = store.projection.data_ptr()
        return chunks


class ClustersView:
    """A Clusters store as skimkv_clusters; all of its tensors are contiguous.

    It stays right as long as the store's shape and tensors are the same objects.
    """

    def __init__(self, store: Clusters) -> None:
        self.shape, self.tensors = store.shape, _cluster_tensors(store)
        self.lengths = (ctypes.c_int64 * store.shape.B)()
        B, H, G, D = store.shape
        self.clusters = c = CClusters()
        c.B, c.H, c.G, c.D, c.t, c.s = B, H, G, D, store.t, store.s
        c.dtype, c.delta, c.seed = dtype_number("a cache", store.dtype), store.delta, store.seed & 0xFFFFFFFF
        c.lengths = ctypes.addressof(self.lengths)
        for t in self.tensors:
            if not t.is_contiguous() or t.device.type != "cpu":
                raise ValueError(
                    f"a tensor of the clusters has strides {t.stride()} on {t.device}; must be contiguous on cpu"
                )
        expect("k", store.k, (B, H, store.s, D), store.dtype)
        expect("v", store.v, (B, H, store.s, D), store.dtype)
        expect("m", store.m, (B, H), torch.int64)
        expect("mu", store.mu, (B, H), torch.float64)
        c.k, c.v, c.m, c.mu = store.k.data_ptr(), store.v.data_ptr(), store.m.data_ptr(), store.mu.data_ptr()
        self.blocks = (CBlock * len(store.blocks))()
        for block, to in zip(store.blocks, self.blocks, strict=True):
            to.start, to.cap = block.start, block.cap
            expect("rep", block.rep, (B, H, block.cap, D), store.dtype)
            expect("samples", block.samples, (B, H, block.cap, store.t, D), store.dtype)
            expect("size", block.size, (B, H, block.cap), torch.int32)
            to.rep, to.samples, to.size = block.rep.data_ptr(), block.samples.data_ptr(), block.size.data_ptr()
        c.blocks, c.n_blocks = ctypes.addressof(self.blocks), len(self.blocks)

    def is_current(self, store: Clusters) -> bool:
        """Whether the store still has the shape and the tensors that this view points into."""
        now = _cluster_tensors(store)
        return self.shape == store.shape and len(now) == len(self.tensors) and all(map(is_, self.tensors, now))


def places_of(store: Full | Slots) -> tuple[object, ...]:
    """The objects of a store that a view points into; chunks do not change, so their tuple stands for their tensors."""
    if isinstance(store, Full):
        return store.chunks, store.index, store.mean, store.rows_read
    return store.k, store.v, store.score, store.pos


def _cluster_tensors(store: Clusters) -> list[Tensor]:
    own = [store.k, store.v, store.m, store.mu]
    for block in store.blocks:
        own += (block.rep, block.samples, block.size)
    return own


def view_of(store: Full | Slots, lengths: list[int], more: int = 0) -> CacheView:
    """The view of a Full or Slots store, with the lengths of this step, and with room for `more` tokens after them.

    Raises ValueError if the lengths exceed the store's room.
    """
    view, longest = store.view, max(lengths)
    if not isinstance(view, CacheView) or not view.is_current(store):
        view = store.view = CacheView(store)
    if longest + more > view.capacity:
        if not more:
            raise ValueError(f"a row of {longest} tokens exceeds the capacity of {view.capacity}")
        store.reserve(more)
        view = store.view = CacheView(store)
    view.lengths[:] = lengths  # type: ignore[assignment]
    return view


def clusters_view_of(store: Clusters) -> ClustersView:
    """The view of a Clusters store, with the lengths of this step."""
    view = store.view
    if not isinstance(view, ClustersView) or not view.is_current(store):
        view = store.view = ClustersView(store)
    view.lengths[:] = store.lengths  # type: ignore[assignment]
    return view
