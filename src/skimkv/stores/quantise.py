"""Quantised numbers, in two forms: channels of K for SparQ's index, and whole rows of K and V.

An index of channels shares a scale per channel and group of GROUP tokens, because keys have outlier channels. A row of
K or V shares its ends per token and SPAN channels, as in FlexGen (Sheng et al. 2023), with which H2O section 5 combines
its cache. In 4 bits a row is rotated first, as in QuaRot (Ashkboos et al. 2024, arXiv 2404.00456), so that a channel
that is much larger than the others does not take the few codes of all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BITS = {"int8": 8, "int4": 4}
GROUP = 256  # tokens that share a scale in a quantised index; sizes of chunks are multiples of it
BLOCK = 128  # tokens in 64 packed int4 bytes: token j is nibble j//16 of little-endian dword j%16
SPAN = 64  # channels of a quantised row that share their ends


def round_up(n: int, multiple: int = GROUP) -> int:
    """The least multiple that is not below n."""
    return -(-n // multiple) * multiple


def quantise_channels(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantise each channel by groups of tokens, x ~ scale * code + zero.

    x (...,R,n), n a multiple of GROUP -> codes (...,R,n*bits/8) uint8 and scale (...,n/GROUP,2,R) float32, which
    holds the scale and the zero.
    """
    groups = x.float().unflatten(-1, (-1, GROUP))  # (...,R,n/GROUP,GROUP)
    low, high = groups.aminmax(dim=-1)
    step = (high - low) / torch.full_like(high, 2**bits - 1)  # a GPU multiplies by the inverse of a Python number
    codes = encode_channels(groups, step[..., None], low[..., None], bits).flatten(-2)
    return (pack_int4(codes) if bits == 4 else codes), torch.stack([step, low], -2).transpose(-1, -3)


def encode_channels(x: Tensor, step: Tensor, low: Tensor, bits: int) -> Tensor:
    """Code numbers, x ~ step * code + low, all of one shape or broadcast -> uint8 codes below 2^bits.

    A number outside the range gets the code at that end.
    """
    codes = ((x - low) / torch.where(step == 0, 1, step)).round_().clamp_(0, 2**bits - 1)
    return codes.nan_to_num_(0).to(torch.uint8)


def dequantise_channels(codes: Tensor, scale: Tensor, bits: int) -> Tensor:
    """The inverse of `quantise_channels` up to rounding: (...,R,n) float32."""
    groups = (unpack_int4(codes) if bits == 4 else codes).float().unflatten(-1, (-1, GROUP))
    step, zero = scale.transpose(-1, -3).unbind(-2)  # (...,R,n/GROUP) each
    values: Tensor = groups * step[..., None] + zero[..., None]
    return values.flatten(-2)


def pack_int4(codes: Tensor) -> Tensor:
    """Two codes a byte, in blocks of BLOCK tokens: codes (...,n) uint8 below 16 -> (...,n/2)."""
    nibbles = codes.unflatten(-1, (-1, 4, 2, 16))  # token 16*(2*byte + half) + dword
    packed: Tensor = nibbles[..., 0, :] | nibbles[..., 1, :] << 4  # (..., block, byte, dword)
    return packed.transpose(-1, -2).flatten(-3)


def unpack_int4(packed: Tensor) -> Tensor:
    """The inverse of `pack_int4`."""
    dwords = packed.unflatten(-1, (-1, 16, 4)).transpose(-1, -2)  # (..., block, byte, dword)
    return torch.stack([dwords & 15, dwords >> 4], -2).flatten(-4)


def put_codes(packed: Tensor, start: int, codes: Tensor, bits: int) -> None:
    """Write the codes (...,m) of tokens start .. start+m-1 into an index (...,n*bits/8), and nothing else."""
    token = torch.arange(start, start + codes.shape[-1], device=codes.device)
    if bits == 8:
        packed[..., token] = codes
        return
    dword, nibble = token % 16, token % BLOCK // 16
    place = token // BLOCK * (BLOCK // 2) + 4 * dword + nibble // 2
    for half, keep in ((0, 0xF0), (1, 0x0F)):
        here = nibble % 2 == half
        at = place[here]
        packed[..., at] = packed[..., at] & keep | codes[..., here] << 4 * half


def rotate_span(x: Tensor) -> Tensor:
    """Multiply by an orthonormal Hadamard matrix, which is its own inverse: x (...,n) -> (...,n), n at most SPAN.

    The matrix is Sylvester's, divided by its root; its size is n or, if n is no power of two, the largest one that
    divides n, and each block of this size is rotated by itself. Lengths and products do not change: q.k is that
    of the rotated q and k. A channel that is much larger than the others is shared out among all of its block.
    """
    size = x.shape[-1] & -x.shape[-1]
    blocks = x.unflatten(-1, (-1, size))
    for _ in range(size.bit_length() - 1):
        a, b = blocks.chunk(2, -1)
        blocks = torch.stack([a + b, a - b], -1).flatten(-2)
    rotated: Tensor = blocks * (1 / math.sqrt(size))
    return rotated.flatten(-2)


