"""Settings at a share of dense attention's bytes."""

from __future__ import annotations

import pytest
import torch

from skimkv.eval import budgets
from skimkv.methods import Dense, SubGenStream
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
