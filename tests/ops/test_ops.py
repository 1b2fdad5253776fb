"""The C++ kernels at their limits, against the reference in float64 over the same rounded cache.

Unused memory is NaN, so a kernel that lets it in is seen. Every method with random data is in test_random_steps.py.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skimkv.stores.base import Shape
from skimkv.stores.full import Full
from skimkv.stores.slots import Slots
from support import steps
from support.kernels import ISAS, NATIVE, TYPES, compare, exact, filled, held, on

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native library is not built")
KINDS = (None, "int8", "int4")
CHANNELS = ("none", "copy", "int8", "int4")


@pytest.mark.parametrize("channels", ["int8", "int4"])
def test_the_largest_integer_sums_of_the_widest_head(channels):
    """All 576 channels have the largest weight, and eight tokens have the largest code in all of them.

    With r = D the sums of weights times codes are as large as they can be, and they must still fit 32 bits.
    """
    D, n = 576, 512
    size = torch.randint(2, (n + 1,)) / 3
    size[[0, 256]], size[[3, 50, 100, 200, 300, 350, 400, 450]] = 0.0, 1.0
    store = Full(Shape(1, 1, 2, D), torch.float32, "cpu", channels, True)
    store.append(size[:, None].expand(1, 1, -1, D), torch.randn(1, 1, n + 1, D))
    q = torch.full((1, 1, 2, D), 1.0)
    compare("sparq", ISAS, q, store, 3 / D, None, D, 8, 0, "coverage", True)


def test_a_long_row_on_two_threads():
    q, store = filled(16, [100003], torch.float16, 3, "int8", 8, 64, 16, H=1)
    compare("dense", ISAS, q, store, 0.25, None, threads=2)
    compare("sparq", ISAS, q, store, 0.25, None, 8, 64, 16, "coverage", True, threads=2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7FC458B4, 0x7FFFFFFF], ids=hex)
def test_a_nan_of_any_bits_stays_one(isa, bits):
    """Exponentials of logits and of soft caps keep it, whatever its low bits would be as an exponent."""
    q, store = filled(16, [300], torch.float32, 2, H=2)
    q[0, 0, 1] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    for softcap in (None, 20.0):
        with on(isa):
            y = steps.dense(store, q, 0.25, softcap)
        assert y[0, 0, 1].isnan().all()
        assert not y[0, 0, 0].isnan().any() and not y[0, 1].isnan().any()


@pytest.mark.parametrize("isa", ISAS)
def test_of_equal_scores_the_oldest_token_goes(isa):
    """Keys are zero, so that every token gets one weight: many scores stay equal, also of recent tokens."""
    for capacity in (1, 15, 16, 17, 100):
        store = Slots(Shape(2, 3, 2, 16), torch.float32, "cpu", capacity, scored=True)
        store.append(torch.zeros(2, 3, 100, 16), torch.randn(2, 3, 100, 16))
        store.score.copy_(torch.randint(0, 3, store.score.shape))
        store.pos.copy_(torch.stack([torch.randperm(100)[:capacity] for _ in range(6)]).view(2, 3, -1))
        twin = exact(store)
        for _ in range(4):
            q, k, v = torch.randn(2, 3, 2, 16), torch.zeros(2, 3, 16), torch.randn(2, 3, 16)
            steps.slots(twin, q.double(), k.double(), v.double(), 0.25, None, [4, 30], reference=True)
            with on(isa):
                steps.slots(store, q, k, v, 0.25, None, [4, 30])
            assert torch.equal(store.pos, twin.pos)


STEPS = {"dense": (), "sparq": (8, 24, 6, "coverage", True), "topk": (24, False)}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("op", "channels", "kv"),
    [
        *((op, "none", kv) for op in ("dense", "topk") for kv in KINDS),
        *(("sparq", channels, None) for channels in CHANNELS),
        *(("sparq", "copy", kv) for kv in KINDS[1:]),
    ],
)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_step_that_appends_is_an_append_and_a_step(isa, op, channels, kv, threads):
    D, lengths = 24, [2302, 1790, 3]  # several parts, groups that fill, a part that is empty
    q, one = filled(D, lengths, torch.bfloat16, 2, channels, kv=kv)
    two = one.fork()
    with on(isa, threads):
        for _ in range(3):
            k, v = torch.randn(2, 3, 2, D).to(torch.bfloat16)
            steps.append(one, k, v)
            want = getattr(steps, op)(one, q, D**-0.5, None, *STEPS[op])
            assert torch.equal(getattr(steps, op)(two, q, D**-0.5, None, *STEPS[op], (k, v)), want)
    held(one, two)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data())
def test_any_shape_stride_and_type(data):
    draw = data.draw
    D, G, B, H = draw(st.integers(2, 72)) * 8, draw(st.integers(1, 9)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 600), min_size=B, max_size=B))
    cache, query = (TYPES[draw(st.sampled_from(list(TYPES)))] for _ in "cq")
    channels, isa, kv = draw(st.sampled_from(CHANNELS)), draw(st.sampled_from(ISAS)), draw(st.sampled_from(KINDS))
    r, k = draw(st.integers(1, min(D // 2, 16))), draw(st.integers(1, 40))
    local = draw(st.integers(0, k))
    q, store = filled(D, lengths, cache, G, channels, r, k, local, H=H, seed=draw(st.integers(0, 99)), kv=kv)
    # rows of q anywhere: an offset of one element, gaps between rows, heads and groups transposed
    room = torch.full((B, G, H, D + 5), torch.nan, dtype=query)
    strided = room[..., 1 : D + 1].transpose(1, 2)
    strided.copy_(q)
    k_new, v_new = torch.randn(2, D, B, H).to(cache).permute(0, 2, 3, 1)
    one, two = store.fork(), store
    one.append_token(k_new, v_new)
    with on(isa):
        steps.append(two, k_new, v_new)
    held(one, two)
    compare("dense", isa, strided, two, D**-0.5, None, threads=draw(st.integers(1, 2)))
    # choosing everything leaves nothing to a margin
    compare("sparq", isa, strided, two, D**-0.5, None, D, 601, min(local, 600), "sqrt_d", True)
