"""RaBitQ (Gao and Long, SIGMOD 2024, arXiv 2405.12497) as an index of keys: the best rows by one bit a channel.

RaBitQ quantises vectors for nearest neighbours; RaBitQCache (ICML 2026, arXiv 2606.31519) reads a cache by it.
Equations are numbered here and not as in the papers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops import SoftmaxOptions, Token
from ..ops.blocks import apply_softcap, attend_rows, softmax_with_sinks
from ..stores.base import Shape, compute_dtype
from ..stores.signs import INTERVAL, SignIndexed, coded_tokens, index_nbytes, rotate, width
from .base import Method, Traffic, check_whole
from .skim import compact


@dataclass(frozen=True, repr=False)
class RaBitQ(Method[SignIndexed]):
    """Read the signs of rotated keys, and the k rows that look best by them. Reads ND bits and 2(k + o)D + 2D elements.

    o: the tokens since the last group of 128 was closed, which have no codes yet and are read too, as in RaBitQCache's
    code; o averages 64. k: the rows besides these. A centre is the mean key of a group of 128 consecutive tokens, where
    RaBitQ has the centre of a cluster and RaBitQCache the mean key of the prompt, and the mean query for queries, which
    have no centre here. The rotation is a Hadamard matrix after random flips. RaBitQCache reads as many rows as hold a
    share of the estimated weights; here their number is given. Of the norm and <o_bar, o> only the quotient is kept,
    which is all that the estimate needs.
    """

    k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("k", self.k, 1)

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> SignIndexed:
        """An empty store of every token, with the signs of the keys."""
        return SignIndexed(shape, dtype, device, self.kv)

    def step(self, store: SignIndexed, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Estimate the scores of all coded tokens, and attend to the best of them and to those without a code.

        Gradients take the choice as given.
        """
        if token is not None:
            store.append_token(*token)
        x, sinks = q.to(compute_dtype(store.dtype)), softmax.get("sinks")
        # (1) q.k ~ q.c + |k - c| <o_bar, q> / <o_bar, o>, where o_bar = sign(P(k - c)) / sqrt D (theorem 3.2)
        signs, scales, centres = store.read_signs()  # (B,H,n,D), (B,H,n), (B,H,n/INTERVAL,D)
        of_centres = (x @ centres.transpose(-1, -2)).repeat_interleave(INTERVAL, -1)
        estimate = of_centres + rotate(x) @ signs.transpose(-1, -2) * scales[:, :, None]  # (B,H,G,n)
        # (2) the k tokens with the largest estimated weights, summed over the group
        coded, n = store.coded(), estimate.shape[-1]
        logits = apply_softcap(estimate * softmax["scale"], softmax.get("softcap"))
        logits = logits.masked_fill(~coded[:, :, None, :n], -torch.inf)
        score = softmax_with_sinks(logits, sinks).detach().sum(2).masked_fill(~coded[..., :n], -1)
        best = score.topk(min(self.k, n), -1).indices
        chosen = torch.zeros(*x.shape[:2], coded.shape[-1], dtype=torch.bool, device=x.device)
        chosen = chosen.scatter(-1, best, True) & coded
        # (3) attention to them and to the tokens without a code
        rows, valid = compact(chosen | (store.valid() & ~coded))
        y, _ = attend_rows(x, store.read_keys(rows, valid), store.read_values(rows, valid), valid, **softmax)
        return y.masked_fill(logits.isnan().any(-1, keepdim=True), torch.nan).to(q.dtype)

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype) -> Traffic:
        """Count the index, the rows that are read, and what an append writes, as this code moves them.

        Every INTERVAL tokens a group's keys are read and its codes are written. `paper` is n D + 2 k D + 2D.
        """
        D, coded, size = shape.D, coded_tokens(n), dtype.itemsize
        groups, rows = (n + 1) // INTERVAL, 2 * (n - coded + min(self.k, coded))
        parts = [(coded * width(D), 1), (coded, size), (groups * D, size)]
        if (n + 1) % INTERVAL == 0:
            rows += INTERVAL
            parts += [(INTERVAL * width(D), 1), (INTERVAL + D, size)]
        paper = n * D + 2 * self.k * D + 2 * D
        return Traffic.of(shape.B * shape.H, paper, *self.row_format(D).traffic(rows + 2, dtype), *parts)

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        """The bytes of K and V, and of the index."""
        rows = self.row_format(shape.D).nbytes(2 * n, dtype)
        return shape.B * shape.H * (rows + index_nbytes(n, shape.D, dtype))
