"""What the C++ backend refuses, before a pointer is passed: sizes, types, devices, strides, alignment, capacity."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch

from skimkv import ops
from skimkv.methods import parse
from skimkv.ops import KernelStep, Token, backends
from skimkv.ops.cpu import library as native
from skimkv.ops.cpu import linear
from skimkv.ops.cpu.key_scores import key_scores
from skimkv.ops.cpu.run import CpuBackend
from skimkv.ops.packed_weights import packed_shape
from skimkv.stores.base import Shape
from skimkv.stores.full import Full
from skimkv.stores.slots import Slots
from support import steps
from support.kernels import NATIVE, compare, filled, misaligned, on
from support.refusals import refuses

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native library is not built")


@pytest.fixture
def numbers():
    """q and a store: a step's numbers are checked in skimkv_step itself, before it follows an address."""
    with on(None):
        yield filled(16, [300, 20], torch.float32, 2, "copy")


@pytest.fixture
def parts(numbers, monkeypatch):
    """The same, and no operation may reach the library."""
    for name in ("skimkv_run", "skimkv_step", "skimkv_append"):

        def called(*args):
            raise AssertionError("a pointer was passed")

        monkeypatch.setattr(native.library(), name, called)
    return numbers


BAD_Q = {
    "batch": lambda q: q[:1],
    "heads": lambda q: q[:, :1],
    "group": lambda q: q[:, :, :1],
    "head size": lambda q: q[..., :8],
    "axes": lambda q: q[0],
    "float64": lambda q: q.double(),
    "int": lambda q: q.int(),
    "device": lambda q: q.to("meta"),
    "alignment": misaligned,
}


@pytest.mark.parametrize("wrong", BAD_Q)
def test_a_query_that_does_not_fit(parts, wrong):
    q, store = parts
    for name, args in (("dense", ()), ("sparq", (4, 8, 2, "coverage", True)), ("topk", (8, False))):
        step = partial(getattr(steps, name), store, BAD_Q[wrong](q), 0.25, None, *args)
        refuses(step, r"q|aligned|no CPU kernel|too many|must")


@pytest.mark.parametrize("wrong", ["heads", "head size", "float64", "int", "device", "alignment"])
def test_a_token_that_does_not_fit(parts, wrong):
    _, store = parts
    k = torch.zeros(2, 2, 16)
    before = list(store.lengths)
    for a, b in ((BAD_Q[wrong](k), BAD_Q[wrong](k)), (k, BAD_Q[wrong](k)), (BAD_Q[wrong](k), k)):
        with pytest.raises(ValueError, match=r"^[kv] "):
            steps.append(store, a, b)
    assert store.lengths == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: {"k": c.k[..., :8]}, "k is"),
        (lambda c: {"v": c.v.half()}, "v is"),
        (lambda c: {"k": c.k.transpose(2, 3).contiguous().transpose(2, 3)}, "stride"),
        (lambda c: {"index": c.index[:, :, :8]}, "index is"),
        (lambda c: {"k": misaligned(c.k)}, "aligned"),
        (lambda c: {"k": c.k.to("meta")}, "meta"),
    ],
)
def test_a_store_that_does_not_fit(parts, change, says):
    q, store = parts
    store.chunks = (replace(store.chunks[0], **change(store.chunks[0])), *store.chunks[1:])
    with pytest.raises(ValueError, match=says):
        steps.dense(store, q, 0.25, None)


def test_a_length_beyond_the_capacity(numbers):
    q, store = numbers
    store.lengths = [store.chunks[-1].start + store.chunks[-1].cap + 1, 20]
    with pytest.raises(ValueError, match="exceeds the capacity"):
        steps.dense(store, q, 0.25, None)
    store.lengths = [0, 20]
    with pytest.raises(ValueError, match="no token"):
        steps.dense(store, q, 0.25, None)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((17, 8, 2, "coverage", True), "r must"),
        ((0, 8, 2, "coverage", True), "r must"),
        ((4, 0, 0, "coverage", True), "k must"),
        ((4, 8, 9, "coverage", True), "local must"),
        ((4, 8, -1, "coverage", True), "local must"),
        ((4, 8, 2, "warm", True), "temperature"),
    ],
)
def test_numbers_out_of_range(numbers, args, says):
    q, store = numbers
    with pytest.raises(ValueError, match=says):
        steps.sparq(store, q, 0.25, None, *args)
    with pytest.raises(ValueError, match="softcap"):
        steps.dense(store, q, 0.25, -1.0)
    with pytest.raises(ValueError, match="low rank"):
        steps.lowrank(store, q, 0.25, None, 8)


