"""skimkv demo: its JSON object, its figure, and what a newcomer sees."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from skimkv import METHODS
from skimkv.eval.demo import NOT_SHOWN
from support.command_line import SKIMKV, answer, assert_mistake, run

KEYS = "method correct asked elements_predicted elements_counted bytes_per_step cache_bytes ms_per_token".split()


def test_a_small_demo(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figure = tmp_path / "d.png"
    result = answer(capsys, "demo", "--lines", "40", "--asked", "2", "--out", str(figure))
    assert result["figure"] == str(figure)
    assert figure.read_bytes().startswith(b"\x89PNG")
    rows = result["rows"]
    assert all(list(row) == KEYS for row in rows)
    assert rows[0]["method"] == "Dense()"
    assert {row["method"].split("(")[0] for row in rows} == set(METHODS) - set(NOT_SHOWN)
    for row in rows:
        assert row["elements_predicted"] == row["elements_counted"], row["method"]
        assert row["bytes_per_step"] <= 1.05 * rows[0]["bytes_per_step"]


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert_mistake(run(capsys, "demo", "--out", "no-such-folder/x.png"), "there is no folder no-such-folder")
    assert_mistake(run(capsys, "demo", "--lines", "1000"), "14473 tokens do not fit the 4096")
    assert_mistake(run(capsys, "demo", "--asked", "0"), "--asked 0 must be at least 1")


@pytest.mark.slow
def test_as_a_newcomer_runs_it(tmp_path: Path) -> None:
    process = subprocess.run([*SKIMKV, "demo", "--json"], capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    rows = {row["method"]: row for row in json.loads(process.stdout)["rows"]}
    dense = rows["Dense()"]
    assert dense["correct"] >= 0.9 * dense["asked"]
    shares = {name: row["bytes_per_step"] / dense["bytes_per_step"] for name, row in rows.items()}
    sparq = [name for name in rows if name.startswith("SparQ")]
    assert len(sparq) == 3
    for share, name in zip((1 / 2, 1 / 4, 1 / 8), sparq, strict=True):
        assert 0.9 * share < shares[name] <= share
    assert all(rows[name]["correct"] >= 0.8 * dense["correct"] for name in sparq)
    assert all(row["elements_predicted"] == row["elements_counted"] for row in rows.values())
    assert (tmp_path / "skimkv-demo.png").stat().st_size > 20_000
