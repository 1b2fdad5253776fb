"""Long work on a request, such as tokenising, beside the event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
THREADS = 2


class Aside:
    """Runs work in threads that nobody has to wait for.

    The event loop goes on meanwhile. Work whose caller has gone does not begin, and work that has begun is left alone
    when the process ends.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        for _ in range(THREADS):
            threading.Thread(target=self._run, name="skimkv-aside", daemon=True).start()

    async def run(self, work: Callable[[], T]) -> T:
        """Return what `work` returns, or raise what it raises."""
        done: Future[T] = Future()
        self._waiting.put((work, done))
        return await asyncio.wrap_future(done)

    def _run(self) -> None:
        while True:
            work, done = self._waiting.get()
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except Exception as error:
                    done.set_exception(error)
