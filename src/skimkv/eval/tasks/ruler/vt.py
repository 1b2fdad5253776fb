"""RULER's variable tracking: a value is handed on from variable to variable, and all that have it are asked for."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path

from ..base import Example, check_whole
from .niah import NOISE
from .sample import CountTokens, Sample, TooShort, fit, match_all

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
    for i in count():

        def shot(size: int, key: str = f"{seed} {i} shot") -> Sample:
            return Sample(make_shot(random.Random(key), size), "", ())

        try:
            text = fit(shot, min(SHOT_TOKENS, length // 8), 0, count_tokens, least, 15)[0].context
        except TooShort:
            text = shot(least).context

        def sample(size: int, key: str = f"{seed} {i}", text: str = text) -> Sample:
            return make(random.Random(key), size, shot=text)

        found, _ = fit(sample, length, NEW_TOKENS, count_tokens, least, length // 20)
        yield found.example(str(i), length, NEW_TOKENS)


def prompt(example: Example) -> tuple[str, str]:
    """The shot and the text with the chain, and the question with the beginning of its answer."""
    return example.context, example.question


def score(output: str, example: Example) -> float:
    """The share of the variables that the output holds."""
    return match_all(output, example.answers)
