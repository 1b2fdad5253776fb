"""TopP: the smallest set of rows that holds a share of the softmax weights, by Twilight's estimate."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from skimkv.methods import TopP
from skimkv.methods.topp import smallest_set
from skimkv.stores.base import Shape
from skimkv.stores.quantise import GROUP
from support.hand_worked import given_weights, output, softmax, step

WEIGHTS = [0.05, 0.3, 0.1, 0.35, 0.15, 0.05]


@pytest.mark.parametrize(
    ("p", "rows"),
    [(0.3, [3]), (0.35, [3]), (0.36, [1, 3]), (0.65, [1, 3]), (0.7, [1, 3, 4]), (0.9, [1, 2, 3, 4])],
)
def test_by_hand(p, rows):
    """Weights .35 .3 .15 .1 .05 .05: the sums are .35 .65 .8 .9 .95 1. The current token, the last, is always read."""
    q, k, v = given_weights([[1] * (i + 1) for i in range(5)] + [WEIGHTS])
    y, store = step(TopP(p), q[..., -1, :], k, v, scale=1.0)
    kept = torch.zeros(6)
    kept[[*rows, 5]] = torch.tensor(WEIGHTS)[[*rows, 5]]
    torch.testing.assert_close(y[0, 0, 0], kept / kept.sum())
    assert store.observed() == {"key_rows": len(rows), "value_rows": len(rows)}


def test_a_group_reads_the_union_and_attends_to_all_of_it():
    """Query 0 needs row 0 for a half of its weights, query 1 row 1; both attend to rows 0, 1 and the current one."""
    weights = torch.tensor([[0.6, 0.1, 0.2, 0.1], [0.1, 0.7, 0.1, 0.1]])
    k = torch.zeros(1, 1, 4, 4)
    k[0, 0, :, :2] = weights.log().T
    y = output(TopP(0.5), torch.eye(4)[None, None, :2], k, torch.eye(4)[None, None])
    kept = weights.clone()
    kept[:, 2] = 0
    torch.testing.assert_close(y[0, 0], kept / kept.sum(1, keepdim=True))


def test_a_sink_counts_as_held():
    """Rows have .4 and .2 of the weights, a sink the other .4: .5 needs one row, and .85 needs both."""
    weights = torch.tensor([[0.4, 0.2]])
    assert smallest_set(weights, 0.5, sinks=True).tolist() == [[True, False]]
    assert smallest_set(weights, 0.85, sinks=True).tolist() == [[True, True]]
    assert smallest_set(weights, 0.3, sinks=True).tolist() == [[False, False]], "the sink alone holds that much"
    assert smallest_set(torch.tensor([0.25, 0.25, 0.25, 0.25]), 0.5, sinks=False).tolist() == [True, True, False, False]


@pytest.mark.parametrize("p", [0.3, 0.8, 0.99])
def test_agrees_with_plain_loops_on_an_index_in_four_bits(p):
    """One closed group of 256 tokens is quantised channel by channel; the 20 after it are read in full precision."""
    H, G, N, D = 2, 3, GROUP + 20, 8
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, H, n, D, generator=generator) for n in (G, N, N))
    y = output(TopP(p), q, k, v)
    for h in range(H):
        keys, coded = k[0, h].double().numpy(), k[0, h].double().numpy().copy()
        low, high = keys[:GROUP].min(0), keys[:GROUP].max(0)
        size = (high - low) / 15
        coded[:GROUP] = low + size * np.round((keys[:GROUP] - low) / size)
        read = {N - 1}
        for g in range(G):
            weights, held = softmax(coded @ q[0, h, g].double().numpy()), 0.0
            for n in np.argsort(-weights):
                if held >= p:
                    break
                read.add(int(n))
                held += weights[n]
        rows = sorted(read)
        for g in range(G):
            expected = softmax(keys[rows] @ q[0, h, g].double().numpy()) @ v[0, h, rows].double().numpy()
            torch.testing.assert_close(y[0, h, g].double(), torch.from_numpy(expected), atol=1e-5, rtol=0)


def test_bytes_in_closed_form():
    """D = 16 in float32, n = 600 cached tokens: 512 in 4 bits, 88 and the written one in full, 2 scales of 2 groups."""
    index = 512 * 16 // 2 + 88 * 16 * 4 + 2 * 2 * 16 * 4 + 16 * 4
    rows = (2 * 40 + 2) * 16 * 4
    assert TopP(0.9).traffic(600, Shape(1, 1, 4, 16), torch.float32, 40, 40).bytes == index + rows
