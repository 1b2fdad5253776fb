"""A cache in blocks that a serving engine owns: where K, V and the index lie in a block, and the blocks of a batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .base import Shape
from .quantise import BITS, GROUP, RowFormat, round_up

BLOCK_CHANNELS = ("copy", *BITS)  # what a block can have as an index: see BlockLayout


class BlockLayout(NamedTuple):
    """The parts of one block for one KV head, which follow each other without gaps.

    K channel by channel in dtype, V (tokens,width) and K (tokens,width), whose rows are in dtype or, with `kv`,
    quantised (see RowFormat). Of rows in dtype there are always all channels (D,tokens); of quantised ones all with
    "copy", those of the last group of tokens (D,GROUP) with a quantised index, and none with `channels` "none". Then,
    where `channels` is "int8" or "int4", the codes of a quantised index (D,tokens*bits/8) and its scales and zeros
    (D,2,tokens/GROUP) float32. Then, with `group_means`, the means of K over full groups (tokens/GROUP,D) in dtype.
    Then, with `mean`, the mean of V over the tokens of the block (D,) float32 and their number, int32. Then, with
    `group_means`, how many tokens of the first group have codes by the scale of the group before, which lies in another
    block, int32. A block may be filled again from its beginning.

    tokens: room of a block, a multiple of GROUP.
    """

    tokens: int
    D: int
    dtype: torch.dtype
    channels: str
    mean: bool = False
    group_means: bool = False
    kv: str | None = None

    @property
    def row_format(self) -> RowFormat:
        """The form of rows of K and V."""
        return RowFormat(self.D, self.kv)

    @property
    def open_tokens(self) -> int:
        """How many tokens of K a block has channel by channel: all, or a group, or none."""
        if self.kv is None or self.channels == "copy":
            return self.tokens
        return GROUP if self.channels in BITS else 0

    @property
    def bytes_per_token(self) -> int:
        """The bytes that a block has for each token of one KV head, a multiple of 8."""
        bits = BITS.get(self.channels)
        index = 0 if bits is None else round_up(self.D * bits // 8 + 8 * self.D // GROUP, 8)
        mean = round_up(-(-4 * (self.D + 1 + self.group_means) // self.tokens), 8) if self.mean else 0
        means = round_up(-(-self.D * self.dtype.itemsize // GROUP), 8) if self.group_means else 0
        keys = round_up(self.D * self.dtype.itemsize * self.open_tokens // self.tokens, 8)
        return round_up(self.row_format.nbytes(2, self.dtype), 8) + keys + index + mean + means

    def check(self) -> None:
        """Raise ValueError if no block can have these sizes."""
        if self.tokens < GROUP or self.tokens % GROUP:
            raise ValueError(f"blocks of {self.tokens} tokens: the size must be a multiple of {GROUP}")
        if self.channels not in BLOCK_CHANNELS and (self.channels != "none" or self.kv is None):
            raise ValueError(f"channels = {self.channels!r} must be one of {', '.join(BLOCK_CHANNELS)} in blocks")
        if self.D % 32:
            raise ValueError(f"heads of {self.D} numbers: blocks take multiples of 32")
        if self.group_means and (self.channels != "int4" or not self.mean):
            raise ValueError("means of groups are for blocks with an index of 4 bits and a mean")


class Parts(NamedTuple):
    """The parts of all blocks as tensors on the engine's memory.

    channels (blocks,H,D,open tokens) · v, k (blocks,H,tokens,width) · codes (blocks,H,D,bytes) · scales
    (blocks,H,D,2,groups) · means (blocks,H,groups,D) · mean (blocks,H,D) · counts, coded (blocks,H,1).
    """

    channels: Tensor | None
    v: Tensor
    k: Tensor
    codes: Tensor | None
    scales: Tensor | None
    means: Tensor | None
    mean: Tensor | None
    counts: Tensor | None
    coded: Tensor | None


def parts_of(memory: Tensor, layout: BlockLayout) -> Parts:
    """Split the engine's memory into its parts.

    memory: (blocks,H,tokens,C) of any type, where each block of a head is contiguous and has layout.bytes_per_token
    bytes for each token. Raises ValueError if it is not.
    """
    layout.check()
    tokens, C = memory.shape[2:]
    size = memory.element_size()
    if memory.stride()[1:] != (tokens * C, C, 1) or tokens != layout.tokens or C * size != layout.bytes_per_token:
        raise ValueError(
            f"the cache is {memory.dtype} {tuple(memory.shape)} with strides {memory.stride()}; a block of a head must "
            f"be contiguous and have {layout.tokens} tokens of {layout.bytes_per_token} bytes for each token"
        )
    N, D, dtype = tokens, layout.D, layout.dtype
    flat = memory.flatten(2).view(torch.uint8)  # (blocks,H,bytes)
    at = 0

    def next_part(count: int, kind: torch.dtype) -> Tensor:
        """Return the next `count` numbers."""
        nonlocal at
        at += count * kind.itemsize
        return flat[..., at - count * kind.itemsize : at].view(kind)

    rows, open_tokens = layout.row_format, layout.open_tokens
    channels = next_part(D * open_tokens, dtype).unflatten(-1, (D, open_tokens)) if open_tokens else None
    v, k = (next_part(N * rows.width, rows.storage_dtype(dtype)).unflatten(-1, (N, rows.width)) for _ in "vk")
    codes = scales = means = mean = counts = coded = None
    if bits := BITS.get(layout.channels):
        codes = next_part(D * N * bits // 8, torch.uint8).unflatten(-1, (D, -1))
        scales = next_part(2 * D * N // GROUP, torch.float32).unflatten(-1, (D, 2, -1))
    if layout.group_means:
        means = next_part(D * N // GROUP, dtype).unflatten(-1, (-1, D))
    if layout.mean:
        mean, counts = next_part(D, torch.float32), next_part(1, torch.int32)
    if layout.group_means:
        coded = next_part(1, torch.int32)
    return Parts(channels, v, k, codes, scales, means, mean, counts, coded)


class Blocks:
    """The blocks of one layer, and which of them the rows of the current batch have.

    lengths (B,) int64 and table (B,most blocks of a row) int32 change with every batch; the memory stays. rows_read
    (B,2) int64: as of a Full store.
    """

    def __init__(self, memory: Tensor, layout: BlockLayout, H: int, G: int) -> None:
        self.layout, self.parts = layout, parts_of(memory, layout)
        self.H, self.G = H, G
        self.distance = memory.stride(0) * memory.element_size()
        self.count = memory.shape[0]
        self.lengths = torch.zeros(0, dtype=torch.int64)
        self.table = torch.zeros(0, 0, dtype=torch.int32)
        self.rows_read: Tensor | None = None
        self.view: object = None  # of a backend
        if memory.shape[1] != H:
            raise ValueError(f"the cache has {memory.shape[1]} KV heads, the layer {H}")

    @property
    def shape(self) -> Shape:
        """The sizes of the current batch."""
        return Shape(self.lengths.shape[0], self.H, self.G, self.layout.D)

    def rows(self, table: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The first n rows of K and V of a sequence whose blocks have the numbers `table` (blocks,): (1,H,n,D) each."""
        numbers = table[: -(-n // self.layout.tokens)].long()
        stored = (part[numbers].transpose(0, 1).flatten(1, 2)[None, :, :n] for part in (self.parts.k, self.parts.v))
        k, v = (self.layout.row_format.decode(x, self.layout.dtype) for x in stored)
        return k, v

    @property
    def group_means(self) -> bool:
        """Whether the blocks have the means of the groups of their index."""
        return self.layout.group_means
