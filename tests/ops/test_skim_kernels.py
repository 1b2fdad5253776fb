"""Skim's C++ step against its algorithm in PyTorch, on every instruction set.

Both draw rows by the same words, so where their scores are the same they read the same rows. The integers of the scan
round its weights to 8 bits: then a few rows are drawn differently, and the errors against dense attention are compared.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from skimkv import ops
from skimkv.methods import Dense, Skim
from skimkv.ops import KernelStep, Token
from skimkv.ops.cpu.run import CpuBackend
from skimkv.stores.base import Shape
from skimkv.stores.full import Full
from skimkv.stores.quantise import GROUP
from skimkv.testing import Sequences, decode, prompt
from support.kernels import ISAS, NATIVE, TYPES, close, exact, held, on, poison

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native library is not built")


def filled_store(method, shape, lengths, dtype, seed=0, size=1.0):
    """A query (B,H,G,D), and a store of random tokens with poison where no token is."""
    draw = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, shape.B, shape.H, max(lengths), shape.D, generator=draw).to(dtype)
    store = method.store(shape, dtype)
    first = max(lengths) // 2
    for a, z in ((0, first), (first, max(lengths))):  # two blocks, two chunks
        pads = [min(max(max(lengths) - n - a, 0), z - a) for n in lengths]
        if z > a:
            store.append(k[:, :, a:z], v[:, :, a:z], pads)
    poison(store)
    for chunk in store.chunks:
        for b, n in enumerate(lengths):
            chunk.means[b, :, max(0, n - chunk.start) // GROUP :] = torch.nan
    return (size * torch.randn(shape, generator=draw)).to(dtype), store


def options(shape, softcap=None, sinks=None):
    return {"scale": shape.D**-0.5, "softcap": softcap} | ({} if sinks is None else {"sinks": sinks})


def step_of_both(method, q, store, isa, threads=1, **softmax):
    """The step's result by the kernel and in float64, and the rows of K and V that each read."""
    twin = exact(store)
    want = method.step(twin, q.double(), None, **softmax)
    with on(isa, threads):
        got = method.attend(store, q, None, **softmax)
    assert got.dtype == q.dtype and got.shape == q.shape
    return got, want, store.rows_read, twin.rows_read


class Decoded(NamedTuple):
    """Steps on random sequences: dense attention, and the error and the rows of K and V of Skim in PyTorch."""

    prompt: Sequences
    steps: Sequences
    dense: torch.Tensor
    error: float
    rows: torch.Tensor


CASES = {
    "one query": (Shape(1, 4, 1, 128), 1500, "bfloat16", Skim(k=32)),
    "group": (Shape(2, 2, 4, 64), 1000, "float32", Skim(k=16)),
    "quantised rows": (Shape(1, 3, 2, 64), 1300, "float16", Skim(k=24, kv="int8")),
    "odd": (Shape(1, 2, 3, 40), 800, "bfloat16", Skim(k=8, r=7)),
}


@functools.cache
def decoded(case):
    shape, n, dtype, method = CASES[case]
    x = Sequences.random(shape, n)
    x = Sequences(*((2 * t if i == 0 else t).to(TYPES[dtype]) for i, t in enumerate((x.q, x.k, x.v))))
    before, after = x.tokens(0, n - 12), x.tokens(n - 12, n)
    with ops.backend("ref"):
        dense = decode(Dense(), prompt(Dense(), before), after).double()
        error, rows = errors_of_steps(method, before, after, dense)
    return Decoded(before, after, dense, error, rows)


def errors_of_steps(method, before, after, dense):
    """The mean error of steps against dense attention, and the rows of K and V that they read."""
    store, y, rows = prompt(method, before), [], []
    for i in range(after.k.shape[2]):
        y.append(decode(method, store, after.tokens(i, i + 1)))
        rows.append(store.rows_read.clone())
    return (torch.cat(y).double() - dense).abs().mean().item(), torch.stack(rows)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", CASES)
def test_steps_err_as_the_algorithm(isa, case):
    x, method = decoded(case), CASES[case][3]
    with on(isa):
        error, rows = errors_of_steps(method, x.prompt, x.steps, x.dense)
    assert abs(error - x.error) < 0.1 * x.error
    heads = CASES[case][0].H
    assert (rows - x.rows).abs().max() <= 5 * heads and (rows - x.rows).abs().double().mean() < heads
    assert x.rows[..., 0].min() > 40 * heads, "rows were drawn besides those that are always read"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_step_that_appends_is_an_append_and_a_step(isa, threads):
    shape, method = Shape(2, 1, 2, 24), Skim(k=16)
    _, one = filled_store(method, shape, [2302, 1790], torch.bfloat16)
    two, draw = one.fork(), torch.Generator().manual_seed(2)
    with on(isa, threads):
        for _ in range(4):  # both rows fill a group
            q, k, v = (torch.randn(n, generator=draw).bfloat16() for n in (shape, *[(2, 1, 24)] * 2))
            CpuBackend().append(one, k, v)
            want = method.attend(one, q, None, **options(shape))
            assert torch.equal(method.attend(two, q, Token(k, v), **options(shape)), want)
            assert torch.equal(one.rows_read, two.rows_read)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("G", [1, 3])
