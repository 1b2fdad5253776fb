"""RocketKV (Behnam et al., ICML 2025, arXiv 2502.14051): drop much of the prompt once, and choose among the rest anew.

Stage 1 keeps the tokens of the prompt to which its end attends most, as SnapKV does, in far wider clusters. Stage 2,
"hybrid sparse attention", approximates the scores of what is kept along both axes: by the extremes of pages of tokens,
as Quest does, and by the largest channels of the query, as SparQ does. Equations are numbered here and not as in the
paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from ..ops import SoftmaxOptions, Token
from ..ops.blocks import apply_softcap, attend_rows, softmax_with_sinks, take
from ..stores.base import Shape, compute_dtype
from ..stores.pages import PageBounds
from ..stores.slots import Slots
from .base import Traffic, check_whole
from .quest import page_rows
from .slots import needed
from .snapkv import SnapKV
from .sparq import inverse_temperature, top_channels


@dataclass(frozen=True, repr=False)
class RocketKV(SnapKV):
    """Keep k tokens of the prompt and every later one; of these read r channels of one extreme of each page, and `top`
    tokens. Reads (k + g) r / page + 2 top D + 2D elements, g tokens after the prompt.

    k, window, pool: as of SnapKV, but the weight of a token is the largest among its `pool` neighbours (the authors'
    code has a window of 32 and 63 neighbours). top: tokens in the pages that are read, rounded down to pages; one of
    them is always the page of the current token, which in the paper competes with the others. page: consecutive kept
    tokens that share a score. r: channels of the query that are read, the largest ones (None: a quarter of the head
    size). The authors' code derives page and r from a ratio of compression, and here they are given.
    """

    pool: int = 63
    top: int = 64
    page: int = 4
    r: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("top", self.top, 1)
        check_whole("page", self.page, 1)
        check_whole("top", self.top, self.page)
        if self.r is not None:
            check_whole("r", self.r, 1)

    def channels(self, D: int) -> int:
        """How many channels are read of heads of size D."""
        return max(1, D // 4) if self.r is None else self.r

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Slots:
        """An empty store of slots that grows, with the bounds of its pages. Raises ValueError if r exceeds D."""
        check_whole("r", self.channels(shape.D), 1, shape.D)
        return Slots(shape, dtype, device, 0, kv=self.kv, grows=True, page=self.page)

    def pooled(self, weight: Tensor) -> Tensor:
        """Stage 1: the largest weight among `pool` neighbouring positions: (H,m) -> (H,m)."""
        return F.max_pool1d(weight, self.pool, stride=1, padding=self.pool // 2)

    def step(self, store: Slots, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Stage 2: score the pages of kept tokens by r channels, and attend to the best ones and to the open page."""
        store.append_token(*needed(token))
        x, scale, sinks = q.to(compute_dtype(store.dtype)), softmax["scale"], softmax.get("sinks")
        # (1) i_1 = the r channels with the largest sum over the group of |q|
        i1 = top_channels(x, self.channels(store.shape.D))
        q1 = take(x, i1)
        # (2) e_P = the largest key of page P in channels where the group's scaled queries sum to more than 0, or the
        # smallest
        extremes, closed = store.read_page_extremes(i1, (q1 * scale).sum(2) > 0)  # (B,H,r,P), (B,1,P)
        # (3) s_hat = softmax(q[i_1] e_P / tau), tau = sqrt(D |q[i_1]|_1 / |q|_1), summed over the group
        logits = q1 @ extremes * inverse_temperature(x, i1, scale, "coverage")
        logits = apply_softcap(logits, softmax.get("softcap")).masked_fill(~closed[:, :, None], -torch.inf)
        s_hat = softmax_with_sinks(logits, sinks)
        # (4) attention to the tokens of the pages with the largest s_hat
        index, valid = page_rows(s_hat.detach().sum(2), closed, store.filled, self.page, self.top // self.page - 1)
        y, _ = attend_rows(x, *store.read_chosen(index, valid), valid, **softmax)
        is_nan = (s_hat.isnan() & closed[:, :, None]).any(-1, keepdim=True)
        return y.masked_fill(is_nan, torch.nan).to(q.dtype)

    def kernel(self, store: Slots) -> None:
        """There is none: the reference computes on every device."""
        return None

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype, dropped: int | None = None) -> Traffic:
        """Count r elements of every closed page, the rows that are read, and the row and the bounds that are written.

        dropped: as of SnapKV's; rows of a batch are taken to have dropped equally many. `paper` is (k + g) r / page +
        2 top D + 2D for each KV head.
        """
        kept, D, r = self._kept_tokens(n, shape.B, dropped) // shape.B, shape.D, self.channels(shape.D)
        closed, opened = divmod(kept, self.page)
        rows = min(self.top // self.page - 1, closed) * self.page + opened
        bounds = closed * r + 2 * D * (2 if opened else 1)
        paper = closed * r + 2 * self.top * D + 2 * D
        parts = self.row_format(D).traffic(2 * rows + 2, dtype)
        return Traffic.of(shape.B * shape.H, paper, *parts, (bounds, dtype.itemsize))

    def bound(self, n: int, shape: Shape, dtype: torch.dtype, dropped: int | None = None) -> int:
        """The bytes of the rows that are kept of a prompt of n tokens, and of the bounds of their pages; with `dropped`
        as of `traffic`."""
        kept = -(-self._kept_tokens(n, shape.B, dropped) // shape.B)
        pages = PageBounds.nbytes(kept, self.page, shape.D, dtype)
        return super().bound(n, shape, dtype, dropped) + shape.B * shape.H * pages
