"""Products with 8-bit weights: y = x W^T + bias, W in the layout of packed_weights.py."""

from __future__ import annotations

import torch
from torch import Tensor

from .backends import kernels_for
from .cpu import linear as cpu
from .packed_weights import check_weights, dequantise

TILE = 64  # panels of sixteen rows that the reference dequantises at once


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
