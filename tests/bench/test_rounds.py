"""Timing in rounds: the order of calls, and which of them count."""

from __future__ import annotations

import pytest

from skimkv.bench.rounds import Timings, take_turns


def test_candidates_take_turns_and_warm_up_rounds_do_not_count():
    log: list[str] = []
    clock = iter(range(1, 100))

    def seconds(name: str, call) -> float:
        log.append(f"clock {name}")
        call()
        return float(next(clock))

    timings = take_turns(
        {"a": lambda: log.append("a"), "b": lambda: log.append("b")}, 2, seconds,
        before=lambda name: log.append(f"before {name}"), warm_up=1, tick=lambda: log.append("tick"),
    )  # fmt: skip
    assert log == ["before a", "clock a", "a", "before b", "clock b", "b", "tick"] * 3
    assert timings.seconds == {"a": [3, 5], "b": [4, 6]}


def test_a_ratio_is_taken_within_rounds():
    """The machine became ten times slower after the first round; b is twice as fast as a all the time."""
    timings = Timings({"a": [1.0, 10.0, 10.0], "b": [0.5, 5.0, 5.0]})
    assert timings.ratio("a", "b") == 2
    assert timings.ms("a") == 10_000
    assert timings.ms_range("b") == (500, 5000)
    with pytest.raises(ValueError, match="shorter"):
        Timings({"a": [1.0], "b": []}).ratio("a", "b")
