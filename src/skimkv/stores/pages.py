"""The smallest and the largest key of every page of tokens, channel by channel: Quest's index of K."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Part, Shape


class PageBounds(Part):
    """Bounds of the keys of pages: page p has the tokens p * page .. (p + 1) * page - 1 of a row.

    low, high (B,H,P,D) in the type of the cache. The last page of a row may be open; its bounds are those so far.
    """

    def __init__(self, page: int, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.page = page
        self.low = self.high = torch.empty(shape.B, shape.H, 0, shape.D, dtype=dtype, device=device)

    def append(self, rows: slice, start: int, k: Tensor) -> int:
        """Take keys k (b,H,n,D), at positions start .. start+n-1 of these rows.

        Returns how many numbers were read and written: an open page's bounds are read, and all that change are written.
        """
        n = k.shape[2]
        if not n:
            return 0
        first, before, end = start // self.page, start % self.page, start + n
        last = -(-end // self.page)
        self._make_room(last)
        around = (0, 0, before, last * self.page - end)
        low, high = (F.pad(k, around, value=fill).unflatten(2, (-1, self.page)) for fill in (torch.inf, -torch.inf))
        low, high = low.amin(3), high.amax(3)
        if before:
            low[:, :, 0] = torch.minimum(low[:, :, 0], self.low[rows, :, first])
            high[:, :, 0] = torch.maximum(high[:, :, 0], self.high[rows, :, first])
        self.low[rows, :, first:last], self.high[rows, :, first:last] = low, high
        read = 2 * low[:, :, 0].numel() if before else 0
        return 2 * low.numel() + read

    def _make_room(self, pages: int) -> None:
        """Allocate bounds for so many pages, an eighth more than there were at least."""
        have = self.low.shape[2]
        if pages > have:
            more = (0, 0, 0, max(pages - have, have // 8, 1))
            self.low, self.high = F.pad(self.low, more), F.pad(self.high, more)

    def reopen(self, row: slice, n: int, k: Tensor) -> None:
        """Forget all but the first n tokens of a row, of which the open page has the keys k (1,H,n % page,D)."""
        if k.shape[2]:
            page = n // self.page
            self.low[row, :, page], self.high[row, :, page] = k.amin(2), k.amax(2)

    def nbytes(self, lengths: Sequence[int]) -> int:
        """The bytes of the bounds of rows with so many tokens."""
        _, H, _, D = self.low.shape
        pages: int = sum(-(-n // self.page) for n in lengths)
        size: int = self.low.element_size()
        return pages * H * 2 * D * size
