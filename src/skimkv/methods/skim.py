"""Skim, a method of our own: read the keys that look best by an index, and draw some of the others at random.

A choice of the best rows pretends that all others do not exist, so its error falls slowly with their number. Skim reads
fewer of the best and samples the rest with probabilities that the index suggests: what was drawn stands for what was
not, and the error falls as that of a survey does. docs/skim.md says what was measured, and what was tried besides.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops import KernelStep, SoftmaxOptions, Token, kernel_step
from ..ops.blocks import apply_softcap, softmax_with_sinks, take
from ..ops.hashing import hash_words
from ..stores.base import Shape, compute_dtype
from ..stores.channel_index import IndexFormat
from ..stores.full import Full
from ..stores.mean_value import MeanValue
from .base import Method, Traffic, check_positive, check_whole
from .sparq import approximate_scores, top_channels

SINKS = 4  # first tokens whose rows are always read
LOCAL = 16  # tokens before the current one whose rows are always read
KEYS, VALUES = 0, 1  # streams of random numbers
CONFIDENCE = 0.95  # with which the relative error stays below `error`, as far as it is predicted
QUANTILE = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)  # of a Gaussian error in standard deviations


@dataclass(frozen=True, repr=False)
class Skim(Method[Full]):
    """Read r channels of an index, the k best rows by it, and a random sample of the other rows.

    k: rows that are read for certain; the others are drawn with probability k p, p being the largest softmax score that
    the group's queries give the row by the index, so that at most k more are expected for each query head. r: channels
    of the index that are read (None: a quarter of the head size). The index has 4 bits a channel, as SparQ's with
    channels="int4", and the mean of every 256 tokens; together they add an eighth of the cache's memory.

    error: every KV head chooses in every step how many rows it reads, so that the relative error |y - dense| / |dense|
    of a query head should exceed this in at most one of 20 cases. k is then the least: a first sample is drawn with it,
    from which follows what is needed, and a second one contains the first. The most are all rows. This holds for large
    samples and is no proof; docs/skim.md tells how often the error was larger. None: k stays as it is.
    """

    k: int = 64
    r: int | None = None
    error: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("k", self.k, 1)
        if self.r is not None:
            check_whole("r", self.r, 1)
        if self.error is not None:
            check_positive("error", self.error, 1)

    def channels(self, D: int) -> int:
        """How many channels are read of heads of size D."""
        return max(1, D // 4) if self.r is None else self.r

    def _index(self, D: int) -> IndexFormat:
        return IndexFormat("int4", D, group_means=True)

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Full:
        """An empty store of every token, with an index in 4 bits, its means, and the mean value.

        Raises ValueError if r exceeds the head size.
        """
        check_whole("r", self.channels(shape.D), 1, shape.D)
        return Full(shape, dtype, device, "int4", mean=True, kv=self.kv, group_means=True, varying=True)

    def step(self, store: Full, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Score all rows by the index, draw rows of K, draw rows of V among them, and shrink what the draw estimates.

        With `error`, do so a second time where the first sample is too small. Whether a row is drawn depends on its
        position, the number of cached tokens and the head: see `draw`. Gradients take the probabilities, and the part
        that is shrunk, as given: a draw has no gradient.
        """
        if token is not None:
            store.append_token(*token)
        scale, softcap, sinks = softmax["scale"], softmax.get("softcap"), softmax.get("sinks")
        x = q.to(compute_dtype(store.dtype))
        lengths = torch.tensor(store.lengths, device=store.device)[:, None, None]  # (B,1,1)
        # step 1: softmax scores by the index
        logits = estimated_logits(x, store, self.channels(store.shape.D), scale)
        scores = approximate_scores(logits, store, softcap, sinks)  # (B,H,G,N)
        position = torch.arange(scores.shape[-1], device=x.device).expand_as(scores[:, :, 0])

        def sample(k: Tensor, first: Sample | None = None) -> Sample:
            """Draw with k (B,H,1); rows that the first sample has are not read again."""
            # step 2: rows of K, each weighted by one over the probability with which it was drawn
            p_key = key_probability(scores.amax(2), lengths, k).detach()
            keys = draw(p_key, position, lengths, KEYS)
            rows, valid = compact(keys)
            p_key = p_key.gather(-1, rows)
            unread = valid if first is None else valid & ~first.keys.gather(-1, rows)
            exact = apply_softcap(x @ store.read_keys(rows, unread).transpose(-1, -2) * scale, softcap)
            exact = (exact - p_key.log()[:, :, None]).masked_fill(~valid[:, :, None], -torch.inf)
            weights = softmax_with_sinks(exact, sinks)  # (B,H,G,m)
            of_sink = 0 if sinks is None else 1 - weights.sum(-1, keepdim=True)
            # step 3: rows of V among them, weighted once more
            p_value = value_probability(weights, rows, lengths, k).detach()
            chosen, kept = compact(draw(p_value, rows, lengths, VALUES) & valid)
            p_value, weights = p_value.gather(-1, chosen), take(weights, chosen)
            weights = (weights / p_value.masked_fill(~kept, 1)[:, :, None]).masked_fill(~kept[:, :, None], 0)
            weights = weights / (weights.sum(-1, keepdim=True) + of_sink)
            rows = rows.gather(-1, chosen)
            unread = kept if first is None else kept & ~first.values.gather(-1, rows)
            values = store.read_values(rows, unread)
            # step 4: what was drawn at random is noisy; the mean value is not
            probability = (p_key.gather(-1, chosen) * p_value).masked_fill(~kept, 1)
            y = shrink(weights, values, probability, store.read_mean())
            needed = k
            if first is None and self.error is not None:
                needed = rows_for_error(
                    weights, values, probability, rows, y, scores.amax(2), lengths, self.k, self.error
                )
            return Sample(keys, torch.zeros_like(keys).scatter(-1, rows, kept), y, needed)

        drawn = sample(torch.full_like(lengths, self.k).expand(*scores.shape[:2], 1))
        keys, values = drawn.keys, drawn.values
        if bool((drawn.needed > self.k).any()):
            drawn = sample(drawn.needed, drawn)
            keys, values = keys | drawn.keys, values | drawn.values
        store.rows_read = torch.stack([(part.sum((1, 2)) - store.shape.H) for part in (keys, values)], -1)
        return drawn.y.masked_fill(scores.isnan().any(-1, keepdim=True), torch.nan).to(q.dtype)

    def kernel(self, store: Full) -> KernelStep | None:
        """The kernel of the same step; with `error` there is none."""
        return None if self.error is not None else kernel_step("skim", self.channels(store.shape.D), self.k)

    def traffic(
        self,
        n: int,
        shape: Shape,
        dtype: torch.dtype,
        key_rows: int | None = None,
        value_rows: int | None = None,
    ) -> Traffic:
        """Count n r numbers of the index, the rows that were drawn, and what an append writes, as this code moves them.

        key_rows, value_rows: rows of K and of V that the step reads, over all heads and rows of the batch, the current
        token not included; None: the most that are expected, with `error` all rows. `paper` is n r + (key_rows +
        value_rows) D + 2D per head.
        """
        D, heads, r, index = shape.D, shape.B * shape.H, self.channels(shape.D), self._index(shape.D)
        most = n if self.error is not None else self.k
        if key_rows is None:
            key_rows = heads * min(n, SINKS + LOCAL + (1 + shape.G) * most)
        if value_rows is None:
            value_rows = min(key_rows, heads * min(n, (1 + 2 * most) * shape.G))
        rows = self.row_format(D).traffic(key_rows + value_rows + 2 * heads, dtype)
        fixed = index.read(n, r, dtype) + index.read_means(n, dtype) + index.append(n, dtype) + MeanValue.traffic(D)
        paper = heads * (n * r + 2 * D) + (key_rows + value_rows) * D
        return Traffic.of(1, paper, *rows, *((heads * count, each) for count, each in fixed))

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        """The bytes of K and V, of the index with its scales, means and open group, and of v_mean."""
        D = shape.D
        rows = self.row_format(D).nbytes(2 * n, dtype)
        return shape.B * shape.H * (rows + self._index(D).bound(n, dtype) + MeanValue.nbytes(D))


