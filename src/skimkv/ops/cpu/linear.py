"""Products with 8-bit weights in C++ (csrc: skimkv_linear_run)."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, c_char_p, c_int, c_int32, c_int64, c_void_p

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


@functools.cache
def _library() -> ctypes.CDLL:
    lib = library.library()
    lib.skimkv_linear_check.argtypes, lib.skimkv_linear_check.restype = [POINTER(CLinear)], c_char_p
    lib.skimkv_linear_run.argtypes = [POINTER(CLinear), c_int, c_void_p]
    return lib


def linear8(x: Tensor, packed: Tensor, out: int, bias: Tensor | None = None) -> Tensor:
    """Compute x W^T + bias (see ops/linear.py); activations become 16-bit integers, with a scale per block of 32.

    This adds an error of at most 2^-16 max |x| of a block to each activation. x is float32, bfloat16 or float16.
    Raises ValueError if shapes, types, strides or devices do not fit.
    """
    check_weights(x, packed, out)
    dtype = library.DTYPES.get(x.dtype)
    if dtype is None or x.device.type != "cpu":
        raise ValueError(f"no CPU kernel for activations of {x.dtype} on {x.device}")
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
