"""RULER's variable tracking: a value is handed on from variable to variable, and all that have it are asked for."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from ..base import Example, check_whole
from .niah import NOISE
from .sample import CountTokens, Make, Sample, TooShort, fit, fit_each, share_of_answers

HEAD = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
QUESTION = (
    "\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: According to the "
    "chain(s) of variable assignment in the text above, {number} variables are assigned the value {value}, they are: "
)
HOPS = 4
LETTERS, SHOT_LETTERS = 5, 3  # of a variable's name
SHOT_TOKENS = 500
NEW_TOKENS = 30


def make(rng: random.Random, size: int, hops: int = HOPS, letters: int = LETTERS, shot: str = "") -> Sample:
    """Make one sample: a chain of hops + 1 assignments, in their order, each a line among `size` lines of noise.

    shot: what stands before it, an example with its answer.
    """
    names: list[str] = []
    while len(names) <= hops:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if name not in names:
            names.append(name)
    value = str(rng.randint(10000, 99998))
    chain = [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a} " for a, b in pairwise(names))]
    lines = [NOISE] * size
    for i, place in enumerate(sorted(rng.sample(range(size), len(chain)))):
        lines.insert(place + i, chain[i])
    question = QUESTION.format(value=value, number=hops + 1)
    return Sample(shot + HEAD + "\n".join(lines), question, tuple(names), lines.index(chain[0]) / len(lines))


def make_shot(rng: random.Random, size: int) -> str:
    """Make the example that stands before the text: a sample with shorter names, and its answer."""
    sample = make(rng, size, letters=SHOT_LETTERS)
    return f"{sample.context}{sample.question} {' '.join(sample.answers)}\n\n"


def examples(
    *, data: Path | None = None, seed: int = 0, count_tokens: CountTokens, length: int = 4096
) -> Iterator[Example]:
    """Make samples without end, each as long as `length` allows.

    The shot has at most 500 tokens; of a short text at most an eighth, but its chain and as many lines of noise always.
    """
    check_whole("length", length, 256)
    least = HOPS + 1

    def with_shot(key: str) -> Make:
        """Return what makes a text after one and the same shot."""

        def shot(size: int) -> Sample:
            """Make a shot with this number of lines of noise."""
            return Sample(make_shot(random.Random(f"{key} shot"), size), "", ())

        try:
            text = fit(shot, min(SHOT_TOKENS, length // 8), 0, count_tokens, least, 15)[0].context
        except TooShort:
            text = shot(least).context
        return lambda rng, size: make(rng, size, shot=text)

    for example, _ in fit_each(with_shot, seed, length, NEW_TOKENS, count_tokens, least, length // 20):
        yield example


score = share_of_answers
