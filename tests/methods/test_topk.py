"""TopK: FlexGen's exact top-k without renormalising (SparQ appendix G), and SparQ's oracle (fig. 7a)."""

from __future__ import annotations

import pytest
import torch

from skimkv.methods import TopK
from support.hand_worked import output

pytestmark = pytest.mark.usefixtures("backend")


def given(p):
    """q, K, V whose exact attention weights are p (G,N), the last position current: K = (ln p)^T, q = I, V = I."""
    p = torch.tensor(p)
    G, N = p.shape
    K = torch.zeros(1, 1, N, N)
    K[0, 0, :, :G] = p.log().T
    return torch.eye(N)[None, None, :G], K, torch.eye(N)[None, None]


def test_flexgen_by_hand():
    # eq. 5: y1 = (s * m_s) V. s = .2 .4 .05 .25 | .1, k = 2: positions 1 and 3, and the current; mass .75, not 1
    y = output(TopK(k=2), *given([[0.2, 0.4, 0.05, 0.25, 0.1]]))
    torch.testing.assert_close(y[0, 0, 0], torch.tensor([0, 0.4, 0, 0.25, 0.1]))


def test_oracle_by_hand():
    # the same choice, softmax over the chosen: divided by .75
    y = output(TopK(k=2, oracle=True), *given([[0.2, 0.4, 0.05, 0.25, 0.1]]))
    torch.testing.assert_close(y[0, 0, 0], torch.tensor([0, 0.4, 0, 0.25, 0.1]) / 0.75)


def test_equation_6_by_hand():
    # the quarter that was left out goes to the mean of all values, .2 in every channel
    y = output(TopK(k=2, mean_value=True), *given([[0.2, 0.4, 0.05, 0.25, 0.1]]))
    torch.testing.assert_close(y[0, 0, 0], torch.tensor([0, 0.4, 0, 0.25, 0.1]) + 0.25 * 0.2)


@pytest.mark.parametrize("oracle", [False, True])
def test_a_group_chooses_together(oracle):
    # sums .6 .5 .1: position 0, though head 1 alone prefers 1 (SparQ section 4's rule: sum the softmaxed scores)
    p = [[0.5, 0.25, 0.05, 0.2], [0.1, 0.25, 0.05, 0.6]]
    y = output(TopK(k=1, oracle=oracle), *given(p))
    expected = torch.tensor([[0.5, 0, 0, 0.2], [0.1, 0, 0, 0.6]])
    torch.testing.assert_close(y[0, 0], expected / 0.7 if oracle else expected)
