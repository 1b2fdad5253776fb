"""TriviaQA, zero shot (SparQ Attention, appendix G.1.2): one Wikipedia document of 4000 to 8000 characters."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import Example, answers, source


def examples(*, data: Path | None = None, seed: int = 0, cue: str = "Answer:") -> Iterator[Example]:
    """In random order. cue: what stands before the answer; "Single-word answer:" for models that restate questions.

    A file triviaqa.jsonl has `id`, `question`, `answers` (a list) and `context` per line.
    """
    path = source.find(data, "triviaqa.jsonl")
    if path is None:
        found = source.hub("triviaqa", "triviaqa.jsonl", "mandarjoshi/trivia_qa", "rc", split="validation")
        order = list(range(len(found)))
        random.Random(seed).shuffle(order)
        rows: Iterator[dict[str, Any]] = (row for i in order for row in _row(found[i], seed))
    else:
        held = list(source.rows(path))
        random.Random(seed).shuffle(held)
        rows = iter(held)
    for row in rows:
        try:
            wanted, key = tuple(str(a) for a in row["answers"]), str(row["id"])
            yield Example(key, row["context"], f"\nQuestion: {row['question']}\n{cue}", wanted, 30, "\n")
        except KeyError as error:
            raise ValueError(f"{path}: a line has no {error}") from None


def _row(row: dict[str, Any], seed: int) -> Iterator[dict[str, Any]]:
    """A row of the Hub's with one of its documents of the right length; nothing if it has none."""
    documents = [text for text in row["entity_pages"]["wiki_context"] if 4000 <= len(text) <= 8000]
    if documents:
        key = row["question_id"]
        context = random.Random(f"{seed} {key}").choice(documents)
        yield {"id": key, "question": row["question"], "answers": row["answer"]["aliases"], "context": context}


def prompt(example: Example) -> tuple[str, str]:
    return example.context, example.question


def score(output: str, example: Example) -> float:
    return answers.right(output, example.answers)
