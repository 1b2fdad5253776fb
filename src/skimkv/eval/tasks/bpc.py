"""Bits per character (SparQ Attention, appendix G.1.5): the model reads an article, and its next lines are fed.

The articles are those of WikiText. 6000 characters are read at once, 400 more are given one token at a time, so that
a method decodes each of them.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from pathlib import Path

from . import source
from .base import Example, check_whole

LOWER, UNIT, GREATEST = True, "bits per character", math.inf  # a character can take any number of bits
TITLE = re.compile(r"^ = [^=].* = $", flags=re.MULTILINE)


def examples(
    *, data: Path | None = None, seed: int = 0, context: int = 6000, reference: int = 400
) -> Iterator[Example]:
    """Give one example for every article that is long enough, in random order; both parts end where a word ends."""
    check_whole("context", context, 1)
    check_whole("reference", reference, 1)
    path = source.find_file(data, "wikitext-test.txt")
    articles = split_articles(load_wikitext("bpc") if path is None else source.read_text(path))
    parts = re.compile(rf"(.{{{context},}}?)(?=\s)(.{{{reference},}}?)(?=\s)", flags=re.DOTALL)
    matches = [(start, match) for start, article in articles if (match := parts.match(article))]
    if not matches:
        raise ValueError(f"bpc: no article of {path or 'the Hub'} has {context + reference} characters")
    random.Random(seed).shuffle(matches)
    for start, match in matches:
        yield Example(str(start), match[1], "", (match[2],), given=True)


def load_wikitext(task: str, files: str = "wikitext-test.txt") -> str:
    """The test text of WikiText-103 from the Hub.

    task and files are for the message: the files that --data needs instead. Raises ValueError if it cannot be had.
    """
    rows = source.load_from_hub(task, files, "Salesforce/wikitext", "wikitext-103-v1", split="test")
    return "".join(row["text"] for row in rows)


def split_articles(text: str) -> list[tuple[int, str]]:
    """The articles of a text in WikiText's form, each with its position; the text itself where it has no titles."""
    starts = [match.start() for match in TITLE.finditer(text)] or [0]
    return [(a, text[a:b]) for a, b in zip(starts, [*starts[1:], None], strict=True)]


def score(bits: float, example: Example) -> float:
    """Divide the bits of the reference by its characters."""
    return bits / len(example.answers[0])
