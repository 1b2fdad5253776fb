"""A cache in blocks that a serving engine owns: where K, V and the index lie in a block, and the blocks of a batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .base import Shape
from .quantise import BITS, GROUP, round_up

BLOCK_CHANNELS = ("copy", *BITS)  # what a block can have as an index: see BlockLayout


class BlockLayout(NamedTuple):
    """The parts of one block for one KV head, which follow each other without gaps.

    K channel by channel (D,tokens), V (tokens,D) and K (tokens,D), all in dtype. Then, where `channels` is "int8" or
    "int4", the codes of a quantised index (D,tokens*bits/8) and its scales and zeros (D,2,tokens/GROUP) float32. Then,
    with `mean`, the mean of V over the tokens of the block (D,) float32 and their number, int32. A block may be filled
    again from its beginning.

    tokens: room of a block, a multiple of GROUP.
    """

    tokens: int
    D: int
    dtype: torch.dtype
    channels: str
    mean: bool = False

    @property
    def bytes_per_token(self) -> int:
        """The bytes that a block has for each token of one KV head, a multiple of 8."""
        bits = BITS.get(self.channels)
        index = 0 if bits is None else round_up(self.D * bits // 8 + 8 * self.D // GROUP, 8)
        mean = round_up(-(-4 * (self.D + 1) // self.tokens), 8) if self.mean else 0
        return 3 * self.D * self.dtype.itemsize + index + mean

    def check(self) -> None:
        """Raise ValueError if no block can have these sizes."""
        if self.tokens < GROUP or self.tokens % GROUP:
            raise ValueError(f"blocks of {self.tokens} tokens: the size must be a multiple of {GROUP}")
        if self.channels not in BLOCK_CHANNELS:
            raise ValueError(f"channels = {self.channels!r} must be one of {', '.join(BLOCK_CHANNELS)} in blocks")
        if self.D % 32:
            raise ValueError(f"heads of {self.D} numbers: blocks take multiples of 32")


class Parts(NamedTuple):
    """The parts of all blocks as tensors on the engine's memory.

    channels (blocks,H,D,tokens) · v, k (blocks,H,tokens,D) · codes (blocks,H,D,bytes) · scales (blocks,H,D,2,groups)
    · mean (blocks,H,D) · counts (blocks,H,1).
    """

    channels: Tensor
    v: Tensor
    k: Tensor
    codes: Tensor | None
    scales: Tensor | None
    mean: Tensor | None
    counts: Tensor | None


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

    channels, v, k = (next_part(D * N, dtype) for _ in range(3))
    codes = scales = mean = counts = None
    if bits := BITS.get(layout.channels):
        codes = next_part(D * N * bits // 8, torch.uint8).unflatten(-1, (D, -1))
        scales = next_part(2 * D * N // GROUP, torch.float32).unflatten(-1, (D, 2, -1))
    if layout.mean:
        mean, counts = next_part(D, torch.float32), next_part(1, torch.int32)
    rows_of_k, rows_of_v = k.unflatten(-1, (N, D)), v.unflatten(-1, (N, D))
    return Parts(channels.unflatten(-1, (D, N)), rows_of_v, rows_of_k, codes, scales, mean, counts)


class Blocks:
    """The blocks of one layer, and which of them the rows of the current batch have.

    lengths (B,) int64 and table (B,most blocks of a row) int32 change with every batch; the memory stays.
    """

    def __init__(self, memory: Tensor, layout: BlockLayout, H: int, G: int) -> None:
        self.layout, self.parts = layout, parts_of(memory, layout)
        self.H, self.G = H, G
        self.distance = memory.stride(0) * memory.element_size()
        self.count = memory.shape[0]
        self.lengths = torch.zeros(0, dtype=torch.int64)
        self.table = torch.zeros(0, 0, dtype=torch.int32)
        self.view: object = None  # of a backend
        if memory.shape[1] != H:
            raise ValueError(f"the cache has {memory.shape[1]} KV heads, the layer {H}")

    @property
    def shape(self) -> Shape:
        """The sizes of the current batch."""
        return Shape(self.lengths.shape[0], self.H, self.G, self.layout.D)
