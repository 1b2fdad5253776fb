"""benchmarks/gpu.py, as far as it goes without a GPU: the search, the verdicts, a dry run, and the refusal."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu as script
from skimkv.ops.gpu import launch

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(launch.missing is not None, reason=str(launch.missing))


@pytest.fixture
def settings():
    """The launch settings, which are put back after the test."""
    before = dict(vars(launch.SETTINGS))
    yield launch.SETTINGS
    vars(launch.SETTINGS).update(before)


def test_the_search_finds_the_best_and_tries_nothing_twice():
    tried_settings = []

    def cost(setting):
        tried_settings.append(tuple(setting.items()))
        return abs(setting["block"] - 64) + 10 * abs(setting["warps"] - 4) + (100 if setting["block"] == 16 else 0)

    best, ms, tried = script.descend({"block": 256, "warps": 1}, {"block": (16, 32, 64), "warps": (1, 2, 4)}, cost)
    assert (best, ms) == ({"block": 64, "warps": 4}, 0)
    assert len(tried_settings) == len(set(tried_settings)) == len(tried)


def test_every_search_knows_its_kernel_and_settings():
    for search in script.SEARCHES:
        names = {field.name for field in dataclasses.fields(getattr(launch.SETTINGS, search.kernel))}
        assert set(search.choices) <= names, search.kernel


def test_a_verdict_names_what_was_measured():
    row = {"method": "Dense()", "share_of_peak": 0.95, "speedup_torch": 0.9, "speedup_theory": 1.0, "ms": 1.5}
    wanted = [
        script.Target(script.SHORT, "Dense()", *rest) for rest in (("share_of_peak", 0.9), ("speedup_torch", 1.0))
    ]
    first, second = script.judge([row], wanted)
    assert first["met"] and not second["met"] and second["got"] == 0.9
    assert script.judge([], wanted) == []


def test_a_step_that_hangs_or_fails_is_ended():
    assert script.run_limited([sys.executable, "-c", "pass"], 60) == "ok"
    assert script.run_limited([sys.executable, "-c", "raise SystemExit(3)"], 60) == "exit status 3"
    assert script.run_limited([sys.executable, "-c", "import time; time.sleep(600)"], 0.5) == "stopped after 0 s"


def test_settings_with_a_wrong_result_are_not_timed(monkeypatch, tmp_path, settings):
    """A setting counts as endlessly slow where its result is wrong, or where it is refused."""
    monkeypatch.setattr(script, "DRY_HEAD_DIM", 16)
    run = script.Run(script.Dry(), tmp_path, "tune", dry=True)
    search = script.Search("dense", "Dense()", script.SHORT, {"block": (64, 512), "programs": (4, 8)})
    settings.dense = dataclasses.replace(settings.dense, programs=3)
    monkeypatch.setattr(script, "error_of", lambda candidate: 0.2 if settings.dense.programs == 8 else 0.0)
    timed = []

    def race(machine, candidates, rounds):
        next(iter(candidates.values())).run()
        timed.append((settings.dense.block, settings.dense.programs))
        return SimpleNamespace(ms=lambda spec: 1.0 + abs(timed[-1][1] - 4)), {}

    monkeypatch.setattr(script.bench_attention, "race", race)
    kept = []
    row = script.search_settings(run, search, kept.append)
    ms = {(tried["block"], tried["programs"]): tried["ms"] for tried in row["tried"]}
    assert ms[64, 8] == ms[512, 4] == float("inf") > ms[64, 4] == row["ms"] == 1.0
    assert row["best"]["programs"] == 4 and (64, 4) in timed and not {(64, 8), (512, 4)} & set(timed)
    assert kept[-1] == row["best"] and [setting["programs"] for setting in kept] == [3, 4]


def test_a_stopped_search_leaves_the_best_so_far_to_later_steps(monkeypatch, tmp_path, settings):
    """And what other kernels had. Later steps load the file; the half-written one has another name."""
    run = script.Run(None, tmp_path, "tune", dry=True)
    (tmp_path / "tuned.json").write_text('{"choose": {"tile": 1024, "group": 8, "warps": 8, "programs": 2}}')

    def stopped(run, search, keep):
        keep({"programs": 12})
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "search_settings", stopped)
    search = next(search for search in script.SEARCHES if search.kernel == "channel_scores")
    with pytest.raises(KeyboardInterrupt):
        script.tune(run, search)
    measured = []
    monkeypatch.setattr(script, "targets", lambda run: measured.append(settings.channel_scores.programs))
    script.tuned(run)
    assert measured == [12] and settings.choose == launch.ChooseLaunch(tile=1024, group=8, warps=8, programs=2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["results.jsonl", "tuned.json"]


def test_the_parts_of_a_step_share_its_time(monkeypatch, tmp_path):
    """A kernel whose tuning hangs takes its share and no more; the time that one leaves goes to the rest."""
    now, limits, commands = [0.0], [], []

    def run_limited(command, limit):
        limits.append(limit)
        commands.append(command[-2:])
        now[0] += limit if len(limits) == 2 else 0.5 * limit
        return "ok" if len(limits) != 2 else "stopped"

    monkeypatch.setattr(script, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(script, "run_limited", run_limited)
    step = script.STEPS[4]
    assert not script.run_parts(step, tmp_path, False)
    assert limits[0] == step.limit / len(script.SEARCHES) and limits == sorted(limits) and sum(limits) > step.limit
    assert now[0] <= step.limit and commands == [["tune", str(i)] for i in range(len(script.SEARCHES))]
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["ended"] for line in lines] == ["ok", "stopped", *["ok"] * (len(script.SEARCHES) - 2)]
    assert [len(step.parts) for step in script.STEPS.values()] == [1, 1, 1, len(script.SEARCHES), 1, 3]


def test_a_step_whose_results_are_wrong_fails(monkeypatch, tmp_path):
    run = script.Run(script.Dry(), tmp_path, "check", dry=True)
    monkeypatch.setattr(script.Run, "candidate", lambda *arguments: None)
    monkeypatch.setattr(script, "error_of", lambda candidate: float("nan"))
    with pytest.raises(SystemExit, match=r"more than 0.01 off the reference: Dense.* at batch 64 of 4096 tokens"):
        script.check(run)
    monkeypatch.setattr(script, "run_tests", lambda *arguments: {"ok": False, "lines": ["1 failed"]})
    with pytest.raises(SystemExit, match=r"ops/test_gpu.py.*: 1 failed"):
        script.tests(run)
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["ok"] for line in lines] == [False] * 4


@pytest.mark.slow
def test_a_dry_run_on_a_cpu(tmp_path):
    """Steps, each in processes of its own, by Triton's interpreter: the lines that a GPU would leave."""
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--dry-run", "--out", tmp_path, "--steps", "1,5,6"]
    best = {"dense": {"block": 32, "warps": 4, "programs": 2, "stages": 3}}
    (tmp_path / "tuned.json").write_text(json.dumps(best))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert done.returncode == 0, (done.stderr[-2000:], lines)
    assert [line["ended"] for line in lines if "ended" in line] == ["ok"] * 5
    assert [line["launch"] for line in lines if "launch" in line] == [best]
    swept = [{row["method"] for row in line["sweep"]["rows"]} for line in lines if "sweep" in line]
    assert len(swept) == 1 and {"Dense()", "SparQ(r=4, k=20)"} < swept[0]
    assert {line["part"] for line in lines if line["step"] == "rest" and "part" in line} == {0, 1, 2}
    assert all(line["versions"]["torch"] == torch.__version__ for line in lines if "versions" in line)
    checked = [line for line in lines if "relative_error" in line]
    assert len(checked) == 3 and all(line["ok"] for line in checked)
    assert sum(len(line["table"]) for line in lines if "table" in line) == 4
    assert sum("share_of_allowed" in line for line in lines) == 1


def test_the_tests_of_the_third_step_exist():
    assert all((ROOT / "tests" / path).is_file() for path in script.TESTS)


@pytest.mark.slow
def test_the_tests_of_the_third_step_can_be_collected():
    report = script.run_tests([sys.executable], script.TESTS, "--collect-only")
    assert report["ok"], report["lines"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_or_with_a_wrong_step_one_line_says_so(capsys, tmp_path):
    assert script.main(["--steps", "2", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "error: --device cuda: PyTorch sees no CUDA device here\n"
    assert script.main(["--steps", "9", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "error: --steps: there is no step 9; there are 1, 2, 3, 4, 5, 6\n"
    assert not list(tmp_path.iterdir())
