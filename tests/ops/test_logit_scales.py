"""Logits of every size: with a standard deviation from 1 to 1000, each kernel computes what the reference computes in
float64, on every instruction set. Choices are by score margin: the data leave one, or everything is chosen."""

from __future__ import annotations

import itertools

import pytest
import torch

from skimkv import ops
from skimkv.methods import parse
from skimkv.ops import Token
from skimkv.stores.base import Shape
from skimkv.testing import Sequences, prompt
from support.kernels import ISAS, NATIVE, exact, on

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native library is not built")
SPECS = [
    "Dense()",
    "SparQ(r=16, k=400)",
    "SparQ(r=16, k=400, channels='int8', mean_value=True)",
    "SparQ(r=16, k=400, channels='int4', mean_value=True)",
    "SparQ(r=16, k=400, channels='none')",
    "TopK(k=400)",
    "TopK(k=400, oracle=True)",
    "LowRank(r=16, k=400)",
    "LMInfinite(k=40)",
    "H2O(k=400)",
    "Dense(kv='int8')",
]


def error_of_a_step(method, x, isa, sinks=None, softcap=None):
    """The error of one decode step in units of the rounding that a logit's size allows."""
    D, n = x.shape.D, x.k.shape[2]
    store = method.store(x.shape, x.k.dtype)
    before = x.tokens(0, n - 1)
    softmax = {"scale": D**-0.5, "softcap": softcap, "sinks": sinks}
    method.prefill(store, before.q, before.k, before.v, **softmax)
    q, k, v = x.q[..., n - 1, :], x.k[:, :, n - 1], x.v[:, :, n - 1]
    twin = exact(store)
    want = method.step(twin, q.double(), Token(k.double(), v.double()), **softmax)
    with on(isa):
        got = method.decode(store, q, k, v, **softmax)
    assert got.isfinite().all()
    logit = D**-0.5 * float(q.abs().sum(-1).max() * x.k.abs().max())
    if sinks is not None:
        logit = max(logit, float(sinks.masked_fill(sinks.isinf(), 0).abs().max()))
    return float((got.double() - want).abs().max() / (2.0**-24 * (4 + logit) * float(x.v.abs().max())))


def random_sinks(seed, size):
    """Sinks (2,3) of this size, one of them far above all logits, one far below, and one of -inf."""
    sinks = size * torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
    sinks[0, 1], sinks[1, 0], sinks[1, 2] = 5000, -1000, -torch.inf
    return sinks


SIZES = [(size, False) for size in (1, 10, 40, 90, 110, 300, 1000)] + [(size, True) for size in (1, 40, 110, 1000)]


@pytest.mark.parametrize(("size", "has_sinks"), SIZES)
@pytest.mark.parametrize("isa", ISAS)
def test_every_operation(isa, size, has_sinks):
    """With sinks of this size logits are as large, or small."""
    for seed, logit_size in itertools.product(range(2), {1, size} if has_sinks else {size}):
        x, sinks = Sequences.random(Shape(2, 2, 3, 16), 301, seed=seed), random_sinks(seed, size) if has_sinks else None
        x.q.mul_(logit_size)
        for spec in SPECS:
            limit = 512 if "int8" in spec or ("int4" in spec and not has_sinks) else 24
            assert error_of_a_step(parse(spec), x, isa, sinks) <= limit, (spec, seed, logit_size)


@pytest.mark.parametrize("cap", [0.5, 4.0, 50.0, 1e3, 1e5, 1e8])
@pytest.mark.parametrize("isa", ISAS)
def test_soft_caps_of_every_size(isa, cap):
    """Far below their cap logits stay as exact as without one, and at a quarter of it no error leaps."""
    for size in (1, 10, 40):
        x = Sequences.random(Shape(2, 2, 3, 16), 301, seed=size)
        x.q.mul_(size)
        for spec in ("Dense()", "TopK(k=400)", "SparQ(r=16, k=400)"):
            assert error_of_a_step(parse(spec), x, isa, softcap=cap) <= 24, (spec, size)


@pytest.mark.parametrize("size", [1, 40, 110, 1000])
@pytest.mark.parametrize("isa", ISAS)
def test_key_scores_with_sinks(isa, size):
    for logit_size in (1, size):
        x, sinks = Sequences.random(Shape(1, 2, 3, 16), 90, seed=1), random_sinks(1, size)
        q, k = x.q[0, :, :, 20:] * logit_size, x.k[0]
        want = ops.key_scores(q.double(), k.double(), 0.25, None, sinks)
        with on(isa, threads=2):
            got = ops.key_scores(q, k, 0.25, None, sinks)
        logit = max(0.25 * float(q.abs().sum(-1).max() * k.abs().max()), float(sinks[sinks.isfinite()].abs().max()))
        assert float((got.double() - want).abs().max()) <= 24 * 2.0**-24 * (4 + logit) * want.max()


@pytest.mark.parametrize("size", [1, 40, 110, 1000])
@pytest.mark.parametrize("isa", ISAS)
def test_the_estimate_of_a_stream_with_sinks(isa, size):
    """Up to the rounding of exponents the kernel's z / tau is the reference's, over the same samples."""
    method = parse("SubGenStream(delta=4.0, t=2, s=16)")
    x, sinks = Sequences.random(Shape(2, 2, 3, 16), 60), random_sinks(0, size)
    x.q.mul_(size)
    store = prompt(method, x, sinks=sinks)
    want = method.step(exact(store), x.q[..., -1, :].double(), None, scale=0.25, sinks=sinks)
    with on(isa):
        got = method.attend(store, x.q[..., -1, :], None, scale=0.25, sinks=sinks)
    logit = max(0.25 * float(x.q.abs().sum(-1).max() * x.k.abs().max()), 5000)
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), want, rtol=24 * 2.0**-24 * (4 + logit), atol=1e-30)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("gap", [1, 50, 88, 90, 110, 500, 5000])
def test_a_group_whose_choice_misses_the_mass_of_one_query(isa, gap):
    """Two queries of a group: the first prefers positions that the second, whose weights are larger, leaves out.

    The choice by the group's sum takes the second's; the first's softmax over the chosen has a maximum `gap` below that
    of all positions.
    """
    D, n, G = 16, 200, 3
    k = torch.zeros(1, 1, n, D)
    k[0, 0, :, 3] = torch.randn(n, generator=torch.Generator().manual_seed(0))
    q = torch.zeros(1, 1, G, D)
    q[..., 3] = 0.3
    # query 0 has all its mass on eight equal positions; queries 1 and 2 each have theirs on one position
    k[0, 0, 20:28, 0], q[0, 0, 0, 0] = gap * 4.0, 1.0
    k[0, 0, 40, 1], q[0, 0, 1, 1] = 400.0, 1.0
    k[0, 0, 50, 2], q[0, 0, 2, 2] = 400.0, 1.0
    x = Sequences(q[:, :, :, None].expand(-1, -1, -1, n, -1).clone(), k, torch.randn(1, 1, n, D))
    for spec in ("TopK(k=2, oracle=True)", "TopK(k=2)", "SparQ(r=16, k=2, local=0)"):
        assert error_of_a_step(parse(spec), x, isa) <= 24, spec
