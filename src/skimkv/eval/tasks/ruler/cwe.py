"""RULER's common words: which ten words come most often in a numbered list."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from .. import source, words
from ..base import Example, check_whole
from .sample import CountTokens, Make, Sample, fit_each, share_of_answers

HEAD = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n"
)
QUESTION = (
    "\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words that appear most often "
    "in the list are:"
)
ASKED = 10
# The common words come so often, and the others so often; then the same of the shot, and its number of words.
TIMES, SHOT_TIMES, SHOT_WORDS = (30, 3), (10, 3), 40
TIMES_OF_SHORT, SHOT_TIMES_OF_SHORT, SHOT_WORDS_OF_SHORT = (6, 1), (3, 1), 20
SHORT = 4096  # a length below this is short
NEW_TOKENS = 120


def make(
    rng: random.Random, size: int, times: tuple[int, int] = TIMES, vocabulary: Sequence[str] = words.ALL, shot: str = ""
) -> Sample:
    """Make one sample: a list of `size` different words, ten of which come times[0] times, and the others times[1].

    shot: what stands before it, an example with its answer.
    """
    chosen = rng.sample(vocabulary, size)
    listed = chosen[:ASKED] * times[0] + chosen[ASKED:] * times[1]
    rng.shuffle(listed)
    return Sample(f"{shot}{HEAD}{_numbered(listed)}", QUESTION, tuple(chosen[:ASKED]))


def make_shot(
    rng: random.Random, size: int = SHOT_WORDS, times: tuple[int, int] = SHOT_TIMES,
    vocabulary: Sequence[str] = words.ALL,
) -> str:  # fmt: skip
    """Make the example that stands before the list: a list of `size` different words, and its answer."""
    sample = make(rng, size, times, vocabulary)
    return f"{sample.context}{sample.question} {_numbered(sample.answers)}\n"


def _numbered(listed: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))


def examples(
    *, data: Path | None = None, seed: int = 0, count_tokens: CountTokens, length: int = 4096
) -> Iterator[Example]:
    """Make samples without end, each as long as `length` allows.

    The words are those of the file words.txt in the folder `data`, one a line, where there is one.
    """
    check_whole("length", length, 512)
    is_short, vocabulary = length < SHORT, _vocabulary(data)
    times = TIMES_OF_SHORT if is_short else TIMES
    shot_size, shot_times = (SHOT_WORDS_OF_SHORT, SHOT_TIMES_OF_SHORT) if is_short else (SHOT_WORDS, SHOT_TIMES)
    guess, most = length // (5 * times[1]), len(vocabulary)

    def with_shot(key: str) -> Make:
        """Return what makes a list of words after one and the same shot."""
        text = make_shot(random.Random(f"{key} shot"), shot_size, shot_times, vocabulary)
        return lambda rng, size: make(rng, size, times, vocabulary, text)

    for example, size in fit_each(with_shot, seed, length, NEW_TOKENS, count_tokens, ASKED + 1, guess, most):
        if size == most:
            raise ValueError(
                f"cwe: length = {length} needs more than the {most} words that are here; give --data a folder with "
                "words.txt, one word a line"
            )
        yield example


def _vocabulary(data: Path | None) -> list[str]:
    """The different words of words.txt, else those that come with the package."""
    if data is None or not (data / "words.txt").is_file():
        return words.ALL
    different = sorted(set(source.read_text(data / "words.txt").split()))
    if len(different) < SHOT_WORDS:
        raise ValueError(f"{data / 'words.txt'}: {len(different)} different words are too few, cwe needs {SHOT_WORDS}")
    return different


score = share_of_answers
