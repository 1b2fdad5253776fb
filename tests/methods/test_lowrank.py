"""LowRank: choose by a fixed random orthonormal projection (the baseline of SparQ fig. 7a)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from skimkv.methods import LowRank
from skimkv.stores.base import Shape
from support.hand_worked import output

pytestmark = pytest.mark.usefixtures("backend")


def projection(method, H=3, D=16):
    P = method.store(Shape(1, H, 1, D), torch.float32).projection
    assert P.shape == (H, D, method.r)
    return P.double()


@pytest.mark.parametrize("r", [1, 5, 16])
def test_columns_are_orthonormal(r):
    P = projection(LowRank(r=r, k=4))
    eye = torch.eye(r, dtype=torch.float64).expand(3, r, r)
    torch.testing.assert_close(P.transpose(1, 2) @ P, eye, atol=1e-6, rtol=0)


def test_one_projection_per_head_and_seed():
    P = projection(LowRank(r=4, k=4))
    assert torch.equal(P, projection(LowRank(r=4, k=9)))
    assert torch.equal(P, projection(LowRank(r=4, k=4, seed=0)))
    assert (P - projection(LowRank(r=4, k=4, seed=1))).abs().max() > 0.1
    assert (P[0] - P[1]).abs().max() > 0.1 and (P[1] - P[2]).abs().max() > 0.1


def test_directions_are_spread_evenly():
    # scores see P P^T alone (column signs are free): over many heads E[P P^T] = (r/D) I, no channel is preferred
    P = projection(LowRank(r=4, k=4), H=800)
    mean = (P @ P.transpose(1, 2)).mean(0)
    torch.testing.assert_close(mean, torch.eye(16, dtype=torch.float64) / 4, atol=0.03, rtol=0)


@pytest.mark.parametrize("k", [1, 8, 20])
def test_agrees_with_plain_loops_on_ragged_rows(k):
    B, H, G, N, D, scale = 2, 2, 3, 33, 12, 12**-0.5
    q, K, V = torch.randn(B, H, G, D) * 3, torch.randn(B, H, N, D), torch.randn(B, H, N, D)
    pad, method = [0, 11], LowRank(r=3, k=k, seed=5)
    y, P = output(method, q, K, V, pad, scale), projection(method, H, D).numpy()
    for b in range(B):
        for h in range(H):
            keys, values, x = (t.double().numpy() for t in (K[b, h, pad[b] :], V[b, h, pad[b] :], q[b, h]))
            e = np.exp((x @ P[h]) @ (keys @ P[h]).T * scale)
            rank, cached = (e / e.sum(1, keepdims=True)).sum(0), len(keys) - 1
            chosen = [*sorted(range(cached), key=lambda n: -rank[n])[:k], cached]
            w = np.exp(x @ keys[chosen].T * scale)
            expected = torch.from_numpy(w / w.sum(1, keepdims=True) @ values[chosen])
            torch.testing.assert_close(y[b, h].double(), expected, atol=1e-5, rtol=0)
