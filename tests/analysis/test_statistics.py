"""The statistics of skimkv analyse, worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from skimkv.analysis import statistics
from skimkv.methods import SubGenStream
from skimkv.stores.base import Shape

H, G, N, D = 2, 2, 40, 8


@pytest.fixture
def qk():
    """q (H,G,m,D) at the positions 20, 30 and 39, and k (H,N,D)."""
    return torch.randn(H, G, 3, D), torch.randn(H, N, D), torch.tensor([20, 30, 39])


def test_scores_end_at_the_query(qk):
    q, k, at = qk
    s = statistics.logits(q, k, at, 0.5).softmax(-1)
    assert torch.equal(s > 0, (torch.arange(N) <= at[:, None]).expand_as(s))
    h, g, i = 1, 0, 1
    by_hand = (k[h, :31] @ q[h, g, i] * 0.5).softmax(-1)
    torch.testing.assert_close(s[h, g, i, :31], by_hand)
    capped = statistics.logits(q, k, at, 0.5, softcap=2.0)
    assert float(capped.max()) <= 2


def test_tokens_of_mass():
    one_hot = torch.eye(5)
    assert statistics.tokens_of_mass(one_hot, 0.9).tolist() == [1] * 5
    even = torch.full((2, 64), 1 / 64)
    assert statistics.tokens_of_mass(even, 0.5).tolist() == [32, 32]
    assert statistics.tokens_of_mass(even, 0.51).tolist() == [33, 33]
    assert statistics.tokens_of_mass(even * 0.5, 0.9).tolist() == [64, 64], "a sink holds the rest: all tokens"
    assert statistics.tokens_of_mass(torch.tensor([0.2, 0.7, 0.1]), 0.8).tolist() == 2


def test_top_mass():
    one_hot = torch.eye(5)
    assert statistics.top_mass(one_hot, 1).tolist() == [1.0] * 5
    even = torch.full((2, 64), 1 / 64)
    assert statistics.top_mass(even, 32).tolist() == [0.5, 0.5]
    assert statistics.top_mass(even, 100).tolist() == [1.0, 1.0], "more than there are: all of it"


def test_kurtosis_and_tail():
    """+1 and -1 alike have z^4 = 1; one in 1 + 99 zeros has p = 0.01, z^4 mean (1 - 3p(1-p)) / (p(1-p))."""
    assert statistics.kurtosis(torch.tensor([1.0, -1.0, 1.0, -1.0])).item() == pytest.approx(-2)
    spike, p = torch.zeros(100), 0.01
    spike[7] = 5.0
    assert statistics.kurtosis(spike).item() == pytest.approx((1 - 3 * p * (1 - p)) / (p * (1 - p)) - 3)
    assert statistics.tail_mass(spike).item() == pytest.approx(0.01 / 0.0026998)
    normal = torch.randn(400_000, generator=torch.Generator().manual_seed(0))
    assert statistics.kurtosis(normal).item() == pytest.approx(0, abs=0.03)
    assert statistics.tail_mass(normal).item() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("channels", ["top", "group", "first", "random"])
def test_with_all_channels_the_logits_are_exact(qk, channels):
    q, k, _ = qk
    exact = q @ k[:, None].mT
    torch.testing.assert_close(statistics.approximate_logits(q, k, D, channels), exact, atol=1e-4, rtol=1e-4)
    assert statistics.agreement(exact, statistics.approximate_logits(q, k, D, channels), 5).min() == 1


def test_projections_by_hand():
    q = torch.tensor([[[[3.0, -4.0, 1.0]], [[5.0, 0.0, 2.0]]]])  # one KV head, two query heads
    k = torch.eye(3)[None]
    assert statistics.approximate_logits(q, k, 1, "top")[0, :, 0].tolist() == [[0, -4, 0], [5, 0, 0]]
    assert statistics.approximate_logits(q, k, 1, "group")[0, :, 0].tolist() == [[3, 0, 0], [5, 0, 0]], (
        "8 against 4 and 3"
    )
    assert statistics.approximate_logits(q, k, 2, "first")[0, :, 0].tolist() == [[3, -4, 0], [5, 0, 0]]


def test_agreement_is_a_share_of_the_k_largest():
    a, b = torch.tensor([9.0, 8, 7, 1, 0]), torch.tensor([9.0, 0, 1, 8, 7])
    assert statistics.agreement(a, b, 1).item() == 1
    assert statistics.agreement(a, b, 2).item() == 0.5
    assert statistics.agreement(a, b, 3).item() == pytest.approx(1 / 3)


def test_alpha(qk):
    """With all channels it is the true mass at every temperature; with one channel, worked by hand."""
    q, k, at = qk
    true = statistics.top_mass(statistics.logits(q, k, at, D**-0.5).softmax(-1), 4)
    for temperature in ("coverage", "sqrt_d", "sqrt_r"):
        torch.testing.assert_close(statistics.estimated_alpha(q, k, at, D, 4, temperature, scale=D**-0.5), true)
    q, k = torch.tensor([[[[3.0, 1.0, 0.0, 0.0]]]]), torch.zeros(1, 2, 4)
    k[0, 1, 0] = 2.0
    for temperature, tau in (("coverage", math.sqrt(4 * 3 / 4)), ("sqrt_d", 2.0), ("sqrt_r", 1.0)):
        found = statistics.estimated_alpha(q, k, torch.tensor([1]), 1, 1, temperature, scale=0.5)
        assert found.item() == pytest.approx(1 / (1 + math.exp(-6 / tau))), temperature


def test_correlation_ratio():
    rows = torch.randn(1, 50).expand(16, 50)  # the same along axis 0
    assert statistics.correlation_ratio(rows, 0) == pytest.approx(1 - 16**-0.5)
    x = torch.tensor([[1.0, 3.0], [-1.0, -3.0]])  # means over axis 1: 2 and -2, over axis 0: 0 and 0
    assert statistics.correlation_ratio(x, 1) == pytest.approx(2 / math.sqrt(5) - 2**-0.5)
    assert statistics.correlation_ratio(x, 0) == pytest.approx(-(2**-0.5))
    assert statistics.correlation_ratio(torch.randn(64, 4000), 0) == pytest.approx(0, abs=0.01)


def test_sparsity():
    """Keys of 0, one of them with a logit of 10 for every query: exp(-10) < 1% of it; before it all are alike."""
    n = 200  # more than a block of queries
    q, k = torch.ones(1, 1, n, 1), torch.zeros(1, n, 1)
    assert statistics.sparsity(q, k, 1.0).item() == 0
    k[0, 0] = 10
    assert statistics.sparsity(q, k, 1.0).item() == pytest.approx(sum(range(n)) / (n * (n + 1) / 2))
    assert statistics.sparsity(q, k, 0.1).item() == 0, "1 in e is more than 1%"


def test_power_law():
    x = torch.arange(1, 50).double()
    assert statistics.fit_power_law(x, 3 * x**-1.5) == (pytest.approx(-1.5), pytest.approx(1))
    slope, fit = statistics.fit_power_law(torch.tensor([1.0, 2.0, 0.0]), torch.tensor([5.0, 5.0, 9.0]))
    assert (slope, fit) == (0, 1), "a flat line; the pair with 0 is left out"
    assert math.isnan(statistics.fit_power_law(torch.ones(3), torch.ones(3))[0])


def test_scores_by_token():
    ids, count, score = statistics.scores_by_token(torch.tensor([7, 3, 7, 9]), torch.tensor([1.0, 2.0, 4.0, 8.0]))
    assert (ids.tolist(), count.tolist(), score.tolist()) == ([3, 7, 9], [1, 2, 1], [2.0, 5.0, 8.0])


def test_founders_are_those_of_the_streaming_store():
    line = torch.tensor([[0.0], [0.5], [2.0], [1.2], [0.9]])
    assert statistics.cluster_founders(line, 1.0).tolist() == [True, False, True, False, False]
    assert statistics.cluster_founders(line, 0.1).all()
    x = torch.randn(1, 1, 60, 4)
    store = SubGenStream(delta=1.5, t=2, s=4).store(Shape(1, 1, 1, 4), torch.float32)
    store.append(x, x)
    assert 1 < int(store.m.sum()) == int(statistics.cluster_founders(x[0, 0], 1.5).sum()) < 60


def test_query_positions():
    assert statistics.query_positions(10, 3).tolist() == [5, 7, 9]
