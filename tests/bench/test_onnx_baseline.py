"""ONNX Runtime's attention beside ours: it computes the same, and without the package one line says so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from skimkv.bench import onnx_baseline
from skimkv.bench.attention import attention
from skimkv.bench.machine import Cpu
from skimkv.stores.base import Shape
from support.command_line import assert_mistake, run

B, H, G, D, N = 2, 2, 2, 32, 40


def test_without_the_package_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(onnx_baseline, "PACKAGES", ("no_such_runtime",))
    args = ["bench", "attention", "--against", "onnxruntime"]
    assert_mistake(run(capsys, *args), "it needs no_such_runtime: pip install no_such_runtime")


def test_a_step_begins_when_other_threads_no_longer_spin(monkeypatch):
    pauses, q = [], torch.randn(B, H, G, D)
    query = torch.zeros(B, 1, H * G * D)
    monkeypatch.setattr(onnx_baseline.time, "sleep", lambda seconds: pauses.append((seconds, query.clone())))
    onnx_baseline._refresh(query, q)
    ((seconds, written),) = pauses
    assert seconds >= 0.01, "libgomp's threads spin for some milliseconds"
    assert torch.equal(written.flatten(), q.flatten()), "the query is written before"


def test_every_cache_gives_dense_attention():
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, n, D, generator=draw) for n in (G, N, N))
    token = [torch.randn(B, H, D, generator=draw) for _ in "kv"]
    keys, values = (torch.cat([x, new.unsqueeze(2)], 2) for x, new in zip((k, v), token, strict=True))
    for name, (step, refresh, result) in onnx_baseline.dense_calls(q, k, v, token, threads=1).items():
        for queries in (q, -q):
            q.copy_(queries)
            refresh()
            step()
            expected = F.scaled_dot_product_attention(q, keys, values).flatten(1).unsqueeze(1)
            within = {"onnxruntime:float32": 1e-5, "onnxruntime:float16": 5e-3, "onnxruntime:int8": 0.05}[name]
            assert (result - expected).abs().max() < within, name


def test_its_rows_stand_beside_ours():
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    out = attention(Cpu(), Shape(1, 2, 1, 32), [300], ["SparQ(r=8, k=32)"], rounds=1, against="onnxruntime")
    rows = {row["method"]: row for row in out["rows"] if row["backend"] == "onnxruntime"}
    assert list(rows) == [f"onnxruntime:{dtype}" for dtype in ("float32", "float16", "int8")]
    assert rows["onnxruntime:int8"]["bytes_predicted"] * 4 == rows["onnxruntime:float32"]["bytes_predicted"]
    assert all(row["ms"] > 0 and not row["best_of_torch"] for row in rows.values())
