"""benchmarks/gpu.py, as far as it goes without a GPU: the search, the verdicts, and the refusal."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from skimkv import ops
from skimkv.ops.gpu import launch
from support.stand_in_machine import StandInGpu

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(launch.missing is not None, reason=str(launch.missing))


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_script", ROOT / "benchmarks" / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def settings():
    """The launch settings, which are put back after the test."""
    before = dict(vars(launch.SETTINGS))
    yield launch.SETTINGS
    vars(launch.SETTINGS).update(before)


def test_the_search_finds_the_best_and_tries_nothing_twice(script):
    tried_settings = []

    def cost(setting):
        tried_settings.append(tuple(setting.items()))
        return abs(setting["block"] - 64) + 10 * abs(setting["warps"] - 4) + (100 if setting["block"] == 16 else 0)

    best, ms, tried = script.descend({"block": 256, "warps": 1}, {"block": (16, 32, 64), "warps": (1, 2, 4)}, cost)
    assert (best, ms) == ({"block": 64, "warps": 4}, 0)
    assert len(tried_settings) == len(set(tried_settings)) == len(tried)


def test_every_search_knows_its_kernel_and_settings(script):
    for search in script.SEARCHES:
        names = {field.name for field in dataclasses.fields(getattr(launch.SETTINGS, search.kernel))}
        assert set(search.choices) <= names, search.kernel


def test_a_verdict_names_what_was_measured(script):
    row = {"method": "Dense()", "share_of_peak": 0.95, "speedup_torch": 0.9, "speedup_theory": 1.0, "ms": 1.5}
    wanted = [
        script.Target(script.SHORT, "Dense()", *rest) for rest in (("share_of_peak", 0.9), ("speedup_torch", 1.0))
    ]
    first, second = script.judge([row], wanted)
    assert first["met"] and not second["met"] and second["got"] == 0.9
    assert script.judge([], wanted) == []


def test_tables_are_written(script, monkeypatch, tmp_path, settings):
    """On a stand-in for a GPU, with small caches."""
    case = script.Case(2, 4, 2, 300)
    monkeypatch.setattr(script, "Cuda", StandInGpu)
    monkeypatch.setattr(script, "HEAD_DIM", 32)
    monkeypatch.setattr(script, "INT8", "SparQ(r=8, k=32)")
    monkeypatch.setattr(script, "TARGETS", [script.Target(case, "Dense()", "share_of_peak", 0.9)])
    search = script.Search("dense", "Dense()", case._replace(batch=1), {"programs": (2, 4)})
    monkeypatch.setattr(script, "SEARCHES", [search])
    with ops.backend("ref"):
        assert script.main(["targets", "tune"], tmp_path) == 0
    result = json.loads((tmp_path / "targets-stand-in.json").read_text())
    assert result["versions"]["torch"] == torch.__version__ and len(result["table"]) == 1
    assert result["table"][0]["batch"] == 2 and len(result["rows"]) >= 4
    tuned = json.loads((tmp_path / "tune-stand-in.json").read_text())
    (row,) = tuned["rows"]
    assert row["best"]["programs"] in (2, 4) and len(row["tried"]) == 2
    assert settings.dense.programs == row["best"]["programs"] == tuned["launch"]["dense"]["programs"]


def test_the_tests_of_the_check_stage_exist(script):
    assert all((ROOT / "tests" / path).is_file() for path in script.TESTS)


@pytest.mark.slow
def test_the_tests_of_the_check_stage_can_be_collected(script):
    report = script.run_tests([sys.executable], script.TESTS, "--collect-only")
    assert report["ok"], report["lines"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_or_with_a_wrong_stage_one_line_says_so(script, capsys, tmp_path):
    assert script.main(["targets"], tmp_path) == 2
    assert capsys.readouterr().err == "error: --device cuda: PyTorch sees no CUDA device here\n"
    assert script.main(["fly"], tmp_path) == 2
    assert capsys.readouterr().err.startswith("error: unknown stage 'fly'; known: check, tune, targets")
    assert not list(tmp_path.iterdir())
