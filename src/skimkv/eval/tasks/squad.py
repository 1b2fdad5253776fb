"""SQuAD 1.1, one shot (SparQ Attention, appendix G.1.1): one of eight paragraphs holds the answer."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from . import source
from .answers import score_start
from .base import Example, check_whole


class Question(NamedTuple):
    """A question on a paragraph, with all answers that count as right."""

    id: str
    text: str
    answers: tuple[str, ...]


def examples(*, data: Path | None = None, seed: int = 0, confusions: int = 7) -> Iterator[Example]:
    """Give every question in random order.

    `confusions` other paragraphs are drawn, none twice and never the right one. The shot is another question on the
    same paragraph (on another one where there is none), with its shortest answer.
    """
    check_whole("confusions", confusions, 0)
    path = source.find_file(data, "squad.json")
    paragraphs = _load(path) if path else _hub()
    lines = sorted(paragraphs)
    if len(lines) <= confusions:
        raise ValueError(f"squad: {len(lines)} paragraphs are too few for confusions = {confusions}")
    pairs = [(line, question) for line in lines for question in paragraphs[line]]
    random.Random(seed).shuffle(pairs)
    everything = sorted(question for questions in paragraphs.values() for question in questions)
    for line, question in pairs:
        rng = random.Random(f"{seed} {question.id}")
        shown = [line, *rng.sample([other for other in lines if other != line], confusions)]
        rng.shuffle(shown)
        pool = [q for q in paragraphs[line] if q.id != question.id] or [q for q in everything if q.id != question.id]
        if not pool:
            raise ValueError("squad: one question is too few, the shot is another one")
        shot = rng.choice(pool)
        title = line.removeprefix("Title: ").split(". Background: ")[0]
        yield Example(
            question.id,
            "\n".join(shown),
            f"\nFrom what you've just read about {title}, please answer the following questions."
            f"\nQuestion: {shot.text}\nAnswer: {min(shot.answers, key=len)}\nQuestion: {question.text}",
            question.answers, 30, "\n",
        )  # fmt: skip


def _line(title: str, context: str) -> str:
    return f"Title: {title.replace('_', ' ')}. Background: {context}"


def _load(path: Path) -> dict[str, list[Question]]:
    """Read SQuAD's own JSON format: the line of each paragraph, and its questions."""
    paragraphs: dict[str, list[Question]] = {}
    try:
        for article in json.loads(source.read_text(path))["data"]:
            for paragraph in article["paragraphs"]:
                line = _line(article["title"], paragraph["context"])
                for q in paragraph["qas"]:
                    texts = tuple(dict.fromkeys(answer["text"] for answer in q["answers"]))
                    if not texts or not all(isinstance(text, str) for text in (q["id"], q["question"], *texts)):
                        raise ValueError("a question without an id, a text or an answer")
                    paragraphs.setdefault(line, []).append(Question(q["id"], q["question"], texts))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: not in SQuAD's format ({type(error).__name__}: {error})") from None
    return paragraphs


def _hub() -> dict[str, list[Question]]:
    """Read the same from the Hub."""
    rows: Any = source.load_from_hub("squad", "squad.json", "rajpurkar/squad", split="validation")
    paragraphs: dict[str, list[Question]] = {}
    for row in rows:
        texts = tuple(dict.fromkeys(row["answers"]["text"]))
        question = Question(row["id"], row["question"], texts)
        paragraphs.setdefault(_line(row["title"], row["context"]), []).append(question)
    return paragraphs


def prompt(example: Example) -> tuple[str, str]:
    """The paragraphs, and the shot with the question."""
    return example.context, example.question + "\nAnswer:"


score = score_start
