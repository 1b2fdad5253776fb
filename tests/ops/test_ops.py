"""The C++ kernels against the reference in float64 over the same rounded cache, on every instruction set here.

Unused memory is NaN, so a kernel that lets it in is seen. Where a method chooses, the data leave a margin between
what is taken and what is left, wider than any rounding, and the tests assert it.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skimkv.stores.base import Shape
from skimkv.stores.full import Full
from skimkv.stores.slots import Slots
from support import ref, steps
from support.kernels import ISAS, NATIVE, TYPES, close, compare, exact, filled, held, margin, on

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native library is not built")
KINDS = (None, "int8", "int4")
SIZES, HEADS, CHANNELS = (16, 24, 64, 80, 96, 128, 200, 256), (1, 3, 8), ("none", "copy", "int8", "int4")
LENGTHS = ([1], [255, 40], [257], [700, 256, 1], [1025])
# every size, length, type and group with every other kind of index, not the full product
CASES = [
    (D, LENGTHS[i % 5], list(TYPES)[(i + j) % 3], HEADS[(i // 2 + j) % 3], channels)
    for (i, D), (j, channels) in itertools.product(enumerate(SIZES), enumerate(CHANNELS))
]


@pytest.mark.parametrize(
    "case",
    [
        *CASES[:: len(CHANNELS)],
        (64, [4097], "bfloat16", 1, "none"),
        (200, [4097], "float32", 1, "none"),
        *((D, [700, 256, 1], "bfloat16", G, "none") for D, G in ((24, 2), (80, 7), (128, 8), (256, 6), (512, 8))),
        (320, [513, 40], "float32", 3, "none"),
        (576, [257], "float16", 1, "none"),
    ],
    ids=str,
)
def test_dense(case):
    D, lengths, dtype, G, _ = case
    q, store = filled(D, lengths, TYPES[dtype], G, "none")
    for cap in (None, 5.0):
        compare("dense", ISAS, q, store, D**-0.5, cap)


@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        (64, [4097], "bfloat16", 3, "copy"),
        (128, [4097], "float16", 1, "int8"),
        (80, [4097], "float32", 8, "int4"),
        (320, [513, 40], "float32", 3, "copy"),
        (512, [700, 256, 1], "bfloat16", 8, "int8"),
        (576, [600], "float16", 1, "int4"),
        (576, [300], "float32", 2, "none"),
    ],
    ids=str,
)
def test_sparq(case):
    D, lengths, dtype, G, channels = case
    i = CASES.index(case) if case in CASES else 1
    r, (k, local) = (4, 8, 12)[i % 3], ((24, 6), (16, 0), (9, 9))[i % 3]
    temperature, mean, cap = ("coverage", "sqrt_d", "sqrt_r")[i // 2 % 3], i % 2 == 0, (None, 8.0)[i // 3 % 2]
    q, store = filled(D, lengths, TYPES[dtype], G, channels, r, k, local)
    twin, scale = exact(store), D**-0.5
    x = q.double()
    sums = x.abs().sum(2).sort(-1, descending=True).values
    assert r == D or (sums[..., r - 1] > 1.05 * sums[..., r]).all()
    i1 = ref.top_channels(x, r)
    part = x.gather(-1, i1[:, :, None].expand(-1, -1, G, -1))
    logits = part @ twin.read_channels(i1) * ref.inverse_temperature(x, i1, scale, temperature)
    logits = ref.apply_softcap(logits, cap).masked_fill(~twin.valid()[:, :, None], -torch.inf)
    assert margin(logits.softmax(-1).sum(2), lengths, k, local) > 1.05
    compare("sparq", ISAS, q, store, scale, cap, r, k, local, temperature, mean)


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


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("channels", CHANNELS)
def test_sparq_over_all_positions_is_dense(isa, channels):
    q, store = filled(64, [300, 17], torch.float32, 3, channels)
    with on(isa):
        y = steps.sparq(store, q, 0.125, None, 8, 300, 10, "coverage", True)
    close(y, ref.dense(exact(store), q.double(), 0.125, None), store, q, 0.125)


@pytest.mark.parametrize(
    "case",
    [*CASES[:: len(CHANNELS)], (512, [300, 40], "float32", 2, "none"), (576, [257], "bfloat16", 3, "none")],
    ids=str,
)
def test_exact_scores_and_low_rank(case):
    D, lengths, dtype, G, _ = case
    k, scale = 16, D**-0.5
    q, store = filled(D, lengths, TYPES[dtype], G, "none", k=k)
    logits = ref.attend_rows(q.double(), *[exact(store).read_keys()] * 2, exact(store).valid(), scale, None)[1]
    assert margin(logits.sum(2), lengths, k, 0) > 1.05
    for oracle in (False, True):
        compare("topk", ISAS, q, store, scale, None, k, oracle)
    normal = torch.randn(2, D, D, generator=torch.Generator().manual_seed(1))
    P = torch.linalg.qr(normal).Q[..., : D - 8 if D > 64 else D].contiguous()
    q, store = filled(D, lengths, TYPES[dtype], G, "copy", k=k, mean=False, projection=P)
    twin, x = exact(store), q.double()
    logits = (x @ P.double()) @ twin.read_channels(torch.arange(P.shape[-1]).expand(len(lengths), 2, -1)) * scale
    weights = logits.masked_fill(~twin.valid()[:, :, None], -torch.inf).softmax(-1).sum(2)
    assert margin(weights, lengths, k, 0) > 1.01
    compare("lowrank", ISAS, q, store, scale, None, k)


def test_a_long_row_on_two_threads():
    q, store = filled(16, [100003], torch.float16, 3, "int8", 8, 64, 16, H=1)
    compare("dense", ISAS, q, store, 0.25, None, threads=2)
    compare("sparq", ISAS, q, store, 0.25, None, 8, 64, 16, "coverage", True, threads=2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("D", "G", "dtype", "scored"),
    [
        (16, 1, "float32", True),
        (80, 3, "bfloat16", True),
        (128, 8, "float16", False),
        (200, 1, "bfloat16", True),
        (512, 3, "float32", True),
        (576, 1, "float16", False),
    ],
)
@pytest.mark.parametrize("kv", KINDS)
def test_slots(isa, D, G, dtype, scored, kv):
    for capacity, seen in ((300, [300, 7]), (40, [95, 12]), (1, [1, 1])):
        shape, type_ = Shape(2, 2, G, D), TYPES[dtype]
        store = Slots(shape, type_, "cpu", capacity, scored=scored, kv=kv)
        k, v = torch.randn(2, 2, 2, max(seen), D).to(type_)
        store.append(k, v, [max(seen) - n for n in seen])
        for b, n in enumerate(store.filled):
            store.k[b, :, n:] = store.v[b, :, n:] = 255 if kv else torch.nan  # as ends of a row: NaN
        q, new, recent = torch.randn(2, 2, G, D).to(type_), torch.randn(2, 2, 2, D).to(type_), [3, 0]
        if scored:
            store.score.uniform_()
            for b, n in enumerate(store.filled):
                store.pos[b, :, :n] = torch.stack([torch.randperm(seen[b])[:n] for _ in range(2)])
        twin = exact(store)
        want = ref.slots(twin, q.double(), *new.double(), D**-0.5, 9.0, recent)
        with on(isa):
            got = steps.slots(store, q, *new, D**-0.5, 9.0, recent)
        close(got, want, store, q, D**-0.5)
        assert (store.filled, store.lengths) == (twin.filled, twin.lengths)
        for b, n in enumerate(store.filled):
            for name in ("k", "v", "score", "pos") if scored else ("k", "v"):
                a, e = (getattr(s, name)[b, :, :n].double() for s in (store, twin))
                torch.testing.assert_close(a, e, atol=1e-6, rtol=1e-4)


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
            ref.slots(twin, q.double(), k.double(), v.double(), 0.25, None, [4, 30])
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


# every index with every type, with every kind of row, and in the widest head
APPENDED = [(72, dtype, channels, None) for dtype in TYPES for channels in CHANNELS]
APPENDED += [
    (D, list(TYPES)[i % 3], channels, kv)
    for i, (channels, kv) in enumerate(itertools.product(CHANNELS, KINDS[1:]))
    for D in (72, 576)[: 1 + i % 2]
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("D", "dtype", "channels", "kv"), APPENDED)
def test_append_writes_what_the_reference_writes(isa, D, dtype, channels, kv):
    lengths = [254, 510, 3]  # a group fills, then a chunk; the third row is short
    _, one = filled(D, lengths, TYPES[dtype], 2, channels, kv=kv)
    two = one.fork()
    with on(isa):
        for _ in range(6):
            k, v = torch.randn(2, D, 2, 3).to(TYPES[dtype]).permute(0, 3, 2, 1)  # transposed, strided
            ref.append(one, k, v)
            steps.append(two, k, v)
    held(one, two)


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
    ref.append(one, k_new, v_new)
    with on(isa):
        steps.append(two, k_new, v_new)
    held(one, two)
    compare("dense", isa, strided, two, D**-0.5, None, threads=draw(st.integers(1, 2)))
    # choosing everything leaves nothing to a margin
    compare("sparq", isa, strided, two, D**-0.5, None, D, 601, min(local, 600), "sqrt_d", True)
