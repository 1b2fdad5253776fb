"""RULER's needles in a haystack: values of keys are hidden, and the values of some keys are asked for."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import source
from ..base import Example, check_whole
from ..words import ADJECTIVES, NOUNS
from .sample import CountTokens, Sample, fit_each, share_of_answers

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
# The texts for one answer, and for several.
HEAD = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{kind} afterwards.\n",
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n",
)
QUESTION = (
    "\nWhat is the special magic {kind} for {keys} mentioned in the provided text? The special magic {kind} for {keys} "
    "mentioned in the provided text is",
    "\nWhat are all the special magic {kind} for {keys} mentioned in the provided text? The special magic {kind} for "
    "{keys} mentioned in the provided text are",
)
DEPTHS = tuple(round(100 * i / 39) for i in range(40))  # where needles lie in essays, in percent
SENTENCE_END = re.compile(r"(?<=[.!?]) ")
NEW_TOKENS = 128
LEAST_WORDS = 20  # of essays
KINDS = ("words", "numbers", "uuids")


def make(
    rng: random.Random,
    size: int,
    hay: str = "noise",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
    key_kind: str = "words",
    value_kind: str = "numbers",
    essays: Sequence[str] = (),
) -> Sample:
    """Make one sample: `keys` keys with `values` values each, of which `queries` keys are asked for.

    hay: "noise" is `size` lines of noise, "needles" are as many needles with other keys, and "essays" are the first
    `size` words of `essays`, again and again if they are too few. Needles stand in lines of their own, in essays
    between sentences. No key and no value comes twice.
    """
    taken: set[str] = set()
    pairs = [(_new(rng, key_kind, taken), [_new(rng, value_kind, taken) for _ in range(values)]) for _ in range(keys)]
    needles = [NEEDLE.format(kind=value_kind, key=key, value=value) for key, found in pairs for value in found]
    rng.shuffle(needles)
    asked = rng.sample(pairs, queries)
    if hay == "essays":
        text = " ".join((list(essays) * -(-size // len(essays)))[:size])
        pieces, joint = SENTENCE_END.split(text), " "
        places = sorted(int(len(pieces) * depth / 100) for depth in rng.sample(DEPTHS, len(needles)))
    else:
        places, joint = sorted(rng.sample(range(size), len(needles))), "\n"
        pieces = [NOISE] * size
        if hay == "needles":
            others = ([_new(rng, kind, taken) for kind in (key_kind, value_kind)] for _ in range(size))
            pieces = [NEEDLE.format(kind=value_kind, key=key, value=value) for key, value in others]
    for place, needle in reversed(list(zip(places, needles, strict=True))):
        pieces.insert(place, needle)
    several = queries * values > 1
    kind = value_kind if several else value_kind[:-1]
    names = [key for key, _ in asked]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"
    context = HEAD[several].format(kind=kind) + joint.join(pieces)
    answers = tuple(value for _, found in asked for value in found)
    depth = context.index(f"is: {answers[0]}.") / len(context)
    return Sample(context, QUESTION[several].format(kind=kind, keys=listed), answers, depth)


def _new(rng: random.Random, kind: str, taken: set[str]) -> str:
    """A word, number or UUID that is not taken yet; it is taken then."""
    while True:
        if kind == "words":
            name = f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
        elif kind == "numbers":
            name = str(rng.randint(10**6, 10**7 - 1))
        else:
            name = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        if name not in taken:
            taken.add(name)
            return name


def examples(
    *, data: Path | None = None, seed: int = 0, count_tokens: CountTokens, length: int = 4096, **recipe: Any
) -> Iterator[Example]:
    """Make samples without end, each as long as `length` allows. Essays are the folder `essays`, or any texts.

    recipe: arguments of `make`.
    """
    check_whole("length", length, 256)
    essays = read_essays(data) if recipe.get("hay") == "essays" else []
    needles = recipe.get("keys", 1) * recipe.get("values", 1)
    least, guess = (LEAST_WORDS, length) if essays else (needles, length // 20)

    def sample(rng: random.Random, size: int) -> Sample:
        """Make a sample of this task."""
        return make(rng, size, essays=essays, **recipe)

    for example, _ in fit_each(lambda key: sample, seed, length, NEW_TOKENS, count_tokens, least, guess):
        yield example


def read_essays(data: Path | None) -> list[str]:
    """The words of the hay: of the folder `essays` in `data`, else of its *.txt, or of the file; or from the Hub."""
    if data is None:
        name = "Mindofmachine/paul_graham_and_sam_altman_articles"
        texts = [row["content"] for row in source.load_from_hub("ruler", "a folder essays", name, split="train")]
    else:
        inner = data / "essays"
        texts = [source.read_text(path) for path in source.find_texts(inner if inner.is_dir() else data)]
    found = " ".join(texts).split()
    if not found:
        raise ValueError(f"{data or 'the Hub'}: the texts that needles are hidden in are empty")
    return found


score = share_of_answers
