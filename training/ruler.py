"""Training rows in the manner of RULER (Hsieh et al. 2024): its prompts, with words and sizes of our own.

needles: "One of the special magic numbers for {key} is: {value}.", hidden in prose, in filler or among its like; one or
    several keys, one or several values of a key, and one or several keys in a question
variables: chains of assignments, hidden in filler or prose; a question asks for all variables that have a value
counts: lists in which some words are more frequent than others, which are asked for

Every function returns pieces of text, of which the answers weigh. RULER asks one question on a text; here several
follow each other, so that a row teaches more than one thing.
"""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from skimkv.eval.tasks.ruler import cwe, fwe, niah, vt

Piece = tuple[str, float]  # a text, and what it weighs as an answer; 0: it is no answer

LONG = 512  # tokens of a row from which RULER's long prompts leave room for something else


class Material(NamedTuple):
    """What rows are made of: how many tokens texts have, a new key, prose as sentences, and words."""

    count_tokens: Callable[[Sequence[str]], list[int]]
    key: Callable[[random.Random], str]
    sentences: Callable[[random.Random, int], list[str]]  # of about so many characters
    words: Sequence[str]


def needles(rng: random.Random, length: int, material: Material, of_uuids: bool) -> list[Piece]:
    """Make a text of about `length` tokens with needles hidden in it, and questions for some of them.

    of_uuids: values are UUIDs, and in half the texts keys too; otherwise values are numbers, and keys words.
    """
    kinds = "uuids" if of_uuids else "numbers"
    keys_are_uuids = of_uuids and rng.random() < 0.5
    haystack = rng.choices(("prose", "filler", "needles"), (0.45, 0.2, 0.35))[0]
    is_many = rng.random() < 0.4  # several values of a key, or several keys in a question

    def value() -> str:
        """Return a value that a key may have."""
        if of_uuids:
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))
        if rng.random() < 0.3:  # of few digits: the last one alone does not tell the next
            return "".join(rng.choices(rng.sample("123456789", 3), k=7))
        return str(rng.randint(1_000_000, 9_999_999))

    most = max(3, length // (90 if of_uuids else 40))
    number = most if haystack == "needles" else rng.randint(1, max(1, most // 3))
    values: dict[str, list[str]] = {}
    for _ in range(number):
        key = value() if keys_are_uuids else material.key(rng)
        values[key] = [value() for _ in range(rng.choice((1, 2, 4)) if is_many else 1)]
    head = niah.HEAD[is_many].format(kind=kinds if is_many else kinds[:-1]) if length >= LONG else ""
    pieces: list[Piece] = []
    wanted: dict[str, None] = {}
    room = length - 8 - sum(material.count_tokens([head]))
    end = room * rng.uniform(0.2, 0.7)
    while room > end and len(wanted) < len(values):
        asked = rng.sample(list(values), min(len(values), rng.choice((1, 2, 3, 4)) if is_many else 1))
        question, answer = _needle_question(asked, values, kinds, with_question=not pieces and length >= LONG)
        lines = [
            niah.NEEDLE.format(kind=kinds, key=key, value=v) for key in asked if key not in wanted for v in values[key]
        ]
        size = sum(material.count_tokens([question, answer, *lines])) + len(lines)
        if size > room:
            break
        pieces += [(question, 0.0), (answer, 1.0)]
        wanted |= dict.fromkeys(asked)
        room -= size
    hidden = [niah.NEEDLE.format(kind=kinds, key=key, value=value) for key in wanted for value in values[key]]
    others = [key for key in values if key not in wanted]
    lines = [niah.NEEDLE.format(kind=kinds, key=key, value=value) for key in others for value in values[key]]
    lines = fitting(lines, room, material)
    room -= sum(material.count_tokens(lines)) + len(lines) if lines else 0
    lines += hidden
    rng.shuffle(lines)
    if haystack == "filler":
        straw = [niah.NOISE] * (room // (material.count_tokens([niah.NOISE])[0] + 1))
        lines = scattered(rng, lines, straw)
    elif haystack == "prose":
        lines = scattered(rng, lines, fitting(material.sentences(rng, 8 * length), room, material))
    return [(head + (" " if haystack == "prose" else "\n").join(lines), 0.0), *pieces]


def _needle_question(
    asked: Sequence[str], values: dict[str, list[str]], kinds: str, with_question: bool
) -> tuple[str, str]:
    """The question for the values of these keys up to the answer, and the answer."""
    answers = [value for key in asked for value in values[key]]
    is_many = len(answers) > 1
    text = niah.QUESTION[is_many].format(kind=kinds if is_many else kinds[:-1], keys=_listed(asked))
    return text if with_question else "\n" + text.partition("?")[2], f" {_listed(answers)}."


def variables(rng: random.Random, length: int, material: Material) -> list[Piece]:
    """Make a text with chains of assignments and questions; often another such text with shorter names comes before it.

    RULER calls that one the shot. Both together have about `length` tokens.
    """
    if length < 2 * LONG or rng.random() < 0.5:
        return chains(rng, length, material)
    shot = chains(rng, length // rng.choice((4, 8)), material, vt.SHOT_LETTERS)
    rest = length - sum(material.count_tokens([text for text, _ in shot])) - 2
    return [*shot, ("\n\n", 0.0), *chains(rng, rest, material)]


def chains(rng: random.Random, length: int, material: Material, letters: int = vt.LETTERS) -> list[Piece]:
    """Make a text of about `length` tokens with chains of assignments in it, and the questions for their values.

    letters: of a variable's name.
    """
    hops = rng.choice((1, 2, 4)) if length < LONG else rng.choice((2, 3, 4, 4, 4))
    pieces: list[Piece] = []
    given: list[list[str]] = []
    names: set[str] = set()
    head = vt.HEAD if length >= LONG else ""
    room = length - 8 - sum(material.count_tokens([head]))
    end = room * rng.uniform(0.3, 0.9)
    while not given or room > end:
        chain: list[str] = []
        while len(chain) <= hops:
            name = "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=letters))
            if name not in names:
                names.add(name)
                chain.append(name)
        value = str(rng.randint(10_000, 99_999))
        given.append([f"VAR {chain[0]} = {value}", *(f"VAR {b} = VAR {a} " for a, b in pairwise(chain))])
        question = vt.QUESTION.format(value=value, number=len(chain))
        if length < LONG:
            question = "\n" + question[question.index("Answer:") :]
        pieces += [(question, 0.0), (" ".join(chain), 1.0)]
        room -= sum(material.count_tokens([question, " ".join(chain), *given[-1]])) + len(chain)
    questions = [pieces[i : i + 2] for i in range(0, len(pieces), 2)]
    rng.shuffle(questions)
    lines: list[str] = []  # the chains in any order, each in its own
    order = [i for i, chain in enumerate(given) for _ in chain]
    rng.shuffle(order)
    for i in order:
        lines.append(given[i].pop(0))
    if rng.random() < 0.7:
        straw = [niah.NOISE] * (max(0, room) // (material.count_tokens([niah.NOISE])[0] + 1))
    else:
        straw = fitting(material.sentences(rng, 8 * length), room, material)
    return [(head + "\n".join(scattered(rng, lines, straw)), 0.0), *(piece for pair in questions for piece in pair)]


def counts(rng: random.Random, length: int, material: Material) -> list[Piece]:
    """Make lists of words, of `length` tokens in all, each with the question for the words that are most frequent."""
    pieces: list[Piece] = []
    while length > 48:
        size = min(length, max(64, round(length * rng.choice((0.25, 0.5, 1, 1)))))
        made = common_words(rng, size, material) if rng.random() < 0.5 else frequent_words(rng, size, material)
        length -= sum(material.count_tokens([text for text, _ in made])) + 2
        pieces += [*made, ("\n\n", 0.0)]
    return pieces


def common_words(rng: random.Random, length: int, material: Material) -> list[Piece]:
    """Make a numbered list of words of about `length` tokens; a few come far more often than the others."""
    count = 10 if length > 4 * LONG else rng.choice((1, 2, 3)) if length < LONG else rng.choice((3, 5, 10))
    head = cwe.HEAD if length >= LONG else ""
    question = cwe.QUESTION.replace("10", str(count))
    often, seldom = rng.choice(((30, 3), (10, 2), (6, 1))) if length > 4 * LONG else rng.choice(((10, 1), (6, 1)))
    drawn = rng.sample(material.words, min(len(material.words), count + max(4, length)))
    common, others = drawn[:count], drawn[count:]
    answer = "".join(f" {i + 1}. {word}" for i, word in enumerate(common))
    room = length - 8 - sum(material.count_tokens([head, question, answer]))
    often = max(2, min(often, room // (9 * count)))
    entries, i = common * often, 0
    largest = 10 ** len(str(length // 8))  # the number of the last word has no more digits
    sizes = material.count_tokens([f" {largest}. {word}" for word in (common[0], *others)])
    room -= sum(material.count_tokens([f" {largest}. {word}" for word in entries]))
    while i < len(others) and room > 0:
        entries += others[i : i + 1] * min(seldom, often - 1)
        room -= sizes[i + 1] * min(seldom, often - 1)
        i += 1
    rng.shuffle(entries)
    listed = " ".join(f"{i + 1}. {word}" for i, word in enumerate(entries))
    return [(head + listed, 0.0), (question, 0.0), (answer, 1.0)]


def frequent_words(rng: random.Random, length: int, material: Material) -> list[Piece]:
    """Make a text of about `length` tokens of coded words, whose frequencies fall as the square of their rank."""
    head = fwe.HEAD if length >= LONG else ""
    coded = [fwe.NOISE, *("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(60))]
    answer = " " + " ".join(coded[1:4])
    room = length - 8 - sum(material.count_tokens([head, fwe.QUESTION, answer]))
    sizes = material.count_tokens([f" {word}" for word in coded])
    weights = [rank**-2.0 for rank in range(1, len(coded) + 1)]
    mean = sum(size * weight for size, weight in zip(sizes, weights, strict=True)) / sum(weights)
    number = max(12, int(room / mean))
    counts = [
        max(int(number * weight / sum(weights)), 4 - rank if rank < 4 else 0) for rank, weight in enumerate(weights)
    ]
    entries = [word for word, n in zip(coded, counts, strict=True) for _ in range(max(0, n))]
    rng.shuffle(entries)
    return [(head + " ".join(entries), 0.0), (fwe.QUESTION, 0.0), (answer, 1.0)]


def fitting(texts: Sequence[str], room: int, material: Material) -> list[str]:
    """Return the first texts that together have at most `room` tokens."""
    kept: list[str] = []
    for text, size in zip(texts, material.count_tokens(texts) if texts else (), strict=True):
        room -= size + 1
        if room < 0:
            break
        kept.append(text)
    return kept


def scattered(rng: random.Random, lines: Sequence[str], straw: Sequence[str]) -> list[str]:
    """Return the straw with the lines somewhere in it, in their order."""
    places = Counter(rng.randrange(len(straw) + 1) for _ in lines)
    left, mixed = iter(lines), []
    for i in range(len(straw) + 1):
        mixed += [next(left) for _ in range(places[i])]
        mixed += straw[i : i + 1]
    return mixed


def _listed(texts: Sequence[str]) -> str:
    """`a`, `a, and b`, or `a, b, and c`."""
    return ", and ".join((", ".join(texts[:-1]), texts[-1])) if len(texts) > 1 else texts[0]
