"""What holds for every method. One decode step of random data is the unit; sizes are odd on purpose."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch

from skimkv import ops
from skimkv.methods import METHODS, SANTA, Dense, Skim, SparQ, SubGenStream, TopK, VAttention, parse
from skimkv.methods.base import Traffic
from skimkv.methods.santa import DRAWS
from skimkv.ops import KernelStep
from skimkv.stores.base import Shape
from skimkv.stores.full import Full
from skimkv.stores.slots import Slots
from skimkv.testing import (
    LAWS,
    SHAPE,
    Sequences,
    check_method,
    counted_is_predicted,
    decode,
    empty_store,
    kernel_is_the_algorithm,
    prompt,
    repr_is_the_spec,
)
from support.laws import DTYPES, FULL, QUANTISED, SMALL, close, run

# These laws choose the backend themselves: they are the same whatever backend is in use.
OF_ANY_BACKEND = (repr_is_the_spec, counted_is_predicted, kernel_is_the_algorithm)


@pytest.mark.parametrize("spec", SMALL)
@pytest.mark.parametrize("law", [law for law in LAWS if law not in OF_ANY_BACKEND], ids=lambda law: law.__name__)
def test_law(law, spec, backend):
    law(parse(spec))


@pytest.mark.parametrize("spec", SMALL)
@pytest.mark.parametrize("law", OF_ANY_BACKEND, ids=lambda law: law.__name__)
def test_law_of_any_backend(law, spec):
    law(parse(spec))


@pytest.mark.parametrize("spec", SMALL)
def test_nothing_but_the_budget_is_allocated(spec):
    method, shape = parse(spec), Shape(2, 2, 2, 16)
    store = prompt(method, Sequences.random(shape, 35))
    if isinstance(store, Slots) and not store.grows:
        assert store.allocated <= method.bound(35, shape, torch.float32)
    else:
        assert store.allocated >= store.nbytes


def test_check_method_names_the_laws():
    names = check_method(TopK(k=12), full=TopK(k=400))
    assert names == [*(law.__name__ for law in LAWS), "full_budget_is_dense"]


@dataclass(frozen=True, repr=False)
class _ReadsLess(Dense):
    """Its closed form leaves out one row."""

    def traffic(self, n, shape, dtype):
        real = super().traffic(n, shape, dtype)
        return Traffic(real.elements - shape.D, real.bytes - shape.D * dtype.itemsize, real.paper)


@dataclass(frozen=True, repr=False)
class _MixesRows(Dense):
    """The first row of the batch leaks into the others."""

    def attend(self, store, q, token, **softmax):
        y = super().attend(store, q, token, **softmax)
        return y + 0.01 * y[:1]


@dataclass(frozen=True, repr=False)
class _OccupiesMore(Dense):
    """Its bound is half of what it occupies."""

    def bound(self, n, shape, dtype):
        return super().bound(n, shape, dtype) // 2


@dataclass(frozen=True, repr=False)
class _SeesPadding(Dense):
    """It takes padding for tokens."""

    def take(self, store, q, k, v, *, scale, pad=None, softcap=None):
        store.append(k.clamp(-9, 9), v.clamp(-9, 9))


@dataclass(frozen=True, repr=False)
class _OtherKernel(Dense):
    """Its kernel is of something else."""

    def kernel(self, store):
        return KernelStep("top_k", k=3)


@dataclass(frozen=True, repr=False)
class _ReturnsFloats(Dense):
    """It returns float32, whatever the queries are."""

    def attend(self, store, q, token, **softmax):
        return super().attend(store, q, token, **softmax).float()


@dataclass(frozen=True, repr=False)
class _Ends(Dense):
    """It ends in an error of Python's."""

    def attend(self, store, q, token, **softmax):
        raise IndexError("nothing is here")


@dataclass(frozen=True, repr=False)
class _KernelWithoutCap(Dense):
    """Its kernel does not know the soft cap."""

    def attend(self, store, q, token, **softmax):
        if ops.select_backend("cpu")[0] != "ref":
            softmax["softcap"] = None
        return super().attend(store, q, token, **softmax)


@dataclass(frozen=True, repr=False)
class _WrongIn16Bits(TopK):
    """Its kernel gives 2% too much in 16 bits."""

    def attend(self, store, q, token, **softmax):
        y = super().attend(store, q, token, **softmax)
        is_fast = ops.select_backend("cpu")[0] != "ref" and q.dtype != torch.float32
        return (1.02 * y).to(y.dtype) if is_fast else y


@dataclass(frozen=True, repr=False)
class _NoCap(Dense):
    """It leaves out the soft cap, in every form."""

    def attend(self, store, q, token, **softmax):
        return super().attend(store, q, token, **{**softmax, "softcap": None})


@dataclass(frozen=True)
class _OtherRepr(Dense):
    """Its repr is no spec."""

    def __repr__(self):
        return "Dense(kv='int8')"


