"""The record task: a long list of `key: number` lines, then some of the keys again, alone.

The bundled model was trained on this format. It needs no data: keys are pairs of words from a list. To answer, a model
must find one line of the record and copy its number, so it tells apart the methods that can still read the whole
history from those that dropped the line before the question came.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

from .base import Example, check_whole
from .words import NOUNS

MOST_LINES = len(NOUNS) ** 2 // 4  # a part of all pairs of words, so that a new pair is drawn at once


class Record(NamedTuple):
    """One context and the questions on it, as pairs of (question, right answer)."""

    context: str
    questions: list[tuple[str, str]]


def records(number: int = 1, lines: int = 180, asked: int = 10, seed: int = 0) -> list[Record]:
    """Make records of that many lines, and questions for `asked` of these, spread over the whole length.

    No key comes twice, and up to 191 lines no word. A line is about 15 tokens of the bundled model. Raises ValueError
    if more lines are asked for than written.
    """
    check_whole("lines", lines, 1)
    check_whole("asked", asked, 1)
    if not asked <= lines <= MOST_LINES:
        raise ValueError(f"asked = {asked}, lines = {lines}: need 1 <= asked <= lines <= {MOST_LINES}")
    rng = random.Random(seed)
    made = []
    for _ in range(number):
        pairs: dict[str, str] = {}
        while (left := lines - len(pairs)) > 0:
            words = rng.sample(NOUNS, min(2 * left, len(NOUNS)))
            pairs |= {f"{a}-{b}": str(rng.randint(10000, 49999)) for a, b in zip(words[::2], words[1::2], strict=True)}
        written = list(pairs.items())
        chosen = [rng.randrange(i * lines // asked, (i + 1) * lines // asked) for i in range(asked)]
        rng.shuffle(chosen)
        context = "".join(f"{key}: {number}\n" for key, number in written)
        made.append(Record(context, [(f"{written[i][0]}: ", written[i][1]) for i in chosen]))
    return made


def examples(*, data: Path | None = None, seed: int = 0, lines: int = 180, asked: int = 10) -> Iterator[Example]:
    """Make record after record, without end, with `asked` questions on each."""
    for i in count():
        context, questions = records(1, lines, asked, seed + 1000003 * i)[0]
        for j, (question, answer) in enumerate(questions):
            place = context[: context.index(question)].count("\n") / lines
            yield Example(f"{i}-{j}", context, question, (answer,), 8, "\n", at=(lines, place))


def score(output: str, example: Example) -> float:
    """Return 1 if the first line of the output is the answer and nothing else, else 0."""
    return score_line(output, example.answers[0])


def score_line(output: str, answer: str) -> float:
    """Return 1 if the first line of the output is the answer and nothing else, else 0."""
    return float(output.split("\n", 1)[0].strip() == answer)
