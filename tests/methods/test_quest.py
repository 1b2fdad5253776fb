"""Quest: an upper bound of every page's scores, and the pages with the largest ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from skimkv.methods import Dense, Quest, parse
from skimkv.stores.base import Shape
from skimkv.testing import Sequences, decode, prompt
from support.hand_worked import output, softmax

pytestmark = pytest.mark.usefixtures("backend")


def test_by_hand():
    """Pages {0,1} {2,3} {4,5} and the open page {6}; q = (1, -2).

    Page 0: keys (0,1) (2,3): max(q low, q high) = 2 - 2 = 0. Page 1: (1,-1) (-1,0): 1 + 2 = 3, though its best score is
    (1 + 2) = 3. Page 2: (4,1) (0,-1): 4 + 2 = 6, a bound that no key of it reaches (2 and 2). k = 4 tokens are two
    pages, of which the open one is one: page 2 is read, and its weights are equal.
    """
    k = torch.tensor([[0, 1], [2, 3], [1, -1], [-1, 0], [4, 1], [0, -1], [0, 0]]).float()[None, None]
    v = torch.eye(7, 2)[None, None].clone()
    v[0, 0] = torch.arange(14).reshape(7, 2)
    q = torch.tensor([[[[1.0, -2.0]]]])
    method = Quest(page=2, k=5)
    low, high, closed = filled(method, k, v).read_page_bounds()
    assert low[0, 0].tolist() == [[0, 1], [-1, -1], [0, -1]] and high[0, 0].tolist() == [[2, 3], [1, 0], [4, 1]]
    assert closed[0, 0].tolist() == [True] * 3
    weights = softmax(np.array([2.0, 2.0, 0.0]))
    expected = torch.from_numpy(weights).float() @ v[0, 0, [4, 5, 6]]
    torch.testing.assert_close(output(method, q, k, v)[0, 0, 0], expected)
    weights = softmax(np.array([3.0, -1.0, 2.0, 2.0, 0.0]))  # k = 6: page 1 too
    expected = torch.from_numpy(weights).float() @ v[0, 0, 2:]
    torch.testing.assert_close(output(Quest(page=2, k=6), q, k, v)[0, 0, 0], expected)


def filled(method, k, v):
    store = method.store(Shape(*k.shape[:2], 1, k.shape[3]), k.dtype)
    store.append(k, v)
    return store


@pytest.mark.parametrize(("k", "pages"), [(4, 1), (7, 1), (8, 2), (11, 2), (12, 3)])
def test_k_is_rounded_down_to_pages(k, pages):
    """With n = 14 cached tokens and pages of 4, the open page has 2 of them."""
    moved = Quest(page=4, k=k).traffic(14, Shape(1, 1, 1, 8), torch.float32)
    rows = (pages - 1) * 4 + 2
    bounds = 3 * 2 * 8 + 2 * 2 * 8  # of three closed pages, and read and written of the open one
    assert moved.elements == (2 * rows + 2) * 8 + bounds


def plain(q, K, V, page, k, scale, softcap):
    """One KV head in float64, loop by loop: q (G,D), K and V (N,D), the last position current."""
    cap = (lambda x: x) if softcap is None else (lambda x: softcap * math.tanh(x / softcap))
    (G, D), N = q.shape, len(K)
    closed = (N - 1) // page
    bounds = np.zeros((G, closed))
    for g in range(G):
        for p in range(closed):
            keys = K[p * page : (p + 1) * page]
            bound = sum(max(q[g, d] * keys[:, d].min(), q[g, d] * keys[:, d].max()) for d in range(D))
            assert bound >= (keys @ q[g]).max() - 1e-12
            bounds[g, p] = cap(bound * scale)
    score = sum((softmax(b) for b in bounds), np.zeros(closed)) if closed else []
    chosen = sorted(range(closed), key=lambda p: -score[p])[: k // page - 1]
    rows = [t for p in chosen for t in range(p * page, (p + 1) * page)] + list(range(closed * page, N))
    logits = np.vectorize(cap)(K[rows] @ q.T * scale)  # (m,G)
    return np.stack([softmax(logits[:, g]) @ V[rows] for g in range(G)])


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("page", "k"), [(4, 12), (5, 5), (1, 7), (16, 32), (7, 21), (64, 64)])
def test_agrees_with_plain_loops_on_ragged_rows(page, k, softcap):
    B, H, G, N, D, scale, pad = 3, 2, 2, 41, 8, 0.7, [0, 3, 36]
    q, K, V = torch.randn(B, H, G, D), torch.randn(B, H, N, D), torch.randn(B, H, N, D)
    y = output(Quest(page, k), q, K, V, pad, scale, softcap)
    for b in range(B):
        for h in range(H):
            own = (x[b, h].double().numpy() for x in (q, K[:, :, pad[b] :], V[:, :, pad[b] :]))
            expected = torch.from_numpy(plain(*own, page, k, scale, softcap))
            torch.testing.assert_close(y[b, h].double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("forgotten", [1, 3, 4, 9, 250])
@pytest.mark.parametrize("spec", ["Quest(page=4, k=8)", "Quest(page=10, k=30, kv='int8')"])
def test_crop_opens_a_page_again(spec, forgotten):
    """Tokens are forgotten and others take their places: as if the others had come at once, ragged rows too."""
    method, x = parse(spec), Sequences.random(Shape(2, 2, 2, 16), 310)
    store = prompt(method, x.tokens(0, 280), [0, 21])
    kept = 280 - forgotten
    store.crop(forgotten)
    assert store.nbytes == prompt(method, x.tokens(0, kept), [0, min(21, kept)]).nbytes
    other = Sequences.random(Shape(2, 2, 2, 16), 20, seed=1)
    fresh = prompt(method, x.tokens(0, kept), [0, 21])
    torch.testing.assert_close(decode(method, store, other), decode(method, fresh, other), atol=1e-6, rtol=1e-5)


def test_a_store_that_shares_a_prompt_has_bounds_of_its_own():
    method, x = Quest(page=8, k=16), Sequences.random(Shape(2, 2, 2, 16), 310)
    dense, store = prompt(Dense(), x.tokens(0, 300)), method.store(x.shape, torch.float32)
    store.adopt(dense, 300)
    whole = prompt(method, x.tokens(0, 300))
    shared = whole.share([0, 1])
    assert shared.pages is not whole.pages
    y = [decode(method, each, x.tokens(300, 310)) for each in (store, shared, whole)]
    torch.testing.assert_close(y[0], y[2], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(y[1], y[2], atol=0, rtol=0)
