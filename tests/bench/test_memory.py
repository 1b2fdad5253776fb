"""`bench memory`: bytes of a real store, in a process of its own."""

from __future__ import annotations

import pytest
import torch

from skimkv.bench.memory import memory
from skimkv.stores.base import Shape

SHAPE = Shape(1, 2, 2, 64)


@pytest.mark.slow
def test_rows_hold_what_the_store_holds():
    """A store that grows in blocks and by one token, and one that is full."""
    out = memory(SHAPE, [1000], ["SparQ(r=8, k=32)", "LMInfinite(k=100)"], torch.bfloat16)
    sparq, window = out["rows"]
    assert set(sparq) == {"method", "length", "nbytes", "allocated", "peak_rss_growth"}
    assert (sparq["method"], sparq["length"]) == ("SparQ(r=8, k=32)", 1000)
    assert sparq["nbytes"] == 1001 * 2 * 3 * 64 * 2  # K, V and K again; grouped heads keep no mean of V
    assert window["nbytes"] == 100 * 2 * 2 * 64 * 2
    assert sparq["allocated"] >= sparq["nbytes"]


@pytest.mark.slow
def test_the_last_line_of_a_process_that_fails_is_the_error():
    with pytest.raises(ValueError, match=r"SparQ\(r=128, k=8\), 100 tokens: ValueError: r = 128 must be at most 64"):
        memory(SHAPE, [100], ["SparQ(r=128, k=8)"], torch.float32)
