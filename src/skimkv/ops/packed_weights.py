"""The layout of 8-bit weights, those of GGUF's Q8_0: 32 int8 codes along the input and one fp16 scale a block.

A block is 17 words of two bytes: the scale, then codes in pairs. In a file a row's blocks follow each other; `pack`
interleaves sixteen rows word by word, so that a vector of the processor holds one word of sixteen rows:
blocks (out, in/32, 17) -> packed (out/16 rounded up, in/32, 17, 16), all int16, a last panel padded with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

TYPE = "Q8_0"
ROWS, BLOCK, WORDS = 16, 32, 17


def packed_shape(out: int, inputs: int) -> tuple[int, int, int, int]:
    """The shape of the packed weights of `out` rows. Raises ValueError if inputs is no multiple of 32."""
    if inputs < BLOCK or inputs % BLOCK or out < 1:
        raise ValueError(f"8-bit weights need inputs in blocks of {BLOCK}, not {out} x {inputs}")
    return -(-out // ROWS), inputs // BLOCK, WORDS, ROWS


def quantise(w: Tensor) -> Tensor:
    """Quantise weights: w (out,in) of any float type -> blocks (out,in/32,17) int16.

    The scale is max |w| / 127 in fp16, and codes are rounded to nearest.

    A block that holds infinity or NaN (or more than 8e6, which no fp16 scale reaches) is NaN as a whole.
    """
    x = w.float().contiguous().unflatten(-1, (-1, BLOCK))
    scale = (x.abs().amax(-1) / 127).half()
    step = scale.float()
    codes = (x / step.masked_fill(step == 0, torch.inf)[..., None]).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([scale[..., None].view(torch.int16), codes.view(torch.int16)], -1)


def dequantise(blocks: Tensor) -> Tensor:
    """The numbers that blocks stand for, exactly: (...,in/32,17) int16 -> (...,in) float32."""
    scale = blocks[..., :1].contiguous().view(torch.float16).float()
    return (blocks[..., 1:].contiguous().view(torch.int8) * scale).flatten(-2)


def pack(blocks: Tensor, packed: Tensor, first: int = 0) -> None:
    """Write blocks (n,in/32,17) into packed (P,in/32,17,16), from row `first` on, a multiple of 16."""
    n = blocks.shape[0]
    if n % ROWS:
        blocks = torch.cat([blocks, blocks.new_zeros(-n % ROWS, *blocks.shape[1:])])
    panels = blocks.unflatten(0, (-1, ROWS))
    packed[first // ROWS : first // ROWS + panels.shape[0]] = panels.permute(0, 2, 3, 1)


def rows_of(packed: Tensor, index: Tensor) -> Tensor:
    """The blocks of these rows: index (n,) int64 -> (n,in/32,17)."""
    return packed[index // ROWS, :, :, index % ROWS]
