"""Root-mean-square normalisation in C++ (csrc: skimkv_rms_norm_run)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p

from torch import Tensor

from . import library
from .linear import Matrix, dtype_number


class CRMSNorm(Structure):
    """The structure skimkv_rms_norm of skimkv.h."""

    _fields_ = library.structure_fields(
        ("w", c_void_p),
        ("size", c_int64),
        ("eps", c_float),
        ("dtype", c_int32),
    )


def norm_matrix(x: Tensor, weight: Tensor, eps: float) -> Matrix:
    """The weights (size,) of a normalisation, which are a diagonal matrix, for x and its like.

    Raises ValueError if a type, a stride or a device has no kernel.
    """
    dtype, size = dtype_number(x), weight.shape[0]
    if not weight.is_contiguous():
        raise ValueError("weights must be contiguous")
    return Matrix(CRMSNorm(weight.data_ptr(), size, eps, dtype), _run(), size, size, (weight,))


@functools.cache
def _run() -> Callable[..., bytes | None]:
    run = library.library().skimkv_rms_norm_run
    run.argtypes, run.restype = [c_void_p, c_void_p, c_void_p, c_int64, c_int, c_void_p], c_char_p
    return run
