"""Means of a few examples: their standard error and their 95% confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev


def standard_error(x: Sequence[float]) -> float | None:
    """The standard error of the mean; None for fewer than two values, NaN if one of them is not finite."""
    if len(x) < 2:
        return None
    return stdev(x) / math.sqrt(len(x)) if all(map(math.isfinite, x)) else math.nan


def mean_and_interval(x: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """The mean, and the two ends of its 95% interval by Student's t.

    All three are None without values; the ends are None for a single value.
    """
    if not x:
        return None, None, None
    mean, error = fmean(x), standard_error(x)
    if error is None:
        return mean, None, None
    t = student_quantile(len(x) - 1)
    return mean, mean - t * error, mean + t * error


def student_quantile(freedom: int) -> float:
    """The 97.5% quantile of Student's t with so many degrees of freedom.

    Exact for 1 and 2, else the expansion of Cornish and Fisher, which is 0.7% off at 3 and less above.
    """
    if freedom == 1:
        return math.tan(0.475 * math.pi)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z, v = NormalDist().inv_cdf(0.975), freedom
    return (
        z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )  # fmt: skip
