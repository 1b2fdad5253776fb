"""Caches of random tokens: a benchmark's store decodes to what the same tokens give through the method."""

from __future__ import annotations

import pytest
import torch

from skimkv.bench.caches import filled_store, keys_values, random_store
from skimkv.methods import parse
from skimkv.stores.base import Shape

SHAPE = Shape(1, 2, 2, 32)


@pytest.mark.parametrize("spec", [
    "Dense()", "SparQ(r=8, k=32, channels='int8', mean_value=True)", "LowRank(r=8, k=16)", "LMInfinite(k=64)",
    "Dense(kv='int8')",
])  # fmt: skip
def test_a_filled_store_equals_a_real_prompt(spec):
    method, n = parse(spec), 700
    base = random_store(SHAPE, torch.float32, n)
    k, v = keys_values(base)
    q, k1, v1 = torch.randn(1, 2, 2, 32), torch.randn(1, 2, 32), torch.randn(1, 2, 32)
    whole = method.store(SHAPE, torch.float32)
    method.take(whole, torch.randn(1, 2, 2, n, 32), k, v, scale=0.2)
    b = method.decode(whole, q, k1, v1, scale=0.2)
    a = method.decode(filled_store(method, base), q, k1, v1, scale=0.2)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "kept"),
    [
        ("H2O(k=64)", 64),
        ("H2O(k=0.1)", 140),
        ("H2O(k=5000)", 1400),
        ("SnapKV(k=64)", 64),
        ("SnapKV(k=0.1)", 140),
        ("TOVA(k=64)", 64),
    ],
)
def test_chosen_slots_are_filled_to_their_budget(spec, kept):
    method, n = parse(spec), 1400
    store = filled_store(method, random_store(SHAPE, torch.float32, n))
    assert store.lengths == [n]
    assert store.nbytes == method.bound(n, SHAPE, torch.float32)
    assert store.read_rows()[0].shape == (1, 2, kept, 32)


@pytest.mark.parametrize("spec", ["SparQ(r=8, k=32)", "Dense(kv='int8')"])
def test_room_for_more_tokens_is_made_at_once(spec):
    method, n = parse(spec), 700
    store = filled_store(method, random_store(SHAPE, torch.bfloat16, n, more=200), more=200)
    before = store.allocated
    store.append(*keys_values(random_store(SHAPE, torch.bfloat16, 200)))
    assert (store.lengths, store.allocated) == ([900], before)


def test_stores_of_one_base_share_its_rows():
    base = random_store(SHAPE, torch.bfloat16, 300)
    stores = [filled_store(parse(spec), base) for spec in ("Dense()", "SparQ(r=8, k=32)", "H2O(k=64)")]
    addresses = [keys_values(base)[0].data_ptr(), *(store.history(slice(0, 1))[0].data_ptr() for store in stores)]
    assert [address == addresses[0] for address in addresses] == [True, True, True, False]


def test_the_same_seed_gives_the_same_tokens():
    first, again, other = (keys_values(random_store(SHAPE, torch.bfloat16, 10, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0]) and not torch.equal(first[0], first[1])
