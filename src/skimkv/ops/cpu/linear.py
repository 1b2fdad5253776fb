"""Products with matrices in C++ (csrc/products.cpp: skimkv_product_run)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import matrices, packed_weights
from . import library
from .structs import CMatrix


class Matrix:
    """A matrix, and perhaps a bias, as the library is told of it: the same for every token.

    It holds addresses, and keeps `memory`, tensors of its own that share it: a parameter may get other memory
    meanwhile, and then the matrix is of the old numbers. The library does not change it, so several threads may
    multiply with it at the same time. bias: the tensor that it is of, or a copy. kind: of ops/matrices.py.
    """

    def __init__(
        self,
        op: Any,
        run: Callable[..., bytes | None],
        out: int,
        inputs: int,
        memory: tuple[Tensor | None, ...],
        bias: Tensor | None = None,
        kind: str = "",
    ) -> None:
        self.kind, self.memory, self.bias = kind, memory, bias
        self.op, self.address, self.run = op, ctypes.addressof(op), run
        self.dtype = library.TYPES[op.dtype]
        self.out, self.inputs, self.pool = out, inputs, library.thread_pool()

    def multiply(self, x: Tensor) -> Tensor:
        """Multiply x (...,in) -> (...,out) in the type of x, which must be that of the matrix.

        Raises ValueError with the library's reason.
        """
        if x.shape[-1] != self.inputs or x.dtype != self.dtype or not x.is_cpu:
            raise ValueError(
                f"x is {x.dtype} {tuple(x.shape)} on {x.device}; must be {self.dtype} (..., {self.inputs}) on cpu"
            )
        if not x.is_contiguous():
            x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], self.out))
        tokens = x.numel() // self.inputs
        if tokens:
            threads = torch.get_num_threads() if self.pool else 1
            library.raise_error(self.run(self.address, x.data_ptr(), y.data_ptr(), tokens, threads, self.pool))
        return y


def matrix(
    x: Tensor, weight: Tensor, kind: str, rows: int, bias: Tensor | None = None, order: Tensor | None = None
) -> Matrix:
    """A matrix of one of the kinds of ops/matrices.py, to be multiplied with x and its like.

    Where it is quantised, activations become integers of 16 bits with a scale for every 32, which adds an error of at
    most 2^-15 max |x| of these to each; with blocks, those of fewer than 16 tokens in bfloat16 have 8 bits. x is
    float32, bfloat16 or float16. Raises ValueError if a type, a stride or a device has no kernel.
    """
    dtype = dtype_number(x)
    if not weight.is_contiguous():
        raise ValueError("weights must be contiguous")
    if order is not None and (order.shape != (rows,) or order.dtype != torch.int32 or not order.is_contiguous()):
        raise ValueError(f"order is {order.dtype} {tuple(order.shape)}; must be contiguous int32 ({rows},)")
    if bias is not None:
        if bias.shape != (rows,) or bias.device != x.device:
            raise ValueError(f"bias is {tuple(bias.shape)} on {bias.device}; must be ({rows},) on {x.device}")
        bias = bias.to(x.dtype).contiguous()
    columns, number = x.shape[-1], matrices.number(weight, kind)
    memory = tuple(None if tensor is None else tensor.detach() for tensor in (weight, bias, order))
    at_weight, at_bias, at_order = map(_address, memory)
    op = CMatrix(at_weight, rows, columns, at_bias, at_order, number, dtype)
    return Matrix(op, library.library().skimkv_product_run, rows, columns, memory, bias, kind)


def expand(
    weight: Tensor, kind: str, rows: int, columns: int, dtype: torch.dtype, order: Tensor | None = None
) -> Tensor:
    """Dequantise a matrix of blocks or panels -> (rows,columns) in dtype: float32, bfloat16 or float16.

    order: as of `matrix`. Raises ValueError if the library has no kernel for it.
    """
    matrices.check(weight, kind, rows, columns)
    y = torch.empty(rows, columns, dtype=dtype, device="cpu")
    number = matrices.number(weight, kind)
    op = CMatrix(weight.data_ptr(), rows, columns, None, _address(order), number, dtype_number(y))
    library.raise_error(library.library().skimkv_matrix_expand(ctypes.addressof(op), y.data_ptr(), *library.threads()))
    return y


class Rows:
    """Rows of a matrix of blocks or panels, as numbers of `dtype`.

    It keeps the weights and holds their address: it is right as long as they stay where they are. Raises ValueError if
    the library has no kernel for them, or if they are not contiguous.
    """

    def __init__(self, weight: Tensor, kind: str, columns: int, dtype: torch.dtype) -> None:
        self.stored = packed_weights.ROWS if kind == matrices.PACKED else 1  # rows that are expanded together
        matrices.check(weight, kind, self.stored * weight.shape[0], columns)
        if not weight.is_contiguous() or not weight.is_cpu:
            raise ValueError(f"weights must be contiguous and on cpu; they are on {weight.device}")
        self.weight, self.columns, self.dtype, self.count = weight.detach(), columns, dtype, self.stored * len(weight)
        self.start, self.distance = self.weight.data_ptr(), weight.stride(0) * weight.element_size()
        self.number = dtype_number(weight.new_empty(0, dtype=dtype))
        self.kind, self.expand = matrices.number(weight, kind), library.library().skimkv_matrix_expand

    def __call__(self, index: Sequence[int]) -> Tensor:
        """The rows of these numbers: (n,columns). Raises ValueError if one is missing."""
        stored, columns = self.stored, self.columns
        y = torch.empty(len(index) * stored, columns, dtype=self.dtype, device="cpu")
        to, distance = y.data_ptr(), stored * columns * y.element_size()
        op = CMatrix(self.start, stored, columns, None, None, self.kind, self.number)
        for i, row in enumerate(index):
            if not 0 <= row < self.count:
                raise ValueError(f"row {row} is not one of {self.count}")
            op.data = self.start + row // stored * self.distance
            library.raise_error(self.expand(ctypes.addressof(op), to + i * distance, 1, None))
        if stored == 1:
            return y
        if len(index) == 1:
            row = index[0] % stored
            return y[row : row + 1]
        return y[torch.tensor([i * stored + row % stored for i, row in enumerate(index)], device="cpu")]


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def dtype_number(x: Tensor) -> int:
    """The library's number for the type of a tensor on a CPU. Raises ValueError if it has none."""
    dtype = library.DTYPES.get(x.dtype)
    if dtype is None or not x.is_cpu:
        raise ValueError(f"no CPU kernel for activations of {x.dtype} on {x.device}")
    return dtype
