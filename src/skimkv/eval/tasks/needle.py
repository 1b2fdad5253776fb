"""A needle in a haystack (SparQ Attention, table 3 and figure A4): one sentence hidden in essays, depth by length."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from . import Example, source, whole

HEAD = "The best thing to do in San Francisco is"
ANSWER = "eat a sandwich and sit in Dolores Park on a sunny day"
QUESTION = "What is the best thing to do in San Francisco?"


def examples(
    *, data: Path | None = None, seed: int = 0, lengths: tuple[int, ...] | int = (3000, 6000, 9000), depths: int = 5
) -> Iterator[Example]:
    """Every length with every depth, then again with other hay, without end. A length is in characters, about 4 a
    token of a large model; depths are spread evenly from 0, the beginning, to 1, the end."""
    lengths = (lengths,) if isinstance(lengths, int) else tuple(lengths)
    for length in lengths:
        whole("lengths", length, 200)
    whole("depths", depths, 2)
    path = source.find(data, "essays")
    if path is None:
        name = "Mindofmachine/paul_graham_and_sam_altman_articles"
        texts = [row["content"] for row in source.hub("needle", "a folder essays", name, split="train")]
    else:
        texts = [source.text(p) for p in ([path] if path.is_file() else sorted(path.glob("*.txt")))]
    if sum(map(len, texts)) < max(lengths):
        raise ValueError(f"needle: {path or 'the hay'} has {sum(map(len, texts))} characters, not {max(lengths)}")
    for again in count():
        random.Random(f"{seed} {again}").shuffle(texts)
        hay = "\n\n".join(texts)
        for length in lengths:
            for i in range(depths):
                depth = i / (depths - 1)
                at = _sentence(hay, int(depth * length)) if i < depths - 1 else length
                context = f"{hay[:at]}{' ' if at == length else ''}{HEAD} {ANSWER}. {hay[at:length]}"
                yield Example(
                    f"{again}-{length}-{depth:.3g}", context, QUESTION, (ANSWER,), 0, "\n", at=(length, depth)
                )


def _sentence(text: str, near: int) -> int:
    """Where a sentence begins, at `near` or before it."""
    return max((text.rfind(end, 0, near) + len(end) for end in (". ", ".\n") if end in text[:near]), default=0)


def prompt(example: Example) -> tuple[str, str]:
    return example.context, f"\n\n{example.question} {HEAD}"


def score(output: str, example: Example) -> float:
    """1 if the output begins with what the needle says."""
    return float(output.lstrip().startswith(example.answers[0]))
