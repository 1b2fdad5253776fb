"""`bench serve --engine vllm` without vLLM: a stand-in takes the place of the program that runs the engines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from skimkv.bench import figures, serve_vllm, vllm_engines
from skimkv.bench.machine import Call, Cpu, nothing
from skimkv.bench.served_rows import Comparisons

# Writes down what it is asked, and answers as the program does: one line for a part that is done, then all rows.
STAND_IN = """
import json, os, sys
job = json.loads(sys.argv[1])
files = sorted(os.listdir(job.pop("model")))
with open("jobs.jsonl", "a") as out:
    out.write(json.dumps([job, files, os.environ["OMP_NUM_THREADS"]]) + "\\n")
print("null", flush=True)
same = {"requests": job["requests"], "batch": 2, "blocks": 9, "block_size": 256, "latency_s": 1.0}
speeds = [10.0 * (i + 1) for i in range(len(job["methods"]))]
rows = [{"method": name or "vllm", "equal": equal, "tokens_per_s": speed, **same}
        for equal in ("memory", "batch") for name, speed in zip(job["methods"], speeds)]
print(json.dumps({"rows": rows}))
"""
METHODS = ["H2O(k=8, local=4)"]
ROW = {
    "method", "shape", "layers", "weights", "prompt", "new", "memory", "equal", "engine", "requests", "batch", "blocks",
    "block_size", "tokens_per_s", "latency_s", "ratio_stock", "machine",
}  # fmt: skip


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serve_vllm, "check_engine", lambda engine, weights: None)
    use(monkeypatch, STAND_IN)


def use(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(serve_vllm, "PROGRAM", (sys.executable, "-c", script))


def measure(requests: int = 3, tick: Call = nothing, **options: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"memory": 1000, "methods": METHODS, **options}
    return serve_vllm.serve(Cpu(), Comparisons("tiny", 1, "float32", [(36, 4)], **settings), requests, tick)


def test_rows_keep_the_contract_and_are_measured_once(tmp_path: Path) -> None:
    ticks: list[None] = []
    records = tmp_path / "serve.jsonl"
    out = measure(records=records, tick=lambda: ticks.append(None))
    names = ["vllm", "Dense()", *METHODS]
    assert [(row["equal"], row["method"]) for row in out["rows"]] == [
        (equal, name) for equal in ("memory", "batch") for name in names
    ]
    assert all(set(row) == ROW and row["engine"] == "vllm" for row in out["rows"])
    assert [row["ratio_stock"] for row in out["rows"]] == [1, 2, 3] * 2
    assert measure(records=records) == out
    (line,) = (tmp_path / "jobs.jsonl").read_text().splitlines()
    job, files, threads = json.loads(line)
    wanted = {"device": "cpu", "dtype": "float32", "prompt": 36, "new": 4, "memory": 1000, "requests": 3}
    assert job == {**wanted, "methods": [None, "Dense()", *METHODS]}
    assert {"config.json", "model.safetensors"} <= set(files)
    assert threads == str(Cpu().threads) and len(ticks) == 1
    measure(records=records, requests=4)
    assert len((tmp_path / "jobs.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(("script", "words"), [
    ("print('null'); print('{\"error\": \"Dense(): too little memory\"}')", "Dense[(][)]: too little memory"),
    ("import sys; print('one\\nlast line\\n', file=sys.stderr); sys.exit(3)", "vLLM ended with status 3: last line"),
    ("pass", "vLLM ended with status 0: no line on stderr"),
])  # fmt: skip
def test_what_goes_wrong_is_one_line(script: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, script)
    with pytest.raises(ValueError, match=f"^{words}$"):
        serve_vllm.run(vllm_engines.Job("", "cpu", "float32", [None], 36, 4, 1000, 3), 1)


def test_a_program_that_is_interrupted_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, "import time; print('null', flush=True); time.sleep(1000)")

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # and not after 1000 seconds
        serve_vllm.run(vllm_engines.Job("", "cpu", "float32", [None], 36, 4, 1000, 3), 1, interrupt)


@pytest.mark.parametrize(("tokens", "size"), [(136, 256), (256, 256), (384, 512), (1024, 1024), (1536, 512), (9, 256)])
def test_blocks_are_as_large_as_they_can_be_without_a_loss(tokens: int, size: int) -> None:
    assert vllm_engines.block_size(tokens) == size
    assert -(-tokens // size) * size == -(-tokens // 256) * 256


@pytest.mark.slow
def test_the_figure(tmp_path: Path) -> None:
    figures.serve(measure()["rows"], tmp_path / "serve.svg")
    assert (tmp_path / "serve.svg").read_text().startswith("<?xml")
