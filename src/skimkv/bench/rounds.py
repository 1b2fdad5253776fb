"""Timing in rounds: candidates are called in turn, round after round, and ratios are taken within a round.

Two blocks of runs a second apart see different machines; two calls of one round see nearly the same one. In every round
the candidates come in another order, so that none always follows the same other one. A call during which threads of
this process waited for a processor tells how busy the machine was with something else: it is left out. A candidate that
is many times as slow as the others, or that disturbs those that follow it, may take its turn in some rounds only.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from .machine import Call, nothing

SELDOM = 4  # rounds; a candidate that is seldom called takes its turn in the first of them

# What the threads of a call may wait for a processor, all together: seconds, or a share of a longer call.
LONGEST_WAIT, LARGEST_SHARE = 100e-6, 0.01


def is_delayed(seconds: float, waited: float) -> bool:
    """Return whether other processes delayed a call that took `seconds`: its threads waited too long."""
    return waited >= max(LONGEST_WAIT, LARGEST_SHARE * seconds)


@dataclass(frozen=True)
class Timings:
    """The seconds of every candidate, one entry for each of its calls.

    waited: the seconds that the process's threads waited for a processor during each call, as far as they are known.
    seldom: the candidates that took their turn in the first of every SELDOM rounds; the others did in every round.
    """

    seconds: dict[str, list[float]]
    waited: dict[str, list[float]] = field(default_factory=dict)
    seldom: Collection[str] = ()

    def kept(self, name: str) -> list[bool]:
        """Return which of the candidate's calls count: those that were not delayed, or all if all were."""
        undelayed = self._undelayed(name)
        return undelayed if any(undelayed) else [True] * len(undelayed)

    def undelayed(self, name: str) -> int:
        """Return how many of the candidate's calls were not delayed by other processes, as far as that is known."""
        return sum(self._undelayed(name))

    def _undelayed(self, name: str) -> list[bool]:
        seconds = self.seconds[name]
        waited = self.waited.get(name, [0.0] * len(seconds))
        return [not is_delayed(s, w) for s, w in zip(seconds, waited, strict=True)]

    def ms(self, name: str) -> float:
        """Return the median of the candidate's calls that count, in milliseconds."""
        return statistics.median(self._kept_seconds(name)) * 1e3

    def ms_range(self, name: str) -> tuple[float, float]:
        """Return the shortest and the longest time of the candidate's calls that count, in milliseconds."""
        return min(self._kept_seconds(name)) * 1e3, max(self._kept_seconds(name)) * 1e3

    def ratio(self, slow: str, fast: str) -> float:
        """Return the median of seconds(slow) / seconds(fast) over the rounds in which both count.

        If there is no such round, it is the ratio of the medians.
        """
        ratios = [a / b for a, b in self._pairs(slow, fast)]
        return statistics.median(ratios) if ratios else self.ms(slow) / self.ms(fast)

    def ms_longer(self, slow: str, fast: str) -> float:
        """Return the median of seconds(slow) - seconds(fast) over the rounds in which both count, in milliseconds.

        If there is no such round, it is the difference of the medians.
        """
        longer = [a - b for a, b in self._pairs(slow, fast)]
        return statistics.median(longer) * 1e3 if longer else self.ms(slow) - self.ms(fast)

    def _pairs(self, one: str, other: str) -> list[tuple[float, float]]:
        """The seconds of two candidates in every round in which both count; none if they took no turns together."""
        either_seldom = one in self.seldom or other in self.seldom
        pairs = zip(self._in_rounds(one, either_seldom), self._in_rounds(other, either_seldom), strict=True)
        return [(a, b) for (a, keep_a), (b, keep_b) in pairs if keep_a and keep_b]

    def _in_rounds(self, name: str, seldom: bool) -> list[tuple[float, bool]]:
        """The candidate's seconds, and which count, in all rounds or in those of candidates that are seldom called."""
        calls = list(zip(self.seconds[name], self.kept(name), strict=True))
        return calls[::SELDOM] if seldom and name not in self.seldom else calls

    def _kept_seconds(self, name: str) -> list[float]:
        return [s for s, keep in zip(self.seconds[name], self.kept(name), strict=True) if keep]


def take_turns(
    calls: Mapping[str, Call],
    rounds: int,
    clock: Callable[[str, Call], float],
    before: Callable[[str], None] = lambda name: None,
    warm_up: int = 1,
    tick: Call = nothing,
    waited: Callable[[], float] | None = None,
    seldom: Callable[[Mapping[str, float]], Collection[str]] = lambda seconds: (),
) -> Timings:
    """Time all calls in turn, in `warm_up` rounds that do not count and in `rounds` that do.

    clock(name, call) runs the call and returns its seconds. before(name) runs in front of each call, outside the clock.
    tick is called after each round. waited() returns the seconds that the process's threads have waited for a processor
    so far; None: that is not known. seldom(seconds of the last warm-up) names the calls that take their turn in the
    first of every SELDOM rounds only.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    waits: dict[str, list[float]] = {name: [] for name in calls} if waited else {}
    shuffle = random.Random(0).shuffle
    took, seldom_called = dict[str, float](), frozenset[str]()
    for i in range(-warm_up, rounds):
        order = list(calls)
        if i > -warm_up:
            shuffle(order)
        if i == 0 and took:
            seldom_called = frozenset(seldom(took))
        for name in order:
            if i % SELDOM and name in seldom_called:
                continue
            before(name)
            start = waited() if waited else 0.0
            took[name] = clock(name, calls[name])
            wait = waited() - start if waited else 0.0
            if i >= 0:
                seconds[name].append(took[name])
                if waited:
                    waits[name].append(wait)
        tick()
    return Timings(seconds, waits, seldom_called)
