"""Intervals: Wilson's against published values, the bootstrap over contexts, and the range of a score."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skimkv.eval.statistics import cluster_bootstrap, quantile, quantile_bootstrap, score_interval, wilson_interval


@pytest.mark.parametrize(("successes", "n", "low", "high"), [
    (81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718),
    (20, 20, 0.8389, 1.0), (3, 7, 0.1582, 0.7495),
])  # fmt: skip
def test_wilson(successes, n, low, high):
    """The first four are the worked examples of Newcombe, Statistics in Medicine 17 (1998) 857, method 3."""
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=6e-5)
    mirrored = wilson_interval(n - successes, n)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=6e-5)


def test_wilson_ends_are_exact():
    for n in (5, 20, 1000):
        assert wilson_interval(n, n)[1] == 1 and wilson_interval(0, n)[0] == 0
        assert wilson_interval(n, n)[0] < 1 and wilson_interval(0, n)[1] > 0


def test_questions_of_one_context_are_not_independent():
    """Ten questions on each of 8 contexts, all alike within it: the interval is that of 8 values, not that of 80."""
    by_context = [0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    values = [value for value in by_context for _ in range(10)]
    contexts = [i for i in range(8) for _ in range(10)]
    low, high = cluster_bootstrap(values, contexts, -1, 1)
    naive_low, naive_high = cluster_bootstrap(values, range(80), -1, 1)
    assert (low, high) == cluster_bootstrap(by_context, range(8), -1, 1)
    # a binomial of 8 draws at 3/8: its 2.5% and 97.5% quantiles are 0 or 1 and 6 of 8
    assert low in (0, 1 / 8) and high == 6 / 8
    assert 2.5 < (high - low) / (naive_high - naive_low) < 3.9, "the square root of 10 is 3.16"


def test_independent_values_give_the_normal_interval():
    draw = random.Random(3)
    values = [draw.gauss(2, 1) for _ in range(400)]
    mean = sum(values) / 400
    error = math.sqrt(sum((x - mean) ** 2 for x in values) / 400 / 400)
    low, high = cluster_bootstrap(values, range(400), -math.inf, math.inf)
    assert (low, high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.08 * error)


def test_clusters_weigh_what_they_hold():
    """One context of 16 zeros beside nine single ones: the mean is of questions, so that it can fall below 1/2."""
    low, high = cluster_bootstrap([0.0] * 16 + [1.0] * 9, [0] * 16 + list(range(1, 10)), 0, 1)
    assert low < 9 / 25 < high == 1.0


def test_no_spread_is_not_no_doubt():
    """20 questions that both answered: as many as Wilson's 0.161 might differ. With all lost, none lies below -1."""
    assert cluster_bootstrap([0.0] * 20, range(20), -1, 1) == pytest.approx((-0.1611, 0.1611), abs=1e-4)
    low, high = cluster_bootstrap([-1.0] * 20, range(20), -1, 1)
    assert low == -1 and high == pytest.approx(-1 + 2 * 0.1611, abs=1e-4)
    assert cluster_bootstrap([0.0] * 20, range(20), -math.inf, math.inf) == (None, None)
    low, high = score_interval([256.0] * 5, range(5), 256)
    assert high == 256 and low == pytest.approx(256 * (1 - wilson_interval(0, 5)[1]))


def test_few_give_no_interval():
    assert score_interval([1.0] * 4, range(4), 1) == (None, None) != score_interval([1.0] * 5, range(5), 1)
    assert cluster_bootstrap([0.0, 1.0] * 10, [i // 5 for i in range(20)], -1, 1) == (None, None), "four contexts"
    assert score_interval([1.5, math.nan, 2.0, 1.0, 3.0], range(5), math.inf) == (None, None)
    assert score_interval([math.inf] * 6, range(6), math.inf) == (None, None)


@settings(max_examples=60)
@given(st.data(), st.sampled_from([1.0, 100.0, 256.0, math.inf]), st.booleans())
def test_no_interval_leaves_the_range(data, greatest, difference):
    least = -greatest if difference else 0.0
    ends = max(least, -1e6), min(greatest, 1e6)
    kind = st.sampled_from([0.0, 1.0]) if data.draw(st.booleans()) else st.floats(*ends)
    values = data.draw(st.lists(kind, min_size=1, max_size=40))
    clusters = data.draw(st.lists(st.integers(0, 12), min_size=len(values), max_size=len(values)))
    if difference:
        low, high = cluster_bootstrap(values, clusters, least, greatest)
    else:
        low, high = score_interval(values, clusters, greatest)
    assert (low is None) == (high is None)
    if low is not None:
        assert least <= low < high <= greatest


def test_quantile_by_hand():
    """The smallest value that so many do not exceed: of 1 to 100 the 99th, of 1 to 50 the 50th."""
    assert quantile([*range(100, 0, -1)], 0.99) == 99 and quantile([*range(1, 51)], 0.99) == 50
    assert quantile([3.0], 0.99) == 3 and quantile([1.0, 2.0], 0.5) == 1 and quantile([1.0, math.inf], 0.99) == math.inf
    assert math.isnan(quantile([1.0, math.nan], 0.99))


def test_the_bootstrap_of_a_quantile_draws_whole_groups():
    """Against a plain loop over drawn groups; all of a group comes or none of it."""
    draw = random.Random(1)
    groups = [[draw.expovariate(1) * (1 + i % 3) for _ in range(20 + i)] for i in range(12)]
    low, high = quantile_bootstrap(groups, 0.9)
    plain = sorted(quantile([x for group in draw.choices(groups, k=12) for x in group], 0.9) for _ in range(4000))
    assert low is not None and high is not None and low < quantile([x for g in groups for x in g], 0.9) < high
    assert low == pytest.approx(plain[100], rel=0.1) and high == pytest.approx(plain[3899], rel=0.1)
    assert quantile_bootstrap(groups, 0.9) == (low, high), "the seed is fixed"
    for none in (groups[:4], [[1.0]] * 9, [*groups, [math.inf]], [*groups, [math.nan]]):
        assert quantile_bootstrap(none, 0.9) == (None, None)
