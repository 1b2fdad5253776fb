"""The kinds of weight matrices W (rows,columns), and the tensors that hold them.

"floats": float32, bfloat16 or float16 (rows,columns). "packed": 8 bits, in the panels of packed_weights.py. Others are
the types of GGUF's blocks in block_weights.py.
"""

from __future__ import annotations

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from . import block_weights, packed_weights

FLOATS, PACKED = "floats", "packed"
FLOAT_TYPES = {torch.float32: GGMLQuantizationType.F32, torch.bfloat16: GGMLQuantizationType.BF16}
FLOAT_TYPES |= {torch.float16: GGMLQuantizationType.F16}
PANELS = 1000  # SKIMKV_KIND_PANELS of skimkv.h, whose other kinds have GGUF's numbers


def number(weight: Tensor, kind: str) -> int:
    """The number that skimkv.h gives the kind of a matrix."""
    if kind == PACKED:
        return PANELS
    return FLOAT_TYPES[weight.dtype] if kind == FLOATS else GGMLQuantizationType[kind]


def check(weight: Tensor, kind: str, rows: int, columns: int) -> None:
    """Raise ValueError unless weight is a tensor that holds such a matrix; on the meta device it may be of any type."""
    shape: tuple[int, ...]
    if kind == FLOATS:
        shape, types = (rows, columns), [*FLOAT_TYPES]
    elif kind == PACKED:
        shape, types = packed_weights.packed_shape(rows, columns), [torch.int16]
    else:
        shape, types = (rows, block_weights.row_bytes(kind, columns)), [torch.uint8]
    if weight.shape != shape or (weight.dtype not in types and not weight.is_meta):
        names = " or ".join(str(type) for type in types)
        raise ValueError(
            f"weights are {weight.dtype} {tuple(weight.shape)}; {rows} x {columns} as {kind} needs {names} {shape}"
        )


def dequantise(weight: Tensor, kind: str, index: Tensor) -> Tensor:
    """The numbers that these rows stand for: index (n,) int64 -> (n,columns) float32."""
    if kind == FLOATS:
        return weight[index].float()
    if kind == PACKED:
        return packed_weights.dequantise(packed_weights.rows_of(weight, index))
    return block_weights.dequantise(weight[index], kind)
