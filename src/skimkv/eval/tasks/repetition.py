"""Repetition (SparQ Attention, appendix G.1.4): go on with a passage that the context holds.

6000 characters of Shakespeare, then 128 characters out of them; the score is how many of the next 256 characters, from
the word that follows there, are repeated before the first difference. An output that ends early scores only what it
repeated.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

from . import source
from .base import Example, check_whole

UNIT = "characters"


def examples(
    *, data: Path | None = None, seed: int = 0, context: int = 6000, prompt: int = 128, reference: int = 256,
    asked: int = 4, skip: float = 0.0,
) -> Iterator[Example]:  # fmt: skip
    """Give disjoint contexts in random order, with `asked` passages of each, spread over it.

    skip: leave out that leading share of the text, which a model may have been trained on.
    """
    for name, value in (("context", context), ("prompt", prompt), ("reference", reference), ("asked", asked)):
        check_whole(name, value, 1)
    room = context - prompt - reference - 64  # for the ends of words
    if room < asked:
        raise ValueError(f"repetition: context = {context} has no room for {asked} times {prompt} + {reference}")
    if isinstance(skip, bool) or not isinstance(skip, int | float) or not 0 <= skip < 1:
        raise ValueError(f"skip = {skip!r} must be from 0 to below 1")
    path = source.find_file(data, "tinyshakespeare.txt")
    if path is None:
        rows = source.load_from_hub("repetition", "tinyshakespeare.txt", "karpathy/tiny_shakespeare", split="all")
        whole_text = "".join(row["text"] for row in rows)
    else:
        whole_text = source.read_text(path)
    before = int(skip * len(whole_text))
    whole_text = whole_text[before:]
    # a piece ends where a word does
    pieces = list(re.finditer(rf".{{{context},}}?(?=\s|$)", whole_text, flags=re.DOTALL))
    if not pieces:
        raise ValueError(f"repetition: the text has {len(whole_text)} characters, a context needs {context}")
    rng = random.Random(seed)
    rng.shuffle(pieces)
    passage = re.compile(rf"(\S.{{{prompt - 1},}}?)(\s+)(\S.{{{reference - 1}}})", flags=re.DOTALL)
    for piece in pieces:
        for i in range(asked):
            start = rng.randrange(i * room // asked, (i + 1) * room // asked)
            match = passage.search(piece[0], start)
            if match:
                place = before + piece.start() + match.start()
                most = len(match[2]) + reference  # a token may be one character
                yield Example(str(place), piece[0], match[1], (match[3],), most, chars=most + 8)


def prompt(example: Example) -> tuple[str, str]:
    """The context, and the passage to go on with."""
    return example.context, "\n" + example.question


def greatest_score(*, reference: int = 256, **others: object) -> int:
    """All characters of the passage's continuation."""
    return reference


def score(output: str, example: Example) -> float:
    """Count the characters before the first difference; white space in front does not count."""
    expected, actual = example.answers[0].lstrip(), output.lstrip()
    differences = (i for i, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b)
    return float(next(differences, min(len(expected), len(actual))))
