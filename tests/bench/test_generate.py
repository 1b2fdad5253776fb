"""`bench generate`: what is run, and what its rows say; times only as far as they do not depend on the machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from skimkv.bench import generate as bench
from skimkv.bench.machine import Cpu
from skimkv.bench.models import loaded_subject, random_llama, random_subject
from skimkv.methods import parse
from support.gguf_files import tiny, write
from support.random_models import random_model, tiny_configuration
from support.rival_programs import write_program
from support.stand_in_machine import StandInGpu
from support.tiny_models import FAMILIES, build, prompt, tokenizer

ROW = {
    "method", "kept", "allocated", "first_ms", "first_ms_min", "first_ms_max", "ms", "ms_min", "ms_max",
    "tokens_per_s", "first_speedup", "speedup_transformers", "shape", "layers", "weights", "prompt", "new",
}  # fmt: skip


def time_random(machine, shape, layers, weights, lengths, *others):
    """The rows of a model with random weights."""
    subject = random_subject(shape, layers, weights, max(map(sum, lengths)), machine.device)
    return bench.time_generations(machine, subject, lengths, *others)


def test_rows_keep_the_contract(monkeypatch):
    """The stand-in for the clock of waiting stands still, so that all runs count."""
    monkeypatch.setattr(Cpu, "waiting_clock", lambda self: lambda: 5.0)
    out = time_random(Cpu(), "tiny", 1, "float32", [(40, 3), (20, 2)], ["SparQ(r=8, k=16)", "H2O(k=16)"], 2)
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


def test_a_program_reads_the_same_prompt(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(Cpu, "waiting_clock", lambda self: lambda: 5.0)
    file = tmp_path / "model.gguf"
    write(file, tiny())
    program = write_program(tmp_path / "llama-bench", file, "prompts")
    subject = loaded_subject(str(file))
    rows = bench.time_generations(Cpu(), subject, [(20, 2)], [], 2, against=program)["rows"]
    assert [row["method"] for row in rows] == ["transformers", "Dense()", "llama.cpp -fa 0", "llama.cpp -fa 1"]
    assert all(set(row) == ROW | {"first_speedup_rival", "better"} for row in rows) and json.dumps(rows)
    *_, without, with_flash = rows
    assert without["better"] and not with_flash["better"] and without["ms"] is None
    assert with_flash["first_ms"] - without["first_ms"] == pytest.approx(50) and without["first_ms"] < 120
    for row in rows:
        assert row["first_speedup_rival"] == pytest.approx(without["first_ms"] / row["first_ms"])
        assert row["first_speedup"] == pytest.approx(rows[0]["first_ms"] / row["first_ms"])


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


def test_caches_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"transformers with 43 tokens: 0.0 GB of caches, 0.0 GB free"):
        time_random(StandInGpu(free=1), "tiny", 1, "float32", [(40, 3)], ["Dense()"], 1)


@pytest.mark.parametrize("kind", ["gemma2", "gpt2", "mixtral", "mistral-sliding"])
def test_a_model_of_any_family_runs_with_its_own_weights(tmp_path: Path, kind: str):
    model = build(FAMILIES[kind][0], **{**FAMILIES[kind][1], **({"sliding_window": 64} if "-" in kind else {})})
    check_own(tmp_path, model, 2)


def test_a_model_with_states_runs_too(tmp_path: Path):
    check_own(tmp_path, random_model(tiny_configuration("jamba")), 5)


def check_own(folder: Path, model: Any, layers: int) -> None:
    """Save a model, measure it as a loaded one, and compare the answer's tokens with the model's own."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    subject = loaded_subject(str(folder))
    out = bench.time_generations(Cpu(), subject, [(20, 4)], ["SparQ(r=8, k=16)"], 1)
    assert [row["method"] for row in out["rows"]] == ["transformers", "Dense()", "SparQ(r=8, k=16)"]
    for row in out["rows"]:
        assert (row["shape"], row["weights"], row["layers"]) == (str(folder), "float32", layers)
        assert row["allocated"] > 0 and row["new"] == 4
    ids = prompt(1, 20)
    run = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(subject.model.generate(ids, **run), model.generate(ids, **run))


def test_a_table_of_positions_that_ends_is_refused_before_anything_runs(tmp_path: Path):
    build("gpt2").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"\A204 tokens exceed the 160 positions of GPT2LMHeadModel[^\n]+\Z"):
        bench.time_generations(Cpu(), loaded_subject(str(tmp_path)), [(20, 2), (200, 4)], ["Dense()"], 1)
