"""The record task: lines of keys and numbers, and questions about some of them."""

from __future__ import annotations

import pytest

from skimkv.eval.tasks import record
from skimkv.eval.tasks.base import Example


def test_record_asks_for_lines_that_are_there_once() -> None:
    (one, two), (again, _) = record.records(2, 50, 12, seed=3), record.records(2, 50, 12, seed=3)
    assert one == again
    assert one != two
    assert one.context.count("\n") == 50
    assert len({question for question, _ in one.questions}) == 12
    for question, answer in one.questions:
        assert one.context.count(question) == 1
        assert f"{question}{answer}\n" in one.context


def test_record_covers_the_whole_length() -> None:
    (only,) = record.records(1, 100, 10)
    keys = [line.split(" ")[0] for line in only.context.splitlines()]
    places = sorted(keys.index(question.strip()) // 10 for question, _ in only.questions)
    assert places == list(range(10))


@pytest.mark.parametrize(
    ("lines", "asked", "says"),
    [
        (10, 11, "asked = 11, lines = 10: need 1 <= asked <= lines"),
        (10, 0, "asked = 0 must be"),
        (36482, 5, "lines = 36482: need"),
    ],
)
def test_record_refuses(lines: int, asked: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        record.records(1, lines, asked)


@pytest.mark.parametrize(
    ("output", "right"), [("123\nx: 4", 1), ("123", 1), ("1234\n", 0), ("12", 0), ("", 0), ("\n123", 0)]
)
def test_record_score(output: str, right: int) -> None:
    assert record.score(output, Example("0", "", "", ("123",))) == right
