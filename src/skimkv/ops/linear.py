"""Products with quantised weights: y = x W^T + bias, W in the layout of packed_weights.py or of block_weights.py."""

from __future__ import annotations

import torch
from torch import Tensor

from . import block_weights
from .backends import kernels_for
from .cpu import linear as cpu
from .packed_weights import check_weights, dequantise

TILE = 64  # panels of sixteen rows that the reference dequantises at once
ROWS_AT_ONCE = 1024  # rows of blocks that are dequantised at once for a prompt
PROMPT = 16  # tokens from which on dequantised rows are faster than products with blocks


def linear8(x: Tensor, packed: Tensor, out: int, bias: Tensor | None = None) -> Tensor:
    """Compute x W^T + bias: x (...,in) · packed weights of `out` rows · bias (out,) -> (...,out) in x's dtype.

    In C++ where the backend is cpu. Raises ValueError if shapes, dtypes or devices do not fit.
    """
    kernels = kernels_for(x.device)
    if kernels is not None and kernels.name == "cpu":
        return cpu.linear8(x, packed, out, bias)
    return reference(x, packed, out, bias)


def reference(x: Tensor, packed: Tensor, out: int, bias: Tensor | None = None) -> Tensor:
    """Compute `linear8` in PyTorch: float32 products with tiles of dequantised rows."""
    check_weights(x, packed, out)
    tiles = []
    for p in range(0, packed.shape[0], TILE):
        panels = packed[p : p + TILE].permute(0, 3, 1, 2).flatten(0, 1)  # (rows, in/32, 17)
        tiles.append(x.float() @ dequantise(panels).T)
    y = torch.cat(tiles, -1)[..., :out]
    return (y if bias is None else y + bias.float()).to(x.dtype)


def block_linear(x: Tensor, rows: Tensor, type: str, bias: Tensor | None = None, order: Tensor | None = None) -> Tensor:
    """Compute x W^T + bias with the blocks of a GGUF file: x (...,in) · rows (out,row_bytes) uint8 -> (...,out).

    type: of the blocks, one of block_weights.TYPES. order: (out,) int32, the output that each row gives, a permutation;
    None if row i gives output i. A few tokens are multiplied in C++ where the backend is cpu, straight from the blocks;
    for a prompt the rows are dequantised a part at a time. Raises ValueError if shapes, types or devices do not fit.
    """
    block_weights.check_rows(x, rows, type)
    kernels = kernels_for(x.device)
    is_native = kernels is not None and kernels.name == "cpu"
    tokens = x.reshape(-1, x.shape[-1])
    if is_native and tokens.shape[0] < PROMPT:
        return cpu.block_linear(tokens, rows, type, bias, order).view(*x.shape[:-1], rows.shape[0])
    y = x.new_empty(tokens.shape[0], rows.shape[0])
    for first in range(0, rows.shape[0], ROWS_AT_ONCE):
        part = rows[first : first + ROWS_AT_ONCE]
        if is_native:
            y[:, first : first + ROWS_AT_ONCE] = tokens @ cpu.expand_blocks(part, type, x.shape[-1], x.dtype).T
        else:
            y[:, first : first + ROWS_AT_ONCE] = (tokens.float() @ block_weights.dequantise(part, type).T).to(x.dtype)
    if order is not None:
        y = torch.empty_like(y).index_copy_(1, order.long(), y)
    y = y if bias is None else y + bias.to(y.dtype)
    return y.view(*x.shape[:-1], rows.shape[0])
