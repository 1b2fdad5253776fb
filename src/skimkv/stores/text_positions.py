"""The positions that a model gave the tokens of a store: by default token i stands at position i."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """Tokens from number `first` on: that one stands at `position`, and each next one `step` (0 or 1) later."""

    first: int
    position: int
    step: int

    def at(self, token: int) -> int:
        """The position of a token of this run."""
        return self.position + self.step * (token - self.first)


def runs(positions: Sequence[int]) -> list[Run]:
    """The positions of tokens 0, 1, ... as runs: one for a plain text, two for a text and an image after it."""
    found: list[Run] = []
    for token, position in enumerate(positions):
        if found and found[-1].at(token) == position:
            continue
        if found and found[-1].first == token - 1 and found[-1].position == position:
            found[-1] = found[-1]._replace(step=0)
        else:
            found.append(Run(token, position, 1))
    return found


class TextPositions:
    """The positions of all tokens that the rows of a store have seen, and of the first tokens their greatest ones.

    A model with positions on several axes gives a token one on each. Of these the least counts for a token that others
    are placed before, and the greatest for one that others are placed after.
    """

    def __init__(self, rows: int) -> None:
        self._runs: list[list[Run]] = [[] for _ in range(rows)]
        self._first: list[list[int]] = [[] for _ in range(rows)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextPositions) and self._runs == other._runs and self._first == other._first

    __hash__ = None  # type: ignore[assignment]

    def place(self, row: int, start: int, least: Sequence[Run], first: Sequence[int]) -> None:
        """Note where tokens from number `start` on stand; what was noted of them before is forgotten.

        least: runs of their least positions. first: the greatest positions of those of them that are among the store's
        first tokens.
        """
        known = self._runs[row]
        if not known and not first and len(least) == 1 and least[0] == (0, start, 1):  # where they are by default
            del self._first[row][start:]
            return
        while known and known[-1].first >= start:
            known.pop()
        for run in least:
            moved = run._replace(first=start + run.first)
            if moved.step != 1 or self.of(row, moved.first) != moved.position or (known and known[-1].step != 1):
                known.append(moved)
        before = self._first[row][:start]
        self._first[row] = [*before, *range(len(before), start), *first] if first else before

    def of(self, row: int, token: int) -> int:
        """The least position of a token."""
        known = self._runs[row]
        index = bisect_right(known, token, key=lambda run: run.first)
        return known[index - 1].at(token) if index else token

    def distance(self, row: int, first: int, dropped: int) -> int:
        """How many positions are free between the first tokens and the kept ones after them; `dropped` are between."""
        end = max(self._first[row], default=first - 1) + 1
        return self.of(row, first + dropped) - end

    def select(self, rows: Sequence[int]) -> TextPositions:
        """The positions of these rows of the batch."""
        twin = TextPositions(0)
        twin._runs, twin._first = [list(self._runs[i]) for i in rows], [list(self._first[i]) for i in rows]
        return twin
