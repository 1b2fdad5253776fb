"""Threads: a store belongs to one at a time, and stores in different threads do not touch each other."""

from __future__ import annotations

import contextvars
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from skimkv.methods import parse
from skimkv.testing import SHAPE, Sequences, decode, prompt
from support.calls import in_thread

SPECS = ["Dense()", "SparQ(r=4, k=16, channels='int8')", "TopK(k=12)", "LMInfinite(k=20)", "H2O(k=24)"]
SPECS += ["SubGen(k=10, recent=8)", "SubGenStream(delta=2.0, t=3, s=8)", "Strided(k=20)"]


@pytest.mark.slow
def test_eight_threads_of_a_thousand_steps(backend):
    x = Sequences.random(SHAPE, 1030)

    def run(spec):
        method = parse(spec)
        torch.set_num_threads(1)
        return decode(method, prompt(method, x.tokens(0, 30)), x.tokens(30, 1030))

    alone = [run(spec) for spec in SPECS]
    with ThreadPoolExecutor(8) as pool:
        contexts = [contextvars.copy_context() for _ in SPECS]  # a thread does not see the backend forced here
        together = list(pool.map(lambda context, spec: context.run(run, spec), contexts, SPECS))
    for spec, a, b in zip(SPECS, alone, together, strict=True):
        assert torch.equal(a, b), spec


@pytest.mark.parametrize("spec", SPECS)
def test_a_store_in_use_refuses_another_thread(spec, backend):
    """After a prompt, and after steps that the store remembers; then the store is as it was, and free."""
    method, x = parse(spec), Sequences.random(SHAPE, 15)
    store = prompt(method, x.tokens(0, 10))
    for n in (10, 12):
        with store.exclusive():
            error = in_thread(lambda n=n: decode(method, store, x.tokens(n, n + 1)))
        assert str(error) == "this cache is in use by another thread; give every request a cache of its own"
        assert store.lengths == [n, n] and store.exclusive().free
        decode(method, store, x.tokens(n, n + 2))
        assert store.lengths == [n + 2, n + 2]
