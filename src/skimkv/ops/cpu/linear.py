"""Products with weights in C++ (csrc: skimkv_linear_run, skimkv_block_linear_run, skimkv_float_linear_run)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import Structure, c_char_p, c_int, c_int32, c_int64, c_void_p
from typing import Any

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from ..packed_weights import check_weights
from . import library


class CLinear(Structure):
    """The structure skimkv_linear of skimkv.h."""

    _fields_ = library.structure_fields(
        ("w", c_void_p),
        ("out in_", c_int64),
        ("bias", c_void_p),
        ("dtype", c_int32),
    )


class CBlockLinear(Structure):
    """The structure skimkv_block_linear of skimkv.h."""

    _fields_ = library.structure_fields(
        ("w", c_void_p),
        ("out in_", c_int64),
        ("bias order", c_void_p),
        ("dtype type", c_int32),
    )


class CFloatLinear(Structure):
    """The structure skimkv_float_linear of skimkv.h."""

    _fields_ = library.structure_fields(
        ("w", c_void_p),
        ("out in_", c_int64),
        ("bias", c_void_p),
        ("dtype type", c_int32),
    )


class CMatrix(Structure):
    """The structure skimkv_matrix of skimkv.h."""

    _fields_ = library.structure_fields(("op", c_void_p), ("kind", c_int32))


KINDS: tuple[type[Structure], ...] = (CLinear, CBlockLinear, CFloatLinear)  # by the number of their kind


class Matrix:
    """A matrix, and perhaps a bias, as the library is told of it: the same for every token.

    It keeps the tensors and holds their addresses: it is right as long as each stays where it was. The library does not
    change it, so several threads may multiply with it at the same time.
    """

    def __init__(
        self,
        op: Any,
        run: Callable[..., bytes | None],
        out: int,
        inputs: int,
        weights: tuple[Tensor | None, ...],
        bias: Tensor | None = None,
    ) -> None:
        self.op, self.address, self.run = op, ctypes.addressof(op), run
        self.weights, self.bias = weights, bias  # so that they live as long
        self.out, self.inputs, self.pool = out, inputs, library.thread_pool()

    def part(self) -> CMatrix:
        """The matrix as a part of another operation. It holds an address, and lives no longer than the matrix."""
        return CMatrix(self.address, KINDS.index(type(self.op)))

    def multiply(self, x: Tensor) -> Tensor:
        """Multiply x (...,in) -> (...,out) in the type of x. Raises ValueError with the library's reason."""
        if not x.is_contiguous():
            x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], self.out))
        tokens = x.numel() // self.inputs
        if tokens:
            threads = torch.get_num_threads() if self.pool else 1
            _raise(self.run(self.address, x.data_ptr(), y.data_ptr(), tokens, threads, self.pool))
        return y


def packed_matrix(x: Tensor, packed: Tensor, out: int, bias: Tensor | None = None) -> Matrix:
    """Packed 8-bit weights (see ops/linear.py), to be multiplied with x and its like.

    Activations become 16-bit integers, with a scale per block of 32. This adds an error of at most 2^-16 max |x| of a
    block to each activation. x is float32, bfloat16 or float16.
    Raises ValueError if shapes, types, strides or devices do not fit.
    """
    check_weights(x, packed, out)
    dtype = dtype_number(x)
    if not packed.is_contiguous():
        raise ValueError("packed weights must be contiguous")
    bias = _bias(bias, out, x)
    op = CLinear(packed.data_ptr(), out, x.shape[-1], _address(bias), dtype)
    return Matrix(op, _library().skimkv_linear_run, out, x.shape[-1], (packed,), bias)


def block_matrix(x: Tensor, rows: Tensor, type: str, bias: Tensor | None = None, order: Tensor | None = None) -> Matrix:
    """Blocks of a GGUF file, to be multiplied with x and its like, whose inputs are rounded as in `packed_matrix`."""
    dtype, out = dtype_number(x), _rows_of(rows, order)
    bias = _bias(bias, out, x)
    number = GGMLQuantizationType[type]
    op = CBlockLinear(rows.data_ptr(), out, x.shape[-1], _address(bias), _address(order), dtype, number)
    return Matrix(op, _library().skimkv_block_linear_run, out, x.shape[-1], (rows, order), bias)


def float_matrix(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Matrix:
    """Weights (out,in) of float32, bfloat16 or float16, to be multiplied with x and its like, at most 64 tokens.

    Raises ValueError if a type, a stride or a device has no kernel.
    """
    dtype, type = dtype_number(x), dtype_number(weight)
    out, inputs = weight.shape
    if not weight.is_contiguous():
        raise ValueError("weights must be contiguous")
    bias = _bias(bias, out, x)
    op = CFloatLinear(weight.data_ptr(), out, inputs, _address(bias), dtype, type)
    return Matrix(op, _library().skimkv_float_linear_run, out, inputs, (weight,), bias)


def expand_blocks(rows: Tensor, type: str, inputs: int, dtype: torch.dtype) -> Tensor:
    """Dequantise rows (n,row_bytes) of blocks -> (n,inputs) in dtype: float32, bfloat16 or float16."""
    y = torch.empty(_rows_of(rows, None), inputs, dtype=dtype)
    op = CBlockLinear(rows.data_ptr(), y.shape[0], inputs, None, None, dtype_number(y), GGMLQuantizationType[type])
    _raise(_library().skimkv_block_expand(ctypes.addressof(op), y.data_ptr(), *library.threads()))
    return y


@functools.cache
def _library() -> ctypes.CDLL:
    lib = library.library()
    for run in (lib.skimkv_linear_run, lib.skimkv_block_linear_run, lib.skimkv_float_linear_run):
        run.argtypes, run.restype = [c_void_p, c_void_p, c_void_p, c_int64, c_int, c_void_p], c_char_p
    lib.skimkv_block_expand.argtypes = [c_void_p, c_void_p, c_int, c_void_p]
    lib.skimkv_block_expand.restype = c_char_p
    return lib


def _raise(error: bytes | None) -> None:
    if error is not None:
        raise ValueError(error.decode())


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _bias(bias: Tensor | None, out: int, x: Tensor) -> Tensor | None:
    """The bias in x's type. Raises ValueError if it is not of `out` numbers on x's device."""
    if bias is None:
        return None
    if bias.shape != (out,) or bias.device != x.device:
        raise ValueError(f"bias is {tuple(bias.shape)} on {bias.device}; must be ({out},) on {x.device}")
    return bias.to(x.dtype).contiguous()


def _rows_of(rows: Tensor, order: Tensor | None) -> int:
    """How many rows there are. Raises ValueError unless they and their order are contiguous."""
    if not rows.is_contiguous():
        raise ValueError("rows of blocks must be contiguous")
    if order is not None and (order.shape != rows.shape[:1] or order.dtype != torch.int32 or not order.is_contiguous()):
        raise ValueError(f"order is {order.dtype} {tuple(order.shape)}; must be contiguous int32 ({rows.shape[0]},)")
    return rows.shape[0]


def dtype_number(x: Tensor) -> int:
    """The library's number for the type of a tensor on a CPU. Raises ValueError if it has none."""
    dtype = library.DTYPES.get(x.dtype)
    if dtype is None or not x.is_cpu:
        raise ValueError(f"no CPU kernel for activations of {x.dtype} on {x.device}")
    return dtype
