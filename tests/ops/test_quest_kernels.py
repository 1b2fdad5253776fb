"""Quest's C++ step against its algorithm in float64, on every instruction set, and the bounds that it keeps."""

from __future__ import annotations

import ctypes

import pytest
import torch

from skimkv import ops
from skimkv.methods import Dense, Quest
from skimkv.ops.cpu import library
from skimkv.ops.cpu.memory import memory_of
from skimkv.stores.base import Shape
from support.kernels import EPS, ISAS, NATIVE, TYPES, exact, on

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native library is not built")

# D, G, page, k, tokens of each row, type, rows of K and V: pages that are full, begun, and more than a tile of 256
CASES = [
    (64, 1, 16, 64, [1], "float32", None), (128, 4, 16, 48, [700, 30], "bfloat16", None),
    (24, 3, 5, 17, [255, 5, 16], "float16", None), (80, 2, 1, 9, [600], "float32", None),
    (64, 2, 8, 8, [200, 21], "bfloat16", "int8"), (33, 1, 3, 40, [1000], "float32", None),
    (128, 1, 4, 40, [2300], "bfloat16", "int4"), (256, 5, 16, 32, [100], "float16", None),
]  # fmt: skip


def filled_store(method, shape, lengths, dtype, seed=0):
    draw = torch.Generator().manual_seed(seed)
    n = max(lengths)
    k, v = torch.randn(2, *shape[:2], n, shape.D, generator=draw).to(dtype)
    store = method.store(shape, dtype)
    store.append(k, v, [n - length for length in lengths])
    return store


def tokens(shape, dtype, n=3):
    draw = torch.Generator().manual_seed(9)
    for _ in range(n):
        q = torch.randn(*shape, generator=draw).to(dtype)
        k, v = torch.randn(2, *shape[:2], shape.D, generator=draw).to(dtype)
        yield q, ops.Token(k, v)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("D", "G", "page", "k", "lengths", "dtype", "kv"), CASES)
def test_kernel_is_the_algorithm(isa, threads, D, G, page, k, lengths, dtype, kv):
    """The pages are those of float64 unless rounding may exchange two of them; steps take tokens, over a page's end."""
    shape, method, dtype = Shape(len(lengths), 2, G, D), Quest(page, k, kv=kv), TYPES[dtype]
    store = filled_store(method, shape, lengths, dtype)
    sinks = torch.linspace(-1, 2, 2 * G).view(2, G) if G > 1 else None
    softmax = {"scale": D**-0.5 * (-1 if page == 3 else 1), "softcap": 40.0 if page == 16 else None, "sinks": sinks}
    compared = 0
    for q, token in tokens(shape, dtype):
        with on(isa, threads):
            assert method.kernel_of(store)[1] is not None
            got = method.attend(store, q, token, **softmax)
        want = method.step(exact(store), q.double(), None, **softmax)
        clear = is_choice_clear(method, exact(store), q.double(), softmax)
        bound = 1e-4 + 2 * EPS[dtype] * want.abs() + (0.02 if kv else 0) * EPS[dtype]
        assert (((got.double() - want).abs() <= bound) | ~clear[..., None, None]).all()
        compared += int(clear.sum())
    assert compared >= 0.8 * 3 * shape.B * shape.H


def is_choice_clear(method, store, q, softmax):
    """Where the last page that is chosen has a hundredth of a percent more weight than the first one that is not."""
    low, high, closed = store.read_page_bounds()
    bound = q.clamp(min=0) @ high.transpose(-1, -2) + q.clamp(max=0) @ low.transpose(-1, -2)
    logits = ops.blocks.apply_softcap(bound * softmax["scale"], softmax["softcap"])
    weight = logits.masked_fill(~closed[:, :, None], -torch.inf).softmax(-1).nan_to_num(0).sum(2)
    pages, n = method.k // method.page - 1, weight.shape[-1]
    if not 0 < pages < n:
        return torch.ones(weight.shape[:2], dtype=torch.bool)
    order = weight.sort(-1, descending=True).values
    is_all = closed.sum(-1) <= pages
    return (order[..., pages - 1] - order[..., pages] > 1e-4 * order[..., pages - 1]) | is_all


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "kv"), [*((t, None) for t in TYPES), ("bfloat16", "int8"), ("float32", "int4")])
def test_bounds_are_those_of_the_reference(isa, dtype, kv):
    """Of a block and of single tokens, with padding, over the ends of chunks; a NaN stays in both bounds."""
    shape, method, dtype = Shape(2, 2, 1, 64), Quest(7, 14, kv=kv), TYPES[dtype]
    draw = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, 2, 2, 600, 64, generator=draw).to(dtype)
    if kv is None:
        k[0, 1, 37, 5] = torch.nan
    one, other = method.store(shape, dtype), method.store(shape, dtype)
    other.append(k[:, :, :510], v[:, :, :510], [0, 35])
    with on(isa):
        ops.append_block(one, k[:, :, :510], v[:, :, :510], [0, 35])
        for i in range(510, 530):
            token = ops.Token(k[:, :, i], v[:, :, i])
            method.attend(one, torch.ones(2, 2, 1, 64, dtype=dtype), token, scale=0.1)
            other.append_token(*token)
    assert one.lengths == other.lengths == [530, 495]
    for b, n in enumerate(one.lengths):
        bounds = [store.pages.first(-(-n // 7))[b] for store in (one, other)]
        close = {"rtol": 2 * EPS[dtype], "atol": 1e-6} if kv else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(*bounds, equal_nan=True, **close)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("G", [1, 3])
def test_a_budget_of_all_pages_is_dense_and_a_nan_stays_one(isa, G):
    shape = Shape(2, 2, G, 64)
    store = filled_store(Quest(16, 1024), shape, [600, 300], torch.float32)
    q = torch.randn(*shape)
    with on(isa, 2):
        got = Quest(16, 1024).attend(store, q, None, scale=0.125)
        want = Dense().step(exact(store), q.double(), None, scale=0.125)
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
        q[1, 0, 0, 3] = torch.nan
        got = Quest(16, 32).attend(store, q, None, scale=0.125)
    assert got[1, 0, 0].isnan().all() and not got[0].isnan().any() and not got[1, 1].isnan().any()


def test_the_library_validates_pages():
    store = filled_store(Quest(16, 32), Shape(1, 2, 1, 64), [100], torch.float32)
    q = torch.randn(1, 2, 1, 64)
    with on(ISAS[0]):
        Quest(16, 32).attend(store, q, None, scale=0.125)
    memory = memory_of(store)
    for change, message in (
        ({"page": 0}, b"pages are given without their size"), ({"page": -1}, b"page is negative"),
        ({"pages": None}, b"pages are missing"), ({"n_pages": 0}, b"fewer pages"),
        ({"page": 0, "n_pages": 0, "pages": None}, b"Quest needs the bounds of pages"),
    ):  # fmt: skip
        before = {name: getattr(memory.cache, name) for name in change}
        for name, value in change.items():
            setattr(memory.cache, name, value)
        assert message in library.library().skimkv_check(memory.address)
        for name, value in before.items():
            setattr(memory.cache, name, value)
    memory.op.k = -1
    assert b"k must be at least" in library.library().skimkv_check(memory.address)
    start, memory.page_chunks[0].start = memory.page_chunks[0].start, 1
    assert b"follow each other" in library.library().skimkv_check(ctypes.addressof(memory.op))
    memory.page_chunks[0].start = start
