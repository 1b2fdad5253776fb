"""`skimkv generate --prompt-cache`: a prompt is read once, and a file of another one is refused."""

from __future__ import annotations

import pytest

from skimkv.eval import generate
from support.command_line import answer, assert_mistake, run

PROMPT = "the grass is green and the sky is blue and the door is red and the " * 5
BASE = ["generate", "--max-new-tokens", "8", "--json", "--method", "Skim(k=16)"]


def test_the_second_run_reads_what_is_new_only(tmp_path, capsys, monkeypatch):
    file, read = tmp_path / "prompt.safetensors", []
    plain = answer(capsys, *BASE, "--prompt", PROMPT)
    first = answer(capsys, *BASE, "--prompt", PROMPT, "--prompt-cache", str(file))
    load = generate.Cache.load
    monkeypatch.setattr(generate.Cache, "load", lambda *args: read.append(load(*args)) or read[-1])
    again = answer(capsys, *BASE, "--prompt", PROMPT, "--prompt-cache", str(file))
    assert first["text"] == again["text"] == plain["text"] and len(read) == 1
    longer = answer(capsys, *BASE, "--prompt", PROMPT + "sea is deep and the ", "--prompt-cache", str(file))
    assert len(read) == 2 and longer["prompt_tokens"] > first["prompt_tokens"]


def test_a_prompt_is_read_to_its_end_as_without_a_file(tmp_path, capsys):
    """With so few rows that decoding the last token of the prompt by the method would give another text."""
    for spec in ("TopK(k=1)", "SparQ(r=1, k=2)", "Quest(page=4, k=4)"):
        base = [*BASE[:-1], spec, "--prompt", PROMPT]
        plain, file = answer(capsys, *base), str(tmp_path / spec[:4])
        for _ in range(2):
            assert answer(capsys, *base, "--prompt-cache", file)["text"] == plain["text"]


@pytest.mark.parametrize(("options", "words"), [
    (["--prompt", "another text altogether, " * 30], "a cache of another use: its tokens is"),
    (["--prompt", "the"], "tokens, which is no beginning of a prompt of"),
    (["--prompt", PROMPT, "--method", "TOVA(k=16)"], "a cache of another use: its method is 'Skim"),
    (["--prompt", PROMPT, "--compare"], "--prompt-cache with --compare: a file holds the cache of one method"),
])  # fmt: skip
def test_another_use_is_refused_in_one_line(options, words, tmp_path, capsys):
    file = tmp_path / "c"
    answer(capsys, *BASE, "--prompt", PROMPT, "--prompt-cache", str(file))
    assert_mistake(run(capsys, *BASE, *options, "--prompt-cache", str(file)), words)
