"""The C++ kernels on blocks of a serving engine: one step for all rows of a batch, and tokens written by slots.

A row's tokens are in its blocks in order (`Blocks`), or it keeps a budget of them in one block (`SlotBlocks`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_void_p

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...stores.blocks import Blocks
from ...stores.slot_blocks import SlotBlocks
from ..protocol import SoftmaxOptions, Token
from . import library
from .library import CCache, CChunk, COp, CTokens
from .views import dtype_number, expect


class CPaged(Structure):
    """The structure skimkv_paged of skimkv.h."""

    _fields_ = [
        ("block", CChunk),
        *library.structure_fields(
            ("bytes blocks", c_int64),
            ("table", c_void_p),
            ("table_b", c_int64),
            ("open", c_void_p),
            ("o_h o_r", c_int64),
            ("mean counts", c_void_p),
            ("m_h n_h", c_int64),
        ),
    ]


@functools.cache
def _library() -> ctypes.CDLL:
    lib = library.library()
    if not hasattr(lib, "skimkv_step_paged"):
        raise ValueError("the native library has no kernels for blocks: install this version of skimkv again")
    lib.skimkv_step_paged.argtypes = [POINTER(COp), POINTER(CPaged), c_int, c_void_p]
    lib.skimkv_append_paged.argtypes = [POINTER(CTokens), POINTER(CPaged), c_void_p, c_int, c_void_p]
    lib.skimkv_step_paged.restype = lib.skimkv_append_paged.restype = c_char_p
    return lib


class _BlocksView:
    """Blocks in C structures."""

    def __init__(self, store: Blocks) -> None:
        layout, parts = store.layout, store.parts
        if layout.D > library.MAX_HEAD_SIZE:
            raise ValueError(f"no CPU kernel for D = {layout.D}; it must be at most {library.MAX_HEAD_SIZE}")
        self.cache, self.op, self.paged, self.tokens = CCache(), COp(), CPaged(), CTokens()
        c, p = self.cache, self.paged
        c.H, c.G, c.D, c.R = store.H, store.G, layout.D, layout.D
        c.B, c.dtype, c.channels = 1, dtype_number("a cache", layout.dtype), library.CHANNEL_NUMBERS[layout.channels]
        block = p.block
        block.cap = layout.tokens
        block.k, block.v = parts.k.data_ptr(), parts.v.data_ptr()
        _, block.k_h, block.k_n, _ = parts.k.stride()
        _, block.v_h, block.v_n, _ = parts.v.stride()
        p.bytes, p.blocks = store.distance, store.count
        if parts.codes is None:
            block.index = parts.channels.data_ptr()
            _, block.x_h, block.x_r, _ = parts.channels.stride()
        else:
            assert parts.scales is not None
            block.index, block.scale = parts.codes.data_ptr(), parts.scales.data_ptr()
            _, block.x_h, block.x_r, _ = parts.codes.stride()
            _, block.s_h, block.s_r, block.s_z, block.s_g = parts.scales.stride()
            p.open = parts.channels.data_ptr()
            _, p.o_h, p.o_r, _ = parts.channels.stride()
        if parts.mean is not None:
            assert parts.counts is not None
            p.mean, p.counts = parts.mean.data_ptr(), parts.counts.data_ptr()
            p.m_h, p.n_h = parts.mean.stride(1), parts.counts.stride(1)
        self.op.cache = self.tokens.cache = ctypes.addressof(c)


def _view_of(store: Blocks) -> _BlocksView:
    if not isinstance(store.view, _BlocksView):
        store.view = _BlocksView(store)
    return store.view


class _SlotBlocksView:
    """Blocks of slots in C structures; slots, now and recent are those of the last step's rows."""

    def __init__(self, store: SlotBlocks) -> None:
        example, parts = store.example, store.parts
        _, H, G, D = example.shape
        if D > library.MAX_HEAD_SIZE:
            raise ValueError(f"no CPU kernel for D = {D}; it must be at most {library.MAX_HEAD_SIZE}")
        self.cache, self.op, self.paged = CCache(), COp(), CPaged()
        c, block, op = self.cache, self.paged.block, self.op
        c.H, c.G, c.D, c.dtype = H, G, D, dtype_number("a cache", example.dtype)
        c.bits = example.row_format.bits or 0
        block.cap, block.k, block.v = store.capacity, parts.k.data_ptr(), parts.v.data_ptr()
        _, block.k_h, block.k_n, _ = parts.k.stride()
        _, block.v_h, block.v_n, _ = parts.v.stride()
        self.paged.bytes, self.paged.blocks, self.paged.table_b = store.distance, store.count, 1
        op.cache, op.method, op.keep = ctypes.addressof(c), library.DENSE, library.SLOT
        if parts.score is not None:
            assert parts.pos is not None
            op.score, op.pos, op.c_h = parts.score.data_ptr(), parts.pos.data_ptr(), parts.score.stride(1)


