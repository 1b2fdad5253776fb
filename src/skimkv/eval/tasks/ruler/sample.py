"""What RULER's tasks share: a sample, the hay that fits into a length, and the two scores."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

from ..base import Example

CountTokens = Callable[[str], int]
Make = Callable[[random.Random, int], "Sample"]  # out of a random generator, with a number of pieces of hay
MOST_PIECES = 10**7  # of hay, beyond the positions of any model


class TooShort(ValueError):
    """A length that has no room for a sample with the least hay."""


class Sample(NamedTuple):
    """One sample: the context, the question on it with the beginning of the answer, and the right answers.

    depth: where in the hay the first answer lies, from 0 to 1.
    """

    context: str
    question: str
    answers: tuple[str, ...]
    depth: float = 0.0

    def example(self, name: str, length: int, new: int, needs_all: bool = True) -> Example:
        """The sample as an example with at most `new` tokens of output.

        No more is generated once the output holds all answers, or one of them where one is enough: its score would
        not change any more.
        """
        at = (length, self.depth)
        return Example(
            name, self.context, self.question, self.answers, new, at=at, enough="all" if needs_all else "any"
        )


def fit(
    make: Callable[[int], Sample],
    length: int,
    new: int,
    count_tokens: CountTokens,
    least: int,
    guess: int,
    most: int = MOST_PIECES,
) -> tuple[Sample, int]:
    """Make the sample with the most hay that has at most length - new tokens; return it and how many pieces of hay.

    make: makes a sample with a number of pieces of hay, always the same one for the same number. There are at least
    `least` and at most `most`; guess: how many there might be. Raises TooShort if the sample with the least hay is too
    long.
    """
    room = length - new

    def measure(size: int) -> tuple[Sample, int]:
        """Return the sample with so much hay, and its tokens."""
        sample = make(size)
        return sample, count_tokens(sample.context + sample.question)

    low, (best, low_tokens) = least, measure(least)
    if low_tokens > room:
        raise TooShort(
            f"length = {length} is too short: the shortest prompt has {low_tokens} tokens, and {new} are for the answer"
        )
    high, high_tokens = most + 1, 0
    while low < most:  # until there is a number that is too large
        guess = min(max(guess, low + 1), most)
        sample, tokens = measure(guess)
        if tokens > room:
            high, high_tokens = guess, tokens
            break
        low, best, low_tokens = guess, sample, tokens
        guess = low * room // low_tokens + low // 50
    tries = 0
    while high - low > 1:
        tries += 1
        between = low + (room - low_tokens) * (high - low) // (high_tokens - low_tokens)
        size = min(max(between, low + 1), high - 1) if tries <= 8 else (low + high) // 2
        sample, tokens = measure(size)
        if tokens > room:
            high, high_tokens = size, tokens
        else:
            low, best, low_tokens = size, sample, tokens
    return best, low


def fit_each(
    maker: Callable[[str], Make],
    seed: int,
    length: int,
    new: int,
    count_tokens: CountTokens,
    least: int,
    guess: int,
    most: int = MOST_PIECES,
) -> Iterator[tuple[Example, int]]:
    """Make examples without end, each with the most hay that fits: yield them and how many pieces of hay they have.

    maker: returns what makes the samples of one example, whose key it is given: the seed and the example's number. The
    other arguments, and the error, are those of `fit`.
    """
    for i in count():
        key = f"{seed} {i}"

        def with_hay(size: int, key: str = key, make: Make = maker(key)) -> Sample:  # noqa: B008
            """Make the sample with this number of pieces of hay."""
            return make(random.Random(key), size)

        sample, size = fit(with_hay, length, new, count_tokens, least, guess, most)
        yield sample.example(str(i), length, new), size


def share_of_answers(output: str, example: Example) -> float:
    """Return the share of the answers that the output holds, in any case of letters (RULER's string_match_all)."""
    return sum(answer.lower() in output.lower() for answer in example.answers) / len(example.answers)


def match_part(output: str, example: Example) -> float:
    """Return 1 if the output holds one of the answers, in any case of letters, else 0 (RULER's string_match_part)."""
    return float(any(answer.lower() in output.lower() for answer in example.answers))
