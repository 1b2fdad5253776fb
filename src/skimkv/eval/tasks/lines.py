"""LongEval's line retrieval, the task of the SubGen paper: a long record of lines, one of which is asked for."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from . import Example, source, whole
from .record import WORDS

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
    """Without data: records made from `seed`, without end. With LongEval's files: their prompts in their order, of
    the file with that many lines, else of the next longer one, cut to a window around the line that is asked for.

    cue: the question ends with the beginning of the line, so that a model without instructions can answer, too;
    without it the question is LongEval's.
    """
    whole("lines", lines, 1)
    for key, head, record, asked in _made(seed, lines) if data is None else _read(data, lines):
        index, number = asked
        question = QUESTION.format(index) + (f"\nline {index}: REGISTER_CONTENT is <" if cue else "")
        place = [i for i, _ in record].index(index)
        context = head + "".join(LINE.format(*pair) for pair in record)
        new, stop = (8, "\n") if cue else (40, "")
        yield Example(key, context, question, (number,), new, stop, at=(lines, place / lines))


def _made(seed: int, lines: int) -> Iterator[tuple[str, str, list[tuple[str, str]], tuple[str, str]]]:
    for i in count():
        rng = random.Random(f"{seed} {i}")
        keys: dict[str, str] = {}
        while len(keys) < lines:
            a, b = rng.sample(WORDS, 2)
            keys[f"{a}-{b}"] = str(rng.randint(1000, 49999))
        record = list(keys.items())
        yield f"{i}", HEAD, record, record[int((i % 10 + rng.random()) / 10 * lines)]


def _read(data: Path, lines: int) -> Iterator[tuple[str, str, list[tuple[str, str]], tuple[str, str]]]:
    path = data
    if data.is_dir():
        sizes = sorted(int(m[1]) for p in data.iterdir() if (m := FILE.fullmatch(p.name)))
        fitting = [n for n in sizes if n >= lines]
        if not fitting:
            raise ValueError(f"--data {data}: no lines_N.jsonl with N of at least {lines}; it has {sizes or 'none'}")
        path = data / f"lines_{fitting[0]}.jsonl"
    for i, row in enumerate(source.rows(path)):
        try:
            found = re.findall(r"^line ([^\n:]+): REGISTER_CONTENT is <(\d+)>$", row["prompt"], flags=re.MULTILINE)
            head = row["prompt"][: row["prompt"].index("\nline ") + 1]
            index, place = row["random_idx"]
            number = str(row["expected_number"])
        except (KeyError, ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {i + 1}: not a LongEval prompt ({error})") from None
        if not 0 <= place < len(found) or found[place] != (index, number):
            raise ValueError(f"{path}, line {i + 1}: line {index} with {number} is not where random_idx says")
        if len(found) < lines:
            raise ValueError(f"{path}, line {i + 1}: {len(found)} lines, lines = {lines} asked for")
        start = place * (len(found) - lines) // max(len(found) - 1, 1)
        yield f"{path.stem}-{i}", head, found[start : start + lines], (index, number)


def prompt(example: Example) -> tuple[str, str]:
    return example.context, example.question


def score(output: str, example: Example) -> float:
    """1 if the first number in the output is the line's."""
    found = re.search(r"\d+", output)
    return float(found is not None and found[0] == example.answers[0])
