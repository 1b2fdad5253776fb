"""A conversation on one context: many questions, and later ones lean on the answers to earlier ones.

The context says of every place where its road leads. Every second question names a place; each of the others asks where
the answer to an earlier question leads, which only the conversation tells. Before a question stand those before it with
their right answers, as if the model had given them. So a method that drops tokens must still have the lines that no
question has asked for yet, and a method that chose its tokens for one question has to answer the next one with them.
It needs no data.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

from .answers import score_start
from .base import Example, check_whole
from .record import MOST_LINES
from .words import NOUNS

HEAD = "Every line says where a road leads.\n\n"
LINE = "The road of {} leads to {}.\n"
QUESTION = "\nQuestion {number}: Where does the road of {place} lead?\nAnswer {number}: The road of {place} leads to"
LEANING = (
    "\nQuestion {number}: Where does the road of the answer to question {earlier} lead?"
    "\nAnswer {number}: That road leads to"
)
NEW_TOKENS = 24


class Turn(NamedTuple):
    """A question, its right answer, and where in the context the line with the answer stands, from 0 to 1."""

    question: str
    answer: str
    depth: float


class Conversation(NamedTuple):
    """The context, and the turns in their order."""

    context: str
    turns: list[Turn]


def make(rng: random.Random, lines: int, turns: int) -> Conversation:
    """Make one conversation of lines in random order, whose roads are one circle, and of turns.

    No line is asked for twice.
    """
    names: dict[str, None] = {}
    while len(names) < lines:
        names["-".join(rng.sample(NOUNS, 2))] = None
    circle = list(names)
    leads = dict(zip(circle, circle[1:] + circle[:1], strict=True))
    shown = rng.sample(circle, lines)
    free, made, given = set(circle), list[Turn](), list[str]()
    for number in range(1, turns + 1):
        open_answers = [i for i, answer in enumerate(given) if answer in free]
        if number % 2 == 0 and open_answers:
            earlier = rng.choice(open_answers)
            place = given[earlier]
            question = LEANING.format(number=number, earlier=earlier + 1)
        else:
            place = rng.choice([name for name in shown if name in free])
            question = QUESTION.format(number=number, place=place)
        free.remove(place)
        given.append(leads[place])
        made.append(Turn(question, leads[place], shown.index(place) / lines))
    return Conversation(HEAD + "".join(LINE.format(name, leads[name]) for name in shown), made)


def examples(*, data: Path | None = None, seed: int = 0, lines: int = 100, turns: int = 8) -> Iterator[Example]:
    """Make conversation after conversation, without end: an example for each of their turns."""
    check_whole("lines", lines, 2, MOST_LINES)
    check_whole("turns", turns, 1)
    if turns > lines:
        raise ValueError(f"conversation: turns = {turns} must be at most lines = {lines}")
    for i in count():
        conversation = make(random.Random(f"{seed} {i}"), lines, turns)
        so_far = ""
        for number, turn in enumerate(conversation.turns, 1):
            question = so_far + turn.question
            at = (lines, turn.depth)
            yield Example(
                f"{i}-{number}", conversation.context, question, (turn.answer,), NEW_TOKENS, "\n", at=at
            )  # fmt: skip
            so_far = f"{question} {turn.answer}"


score = score_start
