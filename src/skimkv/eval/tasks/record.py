"""The record task: a long list of `key: number` lines, then some of the keys again, alone.

The bundled model was trained on this format. It needs no data: keys are pairs of words from the list below. To answer,
a model must find one line of the record and copy its number, so it tells apart the methods that can still read the
whole history from those that dropped the line before the question came.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

from .base import Example, check_whole

WORDS = """
acorn actor album alley amber anchor ankle apple apron arch armor arrow attic aunt autumn badge bakery ball bamboo
banner barge barley barn barrel basil basket beach beacon bean bear beaver bell belt bench berry birch bird blanket
boat bonnet book boot border bottle bowl box branch brass bread breeze brick bridge broom brother bucket bush butter
button cabin cable cactus cake camel camp canal candle canoe canvas captain carpet carrot cart castle cat cattle cave
cedar cello chain chair chalk chapel cherry chess chest chimney circle city clay cliff clock cloth cloud clover coal
coast coat coffee coin collar comet compass copper coral cord corn cotton cousin cradle crane crater cricket crow crown
crystal cup curtain dagger dairy daisy dance deck deer desert desk diamond dinner ditch doctor dog dolphin donkey door
dove dragon drawer dress drum duck dust eagle earth easel echo elbow elm engine evening falcon farm father feather
fence fern ferry fiddle field finger fire fish flag flame flower flute fog forest fork fountain fox frame friend frog
fruit garden garlic gate ghost giant ginger glacier glass glove goat gold goose grape grass gravel guitar hammer
harbor harp hat hawk hazel heart hedge helmet hen hill honey hook horn horse hotel house ink iris iron island ivory
jacket jar jewel judge kettle key king kitchen kite knee knife ladder lady lake lamp lantern lark lawn leaf lemon
letter lily linen lion lizard lock maple marble market mask meadow melon mill mint mirror monkey moon morning moss
mother mountain mouse music nail needle nest night oak oar ocean olive onion orange orchard otter oven owl oyster
paint palace palm paper parrot path peach pearl pebble pencil pepper piano pigeon pillow pine pipe planet plum pocket
poem pond poplar poppy potato prince quarry queen rabbit raft rain raven ribbon rice ring river road robin roof room
rope rose ruby saddle sail salmon salt sand scarf school sea seed shadow sheep shell ship shoe silk silver sister
skirt sky snow soap soldier spoon spring square stable star station stone storm stove straw street sugar summer sun
swan table tailor tea temple thorn throne thunder tiger tower town train tree trumpet tulip tunnel turtle valley velvet
village violin wagon wall walnut water wheat wheel whistle willow window winter wolf wood wool yard
""".split()
MOST_LINES = len(WORDS) ** 2 // 4  # a part of all pairs of words, so that a new pair is drawn at once


class Record(NamedTuple):
    """One context and the questions on it, as pairs of (question, right answer)."""

    context: str
    questions: list[tuple[str, str]]


def records(number: int = 1, lines: int = 180, asked: int = 10, seed: int = 0) -> list[Record]:
    """Make records of that many lines, and questions for `asked` of these, spread over the whole length.

    No key comes twice, and up to 191 lines no word. A line is about 15 tokens of the bundled model. Raises ValueError
    if more lines are asked for than written.
    """
    check_whole("lines", lines, 1)
    check_whole("asked", asked, 1)
    if not asked <= lines <= MOST_LINES:
        raise ValueError(f"asked = {asked}, lines = {lines}: need 1 <= asked <= lines <= {MOST_LINES}")
    rng = random.Random(seed)
    made = []
    for _ in range(number):
        pairs: dict[str, str] = {}
        while (left := lines - len(pairs)) > 0:
            words = rng.sample(WORDS, min(2 * left, len(WORDS)))
            pairs |= {f"{a}-{b}": str(rng.randint(10000, 49999)) for a, b in zip(words[::2], words[1::2], strict=True)}
        written = list(pairs.items())
        chosen = [rng.randrange(i * lines // asked, (i + 1) * lines // asked) for i in range(asked)]
        rng.shuffle(chosen)
        context = "".join(f"{key}: {number}\n" for key, number in written)
        made.append(Record(context, [(f"{written[i][0]}: ", written[i][1]) for i in chosen]))
    return made


def examples(*, data: Path | None = None, seed: int = 0, lines: int = 180, asked: int = 10) -> Iterator[Example]:
    """Make record after record, without end, with `asked` questions on each."""
    for i in count():
        context, questions = records(1, lines, asked, seed + 1000003 * i)[0]
        for j, (question, answer) in enumerate(questions):
            place = context[: context.index(question)].count("\n") / lines
            yield Example(f"{i}-{j}", context, question, (answer,), 8, "\n", at=(lines, place))


def prompt(example: Example) -> tuple[str, str]:
    """The record, and the key whose number is the answer."""
    return example.context, example.question


def score(output: str, example: Example) -> float:
    """Return 1 if the first line of the output is the answer and nothing else, else 0."""
    return score_line(output, example.answers[0])


def score_line(output: str, answer: str) -> float:
    """Return 1 if the first line of the output is the answer and nothing else, else 0."""
    return float(output.split("\n", 1)[0].strip() == answer)
