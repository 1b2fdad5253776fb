"""Means of a few examples: their standard error and their 95% confidence intervals.

Examples that ask about one context are alike, so what is compared between methods is resampled by context.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from statistics import NormalDist, fmean, stdev

LEAST = 5  # fewer examples, or fewer contexts where they are resampled, give no interval
RESAMPLES = 4000
SEED = 0  # of the resampling, so that the same scores always give the same interval
AT_ONCE = 1 << 20  # contexts that are drawn at once: 8 MiB of indices
TAIL = 0.99  # the share of the tokens below the percentile that is reported of their divergences
Z = NormalDist().inv_cdf(0.975)

Interval = tuple[float | None, float | None]  # low and high; both are None where there is no interval


def standard_error(x: Sequence[float]) -> float | None:
    """The standard error of the mean; None for fewer than two values, NaN if one of them is not finite."""
    if len(x) < 2:
        return None
    return stdev(x) / math.sqrt(len(x)) if all(map(math.isfinite, x)) else math.nan


def wilson_interval(successes: float, n: int) -> tuple[float, float]:
    """Wilson's 95% score interval of a proportion; it lies within 0 and 1, and is not empty for 0 of n or n of n.

    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927).
    """
    p = successes / n
    middle = (p + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2)) / (1 + Z**2 / n)
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    high = 1.0 if successes == n else min(1.0, middle + half)
    return low, high


def score_interval(scores: Sequence[float], contexts: Sequence[Hashable], greatest: float) -> Interval:
    """The 95% interval of the mean score: Wilson's where every score is 0 or 1, else the bootstrap over contexts.

    contexts: which scores belong together, one for each score. greatest: the greatest score that is possible; the
    least is 0. There is no interval for fewer than 5 scores, and none if one of them is not finite.
    """
    if greatest == 1 and set(scores) <= {0, 1}:
        return wilson_interval(sum(scores), len(scores)) if len(scores) >= LEAST else (None, None)
    return cluster_bootstrap(scores, contexts, 0, greatest)


def cluster_bootstrap(x: Sequence[float], clusters: Sequence[Hashable], least: float, greatest: float) -> Interval:
    """The 95% percentile interval of the mean of x, where whole clusters are drawn again with replacement.

    clusters: which values belong together, one for each value. least and greatest: what one value can be; either may
    be infinite. There is no interval for fewer than 5 clusters, and none if a value is not finite.

    Clusters with the same mean show no spread, and resampling would give an interval without width. Then Wilson's
    interval of 0 in m clusters bounds the share of clusters that might differ: they are taken to lie at an end of
    the range. Where that end is infinite there is no interval.
    """
    groups: dict[Hashable, list[float]] = {}
    for value, cluster in zip(x, clusters, strict=True):
        groups.setdefault(cluster, []).append(value)
    m = len(groups)
    if m < LEAST or not all(map(math.isfinite, x)):
        return None, None
    means = [fmean(group) for group in groups.values()]
    if max(means) - min(means) <= 1e-12 * max(1.0, abs(means[0])):
        if not math.isfinite(least) or not math.isfinite(greatest):
            return None, None
        differing = wilson_interval(0, m)[1]
        low, high = ((1 - differing) * means[0] + differing * end for end in (least, greatest))
    else:
        low, high = _percentiles([sum(group) for group in groups.values()], [len(group) for group in groups.values()])
    return min(max(least, low), greatest), min(max(least, high), greatest)


def _percentiles(sums: Sequence[float], sizes: Sequence[int]) -> tuple[float, float]:
    """The 2.5% and the 97.5% percentile of the mean over clusters that are drawn again; sums and sizes are theirs."""
    import torch

    m, draw = len(sums), torch.Generator().manual_seed(SEED)
    both = torch.tensor([sums, sizes], dtype=torch.float64)  # (2,m)
    rows, means = max(1, AT_ONCE // m), []
    for start in range(0, RESAMPLES, rows):
        drawn = torch.randint(m, (min(rows, RESAMPLES - start), m), generator=draw)
        total, count = both[:, drawn].sum(-1)
        means.append(total / count)
    low, high = torch.cat(means).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def quantile(x: Sequence[float], share: float) -> float:
    """The smallest value of x that at least this share of the values does not exceed; NaN if one of them is NaN."""
    if any(map(math.isnan, x)):
        return math.nan
    return sorted(x)[max(0, math.ceil(share * len(x) - 1e-9) - 1)]


def quantile_bootstrap(groups: Sequence[Sequence[float]], share: float) -> Interval:
    """The 95% percentile interval of the quantile of all values, where whole groups are drawn again with replacement.

    There is no interval for fewer than 5 groups, and none if a value is not finite or all are the same.
    """
    import torch

    m, values = len(groups), [value for group in groups for value in group]
    if m < LEAST or not all(map(math.isfinite, values)) or min(values) == max(values):
        return None, None
    group_of = torch.tensor([i for i, group in enumerate(groups) for _ in group])
    ordered, order = torch.tensor(values, dtype=torch.float64).sort()
    group_of, sizes = group_of[order], torch.tensor([len(group) for group in groups])
    draw, rows, quantiles = torch.Generator().manual_seed(SEED), max(1, AT_ONCE // len(values)), []
    for start in range(0, RESAMPLES, rows):
        drawn = torch.randint(m, (min(rows, RESAMPLES - start), m), generator=draw)
        times = torch.zeros(len(drawn), m, dtype=torch.int64).scatter_add_(1, drawn, torch.ones_like(drawn))
        needed = (share * (times @ sizes).double() - 1e-9).ceil().long()
        at_most = times[:, group_of].cumsum(1)  # how many drawn values come before each, itself included
        quantiles.append(ordered[torch.searchsorted(at_most, needed[:, None])[:, 0]])
    low, high = torch.cat(quantiles).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