def append_slots(store: Blocks, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write tokens to their slots: k, v (n,H,D), slots (n,) int64; a negative slot leaves its token out.

    Raises ValueError if shapes or types do not fit, or if a slot is beyond the blocks.
    """
    view, n, layout = _view_of(store), slots.shape[0], store.layout
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    slots = slots.contiguous()
    expect("k", k, (n, store.H, layout.D), layout.dtype)
    expect("v", v, (n, store.H, layout.D), layout.dtype)
    expect("slots", slots, (n,), torch.int64)
    t = view.tokens
    t.n, t.k, t.v = n, k.data_ptr(), v.data_ptr()
    t.k_n, t.k_h, _ = k.stride()
    t.v_n, t.v_h, _ = v.stride()
    _raise(_library().skimkv_append_paged(t, view.paged, slots.data_ptr(), *library.threads()))


class PagedKernels:
    """The decode steps of `ops.Kernels` that read blocks, for all rows of a batch in one call.

    Every step takes q (B,H,G,D) and returns (B,H,G,D) in q's dtype; the current token is in the blocks already.
    """

    name = "cpu"
    max_head_size = library.MAX_HEAD_SIZE

    def dense(self, store: Blocks, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Attention over all positions (methods/dense.py)."""
        return _step(store, q, token, library.DENSE, {}, **softmax)

    def sparq(
        self,
        store: Blocks,
        q: Tensor,
        token: Token | None,
        *,
        r: int,
        k: int,
        local: int,
        temperature: str,
        mean_value: bool,
        **softmax: Unpack[SoftmaxOptions],
    ) -> Tensor:
        """SparQ's algorithm 1 (methods/sparq.py)."""
        fields = {"r": r, "k": k, "local": local, "temperature": library.TEMPERATURES[temperature]}
        fields["use_mean"] = int(mean_value)
        return _step(store, q, token, library.SPARQ, fields, **softmax)

    def top_k(
        self,
        store: Blocks,
        q: Tensor,
        token: Token | None,
        *,
        k: int,
        oracle: bool,
        **softmax: Unpack[SoftmaxOptions],
    ) -> Tensor:
        """Exact scores and the k best positions (methods/topk.py)."""
        return _step(store, q, token, library.ORACLE if oracle else library.TOPK, {"k": k}, **softmax)

    def ring_slots(self, store: SlotBlocks, q: Tensor, token: Token, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Attention over the slots in use and the current token, which then takes its slot (methods/slots.py)."""
        return _step_slots(store, q, token, store.next_slots(), **softmax)

    def scored_slots(
        self,
        store: SlotBlocks,
        q: Tensor,
        token: Token,
        *,
        recent: Sequence[int],
        **softmax: Unpack[SoftmaxOptions],
    ) -> Tensor:
        """The same, with scores; where a row's budget is full, the kernel chooses the slot (methods/h2o.py)."""
        kernel_chooses = -1
        slots = [n if n < store.capacity else kernel_chooses for n in store.lengths]
        return _step_slots(store, q, token, slots, recent, **softmax)


def _step_slots(
    store: SlotBlocks,
    q: Tensor,
    token: Token,
    slots: Sequence[int],
    recent: Sequence[int] | None = None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    if sinks is not None:
        raise ValueError("attention sinks are not supported on blocks")
    if not isinstance(store.view, _SlotBlocksView):
        store.view = _SlotBlocksView(store)
    view, op, dtype = store.view, store.view.op, store.example.dtype
    B, H, _, D = store.shape
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, *token))
    if k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    expect("q", q, tuple(store.shape), q.dtype)
    expect("k", k, (B, H, D), dtype)
    expect("v", v, (B, H, D), dtype)
    expect("numbers", store.numbers, (B,), torch.int32)
    y = torch.empty(q.shape, dtype=q.dtype)
    numbers = ctypes.c_int64 * B  # these live as long as the step
    filled, at, now = numbers(*store.filled), numbers(*slots), numbers(*store.lengths)
    view.cache.B, view.cache.lengths, view.paged.table = B, ctypes.addressof(filled), store.numbers.data_ptr()
    op.dtype, op.scale, op.softcap = dtype_number("a query", q.dtype), scale, softcap or 0
    op.slot, op.now = ctypes.addressof(at), ctypes.addressof(now)
    if recent is not None:
        protected = numbers(*recent)
        op.recent = ctypes.addressof(protected)
    op.q, op.y, op.k_new, op.v_new = q.data_ptr(), y.data_ptr(), k.data_ptr(), v.data_ptr()
    op.q_b, op.q_h, op.q_g, _ = q.stride()
    op.y_b, op.y_h, op.y_g, _ = y.stride()
    op.n_b, op.n_h, _ = k.stride()
    _raise(_library().skimkv_step_paged(op, view.paged, *library.threads()))
    return y


def _step(
    store: Blocks,
    q: Tensor,
    token: Token | None,
    method: int,
    fields: dict[str, int],
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    assert token is None, "tokens are written to blocks by append_slots"
    if sinks is not None:
        raise ValueError("attention sinks are not supported on blocks")
    view, op, lengths, table = _view_of(store), _view_of(store).op, store.lengths, store.table
    q = q if q.stride(-1) == 1 else q.contiguous()
    y = torch.empty(q.shape, dtype=q.dtype)
    B = lengths.shape[0]
    expect("q", q, tuple(store.shape), q.dtype)
    expect("lengths", lengths, (B,), torch.int64)
    expect("table", table, (B, table.shape[1]), torch.int32)
    view.cache.B, view.cache.lengths = B, lengths.data_ptr()
    view.paged.table, view.paged.table_b = table.data_ptr(), table.stride(0)
    op.dtype, op.method, op.scale, op.softcap = dtype_number("a query", q.dtype), method, scale, softcap or 0
    for name, value in fields.items():
        setattr(op, name, value)
    op.q, op.y = q.data_ptr(), y.data_ptr()
    op.q_b, op.q_h, op.q_g, _ = q.stride()
    op.y_b, op.y_h, op.y_g, _ = y.stride()
    _raise(_library().skimkv_step_paged(op, view.paged, *library.threads()))
    return y


def _raise(error: bytes | None) -> None:
    if error is not None:
        raise ValueError(error.decode())