def test_threads_that_share_a_head_draw_the_same_rows(isa, G):
    """Each knows the sum of its own positions only while it marks what may be drawn."""
    shape, method = Shape(1, 1, G, 32), Skim(k=20)
    q, store = filled_store(method, shape, [4200], torch.float32)
    results, rows = [], []
    for threads in (1, 4):
        with on(isa, threads):
            results.append(method.attend(store, q, None, **options(shape)))
        rows.append(store.rows_read.clone())
    assert torch.equal(*rows) and int(rows[0][0, 0]) > 50
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [1, 40, 1000])
def test_logits_of_every_size(isa, size):
    """All channels are read, because at large logits the rows that are drawn have almost all of the weight."""
    shape, method = Shape(2, 2, 3, 16), Skim(k=20, r=16)
    q, store = filled_store(method, shape, [200, 256], torch.float32, size=size)
    got, want, _, _ = step_of_both(method, q, store, isa, **options(shape))
    assert got.isfinite().all()
    close(got[:1], want[:1], store, q, 0.25, 512.0)  # the index of the first row is in full precision


@pytest.mark.parametrize("isa", ISAS)
def test_a_nan_stays(isa):
    shape, method = Shape(1, 2, 2, 16), Skim(k=8)
    q, store = filled_store(method, shape, [600], torch.float32)
    q[0, 1, 0, 3] = torch.nan
    with on(isa):
        y = method.attend(store, q, None, **options(shape))
    assert y[0, 1, 0].isnan().all() and y[0, 0].isfinite().all()


def test_what_the_library_refuses():
    shape, method = Shape(1, 1, 1, 16), Skim(k=8)
    q, store = filled_store(method, shape, [300], torch.float32)

    def refuses(words, store, r=4, k=8):
        with pytest.raises(ValueError, match=words):
            CpuBackend().run(KernelStep("skim", r=r, k=k), store, q, None, options(shape))

    with on(None):
        refuses("r from 1 to D", store, r=17)
        refuses("k must be at least 1", store, k=0)
        refuses("means of its groups", Full(shape, torch.float32, "cpu", "int4", True))
        store.mean = None
        refuses("mean of V", store)
        store.chunks = (replace(store.chunks[0], means=store.chunks[0].means[..., :8]), *store.chunks[1:])
        refuses("means is", store)


def test_another_backend_runs_the_algorithm_and_says_so(monkeypatch):
    shape, method = Shape(1, 1, 1, 16), Skim(k=8)
    q, store = filled_store(method, shape, [40], torch.float32)
    assert method.has_kernel("cpu") and not method.has_kernel("gpu") and Dense().has_kernel("gpu")
    monkeypatch.setattr(CpuBackend, "name", "gpu")
    monkeypatch.setattr(CpuBackend, "supports", lambda self, step, store: step.operation != "skim")
    with (
        on(None),
        pytest.warns(UserWarning, match=r"^Skim has no kernel in backend 'gpu': its slow reference computes$"),
    ):
        y = method.attend(store, q, None, **options(shape))
    assert torch.equal(y, method.step(store, q, None, **options(shape)))


@pytest.mark.parametrize("kv", [None, "int8", "int4"])
def test_a_group_that_both_wrote_is_closed_by_either(kv):
    """The keys of an open group lie in the cache alone, as codes and rows: whoever fills the group finds them there."""
    shape, method = Shape(2, 2, 1, 64), Skim(k=8, kv=kv)
    k, v = torch.randn(2, 2, 2, 3 * GROUP, 64, generator=torch.Generator().manual_seed(2))
    by_reference, by_kernel, by_both = (method.store(shape, torch.float32) for _ in range(3))
    for p in range(0, 3 * GROUP, 64):  # groups end in turns of the kernel and of the reference
        block = k[:, :, p : p + 64], v[:, :, p : p + 64]
        is_turn_of_kernel = p // 64 % 3 == 0
        for store, backend in (
            (by_reference, "ref"), (by_kernel, "cpu"), (by_both, "cpu" if is_turn_of_kernel else "ref"),
        ):  # fmt: skip
            poison(store)
            with ops.backend(backend):
                ops.append_block(store, *block)
    held(by_kernel, by_reference), held(by_both, by_reference)
    assert by_both.lengths == [3 * GROUP, 3 * GROUP]
