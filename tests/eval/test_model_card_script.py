"""benchmarks/model_card.py: tasks as long as the model's context, and a small run with its table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import model_card as script
from skimkv.eval.tasks import parse


def count(text: str) -> int:
    return len(text) // 3


@pytest.mark.parametrize("length", [1024, 16384])
def test_a_record_fills_the_context(length: int) -> None:
    example = next(parse(script.longest("record(lines={})", length, count)).examples(None, 1))
    assert 0.95 * length < count(example.context + example.question) <= length - 8


def test_every_task_of_the_card_is_known() -> None:
    asked = script.targets(4096, count)
    assert len({parse(target.task).spec for target in asked}) == len(asked)
    assert {target.wanted for target in asked if target.task.startswith("niah_multikey")} == {0.9}


@pytest.mark.slow
def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        script,
        "targets",
        lambda length, count: [script.Target("record(lines=10)", 8, 0.5), script.Target("bpc", 4, 0.0)],
    )
    (tmp_path / "wikitext-test.txt").write_text(" = A = \n" + "The mill stood by the river. " * 300 + "\n")
    monkeypatch.setattr(
        sys,
        "argv",
        ["model_card.py", "builtin", str(tmp_path), str(tmp_path / "out"), "--length", "256", "--share", "0.5"],
    )
    with pytest.raises(SystemExit) as end:
        script.main()
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "| `record(lines=10)` | 4 | 1.00" in shown
    assert "≥ 0.5: reached" in shown
    assert "≤ 0: missed" in shown
    assert "tokens with 90%" in shown
