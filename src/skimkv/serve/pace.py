"""How fast the server is: tokens a second, and how much of a prompt it can read in a given time."""

from __future__ import annotations

import threading
import time
from collections import deque

METER_SECONDS = 10.0
FIRST_PIECE, SHORTEST_PIECE, LONGEST_PIECE = 64, 16, 2**16  # tokens
WHOLE = 64  # pieces of a multiple of 64 tokens give the bits of a prompt that is read at once


class Meter:
    """Counts tokens, and tells how many there were a second in the last METER_SECONDS. Threads may share it."""

    def __init__(self) -> None:
        self._counted: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Note that `count` tokens were generated now."""
        with self._lock:
            self._counted.append((time.monotonic(), count))
            self._forget()

    def per_second(self) -> float:
        """Tokens a second, on average over METER_SECONDS."""
        with self._lock:
            self._forget()
            return sum(count for _, count in self._counted) / METER_SECONDS

    def _forget(self) -> None:
        first = time.monotonic() - METER_SECONDS
        while self._counted and self._counted[0][0] < first:
            self._counted.popleft()


class PieceLength:
    """How many tokens of a prompt can be read in a given time, by how long the last piece took.

    A token takes longer the more tokens stand before it, so only the last piece counts.
    """

    def __init__(self) -> None:
        self._rate: float | None = None  # tokens a second
        self._longest = FIRST_PIECE

    def within(self, seconds: float) -> int:
        """How many tokens to read next, so that it takes about `seconds`."""
        if self._rate is None:
            return FIRST_PIECE
        n = max(SHORTEST_PIECE, min(int(self._rate * seconds), 4 * self._longest, LONGEST_PIECE))
        return n - n % (WHOLE if n >= WHOLE else SHORTEST_PIECE)

    def note(self, tokens: int, seconds: float) -> None:
        """Note how long a piece of `tokens` tokens took. Those that are too short to tell do not count."""
        if tokens >= SHORTEST_PIECE:
            self._rate, self._longest = tokens / seconds, max(tokens, self._longest)
