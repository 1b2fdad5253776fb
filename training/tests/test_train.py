"""python -m training.train: from nothing, from a model, and mistakes on its command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import skimkv
from skimkv.cli.errors import carry_out
from skimkv.cli.help import App
from training import train
from training.tests.micro_model import SHAPE


@pytest.fixture
def workspace(tmp_path: Path, text: str) -> Path:
    """A folder with a text and the shape of a micro model."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(text)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return tmp_path


def command(workspace: Path, *more: str) -> int:
    app = App()
    app.command()(train.main)
    given = {
        "--text": workspace / "text",
        "--out": workspace / "out",
        "--config": workspace / "config.json",
        "--threads": 1,
    }
    return carry_out(lambda: app, "train", [*(str(x) for pair in given.items() for x in pair), *more])


def test_the_command_from_nothing_and_from_a_model(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(workspace, "--stage", "64:2:1e-3") == 0
    assert "done" in capsys.readouterr().out
    model, words = skimkv.load(workspace / "out")
    assert model.config.hidden_size == 32
    assert words("some 12").input_ids
    assert command(workspace, "--stage", "64:2:1e-3") == 0  # nothing is left to do
    assert (
        command(workspace, "--stage", "64:1:1e-3", "--out", str(workspace / "more"), "--init", str(workspace / "out"))
        == 0
    )
    assert (workspace / "more" / "tokenizer.json").read_text() == (workspace / "out" / "tokenizer.json").read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--stage", "64:2"], "--stage '64:2' must be LENGTH:STEPS:LR"),
        (["--stage", "8:2:1e-3"], "need LENGTH >= 64"),
        (["--stage", "64:0:1e-3"], "STEPS >= 1"),
        (["--stage", "64:1:nan"], "0 < LR < 1"),
        (["--stage", "32768:1:1e-3"], "a stage of 32768 tokens: the model has 8192 positions"),
        (["--device", "tpu"], "--device 'tpu' is unknown"),
        (["--device", "mps"], "--device mps: training runs on cpu or cuda"),
        (["--text", "no-such-folder"], "--text no-such-folder: there is no such file"),
        (["--config", "no-such-file"], "no-such-file: no config.json can be read there"),
        (["--init", "no-such-folder"], "no config.json can be read there"),
    ],
)
def test_bad_arguments_are_one_line(
    workspace: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert command(workspace, *argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
