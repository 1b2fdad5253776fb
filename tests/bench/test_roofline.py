"""SparQ's appendix C worked through, and skimkv roofline on models by name, size and config.json."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from skimkv.bench import roofline as roof
from skimkv.cli.app import main
from skimkv.methods import Dense, SparQ
from support.tiny_models import family


@pytest.mark.parametrize(("g", "d_m", "S", "rho", "most"), [
    (1, 4096, 4096, 1, 7), (8, 8192, 4096, 1 / 16, 104), (8, 8192, 16384, 1 / 4, 32),
])  # fmt: skip
def test_the_table_of_appendix_c(g, d_m, S, rho, most):
    assert roof.rho(S, g, d_m) == rho
    assert roof.intensity(rho, g) == most
    assert roof.intensity(rho, g, 10**9) == pytest.approx(most, rel=1e-6)
    assert roof.intensity(rho, g, 1) < 1 + g


@pytest.mark.parametrize(("name", "size", "ridge"), [("ipu", 2, 32), ("a10", 1, 210), ("h100", 1, 295)])
def test_the_machines_of_appendix_c(name, size, ridge):
    assert roof.HARDWARE[name].ridge(size) == pytest.approx(ridge, rel=0.01)


def test_share_of_transfers():
    """Eq. 1: half where rho = 6/B."""
    assert roof.share(6, 1) == 0.5 == roof.share(0.1, 60)
    assert roof.share(1, 1) == 1 / 7


def test_llama_2_7b():
    """6.74 G parameters, less a table of 32000 x 4096; in eq. 1's terms N is nearly 12 d_m^2 a layer."""
    model = roof.llama("llama-2-7b", (4096, 11008, 32, 32, 32, 32000))
    assert model.weights == 6738415616 - 32000 * 4096
    assert (model.H, model.G, model.D) == (32, 1, 128)
    a100 = roof.HARDWARE["a100"]
    dense = roof.step(a100, model, Dense(), 4096, 1, "float16", torch.float16)
    assert dense.share == pytest.approx(roof.share(1, 1), rel=0.03)
    assert dense.seconds == pytest.approx((2 * model.weights + 2 * 32 * 32 * (2 * 4096 + 2) * 128) / a100.bandwidth)
    assert dense.memory_bound


@pytest.mark.parametrize(("n", "batch", "times"), [(4096, 64, 6.4), (16384, 1, 7.53)])
def test_the_papers_theoretical_speedups(n, batch, times):
    """Table 4 and section 6.1: r = 32, k = 128 at Llama 2 7B's shape, attention alone."""
    model = roof.llama("llama-2-7b", (4096, 11008, 32, 32, 32, 32000))
    ours, dense = (
        roof.step(roof.HARDWARE["ipu"], model, m, n, batch, "float16", torch.float16)
        for m in (SparQ(r=32, k=128, mean_value=False), Dense())
    )
    assert dense.attention / ours.attention == pytest.approx(times, rel=0.004)


def test_arithmetic_limits_a_large_batch():
    """Weights are read once for all rows; eight query heads share what is read of the cache."""
    model = roof.llama("grouped", (8192, 28672, 64, 8, 80, 32000))
    h100 = roof.HARDWARE["h100"]
    one, many = (roof.step(h100, model, Dense(), 64, B, "bfloat16", torch.bfloat16) for B in (1, 4096))
    assert one.memory_bound and not many.memory_bound
    assert many.intensity > h100.ridge(2) / 2 > one.intensity
    assert many.seconds - many.attention == pytest.approx(4096 * model.weights / h100.peak[2])
    g, rho, B = 8, roof.rho(4096, 8, 8192), 64
    found = roof.step(h100, model, Dense(), 4096, B, "bfloat16", torch.bfloat16).intensity * 2
    assert found == pytest.approx(roof.intensity(rho, g, B), rel=0.25), "a real layer is no 12 d_m^2"


def test_weights_are_counted_from_a_config(tmp_path: Path):
    for name in ("llama", "gemma3"):
        model: Any = family(name)
        model.config.save_pretrained(tmp_path)
        found = roof.of_folder(tmp_path)
        every = sum(p.numel() for p in model.parameters())
        assert found.weights == every - model.get_input_embeddings().weight.numel()
        assert (found.layers, found.H, found.G, found.D) == (2, 2, 2, 16)
    assert (found.sliding, found.window) == (1, 8)
    short, long = (roof.step(roof.HARDWARE["a10"], found, Dense(), n, 1, "bfloat16", torch.bfloat16) for n in (8, 108))
    assert long.attention / short.attention == pytest.approx((2 * 108 + 2 + 18) / (2 * 18)), "one layer grows"
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_local_experts": 8}))
    with pytest.raises(ValueError, match="mixture of experts"):
        roof.of_folder(tmp_path)


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["roofline", *argv, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / "roof.png"
    argv = ["--hardware", "a10", "--hardware", "here", "--length", "65536", "--method", "H2O(k=512)"]
    found = answer(capsys, *argv, "--plot", str(figure))
    assert figure.read_bytes().startswith(b"\x89PNG")
    dense, h2o = found["rows"][:2]
    assert (dense["method"], dense["speedup"], h2o["method"]) == ("Dense()", 1, "H2O(k=512)")
    assert h2o["speedup"] == pytest.approx(dense["ms"] / h2o["ms"])
    assert h2o["speedup_attention"] > 60 and h2o["held_bytes"] < dense["held_bytes"]
    assert dense["fits"] is False and h2o["fits"] is True, "24 GB"
    assert found["hardware"][0]["half_at"] == 32768
    measured = found["hardware"][1]
    assert measured["source"] == "measured" and 1e8 < measured["bytes_per_s"] < 1e13
    sized = answer(capsys, "--sizes", "4096,11008,32,32,32,32000")
    named = answer(capsys)
    assert sized["rows"] == named["rows"] and math.isfinite(named["rows"][0]["ms"])
    assert main(["roofline", "--model", "builtin", "--method", "SparQ(r=8, k=32)"]) == 0
    assert "half of a step" in capsys.readouterr().out


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
def test_mistakes_are_one_line(argv, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["roofline", *argv]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1
