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
    for parameter in COMMANDS[name].params:
        assert parameter.help, parameter.name
        assert parameter.help.rstrip().endswith((".", ")")), (parameter.name, parameter.help)


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


LIGHT = """
import contextlib, io, json, sys
for heavy in ("torch", "transformers", "matplotlib", "numpy"):
    sys.modules[heavy] = None  # an import of it raises ImportError
from skimkv.cli import main
for argv in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(argv)
    print(json.dumps([status, out.getvalue(), err.getvalue()]))
"""

# (command line, what the one line on stderr says); {folder} is a folder with the files "file" and "words"
AT_THE_DOOR = [
    ("generate --prompt-file {folder}/missing.txt", "missing.txt: there is no such file"),
    ("generate --prompt-file {folder}", "this is a folder"),
    ("generate --prompt x --prompt-file {folder}/file", "not both"),
    ("generate --prompt x --model ./missing-folder", "--model './missing-folder': no such folder"),
    ("generate --prompt x --model {folder}/missing.gguf", "no such file"),
    ("generate --prompt x --model {folder}", "no config.json"),
    ("generate --prompt x --model {folder}/file", "not a model folder"),
    ("generate --prompt x --dtype float23", "unknown dtype 'float23'"),
    ("generate --prompt x --method SparQ(r=32", "a closing parenthesis is missing"),
    ("generate --prompt x --method SparQ(r=32,k=128,channels=int8)", "put quotes around it: channels='int8'"),
    ("generate --prompt x --method PyramidKV(k=64)", "unknown method 'PyramidKV'"),
    ("eval --task lines --method SparQ(r=8,kk=16)", "no argument 'kk'; did you mean k?"),
    ("bench attention --method SparK(r=8,k=16)", "did you mean SparQ?"),
    ("generate --prompt x --method SparQ(r=0,k=1)", "r = 0 must be an integer of at least 1"),
    ("generate --prompt x --device gpu", "--device 'gpu' is unknown; write cpu, cuda"),
    ("roofline --method TopK(k=0)", "k = 0 must be an integer of at least 1"),
    ("bench attention --heads 3 --kv-heads 2", "--heads 3 must be a multiple of --kv-heads 2"),
    ("bench attention --length 0", "--length 0 must be at least 1"),
    ("analyse --tokens 3", "--tokens 3 must be at least 128"),
    ("tune --text {folder}/file --channels x", "--channels 'x' is not one of 'none', 'copy', 'int8', 'int4'"),
    ("plot {folder}/words", "words, line 1: no record of an evaluation"),
    ("eval --task record(lines=0) --method Dense()", "lines = 0 must be a whole number of at least 1"),
    ("eval --task lines --data {folder} --method Dense()", "no lines_N.jsonl with N of at least"),
    ("eval --task record --method Dense() --mode x", "--mode 'x' is not one of 'blind', 'aware', 'both'"),
    ("demo --lines 0", "--lines 0 must be at least 1"),
    ("demo --lines x", "--lines 'x' must be a valid integer"),
    ("demo --lines 3 --asked 4", "--asked 4 must be at most --lines 3"),
    ("roofline --method __import__('os')", "'__import__'"),
    ("demo --out no-such-folder/x.png", "there is no folder no-such-folder"),
    ("demo --out {folder}", "this is a folder"),
    ("demo --out figure.doc", "cannot be saved as .doc"),
    ("eval --task lines --method Dense() --out no-such-folder/x.jsonl", "there is no folder no-such-folder"),
    ("eval --task lines --method Dense() --model ./missing-folder", "no such folder"),
    ("eval --task lines --method Dense() --data {folder}/none", "there is no such file or folder"),
    ("eval --task nonsense --method Dense()", "unknown task 'nonsense'"),
    ("tune --text {folder}/file --target-loss x", "--target-loss"),
    ("roofline --hardware xyz", "--hardware 'xyz' is unknown"),
    ("bench token --shape xyz", "unknown shape 'xyz'"),
    ("tune --text {folder}/missing.txt", "there is no such file"),
    ("tune --text {folder}/file --plot no-such-folder/x.png", "there is no folder no-such-folder"),
    ("plot {folder}/missing.jsonl", "missing.jsonl"),
    ("plot {folder}/file --out no-such-folder/x.png", "there is no folder no-such-folder"),
    ("analyse --text {folder}/missing.txt", "there is no such file"),
    ("analyse --out {folder}/file", "this is a file"),
    ("bench attention --plot no-such-folder/x.png", "there is no folder no-such-folder"),
    ("bench token --plot no-such-folder/x.png", "there is no folder no-such-folder"),
    ("bench memory --plot no-such-folder/x.png", "there is no folder no-such-folder"),
    ("roofline --plot no-such-folder/x.png", "there is no folder no-such-folder"),
]


def test_mistakes_are_found_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "words").write_text("These are words.")
    lines = [[part.format(folder=tmp_path) for part in line.split()] for line, _ in AT_THE_DOOR]
    process = subprocess.run(
        [sys.executable, "-c", LIGHT, json.dumps(lines)], capture_output=True, text=True, cwd=tmp_path
    )
    assert process.returncode == 0, process.stderr
    results = [json.loads(line) for line in process.stdout.splitlines()]
    assert len(results) == len(AT_THE_DOOR)
    for (line, words), (status, out, err) in zip(AT_THE_DOOR, results, strict=True):
        assert (status, out) == (2, ""), line
        assert err.startswith("skimkv: ") and err.count("\n") == 1, line
        assert words in err, line


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
