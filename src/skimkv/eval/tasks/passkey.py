"""Passkey (Mohtashami and Jaggi 2023): a number is hidden in text that says nothing. It needs no data."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from .base import Example, check_whole
from .ruler.sample import CountTokens, Sample, fit

HEAD = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there.\n"
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
QUESTION = "What is the pass key? The pass key is"


NEW_TOKENS = 12


def examples(
    *, data: Path | None = None, seed: int = 0, count_tokens: CountTokens, length: int = 2048
) -> Iterator[Example]:
    """Make texts without end, each as long as `length` tokens allow, those of the answer among them.

    The number is in the i-th tenth of the i-th of every ten.
    """
    check_whole("length", length, 128)
    for i in count():
        rng = random.Random(f"{seed} {i}")
        key, share = str(rng.randint(10000, 99999)), (i % 10 + rng.random()) / 10
        hidden = f"The pass key is {key}. Remember it. {key} is the pass key.\n"

        def sample(size: int, hidden: str = hidden, share: float = share, key: str = key) -> Sample:
            """Hide the number among this number of lines of filler."""
            before = int(share * (size + 1))
            context = HEAD + before * FILLER + hidden + (size - before) * FILLER
            return Sample(context, QUESTION, (key,), before / max(1, size))

        found, _ = fit(sample, length, NEW_TOKENS, count_tokens, 0, length // 24)
        at = (length, found.depth)
        yield Example(str(i), found.context, QUESTION, (key,), NEW_TOKENS, "\n", at=at)


def score(output: str, example: Example) -> float:
    """Return 1 if the output begins with the number, else 0."""
    number = re.match(r"\s*(\d+)", output)
    return float(number is not None and number[1] == example.answers[0])
