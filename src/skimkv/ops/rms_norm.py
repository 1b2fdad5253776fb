"""Root-mean-square normalisation, as Llama has it before every layer: w * x / sqrt(mean(x^2) + eps)."""

from __future__ import annotations

import torch
from torch import Tensor

from .cpu import rms_norm as cpu
from .cpu.linear import Matrix
from .linear import is_native

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def norm_matrix(x: Tensor, weight: Tensor, bias: None = None, *, eps: float, adds_one: bool = False) -> Matrix | None:
    """The weights of `rms_norm` as its kernel needs them for x and its like; None where PyTorch computes.

    Raises ValueError if shapes or devices do not fit.
    """
    if weight.ndim != 1 or x.shape[-1:] != weight.shape or x.device != weight.device:
        raise ValueError(
            f"x is {tuple(x.shape)} on {x.device}; must be (...,{weight.shape[0]}) on {weight.device}, as the weights"
        )
    if x.dtype != weight.dtype or x.dtype not in TYPES or not weight.is_contiguous():
        return None
    return cpu.norm_matrix(x, weight, eps, adds_one) if is_native(x) else None


def rms_norm(x: Tensor, weight: Tensor, bias: None = None, *, eps: float, adds_one: bool = False) -> Tensor:
    """Compute w * x / sqrt(mean(x^2) + eps): x (...,size) · weight (size,) -> (...,size).

    The mean and the quotient are of float32; the quotient is rounded to x's type before the product. adds_one: the
    factor is 1 + w, in float32, and the product alone is rounded to x's type, as Gemma has it. In C++ where the backend
    is cpu and both have one type. Raises ValueError if shapes or devices do not fit.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, equation 4; eps as Llama adds it.
    """
    matrix = norm_matrix(x, weight, eps=eps, adds_one=adds_one)
    if matrix is not None:
        return matrix.multiply(x)
    values = x.float()
    quotient = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    return (quotient * (1 + weight.float())).to(x.dtype) if adds_one else weight * quotient.to(x.dtype)
