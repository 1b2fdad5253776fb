"""VAttention: certain rows and a sample of the others, whose size follows from a bound of the error."""

from __future__ import annotations

from statistics import NormalDist

import pytest
import torch

from skimkv.methods import Dense, VAttention
from skimkv.methods.vattention import certain_rows, random_order
from skimkv.ops.hashing import hash_words
from skimkv.stores.base import Shape
from skimkv.testing import Sequences, decode, prompt
from support.hand_worked import step


def test_certain_rows_by_hand():
    """Ten tokens: 0 is first, 8 and 9 are recent and current, 3 and 6 are the best of the others."""
    score = torch.tensor([[[0.9, 0.1, 0.2, 0.5, 0.1, 0.0, 0.4, 0.1, 0.8, 0.1, 0.0]]])
    chosen = certain_rows(score, torch.tensor([[[10]]]), sinks=1, local=1, k=2)
    assert chosen[0, 0].nonzero()[:, 0].tolist() == [0, 3, 6, 8, 9]


def test_the_size_of_the_sample_by_hand():
    """One certain row of e^0 = 1, a base sample of e^l = .2 and .6 out of n_s = 100 rows; epsilon .1, delta .1.

    D = 1 + 100 * .4 = 41, sigma^2 = .08, z = 1.645: b = 1.645^2 * 100^2 * .08 / 4.1^2 = 128.8, which is all 100 rows;
    with epsilon .5 it is 5.2, so 6 rows.
    """
    logits = torch.tensor([[[[1.0, 0.2, 0.6]]]]).log()
    values, sampled = torch.tensor([[[[1.0], [1.0], [3.0]]]]), torch.tensor([[[False, True, True]]])

    def size(**settings):
        return int(VAttention(delta=0.1, **settings).sample_size(logits, values, sampled, torch.tensor([[100]])))

    z = NormalDist().inv_cdf(0.95)
    assert z**2 * 100**2 * 0.08 / 4.1**2 == pytest.approx(128.8, abs=0.1)
    assert (size(epsilon=0.1), size(epsilon=0.5), size(epsilon=9)) == (100, 6, 2)
    # the output: e^l v = .2 and 1.8 of variance 1.28, N = 1 + 100 * 1 = 101, epsilon 2 -> .5, z = 1.96 (delta / 4)
    assert NormalDist().inv_cdf(0.975) ** 2 * 100**2 * 1.28 / (0.5 * 101) ** 2 == pytest.approx(19.3, abs=0.1)
    assert size(epsilon=2.0, verified="output") == 20
    sink = VAttention(epsilon=0.5, delta=0.1).sample_size(
        logits, values, sampled, torch.tensor([[100]]), torch.tensor([[41.0]]).log()
    )
    assert int(sink) == 2, "a sink with half of the weight halves the error: 5.2 / 4"


def test_a_step_by_hand():
    """Rows of one weight have no variance, so the base sample is the sample: three rows stand for the other eight.

    The first token, the best one, and the current one have twice the weight: 2 v_0 + 2 v_9 + 8 (mean of the drawn).
    """
    k, v = torch.zeros(1, 1, 10, 16), torch.eye(16)[None, None, :10]
    k[0, 0, [0, 9], 0] = torch.tensor(2.0).log()
    q = torch.zeros(1, 1, 1, 16)
    q[..., 0] = 1
    y, store = step(VAttention(k=1, base=3, sinks=0, local=0), q, k, v, scale=1.0)
    order = sorted(range(9), key=lambda n: int(hash_words(3, 10, 0, n)))
    expected = torch.zeros(16)
    expected[[0, 9]] = 2
    expected[[n for n in order if n != 0][:3]] = 8 / 3
    torch.testing.assert_close(y[0, 0, 0], expected / 12)
    assert store.observed() == {"key_rows": 4, "value_rows": 4}


def test_the_order_is_uniform():
    """Over 3000 steps each of 40 rows is among the first 10 in a quarter of them, and each pair as it should be."""
    rest = torch.ones(3000, 1, 40, dtype=torch.bool)
    drawn = (random_order(rest, torch.arange(100, 3100)[:, None, None]) < 10)[:, 0].double()
    assert bool((drawn.sum(-1) == 10).all())
    error = (drawn.mean(0) - 0.25) / (0.25 * 0.75 / 3000) ** 0.5
    assert float(error.abs().max()) < 4.5
    together = drawn.T @ drawn / 3000 - 10 * 9 / (40 * 39)
    assert float(together.fill_diagonal_(0).abs().max()) < 5 * (0.06 / 3000) ** 0.5


@pytest.mark.parametrize("epsilon", [0.3, 0.6])
def test_the_output_errs_by_more_than_epsilon_as_seldom_as_promised(epsilon):
    """600 heads that attend to everything, with values that do not cancel: at most delta of them beyond epsilon."""
    x = Sequences.random(Shape(1, 600, 1, 8), 901)
    x = x._replace(q=0.5 * x.q, v=x.v + 1)
    method = VAttention(epsilon, delta=0.2, k=20, base=40, verified="output")
    store = prompt(method, x.tokens(0, 900))
    y = decode(method, store, x.tokens(900, 901))
    dense = decode(Dense(), prompt(Dense(), x.tokens(0, 900)), x.tokens(900, 901))
    error = (y - dense).norm(dim=-1) / dense.norm(dim=-1)
    assert float((error > epsilon).double().mean()) < 0.2
    assert float(error.mean()) > epsilon / 20, "it does not read far more than it needs"
    assert 80 <= store.observed()["key_rows"] / 600 < 880
