"""benchmarks/gpu.py, as far as it goes without a GPU: the search, the verdicts, and the refusal."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from bench.test_bench_gpu import Stand
from skimkv import ops
from skimkv.ops.gpu import launch

PATH = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
pytestmark = pytest.mark.skipif(launch.missing is not None, reason=str(launch.missing))


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_script", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_search_finds_the_best_and_tries_nothing_twice(script):
    asked = []

    def cost(setting):
        asked.append(tuple(setting.items()))
        return abs(setting["BN"] - 64) + 10 * abs(setting["fill"] - 4) + (100 if setting["BN"] == 16 else 0)

    best, ms, tried = script.descend({"BN": 256, "fill": 1}, {"BN": (16, 32, 64), "fill": (1, 2, 4)}, cost)
    assert (best, ms) == ({"BN": 64, "fill": 4}, 0)
    assert len(asked) == len(set(asked)) == len(tried)


def test_the_search_knows_every_setting(script):
    for kernel, _, _, choices in script.SEARCH:
        assert set(choices) <= set(launch.LAUNCH[kernel]), kernel


def test_a_verdict_names_what_was_measured(script):
    row = {"method": "Dense()", "share_of_peak": 0.95, "speedup_torch": 0.9, "speedup_theory": 1.0, "ms": 1.5}
    first, second = script.judge([row], [("Dense()", "share_of_peak", 0.9), ("Dense()", "speedup_torch", 1.0)])
    assert first["met"] and not second["met"] and second["got"] == 0.9
    assert script.judge([], [("Dense()", "share_of_peak", 0.9)]) == []


def test_the_table_is_written(script, monkeypatch, tmp_path):
    """On a machine that is none, with small caches."""
    monkeypatch.setattr(script, "Cuda", Stand)
    monkeypatch.setattr(script, "TARGETS", [(2, 4, 2, 300, [("Dense()", "share_of_peak", 0.9)])])
    search = ("dense", "Dense()", (1, 2, 1, 300), {"fill": (2, 4)})
    monkeypatch.setattr(script, "SEARCH", [search])
    before = {name: dict(setting) for name, setting in launch.LAUNCH.items()}
    with ops.backend("ref"):
        assert script.main(["targets", "tune"], tmp_path) == 0
    launch.LAUNCH.update(before)
    found = json.loads((tmp_path / "targets-stand-in.json").read_text())
    assert found["versions"]["torch"] == torch.__version__ and len(found["table"]) == 1
    assert found["table"][0]["batch"] == 2 and len(found["rows"]) >= 4
    tuned = json.loads((tmp_path / "tune-stand-in.json").read_text())["rows"]
    assert tuned[0]["best"]["fill"] in (2, 4) and len(tuned[0]["tried"]) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_or_with_a_wrong_stage_one_line_says_so(script, capsys, tmp_path):
    assert script.main(["targets"], tmp_path) == 2
    assert capsys.readouterr().err == "error: --device cuda: PyTorch sees no CUDA device\n"
    assert script.main(["fly"], tmp_path) == 2
    assert capsys.readouterr().err.startswith("error: unknown stage 'fly'; known: check, tune, targets")
    assert not list(tmp_path.iterdir())
