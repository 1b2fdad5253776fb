"""How the GPU kernels are launched: settings that can be tuned, arguments that belong together, and checks before."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .tables import PAGE_TOKENS, Batch

try:
    import triton
    import triton.language as tl
except ImportError as error:  # an extra: without it unavailable() says so, and nothing else here is called
    missing: str | None = f"Triton cannot be imported ({error}); pip install 'skimkv[gpu]'"
else:
    missing = None

LARGEST_HEAD = 256  # the largest head size D that has kernels
TENSOR_CORE = 16  # the least rows and columns of a product on tensor cores; D is a multiple of it
LEAST_COLUMNS = 8  # of the right side of a product on tensor cores; its left side has TENSOR_CORE rows at least
ROW_BYTES = 256  # the size of a row of K or V that the settings' blocks are meant for
MOST_SPLITS = 64  # programs that share a row of the batch and a KV head, at most
APPEND_WARPS = 4  # of the kernels that append a token
MOST_CHANNELS_OF_WARP = 64  # channels that score, up to which it does so: its loop over them is unrolled
LEAST_RUN = 32  # positions of a channel that step 1 loads at a time, at least
MASS_BLOCK = 256  # chosen positions whose approximate weights are summed at a time

# Where channels of K are read, by a store's `channels`; the quantised layouts are numbered by the bits of a code.
LAYOUTS = {"none": 0, "int4": 4, "int8": 8, "copy": 16}
# Query heads of a KV head up to which step 1 takes one warp for a page and no matrix units, by the layout.
MOST_HEADS_OF_WARP = {LAYOUTS["none"]: 0, LAYOUTS["copy"]: 1, LAYOUTS["int8"]: 4, LAYOUTS["int4"]: 4}
TEMPERATURES = {"coverage": 0, "sqrt_d": 1, "sqrt_r": 2}  # of SparQ's scores


@dataclass(frozen=True)
class SplitLaunch:
    """A kernel whose programs share the positions (or slots) of each row and KV head, and that loads blocks ahead.

    block: positions that a program takes at a time; fewer where a row of K is larger than ROW_BYTES.
    warps: of 32 threads each, in a program.
    programs: wanted on each multiprocessor; positions are split until there are that many. None: all that run at once.
    stages: the depth of the pipeline. There are buffers for stages - 1 blocks. Where a block's place is loaded from a
    table before it, there are half as many: 5 stages keep two blocks.
    """

    block: int
    warps: int
    programs: int | None = None
    stages: int = 3


@dataclass(frozen=True)
class PagesLaunch(SplitLaunch):
    """A split kernel over pages. Raises ValueError unless a block is a power of two that divides a page."""

    stages: int = 5

    def __post_init__(self) -> None:
        if self.block & (self.block - 1) or not TENSOR_CORE <= self.block <= PAGE_TOKENS:
            bounds = f"{TENSOR_CORE} to {PAGE_TOKENS}, the tokens of a page"
            raise ValueError(f"block = {self.block} must be a power of two from {bounds}")


@dataclass(frozen=True)
class SlotsLaunch(SplitLaunch):
    """The step over slots. tile: scores that the last program updates and searches at a time."""

    tile: int = 1024


@dataclass(frozen=True)
class ChooseLaunch:
    """The choice of positions, after step 1 in a launch of its own.

    tile: positions in which one threshold is sought. group: of neighbouring positions that are chosen together first,
    at most. list: groups of several tiles that the last program looks at together, at most. warps, programs: as in
    SplitLaunch.
    """

    tile: int
    warps: int
    group: int = 4
    list: int = 4096
    programs: int | None = None

    def group_of(self, most: int) -> int:
        """Return how many neighbours are chosen together where a tile has `most` positions to choose, at most.

        The positions of the groups that are chosen fill no more than half a tile; else there is nothing to gain.
        """
        return next((n for n in (self.group, self.group // 2, self.group // 4) if 2 * pad(n * most) <= self.tile), 1)


@dataclass(frozen=True)
class AttendLaunch:
    """Attention to the chosen positions, one program for each row and KV head. block: positions at a time.

    warps, stages: as in SplitLaunch. Positions are loaded before a block, and then their places in the table, so 7
    stages keep two blocks in shared memory.
    """

    block: int
    warps: int
    stages: int


@dataclass(frozen=True)
class PageLaunch:
    """Step 1 with one warp for each page of PAGE_TOKENS positions. programs: as in SplitLaunch."""

    programs: int | None = None


@dataclass
class LaunchSettings:
    """The settings of every kernel. To try other ones, put another value in the place of a field."""

    dense: PagesLaunch = field(default=PagesLaunch(block=64, warps=4))
    channel_scores: PageLaunch = field(default=PageLaunch())
    scores: PagesLaunch = field(default=PagesLaunch(block=256, warps=4))
    quantised_scores: PagesLaunch = field(default=PagesLaunch(block=128, warps=4))
    choose: ChooseLaunch = field(default=ChooseLaunch(tile=4096, warps=4))
    choose_few: ChooseLaunch = field(default=ChooseLaunch(tile=8192, warps=8))  # as attend_few
    attend: AttendLaunch = field(default=AttendLaunch(block=32, warps=4, stages=7))
    attend_alone: AttendLaunch = field(default=AttendLaunch(block=16, warps=2, stages=1))  # one query head a KV head
    attend_few: AttendLaunch = field(default=AttendLaunch(block=128, warps=16, stages=1))  # and a multiprocessor a row
    slots: SlotsLaunch = field(default=SlotsLaunch(block=64, warps=4))


SETTINGS = LaunchSettings()


class Query(NamedTuple):
    """What a kernel of attention is asked, and where its answer goes."""

    q: Tensor  # (B,H,G,D), contiguous
    y: Tensor  # (B,H,G,D), contiguous
    sinks: Tensor  # (H,G) float32, contiguous; where there are none q, which is not read in their place
    H: int
    G: int
    scale: float
    softcap: float  # 0.0 where logits are not capped


class TokenRows(NamedTuple):
    """The current token of every row, and the strides of its tensors in elements; rows of D are contiguous."""

    k: Tensor  # (B,H,D)
    v: Tensor  # (B,H,D)
    k_batch: int
    k_head: int
    v_batch: int
    v_head: int


class CachedPages(NamedTuple):
    """A Full store, or blocks of an engine, whose rows have a table each.

    Where there is no tail or v_mean, another tensor stands in their place and is not read.
    """

    table: Tensor  # (pages, TABLE_COLUMNS) int64, of blocks (B, pages, TABLE_COLUMNS): see tables.py
    lengths: Tensor  # (B*H,) int32
    tail: Tensor  # (B,H,R,PAGE_TOKENS): the open group of a quantised index
    v_mean: Tensor  # (B,H,D) float32
    R: int
    heads: int | None = None  # of blocks: H
    table_row: int | None = None  # of blocks: the numbers of the table of a row
    base: int | None = None  # of blocks: the address of the layer's memory, from which the table counts


class BlockParts(NamedTuple):
    """The blocks of a layer that tokens are written to. Without a copy of channels another tensor is in its place."""

    k: Tensor  # (blocks,H,tokens,D)
    v: Tensor  # (blocks,H,tokens,D)
    channels: Tensor  # (blocks,H,D,tokens)
    distance: int  # elements from a block to the next


class CachedSlots(NamedTuple):
    """A Slots store. Where there are no scores or order, another tensor stands in their place and is not read."""

    k: Tensor  # (B,H,C,D)
    v: Tensor  # (B,H,C,D)
    score: Tensor  # (B,H,C) float32
    pos: Tensor  # (B,H,C) int32
    lengths: Tensor  # (B*H,) int32
    filled: Tensor  # (B*H,) int32
    limits: Tensor  # (2,B) int32: the budget and the recent window of every row
    order: Tensor  # int32: the slot of token 0, 1, ...
    logits: Tensor  # scratch (B*H,G,width) float32
    width: int
    B: int
    H: int
    C: int
    fixed: int


class Splits(NamedTuple):
    """Where programs that share a row and KV head leave their parts for the last of them."""

    parts: Tensor  # (B*H, programs, G, D+2) float32: weighted values, maximum and sum
    counter: Tensor  # (B*H,) int32, zero between launches
    programs: int


class Scores(NamedTuple):
    """What step 1 leaves for step 2."""

    logits: Tensor  # (B*H, G, width) float32
    stats: Tensor  # (B*H, splits, G, 2) float32: maximum and sum of the exponentials
    channels: Tensor  # (B*H, channels) int32, ascending: those that score, where one warp scores a page
    weights: Tensor  # (B*H, G, channels) float32: the query in them, times the scale of the logits
    width: int
    splits: int
    r: int  # channels that score; 0: all of them, and the temperature is not changed


class Candidates(NamedTuple):
    """The choice of positions: the best groups of every tile, the best of all, and the best positions of these."""

    weights: Tensor  # (B*H, room) int32, which order as the largest weights of groups do
    groups: Tensor  # (B*H, room) int32
    listed: Tensor  # (B*H, k) int32: the best groups of several tiles
    chosen: Tensor  # (B*H, k) int32: positions
    counter: Tensor  # (B*H,) int32, zero between launches
    room: int
    programs: int  # that share the tiles of a row and KV head
    k: int  # positions to choose, besides the last ones
    local: int  # positions before the current one that are always attended to


def interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels, which takes tensors of any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs(device: torch.device) -> bool:
    """Return whether the kernels can run on this device."""
    return device.type == "cuda" or interpreted()


def types() -> dict[torch.dtype, Any]:
    """Return the types of caches and queries that have kernels, and Triton's names for them."""
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def validate(batch: Batch, **tensors: tuple[Tensor, tuple[int, ...]]) -> None:
    """Check that there is a kernel for this batch, and that each tensor has the shape that stands beside it.

    Raises ValueError with what is wrong.
    """
    D, known = batch.shape.D, "float32, bfloat16 and float16"
    if D % TENSOR_CORE or D > LARGEST_HEAD:
        raise ValueError(f"no GPU kernel for D = {D}; it must be a multiple of {TENSOR_CORE} up to {LARGEST_HEAD}")
    if batch.dtype not in types():
        raise ValueError(f"no GPU kernel for a cache of {batch.dtype}; there are some for {known}")
    if batch.row_bits:
        raise ValueError(f"no GPU kernel for K and V in {batch.row_bits} bits; SKIMKV_BACKEND=ref decodes it")
    if not runs(batch.device):
        raise ValueError(f"the GPU kernels cannot run on {batch.device}; TRITON_INTERPRET=1 interprets them there")
    for name, (tensor, shape) in tensors.items():
        if tensor.shape != shape or tensor.device != batch.device:
            raise ValueError(f"{name} is {tuple(tensor.shape)} on {tensor.device}; must be {shape} on {batch.device}")
        if name == "q" and tensor.dtype not in types():
            raise ValueError(f"no GPU kernel for a query of {tensor.dtype}; there are some for {known}")
        if name != "q" and tensor.dtype != batch.dtype:
            raise ValueError(f"{name} is {tensor.dtype}; the store holds {batch.dtype}")


def dot_type(cache: torch.dtype, query: torch.dtype) -> Any:
    """Return the type that tensor cores multiply in: the cache's if the query has it too, else float32.

    The interpreter has no product of bfloat16.
    """
    half = cache == query and not (interpreted() and query == torch.bfloat16)
    return types()[query] if half else tl.float32


def fit_block(positions: int, row_bytes: int, least: int = TENSOR_CORE) -> int:
    """Return the positions of a block, fewer where each of them takes more than ROW_BYTES."""
    return max(least, min(positions, positions * ROW_BYTES // row_bytes))


def pad(n: int, least: int = TENSOR_CORE) -> int:
    """Return the next power of two, which is what a block in Triton has, but not below `least`."""
    return max(least, int(triton.next_power_of_2(n)))
