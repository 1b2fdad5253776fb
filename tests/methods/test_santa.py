"""SANTA: values that are drawn by the exact softmax weights, and what their mean is in expectation."""

from __future__ import annotations

import pytest
import torch

from skimkv.methods import SANTA
from skimkv.methods.santa import DRAWS, points, shares
from skimkv.ops.hashing import hash_words
from support.hand_worked import given_weights, step


def test_shares_by_hand():
    """Weights .1 .4 .2 .3 have running sums .1 .5 .7 1; the numbers .05 .3 .55 .95 meet rows 0, 1, 2 and 3."""
    p = torch.tensor([[[[0.1, 0.4, 0.2, 0.3], [0.0, 0.25, 0.25, 0.5]]]])
    u = torch.tensor([[[0.05, 0.3, 0.55, 0.95]]])
    expected = torch.tensor([[[[1, 1, 1, 1], [0, 1, 1, 2]]]]) / 4  # .05 | .3 | .55 .95 of running sums 0 .25 .5 1
    torch.testing.assert_close(shares(p, u, sinks=False), expected)
    with_sink = torch.tensor([[[[0.1, 0.4, 0.2, 0.0]]]])  # a sink has .3
    torch.testing.assert_close(shares(with_sink, u, sinks=True)[0, 0, 0], torch.tensor([1, 1, 1, 0]) / 4)


def test_a_number_that_rounds_to_one_meets_the_last_row_with_a_weight():
    """The greatest number below 1 of float64 that is drawn is 1 in float32: no draw is lost, and no row of weight 0."""
    u = torch.tensor([[[1 - 2.0**-27, 0.1]]], dtype=torch.float64).float()
    p = torch.tensor([[[[0.125] * 8 + [0.0]]]])
    assert shares(p, u, sinks=False).tolist() == [[[[0.5, 0, 0, 0, 0, 0, 0, 0.5, 0]]]]


def test_a_step_by_hand():
    """Five tokens with equal keys but one, four stratified draws: the numbers are those of the hash, looked up here."""
    weights = [0.1, 0.3, 0.15, 0.25, 0.2]
    q, k, v = given_weights([[1] * (i + 1) for i in range(4)] + [weights])
    y, store = step(SANTA(s=4), q[..., -1, :], k, v, scale=1.0)
    u = [(j + (int(hash_words(2, 5, 0, j)) >> 1) / 2**31) / 4 for j in range(4)]
    met = [next(n for n in range(5) if sum(weights[: n + 1]) > x) for x in u]
    torch.testing.assert_close(y[0, 0, 0], torch.tensor([met.count(n) / 4 for n in range(5)]))
    assert store.observed() == {"key_rows": 4, "value_rows": len(set(met) - {4})}
    exact, store = step(SANTA(s=5), q[..., -1, :], k, v, scale=1.0)
    torch.testing.assert_close(exact[0, 0, 0], torch.tensor(weights))
    assert store.observed() == {"key_rows": 4, "value_rows": 4}


def test_draws_that_save_nothing_are_not_made(monkeypatch):
    monkeypatch.setattr("skimkv.methods.santa.points", None)
    weights = [0.1, 0.3, 0.15, 0.25, 0.2]
    q, k, v = given_weights([[1] * (i + 1) for i in range(4)] + [weights])
    y, _ = step(SANTA(s=5), q[..., -1, :], k, v, scale=1.0)
    torch.testing.assert_close(y[0, 0, 0], torch.tensor(weights))


@pytest.mark.parametrize("draws", DRAWS)
def test_the_estimate_is_unbiased_and_strata_lower_its_variance(draws):
    """Over 4000 steps with the same weights: the mean of every share within its standard error, and its variance.

    For independent draws the variance of a share is p (1 - p) / s, and for the others at most that. Values that rise
    along the text are nearly equal within an interval, and their mean has a far smaller variance.
    """
    p = 0.1 + torch.rand(1, 1, 1, 60, generator=torch.Generator().manual_seed(0)).pow(3)
    p = (p / p.sum()).expand(4000, -1, -1, -1).double()
    u = points(torch.arange(100, 4100)[:, None], 1, 8, draws)
    share = shares(p, u, sinks=False)[:, 0, 0]
    exact, variance = p[0, 0, 0], share.var(0)
    error = (share.mean(0) - exact) / (variance / 4000).sqrt().clamp_min(1e-9)
    assert float(error.abs().max()) < 4.5 and float(error.square().mean()) < 1.6
    of_independent = exact * (1 - exact) / 8
    if draws == "independent":
        torch.testing.assert_close(variance.sum(), of_independent.sum(), rtol=0.05, atol=0)
    else:
        rising = torch.arange(60).double()
        assert bool((variance < 1.15 * of_independent).all())
        assert (share @ rising).var() < 0.2 * (exact @ rising.square() - (exact @ rising) ** 2) / 8


def test_gradients_are_unbiased_too():
    """The gradient of the query, averaged over steps that differ in their draws only, is that of exact attention."""
    generator = torch.Generator().manual_seed(1)
    k, v, q = (torch.randn(n, 4, generator=generator).double() for n in (12, 12, 1))
    exact = q.clone().requires_grad_()
    ((exact @ k.T).softmax(-1) @ v).sum().backward()
    own = q.clone().requires_grad_()
    p = (own @ k.T).softmax(-1).expand(3000, 1, 1, 12)
    share = shares(p.detach(), points(torch.arange(50, 3050)[:, None], 1, 3, "independent"), sinks=False)
    (torch.where(share > 0, share * p / p.detach(), 0) @ v).sum(-1).mean().backward()
    assert float((own.grad - exact.grad).norm() / exact.grad.norm()) < 0.1
