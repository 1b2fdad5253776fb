"""TopK: FlexGen's exact top-k without renormalising (SparQ appendix G), and SparQ's oracle (fig. 7a)."""

from __future__ import annotations

import numpy as np
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


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("k", [1, 6, 25, 60])
def test_agrees_with_plain_loops_on_ragged_rows(k, softcap):
    B, H, G, N, D, scale = 3, 2, 2, 40, 8, 0.7
    q, K, V = torch.randn(B, H, G, D), torch.randn(B, H, N, D), torch.randn(B, H, N, D)
    pad = [3, 0, 37]
    flexgen, oracle = (output(TopK(k, o), q, K, V, pad, scale, softcap) for o in (False, True))
    equation_6 = output(TopK(k, mean_value=True), q, K, V, pad, scale, softcap)
    for b in range(B):
        for h in range(H):
            keys, values = (x[b, h, pad[b] :].double().numpy() for x in (K, V))
            logits = q[b, h].double().numpy() @ keys.T * scale
            e = np.exp(logits if softcap is None else softcap * np.tanh(logits / softcap))
            s, cached = e / e.sum(1, keepdims=True), len(keys) - 1
            chosen = [*sorted(range(cached), key=lambda n: -s[:, n].sum())[:k], cached]
            y = s[:, chosen] @ values[chosen]
            torch.testing.assert_close(flexgen[b, h].double(), torch.from_numpy(y), atol=1e-5, rtol=0)
            mass = s[:, chosen].sum(1, keepdims=True)
            mean = torch.from_numpy(y + (1 - mass) * values.mean(0))
            torch.testing.assert_close(equation_6[b, h].double(), mean, atol=1e-5, rtol=0)
            y /= mass
            torch.testing.assert_close(oracle[b, h].double(), torch.from_numpy(y), atol=1e-5, rtol=0)
