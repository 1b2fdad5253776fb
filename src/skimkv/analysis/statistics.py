"""What the papers' methods rest on, measured: sparse scores, heavy-tailed queries, heavy hitters, clustered keys.

Each statistic is a pure function of one layer's queries q (H,G,m,D) at the positions `at` (m,) and its keys
k (H,n,D), float32, or of scores that are made of them. How a model is run for them: survey.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..methods import LowRank
from ..ops import ref
from ..ops.prefill import softcapped
from ..stores.base import Shape

GAUSSIAN_TAIL = 0.0026998  # the mass of a normal distribution beyond three standard deviations
SHOWN = 0.01  # of a row's maximum: what is less counts as nothing (H2O section 3.1)
BLOCK = 128  # queries at a time where all of a prompt are used


def logits(q: Tensor, k: Tensor, at: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """SparQ eq. 4 before its softmax, -inf after each query's own position -> (H,G,m,n)."""
    x = softcapped(q @ k[:, None].mT * scale, softcap)
    return x.masked_fill(torch.arange(k.shape[1], device=k.device) > at[:, None], -torch.inf)


def top_mass(s: Tensor, k: int) -> Tensor:
    """The mass of the k largest scores (SparQ fig. 4a, 4b). s (...,n), rows that sum to 1 -> (...)."""
    return s.topk(min(k, s.shape[-1]), -1).values.sum(-1)


def kurtosis(x: Tensor) -> Tensor:
    """Fisher's, of the population: the mean of z^4, less 3; 0 for a Gaussian (SparQ fig. 4d, E1). (...,n) -> (...)."""
    return _standard(x).pow(4).mean(-1) - 3


def tail_mass(x: Tensor) -> Tensor:
    """The share of |z| > 3 over a Gaussian's 0.27% (SparQ fig. E1). (...,n) -> (...)."""
    return (_standard(x).abs() > 3).double().mean(-1) / GAUSSIAN_TAIL


def _standard(x: Tensor) -> Tensor:
    x = x.double()
    return (x - x.mean(-1, keepdim=True)) / x.std(-1, correction=0, keepdim=True)


def projected(q: Tensor, k: Tensor, r: int, how: str) -> Tensor:
    """q K^T seen through r dimensions (SparQ fig. 4e, E2) -> (H,G,m,n), neither scaled nor masked.

    how: "top", the r largest of |q|; "group", of its sum over the group (section 4); "first", the first r;
    "random", an orthonormal projection, that of LowRank.
    """
    if how == "random":
        shape = Shape(1, q.shape[0], q.shape[1], q.shape[-1])
        P = LowRank(r, 1).store(shape, q.dtype, q.device).projection
        assert P is not None  # (H,D,r)
        return (q @ P[:, None].to(q.dtype)) @ (k @ P.to(k.dtype))[:, None].mT
    if how == "first":
        return q[..., :r] @ k[:, None, :, :r].mT
    size = q.abs() if how == "top" else q.abs().sum(1, keepdim=True).expand_as(q)
    return (q * torch.zeros_like(q).scatter_(-1, size.topk(r, -1).indices, 1)) @ k[:, None].mT


def agreement(x: Tensor, y: Tensor, k: int) -> Tensor:
    """The share of the k largest of x that are among the k largest of y (SparQ fig. 4e, E2). (...,n) -> (...)."""
    a, b = (torch.zeros_like(t, dtype=torch.bool).scatter_(-1, t.topk(k, -1).indices, True) for t in (x, y))
    return (a & b).sum(-1) / k


def coverage(
    q: Tensor, k: Tensor, at: Tensor, scale: float, softcap: float | None, r: int, count: int, temperature: str
) -> Tensor:
    """alpha: the mass that the scores from r channels, at that temperature, give to their `count` largest.

    SparQ eq. 7, 9 and 10, fig. 4f, where it is compared with `top_mass` of the exact scores -> (H,G,m).
    """
    x = q.permute(2, 0, 1, 3)  # (m,H,G,D): the queries as the batch
    index = ref.top_channels(x, r)
    chosen = torch.zeros_like(x[:, :, 0]).scatter_(-1, index, 1)[:, :, None]
    each = x * chosen * ref.temperature_scale(x, index, scale, temperature)
    return top_mass(logits(each.permute(1, 2, 0, 3), k, at, 1.0, softcap).softmax(-1), count)


