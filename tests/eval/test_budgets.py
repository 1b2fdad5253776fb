"""Settings at a share of dense attention's bytes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from skimkv.eval import budgets
from skimkv.eval.sweeps import SWEEPS
from skimkv.methods import TOVA, Dense, Quest, SnapKV, StreamingLLM, SubGenStream, parse
from skimkv.stores.base import Shape
from skimkv.testing import Sequences, prompt


def dense_store(poisoned=0):
    x = Sequences.random(Shape(1, 2, 1, 16), 400)
    if poisoned:
        x.k[0, 1, 7 : 7 + poisoned] = torch.nan
    return prompt(Dense(), x)


@pytest.mark.parametrize("poisoned", [0, 1, 400 - 7])
def test_subgen_stream_ends_and_fits_even_with_keys_that_are_not_numbers(poisoned):
    store = dense_store(poisoned)
    method = budgets.at_share(SubGenStream, 1 / 2, [store])
    assert method is None or isinstance(method, SubGenStream)
    if not poisoned:
        assert method is not None and method.s >= 80  # half of the bytes: n / 4 samples of 2D, as they are read
        clusters = [
            int(budgets.founding_keys(torch.cdist(k, k) <= method.delta).sum())
            for k in store.history(slice(0, 1))[0][0]
        ]
        cost = method.traffic(400, store.shape, store.dtype, clusters=sum(clusters)).bytes
        assert 0.7 <= cost / (Dense().traffic(400, store.shape, store.dtype).bytes / 2) <= 1


@pytest.mark.parametrize(
    ("method", "share"),
    [
        (method, share)
        for method in (Quest, SnapKV, StreamingLLM, TOVA)
        for share in (1 / 2, 1 / 8, 1 / 16, 1 / 64)
        if (method, share) != (Quest, 1 / 64)
    ],
)
def test_methods_of_tokens_and_pages_read_the_share(method, share):
    """Of 4,000 tokens; one page or one token more would be too much."""
    n, store = 4000, prompt(Dense(), Sequences.random(Shape(1, 2, 1, 16), 4000))
    fitting, limit = (
        budgets.at_share(method, share, [store]),
        Dense().traffic(n, store.shape, store.dtype).bytes * share,
    )
    step = fitting.page if method is Quest else 1
    more = dataclasses.replace(fitting, k=fitting.k + step)
    reads = [each.traffic(n, store.shape, store.dtype).bytes for each in (fitting, more)]
    assert reads[0] <= limit < reads[1]
    if method is Quest:
        assert fitting.page == max(16, 2 / share) and fitting.k % fitting.page == 0


def test_a_share_that_bounds_and_a_page_exceed_is_out_of_reach():
    assert budgets.at_share(Quest, 1 / 64, [dense_store()]) is None  # of 400 tokens; pages would have 128


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_s_specs_are_methods(name):
    assert len({parse(spec) for spec in SWEEPS[name]}) == len(SWEEPS[name])