class Sample(NamedTuple):
    """What one draw of rows gave.

    keys, values (B,H,N) bool: whose rows of K and of V it has · y (B,H,G,D) · needed (B,H,1): with which k the error
    would be small enough.
    """

    keys: Tensor
    values: Tensor
    y: Tensor
    needed: Tensor


def estimated_logits(q: Tensor, store: Full, r: int, scale: float) -> Tensor:
    """Estimate q K^T scale from r channels of the index, and from group means for the other channels: (B,H,G,N).

    The r channels are those with the largest sum over the group of |q| times the step of the last closed group's codes:
    the step grows with the range of the keys. Unlike SparQ it needs no temperature, because nothing is left out.
    """
    i1 = top_channels(q * store.read_last_steps()[:, :, None], r)
    others = q.scatter(-1, i1[:, :, None].expand(-1, -1, q.shape[2], -1), 0)
    return (take(q, i1) @ store.read_channels(i1) + others @ store.read_group_means().transpose(-1, -2)) * scale


def key_probability(score: Tensor, lengths: Tensor, k: Tensor | int) -> Tensor:
    """The probability with which a row of K is drawn: score (B,H,N), lengths (B,1,1), k (B,H,1) -> (B,H,N).

    1 for the first SINKS tokens, the current one and the LOCAL before it, and the k largest scores besides (of equal
    ones the first); min(1, k score) for the others, and 0 beyond a row's length.
    """
    k = torch.as_tensor(k, device=score.device).expand(*score.shape[:2], 1)
    position = torch.arange(score.shape[-1], device=score.device)
    cached = position < lengths
    certain = (position < SINKS) | (position >= lengths - 1 - LOCAL)
    rest = score.masked_fill(certain | ~cached, -1)
    largest = rest.topk(min(int(k.max()), score.shape[-1]), -1).values
    bound = largest.gather(-1, (k - 1).clamp(max=largest.shape[-1] - 1))
    above, equal = rest > bound, rest == bound
    best = above | (equal & (equal.cumsum(-1) <= k - above.sum(-1, keepdim=True)))
    return (k * score).clamp(max=1).masked_fill(certain | best, 1).masked_fill(~cached, 0)


