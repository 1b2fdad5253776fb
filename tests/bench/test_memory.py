"""`bench memory`: bytes of a real store, in a process of its own."""

from __future__ import annotations

import pytest
import torch

from skimkv.bench.memory import measure, memory
from skimkv.stores.base import Shape

SHAPE = Shape(1, 2, 2, 64)


def test_rows_hold_what_the_store_holds():
    out = memory(SHAPE, [1000], ["Dense()", "LMInfinite(k=100)"], torch.bfloat16)
    dense, window = out["rows"]
    assert set(dense) == {"method", "length", "nbytes", "allocated", "peak_rss_growth"}
    assert (dense["method"], dense["length"]) == ("Dense()", 1000)
    assert dense["nbytes"] == 1001 * 2 * 2 * 64 * 2
    assert window["nbytes"] == 100 * 2 * 2 * 64 * 2
    assert dense["allocated"] >= dense["nbytes"]


def test_a_store_grows_in_blocks_and_one_token():
    sizes = measure("SparQ(r=8, k=32)", SHAPE, 300, torch.float32)
    assert sizes["nbytes"] == 301 * 2 * 3 * 64 * 4  # K, V and K again; grouped heads keep no mean of V


def test_the_last_line_of_a_process_that_fails_is_the_error():
    with pytest.raises(ValueError, match=r"SparQ\(r=128, k=8\), 100 tokens: ValueError: r = 128 must be at most 64"):
        memory(SHAPE, [100], ["SparQ(r=128, k=8)"], torch.float32)
