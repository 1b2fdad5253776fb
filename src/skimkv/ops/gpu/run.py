"""The Triton backend: a decode step as launches of kernels. All is checked here, before a kernel is launched.

`GpuBackend` runs steps of stores, and `PagedBackend` those of the blocks of a serving engine. A kernel is given a table
of where the pages of tokens lie. For an engine's blocks the table counts from the address of a layer's memory, so one
table serves all layers, and it is written in place: a captured graph of a step stays right.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...stores.base import Shape, Store, Workspace
from ...stores.full import Full
from ...stores.quantise import BITS
from ...stores.row_blocks import RowBlockLayout, RowBlocks
from ...stores.slots import Slots
from ..blocks import check_sinks, check_softcap
from ..step import KernelStep, SoftmaxOptions, Token
from . import device, launch, occupancy
from .launch import (
    APPEND_WARPS,
    LAYOUTS,
    LEAST_COLUMNS,
    LEAST_RUN,
    MOST_CHANNELS_OF_WARP,
    MOST_HEADS_OF_WARP,
    SETTINGS,
    TEMPERATURES,
    BlockParts,
    CachedPages,
    CachedSlots,
    Candidates,
    Query,
    Scores,
    Splits,
    TokenRows,
    dot_type,
    fit_block,
    pad,
    types,
    validate,
)
from .occupancy import SplitKernel, count_splits
from .tables import (
    COLUMN_INDEX,
    COLUMN_K,
    COLUMN_V,
    INT4_BLOCK,
    PAGE_TOKENS,
    TABLE_COLUMNS,
    Batch,
    PageView,
    scratch,
    table_rows,
)

with contextlib.suppress(ImportError):  # launch.missing says why
    from .kernels.append import append_kernel
    from .kernels.append_slots import append_slots_kernel
    from .kernels.attend import attend_kernel
    from .kernels.channels import channel_scores_kernel, choose_channels_kernel
    from .kernels.choose import choose_kernel
    from .kernels.dense import dense_kernel
    from .kernels.slots import slots_kernel
    from .kernels.sparq import scores_kernel

MOST_LOGITS = 1 << 26  # of all rows in blocks that are taken at once, in float32: 256 MiB


class PagedRows(NamedTuple):
    """The rows of a batch whose tokens lie in pages, and what a step over them is told.

    room: tokens that a row has place for, which stays the same while a graph is used. channels: where a channel of K is
    read, as of Full. projection (H,D,R): the index is of K @ projection; None: of K.
    """

    batch: Batch
    pages: CachedPages
    room: int
    channels: str
    projection: Tensor | None = None


class GpuBackend:
    """Steps of Full and Slots stores: a `Backend`."""

    name = "gpu"
    max_head_size = launch.LARGEST_HEAD

    def unavailable(self) -> str | None:
        """Why this backend cannot run here, or None if it can."""
        if launch.missing is None and not torch.cuda.is_available() and not launch.interpreted():
            return "PyTorch sees no CUDA device; TRITON_INTERPRET=1 runs the kernels on the CPU, slowly"
        return launch.missing

    def supports(self, step: KernelStep, store: Store) -> bool:
        """Whether there is a kernel for this step of this store: rings need one budget for all rows."""
        if isinstance(store, Slots):
            if store.score is not None:
                return step.operation == "scored_slots"
            return step.operation == "ring_slots" and store.budget_of is None
        return isinstance(store, Full) and _reads_pages(step, store.v_mean is not None, store.projection is not None)

    def run(self, step: KernelStep, store: Store, q: Tensor, token: Token | None, softmax: SoftmaxOptions) -> Tensor:
        """Take the current token, and attend: q (B,H,G,D) -> (B,H,G,D) in q's dtype.

        token None: it was appended before. Raises ValueError if there is no kernel for the step, or if shapes, types or
        devices do not fit.
        """
        _require(self.supports(step, store), step, store)
        batch = Batch.of(store)
        query = _query(batch, q, **softmax)
        if isinstance(store, Slots):
            if token is None:
                raise ValueError("a step over slots needs the current token's k and v")
            return _run_slots(step, store, query, token)
        assert isinstance(store, Full)
        if token is not None:
            self.append(store, *token)
        view = device.page_view(store)
        rows = PagedRows(batch, _cached_pages(store, view), view.room, store.channels, store.projection)
        return OVER_PAGES[step.operation](step, rows, query)

    def append(self, store: Store, k: Tensor, v: Tensor) -> None:
        """Append one token per row: k, v (B,H,D). Raises ValueError as `run` does."""
        B, H, _, D = store.shape
        validate(Batch.of(store), k=(k, (B, H, D)), v=(v, (B, H, D)))
        if not isinstance(store, Full) or store.pages is not None or store.group_means:
            store.append_token(k, v)
            return
        store.reserve()
        view, token = device.page_view(store), _token_rows(k, v)
        x = token.k
        if store.projection is not None:
            x = (x.to(store.projection.dtype)[:, :, None] @ store.projection)[:, :, 0].to(x.dtype)
        append_kernel[B * H,](
            token, x, *x.stride()[:2], _cached_pages(store, view), H,
            D=D, DP=pad(D), TYPE=types()[store.dtype], LAYOUT=LAYOUTS[store.channels], MEAN=store.v_mean is not None,
            num_warps=APPEND_WARPS,
        )  # fmt: skip
        device.advance(store)


class PagedBackend:
    """Steps of the blocks of a serving engine, for all of its layers, whose blocks have one layout.

    `begin` takes the rows of a batch. Every step after it takes the blocks of a layer, in which the current token is
    already.

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

    @staticmethod
    def supports(step: KernelStep, store: RowBlocks) -> bool:
        """Whether there is a kernel for this step of these blocks."""
        return _reads_pages(step, mean=False, projection=False)

    def run(
        self, step: KernelStep, store: RowBlocks, q: Tensor, token: Token | None, softmax: SoftmaxOptions
    ) -> Tensor:
        """Attend: q (B,H,G,D) -> (B,H,G,D) in q's dtype. token: None, because `append_slots` writes tokens.

        Raises ValueError if there is no kernel for the step, or if blocks, shapes, types or devices do not fit.
        """
        assert token is None
        _require(self.supports(step, store), step, store)
        layout = self.layout
        if (store.layout, store.distance) != (layout, self.distance) or store.memory.device != self.device:
            raise ValueError(
                f"blocks of {store.layout}, {store.distance} bytes apart on {store.memory.device}, are not those of "
                f"{layout}, {self.distance} bytes apart on {self.device}"
            )
        batch = _batch_in_blocks(store, self.B, self.workspace)
        query = _query(batch, q, **softmax)
        # at a time as many rows as MOST_LOGITS allows, so that they share their scratch memory
        at_once = self.B if step.operation == "dense" else MOST_LOGITS // (layout.H * store.G * self.room)
        for first in range(0, self.B, max(1, at_once)):
            part = _rows_of_query(query, slice(first, first + max(1, at_once)))
            rows = batch._replace(shape=batch.shape._replace(B=len(part.q)))
            pages = PagedRows(rows, self._pages(store, first), self.room, layout.channels)
            OVER_PAGES[step.operation](step, pages, part)
        return query.y

    def _pages(self, blocks: RowBlocks, first: int) -> CachedPages:
        """Return where the pages of the rows from `first` on lie."""
        lengths = unused = self.lengths[first:]
        return CachedPages(
            self.starts[first:], lengths, unused, unused, self.layout.D,
            heads=self.layout.H, table_row=self.starts.stride(0), base=blocks.memory.data_ptr(),
        )  # fmt: skip


