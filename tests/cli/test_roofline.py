"""skimkv roofline: models by name, by size and by folder; machines by name and this one."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import pytest

from skimkv.bench import machine as machines
from support.command_line import answer, assert_mistake, run
from support.gguf_files import Kind, of_family, write


def test_rows_facts_and_a_figure(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(machines, "flush_bytes", lambda: 1 << 20)
    figure = tmp_path / "roof.png"
    argv = ["roofline", "--hardware", "a10", "--hardware", "here", "--length", "65536", "--method", "H2O(k=512)"]
    result = answer(capsys, *argv, "--plot", str(figure))
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert set(result) == {"model", "batch", "weights", "cache", "hardware", "rows", "figure"}
    sizes = {"name", "weights", "layers", "H", "G", "D", "sliding", "window"}
    assert set(result["model"]) == sizes | {"weight_bytes", "held_weights", "held_weight_bytes"}
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


def test_a_gguf_file_counts_the_bytes_of_its_own_blocks(tmp_path: Path, capsys):
    path = tmp_path / "mixed.gguf"
    kinds = {f"blk.{i}.ffn_down": Kind.Q4_K for i in range(2)} | {"token_embd": Kind.Q6_K}
    write(path, of_family("llama"), kinds)
    argv = ["roofline", "--model", str(path), "--hardware", "a10", "--length", "512", "--method", "Dense()"]
    result = answer(capsys, *argv)
    read = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name != "token_embd.weight"]
    weights, nbytes = sum(int(t.n_elements) for t in read), sum(int(t.n_bytes) for t in read)
    model = result["model"]
    assert (model["weights"], model["weight_bytes"], model["layers"], model["H"]) == (weights, nbytes, 2, 2)
    assert result["weights"] == "Q8_0, Q4_K"
    row, cache = result["rows"][0], 2 * 2 * 2 * 512 * 64 * 2
    assert row["held_bytes"] == cache + sum(int(t.n_bytes) for t in gguf.GGUFReader(path).tensors)
    assert row["ms"] == pytest.approx((nbytes + cache) / 600e9 * 1e3, rel=0.01)
    as_int8 = answer(capsys, *argv, "--weights", "int8")
    assert as_int8["weights"] == "int8" and as_int8["rows"][0]["ms"] > row["ms"]
    assert "weights Q8_0, Q4_K" in " ".join(run(capsys, *argv)[1].split())
    path.write_bytes(b"GGUF")
    assert_mistake(run(capsys, *argv), f"--model {path}: truncated or damaged")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--model=missing.gguf", "--model missing.gguf: no such file"),
        ("--sizes=64,64,4,3,2,9", "--sizes 64,64,4,3,2,9: heads = 4 must be a multiple of kv_heads = 3"),
        ("--sizes=64,64,4", "--sizes 64,64,4: the sizes must be hidden,intermediate,heads,kv_heads,layers,vocabulary"),
    ],
)
def test_a_model_that_cannot_be_is_refused_by_the_name_of_the_option(capsys, option: str, words: str):
    assert_mistake(run(capsys, "roofline", option), words)
