"""SnapKV: the last queries of a prompt choose which of its tokens stay; every later token stays."""

from __future__ import annotations

import pytest
import torch

from skimkv.methods import Dense, SnapKV
from skimkv.stores.base import Shape
from support.hand_worked import given_weights

pytestmark = pytest.mark.usefixtures("backend")

# Six tokens: of the queries 4 and 5, the window, tokens 0 .. 3 get .1 .2 .3 .1 and .4 .1 .1 .2: sums .5 .3 .4 .3
PROMPT = [[1], [1, 9], [1, 1, 9], [1, 9, 9, 9], [0.1, 0.2, 0.3, 0.1, 0.3], [0.4, 0.1, 0.1, 0.2, 0.1, 0.1]]


def filled(method, rows, later=0):
    """A store that has read these rows of weights as a prompt, but for the `later` last ones, which it decodes."""
    q, k, v = given_weights(rows)
    n = len(rows) - later
    store = method.store(Shape(1, 1, 1, len(rows)), torch.float32)
    method.prefill(store, q[..., :n, :], k[:, :, :n], v[:, :, :n], scale=1.0)
    y = [method.decode(store, q[..., i, :], k[:, :, i], v[:, :, i], scale=1.0) for i in range(n, len(rows))]
    return store, y


def held(store, b=0, h=0):
    """The positions that a head holds, in order; values are unit vectors."""
    return store.v[b, h, : store.filled[b]].argmax(-1).tolist()


@pytest.mark.parametrize(("k", "kept"), [(2, [4, 5]), (3, [0, 4, 5]), (4, [0, 2, 4, 5]), (6, [0, 1, 2, 3, 4, 5])])
def test_the_window_chooses_by_hand(k, kept):
    store, _ = filled(SnapKV(k=k, window=2, pool=1), PROMPT)
    assert held(store) == kept and store.lengths == [6]


def test_neighbours_share_their_weights_by_hand():
    """pool = 3: sums of a window of one, .05 .05 .3 .05 .05 .2 .2, become .1 .4 .4 .4 .3 .45 .4 thirds: 5 is best."""
    rows = [[1] * (i + 1) for i in range(7)]
    store, _ = filled(SnapKV(k=2, window=1, pool=3), [*rows, [0.05, 0.05, 0.3, 0.05, 0.05, 0.2, 0.2, 0.1]])
    assert held(store) == [5, 7]
    store, _ = filled(SnapKV(k=2, window=1, pool=1), [*rows, [0.05, 0.05, 0.3, 0.05, 0.05, 0.2, 0.2, 0.1]])
    assert held(store) == [2, 7]


def test_every_later_token_stays():
    later = [[1, 9, 2, 9, 1, 1, 1], [2, 9, 1, 9, 1, 1, 1, 1], [1, 9, 1, 9, 1, 1, 1, 1, 2]]
    store, y = filled(SnapKV(k=4, window=2, pool=1), [*PROMPT, *later], later=3)
    assert held(store) == [0, 2, 4, 5, 6, 7, 8]
    for i, (out, row) in enumerate(zip(y, later, strict=True)):
        expected = torch.zeros(9)
        kept = [0, 2, 4, 5, *range(6, 7 + i)]
        expected[kept] = torch.tensor([float(row[p]) for p in kept])
        torch.testing.assert_close(out[0, 0, 0], expected / expected.sum())


def test_the_default_window_is_32_and_at_most_half_of_the_budget():
    assert [SnapKV(k=k).observed_tokens(k) for k in (1, 2, 9, 64, 1000)] == [1, 1, 4, 32, 32]
    assert [SnapKV(k=0.5, window=8).observed_tokens(k) for k in (3, 20)] == [3, 8]


def test_a_share_of_every_row_s_prompt():
    method, n, pad = SnapKV(k=0.25), 40, [0, 20, 37]
    store = method.store(Shape(3, 2, 1, 8), torch.float32)
    x = torch.randn(3, 2, n, 8)
    method.prefill(store, x[:, :, None], x, x, scale=0.5, pad=pad)
    assert store.filled == [10, 5, 1] and store.lengths == [40, 20, 3]
    assert store.nbytes == 2 * (10 + 5 + 1) * 2 * 8 * 4


@pytest.mark.parametrize("kv", [None, "int8"])
def test_what_a_store_moves_and_holds_after_many_steps(kv):
    """Counted and closed form, after a prompt of 50 and 200 tokens: k + 200 rows; the slots have grown on the way."""
    method, shape = SnapKV(k=20, kv=kv), Shape(2, 2, 2, 16)
    x = torch.randn(2, 2, 250, 16)
    store = method.store(shape, torch.float32)
    q = torch.randn(2, 2, 2, 250, 16)
    method.prefill(store, q[..., :50, :], x[:, :, :50], x[:, :, :50], scale=0.25, pad=[0, 7])
    for i in range(50, 250):
        method.decode(store, q[..., i, :], x[:, :, i], x[:, :, i], scale=0.25)
    assert store.filled == [220, 220] and store.lengths == [250, 243]
    assert store.observed() == {"dropped": 53} and store.observed(1) == {"dropped": 23}
    assert store.traffic_depends_on_data
    row = method.row_format(16).nbytes(1, torch.float32)
    assert store.nbytes == 2 * 2 * 220 * 2 * row <= store.allocated
    assert method.bound(250, shape._replace(B=1), torch.float32, **store.observed(0)) == 2 * 220 * 2 * row
    rows = 2 * (2 * 220 + 2)  # of one row of the batch, in two heads
    expected = sum(int(n * size) for n, size in method.row_format(16).traffic(rows, torch.float32))
    assert method.traffic(250, shape._replace(B=1), torch.float32, **store.observed(0)).bytes == expected


def test_a_later_block_chooses_anew_among_all_that_is_kept():
    rows = [*PROMPT, [1] * 7, [0.3, 0.5, 0.05, 0.5, 0.01, 0.02, 0.02, 0.1]]
    q, k, v = given_weights(rows)
    method = SnapKV(k=4, window=1, pool=1)  # of the first block the last query alone chooses: 0, 3, and the newer of .1
    store = method.store(Shape(1, 1, 1, 8), torch.float32)
    for part in (slice(0, 6), slice(6, 8)):
        y = method.prefill(store, q[..., part, :], k[:, :, part], v[:, :, part], scale=1.0)
        assert held(store) == ([0, 3, 4, 5] if part.start == 0 else [0, 3, 6, 7]), held(store)
    assert y[0, 0, 0, 1].nonzero()[:, 0].tolist() == [0, 3, 4, 5, 6, 7]  # 1 and 2 were gone


def test_tokens_that_are_appended_without_a_prompt_all_stay():
    x = torch.randn(2, 2, 300, 16)
    stores = [method.store(Shape(2, 2, 1, 16), torch.float32) for method in (SnapKV(k=4), Dense())]
    for store in stores:
        store.append(x[:, :, :290], x[:, :, :290], [0, 31])
    for i in range(290, 300):
        token = x[:, :, None, i], x[:, :, i], x[:, :, i]
        y = [
            method.decode(store, *token, scale=0.25)
            for method, store in zip((SnapKV(k=4), Dense()), stores, strict=True)
        ]
        torch.testing.assert_close(*y, atol=1e-6, rtol=1e-5)
