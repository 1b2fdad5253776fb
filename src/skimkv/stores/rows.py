"""Rows of K and V as a store holds them: as they are, or as 8- or 4-bit codes, the quantised cache of H2O section 5."""

from __future__ import annotations

import torch
from torch import Tensor

from .codes import BITS

SPAN = 64  # channels of a coded row that share their ends


class Rows:
    """How a row of D numbers is held. kv: None (in the cache's type), "int8" or "int4".

    A coded row is bytes: for every SPAN channels its least and largest number in float16, `low` and `high`, then for
    every SPAN channels the codes, x ~ low + (high - low) / (2^bits - 1) * code; of int4 the first half of the channels
    in the low, the other half in the high nibbles. Groups along D of 64 and a minimum are FlexGen's (Sheng et al.
    2023), with which H2O was combined. The error is at most half a step, besides the rounding of the ends; what
    float16 cannot hold makes its channels NaN.
    Raises ValueError if kv is unknown, or "int4" and D is odd.
    """

    def __init__(self, D: int, kv: str | None = None) -> None:
        check(kv)
        self.D, self.bits = D, BITS.get(kv or "")
        if self.bits == 4 and D % 2:
            raise ValueError(f"kv = 'int4' needs an even head size, D = {D} is odd")
        self.ends = 4 * -(-D // SPAN) if self.bits else 0  # bytes
        self.width = D if self.bits is None else self.ends + D * self.bits // 8  # of what holds a row

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of what holds rows of numbers of this type."""
        return torch.uint8 if self.bits else dtype

    def parts(self, n: int, dtype: torch.dtype) -> list[tuple[int, float]]:
        """Of n rows: scalars, and bytes of each."""
        if self.bits is None:
            return [(n * self.D, dtype.itemsize)]
        return [(n * self.D, self.bits / 8), (n * self.ends // 2, 2)]

    def nbytes(self, n: int, dtype: torch.dtype) -> int:
        """Of n rows."""
        return n * self.width * self.dtype(dtype).itemsize

    def encode(self, x: Tensor) -> Tensor:
        """x (...,D) -> (...,width)."""
        if self.bits is None:
            return x
        levels, ends, codes = 2**self.bits - 1, [], []
        for part in x.float().split(SPAN, -1):
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

    def decode(self, held: Tensor, dtype: torch.dtype) -> Tensor:
        """held (...,width) -> (...,D) of this type, computed in float32 or, for float64, in it."""
        if self.bits is None:
            return held.to(dtype)
        to = dtype if dtype == torch.float64 else torch.float32
        ends = held[..., : self.ends].contiguous().view(torch.float16).to(to).unflatten(-1, (-1, 2))
        parts = []
        for i, code in enumerate(held[..., self.ends :].split(SPAN * self.bits // 8, -1)):
            low, high = ends[..., i, :1], ends[..., i, 1:]
            x = torch.cat([code & 15, code >> 4], -1) if self.bits == 4 else code
            parts.append((low + x * ((high - low) / (2**self.bits - 1))).to(dtype))
        return torch.cat(parts, -1)


def check(kv: str | None) -> None:
    """ValueError unless kv is None or a known width."""
    if kv is not None and (not isinstance(kv, str) or kv not in BITS):
        raise ValueError(f"kv = {kv!r} must be None, {' or '.join(map(repr, BITS))}")
