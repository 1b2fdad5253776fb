"""skimkv roofline: models by name, by size and by folder; machines by name and this one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from skimkv.bench import machine as machines
from support.command_line import answer, assert_mistake, run


def test_rows_facts_and_a_figure(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(machines, "FLUSH_BYTES", 1 << 20)
    figure = tmp_path / "roof.png"
    argv = ["roofline", "--hardware", "a10", "--hardware", "here", "--length", "65536", "--method", "H2O(k=512)"]
    result = answer(capsys, *argv, "--plot", str(figure))
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert set(result) == {"model", "batch", "weights", "cache", "hardware", "rows", "figure"}
    assert set(result["model"]) == {"name", "weights", "layers", "H", "G", "D", "sliding", "window"}
    dense, h2o = result["rows"][:2]
    assert (dense["method"], dense["speedup"], h2o["method"]) == ("Dense()", 1, "H2O(k=512)")
    assert h2o["speedup"] == pytest.approx(dense["ms"] / h2o["ms"])
    assert h2o["speedup_attention"] > 60 and h2o["held_bytes"] < dense["held_bytes"]
    assert dense["fits"] is False and h2o["fits"] is True, "24 GB"
    assert result["hardware"][0]["half_at"] == 32768
    assert result["hardware"][1]["source"] == "measured"


def test_a_model_by_name_and_by_its_sizes(capsys):
    sized = answer(capsys, "roofline", "--sizes", "4096,11008,32,32,32,32000")
    named = answer(capsys, "roofline")
    assert sized["rows"] == named["rows"] and math.isfinite(named["rows"][0]["ms"])


def test_a_table_for_the_bundled_model(capsys):
    status, out, _ = run(capsys, "roofline", "--model", "builtin", "--method", "SparQ(r=8, k=32)")
    assert status == 0
    assert "dense attention is half of a step from" in out and "SparQ(r=8, k=32)" in out


@pytest.mark.parametrize(("argv", "words"), [
    (["--model", "llama-9"], "'llama-9' is unknown"),
    (["--hardware", "abacus"], "'abacus' is unknown"),
    (["--sizes", "1,2,three"], "'1,2,three' must be numbers"),
    (["--sizes", "64,64,4"], "must be hidden,intermediate"),
    (["--sizes", "64,64,4,3,2,9"], "heads = 4 must be a multiple of kv_heads = 3"),
    (["--weights", "int2"], "--weights 'int2'"),
    (["--cache", "int2"], "'int2'"),
    (["--model", "builtin", "--method", "SparQ(r=128, k=8)"], "r = 128 must be at most 64"),
    (["--length", "0"], "--length"),
    (["--plot", "no/such/f.png"], "no/such"),
    (["--model", "."], "no config.json"),
])  # fmt: skip
def test_mistakes_are_one_line(argv, words, capsys, monkeypatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    assert_mistake(run(capsys, "roofline", *argv), words)
