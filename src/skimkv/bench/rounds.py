"""Timing in rounds: candidates are called in turn, round after round, and ratios are taken within a round.

Two blocks of runs a second apart see different machines; two calls of one round see nearly the same one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .machine import Call, nothing


@dataclass(frozen=True)
class Timings:
    """The seconds of every candidate, one entry for each round."""

    seconds: dict[str, list[float]]

    def ms(self, name: str) -> float:
        """Return the candidate's median in milliseconds."""
        return statistics.median(self.seconds[name]) * 1e3

    def ms_range(self, name: str) -> tuple[float, float]:
        """Return the candidate's shortest and longest time in milliseconds."""
        return min(self.seconds[name]) * 1e3, max(self.seconds[name]) * 1e3

    def ratio(self, slow: str, fast: str) -> float:
        """Return the median over rounds of seconds(slow) / seconds(fast)."""
        pairs = zip(self.seconds[slow], self.seconds[fast], strict=True)
        return statistics.median(a / b for a, b in pairs)


def take_turns(
    calls: Mapping[str, Call],
    rounds: int,
    clock: Callable[[str, Call], float],
    before: Callable[[str], None] = lambda name: None,
    warm_up: int = 1,
    tick: Call = nothing,
) -> Timings:
    """Time all calls in turn, in `warm_up` rounds that do not count and in `rounds` that do.

    clock(name, call) runs the call and returns its seconds. before(name) runs in front of each call, outside the clock.
    tick is called after each round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(warm_up + rounds):
        for name, call in calls.items():
            before(name)
            took = clock(name, call)
            if i >= warm_up:
                seconds[name].append(took)
        tick()
    return Timings(seconds)
