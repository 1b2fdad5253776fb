"""A GGUF file as the model of every command that takes one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from skimkv.eval.generate import encode
from skimkv.hf.gguf_model import load_gguf
from support.command_line import answer, assert_mistake, run
from support.gguf_files import tiny, write

METHODS = "--method", "Dense()", "--method", "SparQ(r=8, k=16)"
RECORD = "record(lines=12, asked=2)"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write(tmp_path / "tiny.gguf", tiny())
    return tmp_path / "tiny.gguf"


def test_generate(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    network, tokenizer = load_gguf(model)
    ids = torch.tensor([encode(tokenizer, "the Cat", chat=False)])
    expected = network.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    result = answer(capsys, "generate", "--model", str(model), "--prompt", "the Cat", "--max-new-tokens", "6")
    assert result["prompt_tokens"] == ids.shape[1]
    assert result["text"] == tokenizer.decode(expected, skip_special_tokens=True)


def test_eval(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    argv = "eval", "--model", str(model), "--task", RECORD, *METHODS, "--limit", "2", "--out", str(out)
    rows = answer(capsys, *argv)["rows"]
    assert [(row["task"], row["n"]) for row in rows] == [(RECORD, 2)] * 2
    assert all(row["ms_per_token"] > 0 and row["bytes_per_token"] > 0 for row in rows)
    before = out.read_bytes()
    records = [json.loads(line) for line in before.splitlines()[1:]]
    assert {(record["model"], record["dtype"]) for record in records} == {(str(model), "bfloat16")}
    assert answer(capsys, *argv)["rows"][0]["n"] == 2 and out.read_bytes() == before, "nothing is computed again"
    torch.manual_seed(1)
    write(model, tiny())  # other weights under the same name
    status, _, err = run(capsys, *argv)
    assert status == 2 and "of another model" in err and out.read_bytes() == before


@pytest.mark.slow  # figures
def test_tune_and_analyse(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the Cat in the hat sat on the mat. " * 100)
    of_text = "--model", str(model), "--text", str(text)
    sizes = "--prompt", "128", "--scored", "4", "--pieces", "2", "--channels", "int8", "--target-loss", "99%"
    tuned = answer(capsys, "tune", *of_text, *sizes, "--out", str(tmp_path / "t.jsonl"))
    assert tuned["model"] == str(model) and tuned["chosen"]["method"].startswith("SparQ(")
    pytest.importorskip("sklearn")
    sizes = "--tokens", "128", "--pieces", "1", "--queries", "2", "--clouds", "1"
    found = answer(capsys, "analyse", *of_text, *sizes, "--out", str(tmp_path / "analysis"))
    assert (found["model"], len(found["layers"])) == (str(model), 2)


@pytest.mark.parametrize(
    "command",
    ["generate --prompt x --model", "serve", "doctor --model", "bench token --model", "bench generate --model"],
)
def test_a_format_of_weights_is_refused_in_the_same_words(
    capsys: pytest.CaptureFixture[str], model: Path, command: str
) -> None:
    words = f"--weights='int8': {model} has formats of its own; leave it out"
    assert_mistake(run(capsys, *command.split(), str(model), "--weights", "int8"), words)


@pytest.mark.parametrize(
    "command",
    ["generate --prompt x --model", "serve", "eval --task record --method Dense() --model", "tune --text TEXT --model",
     "analyse --model"],
)  # fmt: skip
def test_64_bits_are_refused_by_name(capsys: pytest.CaptureFixture[str], model: Path, command: str) -> None:
    words = f"--dtype='float64' is not possible with {model}; write float32, bfloat16 or float16"
    argv = [str(model) if word == "TEXT" else word for word in command.split()]
    assert_mistake(run(capsys, *argv, str(model), "--dtype", "double"), words)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--device cuda", "device 'cuda' is not possible; it runs on a CPU only"),
        ("--compile", "--compile: a model with --weights or of a GGUF file cannot be compiled"),
    ],
)
def test_what_8_bit_weights_cannot_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path, option: str, words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    result = run(capsys, "generate", "--model", str(model), "--prompt", "x", *option.split())
    assert_mistake(result, words)
