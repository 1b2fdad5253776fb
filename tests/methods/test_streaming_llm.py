"""StreamingLLM is LMInfinite with positions in the cache, by its own name and with four sinks."""

from __future__ import annotations

import pytest
import torch

from skimkv.methods import LMInfinite, StreamingLLM
from skimkv.stores.base import Shape
from skimkv.testing import Sequences, decode, prompt

pytestmark = pytest.mark.usefixtures("backend")


def test_defaults():
    assert repr(StreamingLLM(k=512)) == "StreamingLLM(k=512)" and StreamingLLM(k=512).sinks == 4
    assert StreamingLLM(k=8).positions_used(5) == 6 and StreamingLLM(k=8).positions_used(10**6) == 9


@pytest.mark.parametrize("kv", [None, "int8"])
@pytest.mark.parametrize(("k", "sinks"), [(12, 4), (20, 0), (400, 4)])
def test_it_is_lm_infinite_at_positions_in_the_cache(k, sinks, kv):
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
