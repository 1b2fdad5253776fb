"""The command line as a user meets it: what it prints, and how it ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skimkv.cli.app import main

SKIMKV = [sys.executable, "-m", "skimkv.cli"]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(list(argv))
    out, err = capsys.readouterr()
    return status, out, err


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    status, out, err = run(capsys, *argv, "--json")
    assert status == 0, err
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    from skimkv import METHODS

    facts = answer(capsys, "info")
    assert [m["name"] for m in facts["methods"]] == list(METHODS)
    assert {m["store"] for m in facts["methods"]} == {"Full", "Slots", "Clusters"}
    assert facts["backends"]["cpu"]["backend"] in ("ref", "cpu")
    status, out, _ = run(capsys, "info")
    assert status == 0
    assert all(name in out for name in METHODS)


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert all(command in out for command in ("demo", "generate", "info"))
    status, out, _ = run(capsys, "--version")
    assert (status, out.split()[0]) == (0, "skimkv")


@pytest.mark.parametrize("argv", [[], ["bench"]])
def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert err.startswith("Usage: skimkv")
    assert err.count("\n") > 5


GENERATE = "text method prompt_tokens new_tokens ms_per_token bytes_per_step cache_bytes".split()


def test_generate_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(
        capsys, "generate", "--prompt", "red: 12\nred: ", "--method", "SparQ(8, 16)", "--max-new-tokens", "5"
    )
    assert list(found) == GENERATE
    assert found["method"] == "SparQ(r=8, k=16)"
    assert 1 <= found["new_tokens"] <= 5
    # K, V and the channel copy of 4 layers, 2 heads, size 64, float32; the last token was not read back
    held = found["prompt_tokens"] + found["new_tokens"] - 1
    assert found["cache_bytes"] == held * 4 * 2 * 64 * 3 * 4
    assert found["bytes_per_step"] == 4 * 2 * 4 * (held * 8 + 2 * min(16, held) * 64 + 3 * 64)


def test_generate_streams_and_ends_with_figures(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "generate", "--prompt", "The king", "--max-new-tokens", "12"
    text = answer(capsys, *asked)["text"]
    status, out, err = run(capsys, *asked)
    assert status == 0
    assert out == text if text.endswith("\n") else out == text + "\n"
    assert err.startswith("Dense(): ")
    assert err.count("\n") == 1


def test_generate_retrieves_from_file_and_stdin(tmp_path: Path) -> None:
    prompt = "lamp-stone: 31425\nriver-goat: 27182\noak-drum: 14142\nriver-goat: "
    (tmp_path / "p.txt").write_text(prompt)
    asked = [*SKIMKV, "generate", "--max-new-tokens", "5"]
    by_file = subprocess.run([*asked, "--prompt-file", tmp_path / "p.txt"], capture_output=True, text=True)
    by_stdin = subprocess.run(asked, input=prompt, capture_output=True, text=True)
    assert by_file.returncode == by_stdin.returncode == 0, by_file.stderr
    assert by_file.stdout == by_stdin.stdout == "27182\n"
    assert by_file.stderr.count("\n") == 1  # the figures: no warning, no progress bar


def test_generate_compare(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "generate", "--prompt", "The king and the queen", "--compare", "--max-new-tokens", "20"
    same = answer(capsys, *asked, "--method", "SparQ(r=64, k=4096)")
    assert same["compare"]["differs_at"] is None
    assert same["compare"]["dense"]["text"] == same["text"]
    other = answer(capsys, *asked, "--method", "LMInfinite(k=1, initial=0)")
    at, dense = other["compare"]["differs_at"], other["compare"]["dense"]["text"]
    assert other["text"][:at] == dense[:at]
    assert other["text"][: at + 1] != dense[: at + 1]
    _, out, _ = run(capsys, *asked, "--method", "LMInfinite(k=1, initial=0)")
    assert f"part at character {at}," in out


def test_generate_samples_by_seed(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "generate", "--prompt", "The king", "--max-new-tokens", "20", "--temperature", "1"
    texts = [answer(capsys, *asked, "--seed", seed)["text"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_generate_stops_at_the_last_position(capsys: pytest.CaptureFixture[str]) -> None:
    lines = "".join(f"a: {i}\n" for i in range(2000))
    from skimkv.eval.generate import encode, run
    from skimkv.hf.load import load

    model, tokenizer = load("builtin")
    from skimkv import parse

    ids = encode(tokenizer, lines, chat=False)[:4090]
    assert len(ids) == 4090
    assert run(model, tokenizer, ids, parse("LMInfinite(k=64)"), 100).new_tokens <= 6


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["generate", "--prompt", "x", "--method", "SparK(r=8, k=16)"], "unknown method 'SparK'; did you mean SparQ?"),
        (["generate", "--prompt", "x", "--method", "SparQ(r=8, kk=16)"], "no argument 'kk'; did you mean k?"),
        (["generate", "--prompt", "x", "--method", "__import__('os').getcwd()"], "is no method spec"),
        (["generate", "--prompt", "x", "--method", "TopK(k=0)"], "k = 0 must be"),
        (["generate", "--prompt", "x", "--method", "SparQ(r=65, k=4)"], "r = 65 must be at most 64"),
        (["generate", "--prompt", " \n"], "the prompt is empty"),
        (["generate", "--prompt", "x " * 5000], "does not fit the model's 4096 positions"),
        (["generate", "--prompt", "x", "--chat"], "no chat template"),
        (["generate", "--prompt", "x", "--prompt-file", "README.md"], "not both"),
        (["generate", "--prompt-file", "no-such-file"], "no-such-file"),
        (["generate", "--prompt", "x", "--model", "tests"], "tests: no config.json"),
        (["generate", "--prompt", "x", "--dtype", "float23"], "float23"),
        (["generate", "--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["generate", "--prompt", "x", "--metod", "Dense()"], "--metod"),
        (["demo", "--out", "no-such-folder/x.png"], "there is no folder no-such-folder"),
        (["demo", "--lines", "1000"], "14473 tokens does not fit the model's 4096"),
        (["demo", "--asked", "0"], "asked = 0"),
        (["nonsense"], "nonsense"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argv: list[str], said: str
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert err.startswith("skimkv: ")
    assert err.count("\n") == 1
    assert said in err


def test_binary_prompt_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b"abc\xff\xfe")
    status, _, err = run(capsys, "generate", "--prompt-file", str(tmp_path / "p"))
    assert status == 2
    assert "not UTF-8" in err


def test_ctrl_c_prints_what_there_is() -> None:
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    asked = [*SKIMKV, "generate", "--prompt", "The king said", "--max-new-tokens", "4000", "--temperature", "1"]
    process = subprocess.Popen(
        asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None
    first = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    figures, last = err.decode().splitlines()
    assert process.returncode == 130
    assert len(first + out) > 20
    assert figures.startswith("Dense(): ")
    assert 1 <= int(figures.split()[1]) < 4000
    assert last == "skimkv: interrupted"


def test_demo_small(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figure = tmp_path / "d.png"
    found = answer(capsys, "demo", "--lines", "40", "--asked", "2", "--out", str(figure))
    assert found["figure"] == str(figure)
    assert figure.read_bytes().startswith(b"\x89PNG")
    rows = found["rows"]
    keys = "method correct asked elements_predicted elements_counted bytes_per_step cache_bytes ms_per_token".split()
    assert all(list(row) == keys for row in rows)
    assert rows[0]["method"] == "Dense()"
    from skimkv import METHODS

    assert {row["method"].split("(")[0] for row in rows} == set(METHODS)
    for row in rows:
        assert row["elements_predicted"] == row["elements_counted"], row["method"]
        assert row["bytes_per_step"] <= 1.05 * rows[0]["bytes_per_step"]


@pytest.mark.slow
def test_demo_as_a_newcomer_runs_it(tmp_path: Path) -> None:
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
