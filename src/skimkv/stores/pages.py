"""The smallest and the largest key of every page of tokens, channel by channel: Quest's index of K."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Part, Shape
from .memory import empty


class PageBounds(Part):
    """Bounds of the keys of pages: page p has the tokens p * page .. (p + 1) * page - 1 of a row.

    bounds: pieces (B,H,pages of the piece,2,D) in the type of the cache, the smallest keys and then the largest. Pieces
    are never moved; growth allocates an eighth more. The last page of a row may be open; its bounds are those so far.
    """

    def __init__(self, page: int, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.page = page
        self.bounds = [torch.empty(shape.B, shape.H, 0, 2, shape.D, dtype=dtype, device=device)]

    def append(self, rows: slice, start: int, k: Tensor) -> int:
        """Take keys k (b,H,n,D), at positions start .. start+n-1 of these rows.

        Returns how many numbers were read and written: an open page's bounds are read, and all that change are written.
        """
        n = k.shape[2]
        if not n:
            return 0
        first, before, end = start // self.page, start % self.page, start + n
        last = -(-end // self.page)
        self.reserve(last)
        around = (0, 0, before, last * self.page - end)
        low, high = (F.pad(k, around, value=fill).unflatten(2, (-1, self.page)) for fill in (torch.inf, -torch.inf))
        new = torch.stack([low.amin(3), high.amax(3)], 3)  # (b,H,pages,2,D)
        read = 0
        for piece, there, here in self._spans(first, last):
            if here.start == 0 and before:
                was = piece[rows, :, there.start]
                new[:, :, 0, 0] = torch.minimum(new[:, :, 0, 0], was[:, :, 0])
                new[:, :, 0, 1] = torch.maximum(new[:, :, 0, 1], was[:, :, 1])
                read = was.numel()
            piece[rows, :, there] = new[:, :, here]
        return new.numel() + read

    def reserve(self, pages: int) -> None:
        """Make room for this number of pages."""
        have = sum(piece.shape[2] for piece in self.bounds)
        if pages > have:
            B, H, _, _, D = (like := self.bounds[0]).shape
            self.bounds.append(empty((B, H, max(pages - have, have // 8), 2, D), like.dtype, like.device))

    def _spans(self, first: int, last: int) -> Iterator[tuple[Tensor, slice, slice]]:
        """The pieces that hold pages first .. last-1: (piece, pages in it, pages counted from first)."""
        start = 0
        for piece in self.bounds:
            stop = start + piece.shape[2]
            a, b = max(first, start), min(last, stop)
            if a < b:
                yield piece, slice(a - start, b - start), slice(a - first, b - first)
            start = stop

    def first(self, pages: int) -> Tensor:
        """The bounds of the first pages: (B,H,2,pages,D)."""
        parts = [self.bounds[0], *(piece[:, :, there] for piece, there, _ in self._spans(0, pages))]
        return torch.cat(parts, 2).transpose(2, 3)

    def reopen(self, row: slice, n: int, k: Tensor) -> None:
        """Forget all but the first n tokens of a row, of which the open page has the keys k (1,H,n % page,D)."""
        if k.shape[2]:
            for piece, there, _ in self._spans(n // self.page, n // self.page + 1):
                piece[row, :, there] = torch.stack([k.amin(2), k.amax(2)], 2)[:, :, None]

    @staticmethod
    def traffic(n: int, page: int, D: int, dtype: torch.dtype) -> list[tuple[int, float]]:
        """What a step moves with n cached tokens besides the current one, per KV head and row: pairs of a number of
        scalars and the bytes of each.

        It reads the bounds of the pages before the current token's; the append writes its page's, and reads these too
        where the page was open.
        """
        return [(2 * D * (n // page + (2 if n % page else 1)), dtype.itemsize)]

    @staticmethod
    def nbytes(n: int, page: int, D: int, dtype: torch.dtype) -> int:
        """The bytes of the bounds of n tokens, per KV head and row."""
        return -(-n // page) * 2 * D * dtype.itemsize
