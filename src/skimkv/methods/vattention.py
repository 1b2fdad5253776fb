"""vAttention (Desai et al., ICLR 2026, arXiv 2510.05688): the best rows, and random ones until the error is bounded.

Some rows are read for certain: the first, the most recent and the best. Of the rest a uniform sample is drawn. Its size
follows from the variance among a first few of its rows, so that by the central limit theorem the relative error stays
under epsilon with a probability of 1 - delta. Equations are numbered here and not as in the paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops import SoftmaxOptions, Token
from ..ops.blocks import apply_softcap, softmax_with_sinks
from ..ops.hashing import hash_words
from ..stores.base import Shape, compute_dtype
from ..stores.channel_index import IndexFormat
from ..stores.full import Full
from .base import Method, Traffic, check_positive, check_whole
from .skim import compact, estimated_logits
from .sparq import approximate_scores

VERIFIED = ("denominator", "output")
STREAM = 3  # of random numbers: Skim has 0 and 1, SANTA 2


@dataclass(frozen=True, repr=False)
class VAttention(Method[Full]):
    """Read sinks + local + k rows for certain, and b random ones of the others, b by a bound of the relative error.

    epsilon, delta: the relative error, and the probability with which it may be larger. verified: the error of what.
    "denominator" is the sum of exponentials; "output" is the output vector, which takes more rows. k: the best rows,
    by Skim's index in 4 bits, of which r channels are read (None: a quarter of the head size); the paper takes any
    approximate top-k. base: random rows from which the variance is estimated, at least 2; they belong to the sample. A
    KV head draws as many rows as that query of its group needs which needs most.

    The bound holds as far as the central limit theorem does and the base sample's variance is that of all rows; it is
    no proof for a single step. The sample is one without replacement: at b = all rows the result is exact.
    """

    epsilon: float = 0.1
    delta: float = 0.1
    k: int = 64
    base: int = 64
    sinks: int = 4
    local: int = 16
    r: int | None = None
    verified: str = "denominator"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("epsilon", self.epsilon, math.inf)
        check_positive("delta", self.delta, 1)
        check_whole("k", self.k, 1)
        check_whole("base", self.base, 2)
        check_whole("sinks", self.sinks, 0)
        check_whole("local", self.local, 0)
        if self.r is not None:
            check_whole("r", self.r, 1)
        if self.verified not in VERIFIED:
            raise ValueError(f"verified = {self.verified!r} must be one of {', '.join(VERIFIED)}")

    def channels(self, D: int) -> int:
        """How many channels of the index are read of heads of size D."""
        return max(1, D // 4) if self.r is None else self.r

    def _index(self, D: int) -> IndexFormat:
        return IndexFormat("int4", D, group_means=True)

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Full:
        """An empty store of every token, with an index in 4 bits and its means. Raises ValueError if r exceeds D."""
        check_whole("r", self.channels(shape.D), 1, shape.D)
        return Full(shape, dtype, device, "int4", kv=self.kv, group_means=True, varying=True)

    def step(self, store: Full, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Read the certain rows and a base sample, compute the size of the sample, and read the rest of it.

        Gradients take the choice and the size as given.
        """
        if token is not None:
            store.append_token(*token)
        scale, softcap, sinks = softmax["scale"], softmax.get("softcap"), softmax.get("sinks")
        x = q.to(compute_dtype(store.dtype))
        lengths = torch.tensor(store.lengths, device=store.device)[:, None, None]  # (B,1,1)
        # (1) I_f: the first, the recent and the best rows; the other n_s rows in random order
        logits = estimated_logits(x, store, self.channels(store.shape.D), scale)
        scores = approximate_scores(logits, store, softcap, sinks)  # (B,H,G,N)
        certain = certain_rows(scores.detach().sum(2), lengths, self.sinks, self.local, self.k)
        rest = store.valid() & ~certain
        rank, n_s = random_order(rest, lengths), rest.sum(-1)

        def read(chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Logits (B,H,G,m) and values (B,H,m,D) of these rows, and which of them belong to the sample (B,H,m)."""
            rows, valid = compact(chosen)
            exact = apply_softcap(x @ store.read_keys(rows, valid).transpose(-1, -2) * scale, softcap)
            exact = exact.masked_fill(~valid[:, :, None], -torch.inf)
            return exact, store.read_values(rows, valid), valid & rest.gather(-1, rows)

        # (2) the base sample, and the size b that its variance asks for
        first = certain | (rest & (rank < self.base))
        exact, values, sampled = read(first)
        b = self.sample_size(exact.detach(), values.detach(), sampled, n_s, sinks)
        # (3) the first b rows of the random order
        more = rest & (rank >= self.base) & (rank < b[..., None])
        parts = ((exact, values, sampled), read(more))
        exact, values, sampled = (
            torch.cat(pair, d) for pair, d in zip(zip(*parts, strict=True), (3, 2, 2), strict=True)
        )
        # (4) y = (sum_{I_f} e^l v + n_s/b sum_{sample} e^l v) / (the same without v)
        stands_for = (n_s.to(exact.dtype) / sampled.sum(-1).clamp(min=1))[..., None, None]
        weights = softmax_with_sinks(torch.where(sampled[:, :, None], exact + stands_for.log(), exact), sinks)
        read_rows = (first | more).sum((1, 2)) - store.shape.H
        store.rows_read = torch.stack([read_rows, read_rows], -1)
        return (weights @ values).masked_fill(scores.isnan().any(-1, keepdim=True), torch.nan).to(q.dtype)

    def sample_size(
        self, logits: Tensor, values: Tensor, sampled: Tensor, n_s: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """How many rows are drawn, those of the base sample among them: (B,H), at most n_s.

        logits (B,H,G,m) and values (B,H,m,D) of the certain rows and the base sample · sampled (B,H,m) bool: which are
        the latter · n_s (B,H): from how many it was drawn. The error of n_s times the mean of b numbers of variance
        sigma^2 has the standard deviation n_s sigma / sqrt(b), which z times over must be at most epsilon D:

            b = (z n_s sigma / (epsilon D))^2,   z = Phi^-1(1 - delta / 2),   D = sum_{I_f} e^l + n_s mean(e^l).

        For "output" the same holds of the numerator, a vector N whose sigma^2 is summed over its channels, with |N| in
        the place of D. Both have delta / 2 and epsilon / (2 + epsilon), with which their ratio errs by at most epsilon.
        """
        top = logits.amax(-1, keepdim=True)
        a = (logits - top).exp()  # 0 beyond a head's rows
        drawn = sampled.sum(-1)  # (B,H)
        m, n = drawn[..., None].to(a.dtype), n_s[..., None].to(a.dtype)
        of_sample = a.masked_fill(~sampled[:, :, None], 0)
        total = (a - of_sample).sum(-1) + n * of_sample.sum(-1) / m  # (B,H,G)
        if sinks is not None:
            total = total + (sinks - top[..., 0]).exp()
        variance = (of_sample.square().sum(-1) - of_sample.sum(-1).square() / m) / (m - 1)
        both = self.verified == "output"
        z = NormalDist().inv_cdf(1 - self.delta / (4 if both else 2))
        epsilon = self.epsilon / (2 + self.epsilon) if both else self.epsilon
        need = variance * (z * n / (epsilon * total)).square()
        if both:
            mean = of_sample @ values / m[..., None]  # (B,H,G,D)
            numerator = (a - of_sample) @ values + n[..., None] * mean
            squares = (of_sample.square() @ values.square().sum(-1)[..., None])[..., 0]
            variance = (squares - m * mean.square().sum(-1)) / (m - 1)
            need = torch.maximum(need, variance * (z * n / epsilon).square() / numerator.square().sum(-1))
        size = need.amax(-1).ceil().nan_to_num(torch.inf).clamp(min=0).minimum(n_s.to(a.dtype)).long()
        return torch.where(drawn < 2, n_s, torch.maximum(size, drawn))

    def traffic(
        self,
        n: int,
        shape: Shape,
        dtype: torch.dtype,
        key_rows: int | None = None,
        value_rows: int | None = None,
    ) -> Traffic:
        """Count n r numbers of the index, the rows that were read, and what an append writes, as this code moves them.

        key_rows, value_rows: rows of K and of V that the step reads, over all heads and rows of the batch, the current
        token not included; they are equal here. None: all rows, the most there can be. `paper` is n r + 2 m D + 2D for
        m rows of a KV head.
        """
        D, heads, r, index = shape.D, shape.B * shape.H, self.channels(shape.D), self._index(shape.D)
        key_rows = heads * n if key_rows is None else key_rows
        value_rows = key_rows if value_rows is None else value_rows
        rows = self.row_format(D).traffic(key_rows + value_rows + 2 * heads, dtype)
        fixed = index.read(n, r, dtype) + index.read_means(n, dtype) + index.append(n, dtype)
        paper = heads * (n * r + 2 * D) + (key_rows + value_rows) * D
        return Traffic.of(1, paper, *rows, *((heads * count, each) for count, each in fixed))

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        """The bytes of K and V, and of the index with its scales, means and open group."""
        rows = self.row_format(shape.D).nbytes(2 * n, dtype)
        return shape.B * shape.H * (rows + self._index(shape.D).bound(n, dtype))


def certain_rows(score: Tensor, lengths: Tensor, sinks: int, local: int, k: int) -> Tensor:
    """Which rows are read for certain: the first, the current one and those before it, and the k best besides.

    score (B,H,N), lengths (B,1,1) -> (B,H,N) bool.
    """
    position = torch.arange(score.shape[-1], device=score.device)
    cached = position < lengths
    always = (position < sinks) | (position >= lengths - 1 - local)
    best = score.masked_fill(always | ~cached, -1).topk(min(k, score.shape[-1]), -1).indices
    return always.expand_as(score).scatter(-1, best, True) & cached


def random_order(rest: Tensor, lengths: Tensor) -> Tensor:
    """The place of each of these rows in a random order: rest (B,H,N) bool, lengths (B,1,1) -> (B,H,N).

    The order is that of `hash_words(STREAM, cached tokens, KV head, position)`, so the first b rows are a simple random
    sample without replacement. Rows that are not in `rest` come last.
    """
    head = torch.arange(rest.shape[1], device=rest.device)[:, None]
    word = hash_words(STREAM, lengths, head, torch.arange(rest.shape[-1], device=rest.device))
    return word.masked_fill(~rest, 2**32).argsort(dim=-1, stable=True).argsort(dim=-1)