@pytest.mark.parametrize(
    ("method", "law"),
    [
        (_ReadsLess(), "counted_is_predicted"),
        (_MixesRows(), "rows_are_independent"),
        (_OccupiesMore(), "bytes_are_bounded"),
        (_OtherKernel(), "kernel_is_the_algorithm"),
        (_OtherRepr(), "repr_is_the_spec"),
        (_SeesPadding(), "padding_is_invisible: 41 of 300 tokens are padding"),
        (_ReturnsFloats(), "counted_is_predicted: a step returns torch.float32"),
        (_Ends(), "rows_are_independent, which ends in IndexError: nothing is here"),
        (_KernelWithoutCap(), "kernel_is_the_algorithm"),
        (_WrongIn16Bits(k=12), "kernel_is_the_algorithm"),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_a_method_that_breaks_a_law_is_found(method, law):
    if law == "kernel_is_the_algorithm" and ops.select_backend("cpu")[0] == "ref":
        pytest.skip("the native library is not built")
    with pytest.raises(AssertionError, match=f"breaks the law {law}"):
        check_method(method)


def test_a_spec_is_checked_too():
    assert len(check_method("TopK(k=12)", "TopK(k=400)")) == len(LAWS) + 1
    with pytest.raises(ValueError, match="unknown method 'TopJ'"):
        check_method("TopJ(k=12)")


def test_a_budget_that_is_too_small_is_not_dense():
    with pytest.raises(AssertionError, match=r"full_budget_is_dense: .*softcap=2"):
        check_method(_NoCap(), full=_NoCap())
    with pytest.raises(AssertionError, match="full_budget_is_dense"):
        check_method(TopK(k=12), full=TopK(k=100))


def test_every_method_is_under_the_laws():
    assert {type(parse(s)) for s in SMALL} == set(METHODS.values())
    assert {type(parse(s)) for s in FULL} == set(METHODS.values()) - {Dense, SubGenStream}
    assert {type(parse(s)) for s in QUANTISED} == set(METHODS.values()) - {SubGenStream}


def padded_run(method, dtype, G, with_sinks):
    """Eleven steps after a prompt of 290 tokens, of which 37 of the second row are padding."""
    sinks = 2 * torch.randn(2, G, generator=torch.Generator().manual_seed(0)) + 3 if with_sinks else None
    return run(method, Sequences.random(Shape(2, 2, G, 16), 301, dtype), 290, pad=[0, 37], sinks=sinks)[1]


@functools.cache
def padded_dense(kv, dtype, G, with_sinks, backend):
    return padded_run(Dense(kv=kv), dtype, G, with_sinks)


# Every method with every type, and with one query and three for each KV head, not the full product.
@pytest.mark.parametrize(
    ("spec", "dtype", "G"),
    [(spec, dtype, (1, 3)[(i + j) % 2]) for i, spec in enumerate(FULL) for j, dtype in enumerate(DTYPES)],
)
def test_full_budget_equals_dense(spec, dtype, G, backend):
    method = parse(spec)
    for with_sinks in (False, True):
        dense = padded_dense(method.kv, dtype, G, with_sinks, backend)
        close(padded_run(method, dtype, G, with_sinks), dense, dtype, method.kv)


@pytest.mark.parametrize("prompt", [1, 7])
@pytest.mark.parametrize("spec", FULL)
def test_short_prompts_and_one_token(spec, prompt, backend):
    s = Sequences.random(Shape(1, 2, 2, 16), prompt + 6)
    method = parse(spec)
    close(run(method, s, prompt)[1], run(Dense(kv=method.kv), s, prompt)[1], torch.float32)


def test_stream_is_near_dense():
    """Statistical: delta = 0 makes the normaliser exact, s samples leave an error of order 1/sqrt(s)."""
    s = Sequences.random(Shape(1, 2, 2, 16), 130)
    _, dense = run(Dense(), s, 120)
    error = [(run(SubGenStream(0.0, 1, n), s, 120)[1] - dense).square().mean().sqrt().item() for n in (64, 4096)]
    assert error[1] < 0.05
    assert 4 < error[0] / error[1] < 16  # sqrt(4096 / 64) = 8


# The ratio of one error to the next, at least: of independent samples it is the root of the ratio of their sizes.
SAMPLES = {
    **{f"SANTA, {draws}": ([SANTA(s, draws) for s in (4, 64)], 3) for draws in DRAWS},
    "Skim": ([Skim(k) for k in (16, 64, 256)], 1.3),
    "VAttention": ([VAttention(epsilon, k=16, base=32) for epsilon in (0.4, 0.1, 0.025)], 1),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_larger_samples_read_more_and_err_less(name):
    """On heads that attend to everything."""
    x, (methods, ratio) = Sequences.random(Shape(1, 4, 2, 32), 1020), SAMPLES[name]
    _, dense = run(Dense(), x, 1000)
    stores, y = zip(*(run(method, x, 1000) for method in methods), strict=True)
    rows, errors = [store.observed()["value_rows"] for store in stores], [float((each - dense).norm()) for each in y]
    assert rows == sorted(rows) and all(a > ratio * b for a, b in pairwise(errors)), (rows, errors)


@pytest.mark.parametrize(
    "spec", [s for s in SMALL if not s.startswith(("H2O", "SnapKV", "RocketKV", "SubGen", "TOVA")) and "k=0." not in s]
)
def test_padding_over_several_prompt_blocks(spec, backend):
    """Not the methods that drop tokens between blocks: there the cut of the prompt is part of the method."""
    method, shape, pad = parse(spec), Shape(2, 2, 2, 16), 60
    s = Sequences.random(shape, 130)
    store, scale = empty_store(method, shape, torch.float32), 0.25
    for a, b in ((0, 50), (50, 120)):
        pads = [0, min(max(pad - a, 0), b - a)]
        method.prefill(store, s.q[..., a:b, :], s.k[:, :, a:b], s.v[:, :, a:b], scale=scale, pad=pads)
    y = [method.decode(store, s.q[..., i, :], s.k[:, :, i], s.v[:, :, i], scale=scale) for i in range(120, 130)]
    _, whole = run(method, s, 120, pad=[0, pad])
    close(torch.stack(y), whole, torch.float32)


@pytest.mark.parametrize(
    "spec",
    ["Dense()", "LMInfinite(k=20)", "Strided(k=20)", "SubGen(k=10, recent=8)", "SubGenStream(delta=0.0, t=1, s=8)"],
)
def test_grouped_queries_equal_repeated_heads(spec, backend):
    """Where the group does not choose together, G queries on one KV head equal G heads with copies of it."""
    method = parse(spec)
    s = Sequences.random(Shape(2, 1, 3, 16), 60)
    _, grouped = run(method, s, 50)
    for g in range(3):  # one at a time: coins depend on the head's number
        _, y = run(method, Sequences(s.q[:, :, g : g + 1], s.k, s.v), 50)
        close(grouped[:, :, :, g : g + 1], y, torch.float32)


@pytest.mark.parametrize("spec", [s for s in SMALL if not s.startswith("Dense")])
def test_equal_queries_of_a_group_choose_as_one(spec, backend):
    """A group of equal queries is one query: the choice, alpha and the scores do not depend on G."""
    method = parse(spec)
    if isinstance(method, SparQ):  # by default the mean value depends on G
        method = replace(method, mean_value=True)
    s = Sequences.random(Shape(2, 2, 1, 16), 290)
    _, one = run(method, s, 280)
    _, three = run(method, Sequences(s.q.expand(-1, -1, 3, -1, -1), s.k, s.v), 280)
    close(three, one.expand_as(three), torch.float32)


@pytest.mark.parametrize("spec", SMALL)
def test_a_negative_scale_turns_the_query(spec, backend):
    """Attention is of scale * q: the opposite query with the opposite scale attends alike."""
    method, x, y = parse(spec), Sequences.random(Shape(2, 2, 2, 16), 290, seed=3), []
    for sign in (1, -1):
        store = empty_store(method, x.shape, torch.float32)
        method.prefill(store, sign * x.q[..., :280, :], x.k[:, :, :280], x.v[:, :, :280], scale=sign * 0.5)
        steps = [
            method.decode(store, sign * x.q[..., i, :], x.k[:, :, i], x.v[:, :, i], scale=sign * 0.5)
            for i in range(280, 290)
        ]
        y.append(torch.stack(steps))
    close(y[1], y[0], torch.float32)


KEEP_ALL = [s for s in SMALL if isinstance(parse(s).store(SHAPE, torch.float32), Full)]


@pytest.mark.parametrize("spec", [s for s in KEEP_ALL if "error=" not in s])  # there rounding may turn a choice of k
def test_forgotten_tokens_leave_no_trace(spec, backend):
    """Groups of 256 tokens and pages open again, and close with other tokens; a row that is shared is alike."""
    method, x, later = parse(spec), *(Sequences.random(Shape(2, 2, 2, 16), n, seed=n) for n in (530, 30))
    cropped, once = (prompt(method, x.tokens(0, tokens), [0, 21]) for tokens in (530, 255))
    cropped.crop(275)
    assert cropped.lengths == once.lengths and cropped.nbytes == once.nbytes
    shared, expected = cropped.share([1, 1]), decode(method, once, later)
    close(decode(method, cropped, later), expected, torch.float32)
    close(decode(method, shared, later.rows([1, 1])), expected[:, [1, 1]], torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "spec", [s for s in SMALL if not s.startswith(("LowRank", "H2O", "SubGen(")) and not ("Skim" in s and "kv=" in s)]
)
def test_half_precision_stays_near_float32(spec, dtype, backend):
    """The same rounded stream in the cache dtype and in float32: equal choices, outputs equal up to rounding.

    Not the methods that choose by rounded products (K P, score sums, distances): there the choice may differ. Nor Skim
    over quantised rows: its index is of the decoded rows, rounded, and its probabilities change with a code.
    """
    method, shape = parse(spec), Shape(1, 2, 2, 16)
    s = Sequences.random(shape, 281, dtype)
    wide = Sequences(s.q.float(), s.k.float(), s.v.float())
    _, y = run(method, s, 280)
    _, exact = run(method, wide, 280)
    close(y, exact, dtype)
