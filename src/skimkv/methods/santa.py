"""SANTA (Lee et al., ICML 2026, arXiv 2605.01910): all keys are read, and values are sampled by the softmax weights.

The mean of values that are drawn with the softmax weights as probabilities is an unbiased estimate of attention's
output, and needs no products with the values. The paper calls stratified and systematic draws S2ANTA. Equations are
numbered here and not as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops import SoftmaxOptions, Token
from ..ops.blocks import apply_softcap, softmax_with_sinks, take
from ..ops.hashing import hash_words
from ..stores.base import Shape, compute_dtype
from ..stores.full import Full
from .base import Method, Traffic, check_whole
from .skim import compact

DRAWS = ("stratified", "systematic", "independent")
STREAM = 2  # of random numbers: Skim has 0 and 1


@dataclass(frozen=True, repr=False)
class SANTA(Method[Full]):
    """Compute exact weights with all keys, and add up the values of s draws by these weights. Reads ND + mD elements.

    s: draws for each query head; m, the number of different rows that they meet in a group, depends on the data. draws:
    how the s numbers between 0 and 1 are drawn at which the running sum of the weights is looked up. "stratified" draws
    one in each of s equal intervals, "systematic" one number that shifts s equally spaced ones, and "independent" s
    numbers. Each is unbiased. A number depends on nothing but its place among the s, the cached tokens and the KV head,
    so the queries of a group share it and meet more of the same rows. Where no more than s tokens are cached, all
    values are read and the result is exact: draws would save nothing. Gradients are those of the weighted values that
    were drawn, an unbiased estimate too. The paper's sampling of the query for fewer channels of K is not in it.
    """

    s: int
    draws: str = "stratified"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("s", self.s, 1)
        if self.draws not in DRAWS:
            raise ValueError(f"draws = {self.draws!r} must be one of {', '.join(DRAWS)}")

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Full:
        """An empty store of every token."""
        return Full(shape, dtype, device, kv=self.kv, varying=True)

    def step(self, store: Full, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Compute all weights, draw rows by them, and average the values of the drawn rows."""
        if token is not None:
            store.append_token(*token)
        x = q.to(compute_dtype(store.dtype))
        # (1) p = softmax(q K^T / sqrt D)
        logits = apply_softcap(x @ store.read_keys().transpose(-1, -2) * softmax["scale"], softmax.get("softcap"))
        logits = logits.masked_fill(~store.valid()[:, :, None], -torch.inf)
        p = softmax_with_sinks(logits, softmax.get("sinks"))  # (B,H,G,N)
        # (2) i_j ~ p for j = 1 .. s, by the running sum of p; c_n = how many of them are n
        lengths = torch.tensor(store.lengths, device=store.device)[:, None]  # (B,1)
        weights = p
        if max(store.lengths) > self.s:
            u = points(lengths, store.shape.H, self.s, self.draws).to(p.dtype)
            share = shares(p.detach(), u, sinks=softmax.get("sinks") is not None)
            # (3) y = 1/s sum_j v_{i_j} = sum_n c_n / s v_n; p / p is 1, and has the gradient of p_n v_n in expectation
            weights = torch.where(share > 0, share * (p / p.detach()), 0)
            weights = torch.where((lengths <= self.s)[..., None, None], p, weights)
        current = torch.arange(p.shape[-1], device=p.device) == lengths[..., None] - 1
        rows, valid = compact((weights.detach() != 0).any(2) | current)
        y = take(weights, rows).masked_fill(~valid[:, :, None], 0) @ store.read_values(rows, valid)
        H = store.shape.H
        store.rows_read = torch.stack([H * (lengths[:, 0] - 1), valid.sum((1, 2)) - H], -1)
        return y.masked_fill(p.isnan().any(-1, keepdim=True), torch.nan).to(q.dtype)

    def traffic(
        self,
        n: int,
        shape: Shape,
        dtype: torch.dtype,
        key_rows: int | None = None,
        value_rows: int | None = None,
    ) -> Traffic:
        """Count n rows of K, the rows of V that were drawn, and the row that is written.

        key_rows: n for each KV head; value_rows: rows of V that the step reads, over all heads and rows of the batch,
        the current token not included. None: the most there can be. `paper` is n D + m D + 2D for a KV head.
        """
        heads = shape.B * shape.H
        key_rows = heads * n if key_rows is None else key_rows
        value_rows = heads * min(n, shape.G * self.s) if value_rows is None else value_rows
        rows = key_rows + value_rows + 2 * heads
        return Traffic.of(1, rows * shape.D, *self.row_format(shape.D).traffic(rows, dtype))

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        """The bytes of K and V."""
        return self.row_format(shape.D).nbytes(shape.B * shape.H * 2 * n, dtype)


def points(lengths: Tensor, H: int, s: int, draws: str) -> Tensor:
    """The s numbers in [0, 1) of each KV head: cached tokens (B,1) -> (B,H,s).

    U is the top 31 bits of `hash_words(STREAM, cached tokens, KV head, place)`. The number of place j is (j + U_j) / s
    if stratified, (j + U_0) / s if systematic, and U_j if independent.
    """
    place, head = torch.arange(s, device=lengths.device), torch.arange(H, device=lengths.device)[:, None]
    word = hash_words(STREAM, lengths[..., None], head, torch.zeros_like(place) if draws == "systematic" else place)
    u = (word >> 1).double() / 2.0**31
    return u if draws == "independent" else (place + u) / s


def shares(p: Tensor, u: Tensor, sinks: bool) -> Tensor:
    """Which share of the draws meets each row: p (B,H,G,N), u (B,H,s) in [0, 1) -> (B,H,G,N).

    u meets the first row at which the running sum of p exceeds it. sinks: p sums to less than 1, and draws beyond its
    sum meet the sink, which has no value; otherwise the sum is 1 up to rounding, which is taken out.
    """
    total = p.cumsum(-1)
    u = u[:, :, None].expand(-1, -1, p.shape[2], -1)
    met = torch.searchsorted(total, (u if sinks else u * total[..., -1:]).contiguous(), right=True)
    if not sinks:  # a number that is 1 in this type meets the row at which the running sum comes to its end
        met = met.minimum(torch.searchsorted(total, total[..., -1:].contiguous()))
    counts = torch.zeros(*p.shape[:-1], p.shape[-1] + 1, dtype=p.dtype, device=p.device)
    counts.scatter_add_(-1, met.clamp(max=p.shape[-1]), torch.ones_like(u))
    return counts[..., :-1] / u.shape[-1]