def value_probability(weights: Tensor, rows: Tensor, lengths: Tensor, k: Tensor | int) -> Tensor:
    """The probability with which the value of a drawn row is read: weights (B,H,G,m), rows (B,H,m) -> (B,H,m).

    lengths (B,1,1), k (B,H,1). min(1, 2k times the largest weight that a query of the group gives it); 1 for the
    current token, for the row that has most of a query's weight, and where a context has no more than k tokens.
    """
    largest = weights.amax(2)
    most = ((weights == weights.amax(-1, keepdim=True)) & (weights > 0)).any(2)
    return (2 * k * largest).clamp(max=1).masked_fill(most | (rows == lengths - 1) | (lengths <= k), 1)


def draw(probability: Tensor, position: Tensor, lengths: Tensor, stream: int) -> Tensor:
    """Draw rows by their probabilities, independently of each other (Poisson sampling): (B,H,n) -> (B,H,n) bool.

    A row is drawn if w >> 1 < floor(probability 2^31), in whole numbers, or if its probability is 1; w is the word of
    32 bits `hash_words(stream, cached tokens of the row of the batch, KV head, position)`. All but the last round of
    the hash are the same for a whole head: with h = hash_words(stream, tokens, head), w = mix(h * GOLDEN + position) in
    arithmetic modulo 2^32.
    """
    head = torch.arange(probability.shape[1], device=probability.device)[:, None]
    word = hash_words(stream, lengths, head, position)
    threshold = (probability.float() * 2.0**31).nan_to_num(0).long()
    return ((word >> 1) < threshold) | (probability >= 1)


