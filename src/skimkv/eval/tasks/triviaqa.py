"""TriviaQA, zero shot (SparQ Attention, appendix G.1.2): the answer is in one document of Wikipedia."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import source
from .answers import score_start
from .base import Example


def examples(*, data: Path | None = None, seed: int = 0, cue: str = "Answer:") -> Iterator[Example]:
    """Give every question in random order, with a document of 4000 to 8000 characters.

    cue: what stands before the answer; "Single-word answer:" suits models that restate questions. A file
    triviaqa.jsonl has `id`, `question`, `answers` (a list) and `context` per line.
    """
    path = source.find_file(data, "triviaqa.jsonl")
    if path is None:
        hub_rows = source.load_from_hub("triviaqa", "triviaqa.jsonl", "mandarjoshi/trivia_qa", "rc", split="validation")
        order = list(range(len(hub_rows)))
        random.Random(seed).shuffle(order)
        rows: Iterator[dict[str, Any]] = (row for i in order for row in _convert(hub_rows[i], seed))
    else:
        lines = list(source.read_rows(path))
        random.Random(seed).shuffle(lines)
        rows = iter(lines)
    for row in rows:
        source.check_text(path, row, "context", "question")
        right_answers = row.get("answers")
        if "id" not in row or not isinstance(right_answers, list) or not right_answers:
            raise ValueError(f"{path}: a line has no id, or no list of answers")
        texts = tuple(str(answer) for answer in right_answers)
        yield Example(str(row["id"]), row["context"], f"\nQuestion: {row['question']}\n{cue}", texts, 30, "\n")


def _convert(row: dict[str, Any], seed: int) -> Iterator[dict[str, Any]]:
    """Convert a row of the Hub's, with one of its documents of the right length; nothing if it has none."""
    documents = [text for text in row["entity_pages"]["wiki_context"] if 4000 <= len(text) <= 8000]
    if documents:
        key = row["question_id"]
        context = random.Random(f"{seed} {key}").choice(documents)
        yield {"id": key, "question": row["question"], "answers": row["answer"]["aliases"], "context": context}


score = score_start
