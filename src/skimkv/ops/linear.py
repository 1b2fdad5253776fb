"""Products y = x W^T + bias: W as floats, or in the layout of packed_weights.py or of block_weights.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from . import block_weights
from .backends import forced_backend, kernels_for
from .cpu import linear as cpu
from .packed_weights import check_weights, dequantise

TILE = 64  # panels of sixteen rows that the reference dequantises at once
ROWS_AT_ONCE = 1024  # rows of blocks that are dequantised at once for a prompt
PROMPT = 16  # tokens from which on dequantised rows are faster than products with blocks
FLOAT_PROMPT = 16  # tokens from which on PyTorch multiplies floats faster


class Product:
    """The product of a layer with its inputs, whose kernel is prepared once: while nothing changes, it only runs.

    After a model has read other weights, each function that Python calls costs a microsecond or more.
    prepare(x, weight, bias=): the matrix as the kernel needs it, or None where PyTorch computes. compute, likewise: the
    product in that case.
    """

    def __init__(
        self,
        prepare: Callable[..., cpu.Matrix | None],
        compute: Callable[..., Tensor],
    ) -> None:
        self._prepare, self._compute = prepare, compute
        self._matrix: cpu.Matrix | None = None
        self._form: tuple[object, ...] | None = None

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """Compute x W^T + bias: x (...,in) -> (...,out).

        Raises ValueError if a gradient is wanted, and where `compute` does.
        """
        matrix = self.matrix(x, weight, bias)
        if matrix is None:
            assert weight is not None
            return self._compute(x, weight, bias=bias)
        return matrix.multiply(x)

    def matrix(self, x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> cpu.Matrix | None:
        """What the kernel needs to multiply x and its like; None where PyTorch computes. Raises as a call does."""
        assert weight is not None  # a module's parameters are None where it has none
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError("weights for inference have no gradient: use torch.no_grad()")
        form = (
            x.shape, x.dtype, x.is_cpu, weight.shape, weight.dtype, weight.data_ptr(),
            None if bias is None else bias.data_ptr(), forced_backend.get(),
        )  # fmt: skip
        if form == self._form and self._matrix is not None:
            return self._matrix
        matrix = self._prepare(x, weight, bias=bias)
        if matrix is not None:
            is_lasting = bias is None or matrix.bias is bias
            self._matrix, self._form = (matrix, form) if is_lasting else (None, None)
        return matrix

    def __getstate__(self) -> dict[str, object]:
        """A copy is of other tensors: it is prepared anew."""
        return {**self.__dict__, "_matrix": None, "_form": None}


def is_native(x: Tensor) -> bool:
    """Whether the C++ library computes with x."""
    kernels = kernels_for(x.device)
    return kernels is not None and kernels.name == "cpu"


def packed_matrix(x: Tensor, packed: Tensor, out: int, bias: Tensor | None = None) -> cpu.Matrix | None:
    """The weights of `linear8` as its kernel needs them for x and its like; None where the reference computes."""
    return cpu.packed_matrix(x, packed, out, bias) if is_native(x) else None


def linear8(x: Tensor, packed: Tensor, out: int, bias: Tensor | None = None) -> Tensor:
    """Compute x W^T + bias: x (...,in) · packed weights of `out` rows · bias (out,) -> (...,out) in x's dtype.

    In C++ where the backend is cpu. Raises ValueError if shapes, dtypes or devices do not fit.
    """
    matrix = packed_matrix(x, packed, out, bias)
    return reference(x, packed, out, bias) if matrix is None else matrix.multiply(x)


def reference(x: Tensor, packed: Tensor, out: int, bias: Tensor | None = None) -> Tensor:
    """Compute `linear8` in PyTorch: float32 products with tiles of dequantised rows."""
    check_weights(x, packed, out)
    tiles = []
    for p in range(0, packed.shape[0], TILE):
        panels = packed[p : p + TILE].permute(0, 3, 1, 2).flatten(0, 1)  # (rows, in/32, 17)
        tiles.append(x.float() @ dequantise(panels).T)
    y = torch.cat(tiles, -1)[..., :out]
    return (y if bias is None else y + bias.float()).to(x.dtype)


def block_matrix(
    x: Tensor, rows: Tensor, type: str, bias: Tensor | None = None, order: Tensor | None = None
) -> cpu.Matrix | None:
    """The weights of `block_linear` as its kernel needs them for x and its like; None where PyTorch computes."""
    block_weights.check_rows(x, rows, type)
    if x.numel() >= PROMPT * x.shape[-1] or not is_native(x):
        return None
    return cpu.block_matrix(x, rows, type, bias, order)


def block_linear(x: Tensor, rows: Tensor, type: str, bias: Tensor | None = None, order: Tensor | None = None) -> Tensor:
    """Compute x W^T + bias with the blocks of a GGUF file: x (...,in) · rows (out,row_bytes) uint8 -> (...,out).

    type: of the blocks, one of block_weights.TYPES. order: (out,) int32, the output that each row gives, a permutation;
    None if row i gives output i. A few tokens are multiplied in C++ where the backend is cpu, straight from the blocks;
    for a prompt the rows are dequantised a part at a time. Raises ValueError if shapes, types or devices do not fit.
    """
    matrix = block_matrix(x, rows, type, bias, order)
    if matrix is not None:
        return matrix.multiply(x)
    in_library = is_native(x)
    tokens = x.reshape(-1, x.shape[-1])
    y = x.new_empty(tokens.shape[0], rows.shape[0])
    for first in range(0, rows.shape[0], ROWS_AT_ONCE):
        part = rows[first : first + ROWS_AT_ONCE]
        if in_library:
            y[:, first : first + ROWS_AT_ONCE] = tokens @ cpu.expand_blocks(part, type, x.shape[-1], x.dtype).T
        else:
            y[:, first : first + ROWS_AT_ONCE] = (tokens.float() @ block_weights.dequantise(part, type).T).to(x.dtype)
    if order is not None:
        y = torch.empty_like(y).index_copy_(1, order.long(), y)
    y = y if bias is None else y + bias.to(y.dtype)
    return y.view(*x.shape[:-1], rows.shape[0])


def float_matrix(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> cpu.Matrix | None:
    """The weights of `float_linear` as its kernel needs them for x and its like; None where PyTorch computes."""
    types = (torch.float32, torch.bfloat16, torch.float16)
    if weight.ndim != 2 or weight.dtype not in types or weight.device != x.device:
        raise ValueError(
            f"weights are {weight.dtype} {tuple(weight.shape)} on {weight.device}; "
            f"must be float32, bfloat16 or float16 (out,in) on {x.device}"
        )
    if x.dtype not in types or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}; must be floats (...,{weight.shape[1]})")
    if x.numel() >= FLOAT_PROMPT * weight.shape[1] or weight.shape[1] % 32 or not weight.is_contiguous():
        return None
    return cpu.float_matrix(x, weight, bias) if is_native(x) else None


def float_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x W^T + bias with floats: x (...,in) · weight (out,in) · bias (out,) -> (...,out) in x's dtype.

    The weights are float32, bfloat16 or float16, whatever type x has. A few tokens are multiplied in C++ where the
    backend is cpu, with products and sums in float32; otherwise PyTorch does.

    Raises ValueError if shapes, dtypes or devices do not fit.
    """
    matrix = float_matrix(x, weight, bias)
    if matrix is not None:
        return matrix.multiply(x)
    bias = None if bias is None else bias.to(x.dtype)
    if weight.dtype == x.dtype:
        return F.linear(x, weight, bias)
    y = x.new_empty(*x.shape[:-1], weight.shape[0])
    for first in range(0, weight.shape[0], ROWS_AT_ONCE):
        y[..., first : first + ROWS_AT_ONCE] = x @ weight[first : first + ROWS_AT_ONCE].to(x.dtype).T
    return y if bias is None else y + bias
