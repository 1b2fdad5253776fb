"""Passkey (Mohtashami and Jaggi 2023): a number is hidden in text that says nothing. It needs no data."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from .base import Example, check_whole

HEAD = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there.\n"
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
QUESTION = "What is the pass key? The pass key is"


def examples(*, data: Path | None = None, seed: int = 0, length: int = 8000) -> Iterator[Example]:
    """Make texts of `length` characters without end; the number is in the i-th tenth of the i-th of every ten."""
    check_whole("length", length, 500)
    for i in count():
        rng = random.Random(f"{seed} {i}")
        key = str(rng.randint(10000, 99999))
        before = int((i % 10 + rng.random()) / 10 * (length - len(HEAD)) / len(FILLER))
        after = round((length - len(HEAD)) / len(FILLER)) - before - 1
        hidden = f"The pass key is {key}. Remember it. {key} is the pass key.\n"
        context = HEAD + before * FILLER + hidden + max(after, 0) * FILLER
        yield Example(str(i), context, QUESTION, (key,), 12, "\n", at=(length, before / (before + after or 1)))


def prompt(example: Example) -> tuple[str, str]:
    """The text with the number, and the question for it."""
    return example.context, example.question


def score(output: str, example: Example) -> float:
    """Return 1 if the output begins with the number, else 0."""
    number = re.match(r"\s*(\d+)", output)
    return float(number is not None and number[1] == example.answers[0])
