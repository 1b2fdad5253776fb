"""Pools of threads for the library: they are late, or come in another number than they were asked for."""

from __future__ import annotations

import ctypes
import random
import threading
import time

FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


class Pool:
    """A pool of threads that runs their parts one after the other, the last one `late` seconds later.

    asked: for how many threads it was asked, call by call.
    """

    def __init__(self):
        self.late, self.asked = 0.0, []
        self.function = PARALLEL(self.run)
        self.address = ctypes.cast(self.function, ctypes.c_void_p).value

    def run(self, function, data, n, flags):
        self.asked.append(n)
        for i in range(n):
            if i == n - 1:
                time.sleep(self.late)
            FUNCTION(function)(data)


class Crowd(Pool):
    """Threads that all run at the same time, each after a pause; the caller takes part, or only waits.

    more: how many come that nobody asked for.
    """

    def __init__(self, takes_part, more=0):
        super().__init__()
        self.takes_part, self.more, self.draw = takes_part, more, random.Random(3)

    def run(self, function, data, n, flags):
        self.asked.append(n)
        pauses = [self.draw.choice((0, 0, 1e-4, 1e-3)) for _ in range(n + self.more)]

        def take_part(pause):
            time.sleep(pause)
            FUNCTION(function)(data)

        threads = [threading.Thread(target=take_part, args=(pause,)) for pause in pauses[self.takes_part :]]
        for thread in threads:
            thread.start()
        if self.takes_part:
            take_part(pauses[0])
        for thread in threads:
            thread.join()


def in_a_new_thread(function):
    """Run the function in a thread of its own, which has not waited for anything yet, and return its result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    (result,) = results
    return result
