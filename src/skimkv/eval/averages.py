"""The average of a suite: the mean of its tasks' means, for every method that ran on all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from .results import Row
from .statistics import Interval
from .tasks import Suite


def suite_averages(rows: Sequence[Row], suites: Sequence[Suite]) -> list[Row]:
    """One row for each suite, mode and method that has a row on every task of the suite; n is the sum of theirs.

    Every task counts alike. Bytes, times and shares are means over the tasks, None where one of them has none.
    """
    averages = []
    for suite in suites:
        cells = {(row.task, row.mode, row.method): row for row in rows}
        for mode, method in dict.fromkeys((row.mode, row.method) for row in rows):
            own = [cells.get((task.spec, mode, method)) for task in suite.tasks]
            found = [row for row in own if row is not None]
            if len(found) == len(own):
                averages.append(_average(suite.spec, found))
    return averages


def _average(spec: str, rows: Sequence[Row]) -> Row:
    mean = fmean(row.mean for row in rows)
    difference = _mean([row.diff_to_dense for row in rows])
    return Row(
        spec, rows[0].mode, rows[0].method, sum(row.n for row in rows), mean,
        *combined_interval([row.mean for row in rows], [(row.low, row.high) for row in rows]),
        None,
        difference,
        *((None, None) if difference is None else combined_interval(
            [row.diff_to_dense or 0.0 for row in rows], [(row.diff_low, row.diff_high) for row in rows])),
        None if (size := _mean([row.bytes_per_token for row in rows])) is None else round(size),
        _mean([row.ms_per_token for row in rows]), _mean([row.share for row in rows]),
    )  # fmt: skip


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean; None if a value is missing."""
    present = [value for value in values if value is not None]
    return fmean(present) if len(present) == len(values) else None


def combined_interval(means: Sequence[float], intervals: Sequence[Interval]) -> Interval:
    """The 95% interval of the mean of independent means, from the 95% interval of each.

    The distances of the lower ends from their means are added in squares, and so are those of the upper ends. There is
    no interval if one of them has none. Source: G. Y. Zou, W. Huang and X. Zhang, A note on confidence interval
    estimation for a linear function of binomial proportions, Computational Statistics & Data Analysis 53 (2009).
    """
    below, above = [], []
    for mean, (low, high) in zip(means, intervals, strict=True):
        if low is None or high is None:
            return None, None
        below.append(mean - low)
        above.append(high - mean)
    average = fmean(means)
    return average - math.hypot(*below) / len(means), average + math.hypot(*above) / len(means)
