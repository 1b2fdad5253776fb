"""Products with quantised weights in C++ (csrc: skimkv_linear_run, skimkv_block_linear_run)."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, c_char_p, c_int, c_int32, c_int64, c_void_p

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from ..packed_weights import check_weights
from . import library


class CLinear(Structure):
    """The structure skimkv_linear of skimkv.h."""

    _fields_ = library.structure_fields(
        ("w", c_void_p),
        ("out in_ n", c_int64),
        ("x y", c_void_p),
        ("x_n y_n", c_int64),
        ("bias", c_void_p),
        ("dtype", c_int32),
    )


class CBlockLinear(Structure):
    """The structure skimkv_block_linear of skimkv.h."""

    _fields_ = library.structure_fields(
        ("w", c_void_p),
        ("out in_ n", c_int64),
        ("x y", c_void_p),
        ("x_n y_n", c_int64),
        ("bias order", c_void_p),
        ("dtype type", c_int32),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    lib = library.library()
    lib.skimkv_linear_check.argtypes, lib.skimkv_linear_check.restype = [POINTER(CLinear)], c_char_p
    lib.skimkv_linear_run.argtypes = [POINTER(CLinear), c_int, c_void_p]
    for check in (lib.skimkv_block_linear_check, lib.skimkv_block_expand_check):
        check.argtypes, check.restype = [POINTER(CBlockLinear)], c_char_p
    lib.skimkv_block_linear_run.argtypes = [POINTER(CBlockLinear), c_int, c_void_p]
    lib.skimkv_block_expand.argtypes, lib.skimkv_block_expand.restype = [POINTER(CBlockLinear), c_int, c_void_p], None
    return lib


def linear8(x: Tensor, packed: Tensor, out: int, bias: Tensor | None = None) -> Tensor:
    """Compute x W^T + bias (see ops/linear.py); activations become 16-bit integers, with a scale per block of 32.

    This adds an error of at most 2^-16 max |x| of a block to each activation. x is float32, bfloat16 or float16.
    Raises ValueError if shapes, types, strides or devices do not fit.
    """
    check_weights(x, packed, out)
    dtype = _dtype(x)
    if not packed.is_contiguous():
        raise ValueError("packed weights must be contiguous")
    tokens = x.reshape(-1, x.shape[-1])
    if tokens.stride(-1) != 1 or tokens.stride(0) < tokens.shape[1]:
        tokens = tokens.contiguous()
    y = x.new_empty(*x.shape[:-1], out)
    if not tokens.shape[0]:
        return y
    if bias is not None:
        if bias.shape != (out,) or bias.device != x.device:
            raise ValueError(f"bias is {tuple(bias.shape)} on {bias.device}; must be ({out},) on {x.device}")
        bias = bias.to(x.dtype).contiguous()
    op = CLinear(
        packed.data_ptr(), out, tokens.shape[1], tokens.shape[0], tokens.data_ptr(), y.data_ptr(),
        tokens.stride(0), out, None if bias is None else bias.data_ptr(), dtype,
    )  # fmt: skip
    lib, (threads, pool) = _library(), library.threads()
    error: bytes | None = lib.skimkv_linear_check(op)
    if error is not None:
        raise ValueError(error.decode())
    if lib.skimkv_linear_run(op, threads, pool):
        raise MemoryError("no memory for the activations of an 8-bit product")
    return y


def block_linear(x: Tensor, rows: Tensor, type: str, bias: Tensor | None = None, order: Tensor | None = None) -> Tensor:
    """Compute `block_linear` of ops/linear.py: x (n,in) -> (n,out). Activations are rounded as in `linear8`."""
    dtype = _dtype(x)
    out = _rows_of(rows, order)
    if x.stride(-1) != 1 or x.stride(0) < x.shape[1]:
        x = x.contiguous()
    y = x.new_empty(x.shape[0], out)
    if not x.shape[0]:
        return y
    if bias is not None:
        if bias.shape != (out,) or bias.device != x.device:
            raise ValueError(f"bias is {tuple(bias.shape)} on {bias.device}; must be ({out},) on {x.device}")
        bias = bias.to(x.dtype).contiguous()
    op = CBlockLinear(
        rows.data_ptr(), out, x.shape[1], x.shape[0], x.data_ptr(), y.data_ptr(), x.stride(0), out,
        None if bias is None else bias.data_ptr(), None if order is None else order.data_ptr(), dtype,
        GGMLQuantizationType[type],
    )  # fmt: skip
    lib, (threads, pool) = _library(), library.threads()
    error: bytes | None = lib.skimkv_block_linear_check(op)
    if error is not None:
        raise ValueError(error.decode())
    if lib.skimkv_block_linear_run(op, threads, pool):
        raise MemoryError("no memory for the activations of a product with blocks")
    return y


def expand_blocks(rows: Tensor, type: str, inputs: int, dtype: torch.dtype) -> Tensor:
    """Dequantise rows (n,row_bytes) of blocks -> (n,inputs) in dtype: float32, bfloat16 or float16."""
    y = torch.empty(_rows_of(rows, None), inputs, dtype=dtype)
    op = CBlockLinear(
        rows.data_ptr(), y.shape[0], inputs, 1, None, y.data_ptr(), 0, inputs, None, None, _dtype(y),
        GGMLQuantizationType[type],
    )  # fmt: skip
    lib, (threads, pool) = _library(), library.threads()
    error: bytes | None = lib.skimkv_block_expand_check(op)
    if error is not None:
        raise ValueError(error.decode())
    lib.skimkv_block_expand(op, threads, pool)
    return y


def _rows_of(rows: Tensor, order: Tensor | None) -> int:
    """How many rows there are. Raises ValueError unless they and their order are contiguous."""
    if not rows.is_contiguous():
        raise ValueError("rows of blocks must be contiguous")
    if order is not None and (order.shape != rows.shape[:1] or order.dtype != torch.int32 or not order.is_contiguous()):
        raise ValueError(f"order is {order.dtype} {tuple(order.shape)}; must be contiguous int32 ({rows.shape[0]},)")
    return rows.shape[0]


def _dtype(x: Tensor) -> int:
    dtype = library.DTYPES.get(x.dtype)
    if dtype is None or x.device.type != "cpu":
        raise ValueError(f"no CPU kernel for activations of {x.dtype} on {x.device}")
    return dtype
