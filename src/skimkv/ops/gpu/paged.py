"""The Triton kernels on blocks of a serving engine: one step for all rows of a batch, and tokens written by slots.

A kernel is given the address of a layer's memory, and for every row a table of where its pages begin in that memory. So
one table serves all layers, and it is written in place: a captured graph of a step stays right.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...stores.base import Shape, Workspace
from ...stores.row_blocks import RowBlockLayout, RowBlocks
from ..protocol import SoftmaxOptions, Token
from . import launch
from .backend import Selection, attend_all, attend_selected, make_query, sparq_selection
from .launch import APPEND_WARPS, BlockParts, CachedPages, Query, TokenRows, pad, validate
from .tables import COLUMN_CAPACITY, COLUMN_INDEX, COLUMN_K, COLUMN_V, PAGE_TOKENS, TABLE_COLUMNS

with contextlib.suppress(ImportError):  # launch.missing says why
    from .kernels.append_slots import append_slots_kernel


MOST_LOGITS = 1 << 26  # of all rows that are taken at once, in float32: 256 MiB


class _Batch(NamedTuple):
    """A batch in the blocks of one layer, as launches are told of it."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device
    workspace: Workspace
    R: int
    bits: int | None = None


def append_slots(blocks: RowBlocks, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write tokens to their slots: k, v (n,H,D), slots (n,) int64; a negative slot leaves its token out.

    Nothing is read back from the device, so slots are not checked. Raises ValueError if shapes, types or devices do not
    fit.
    """
    layout, n, device = blocks.layout, slots.shape[0], blocks.memory.device
    shape = (n, layout.H, layout.D)
    validate(_batch_of(blocks, n, Workspace()), k=(k, shape), v=(v, shape))
    if slots.dtype != torch.int64 or slots.device != device or not slots.is_contiguous():
        raise ValueError(f"slots is {slots.dtype} on {slots.device}; must be contiguous torch.int64 on {device}")
    if n == 0:
        return
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    channels = blocks.k if blocks.channels is None else blocks.channels
    target = BlockParts(blocks.k, blocks.v, channels, blocks.distance // layout.dtype.itemsize)
    append_slots_kernel[n, layout.H](
        TokenRows(k, v, *k.stride()[:2], *v.stride()[:2]), slots, target, layout.H, layout.tokens,
        D=layout.D, DP=pad(layout.D), COPY=blocks.channels is not None, num_warps=APPEND_WARPS,
    )  # fmt: skip


def _batch_of(blocks: RowBlocks, rows: int, workspace: Workspace) -> _Batch:
    layout = blocks.layout
    shape = Shape(rows, layout.H, blocks.G, layout.D)
    return _Batch(shape, layout.dtype, blocks.memory.device, workspace, layout.D)


class PagedKernels:
    """The decode steps of `ops.Kernels` that read blocks, for all layers of an engine whose blocks have one layout.

    `begin` takes the rows of a batch. Every step after it takes the blocks of a layer and q (B,H,G,D), and returns
    (B,H,G,D) in q's dtype; the current token is in the blocks already.

    layout, distance: of the blocks, in every layer. rows: the most rows of a batch. width: the most blocks of a row.
    """

    name = "gpu"
    max_head_size = launch.LARGEST_HEAD

    def __init__(
        self, layout: RowBlockLayout, distance: int, rows: int, width: int, device: torch.device | str = "cuda"
    ) -> None:
        layout.check()
        self.layout, self.distance = layout, distance
        self.workspace = Workspace()
        self.B = 0
        size = (rows, width, layout.tokens // PAGE_TOKENS, TABLE_COLUMNS)
        self.starts = torch.zeros(size, dtype=torch.int64, device=device)  # of the pages of every block of a row
        self.device = self.starts.device  # with its number
        self.lengths = torch.zeros(rows, layout.H, dtype=torch.int32, device=self.device)
        in_block, per_block = _pages_of_block(layout, distance)
        self._in_block, self._per_block = in_block.to(self.device), per_block.to(self.device)

    @property
    def room(self) -> int:
        """Tokens that a row has place for."""
        return self.starts.shape[1] * self.layout.tokens

    def begin(self, table: Tensor, lengths: Tensor) -> None:
        """Take the rows of a batch: table (B,blocks) int32, the blocks of each row, and lengths (B,) int32.

        A length includes the current token. What the table has beyond a row's length is not used, and a row of length 0
        is computed to NaN. Nothing is read back from the device, so block numbers are not checked. Raises ValueError if
        shapes, types or devices do not fit.
        """
        rows, width, B = *self.starts.shape[:2], lengths.shape[0]
        if table.ndim != 2 or len(table) != B or rows < B or table.shape[1] > width:
            raise ValueError(
                f"the table of blocks is {tuple(table.shape)} for {B} rows; at most {rows} rows of {width} fit"
            )
        for name, tensor in (("the table of blocks", table), ("lengths", lengths)):
            if tensor.dtype != torch.int32 or tensor.device != self.device:
                raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}; must be torch.int32 on {self.device}")
        self.B = B
        starts = self.starts[:B, : table.shape[1]]
        torch.add(table[:, :, None, None] * self._per_block, self._in_block, out=starts)
        self.lengths[:B] = lengths[:, None]

    def dense(self, store: RowBlocks, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Attention over all positions (methods/dense.py)."""
        batch, query = self._start(store, q, token, **softmax)
        return attend_all(batch, query, self._pages(store, 0), self.room)

    def sparq(
        self, store: RowBlocks, q: Tensor, token: Token | None, *, r: int, k: int,
        local: int, temperature: str, mean_value: bool, **softmax: Unpack[SoftmaxOptions],
    ) -> Tensor:  # fmt: skip
        """SparQ's algorithm 1 (methods/sparq.py)."""
        if mean_value:
            raise ValueError("blocks have no mean of the values: use mean_value=False")
        batch, query = self._start(store, q, token, **softmax)
        selection = sparq_selection(batch, self.layout.channels, r, k, local, temperature, mean_value)
        return self._attend_selected(store, batch, query, selection)

    def top_k(
        self, store: RowBlocks, q: Tensor, token: Token | None, *, k: int, oracle: bool,
        **softmax: Unpack[SoftmaxOptions],
    ) -> Tensor:  # fmt: skip
        """Exact scores and the k best positions (methods/topk.py)."""
        batch, query = self._start(store, q, token, **softmax)
        return self._attend_selected(store, batch, query, Selection(k, renormalise=oracle))

    def _attend_selected(self, store: RowBlocks, batch: _Batch, query: Query, selection: Selection) -> Tensor:
        """Run the step on as many rows at a time as MOST_LOGITS allows, so that they share their scratch memory."""
        B, H, G, _ = batch.shape
        at_once = max(1, MOST_LOGITS // (H * G * self.room))
        for start in range(0, B, at_once):
            rows = slice(start, start + at_once)
            q = query.q[rows]
            sinks = q if query.sinks is query.q else query.sinks  # q stands for no sinks
            part = query._replace(q=q, y=query.y[rows], sinks=sinks)
            shape = batch.shape._replace(B=len(q))
            attend_selected(batch._replace(shape=shape), part, selection, self._pages(store, start), self.room)
        return query.y

    def _start(
        self, store: RowBlocks, q: Tensor, token: Token | None, *,
        scale: float, softcap: float | None = None, sinks: Tensor | None = None,
    ) -> tuple[_Batch, Query]:  # fmt: skip
        """Check a step and return what its kernels are told."""
        assert token is None, "tokens are written to blocks by append_slots"
        layout = self.layout
        if (store.layout, store.distance) != (layout, self.distance) or store.memory.device != self.device:
            raise ValueError(
                f"blocks of {store.layout}, {store.distance} bytes apart on {store.memory.device}, are not those of "
                f"{layout}, {self.distance} bytes apart on {self.device}"
            )
        batch = _batch_of(store, self.B, self.workspace)
        return batch, make_query(batch, q, scale, softcap, sinks)

    def _pages(self, blocks: RowBlocks, first: int) -> CachedPages:
        """Return where the pages of the rows from `first` on lie."""
        lengths = unused = self.lengths[first:]
        return CachedPages(
            self.starts[first:], lengths, unused, unused, self.layout.D,
            heads=self.layout.H, table_row=self.starts.stride(0), base=blocks.memory.data_ptr(),
        )  # fmt: skip


def _pages_of_block(layout: RowBlockLayout, distance: int) -> tuple[Tensor, Tensor]:
    """Return where the pages of block 0 begin (pages of a block, TABLE_COLUMNS), and what a block's number adds to it.

    In bytes from the beginning of the memory; int64.
    """
    size = layout.dtype.itemsize
    part = layout.H * layout.tokens * layout.D * size  # bytes of K of a block; its other parts have as many
    page = torch.arange(layout.tokens // PAGE_TOKENS)
    rows = torch.zeros(len(page), TABLE_COLUMNS, dtype=torch.int64)
    per_block = torch.zeros(TABLE_COLUMNS, dtype=torch.int64)
    row_of_page, channel_of_page = PAGE_TOKENS * layout.D * size, PAGE_TOKENS * size
    for place, (column, stride) in enumerate(
        ((COLUMN_K, row_of_page), (COLUMN_V, row_of_page), (COLUMN_INDEX, channel_of_page))
    ):
        rows[:, column] = place * part + page * stride
        per_block[column] = distance
    rows[:, COLUMN_CAPACITY] = layout.tokens
    return rows, per_block
