"""`bench generate`: what is run, and what its rows say; times only as far as they do not depend on the machine."""

from __future__ import annotations

import json

import pytest
import torch

from skimkv.bench import generate as bench
from skimkv.bench.machine import Cpu
from skimkv.bench.models import random_llama
from skimkv.methods import parse
from support.stand_in_machine import StandInGpu

ROW = {
    "method", "kept", "allocated", "first_ms", "first_ms_min", "first_ms_max", "ms", "ms_min", "ms_max",
    "tokens_per_s", "first_speedup", "speedup_transformers", "shape", "layers", "weights", "prompt", "new",
}  # fmt: skip


def test_rows_keep_the_contract(monkeypatch):
    """The stand-in for the clock of waiting stands still, so that all runs count."""
    monkeypatch.setattr(Cpu, "waiting_clock", lambda self: lambda: 5.0)
    out = bench.generate(Cpu(), "tiny", 1, "float32", [(40, 3), (20, 2)], ["SparQ(r=8, k=16)", "H2O(k=16)"], 2)
    assert set(out) == {"machine", "rows", "waits_known"} and json.dumps(out)
    names = ["transformers", "Dense()", "SparQ(r=8, k=16)", "H2O(k=16)"]
    assert [(row["method"], row["prompt"], row["new"]) for row in out["rows"]] == [
        (name, *length) for length in ((40, 3), (20, 2)) for name in names
    ]
    for row in out["rows"]:
        assert set(row) == ROW and (row["layers"], row["weights"], row["kept"]) == (1, "float32", 2)
        assert 0 < row["first_ms_min"] <= row["first_ms"] <= row["first_ms_max"]
        assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
    plain, dense, _, h2o = out["rows"][:4]
    assert plain["allocated"] == 2 * 2 * 64 * 42 * 4, "keys and values of all tokens but the last one"
    assert h2o["allocated"] < dense["allocated"]


def test_a_clock_that_waits_leaves_runs_out(monkeypatch):
    """Of three runs of each candidate the middle one was delayed: the clock moves by a second in every second turn."""
    model = random_llama("tiny", 1, "float32", 64)
    run = bench.Generation(model, None, torch.tensor([[1, 2, 3]]), 2)
    run.run()
    seconds = iter([9.0, 1.0, 9.0, 2.0])  # the first one is warm-up
    monkeypatch.setattr(run, "run", lambda: (run.first.append(next(seconds)), run.following.append(0.5)))
    run.first, run.following = [], []
    waits = iter([0.0, 0.0, 1.0, 1.0, 1.0, 100.0, 100.0, 100.0])
    monkeypatch.setattr(Cpu, "waiting_clock", lambda self: lambda: next(waits))
    (row,) = bench._rows(Cpu(), {"transformers": run}, 2, 3, lambda: None)
    assert row["kept"] == 2
    assert [row[key] for key in ("first_ms_min", "first_ms", "first_ms_max")] == [1000, 1500, 2000]


def test_transformers_runs_alone_after_a_method():
    model = random_llama("tiny", 1, "float32", 64)
    model.generation_config.eos_token_id = None
    before = model.config._attn_implementation
    run = bench.Generation(model, parse("Dense()"), torch.tensor([[5, 4, 3]]), 3)
    run.run()
    assert len(run.first) == len(run.following) == 1 and run.allocated > 0
    assert model.config._attn_implementation == before


def test_one_new_token_is_too_few():
    with pytest.raises(ValueError, match="at least 2 new tokens are needed"):
        bench.generate(Cpu(), "tiny", 1, "float32", [(20, 1)], ["Dense()"], 1)


def test_caches_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"transformers with 43 tokens: 0.0 GB of caches, 0.0 GB free"):
        bench.generate(StandInGpu(free=1), "tiny", 1, "float32", [(40, 3)], ["Dense()"], 1)
