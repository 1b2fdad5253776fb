"""Measure what the bundled model's card says: python benchmarks/model_card.py MODEL DATA OUT [--length N] [--share S]

MODEL is `builtin` or a folder, DATA a folder with tinyshakespeare.txt, wikitext-test.txt and essays/ (for local use
only). Every task is asked at the longest context that the model has, or at --length tokens, with dense attention,
float32, greedy and question-blind; --share 0.2 asks a fifth of the examples. The table that is printed has the target
of each task beside what was reached, with its 95% interval, and after it the distribution over heads of the number of
tokens that hold 90% of the attention. OUT/results.jsonl keeps the answers, so the same command goes on after an
interruption. Where skimkv is not installed, write PYTHONPATH=src in front.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from skimkv.cli import main as skimkv
from skimkv.eval.results import load, summary
from skimkv.eval.tasks import parse as parse_task
from skimkv.hf.load import BUILTIN

ROOM = 16  # tokens that are left for the answer to a record


class Target(NamedTuple):
    """A task, how many examples are asked, and the mean score that is wanted; None: as far as it goes."""

    task: str
    limit: int
    wanted: float | None


def targets(length: int, count: Callable[[str], int]) -> list[Target]:
    """Return the tasks of the card for contexts of `length` tokens; `count` counts the tokens of a text."""
    return [
        Target(longest("record(lines={})", length, count), 60, 0.95),
        Target(longest("record(lines={})", length // 4, count), 60, 0.95),
        Target(f"passkey(length={length})", 60, 0.95),
        Target("lines", 50, None),
        *(Target(f"niah_single_{i}(length={length})", 40, 0.95) for i in (1, 2, 3)),
        *(Target(f"niah_multikey_{i}(length={length})", 40, 0.9) for i in (1, 2, 3)),
        *(Target(f"{name}(length={length})", 40, None) for name in ("niah_multivalue", "niah_multiquery")),
        *(Target(f"{name}(length={length})", 40, None) for name in ("vt", "cwe", "fwe")),
        Target("repetition(skip=0.9)", 72, 200),
        Target("bpc", 16, 1.92),
    ]


def longest(pattern: str, length: int, count: Callable[[str], int]) -> str:
    """Return the task whose first example has at most length - ROOM tokens, with the largest number in the pattern."""
    size = 512
    for _ in range(2):  # the second time from a size that is about right
        example = next(parse_task(pattern.format(size)).examples(None, 0))
        size = int(size * (length - ROOM) * 0.99 / count(example.context + example.question))
    return pattern.format(size)


def main() -> None:
    """Run the command; exit with status 1 if an evaluation fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--length", type=int)
    parser.add_argument("--share", type=float, default=1.0)
    given = parser.parse_args()
    folder = BUILTIN if given.model == "builtin" else Path(given.model)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    length = given.length or config["max_position_embeddings"]
    asked = targets(length, lambda text: len(tokenizer.encode(text).ids))
    given.out.mkdir(parents=True, exist_ok=True)
    results = given.out / "results.jsonl"
    run = ["eval", "--model", given.model, "--method", "Dense()", "--dtype", "float32", "--data", str(given.data)]
    for target in asked:
        limit = max(4, round(given.share * target.limit))
        if skimkv([*run, "--task", target.task, "--limit", str(limit), "--batch", "4", "--out", str(results)]):
            sys.exit(1)
    rows = {row.task: row for row in summary(load(results))}
    lower = {target.task: parse_task(target.task).lower for target in asked}
    print("\n| task | examples | score | target |\n| --- | --- | --- | --- |")
    for task, _, wanted in asked:
        row = rows[task]
        interval = "" if row.low is None or row.high is None else f" ({row.low:.2f} … {row.high:.2f})"
        reached = wanted is None or (row.mean <= wanted if lower[task] else row.mean >= wanted)
        sign = "≤" if lower[task] else "≥"
        target = "" if wanted is None else f"{sign} {wanted:g}: {'reached' if reached else 'missed'}"
        print(f"| `{task}` | {row.n} | {row.mean:.2f}{interval} | {target} |")
    analysis = ["--tokens", str(min(4096, length)), "--pieces", "2", "--queries", "64", "--clouds", "1"]
    text = str(given.data / "wikitext-test.txt")
    sys.exit(skimkv(["analyse", "--model", given.model, "--text", text, *analysis, "--out", str(given.out / "heads")]))


if __name__ == "__main__":
    main()
