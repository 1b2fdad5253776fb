"""benchmarks/cpu.py: what it keeps, what it compares with, and what it leaves out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import cpu as benchmark

ROW = {"method": "Skim(k=128)", "backend": "cpu", "length": 4096, "kept": 5, "speedup_dense": 2.0, "speedup_torch": 6.0}


@pytest.fixture
def script(monkeypatch):
    rows = [dict(ROW)]
    monkeypatch.setattr(benchmark.bench, "attention", lambda *args: {"rows": rows})
    monkeypatch.setattr(benchmark, "LAYERS", {"2 heads": None})
    benchmark.rows = rows
    return benchmark


def test_numbers_are_written_and_compared(script, tmp_path: Path, capsys):
    file = tmp_path / "cpu.json"
    args = ["--file", str(file), "--rounds", "7"]
    script.main([*args, "--write"])
    assert "nothing was kept for this machine yet" in capsys.readouterr().out
    kept = json.loads(file.read_text("utf-8"))
    name = "Skim(k=128), 2 heads, 4096 tokens, over "
    assert kept == {script.Cpu().name: {f"{name}Dense()": 2.0, f"{name}PyTorch's best": 6.0}}
    script.rows[0] |= {"speedup_dense": 2.5, "speedup_torch": 6.1}
    script.main(args)
    out = capsys.readouterr().out
    assert f"   2.50  {name}Dense(): was 2.00, +25% <--" in out
    assert f"   6.10  {name}PyTorch's best: was 6.00, +2%\n" in out
    assert json.loads(file.read_text("utf-8")) == kept


def test_disturbed_and_foreign_rows_are_left_out(script, tmp_path: Path, capsys):
    file = tmp_path / "cpu.json"
    script.main(["--file", str(file), "--rounds", "7", "--write"])
    kept = file.read_text("utf-8")
    script.rows[0]["kept"] = 3
    script.rows.append({**ROW, "method": "torch:matmul:bfloat16", "backend": "torch"})
    capsys.readouterr()
    script.main(["--file", str(file), "--rounds", "7", "--write"])
    out = capsys.readouterr().out
    assert out.count("disturbed in more than half of its calls") == 2 and "torch:" not in out
    assert file.read_text("utf-8") == kept
