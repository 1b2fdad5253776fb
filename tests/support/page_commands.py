"""The commands of the pages, and stand-ins for the models and files that they name."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from transformers import AutoTokenizer

import skimkv
from skimkv.hf.load import BUILTIN
from support.random_models import random_model, tiny_configuration

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
RUN = """
import json, os, sys
from skimkv.cli import main
for folder, argv in json.load(sys.stdin):
    os.chdir(folder)
    status = main(argv)
    print(status, argv, flush=True)
    if status:
        sys.exit(status)
"""


class Command(NamedTuple):
    """One command of a page: its words, and what a comment beside it says it needs, or an empty text.

    A block whose first line is such a comment is one command without words: what a shell makes of it is not read.
    """

    page: str
    argv: list[str]
    needs: str


def commands(page: Path) -> Iterator[Command]:
    """Every command of a page, its continuation lines joined.

    A comment "# needs ..." at the end of a line is of that command, and as the first line of a block of all of it.
    """
    for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        if block.startswith("# needs "):
            yield Command(page.name, [], block.partition("\n")[0].removeprefix("# "))
            continue
        for line in block.replace("\\\n", " ").splitlines():
            argv, (_, _, comment) = shlex.split(line, comments=True), line.partition(" # ")
            if argv:
                yield Command(page.name, argv, comment.strip() if comment.strip().startswith("needs ") else "")


def smaller(argv: list[str], substitutions: Iterable[tuple[str, str]]) -> list[str]:
    """The same command, so that two cores can do it: patterns and what stands in their places."""
    text = shlex.join(argv)
    for pattern, instead in substitutions:
        text = re.sub(pattern, instead, text)
    return shlex.split(text)


def run_commands(argvs: list[tuple[Path, list[str]]], home: Path) -> str:
    """Run commands of skimkv in their order in one process, each in a folder, with the Hub that `write_hub` wrote.

    Returns what they print, and a line "0 [words]" after each. Fails with it where one ends with another status than 0.
    """
    environment = {
        **os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(skimkv.__file__).parents[1]),
    }  # fmt: skip
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE"):
        environment.pop(name, None)
    run = subprocess.run(
        [sys.executable, "-c", RUN], input=json.dumps([(str(folder), argv) for folder, argv in argvs]),
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return run.stdout


def write_model(folder: Path, family: str) -> None:
    """Write a tiny random model of a family, with the tokenizer of the bundled model, into a folder."""
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN)
    tokenizer.chat_template = TEMPLATE
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 40960, "head_dim": 128}
    random_model(tiny_configuration(family, **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_hub(home: Path, models: dict[str, str]) -> None:
    """Write models into a folder as HF_HOME has them after a download. models: names, and their families."""
    for name, family in models.items():
        repository = home / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(snapshot.name)
        write_model(snapshot, family)


def write_data(folder: Path) -> None:
    """Write small files of what the tasks read, DATA, and texts, and notes.txt."""
    data = folder / "DATA"
    (data / "essays").mkdir(parents=True)
    (folder / "texts").mkdir()
    prose = "".join(f"Day {i} brought rain and the river rose a little. " for i in range(400))
    for path in (data / "essays" / "a.txt", folder / "texts" / "a.txt"):
        path.write_text(prose)
    (folder / "notes.txt").write_text(prose[:4000])
    paragraphs = [
        {"context": f"Town {i} has {i} gates.", "qas": [
            {"id": f"{i}{j}", "question": f"How many {i}?", "answers": [{"text": str(i)}]} for j in "ab"]}
        for i in range(60)
    ]  # fmt: skip
    (data / "squad.json").write_text(json.dumps({"data": [{"title": "Towns", "paragraphs": paragraphs}]}))
    hotpot = [
        {"question": f"Who leads {i}?", "answer": f"Ann {i}", "context": [[f"T{i}{j}", ["It is. "]] for j in range(3)]}
        for i in range(30)
    ]
    (data / "hotpotqa.json").write_text(json.dumps(hotpot))
    trivia = {"id": "t", "question": "Who?", "answers": ["Ann"], "context": "Ann led the town. " * 9}
    (data / "triviaqa.jsonl").write_text(json.dumps(trivia))
    record = [(f"red-{i}", 1000 + i) for i in range(12)]
    text = "Keep these:\n" + "".join(f"line {name}: REGISTER_CONTENT is <{number}>\n" for name, number in record)
    row = {"prompt": text, "random_idx": ["red-3", 3], "expected_number": 1003}
    (data / "lines_12.jsonl").write_text(json.dumps(row))