def append_slots(blocks: RowBlocks, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write tokens to their slots: k, v (n,H,D), slots (n,) int64; a negative slot leaves its token out.

    Nothing is read back from the device, so slots are not checked. Raises ValueError if shapes, types or devices do not
    fit.
    """
    layout, n, device = blocks.layout, slots.shape[0], blocks.memory.device
    shape = (n, layout.H, layout.D)
    validate(_batch_in_blocks(blocks, n, Workspace()), k=(k, shape), v=(v, shape))
    if slots.dtype != torch.int64 or slots.device != device or not slots.is_contiguous():
        raise ValueError(f"slots is {slots.dtype} on {slots.device}; must be contiguous torch.int64 on {device}")
    if n == 0:
        return
    channels = blocks.k if blocks.channels is None else blocks.channels
    target = BlockParts(blocks.k, blocks.v, channels, blocks.distance // layout.dtype.itemsize)
    append_slots_kernel[n, layout.H](
        _token_rows(k, v), slots, target, layout.H, layout.tokens,
        D=layout.D, DP=pad(layout.D), COPY=blocks.channels is not None, num_warps=APPEND_WARPS,
    )  # fmt: skip


def _batch_in_blocks(blocks: RowBlocks, rows: int, workspace: Workspace) -> Batch:
    layout = blocks.layout
    return Batch(Shape(rows, layout.H, blocks.G, layout.D), layout.dtype, blocks.memory.device, workspace)


def _pages_of_block(layout: RowBlockLayout, distance: int) -> tuple[Tensor, Tensor]:
    """Return where the pages of block 0 begin (pages of a block, TABLE_COLUMNS), and what a block's number adds to it.

    In bytes from the beginning of the memory; int64.
    """
    size = layout.dtype.itemsize
    part = layout.H * layout.tokens * layout.D * size  # bytes of K of a block; its other parts have as many
    row_of_page, channel_of_page = PAGE_TOKENS * layout.D * size, PAGE_TOKENS * size
    columns = {
        COLUMN_K: (0, row_of_page),
        COLUMN_V: (part, row_of_page),
        COLUMN_INDEX: (2 * part, channel_of_page),
    }
    per_block = torch.zeros(TABLE_COLUMNS, dtype=torch.int64)
    per_block[list(columns)] = distance
    return table_rows(layout.tokens, columns), per_block


def _require(supported: bool, step: KernelStep, store: object) -> None:
    if not supported:
        raise ValueError(f"there is no GPU kernel for {step} over a store of type {type(store).__name__}")


def _reads_pages(step: KernelStep, mean: bool, projection: bool) -> bool:
    """Return whether there is a kernel for this step over pages. mean, projection: what is kept beside them."""
    has_parts = (mean or not step.mean_value) and (projection or step.operation != "low_rank")
    return step.operation in OVER_PAGES and has_parts


def _query(batch: Batch, q: Tensor, scale: float, softcap: float | None = None, sinks: Tensor | None = None) -> Query:
    """Check what all steps are given, and return what a kernel is asked. Raises ValueError if it does not fit."""
    validate(batch, q=(q, tuple(batch.shape)))
    check_sinks(sinks, batch.shape.H, batch.shape.G, batch.device)
    check_softcap(softcap)
    q = q.contiguous()
    sinks = q if sinks is None else sinks.contiguous()
    return Query(q, torch.empty_like(q), sinks, batch.shape.H, batch.shape.G, scale, softcap or 0.0)


def _rows_of_query(query: Query, rows: slice) -> Query:
    q = query.q[rows]
    return query._replace(q=q, y=query.y[rows], sinks=query.sinks if _has_sinks(query) else q)


def _has_sinks(query: Query) -> bool:
    return query.sinks is not query.q


def _token_rows(k: Tensor, v: Tensor) -> TokenRows:
    k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (k, v))
    return TokenRows(k, v, *k.stride()[:2], *v.stride()[:2])


def _cached_pages(store: Full, view: PageView) -> CachedPages:
    lengths = unused = view.lengths.tensor
    tail, v_mean = (unused if t is None else t for t in (store.tail, store.v_mean))
    return CachedPages(view.table, lengths, tail, v_mean, store.R)


def _constants(batch: Batch, query: Query, settings: launch.SplitLaunch | launch.AttendLaunch) -> dict[str, Any]:
    """Return what all split kernels are compiled with: sizes, padded, types, the parts of a softmax, and settings."""
    _, _, G, D = query.q.shape
    return {
        "D": D, "GP": pad(G), "DP": pad(D), "DOT": dot_type(batch.dtype, query.q.dtype), "CAPPED": query.softcap > 0,
        "STAGES": settings.stages, "num_warps": settings.warps,
    }  # fmt: skip


def _splits(batch: Batch, count: int) -> Splits:
    """Return scratch memory for `count` splits."""
    parts = scratch(batch, "parts", batch.heads * count * batch.shape.G * (batch.shape.D + 2))
    return Splits(parts, scratch(batch, "counter", batch.heads, torch.int32), count)


def _row_bytes(batch: Batch) -> int:
    """Return the bytes of a row of K, padded as the kernels do."""
    return pad(batch.shape.D) * batch.dtype.itemsize


def _run_dense(step: KernelStep, rows: PagedRows, query: Query) -> Tensor:
    """Attend to all positions: equation 2 of SparQ. It reads 2ND elements per KV head."""
    batch, settings = rows.batch, SETTINGS.dense
    constants = {
        **_constants(batch, query, settings), "SINKS": _has_sinks(query), "TYPE": types()[batch.dtype],
        "BLOCK": fit_block(settings.block, _row_bytes(batch)),
    }  # fmt: skip
    split = SplitKernel(
        dense_kernel, settings.programs, constants, lambda count: (query, rows.pages, _splits(batch, count)),
        merges=True,
    )  # fmt: skip
    split.launch(batch, count_splits(batch, rows.room // PAGE_TOKENS, split))
    return query.y


class Scoring(NamedTuple):
    """How step 1 scores all positions.

    query: what K, or its index, is multiplied by. layout: a number of LAYOUTS. r: channels that score; 0: all of them,
    as they are. channels: how many these are. temperature: a number of TEMPERATURES.
    """

    query: Query
    layout: int
    r: int
    channels: int
    temperature: int = TEMPERATURES["coverage"]


def _scoring_of(step: KernelStep, rows: PagedRows, query: Query) -> Scoring:
    """Return how a step scores. Raises ValueError if one of its numbers is out of its bounds."""
    R = rows.pages.R
    if step.operation == "low_rank":
        assert rows.projection is not None
        projected = query._replace(q=(query.q.float() @ rows.projection).contiguous())
        return Scoring(projected, LAYOUTS["copy"], 0, R)
    if step.operation != "sparq":
        return Scoring(query, LAYOUTS["none"], 0, R)
    if step.temperature not in TEMPERATURES:
        raise ValueError(f"temperature = {step.temperature!r} must be one of {', '.join(TEMPERATURES)}")
    if not 1 <= step.r <= R or not 0 <= step.local <= step.k:
        raise ValueError(f"r = {step.r} must be from 1 to {R}, and local = {step.local} from 0 to k = {step.k}")
    return Scoring(query, LAYOUTS[rows.channels], step.r, step.r, TEMPERATURES[step.temperature])


def _run_chosen(step: KernelStep, rows: PagedRows, query: Query) -> Tensor:
    """Score all positions, choose step.k of them besides the current one, of which step.local are the last, and attend.

    Algorithm 1 of SparQ, grouped as in section 4, reads Nr + 2kD elements per KV head, and v_mean. FlexGen's step
    ("top_k") scores exactly, and sums the chosen values by these scores; the oracle and the low rank of figure 7a take
    the softmax anew over the chosen positions, as SparQ does.
    """
    batch, scoring = rows.batch, _scoring_of(step, rows, query)
    by_channels = MOST_HEADS_OF_WARP[scoring.layout] >= batch.shape.G and scoring.channels <= MOST_CHANNELS_OF_WARP
    scores = (_score_by_channels if by_channels else _score_by_products)(rows, scoring)
    candidates = _choose(step, rows, query, scores)
    alone = batch.shape.G == 1
    settings = SETTINGS.attend_few if _is_few(batch) else SETTINGS.attend_alone if alone else SETTINGS.attend
    constants = {
        **_constants(batch, query, settings), "SINKS": _has_sinks(query), "TYPE": types()[batch.dtype],
        "SP": pad(scores.splits, 2), "RENORMALISE": step.operation != "top_k", "MEAN": step.mean_value,
        "BLOCK": fit_block(settings.block, _row_bytes(batch)), **({"GP": 1} if alone else {}),
    }  # fmt: skip
    attend_kernel[batch.heads,](query, rows.pages, scores, candidates, **constants)
    return query.y


def _is_few(batch: Batch) -> bool:
    """Return whether a multiprocessor has a row and KV head to itself, with one query head."""
    limits = occupancy.limits_of(batch.device)
    return limits is not None and batch.shape.G == 1 and batch.heads <= limits.multiprocessors


def _settings_of_choice(batch: Batch) -> launch.ChooseLaunch:
    """Return how the choice is launched."""
    return SETTINGS.choose_few if _is_few(batch) else SETTINGS.choose


def _choose(step: KernelStep, rows: PagedRows, query: Query, scores: Scores) -> Candidates:
    """Choose positions by their scores, and return where they are."""
    batch, k = rows.batch, min(step.k - step.local, rows.room)
    settings = _settings_of_choice(batch)
    tiles = -(-rows.room // settings.tile)
    group = settings.group_of(min(k, settings.tile))
    most = min(k, settings.tile // group)
    constants = {
        "SP": pad(scores.splits, 2), "TILE": settings.tile, "GROUP": group, "SINKS": _has_sinks(query),
        "LIST": min(settings.list, pad(tiles * most)), "IS_LONG": tiles * most > settings.list,
        "CANDIDATES": pad(group * most), "ALONE": batch.shape.G == 1, "num_warps": settings.warps,
    }  # fmt: skip

    def candidates(programs: int) -> Candidates:
        """Return scratch memory for the best groups of every tile and for the positions."""
        integers = functools.partial(scratch, batch, dtype=torch.int32)
        return Candidates(
            weights=integers("weights", batch.heads * tiles * most),
            groups=integers("groups", batch.heads * tiles * most),
            listed=integers("listed", batch.heads * k), chosen=integers("chosen", batch.heads * k),
            counter=integers("counter", batch.heads), room=tiles * most, programs=programs, k=k, local=step.local,
        )  # fmt: skip

    split = SplitKernel(
        choose_kernel, settings.programs, constants,
        lambda programs: (query, rows.pages, scores, candidates(programs)),
    )  # fmt: skip
    found: Candidates = split.launch(batch, count_splits(batch, tiles, split))[-1]
    return found


def _score_by_channels(rows: PagedRows, scoring: Scoring) -> Scores:
    """Run step 1 with one warp for a page: it multiplies without matrix units. Returns where its logits are."""
    batch, query, channels, settings = rows.batch, scoring.query, scoring.channels, SETTINGS.channel_scores
    G, R = batch.shape.G, query.q.shape[-1]
    constants = {
        "G": G, "CHANNELS": channels, "PADDED": pad(channels), "TYPE": types()[batch.dtype],
        "LAYOUT": scoring.layout, "CAPPED": query.softcap > 0, "num_warps": 1,
    }  # fmt: skip
    split = SplitKernel(
        channel_scores_kernel, settings.programs, constants,
        lambda splits: (query, rows.pages, _scores(rows, splits, scoring.r, channels)),
    )  # fmt: skip
    splits = count_splits(batch, rows.room // PAGE_TOKENS, split)
    choose_channels_kernel[batch.heads,](
        query, _scores(rows, splits, scoring.r, channels), G=G, D=R, DP=pad(R), CHANNELS=channels,
        TEMPERATURE=scoring.temperature, num_warps=1,
    )  # fmt: skip
    scores: Scores = split.launch(batch, splits)[-1]
    return scores


def _score_by_products(rows: PagedRows, scoring: Scoring) -> Scores:
    """Run step 1 on matrix units, and return where its logits are."""
    batch, query, layout = rows.batch, scoring.query, scoring.layout
    settings = SETTINGS.quantised_scores if layout in BITS.values() else SETTINGS.scores
    if layout == LAYOUTS["none"]:
        block = fit_block(settings.block, 4 * _row_bytes(batch))
    else:  # the settings are meant for a quarter of the channels
        least = INT4_BLOCK if layout == LAYOUTS["int4"] else LEAST_RUN
        block = fit_block(settings.block, 4 * pad(scoring.channels) * batch.dtype.itemsize, least)
    constants = {
        **_constants(batch, query, settings), "GP": pad(batch.shape.G, LEAST_COLUMNS), "RP": pad(scoring.channels),
        "TYPE": types()[batch.dtype],
        "LAYOUT": layout, "TEMPERATURE": scoring.temperature, "BLOCK": block,
    }  # fmt: skip
    split = SplitKernel(
        scores_kernel, settings.programs, constants,
        lambda splits: (query, rows.pages, _scores(rows, splits, scoring.r, 1)),
    )  # fmt: skip
    scores: Scores = split.launch(batch, count_splits(batch, rows.room // PAGE_TOKENS, split))[-1]
    return scores


def _scores(rows: PagedRows, splits: int, r: int, channels: int) -> Scores:
    """Return scratch memory for the scores of all positions; a tile of the choice may be read past their end."""
    batch, width, G = rows.batch, rows.room, rows.batch.shape.G
    return Scores(
        logits=scratch(batch, "logits", batch.heads * G * width + _settings_of_choice(batch).tile),
        stats=scratch(batch, "stats", batch.heads * splits * G * 2),
        channels=scratch(batch, "channels", batch.heads * channels, torch.int32),
        weights=scratch(batch, "channel weights", batch.heads * G * channels), width=width, splits=splits, r=r,
    )  # fmt: skip


RunOverPages: TypeAlias = Callable[[KernelStep, PagedRows, Query], Tensor]
OVER_PAGES: dict[str, RunOverPages] = {
    "dense": _run_dense,
    "sparq": _run_chosen,
    "top_k": _run_chosen,
    "oracle": _run_chosen,
    "low_rank": _run_chosen,
}


def _run_slots(step: KernelStep, store: Slots, query: Query, token: Token) -> Tensor:
    """Attend to the slots in use and to the current token, then put it into its slot. It reads 2CD per KV head.

    Where slots have scores, this is algorithm 1 of H2O: the weights, averaged over the group, are added to the scores,
    and the lowest score is replaced, but none of the step.recent[b] latest positions of row b.
    """
    (B, H, G, D), (k, v), settings, batch = store.shape, token, SETTINGS.slots, Batch.of(store)
    validate(batch, k=(k, (B, H, D)), v=(v, (B, H, D)))
    scored = store.score is not None
    recent: Sequence[int] = step.recent if scored else [0] * B
    if len(recent) != B:
        raise ValueError(f"recent = {recent} must be {B} numbers where slots are scored")
    store.reserve()
    view = device.slot_view(store, recent)
    C, block = store.capacity, fit_block(settings.block, _row_bytes(batch))
    width = -(-C // block) * block
    unused = view.lengths.tensor
    slots = CachedSlots(
        k=store.k, v=store.v, score=unused if store.score is None else store.score,
        pos=unused if store.pos is None else store.pos, lengths=view.lengths.tensor, filled=view.filled.tensor,
        limits=view.limits.tensor, order=unused if store.order is None else view.order,
        logits=scratch(batch, "logits", B * H * G * width if scored else 1),
        width=width, B=B, H=H, C=C, fixed=store.fixed,
    )  # fmt: skip
    constants = {
        **_constants(batch, query, settings), "SINKS": _has_sinks(query), "SCORED": scored,
        "ORDERED": store.order is not None, "GROWS": store.grows, "BLOCK": block, "TILE": settings.tile,
    }  # fmt: skip
    rows = _token_rows(k, v)
    split = SplitKernel(
        slots_kernel, settings.programs, constants, lambda count: (query, slots, rows, _splits(batch, count)),
        merges=True,
    )  # fmt: skip
    split.launch(batch, count_splits(batch, -(-C // settings.block), split))
    device.advance(store)
    return query.y