def test_a_projection_wider_than_a_head(numbers):
    store = Full(Shape(1, 1, 1, 16), torch.float32, "cpu", "copy", projection=torch.randn(1, 16, 24))
    store.append(*torch.randn(2, 1, 1, 5, 16))
    with pytest.raises(ValueError, match=r"R <= D|index has D"):
        steps.lowrank(store, torch.randn(1, 1, 1, 16), 0.25, None, 2)


BAD_SINKS = {
    "heads": lambda s: s[:1],
    "group": lambda s: s[:, :1],
    "axes": lambda s: s[None],
    "float64": lambda s: s.double(),
    "bfloat16": lambda s: s.bfloat16(),
    "device": lambda s: s.to("meta"),
}


@pytest.mark.parametrize("wrong", BAD_SINKS)
def test_sinks_that_do_not_fit(parts, wrong):
    """By a method, by the kernels themselves, and in the scores of a prompt; the store stays as it was."""
    q, store = parts
    sinks, token = BAD_SINKS[wrong](torch.zeros(2, 2)), Token(*torch.zeros(2, 2, 2, 16))
    before, softmax = list(store.lengths), {"scale": 0.25, "sinks": sinks}
    ring = Slots(store.shape, torch.float32, "cpu", 4)
    calls = [
        lambda: parse("Dense()").decode(store, q, *token, scale=0.25, sinks=sinks),
        lambda: parse("Dense()").prefill(
            store, q[:, :, :, None], *(x[:, :, None] for x in token), scale=1, sinks=sinks
        ),
        lambda: CpuBackend().run(KernelStep("dense"), store, q, token, softmax),
        lambda: CpuBackend().run(KernelStep("ring_slots"), ring, q, token, softmax),
        lambda: key_scores(q, q[:, 0], 0.25, None, sinks),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"^sinks is .*; must be torch.float32 \(2, 2\) on cpu$"):
            call()
    assert store.lengths == before and ring.lengths == [0, 0]


def test_sinks_off_their_alignment_are_refused_by_the_library(numbers):
    q, store = numbers
    with pytest.raises(ValueError, match="sinks is not aligned"):
        parse("Dense()").attend(store, q, None, scale=0.25, sinks=misaligned(torch.zeros(2, 2)))
    with pytest.raises(ValueError, match="sinks is not aligned"):
        key_scores(q, q[:, 0], 0.25, None, misaligned(torch.zeros(2, 2)))


def test_sinks_of_one_step_do_not_stay_for_the_next(numbers):
    q, store = numbers
    without = parse("Dense()").attend(store, q, None, scale=0.25)
    with_sinks = parse("Dense()").attend(store, q, None, scale=0.25, sinks=torch.full((2, 2), 9.0))
    assert not torch.allclose(with_sinks, without, rtol=0.1)
    assert torch.equal(parse("Dense()").attend(store, q, None, scale=0.25), without)
    transposed = torch.tensor([[9.0, -torch.inf], [-torch.inf, -torch.inf]]).T.contiguous().T
    assert torch.equal(parse("Dense()").attend(store, q, None, scale=0.25, sinks=transposed)[:, 1], without[:, 1])


@pytest.mark.parametrize("D", [1, 7, 12, 100, 255, 257, 320, 509, 575, 576])
def test_any_head_size_up_to_576_is_served(D):
    q, store = filled(D, [70, 3], torch.bfloat16, 2, "copy", r=1)
    for isa in native.isas():
        compare("dense", isa, q, store, 0.1, None)
        compare("sparq", isa, q, store, 0.1, None, D, 80, 3, "sqrt_d", True)


@pytest.mark.parametrize("D", [577, 1024])
def test_a_head_size_above_576_on_a_backend_that_was_asked_for(D, parts):
    shape, k = Shape(1, 1, 1, D), torch.randn(1, 1, D)
    for spec in ("Dense()", "H2O(k=4)"):
        method = parse(spec)
        with pytest.raises(ValueError, match="at most 576"):
            method.decode(method.store(shape, torch.float32), k[:, :, None], k, k, scale=1.0)
    with pytest.raises(ValueError, match="D must be from 1 to 576"):
        ops.key_scores(k[:, None], k, 1.0, None)


