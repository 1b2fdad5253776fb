"""The blocks of quantised weights that GGUF files hold, as they are there: row after row, without another layout.

A block has 32 weights, in K types and IQ4_XS 256. What it means is defined by the package gguf, whose dequantisation is
the reference.
"""

from __future__ import annotations

import gguf
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

TYPES = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS",
)  # fmt: skip


def block_size(type: str) -> tuple[int, int]:
    """Return how many weights a block of this type has, and how many bytes. Raises ValueError for another type."""
    if type not in TYPES:
        raise ValueError(f"blocks of {type} are not supported; {', '.join(TYPES)} are")
    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[type]]
    return weights, size


def row_bytes(type: str, inputs: int) -> int:
    """Return the bytes of a row of `inputs` weights. Raises ValueError if these are no whole number of blocks."""
    weights, size = block_size(type)
    if inputs < weights or inputs % weights:
        raise ValueError(f"rows of {type} need inputs in blocks of {weights}, not {inputs}")
    return inputs // weights * size


def dequantise(rows: Tensor, type: str) -> Tensor:
    """Return the numbers that rows of blocks stand for: (n,row_bytes) uint8 -> (n,in) float32."""
    return torch.from_numpy(gguf.quants.dequantize(rows.cpu().numpy(), GGMLQuantizationType[type])).to(rows.device)


def quantise_int4(w: Tensor) -> Tensor:
    """Quantise weights to blocks of Q4_0: w (out,in) of any float type -> (out,row_bytes) uint8.

    32 weights share a float16 scale; codes are whole numbers from -8 to 7, and the largest weight of a block, by its
    size, is code -8. Raises ValueError if `in` is no multiple of 32, or if a weight is not finite.
    """
    row_bytes("Q4_0", w.shape[1])
    x = w.float().unflatten(-1, (-1, 32))
    if not x.isfinite().all():
        raise ValueError("4-bit weights must be finite")
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    scale = (largest / -8 + 0.0).half()  # adding 0 turns -0 into 0
    step = scale.float()
    codes = (x / step.masked_fill(step == 0, torch.inf)).round_().clamp_(-8, 7).add_(8).to(torch.uint8)
    packed = codes[..., :16] | codes[..., 16:] << 4
    return torch.cat([scale.view(torch.uint8), packed], -1).flatten(1)
