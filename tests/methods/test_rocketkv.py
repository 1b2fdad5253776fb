"""RocketKV: what stays of a prompt, and which pages of it a step reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from skimkv.methods import RocketKV
from skimkv.stores.base import Shape
from skimkv.testing import Sequences, decode, prompt
from support.hand_worked import given_weights, softmax, step


def test_stage_1_by_hand():
    """The last two queries give tokens 0 .. 6 the weights 0 0 6 0 1 0 2 in all; 3 neighbours share the largest.

    Pooled: 0 6 6 6 1 2 2. Of k = 5 tokens two are the window, and the three of weight 6 stay with it.
    """
    even = [[1] * (i + 1) for i in range(7)]
    rows = [*even, [1e-9, 1e-9, 3, 1e-9, 0.5, 1e-9, 1, 1], [1e-9, 1e-9, 3, 1e-9, 0.5, 1e-9, 1, 1, 1]]
    q, k, v = given_weights(rows)
    method = RocketKV(k=5, window=2, pool=3)
    store = method.store(Shape(1, 1, 1, 9), torch.float32)
    method.prefill(store, q, k, v, scale=1.0)
    assert store.k[0, 0, :5].argmax(-1).tolist() == [1, 2, 3, 7, 8]


def test_stage_2_by_hand():
    """Pages {0,1} {2,3} {4,5} and the open one {6}; q = (3, -2, .5, 0), of which r = 2 channels are read.

    Channel 0 is positive, so each page's largest key counts there, and in channel 1 its smallest. Page 0: (0,1) (1,3):
    3*1 - 2*1 = 1. Page 1: (2,0) (-9,4): 3*2 - 2*0 = 6. Page 2: (1,-1) (0,9): 3*1 + 2*1 = 5. Channel 2 is 9 on page 0,
    but it is not read. top = 4 tokens are page 1 and the open page; the attention uses all channels.
    """
    k = torch.zeros(1, 1, 7, 4)
    k[0, 0, :6, :2] = torch.tensor([[0.0, 1], [1, 3], [2, 0], [-9, 4], [1, -1], [0, 9]])
    k[0, 0, :2, 2] = 9
    k[0, 0, 2, 2] = 1
    v = torch.arange(28.0).reshape(1, 1, 7, 4)
    q = torch.tensor([[[[3.0, -2.0, 0.5, 0.0]]]])
    y, store = step(RocketKV(k=7, page=2, r=2, top=4), q, k, v, scale=1.0)
    weights = softmax((k[0, 0, [2, 3, 6]] @ q[0, 0, 0]).double().numpy())
    expected = torch.from_numpy(weights).float() @ v[0, 0, [2, 3, 6]]
    torch.testing.assert_close(y[0, 0, 0], expected)
    extremes, closed = store.read_page_extremes(torch.tensor([[[0, 1]]]), torch.tensor([[[True, False]]]))
    assert extremes[0, 0].tolist() == [[1, 2, 1], [1, 0, -1]] and closed[0, 0].tolist() == [True] * 3


def test_bytes_by_hand():
    """40 of 100 tokens were kept, 7 came since: 11 closed pages of 4 with one extreme of 5 channels, 3 open tokens."""
    method, shape = RocketKV(k=40, top=12, r=5), Shape(1, 2, 3, 16)
    moved = method.traffic(107, shape, torch.float32, dropped=60)
    rows = 2 * (2 * 4 + 3) + 2
    assert moved.elements == 2 * (rows * 16 + 11 * 5 + 2 * 2 * 16)
    assert moved.bytes == 4 * moved.elements


@pytest.mark.parametrize(("page", "top", "r"), [(4, 12, 3), (1, 6, 8), (5, 20, 1), (3, 300, 4)])
def test_agrees_with_plain_loops(page, top, r):
    """Two groups of queries in float64, page by page, after a prompt that stays whole."""
    H, G, N, D = 2, 3, 38, 8
    x = Sequences.random(Shape(1, H, G, D), N)
    y = step(RocketKV(k=50, page=page, top=top, r=r), x.q[..., -1, :], x.k, x.v, scale=0.4)[0]
    for h in range(H):
        q, keys, values = (t.double().numpy() for t in (x.q[0, h, :, -1], x.k[0, h], x.v[0, h]))
        channels = np.argsort(-np.abs(q).sum(0), kind="stable")[:r]
        closed = (N - 1) // page
        score = np.zeros(closed)
        for g in range(G):
            logits = np.zeros(closed)
            for p in range(closed):
                of_page = keys[p * page : (p + 1) * page]
                for d in channels:
                    extreme = of_page[:, d].max() if q[:, d].sum() > 0 else of_page[:, d].min()
                    logits[p] += q[g, d] * extreme
            covered = np.abs(q[g, channels]).sum() / np.abs(q[g]).sum()
            score += softmax(logits * 0.4 / np.sqrt(covered))
        best = sorted(range(closed), key=lambda p: -score[p])[: top // page - 1]
        rows = [t for p in best for t in range(p * page, (p + 1) * page)] + list(range(closed * page, N))
        for g in range(G):
            expected = torch.from_numpy(softmax(keys[rows] @ q[g] * 0.4) @ values[rows])
            torch.testing.assert_close(y[0, h, g].double(), expected, atol=1e-5, rtol=0)


def test_pages_of_a_second_prompt_and_of_a_store_that_was_taken_back():
    """Bounds are those of the kept keys after each block, and after a rewind as if the later tokens had never come."""
    x = Sequences.random(Shape(2, 2, 2, 16), 120)
    method = RocketKV(k=30, pool=3, page=4, top=8)
    store = prompt(method, x.tokens(0, 70))
    later = x.tokens(70, 100)
    method.prefill(store, later.q, later.k, later.v, scale=0.25)
    kept = store.k[:, :, :28].unflatten(2, (7, 4))
    torch.testing.assert_close(store.pages.first(7), torch.stack([kept.amin(3), kept.amax(3)], 2))
    twin, mark = store.fork(), store.mark()
    decode(method, store, x.tokens(100, 107))
    store.rewind(mark)
    last = x.tokens(110, 120)
    torch.testing.assert_close(decode(method, store, last), decode(method, twin, last))
