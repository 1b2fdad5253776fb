"""SparQ against its paper (Ribar et al., ICML 2024): examples worked by hand; test_channels.py has its algorithm 1."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from skimkv.methods import SparQ
from support.hand_worked import step

pytestmark = pytest.mark.usefixtures("backend")


def by_hand():
    """D = 4, r = 2, five positions of which the last is current, k = 2 with local = 1.

    q = (5, -4, 3.5, 3.5): i1 = {0, 1}, coverage 9/16, so by eq. 9 tau = sqrt(4 * 9/16) = 1.5.
    K[:, 0] = 0.3 ln w and K[:, 1] = 0 give q[i1].K/tau = ln w; K[:, 2] is set so that q.K/2 = ln e.
        w = 4 1 3 1 1  ->  s_hat = .4 .1 .3 .1 .1 ;  e = 1 9 9 2 1
    Chosen: 3 (local), 0 (the best of the rest), 4 (current): alpha = .4 + .1 + .1 = .6,
    y3 = (1 V0 + 2 V3 + 1 V4) / 4 (eq. 8), y = .6 y3 + .4 mean(V) (eq. 10).
    """
    q = torch.tensor([5.0, -4.0, 3.5, 3.5])
    w, e = torch.tensor([4.0, 1, 3, 1, 1]), torch.tensor([1.0, 9, 9, 2, 1])
    K = torch.zeros(5, 4)
    K[:, 0] = 0.3 * w.log()
    K[:, 2] = (2 * e.log() - 5 * K[:, 0]) / 3.5
    V = torch.tensor([[8.0, 0, 0, 0], [0, 10, 0, 0], [0, 0, 20, 0], [0, 4, 0, 0], [0, 0, 0, 4]])
    return q[None, None, None], K[None, None], V[None, None]


Y3 = torch.tensor([2.0, 2.0, 0.0, 1.0])
V_MEAN = torch.tensor([1.6, 2.8, 4.0, 0.8])


def test_by_hand_with_mean_value():
    y, store = step(SparQ(r=2, k=2, local=1), *by_hand())  # mean_value=None is on for G = 1
    torch.testing.assert_close(store.v_mean[0, 0], V_MEAN)
    torch.testing.assert_close(y[0, 0, 0], 0.6 * Y3 + 0.4 * V_MEAN)


@pytest.mark.parametrize(("temperature", "tau"), [("coverage", 1.5), ("sqrt_d", 2.0), ("sqrt_r", math.sqrt(2))])
def test_temperatures(temperature, tau):
    # the example above: q[i1].K = 1.5 ln w, so s_hat is proportional to w^(1.5/tau); fig. 7b's ablation
    w = np.array([4.0, 1, 3, 1, 1]) ** (1.5 / tau)
    alpha = float((w[0] + w[3] + w[4]) / w.sum())
    y, _ = step(SparQ(r=2, k=2, local=1, temperature=temperature), *by_hand())
    torch.testing.assert_close(y[0, 0, 0], alpha * Y3 + (1 - alpha) * V_MEAN)


def test_group_chooses_channels_by_the_sum_of_absolute_queries():
    """Section 4, GQA: |(3,2,0,0)| + |(0,-2,3,0)| = (3,4,3,0): channel 1, the first choice of neither head.

    tau = sqrt(4 * 2/5) = 1.265 for both; q[1] K[:, 1] / tau = (0, 7.9, 0) and (0, -7.9, 0), the last position current:
    s_hat sums to .50 at position 0 and 1.00 at position 1. By channel 0 or 2, position 0 would win.
    Then exact attention over 1 and 2: logits q.K/2 = (5, 0) and (-5, 0).
    """
    q = torch.tensor([[3.0, 2, 0, 0], [0, -2, 3, 0]])[None, None]
    K = torch.tensor([[9.0, 0, 9, 0], [0, 5, 0, 0], [0, 0, 0, 0]])[None, None]
    y, _ = step(SparQ(r=1, k=1, local=0), q, K, torch.eye(4)[None, None, :3])
    p = 1 / (1 + math.exp(-5))
    torch.testing.assert_close(y[0, 0], torch.tensor([[0, p, 1 - p, 0], [0, 1 - p, p, 0]]))


def grouped():
    """Each query head sees its own channel; s_hat is given outright (D = 2 = r, so tau = sqrt(2)).

    head 0: .5 .25 .05 | .2      sum over the group: .6 .5 .1
    head 1: .1 .25 .05 | .6      product (what a sum of logits ranks): .05 .0625 .0025
    """
    p = torch.tensor([[0.5, 0.25, 0.05, 0.2], [0.1, 0.25, 0.05, 0.6]])
    V = torch.tensor([[1.0, 0], [0, 1], [1, 1], [-1, 1]])
    return p, torch.eye(2)[None, None], (p.log() * math.sqrt(2)).T[None, None].contiguous(), V[None, None]


def test_group_sums_softmaxed_scores_not_logits():
    _, q, K, V = grouped()
    y, store = step(SparQ(r=2, k=1, local=0), q, K, V)  # position 0 and the current; mean_value is off for G > 1
    assert store.v_mean is None
    torch.testing.assert_close(y[0, 0, 0], (0.5 * V[0, 0, 0] + 0.2 * V[0, 0, 3]) / 0.7)
    torch.testing.assert_close(y[0, 0, 1], (0.1 * V[0, 0, 0] + 0.6 * V[0, 0, 3]) / 0.7)


def test_a_zero_query_attends_evenly():
    # eq. 9 is 0/0 here: every score is equal, so with k >= N the answer is dense attention's, the mean of V
    k, v = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    y, _ = step(SparQ(r=2, k=20), torch.zeros(1, 2, 1, 8), k, v)
    torch.testing.assert_close(y[:, :, 0], v.mean(2))
    q = torch.zeros(1, 2, 2, 8)
    q[:, :, 0, :2], q[:, :, 1, 5] = 4.0, 1.0  # the second head has nothing in the channels the group chose
    y, _ = step(SparQ(r=2, k=20), q, k, v)
    dense = (q @ k.transpose(-1, -2) * 8**-0.5).softmax(-1) @ v
    torch.testing.assert_close(y, dense)
