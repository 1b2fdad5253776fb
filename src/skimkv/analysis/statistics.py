"""Statistics of attention that the papers' methods rest on: sparse scores, heavy-tailed queries, clustered keys.

Every statistic is a pure function of float32 tensors of one layer: queries q (H,G,m,D) at the positions `at` (m,), the
keys k (H,n,D) of the same text, or attention scores made of both. survey.py runs a model to obtain them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..methods import LowRank
from ..methods.sparq import inverse_temperature, top_channels
from ..methods.subgen import founding_keys
from ..ops import SoftmaxOptions
from ..ops.blocks import apply_softcap, softmax_with_sinks
from ..stores.base import Shape

GAUSSIAN_TAIL = 0.0026998  # the mass of a normal distribution beyond three standard deviations
NEGLIGIBLE = 0.01  # a score below this part of the largest in its row counts as zero (H2O section 3.1)
QUERY_BLOCK = 128  # queries that are scored at a time where every query of a prompt is used


def logits(q: Tensor, k: Tensor, at: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """Compute causal attention logits, -inf after each query's own position -> (H,G,m,n). SparQ eq. 4."""
    x = apply_softcap(q @ k[:, None].mT * scale, softcap)
    return x.masked_fill(torch.arange(k.shape[1], device=k.device) > at[:, None], -torch.inf)


def top_mass(scores: Tensor, k: int) -> Tensor:
    """Sum the k largest scores of each row: (...,n) rows that sum to 1 -> (...). SparQ fig. 4a and 4b."""
    return scores.topk(min(k, scores.shape[-1]), -1).values.sum(-1)


def tokens_of_mass(scores: Tensor, share: float) -> Tensor:
    """Count the largest scores of each row that are needed to sum to `share`: (...,n) rows that sum to 1 -> (...).

    A sharp head needs one or a few tokens, a diffuse one many.
    """
    mass = scores.sort(-1, descending=True).values.cumsum(-1)
    return ((mass < share).sum(-1) + 1).clamp_max(scores.shape[-1])


def kurtosis(x: Tensor) -> Tensor:
    """Compute Fisher's kurtosis of the population, mean(z^4) - 3: (...,n) -> (...). SparQ fig. 4d and E1.

    A Gaussian has 0; heavier tails have more.
    """
    return _standardised(x).pow(4).mean(-1) - 3


def tail_mass(x: Tensor) -> Tensor:
    """Divide the share of entries beyond three standard deviations by a Gaussian's: (...,n) -> (...). SparQ fig. E1."""
    return (_standardised(x).abs() > 3).double().mean(-1) / GAUSSIAN_TAIL


def _standardised(x: Tensor) -> Tensor:
    x = x.double()
    return (x - x.mean(-1, keepdim=True)) / x.std(-1, correction=0, keepdim=True)


def approximate_logits(q: Tensor, k: Tensor, r: int, channels: str) -> Tensor:
    """Compute q K^T from r dimensions only -> (H,G,m,n), neither scaled nor masked. SparQ fig. 4e and E2.

    channels says which dimensions are used: "top", the r channels where |q| is largest; "group", those where |q| summed
    over the query group is largest (section 4); "first", the first r channels; "random", the orthonormal projection of
    the method LowRank.
    """
    if channels == "random":
        shape = Shape(1, q.shape[0], q.shape[1], q.shape[-1])
        P = LowRank(r, 1).store(shape, q.dtype, q.device).projection
        assert P is not None  # (H,D,r)
        return (q @ P[:, None].to(q.dtype)) @ (k @ P.to(k.dtype))[:, None].mT
    if channels == "first":
        return q[..., :r] @ k[:, None, :, :r].mT
    size = q.abs() if channels == "top" else q.abs().sum(1, keepdim=True).expand_as(q)
    chosen = torch.zeros_like(q).scatter_(-1, size.topk(r, -1).indices, 1)
    return (q * chosen) @ k[:, None].mT


def agreement(x: Tensor, y: Tensor, k: int) -> Tensor:
    """Compute how many of the k largest of x are among the k largest of y, as a share: (...,n) -> (...).

    SparQ fig. 4e and E2 call it top-k agreement.
    """
    a, b = (torch.zeros_like(t, dtype=torch.bool).scatter_(-1, t.topk(k, -1).indices, True) for t in (x, y))
    return (a & b).sum(-1) / k


