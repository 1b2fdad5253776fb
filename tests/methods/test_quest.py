"""Quest: an upper bound of every page's scores, and the pages with the largest ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from skimkv.methods import Dense, Quest
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


def test_a_share_with_more_room_gives_the_original_none():
    """After 5000 tokens an eighth more is more than the store itself has allocated."""
    store = Quest(page=8, k=16).store(Shape(1, 1, 1, 8), torch.float32)
    store.append(*torch.randn(2, 1, 1, 5000, 8))
    before = store.allocated
    shared = store.share([0])
    assert store.allocated == before
    assert all(torch.equal(*pair) for pair in zip(shared.read_page_bounds(), store.read_page_bounds(), strict=True))
