"""The Sparse Transformer's patterns under a budget: by hand, and against their definition at every length."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from skimkv.methods import Fixed, LMInfinite, StreamingLLM, Strided, parse
from skimkv.stores.base import Shape
from skimkv.testing import Sequences, decode, prompt
from support.hand_worked import D, run

pytestmark = pytest.mark.usefixtures("backend")


def test_strided_by_hand():
    """k = 4, a window of 2: odd positions go first, then 2 and 6 as multiples of 4 come, then 4 as 8 does."""
    _, seen = run(Strided(k=4, local=2), [3], 9)
    assert seen[3:] == [
        [0, 1, 2, 3],
        [0, 1, 2, 3, 4],  # four held, all fetched, and the current 4
        [0, 2, 3, 4, 5],
        [0, 2, 4, 5, 6],
        [0, 4, 5, 6, 7],
        [0, 4, 6, 7, 8],
        [0, 4, 7, 8, 9],
        [0, 4, 8, 9, 10],
        [0, 8, 9, 10, 11],
    ]


def test_fixed_by_hand():
    """k = 5, blocks of 3, one column: 2, 5, 8, 11 ..; with two columns beside a whole block, 2 goes before 5."""
    _, seen = run(Fixed(k=5, l=3, c=1), [1], 13)
    assert seen[5:] == [
        [0, 1, 2, 3, 4, 5],
        [1, 2, 3, 4, 5, 6],  # 0 has gone for 5: no column of an earlier block
        [2, 3, 4, 5, 6, 7],
        [2, 4, 5, 6, 7, 8],
        [2, 5, 6, 7, 8, 9],
        [2, 5, 7, 8, 9, 10],
        [2, 5, 8, 9, 10, 11],
        [5, 8, 9, 10, 11, 12],  # columns only are left to drop: of blocks 0 and 2 before 1
        [5, 8, 10, 11, 12, 13],
    ]


@pytest.mark.parametrize("prompt", [1, 6, 7, 20])
@pytest.mark.parametrize("spec", ["Strided(k=6)", "Strided(k=7, local=1)", "Fixed(k=6)", "Fixed(k=7, l=7, c=3)"])
def test_any_cut_of_the_prompt_holds_the_same(spec, prompt):
    """What is attended to is a function of the position alone."""
    method = parse(spec)
    _, whole = run(method, [1], 29)
    _, seen = run(method, [prompt], 30 - prompt)
    assert seen[prompt:] == whole[prompt:]
    store, blocks = run(method, [4, prompt, 3], 2)
    assert blocks[-2:] == whole[prompt + 7 : prompt + 9]
    assert store.filled == [min(method.k, prompt + 9)] and store.k.shape[2] == method.k


def test_columns_span_the_past():
    """After n tokens: the window or the block, and columns evenly over the rest: no gap above 2 strides."""
    for n in (300, 1000, 4097):
        held = holds(Strided(k=32, local=8), n)
        assert held >= set(range(n - 8, n)) and len(held) == 32
        columns = sorted(held - set(range(n - 8, n)))
        gaps = [b - a for a, b in pairwise(columns)]
        s = min(gaps)
        assert columns[0] == 0 and s & (s - 1) == 0 and all(j % s == 0 for j in columns) and max(gaps) <= 2 * s
        assert s <= 2 * n / 24
        held = holds(Fixed(k=32, l=16, c=2), n)
        assert held >= set(range(n // 16 * 16, n)) and len(held) == 32
        if n > 300:
            assert all(j % 16 >= 14 for j in held if j < (n - 16) // 16 * 16)


def holds(method, n):
    store = method.store(Shape(1, 1, 1, 1), torch.float64)
    x = torch.arange(n, dtype=torch.float64)[None, None, :, None]
    store.append(x, x)
    return {int(p) for p in store.k[0, 0, :, 0]}


def test_a_window_is_its_special_case():
    for method in (Strided(k=9, local=9), LMInfinite(k=9, initial=0)):
        assert holds(method, 50) == set(range(41, 50))
    assert D == 32


@pytest.mark.parametrize(
    ("method", "budgets"),
    [
        (Strided(k=0.25), [10, 5, 1]),
        (Fixed(k=0.25, c=2), [10, 5, 4]),  # a block has its columns, and is half of the budget
        (LMInfinite(k=0.25, initial=6), [10, 7, 7]),  # the first ones and another
        (StreamingLLM(k=0.25), [10, 5, 5]),
    ],
)
def test_a_share_is_of_each_row_s_prompt_and_stays(method, budgets):
    """Prompts of 40, 20 and 4 tokens; 30 tokens more change no budget, and the newest tokens are kept."""
    x, pad = Sequences.random(Shape(3, 1, 1, 16), 70), [0, 20, 36]
    store = prompt(method, x.tokens(0, 40), pad)
    assert store.budget == budgets and store.filled == [min(c, n) for c, n in zip(budgets, (40, 20, 4), strict=True)]
    decode(method, store, x.tokens(40, 70))
    assert store.budget == store.filled == budgets
    for b, p in enumerate(pad):
        newest = store.slot_of(69 - p, budgets[b])
        torch.testing.assert_close(store.stored(b)[0][0, newest], x.k[b, 0, 69])
