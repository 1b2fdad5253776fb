"""Quantised codes: how rows of numbers become 8 or 4 bits with a scale and a zero, and back."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 256  # tokens that share a scale in a quantised index; chunk sizes are multiples of it
BLOCK = 128  # tokens in 64 packed int4 bytes: token j is nibble j//16 of little-endian dword j%16
BITS = {"int8": 8, "int4": 4}


def roundup(n: int, to: int = GROUP) -> int:
    return -(-n // to) * to


def quantise(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Affine codes per channel and group: x (...,R,n) with n a multiple of GROUP.

    Returns codes (...,R,n*bits/8) uint8 and scale (...,n/GROUP,2,R) float32, x ~ scale*code + zero.
    """
    groups = x.float().unflatten(-1, (-1, GROUP))  # (...,R,n/GROUP,GROUP)
    low, high = groups.aminmax(dim=-1)
    scale = (high - low) / (2**bits - 1)
    step = torch.where(scale == 0, 1, scale)
    codes = ((groups - low[..., None]) / step[..., None]).round_().nan_to_num_(0).to(torch.uint8).flatten(-2)
    return (pack4(codes) if bits == 4 else codes), torch.stack([scale, low], -2).transpose(-1, -3)


def pack4(codes: Tensor) -> Tensor:
    nibbles = codes.unflatten(-1, (-1, 4, 2, 16))  # token 16*(2*byte + half) + dword
    packed: Tensor = nibbles[..., 0, :] | nibbles[..., 1, :] << 4  # (..., block, byte, dword)
    return packed.transpose(-1, -2).flatten(-3)


def unpack4(packed: Tensor) -> Tensor:
    dwords = packed.unflatten(-1, (-1, 16, 4)).transpose(-1, -2)  # (..., block, byte, dword)
    return torch.stack([dwords & 15, dwords >> 4], -2).flatten(-4)


def dequantise(codes: Tensor, scale: Tensor, bits: int) -> Tensor:
    """The inverse of `quantise` up to rounding: (...,R,n) float32."""
    groups = (unpack4(codes) if bits == 4 else codes).float().unflatten(-1, (-1, GROUP))
    step, zero = scale.transpose(-1, -3).unbind(-2)  # (...,R,n/GROUP) each
    values: Tensor = groups * step[..., None] + zero[..., None]
    return values.flatten(-2)
