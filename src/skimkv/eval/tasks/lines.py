"""LongEval's line retrieval, the task of the SubGen paper: a question asks for one line of a long record."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from . import source
from .base import Example, check_whole
from .record import MOST_LINES
from .words import NOUNS

HEAD = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a "
    "'<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its "
    "corresponding <REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding "
    "<REGISTER_CONTENT> of a certain line index. Now the record start:\n\n"
)
QUESTION = "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {}? I need the number. "
LINE = "line {}: REGISTER_CONTENT is <{}>\n"
FILE = re.compile(r"lines_(\d+)\.jsonl")


def examples(*, data: Path | None = None, seed: int = 0, lines: int = 100, cue: bool = True) -> Iterator[Example]:
    """Make records from `seed`, without end; or take LongEval's prompts in their order, where data is given.

    Of LongEval's files the one with that many lines is read, else the next longer one, whose records are cut to a
    window around the line in question. cue: the question ends with the beginning of the line, so that a model without
    instructions can answer, too; without it the question is LongEval's.
    """
    check_whole("lines", lines, 1, MOST_LINES)
    for key, head, record, (index, number) in _make(seed, lines) if data is None else _read(data, lines):
        question = QUESTION.format(index) + (f"\nline {index}: REGISTER_CONTENT is <" if cue else "")
        place = [i for i, _ in record].index(index)
        context = head + "".join(LINE.format(*pair) for pair in record)
        new, stop = (8, "\n") if cue else (40, "")
        yield Example(key, context, question, (number,), new, stop, at=(lines, place / lines))


def _make(seed: int, lines: int) -> Iterator[tuple[str, str, list[tuple[str, str]], tuple[str, str]]]:
    """Make (id, head, lines of the record, the line in question) without end; a line is (index, number)."""
    for i in count():
        rng = random.Random(f"{seed} {i}")
        keys: dict[str, str] = {}
        while len(keys) < lines:
            a, b = rng.sample(NOUNS, 2)
            keys[f"{a}-{b}"] = str(rng.randint(1000, 49999))
        record = list(keys.items())
        yield f"{i}", HEAD, record, record[int((i % 10 + rng.random()) / 10 * lines)]


def _read(data: Path, lines: int) -> Iterator[tuple[str, str, list[tuple[str, str]], tuple[str, str]]]:
    """Read the same from LongEval's files."""
    path = data
    if data.is_dir():
        sizes = sorted(int(m[1]) for p in data.iterdir() if (m := FILE.fullmatch(p.name)))
        fitting = [n for n in sizes if n >= lines]
        if not fitting:
            raise ValueError(f"--data {data}: no lines_N.jsonl with N of at least {lines}; it has {sizes or 'none'}")
        path = data / f"lines_{fitting[0]}.jsonl"
    for i, row in enumerate(source.read_rows(path)):
        try:
            record = re.findall(r"^line ([^\n:]+): REGISTER_CONTENT is <(\d+)>$", row["prompt"], flags=re.MULTILINE)
            head = row["prompt"][: row["prompt"].index("\nline ") + 1]
            index, place = row["random_idx"]
            number = str(row["expected_number"])
            if not isinstance(place, int) or isinstance(place, bool):
                raise ValueError(f"random_idx says {place!r}")
        except (KeyError, ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {i + 1}: not a LongEval prompt ({error})") from None
        if not 0 <= place < len(record) or record[place] != (index, number):
            raise ValueError(f"{path}, line {i + 1}: line {index} with {number} is not where random_idx says")
        if len(record) < lines:
            raise ValueError(f"{path}, line {i + 1}: {len(record)} lines, lines = {lines} asked for")
        start = place * (len(record) - lines) // max(len(record) - 1, 1)
        yield f"{path.stem}-{i}", head, record[start : start + lines], (index, number)


def score(output: str, example: Example) -> float:
    """Return 1 if the first number in the output is the line's, else 0."""
    number = re.search(r"\d+", output)
    return float(number is not None and number[0] == example.answers[0])