def correlation_ratio(x: Tensor, axis: int) -> float:
    """eta, the standard deviation of the means along an axis over that of all, less d^-0.5 for its d entries.

    SparQ table 1: 0 for independent entries, 1 - d^-0.5 where x does not change along the axis. Where it is large
    along the sequence, one mean stands for many values.
    """
    x = x.float()
    d: int = x.shape[axis]
    return float(x.mean(axis).std(correction=0) / x.std(correction=0)) - 1 / math.sqrt(d)


def sparsity(q: Tensor, k: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """The share of a prompt's causal scores below 1% of their row's largest (H2O section 3.1, fig. 2a).

    q (H,G,n,D) · k (H,n,D), all queries of the prompt -> (H,G). The zeros of the causal mask are not counted.
    """
    n = k.shape[1]
    small = torch.zeros(q.shape[:2], dtype=torch.int64, device=q.device)
    for start in range(0, n, BLOCK):
        at = torch.arange(start, min(start + BLOCK, n), device=q.device)
        x = logits(q[:, :, at], k, at, scale, softcap)
        below = (x - x.amax(-1, keepdim=True)).exp() < SHOWN
        small += (below & (x > -torch.inf)).sum((-1, -2))
    return small / (n * (n + 1) // 2)


def power_law(x: Tensor, y: Tensor) -> tuple[float, float]:
    """The exponent p of y = c x^p by least squares on the logarithms, and the R^2 of that line; positive pairs only.

    H2O section 3.2 for accumulated scores against their rank; SubGen section 2.2 for clusters against tokens.
    """
    held = (x > 0) & (y > 0)
    a, b = x[held].double().log(), y[held].double().log()
    a, b = a - a.mean(), b - b.mean()
    if len(a) < 2 or not float(a.square().sum()):
        return float("nan"), float("nan")
    p = float((a * b).sum() / a.square().sum())
    total = float(b.square().sum())
    return p, 1 - float((b - p * a).square().sum()) / total if total else 1.0


def by_token(ids: Tensor, score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of the vocabulary that occur, how often, and the scores that they received in all (H2O fig. 2).

    ids (n,) int64 · score (n,) -> ids (t,), counts (t,), sums (t,).
    """
    found, place, count = ids.unique(return_inverse=True, return_counts=True)
    return found, count, torch.zeros(len(found), dtype=score.dtype).scatter_add_(0, place, score)


def founders(x: Tensor, delta: float) -> Tensor:
    """Which points open a cluster in SubGen's algorithm 1: those farther than delta from every founder before.

    x (n,D) -> (n,) bool; its cumulative sum is m(n), the clusters after n tokens (definition 1).
    """
    near = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist") <= delta
    covered, founds = (torch.zeros(len(x), dtype=torch.bool) for _ in range(2))
    while not bool(covered.all()):
        i = int(covered.int().argmin())
        founds[i] = True
        covered |= near[i]
        covered[i] = True
    return founds


def median_distance(x: Tensor) -> float:
    """Between two different points of x (n,D): the unit in which a delta says how coarse its clusters are."""
    return float(torch.pdist(x).median())


def positions(n: int, count: int) -> Tensor:
    """`count` positions evenly over the second half of n, the last among them: each sees half of the text or more."""
    at: Tensor = torch.linspace(n // 2, n - 1, count).round().long().unique()
    return at


def windows(ids: Sequence[int], n: int, count: int, bos: int | None) -> list[list[int]]:
    """Up to `count` pieces of n tokens in a row; each begins with bos if the whole does."""
    first = [bos] if bos is not None and ids[0] == bos else []
    rest, step = list(ids[len(first) :]), n - len(first)
    return [first + rest[a : a + step] for a in range(0, len(rest) - step + 1, step)][:count]
