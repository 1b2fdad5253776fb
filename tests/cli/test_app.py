"""The command line as a whole: its help, its version, and mistakes that are found before anything heavy is imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from skimkv.cli.app import app
from support.command_line import assert_mistake, run

COMMANDS: dict[str, Any] = {}
for _name, _command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
    _parts = getattr(_command, "commands", None)
    COMMANDS |= {f"{_name} {part}": c for part, c in _parts.items()} if _parts else {_name: _command}


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--version")
    assert (status, out.split()[0]) == (0, "skimkv")


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_shows_every_command(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    status, out, _ = run(capsys, flag)
    assert status == 0
    names = {name.split()[0] for name in COMMANDS}
    assert names == set("demo generate info doctor serve eval tune plot analyse bench roofline".split())
    assert all(re.search(rf"^\W*{name} ", out, re.MULTILINE) for name in names)


@pytest.mark.parametrize("argv", [[], ["bench"]])
def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    status, out, _ = run(capsys, *argv)
    assert status == 2 and out.strip().startswith("Usage: skimkv") and out.count("\n") > 5


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_a_sentence_an_example_and_whole_phrases(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, out, _ = run(capsys, *name.split(), "--help")
    assert status == 0
    sentence, *rest = COMMANDS[name].help.split("\n\n")
    assert sentence[0].isupper() and sentence.rstrip().endswith(".")
    assert "Example:" in [part.strip() for part in rest]
    examples = [line.split() for part in rest for line in part.splitlines() if line.strip().startswith("skimkv ")]
    assert examples and all(words[1 : len(name.split()) + 1] == name.split() for words in examples)
    known = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert {word for words in examples for word in words if word.startswith("--")} <= known
    assert "--help" in out and "-h" in out
    assert all(panel in out for parameter in COMMANDS[name].params if (panel := parameter.rich_help_panel))
    for parameter in COMMANDS[name].params:
        assert parameter.help, parameter.name
        assert parameter.help.rstrip().endswith((".", ")")), (parameter.name, parameter.help)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
def test_help_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    widths = {}
    for name in ("", "bench", *COMMANDS):
        _, out, _ = run(capsys, *name.split(), "--help")
        widths[name] = max(map(len, out.splitlines()))
        assert "…" not in out
    assert {name: width for name, width in widths.items() if width > columns} == {}
    assert max(widths.values()) > columns - 20


@pytest.mark.parametrize("argv", [["nonsense"], ["generate", "--metod", "Dense()"], ["bench", "nonsense"]])
def test_a_word_that_no_command_knows(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert_mistake(run(capsys, *argv), argv[-2] if "--metod" in argv else "nonsense")


NO_FIGURES = """
import sys
sys.modules["matplotlib"] = None  # an import of it raises ImportError
from skimkv.cli import main
for argv in (
    ["info"],
    ["generate", "--prompt", "The king", "--max-new-tokens", "2"],
    ["eval", "--task", "record(lines=12, asked=1)", "--method", "Dense()", "--limit", "1", "--out", sys.argv[1]],
):
    assert main([*argv, "--json"]) == 0, argv
"""


@pytest.mark.slow
def test_matplotlib_is_needed_for_figures_only(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", NO_FIGURES, str(tmp_path / "r.jsonl")], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert [type(json.loads(line)) for line in process.stdout.splitlines()] == [dict] * 3
