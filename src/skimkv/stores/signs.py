"""Keys in one bit a channel: the signs of rotated keys, RaBitQ's index (Gao and Long 2024, arXiv 2405.12497)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Shape, compute_dtype, map_tensors
from .full import Full
from .memory import empty, ordinary_tensors
from .quantise import rotate_span

INTERVAL = 128  # consecutive tokens that are coded together and share a centre, RaBitQ's cluster


class SignIndexed(Full):
    """A store of every token, with the signs of the rotated keys of every closed group of INTERVAL tokens.

    codes: pieces (B,H,groups,INTERVAL,width) uint8, a bit for each channel · scales: pieces (B,H,groups,INTERVAL) ·
    centres: pieces (B,H,groups,D); both in the type of the cache. Pieces are never moved; growth allocates an eighth
    more. A group is coded when its last token comes, so the newest tokens, fewer than INTERVAL, have no codes.

    With the centre c, the mean key of the group, x = rotate(k - c) and s = sign(x) in {-1, 1}^D, RaBitQ estimates

        q.k ~ q.c + (|x|^2 / |x|_1) rotate(q).s,

    which is its <o_bar, q> / <o_bar, o> times the norm; the quotient of both numbers is kept as the scale.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu", kv: str | None = None
    ) -> None:
        super().__init__(shape, dtype, device, kv=kv)
        self.codes, self.scales, self.centres = list[Tensor](), list[Tensor](), list[Tensor]()

    def _append_to_parts(self, rows: slice, start: int, k: Tensor, v: Tensor) -> None:
        """Code the groups that are closed now, from the keys as the store keeps them."""
        super()._append_to_parts(rows, start, k, v)
        first, last = start // INTERVAL, (start + k.shape[2]) // INTERVAL
        if last == first:
            return
        stored = self._stored("k", rows, first * INTERVAL, last * INTERVAL)
        keys = self.row_format.decode(stored, compute_dtype(self.dtype)).detach().unflatten(2, (-1, INTERVAL))
        centres = keys.mean(3).to(self.dtype)  # (b,H,groups,D)
        x = rotate(keys - centres.to(keys.dtype)[:, :, :, None])
        scales = (x.square().sum(-1) / x.abs().sum(-1).clamp(min=torch.finfo(x.dtype).tiny)).to(self.dtype)
        new = pack_signs(x), scales, centres
        self._reserve_groups(last)
        for pieces, made in zip((self.codes, self.scales, self.centres), new, strict=True):
            at = 0
            for piece in pieces:
                a, b = max(first, at), min(last, at + piece.shape[2])
                if a < b:
                    piece[rows, :, a - at : b - at] = made[:, :, a - first : b - first]
                at += piece.shape[2]
        self.count_rows(stored.shape[0] * stored.shape[1] * stored.shape[2])
        for made, size in zip(new, (1, self.dtype.itemsize, self.dtype.itemsize), strict=True):
            self.count(made.numel(), size)

    def _reserve_groups(self, groups: int) -> None:
        """Make room for the codes of so many groups."""
        have = sum(piece.shape[2] for piece in self.centres)
        if groups > have:
            (B, H, _, D), more = self.shape, max(groups - have, have // 8)
            self.codes.append(empty((B, H, more, INTERVAL, width(D)), torch.uint8, self.device))
            self.scales.append(empty((B, H, more, INTERVAL), self.dtype, self.device))
            self.centres.append(empty((B, H, more, D), self.dtype, self.device))

    def coded(self) -> Tensor:
        """Which positions, up to the longest row, have codes that a step reads, the current one not: (B,1,N) bool."""
        counts = torch.tensor([coded_tokens(n - 1) for n in self.lengths], device=self.device)
        return torch.arange(max(self.lengths), device=self.device) < counts[:, None, None]

    def read_signs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Read the codes of all closed groups, n tokens in the longest row: signs of -1 and 1 (B,H,n,D), scales (B,H,n)
        and centres (B,H,n/INTERVAL,D). Beyond a row's groups stands anything."""
        (B, H, _, D), groups = self.shape, max(self.lengths) // INTERVAL
        if groups == 0:
            zeros = torch.zeros(B, H, 0, D, dtype=compute_dtype(self.dtype), device=self.device)
            return zeros, zeros[..., 0], zeros
        codes, scales, centres = (torch.cat(p, 2)[:, :, :groups] for p in (self.codes, self.scales, self.centres))
        for n in self.lengths:
            tokens, size = coded_tokens(n - 1) * H, self.dtype.itemsize
            for amount in ((tokens * width(D), 1), (tokens, size), (n // INTERVAL * H * D, size)):
                self.count(*amount)
        scales, centres = (t.to(compute_dtype(self.dtype)) for t in (scales, centres))
        return unpack_signs(codes, D).to(scales.dtype).flatten(2, 3), scales.flatten(2), centres

    def share(self, rows: Sequence[int]) -> SignIndexed:
        """A store of these rows, as of `Full.share`; the codes are copied."""
        twin = super().share(rows)
        assert isinstance(twin, SignIndexed)
        with ordinary_tensors():
            for name in ("codes", "scales", "centres"):
                setattr(twin, name, map_tensors(getattr(self, name), lambda t: t[list(rows)]))
        return twin

    @property
    def nbytes(self) -> int:
        """Live bytes: those of Full, and the codes, scales and centres of closed groups."""
        (_, H, _, D), dtype = self.shape, self.dtype
        return super().nbytes + H * sum(index_nbytes(n, D, dtype) for n in self.lengths)


def width(D: int) -> int:
    """The bytes of D bits."""
    return -(-D // 8)


def coded_tokens(n: int) -> int:
    """How many of n cached tokens besides the current one a step reads as codes."""
    return min(n, (n + 1) // INTERVAL * INTERVAL)


def index_nbytes(n: int, D: int, dtype: torch.dtype) -> int:
    """The live bytes of the index of n tokens, per KV head and row."""
    groups = n // INTERVAL
    return groups * (INTERVAL * (width(D) + dtype.itemsize) + D * dtype.itemsize)


def rotate(x: Tensor) -> Tensor:
    """Rotate vectors by a random matrix that is the same for all: x (...,D) -> (...,D).

    It is a Hadamard matrix after random flips of the channels, which needs no memory and D log D operations.
    """
    return rotate_span(x * flips(x.shape[-1]).to(x))


@functools.cache
def flips(D: int) -> Tensor:
    """D random signs, always the same: (D,) float32."""
    with ordinary_tensors():
        return torch.randint(0, 2, (D,), generator=torch.Generator().manual_seed(0)) * 2.0 - 1


def pack_signs(x: Tensor) -> Tensor:
    """A bit for each number, 1 if it is above 0, the first in the lowest bit: x (...,D) -> (...,width) uint8."""
    D = x.shape[-1]
    bits = F.pad((x > 0).to(torch.uint8), (0, 8 * width(D) - D)).unflatten(-1, (-1, 8))
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=x.device)
    packed: Tensor = (bits * weights).sum(-1, dtype=torch.uint8)
    return packed


def unpack_signs(codes: Tensor, D: int) -> Tensor:
    """The inverse of `pack_signs`: codes (...,width) -> -1 and 1, (...,D) int8."""
    bits = (codes[..., None] >> torch.arange(8, dtype=torch.uint8, device=codes.device)) & 1
    signs: Tensor = bits.flatten(-2)[..., :D].to(torch.int8) * 2 - 1
    return signs
