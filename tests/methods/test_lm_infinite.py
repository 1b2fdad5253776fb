"""LMInfinite: the first tokens and the most recent ones (SparQ appendix G); initial=0 is H2O section 5's "Local".

Keys of zero and values of unit vectors turn attention into a list: y is 1/m at each of the m positions attended to.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import skimkv
from skimkv.methods import LMInfinite
from skimkv.methods.lm_infinite import FirstAndRecent
from skimkv.stores.base import Shape
from support.hand_worked import D, attended, run

pytestmark = pytest.mark.usefixtures("backend")


def test_by_hand():
    """initial = 2, k = 5 over 12 tokens, prompt of 3: two initial, three recent, and the current token."""
    _, seen = run(LMInfinite(k=5, initial=2), [3], 9)
    assert seen == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5],  # five held, all fetched, and the current 5
        [0, 1, 3, 4, 5, 6],  # 2 has gone
        [0, 1, 4, 5, 6, 7],
        [0, 1, 5, 6, 7, 8],
        [0, 1, 6, 7, 8, 9],
        [0, 1, 7, 8, 9, 10],
        [0, 1, 8, 9, 10, 11],
    ]


@pytest.mark.parametrize("prompt", [1, 4, 5, 6, 7, 8, 11, 20])
@pytest.mark.parametrize(("k", "initial"), [(5, 2), (5, 0), (1, 0), (6, 5), (16, 3)])
def test_every_prompt_length(k, initial, prompt):
    """The prompt is dense; then position p sees the first `initial` and p - (k - initial) .. p."""
    store, seen = run(LMInfinite(k=k, initial=initial), [prompt], 10)
    for p, positions in enumerate(seen):
        window = set(range(p + 1)) if p < prompt else {t for t in range(p + 1) if t < initial or t >= p - (k - initial)}
        assert set(positions) == window, p
    assert store.filled == [min(k, prompt + 10)] and store.k.shape[2] == k


def test_prompt_in_blocks():
    """A later block sees what was kept and, causally, itself: nothing that was dropped comes back."""
    _, seen = run(LMInfinite(k=5, initial=2), [8, 3, 1], 2)
    assert seen[:8] == [list(range(i + 1)) for i in range(8)]
    assert seen[8:11] == [[0, 1, 5, 6, 7, 8], [0, 1, 5, 6, 7, 8, 9], [0, 1, 5, 6, 7, 8, 9, 10]]
    assert seen[11:] == [[0, 1, 8, 9, 10, 11], [0, 1, 9, 10, 11, 12], [0, 1, 10, 11, 12, 13]]


def test_keys_keep_their_bytes():
    """Positions stay the original ones: a held key is the key that came (it was rotated for its own position)."""
    k, v = torch.randn(1, 2, 40, 4), torch.randn(1, 2, 40, 4)
    method = LMInfinite(k=6, initial=2)
    store = method.store(Shape(1, 2, 1, 4), torch.float32)
    store.append(k[:, :, :23], v[:, :, :23])
    for p in range(23, 40):
        method.decode(store, torch.randn(1, 2, 1, 4), k[:, :, p], v[:, :, p], scale=0.5)
    held = [0, 1, 36, 37, 38, 39]
    for h in range(2):
        for t in held:
            slot = (store.k[0, h] == k[0, h, t]).all(-1).nonzero().item()
            assert torch.equal(store.v[0, h, slot], v[0, h, t])


def test_ragged_rows_each_have_their_own_window():
    method = LMInfinite(k=4, initial=1)
    store = method.store(Shape(3, 1, 1, D), torch.float32)
    k = torch.zeros(3, 1, 9, D)
    pad = [0, 7, 9]  # 9, 2 and 0 tokens
    v = torch.stack([torch.eye(D)[[max(i - p, 0) for i in range(9)]] for p in pad])[:, None]
    method.prefill(store, k[:, :, None], k, v, scale=1.0, pad=pad)
    assert store.lengths == [9, 2, 0] and store.filled == [4, 2, 0]
    expected = [[0, 6, 7, 8, 9], [0, 1, 2], [0]]
    for step in range(3):
        now = [9 + step, 2 + step, step]
        y = method.decode(store, k[:, :, :1], k[:, :, 0], torch.eye(D)[now][:, None], scale=1.0)
        for b, n in enumerate(now):
            expected[b] = [t for t in range(n + 1) if t < 1 or t >= n - 3]
            assert attended(y[b, 0, 0]) == expected[b]


def test_the_default_is_sixteen_initial_tokens():
    assert LMInfinite(k=20) == LMInfinite(k=20, initial=16)


def test_a_method_of_this_kind_must_say_which_tokens_it_keeps():
    """Without `first` and `counts_in_cache` it cannot be made, and cannot be registered."""

    @dataclass(frozen=True, repr=False)
    class Incomplete(FirstAndRecent):
        """It names neither."""

    with pytest.raises(TypeError, match="counts_in_cache"):
        Incomplete(8)
    with pytest.raises(ValueError, match="Incomplete cannot be registered: it has no counts_in_cache, first"):
        skimkv.register(Incomplete)
