"""A needle in a haystack (SparQ Attention, table 3 and figure A4): one sentence is hidden in essays.

The figure shows which needles a method finds, by the length of the text and the depth of the needle in it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from . import source
from .base import Example, check_whole
from .ruler.sample import CountTokens, Sample, fit

HEAD = "The best thing to do in San Francisco is"
ANSWER = "eat a sandwich and sit in Dolores Park on a sunny day"
QUESTION = "What is the best thing to do in San Francisco?"


def examples(
    *, data: Path | None = None, seed: int = 0, count_tokens: CountTokens,
    lengths: tuple[int, ...] | int = (1024, 2048, 4096), depths: int = 5,
) -> Iterator[Example]:  # fmt: skip
    """Give every length with every depth, then again with other hay, without end.

    A length is in tokens, those of the question, of its answer and of a chat's template among them; depths are spread
    evenly from 0, the beginning, to 1, the end.
    """
    lengths = tuple(lengths) if isinstance(lengths, (tuple, list)) else (lengths,)
    if not lengths:
        raise ValueError("needle: lengths is empty; write for example lengths=(3000, 6000)")
    for length in lengths:
        check_whole("lengths", length, 128)
    check_whole("depths", depths, 2)
    path = source.find_file(data, "essays")
    if path is None:
        name = "Mindofmachine/paul_graham_and_sam_altman_articles"
        texts = [row["content"] for row in source.load_from_hub("needle", "a folder essays", name, split="train")]
    else:
        texts = [source.read_text(p) for p in ([path] if path.is_file() else sorted(path.glob("*.txt")))]
    question = f"\n\n{QUESTION} {HEAD}"
    answer_tokens = count_tokens(f"{question} {ANSWER}") - count_tokens(question)  # without what is around a prompt
    for repetition in count():
        random.Random(f"{seed} {repetition}").shuffle(texts)
        hay = "\n\n".join(texts)
        for length, i in itertools.product(lengths, range(depths)):
            depth = i / (depths - 1)

            def hide(size: int, depth: float = depth, hay: str = hay) -> Sample:
                """Hide the needle in this number of characters of hay."""
                at = _sentence_start(hay, int(depth * size)) if depth < 1 else size
                return Sample(f"{hay[:at]}{' ' if at == size else ''}{HEAD} {ANSWER}. {hay[at:size]}", question, ())

            found, size = fit(hide, length, answer_tokens, count_tokens, 0, 4 * length, len(hay))
            if size == len(hay):
                raise ValueError(f"needle: {path or 'the hay'} has {size} characters, too few for {length} tokens")
            name = f"{repetition}-{length}-{depth:.3g}"
            yield Example(name, found.context, QUESTION, (ANSWER,), 0, "\n", at=(length, depth))


def _sentence_start(text: str, near: int) -> int:
    """The position at which a sentence begins, `near` or the last one before it."""
    return max((text.rfind(end, 0, near) + len(end) for end in (". ", ".\n") if end in text[:near]), default=0)


def prompt(example: Example) -> tuple[str, str]:
    """The essays with the needle, and the question, which ends as the needle begins."""
    return example.context, f"\n\n{example.question} {HEAD}"


def score(output: str, example: Example) -> float:
    """Return 1 if the output begins with what the needle says, else 0."""
    return float(output.lstrip().startswith(example.answers[0]))
