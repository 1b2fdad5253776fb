"""While threads of an operation wait for a core, the next operations use fewer of them: with the same result."""

from __future__ import annotations

import ctypes
import time

import pytest
import torch

from skimkv.methods import Dense
from skimkv.ops.cpu import library as native
from skimkv.stores.base import Shape
from support.kernels import NATIVE, on
from support.pools import Pool, in_a_new_thread

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native library is not built")

THREADS = 3

THREADS = 3


def test_fewer_threads_are_used_while_one_is_late_and_all_of_them_later():
    pool, buffer = Pool(), torch.ones(1 << 14)
    read = native.library().skimkv_read
    read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    read.restype = ctypes.c_uint64

    def operations():
        sums, pool.late, calls = {read(buffer.data_ptr(), buffer.nbytes, 2, THREADS, pool.address)}, 0.01, 0
        while len(pool.asked) > calls and calls < 100:  # until the caller works alone
            calls = len(pool.asked)
            sums.add(read(buffer.data_ptr(), buffer.nbytes, 2, THREADS, pool.address))
        fewest, pool.late = min(pool.asked), 0.0
        end = time.monotonic() + 60
        while pool.asked[-1] < THREADS and time.monotonic() < end:
            sums.add(read(buffer.data_ptr(), buffer.nbytes, 2, THREADS, pool.address))
            time.sleep(0.002)
        return sums, calls, fewest

    sums, calls, fewest = in_a_new_thread(operations)
    assert len(sums) == 1 and sums != {0}
    assert pool.asked[0] == THREADS and fewest == 2 and calls < 100
    assert pool.asked[-1] == THREADS


def test_a_step_gives_the_same_on_fewer_threads(monkeypatch):
    """How a step is split follows the threads that were asked for, not those that there are."""
    pool, method = Pool(), Dense()
    monkeypatch.setattr(native, "thread_pool", lambda: pool.address)
    store = method.store(Shape(1, 1, 2, 16), torch.float32)
    store.append(*torch.randn(2, 1, 1, 5000, 16))
    tokens = [(torch.randn(1, 1, 2, 16), *torch.randn(2, 1, 1, 16)) for _ in range(20)]

    def decode(late):
        pool.late, twin = late, store.fork()
        with on(None, THREADS), torch.no_grad():
            return [method.decode(twin, *token, scale=0.25) for token in tokens]

    want = in_a_new_thread(lambda: decode(0.0))
    at = len(pool.asked)
    got = in_a_new_thread(lambda: decode(0.01))
    assert all(map(torch.equal, got, want)) and pool.asked[at] == THREADS
    assert len(pool.asked) - at < len(tokens)  # some were taken by the caller alone