def estimated_alpha(
    q: Tensor, k: Tensor, at: Tensor, r: int, count: int, temperature: str, **softmax: Unpack[SoftmaxOptions]
) -> Tensor:
    """Estimate alpha from r channels: the mass of the `count` largest approximate scores -> (H,G,m).

    SparQ eq. 7, 9 and 10, and fig. 4f, which compares it with `top_mass` of the exact scores. temperature is a field of
    the method SparQ.
    """
    x = q.permute(2, 0, 1, 3)  # (m,H,G,D): the queries as the batch
    index = top_channels(x, r)
    chosen = torch.zeros_like(x[:, :, 0]).scatter_(-1, index, 1)[:, :, None]
    x = x * chosen * inverse_temperature(x, index, softmax["scale"], temperature)
    approximate = logits(x.permute(1, 2, 0, 3), k, at, 1.0, softmax.get("softcap"))
    sinks = softmax.get("sinks")
    return top_mass(softmax_with_sinks(approximate, None if sinks is None else sinks[..., None]), count)


def correlation_ratio(x: Tensor, axis: int) -> float:
    """Compute the excess correlation ratio of x along an axis with d entries. SparQ table 1.

    It is eta, the standard deviation of the means along the axis over that of all entries, minus d^-0.5. Independent
    entries give 0; an x that does not change along the axis gives 1 - d^-0.5. Where it is large along the sequence, one
    mean can stand for many values.
    """
    x = x.float()
    d: int = x.shape[axis]
    return float(x.mean(axis).std(correction=0) / x.std(correction=0)) - 1 / math.sqrt(d)


def sparsity(q: Tensor, k: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """Compute the share of a prompt's causal scores below 1% of their row's largest -> (H,G). H2O section 3.1, fig. 2a.

    q (H,G,n,D) and k (H,n,D) hold all positions of the prompt. The zeros of the causal mask are not counted.
    """
    n = k.shape[1]
    small = torch.zeros(q.shape[:2], dtype=torch.int64, device=q.device)
    for start in range(0, n, QUERY_BLOCK):
        at = torch.arange(start, min(start + QUERY_BLOCK, n), device=q.device)
        x = logits(q[:, :, at], k, at, scale, softcap)
        below = (x - x.amax(-1, keepdim=True)).exp() < NEGLIGIBLE
        small += (below & (x > -torch.inf)).sum((-1, -2))
    return small / (n * (n + 1) // 2)


def fit_power_law(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Fit y = c x^p by least squares on the logarithms of the positive pairs; return p and the R^2 of the fit.

    H2O section 3.2 does so for accumulated scores against their rank, SubGen section 2.2 for clusters against tokens.
    Both numbers are nan where fewer than two different x are positive.
    """
    positive = (x > 0) & (y > 0)
    a, b = x[positive].double().log(), y[positive].double().log()
    a, b = a - a.mean(), b - b.mean()
    if len(a) < 2 or not float(a.square().sum()):
        return float("nan"), float("nan")
    p = float((a * b).sum() / a.square().sum())
    total = float(b.square().sum())
    return p, 1 - float((b - p * a).square().sum()) / total if total else 1.0


def scores_by_token(ids: Tensor, score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add up the scores of equal tokens: ids (n,) int64, score (n,) -> ids (t,), counts (t,), sums (t,). H2O fig. 2.

    The t different tokens come in ascending order; a count says how often a token occurs.
    """
    tokens, place, counts = ids.unique(return_inverse=True, return_counts=True)
    return tokens, counts, torch.zeros(len(tokens), dtype=score.dtype).scatter_add_(0, place, score)


def cluster_founders(x: Tensor, delta: float) -> Tensor:
    """Tell which points open a cluster in SubGen's algorithm 1: (n,D) -> (n,) bool.

    Those are the points farther than delta from every founder before them. The cumulative sum is m(n), the number of
    clusters after n tokens (definition 1).
    """
    return founding_keys(torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist") <= delta)


def median_distance(x: Tensor) -> float:
    """Return the median distance between two points of x (n,D), the unit in which a delta is easiest to read."""
    return float(torch.pdist(x).median())


def query_positions(n: int, count: int) -> Tensor:
    """Spread `count` positions evenly over the second half of n tokens, the last token among them -> (count,) int64.

    Every query then sees at least half of the text.
    """
    at: Tensor = torch.linspace(n // 2, n - 1, count).round().long().unique()
    return at
