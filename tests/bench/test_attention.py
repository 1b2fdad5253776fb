"""The benchmarks run, count what they say, and keep their JSON contract. No time is asserted."""

from __future__ import annotations

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from skimkv.bench import attention as bench
from skimkv.bench import token as bench_token
from skimkv.cli import bench as bench_cli
from skimkv.cli.app import app
from skimkv.methods import Dense, parse
from skimkv.stores.base import Shape

ROW = {"method", "backend", "batch", "heads", "kv_heads", "head_dim", "length", "dtype", "threads", "ms", "ms_min"}
ROW |= {"ms_max", "bytes_predicted", "gb_per_s", "speedup_dense", "speedup_torch", "speedup_theory"}
TOKEN = {"method", "shape", "layers", "weights", "length", "ms", "ms_attention", "ms_weights", "floor_ms"}
TOKEN |= {"cache_bytes", "weight_bytes"}
METHODS = ["SparQ(r=8, k=32, channels='int8', mean_value=True)", "TopK(k=8)", "LowRank(r=8, k=16)", "H2O(k=64)"]
METHODS += ["LMInfinite(k=64)", "SubGen(k=48, recent=16)", "SubGenStream(delta=4.0, t=2, s=16)"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch):
    for module in (bench, bench_token):
        monkeypatch.setattr(module, "FLUSH", 1 << 20)


def run(*args: str) -> dict:
    result = CliRunner().invoke(app, ["bench", *args, "--json"], catch_exceptions=False)
    return json.loads(result.stdout.splitlines()[-1])


def test_attention_keeps_the_contract(tmp_path):
    figure = tmp_path / "speedup.png"
    small = [
        "--length",
        "300",
        "--length",
        "600",
        "--heads",
        "4",
        "--kv-heads",
        "2",
        "--head-dim",
        "32",
        "--rounds",
        "2",
    ]
    specs = [x for m in METHODS for x in ("--method", m)]
    out = run("attention", *small, "--batch", "2", *specs, "--plot", str(figure))
    assert set(out) >= {"machine", "peak_gb_per_s", "rows"}
    assert all(set(row) >= ROW for row in out["rows"])
    names = {row["method"] for row in out["rows"]}
    assert names >= {repr(parse(m)) for m in METHODS} | {"Dense()", "torch:matmul:float32", "torch:sdpa-flash:bfloat16"}
    for row in out["rows"]:
        if not row["method"].startswith("torch:"):
            closed = parse(row["method"]).traffic(row["length"], Shape(2, 2, 2, 32), torch.bfloat16)
            assert row["bytes_predicted"] == closed.bytes
        assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
    assert figure.stat().st_size > 10_000


def test_filled_equals_a_real_prompt():
    """A benchmark's store decodes to what the same keys give through the method."""
    shape, n = Shape(1, 2, 2, 32), 700
    base = bench.random_full(shape, torch.float32, n)
    k, v = (base.whole(name)[:, :, :n] for name in "kv")
    q, k1, v1 = torch.randn(1, 2, 2, 32), torch.randn(1, 2, 32), torch.randn(1, 2, 32)
    for spec in ("Dense()", METHODS[0], METHODS[2], "LMInfinite(k=64)"):
        method = parse(spec)
        whole = method.store(shape, torch.float32)
        method.take(whole, torch.randn(1, 2, 2, n, 32), k, v, scale=0.2)
        a = method.decode(bench.filled(method, base, n), q, k1, v1, scale=0.2)
        b = method.decode(whole, q, k1, v1, scale=0.2)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_crossover_is_where_the_bytes_cross():
    shape, dtype = Shape(1, 2, 1, 64), torch.bfloat16
    method = parse("SparQ(r=16, k=64)")
    n = bench.crossover(method, shape, dtype)
    fewer = [method.traffic(m, shape, dtype).bytes < Dense().traffic(m, shape, dtype).bytes for m in (n, n // 2)]
    assert fewer == [True, False]


def test_a_method_is_faster_from_the_length_after_which_it_never_is_slower():
    speeds = {"A": (2, 0.5, 2, 3), "B": (2, 2, 2, 2), "C": (2, 2, 2, 1)}
    rows = [{"method": m, "backend": "cpu", "length": n, "speedup_dense": x}
            for m, all_ in speeds.items() for n, x in zip((1, 2, 4, 8), all_, strict=True)]  # fmt: skip
    assert bench_cli._faster_from(rows) == {"A": 4, "B": 1, "C": None}


@pytest.mark.parametrize("weights", ["int8", "bfloat16"])
def test_token_keeps_the_contract(weights):
    args = ["--shape", "tiny", "--layers", "2", "--length", "300", "--rounds", "2", "--weights", weights]
    out = run("token", *args, "--method", "Dense()", "--method", "SparQ(r=8, k=32)", "--method", "H2O(k=64)")
    assert [row["method"] for row in out["rows"]] == ["transformers", "Dense()", "SparQ(r=8, k=32)", "H2O(k=64)"]
    for row in out["rows"]:
        assert set(row) >= TOKEN
        assert row["ms"] == pytest.approx(row["ms_attention"] + row["ms_weights"])
    dense = out["rows"][1]
    size = {"int8": 34 / 32, "bfloat16": 2}[weights]
    matrices = 2 * (256 * (256 + 128 + 128 + 256) + 3 * 256 * 640) + 256 * 2048
    assert dense["weight_bytes"] == pytest.approx(matrices * size, rel=0.01)


def test_token_at_several_lengths(tmp_path):
    """The library's own attention and ours take turns on one model."""
    args = ["--shape", "tiny", "--layers", "1", "--length", "300", "--length", "600", "--rounds", "2"]
    figure = tmp_path / "f.png"
    rows = run("token", *args, "--method", "Dense()", "--plot", str(figure))["rows"]
    assert figure.stat().st_size > 10_000
    assert [(row["method"], row["length"]) for row in rows] == [
        ("transformers", 300), ("Dense()", 300), ("transformers", 600), ("Dense()", 600),
    ]  # fmt: skip


def test_memory_reports_what_is_held(tmp_path):
    figure, methods = tmp_path / "f.png", ("--method", "Dense()", "--method", "LMInfinite(k=100)")
    out = run("memory", "--length", "1000", "--heads", "2", *methods, "--plot", str(figure))
    assert figure.stat().st_size > 10_000
    dense, window = out["rows"]
    assert dense["nbytes"] == 1001 * 2 * 2 * 64 * 2
    assert window["nbytes"] == 100 * 2 * 2 * 64 * 2
    assert dense["allocated"] >= dense["nbytes"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["attention", "--heads", "6", "--kv-heads", "4"], "heads = 6 must be a multiple of kv-heads = 4"),
        (["attention", "--dtype", "int3"], "unknown dtype 'int3'"),
        (["attention", "--plot", "no/such/f.png"], "--plot no/such/f.png: there is no folder no/such"),
        (["token", "--plot", "f.png", "--method", "SparQ(r=8, k=32)"], "--plot f.png: Dense() is not among"),
        (["memory", "--plot", "no/f.png"], "--plot no/f.png: there is no folder no"),
        (["attention", "--length", "0"], "must be at least 1"),
        (["token", "--shape", "gpt-9"], "unknown shape 'gpt-9'"),
        (["token", "--shape", "tiny", "--weights", "int2"], "unknown weights 'int2'"),
        (["attention", "--threads", "-1"], "threads = -1 must be at least 0"),
    ],
)
def test_bad_input_is_one_line(args, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        CliRunner().invoke(app, ["bench", *args], catch_exceptions=False)