def test_a_head_size_above_576_is_decoded_by_the_reference_with_one_warning(monkeypatch):
    """Nobody asked for the kernels by name, so the reference computes, and says so once for this head size."""
    monkeypatch.setattr(backends, "_forced_for_process", None)
    monkeypatch.delenv("SKIMKV_ISA", raising=False)
    backends._warn_of_head_size.cache_clear()
    monkeypatch.setattr(backends, "_chosen", {})
    shape, scale = Shape(1, 2, 2, 600), 600**-0.5
    q, (k, v) = torch.randn(1, 2, 2, 9, 600), torch.randn(2, 1, 2, 9, 600)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for spec in ("Dense()", "SparQ(r=8, k=4)", "H2O(k=4)", "SubGenStream(delta=9, t=2, s=2)"):
            outputs = []
            for name in (None, "ref"):
                with ops.backend(name) if name else contextlib.nullcontext():
                    store = parse(spec).store(shape, torch.float32)
                    parse(spec).prefill(store, q[..., :8, :], k[:, :, :8], v[:, :, :8], scale=scale)
                    outputs.append(parse(spec).decode(store, q[..., 8, :], k[:, :, 8], v[:, :, 8], scale=scale))
            assert torch.equal(*outputs), spec
    assert [str(w.message) for w in caught] == [
        "skimkv decodes heads of size 600 with its slow reference: "
        "the kernels of backend 'cpu' take head sizes up to 576"
    ]


def test_products_and_sums_off_their_alignment():
    x, packed = torch.zeros(1, 32), torch.zeros(packed_shape(16, 32), dtype=torch.int16)
    q, k = torch.zeros(1, 1, 4, 16), torch.zeros(1, 4, 16)
    with pytest.raises(ValueError, match="aligned"):
        linear.matrix(misaligned(x), packed, "packed", 16).multiply(misaligned(x))
    with pytest.raises(ValueError, match="aligned"):
        key_scores(misaligned(q), k, 0.25, None)
    with pytest.raises(ValueError, match="aligned"):
        key_scores(q, misaligned(k), 0.25, None)


UNAVAILABLE = """
import os
os.environ["SKIMKV_ISA"] = "sse9"
from skimkv import ops
for call in (ops.select_backend, ops.backend("cpu").__enter__):
    try:
        call()
    except ValueError as error:
        print(error)
"""


@pytest.mark.slow
def test_an_instruction_set_or_backend_that_is_not_there(monkeypatch):
    with pytest.raises(ValueError, match="'sse9' is not available"):
        native.force("sse9")
    done = subprocess.run([sys.executable, "-c", UNAVAILABLE], capture_output=True, text=True, timeout=120, check=True)
    said = done.stdout.splitlines()
    assert len(said) == 2 and all("SKIMKV_ISA=sse9 is not available" in line for line in said)
    store = parse("Dense()").store(Shape(1, 1, 1, 8), torch.float32)
    monkeypatch.setattr(native, "_path", lambda: None)
    native.library.cache_clear()
    try:
        with pytest.raises(ValueError, match="not in this installation"), ops.backend("cpu"):
            pass
        monkeypatch.setattr(ops.backends, "_chosen", {})
        with pytest.warns(UserWarning, match="slow reference: .*not in this installation"):
            steps.append(store, torch.zeros(1, 1, 8), torch.zeros(1, 1, 8))
    finally:
        native.library.cache_clear()


@pytest.mark.parametrize("channels", ["int8", "int4"])
def test_a_store_whose_parts_contradict_each_other_is_refused(channels):
    """As a cache from a file that somebody changed may be: sizes are those of the tensors, whatever else it says."""
    q, store = filled(16, [300, 20], torch.float32, 2, channels)
    method, (k, v) = parse(f"SparQ(r=4, k=8, channels='{channels}')"), torch.randn(2, 2, 2, 16)
    with on(None), torch.no_grad():
        chunks, bits = store.chunks, store.bits
        store.chunks = (replace(chunks[0], cap=chunks[0].cap // 2), *chunks[1:])
        with pytest.raises(ValueError, match=r"a chunk of \d+ positions from 0 has \d+, and begins at 0"):
            method.decode(store, q, k, v, scale=0.25)
        store.chunks, store.bits = chunks, 12 - bits
        with pytest.raises(ValueError, match=rf"an index of channels='{channels}' has {12 - bits} bits"):
            method.decode(store, q, k, v, scale=0.25)
