"""Timing in rounds: the order of calls, and which of them count."""

from __future__ import annotations

import pytest

from skimkv.bench.rounds import SELDOM, Timings, take_turns


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
    rounds = [log[i : i + 7] for i in range(0, len(log), 7)]
    assert len(rounds) == 3
    for entries in rounds:
        assert entries[0] != entries[3] and entries[6] == "tick"
        for i in (0, 3):
            name = entries[i].removeprefix("before ")
            assert entries[i : i + 3] == [f"before {name}", f"clock {name}", name]
    assert sorted(timings.seconds["a"] + timings.seconds["b"]) == [3, 4, 5, 6] and timings.waited == {}


def test_the_order_changes_from_round_to_round():
    order: list[str] = []
    take_turns(dict.fromkeys("abcde", print), 20, lambda name, _: order.append(name) or 1.0)
    rounds = ["".join(order[i : i + 5]) for i in range(0, len(order), 5)]
    assert len(rounds) == 21 and all(sorted(names) == list("abcde") for names in rounds)
    assert len({names[0] for names in rounds}) == len({names[-1] for names in rounds}) == 5


def test_calls_that_waited_for_a_processor_do_not_count():
    """The clock of waiting is read just before and just after a call, and what is outside is not the call's."""
    waits, log = iter([0.0, 5.0, 5.0, 5.00005, 6.0, 7.0]), []

    def waited() -> float:
        log.append("waited")
        return next(waits)

    def seconds(name: str, call) -> float:
        log.append("call")
        return {3: 50.0, 8: 1.0, 13: 20.0}[len(log)]

    timings = take_turns(
        {"a": print}, 3, seconds, lambda name: log.append("before"), 0, lambda: log.append("tick"), waited
    )
    assert log == ["before", "waited", "call", "waited", "tick"] * 3
    assert timings.seconds == {"a": [50, 1, 20]} and timings.undelayed("a") == 1
    assert timings.kept("a") == [False, True, False]
    assert timings.ms("a") == 1000 and timings.ms_range("a") == (1000, 1000)


def test_ratios_are_of_rounds_in_which_both_count():
    seconds = {"a": [10.0, 4.0, 100.0], "b": [1.0, 2.0, 90.0]}
    timings = Timings(seconds, {"a": [1.0, 0.0, 0.0], "b": [0.0, 0.0, 1.0]})
    assert timings.ratio("a", "b") == 2
    apart = Timings(seconds, {"a": [0.0, 1.0, 1.0], "b": [1.0, 0.0, 0.0]})
    assert apart.ratio("a", "b") == 10 / 46  # no such round: of the medians of what counts
    nothing = Timings(seconds, {"a": [1.0] * 3, "b": [1.0] * 3})
    assert nothing.undelayed("a") == 0 and nothing.kept("a") == [True] * 3 and nothing.ms("a") == 10_000


def test_a_ratio_is_taken_within_rounds():
    """The machine became ten times slower after the first round; b is twice as fast as a all the time."""
    timings = Timings({"a": [1.0, 10.0, 10.0], "b": [0.5, 5.0, 5.0]})
    assert timings.ratio("a", "b") == 2
    assert timings.ms("a") == 10_000
    assert timings.ms_range("b") == (500, 5000)
    with pytest.raises(ValueError, match="shorter"):
        Timings({"a": [1.0], "b": []}).ratio("a", "b")


def test_a_long_call_may_wait_longer():
    timings = Timings({"a": [1e-3, 1e-3, 1.0, 1.0]}, {"a": [99e-6, 100e-6, 9.9e-3, 1e-2]})
    assert timings.kept("a") == [True, False, True, False] and timings.undelayed("a") == 2


def test_a_difference_is_taken_within_rounds():
    """The machine became slower after the first round; the last round of b does not count."""
    timings = Timings({"a": [1.0, 11.0, 12.0], "b": [0.5, 10.5, 1.0]}, {"a": [0.0] * 3, "b": [0.0, 0.0, 1.0]})
    assert timings.ms_longer("a", "b") == 500 and timings.ms_longer("b", "a") == -500
    apart = Timings({"a": [3.0, 9.0], "b": [9.0, 1.0]}, {"a": [0.0, 1.0], "b": [1.0, 0.0]})
    assert apart.ms_longer("a", "b") == 2000  # no such round: of the medians of what counts


def test_a_candidate_may_take_its_turn_in_some_rounds_only():
    """Which one is chosen by the last warm-up; in the rounds between, all others take their turns."""
    log: list[str] = []
    took = {"fast": 1.0, "slow": 9.0}

    def seconds(name: str, call) -> float:
        log.append(name)
        return took[name]

    def seldom(warm_up):
        assert warm_up == took and log.count("slow") == 2  # the warm-ups
        return [name for name in warm_up if warm_up[name] > 4]

    rounds, tick = 2 * SELDOM + 1, lambda: log.append(".")
    timings = take_turns(dict.fromkeys(took, print), rounds, seconds, warm_up=2, tick=tick, seldom=seldom)
    assert [len(timings.seconds[name]) for name in took] == [rounds, 3] and timings.seldom == {"slow"}
    assert timings.ratio("slow", "fast") == 9 and timings.ms("slow") == 9000
    in_rounds = ["".join(sorted(names)) for names in "".join(name[0] for name in log).split(".")[2:-1]]
    assert in_rounds == ["f" if i % SELDOM else "fs" for i in range(rounds)]


def test_a_ratio_to_a_candidate_that_is_seldom_called_is_of_the_rounds_of_both():
    """The machine became ten times slower for one round in which the slow candidate was not called."""
    fast = [1.0] + [10.0] * (SELDOM - 1) + [2.0]
    timings = Timings({"slow": [5.0, 10.0], "fast": fast, "other": fast}, seldom=["slow"])
    assert timings.ratio("slow", "fast") == timings.ratio("other", "fast") * 5 == 5
    assert timings.ratio("fast", "slow") == 0.2
