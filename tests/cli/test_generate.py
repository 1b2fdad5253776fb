"""skimkv generate: what it prints, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import skimkv.hf.load
from skimkv import ops
from skimkv.ops.cpu import library
from support.command_line import SKIMKV, answer, assert_mistake, run

KEYS = "text method prompt_tokens new_tokens ms_per_token bytes_per_step cache_bytes".split()


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(
        capsys, "generate", "--prompt", "red: 12\nred: ", "--method", "SparQ(8, 16)", "--max-new-tokens", "5"
    )
    assert list(result) == KEYS
    assert result["method"] == "SparQ(r=8, k=16)"
    assert 1 <= result["new_tokens"] <= 5
    # K, V and the channel copy of 4 layers, 2 heads, size 64, float32; the last token was not read back
    cached_tokens = result["prompt_tokens"] + result["new_tokens"] - 1
    assert result["cache_bytes"] == cached_tokens * 4 * 2 * 64 * 3 * 4
    elements = cached_tokens * 8 + 2 * min(16, cached_tokens) * 64 + 3 * 64
    assert result["bytes_per_step"] == 4 * 2 * 4 * elements


def test_text_streams_and_figures_follow_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "generate", "--prompt", "The king", "--max-new-tokens", "12"
    text = answer(capsys, *argv)["text"]
    status, out, err = run(capsys, *argv)
    assert status == 0
    assert out == text if text.endswith("\n") else out == text + "\n"
    assert err.startswith("Dense(): ")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_prompt_from_file_and_from_stdin(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompt = "lamp-stone: 31425\nriver-goat: 27182\noak-drum: 14142\nriver-goat: "
    (tmp_path / "p.txt").write_text(prompt)
    argv = ["generate", "--max-new-tokens", "5"]
    assert run(capsys, *argv, "--prompt-file", str(tmp_path / "p.txt"))[:2] == (0, "27182\n")
    process = subprocess.run([*SKIMKV, *argv], input=prompt, capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (0, "27182\n")
    assert process.stderr.count("\n") == 1  # the figures: no warning, no progress bar


def test_a_byte_order_mark_is_no_part_of_a_prompt(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes("\ufeffThe king".encode())
    argv = "generate", "--max-new-tokens", "1"
    marked = answer(capsys, *argv, "--prompt-file", str(tmp_path / "p.txt"))
    assert marked["prompt_tokens"] == answer(capsys, *argv, "--prompt", "The king")["prompt_tokens"]


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "generate", "--prompt", "The king and the queen", "--compare", "--max-new-tokens", "20"
    same = answer(capsys, *argv, "--method", "SparQ(r=64, k=4096)")
    assert same["compare"]["differs_at"] is None
    assert same["compare"]["dense"]["text"] == same["text"]
    other = answer(capsys, *argv, "--method", "LMInfinite(k=1, initial=0)")
    at, dense = other["compare"]["differs_at"], other["compare"]["dense"]["text"]
    assert other["text"][:at] == dense[:at]
    assert other["text"][: at + 1] != dense[: at + 1]
    _, out, _ = run(capsys, *argv, "--method", "LMInfinite(k=1, initial=0)")
    assert f"part at character {at}," in out


@pytest.mark.parametrize(("dtype", "said"), [("bfloat16", True), ("float16", True), ("float32", False)])
def test_compare_says_that_16_bits_part_texts_by_rounding(
    capsys: pytest.CaptureFixture[str], dtype: str, said: bool
) -> None:
    argv = "generate", "--prompt", "The king and the queen", "--compare", "--max-new-tokens", "20", "--dtype", dtype
    _, out, _ = run(capsys, *argv, "--method", "LMInfinite(k=1, initial=0)")
    assert "--- the texts part at character" in out
    note = f"    In {dtype} rounding alone can part two texts: --dtype float32 tells it from the method."
    assert (note in out) == said
    _, same, _ = run(capsys, *argv, "--method", "Dense()")
    assert "--- the texts are equal" in same and "rounding" not in same


def test_the_seed_decides_what_is_sampled(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "generate", "--prompt", "The king", "--max-new-tokens", "20", "--temperature", "1"
    texts = [answer(capsys, *argv, "--seed", seed)["text"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("short", ["bf16", "bfloat16"])
def test_short_names_of_dtypes(capsys: pytest.CaptureFixture[str], short: str) -> None:
    result = answer(capsys, "generate", "--prompt", "The king", "--max-new-tokens", "2", "--dtype", short)
    cached_tokens = result["prompt_tokens"] + result["new_tokens"] - 1
    assert result["cache_bytes"] == cached_tokens * 4 * 2 * 64 * 2 * 2  # K and V of 2 bytes


@pytest.mark.slow
def test_past_the_positions_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "generate", "--prompt", "x " * 4500, "--max-new-tokens", "2")
    assert status == 0 and re.search(r"\d+ tokens go past the 8192 positions", err)


def test_a_prompt_without_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert_mistake(run(capsys, "generate", "--prompt-file", "/dev/zero"), "this is a device, which may have no end")


@pytest.mark.parametrize("temperature", ["1e-6", "1e30"])
def test_extreme_temperatures(capsys: pytest.CaptureFixture[str], temperature: str) -> None:
    argv = ("generate", "--prompt", "The king", "--max-new-tokens", "3", "--temperature", temperature, "--seed")
    assert 1 <= answer(capsys, *argv, str(2**63 - 1))["new_tokens"] <= 3
    assert 1 <= answer(capsys, *argv, str(-(2**63)))["new_tokens"] <= 3


def test_closed_stdin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # what Python makes of a closed one
    assert_mistake(run(capsys, "generate"), "stdin is closed; give --prompt or --prompt-file")


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("SKIMKV_BACKEND=foo", "unknown backend 'foo'; known: ref, cpu, gpu"),
        ("SKIMKV_ISA=sse9", "SKIMKV_ISA=sse9 is not available; this machine has "),
    ],
)
@pytest.mark.parametrize("command", ["generate --prompt x", "eval --task record --method Dense() --out r.jsonl"])
def test_a_bad_variable_is_refused_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variable: str,
    words: str,
    command: str,
) -> None:
    """The backend is read when a process starts, and the instruction set when the library is first used."""
    name, value = variable.split("=")
    if name == "SKIMKV_ISA" and ops.select_backend("cpu")[0] != "cpu":
        pytest.skip("the native library is not built")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(skimkv.hf.load, "load", None)
    if name == "SKIMKV_BACKEND":
        monkeypatch.setattr(ops.backends, "_forced_for_process", value)
    else:
        monkeypatch.setattr(library, "isa", lambda: None)
    assert_mistake(run(capsys, *command.split()), words)
    assert not (tmp_path / "r.jsonl").exists()


@pytest.mark.slow
def test_ctrl_c_prints_what_there_is() -> None:
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    argv = [*SKIMKV, "generate", "--prompt", "The king said", "--max-new-tokens", "4000", "--temperature", "1"]
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env,
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


def test_device_and_weights_are_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "generate", "--prompt", "x", "--max-new-tokens", "1", "--device"
    assert answer(capsys, *argv, "cpu")["new_tokens"] == 1
    assert_mistake(run(capsys, *argv, "cuda:99"), "--device cuda:99: PyTorch sees ")
    mistake = run(capsys, *argv, "cpu", "--weights", "int8", "--no-fast")
    assert_mistake(mistake, 'weights="int8": fast=False is not possible')


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_text() -> None:
    from torch._dynamo.utils import counters

    from skimkv import load, parse
    from skimkv.eval.generate import encode, run

    model, tokenizer = load("builtin")
    record = "lamp-stone: 31425\nriver-goat: 27182\ncloud-fish: 16180\nglass-horse: 14142\nlamp-stone: "
    ids = encode(tokenizer, record, chat=False)
    before = counters["stats"]["unique_graphs"]
    plain, compiled = (run(model, tokenizer, ids, parse("SparQ(r=16, k=16)"), 6, compile=c) for c in (False, "eager"))
    assert plain.text == compiled.text and plain.text.startswith("31425")
    assert counters["stats"]["unique_graphs"] == before + 1
    assert not hasattr(model, "_skimkv") or model._skimkv.attached is None, "nothing stays attached"


def test_a_mistake_after_the_first_token_has_a_line_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import skimkv.eval.generate

    def begin(*arguments: object, **options: object) -> None:
        """Write a piece of text, as a run whose second token must be compiled."""
        write = arguments[-1]
        assert callable(write)
        write("he")
        raise ValueError("no working C++ compiler")

    monkeypatch.setattr(skimkv.eval.generate, "run", begin)
    argv = "generate", "--prompt", "x", "--max-new-tokens", "4"
    assert run(capsys, *argv) == (2, "he\n", "skimkv: no working C++ compiler\n")
    assert run(capsys, *argv, "--json") == (2, "", "skimkv: no working C++ compiler\n")


@pytest.mark.slow  # inductor compiles with a C++ compiler
def test_compile(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    argv = "generate", "--prompt", "lamp-stone: 31425\nriver-goat: 27182\nlamp-stone: ", "--max-new-tokens", "6"
    compiled = answer(capsys, *argv, "--compile")
    assert compiled["text"] == answer(capsys, *argv)["text"]
    assert compiled["ms_per_token"] < 1000, "the step that compiles does not count"
