"""A cache in blocks of a serving engine whose parts lie as those of a chunk of a Full store do: all KV heads together.

This is the form that the Triton kernels read. Blocks for CPUs (blocks.py) have the parts of one KV head together, as
vLLM's kernels there do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .base import Shape
from .quantise import GROUP

ROW_BLOCK_CHANNELS = ("none", "copy")


class RowBlockLayout(NamedTuple):
    """The parts of one block, which follow each other without gaps.

    K (H,tokens,D) and V (H,tokens,D), and where `channels` is "copy" the channel-major copy of K, (H,D,tokens): all in
    dtype.

    tokens: room of a block, a multiple of GROUP.
    """

    tokens: int
    H: int
    D: int
    dtype: torch.dtype
    channels: str = "none"

    @property
    def bytes_per_token(self) -> int:
        """The bytes that a block has for each token of one KV head."""
        return (3 if self.channels == "copy" else 2) * self.D * self.dtype.itemsize

    def check(self) -> None:
        """Raise ValueError if no block can have these sizes."""
        if self.tokens < GROUP or self.tokens % GROUP:
            raise ValueError(f"blocks of {self.tokens} tokens: the size must be a multiple of {GROUP}")
        if self.channels not in ROW_BLOCK_CHANNELS:
            raise ValueError(f"channels = {self.channels!r} must be one of {', '.join(ROW_BLOCK_CHANNELS)} in blocks")


class RowBlocks:
    """The blocks of one layer.

    k, v (blocks,H,tokens,D) and channels (blocks,H,D,tokens), None without a copy: the parts of all blocks as tensors
    on the engine's memory. distance: bytes from a block to the next.

    memory: (blocks,H,tokens,C) of any type, where each block is contiguous and has layout.bytes_per_token bytes for
    each token of a KV head. G: query heads of a KV head. Raises ValueError if the memory does not fit the layout.
    """

    def __init__(self, memory: Tensor, layout: RowBlockLayout, G: int) -> None:
        layout.check()
        _, H, tokens, C = memory.shape
        size = memory.element_size()
        contiguous = memory.stride()[1:] == (tokens * C, C, 1)
        if not contiguous or (H, tokens, C * size) != (layout.H, layout.tokens, layout.bytes_per_token):
            raise ValueError(
                f"the cache is {memory.dtype} {tuple(memory.shape)} with strides {memory.stride()}; a block must be "
                f"contiguous and have {layout.H} KV heads, {layout.tokens} tokens and {layout.bytes_per_token} bytes "
                f"for each token of a head"
            )
        self.memory, self.layout, self.G = memory, layout, G
        self.distance = memory.stride(0) * size
        parts = memory.flatten(1).view(torch.uint8).view(layout.dtype)  # (blocks, numbers of a block)
        n = H * tokens * layout.D
        self.k, self.v = (parts[:, at : at + n].unflatten(1, (H, tokens, layout.D)) for at in (0, n))
        self.channels = parts[:, 2 * n :].unflatten(1, (H, layout.D, tokens)) if layout.channels == "copy" else None

    @property
    def shape(self) -> Shape:
        """The sizes of one row of a batch."""
        return Shape(1, self.layout.H, self.G, self.layout.D)