class RowFormat:
    """How a row of D numbers of K or V is stored: as it is (kv=None), or in 8 or 4 bits (kv="int8" or "int4").

    A quantised row is bytes: for every SPAN channels its least and its largest number in float16, `low` and `high`,
    then for every SPAN channels the codes, x ~ low + (high - low) / (2^bits - 1) * code. In 4 bits x is the span after
    `rotate_span`, and the first half of its numbers stands in the low nibbles and the other half in the high ones. The
    error of x is at most half a step, besides the rounding of the ends; numbers that float16 cannot hold make their
    span NaN. Raises ValueError if kv is unknown, or if kv is "int4" and D is odd.
    """

    def __init__(self, D: int, kv: str | None = None) -> None:
        check_kv(kv)
        self.D, self.bits = D, BITS.get(kv or "")
        if self.bits == 4 and D % 2:
            raise ValueError(f"kv = 'int4' needs an even head size; D = {D} is odd")
        self.ends_bytes = 4 * -(-D // SPAN) if self.bits else 0
        self.width = D if self.bits is None else self.ends_bytes + D * self.bits // 8  # stored elements of a row

    def storage_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type that stores rows whose numbers have this type."""
        return torch.uint8 if self.bits else dtype

    def traffic(self, n: int, dtype: torch.dtype) -> list[tuple[int, float]]:
        """What reading n rows moves: pairs of a number of scalars and the bytes of each."""
        return self.traffic_of_channels(n, self.D, dtype)

    def traffic_of_channels(self, n: int, r: int, dtype: torch.dtype) -> list[tuple[int, float]]:
        """What reading r channels of n rows moves; the ends of all of a quantised row's spans come with them.

        A channel of a row in 4 bits is a sum of numbers of its span: such rows are read whole.
        """
        if self.bits is None:
            return [(n * r, dtype.itemsize)]
        return [(n * (self.D if self.bits == 4 else r), self.bits / 8), (n * self.ends_bytes // 2, 2)]

    def nbytes(self, n: int, dtype: torch.dtype) -> int:
        """The bytes that n rows occupy."""
        return n * self.width * self.storage_dtype(dtype).itemsize

    def encode(self, x: Tensor) -> Tensor:
        """Bring rows into the stored form: x (...,D) -> (...,width)."""
        if self.bits is None:
            return x
        levels, ends, codes = 2**self.bits - 1, [], []
        for part in x.float().split(SPAN, -1):
            if self.bits == 4:
                part = rotate_span(part)
            low, high = (end.half() for end in part.aminmax(dim=-1, keepdim=True))
            step = (high.float() - low.float()) / levels
            code = ((part - low.float()) / torch.where(step == 0, 1, step)).round().clamp(0, levels)
            code = code.nan_to_num(0).to(torch.uint8)
            if self.bits == 4:
                first, second = code.chunk(2, -1)
                code = first | second << 4
            ends += [low, high]
            codes.append(code)
        return torch.cat([torch.cat(ends, -1).view(torch.uint8), *codes], -1)

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Bring stored rows back to numbers: (...,width) -> (...,D) of this type.

        The numbers are computed in float32 or, for float64, in float64.
        """
        if self.bits is None:
            return stored.to(dtype)
        to = dtype if dtype == torch.float64 else torch.float32
        # a clone: of a single row, `contiguous` returns the slice itself, whose strides may be odd
        ends = stored[..., : self.ends_bytes].clone(memory_format=torch.contiguous_format)
        ends = ends.view(torch.float16).to(to).unflatten(-1, (-1, 2))
        parts = []
        for i, code in enumerate(stored[..., self.ends_bytes :].split(SPAN * self.bits // 8, -1)):
            low, high = ends[..., i, :1], ends[..., i, 1:]
            x = torch.cat([code & 15, code >> 4], -1) if self.bits == 4 else code
            x = low + x * ((high - low) / (2**self.bits - 1))
            parts.append((rotate_span(x) if self.bits == 4 else x).to(dtype))
        return torch.cat(parts, -1)


def check_kv(kv: str | None) -> None:
    """Raise ValueError unless kv is None or the name of a quantised form."""
    if kv is not None and (not isinstance(kv, str) or kv not in BITS):
        raise ValueError(f"kv = {kv!r} must be None, {' or '.join(map(repr, BITS))}")
