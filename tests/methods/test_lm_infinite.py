"""LMInfinite: the first tokens and the most recent ones (SparQ appendix G); initial=0 is H2O section 5's "Local".

StreamingLLM is LMInfinite with positions in the cache, by its own name and with four sinks.
Keys of zero and values of unit vectors turn attention into a list: y is 1/m at each of the m positions attended to.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import skimkv
from skimkv.methods import LMInfinite, StreamingLLM
from skimkv.methods.lm_infinite import FirstAndRecent
from skimkv.stores.base import Shape
from skimkv.testing import Sequences, decode, prompt
from support.hand_worked import run

pytestmark = pytest.mark.usefixtures("backend")


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


def test_defaults_of_streaming_llm():
    assert repr(StreamingLLM(k=512)) == "StreamingLLM(k=512)" and StreamingLLM(k=512).sinks == 4
    assert StreamingLLM(k=8).positions_used(5) == 6 and StreamingLLM(k=8).positions_used(10**6) == 9


@pytest.mark.parametrize("kv", [None, "int8"])
@pytest.mark.parametrize(("k", "sinks"), [(12, 4), (20, 0), (400, 4)])
def test_streaming_llm_is_lm_infinite_at_positions_in_the_cache(k, sinks, kv):
    shape = Shape(2, 2, 2, 16)
    x = Sequences.random(shape, 60)
    one, other = StreamingLLM(k, sinks, kv=kv), LMInfinite(k, sinks, "cache", kv=kv)
    stores = [prompt(method, x.tokens(0, 40), [0, 9]) for method in (one, other)]
    y = [decode(method, store, x.tokens(40, 60)) for method, store in zip((one, other), stores, strict=True)]
    torch.testing.assert_close(*y, atol=0, rtol=0)
    assert stores[0].nbytes == stores[1].nbytes and stores[0].elements == stores[1].elements
    for n in (1, 30, 70):
        assert one.traffic(n, shape, torch.bfloat16) == other.traffic(n, shape, torch.bfloat16)
        assert one.bound(n, shape, torch.bfloat16) == other.bound(n, shape, torch.bfloat16)


@pytest.mark.parametrize("kv", [None, "int8"])
def test_first_keys_stay_while_other_rows_get_a_larger_budget(kv):
    """A row of a padded batch gets its share of its own tokens, and decodes as it does alone."""
    x = Sequences.random(Shape(3, 2, 2, 16), 84)
    method, pads = StreamingLLM(k=0.25, sinks=4, kv=kv), [60, 30, 0]
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that is not written is NaN
    try:
        together = decode(method, prompt(method, x.tokens(0, 80), pads), x.tokens(80, 84))
    finally:
        torch.use_deterministic_algorithms(False)
    for b, pad in enumerate(pads):
        row = x.rows([b])
        alone = decode(method, prompt(method, row.tokens(pad, 80)), row.tokens(80, 84))
        torch.testing.assert_close(together[:, b : b + 1], alone, rtol=1e-5, atol=1e-5)