def compact(drawn: Tensor) -> tuple[Tensor, Tensor]:
    """The places of True entries, in order: drawn (B,H,n) -> index (B,H,m), and whether it is one, (B,H,m).

    m is the largest number of True entries; heads with fewer have other places at their end, which are not valid.
    """
    m = int(drawn.sum(-1).max())
    index = drawn.int().argsort(dim=-1, descending=True, stable=True)[..., :m]
    return index, drawn.gather(-1, index)


def shrink(weights: Tensor, values: Tensor, probability: Tensor, mean: Tensor) -> Tensor:
    """Sum weighted values, the random part drawn towards the mean value as far as it is noise: James and Stein (1961).

    weights (B,H,G,m) sum to 1, with sinks to less · values (B,H,m,D) · probability (B,H,m) with which each was drawn ·
    mean (B,H,D) -> (B,H,G,D). The random part is the deviation d = sum w (v - mean) of rows with a probability below 1.
    Its variance is about s = sum w^2 (1 - probability) |v - mean|^2; max(0, 1 - s / |d|^2) of it is kept.
    """
    uncertain = weights.masked_fill((probability >= 1)[:, :, None], 0)
    centred = values - mean[:, :, None]
    deviation = uncertain @ centred
    spread = ((1 - probability) * centred.square().sum(-1)).masked_fill(probability >= 1, 0)  # which may be infinite
    variance = (uncertain.square() * spread[:, :, None]).sum(-1, keepdim=True)
    norm = deviation.square().sum(-1, keepdim=True)
    lost = torch.where(variance < norm, variance / norm, (variance > 0).to(norm.dtype)).detach()
    return weights @ values - lost * deviation


def rows_for_error(
    weights: Tensor,
    values: Tensor,
    probability: Tensor,
    rows: Tensor,
    y: Tensor,
    score: Tensor,
    lengths: Tensor,
    k: int,
    error: float,
) -> Tensor:
    """The least of k, 1.5 k, 2 k, 3 k, 4 k, 6 k ... with which no relative error is expected above `error`: (B,H,1).

    Of a sample with k: weights (B,H,G,m), values (B,H,m,D), probability (B,H,m) with which each of its rows (B,H,m) was
    drawn, 1 where there is none, and y (B,H,G,D) · score (B,H,N), lengths (B,1,1) as of `key_probability`. To first
    order the error of a ratio of two sums over rows that are drawn independently, row i with probability pi_i, has the
    variance sum a_i^2 (1 / pi_i - 1) |v_i - y|^2 over *all* rows, a being the softmax weights (Hajek 1971). A sample
    estimates this sum as it does any other, each row counted 1 / pi_i times, and has a_i = pi_i times its weight. With
    another k, row i is drawn with another probability pi'_i, and

        V = sum over the sample of weight_i^2 pi_i (1 / pi'_i - 1) |v_i - y|^2.

    It is enough if QUANTILE^2 V <= (error |y|)^2. Of all Gaussian errors of one variance, those along a line exceed
    QUANTILE standard deviations most often (Szekely and Bakirov 2003), so their dimension need not be known.
    """
    weights, y = weights.detach(), y.detach()
    distance = torch.cdist(y, values.detach(), compute_mode="donot_use_mm_for_euclid_dist")  # (B,H,G,m)
    terms = weights.square() * probability[:, :, None] * distance.square()
    softmax = weights * probability[:, :, None]
    most = (error / QUANTILE * y.norm(dim=-1)).square()  # (B,H,G)
    needed = lengths.new_full((*probability.shape[:2], 1), k)
    for step in itertools.count(1):
        p_key = key_probability(score, lengths, needed).gather(-1, rows).masked_fill(probability >= 1, 1)
        p_value = value_probability(softmax / p_key[:, :, None], rows, lengths, needed)
        chance = (p_key * p_value).masked_fill(probability >= 1, 1)
        variance = (terms * (1 / chance - 1)[:, :, None]).sum(-1)
        too_few = (variance > most).any(-1, keepdim=True) & (needed < lengths)
        if not bool(too_few.any()):
            break
        needed = torch.where(too_few, (2 + step % 2) * k << step // 2 >> 1, needed)
    return needed
