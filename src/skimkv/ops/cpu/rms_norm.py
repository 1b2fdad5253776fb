"""Root-mean-square normalisation in C++ (csrc: skimkv_rms_norm_run)."""

from __future__ import annotations

from torch import Tensor

from . import library
from .linear import Matrix, dtype_number
from .structs import CRMSNorm


def norm_matrix(x: Tensor, weight: Tensor, eps: float, adds_one: bool = False) -> Matrix:
    """The weights (size,) of a normalisation, which are a diagonal matrix, for x and its like.

    Raises ValueError if a type, a stride or a device has no kernel.
    """
    dtype, size = dtype_number(x), weight.shape[0]
    if not weight.is_contiguous() or weight.dtype != x.dtype or not weight.is_cpu:
        raise ValueError(f"weights are {weight.dtype} on {weight.device}; must be contiguous {x.dtype} on cpu")
    weight = weight.detach()  # see Matrix
    op = CRMSNorm(weight.data_ptr(), size, eps, dtype, adds_one)
    return Matrix(op, library.library().skimkv_rms_norm_run, size, size, (weight,))
