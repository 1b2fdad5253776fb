"""SubGen as its experiments run it (section 3.2): k centres of the keys, chosen once, and the most recent tokens.

Queries of zero and values of unit vectors turn decoding into a list of the positions attended to.
"""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skimkv.methods import SubGen
from skimkv.stores.base import Shape

pytestmark = pytest.mark.usefixtures("backend")


def start(method, keys, prompts=None, pad=None):
    """A store after the prompt, or its blocks: keys (B,H,n,D) lists or tensor; values tell the position of a row."""
    keys = torch.as_tensor(keys, dtype=torch.float32)
    B, H, n, D = keys.shape
    store = method.store(Shape(B, H, 1, max(D, 64)), torch.float32)
    k = torch.zeros(B, H, n, max(D, 64))
    k[..., :D] = keys
    v, pads = torch.zeros_like(k), pad or [0] * B
    for b, p in enumerate(pads):
        v[b, :, p:] = torch.eye(k.shape[-1])[: n - p]
    for block in zip(*(x.split(prompts or n, 2) for x in (k, v)), strict=True):
        method.prefill(store, torch.zeros_like(block[0])[:, :, None], *block, scale=1.0, pad=pad)
    return store


def attended(method, store, key=0.0):
    """One decode step: the positions each head of each row attended to, and the store then holds the new token."""
    B, H, G, D = store.shape
    k, v = torch.zeros(B, H, D), torch.zeros(B, H, D)
    k[..., 0] = key
    for b, n in enumerate(store.lengths):
        v[b, :, n] = 1
    y = method.decode(store, torch.zeros(B, H, G, D), k, v, scale=1.0)[:, :, 0]
    found = [[y[b, h].nonzero()[:, 0].tolist() for h in range(H)] for b in range(B)]
    for b in range(B):
        for h in range(H):
            torch.testing.assert_close(y[b, h, found[b][h]], torch.full((len(found[b][h]),), 1 / len(found[b][h])))
    return found


def line(*points):
    return [[[[float(x)] for x in points]]]


def test_greedy_k_centre_by_hand():
    """Points 0 1 10 4 7 and two recent tokens. First 0; farthest 10; then distances 1: 1, 4: 4, 7: 3, so 4; then 7."""
    points = line(0, 1, 10, 4, 7, 100, 100)
    for k, centres in ((1, [0]), (2, [0, 2]), (3, [0, 2, 3]), (4, [0, 2, 3, 4])):
        method = SubGen(k=k, recent=2)
        assert attended(method, start(method, points))[0][0] == [*centres, 5, 6, 7]


def test_centres_come_from_the_tokens_that_are_not_recent():
    # 100 is far from all others, and recent: it is kept once and takes no centre
    method = SubGen(k=2, recent=3)
    assert attended(method, start(method, line(0, 5, 3, 100, 100, -90)))[0][0] == [0, 1, 3, 4, 5, 6]


def test_the_window_slides_and_the_centres_stay():
    """The selection is made once: a new key far from every centre lives for `recent` steps, like any other."""
    method = SubGen(k=2, recent=2)
    store = start(method, line(0, 1, 10, 3, 4, 5))
    assert store.filled == [4] and store.k.shape[2] == 4
    seen = [attended(method, store, key=50.0 * (i == 0))[0][0] for i in range(6)]
    assert seen == [[0, 2, now - 2, now - 1, now] for now in range(6, 12)]


@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_a_prompt_within_the_budget_is_kept_whole(n):
    method = SubGen(k=3, recent=2)
    store = start(method, line(*range(n)))
    assert attended(method, store)[0][0] == list(range(n + 1))
    for _ in range(8 - n):
        attended(method, store)
    assert attended(method, store)[0][0] == [0, 1, 2, 7, 8, 9]  # the first k are the centres, the rest slides


def test_heads_and_padded_rows_choose_on_their_own():
    method = SubGen(k=2, recent=1)
    a, b = line(0, 1, 9, 2, 3)[0][0], line(0, 5, 1, 2, 3)[0][0]
    both = start(method, [[a, b], [b, a]])
    assert attended(method, both) == [[[0, 2, 4, 5], [0, 1, 4, 5]], [[0, 1, 4, 5], [0, 2, 4, 5]]]
    padded = [[[*line(777, 777)[0][0], *a]], [[*a, *line(4, 4)[0][0]]]]
    assert attended(method, start(method, padded, pad=[2, 0])) == [[[0, 2, 4, 5]], [[0, 2, 6, 7]]]


def test_equal_keys_are_distinct_tokens():
    method = SubGen(k=3, recent=1)
    (found,) = attended(method, start(method, line(2, 2, 2, 2, 2)))[0]
    assert len(found) == 5 and found[-2:] == [4, 5]


def test_a_second_block_is_clustered_with_what_is_held():
    """Held after 0 1 10 4 7 | 5: centres 0 10, recent 5. Then 6 20 8: of 0 10 5 6 20 (8 is recent) 0 and 20 stay."""
    method = SubGen(k=2, recent=1)
    store = start(method, line(0, 1, 10, 4, 7, 5, 6, 20, 8), prompts=[6, 3])
    assert attended(method, store)[0][0] == [0, 7, 8, 9]


def radius(points, centres):
    return max(min((sum((a - b) ** 2 for a, b in zip(p, c, strict=True))) ** 0.5 for c in centres) for p in points)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=3, max_size=9), st.integers(1, 3))
def test_at_most_twice_the_optimal_radius(points, k):
    """Dyer and Frieze 1985: the guarantee of the greedy choice, against every choice of k of the points."""
    method = SubGen(k=k, recent=1)
    keys = [[[list(map(float, p)) for p in [*points, (0, 0)]]]]
    (found,) = attended(method, start(method, keys))[0]
    centres = [points[i] for i in found if i < len(points)]
    if len(points) > k:
        assert len(centres) == k
    best = min(radius(points, c) for c in combinations(points, min(k, len(points))))
    assert radius(points, centres) <= 2 * best + 1e-6
