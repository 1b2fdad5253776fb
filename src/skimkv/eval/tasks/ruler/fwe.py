"""RULER's frequent words: which three words come most often in a text of made-up words."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Iterator
from pathlib import Path

from ..base import Example, check_whole
from .sample import CountTokens, Sample, fit_each, share_of_answers

HEAD = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. "
)
QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text? Answer: According to the coded text above, the three most frequently "
    "appeared words are:"
)
LETTERS = 6
NOISE = "..."  # the most frequent word, which does not count
ZETA = math.pi**2 / 6  # the sum of all 1 / rank²
LEAST = 80  # words: with fewer, the third word and the fourth may come equally often
NEW_TOKENS = 50


def make(rng: random.Random, size: int, vocabulary: int = 80) -> Sample:
    """Make one sample out of `vocabulary` words of six letters: the word of rank k comes size / (k² ζ(2)) times.

    That is rounded down. The first of them is three dots, and those of ranks 2 to 4 are the answers.
    """
    names: list[str] = [NOISE]
    taken: set[str] = set()
    while len(names) < vocabulary:
        name = "".join(rng.choices(string.ascii_lowercase, k=LETTERS))
        if name not in taken:
            taken.add(name)
            names.append(name)
    coded = [name for rank, name in enumerate(names, 1) for _ in range(int(size / (rank**2 * ZETA)))]
    rng.shuffle(coded)
    return Sample(HEAD + " ".join(coded), QUESTION, tuple(names[1:4]))


def examples(
    *, data: Path | None = None, seed: int = 0, count_tokens: CountTokens, length: int = 4096
) -> Iterator[Example]:
    """Make samples without end, each as long as `length` allows, out of a fiftieth as many words."""
    check_whole("length", length, 512)
    room = length - NEW_TOKENS

    def sample(rng: random.Random, size: int) -> Sample:
        """Make a sample whose number of words fits the length."""
        return make(rng, size, max(5, room // 50))

    for example, _ in fit_each(lambda key: sample, seed, length, NEW_TOKENS, count_tokens, LEAST, room // 3):
        yield example


score = share_of_answers
