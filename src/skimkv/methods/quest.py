"""Quest (Tang et al., ICML 2024, arXiv 2406.10774, section 3): the pages whose keys may match the query best.

A page of tokens is described by the smallest and the largest value of each channel of its keys. From them follows an
upper bound of the score that any of its keys can have, and the pages with the largest bounds are read whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops import KernelStep, SoftmaxOptions, Token, kernel_step
from ..ops.blocks import apply_softcap, attend_rows, softmax_with_sinks
from ..stores.base import Shape, compute_dtype
from ..stores.full import Full
from ..stores.pages import PageBounds
from .base import Method, Traffic, check_whole


@dataclass(frozen=True, repr=False)
class Quest(Method[Full]):
    """Read the bounds of all pages, and the tokens of the best ones. Reads 2ND/page + 2kD + 2D elements.

    page: tokens in a page (the paper: 16). k: tokens in the pages that are read, rounded down to k // page pages. One
    of them is always the page that the current token is in, as in the authors' code, so that at most k - 1 tokens are
    fetched. A page's bound is the sum over channels of max(q low, q high). For grouped queries, the bounds' softmax
    weights are added up over the group, and its KV head reads the same pages; the paper has one query for each KV head,
    where this is the order of the bounds. The paper leaves the model's first two layers dense, and here all layers are
    decoded alike.
    """

    page: int
    k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("page", self.page, 1)
        check_whole("k", self.k, 1)
        check_whole("k", self.k, self.page)

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Full:
        """An empty store of every token, with the bounds of its pages."""
        return Full(shape, dtype, device, kv=self.kv, page=self.page)

    def step(self, store: Full, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Bound the scores of all pages, choose the best of them, and attend to their tokens and the open page's."""
        if token is not None:
            store.append_token(*token)
        x = q.to(compute_dtype(store.dtype))
        # section 3.3, stage 1: an upper bound of the logits of every page, by the sign of each channel of the query
        low, high, closed = store.read_page_bounds()
        scaled = x * softmax["scale"]
        bound = scaled.clamp(min=0) @ high.transpose(-1, -2) + scaled.clamp(max=0) @ low.transpose(-1, -2)  # (B,H,G,P)
        logits = apply_softcap(bound, softmax.get("softcap"))
        weights = softmax_with_sinks(logits.masked_fill(~closed[:, :, None], -torch.inf), softmax.get("sinks"))
        # stage 2: attention to the tokens of the chosen pages
        index, valid = page_rows(weights.sum(2), closed, store.lengths, self.page, self.k // self.page - 1)
        y, _ = attend_rows(x, store.read_keys(index, valid), store.read_values(index, valid), valid, **softmax)
        is_nan = (weights.isnan() & closed[:, :, None]).any(-1, keepdim=True)
        return y.masked_fill(is_nan, torch.nan).to(q.dtype)

    def kernel(self, store: Full) -> KernelStep:
        """The kernel of the same step."""
        return kernel_step("quest", k=self.k // self.page - 1)

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype) -> Traffic:
        """Count 2D elements of every closed page, the rows of the pages that are read, and the bounds that an append
        writes, and reads where the page was open."""
        D = shape.D
        rows = min(self.k // self.page - 1, n // self.page) * self.page + n % self.page
        bounds = PageBounds.traffic(n, self.page, D, dtype)
        paper = 2 * D * n // self.page + 2 * self.k * D + 2 * D
        return Traffic.of(shape.B * shape.H, paper, *self.row_format(D).traffic(2 * rows + 2, dtype), *bounds)

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        """The bytes of K and V, and of the bounds of all pages."""
        rows = self.row_format(shape.D).nbytes(2 * n, dtype)
        return shape.B * shape.H * (rows + PageBounds.nbytes(n, self.page, shape.D, dtype))


def page_rows(score: Tensor, closed: Tensor, lengths: list[int], page: int, best: int) -> tuple[Tensor, Tensor]:
    """The tokens of the open page, the current one among them, and of the `best` other pages with the largest scores.

    score (B,H,P), closed (B,1,P) -> index (B,H,m) and valid (B,H,m), which is False beyond a row's tokens.
    """
    n = torch.tensor(lengths, device=score.device)[:, None, None]
    pages = score.masked_fill(~closed, -torch.inf).topk(min(best, score.shape[-1]), -1).indices
    is_page = closed.expand_as(score).gather(-1, pages)
    opened = ((n - 1) // page).expand(*score.shape[:2], 1)
    pages, is_page = torch.cat([pages, opened], -1), torch.cat([is_page, torch.ones_like(opened).bool()], -1)
    index = (pages[..., None] * page + torch.arange(page, device=score.device)).flatten(2)
    valid = is_page.repeat_interleave(page, -1) & (index < n)
    return index.clamp(max=max(lengths) - 1), valid
