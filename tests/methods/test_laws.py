"""What holds for every method. One decode step of random data is the unit; sizes are odd on purpose."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from skimkv import ops
from skimkv.methods import H2O, METHODS, Dense, SubGenStream, parse
from skimkv.methods.base import Method
from skimkv.stores.base import Shape
from skimkv.stores.slots import Slots

SMALL = [
    "Dense()",
    "SparQ(r=4, k=16)",
    "SparQ(r=5, k=9, local=0, mean_value=True, temperature='sqrt_d', channels='none')",
    "SparQ(r=4, k=16, channels='int8', mean_value=True)",
    "SparQ(r=4, k=16, local=16, channels='int4', temperature='sqrt_r')",
    "TopK(k=12)",
    "TopK(k=12, oracle=True)",
    "LowRank(r=6, k=12)",
    "LMInfinite(k=20)",
    "LMInfinite(k=7, initial=0)",
    "Strided(k=20)",
    "Strided(k=9, local=8)",
    "Fixed(k=20, c=2)",
    "Fixed(k=9, l=4)",
    "H2O(k=24)",
    "H2O(k=0.2)",
    "SubGen(k=10, recent=8)",
    "SubGenStream(delta=2.0, t=3, s=8)",
]
CODED = [
    "Dense(kv='int4')",
    "Dense(kv='int8')",
    "SparQ(r=4, k=16, kv='int4')",
    "SparQ(r=5, k=9, channels='none', kv='int4')",
    "SparQ(r=5, k=9, channels='none', kv='int8')",
    "SparQ(r=4, k=16, channels='int4', mean_value=True, kv='int8')",
    "TopK(k=12, kv='int4')",
    "TopK(k=12, oracle=True, kv='int8')",
    "LowRank(r=6, k=12, kv='int4')",
    "LMInfinite(k=20, kv='int8')",
    "Strided(k=20, kv='int4')",
    "Fixed(k=20, c=2, kv='int8')",
    "H2O(k=24, kv='int4')",
    "H2O(k=24, kv='int8')",
    "H2O(k=0.2, kv='int4')",
    "SubGen(k=10, recent=8, kv='int4')",
]
SMALL += CODED
FULL = [
    "SparQ(r=4, k=5000)",
    "SparQ(r=4, k=5000, channels='none', mean_value=True)",
    "SparQ(r=4, k=5000, channels='int8')",
    "SparQ(r=4, k=5000, channels='int4', mean_value=True)",
    "TopK(k=5000)",
    "TopK(k=5000, oracle=True)",
    "LowRank(r=4, k=5000)",
    "LMInfinite(k=5000)",
    "Strided(k=5000)",
    "Fixed(k=5000)",
    "H2O(k=5000)",
    "SubGen(k=4000, recent=1000)",
    "SparQ(r=4, k=5000, mean_value=True, kv='int4')",
    "SparQ(r=4, k=5000, channels='none', kv='int8')",
    "TopK(k=5000, kv='int8')",
    "TopK(k=5000, oracle=True, kv='int4')",
    "LowRank(r=4, k=5000, kv='int8')",
    "LMInfinite(k=5000, kv='int4')",
    "Strided(k=5000, kv='int8')",
    "Fixed(k=5000, kv='int4')",
    "H2O(k=5000, kv='int4')",
    "SubGen(k=4000, recent=1000, kv='int8')",
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@dataclass
class Stream:
    """A random sequence: q (B,H,G,N,D), k and v (B,H,N,D)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def random(cls, shape: Shape, n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Stream:
        g = torch.Generator().manual_seed(seed)
        B, H, G, D = shape
        draw = (torch.randn(B, H, *s, generator=g).to(dtype) for s in ((G, n, D), (n, D), (n, D)))
        return cls(*draw)

    def rows(self, index: list[int]) -> Stream:
        return Stream(self.q[index], self.k[index], self.v[index])


def run(method: Method, s: Stream, prompt: int, pad: list[int] | None = None, softcap: float | None = None):
    """Prompt, then the rest token by token: the store and the decoded outputs (steps,B,H,G,D)."""
    B, H, G, n, D = s.q.shape
    store, scale = method.store(Shape(B, H, G, D), s.k.dtype), D**-0.5
    block = (s.q[..., :prompt, :], s.k[:, :, :prompt], s.v[:, :, :prompt])
    method.prefill(store, *block, scale=scale, pad=pad, softcap=softcap)
    steps = []
    for i in range(prompt, n):
        steps.append(method.decode(store, s.q[..., i, :], s.k[:, :, i], s.v[:, :, i], scale=scale, softcap=softcap))
    return store, torch.stack(steps)


def close(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> None:
    assert (a.double() - b.double()).abs().max().item() <= EPS[dtype] * max(1.0, b.double().abs().max().item())


def test_every_method_is_under_the_laws():
    assert {type(parse(s)) for s in SMALL} == set(METHODS.values())
    assert {type(parse(s)) for s in FULL} == set(METHODS.values()) - {Dense, SubGenStream}
    assert {type(parse(s)) for s in CODED} == set(METHODS.values()) - {SubGenStream}


@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", FULL)
def test_full_budget_equals_dense(spec, dtype, G, backend):
    s = Stream.random(Shape(2, 2, G, 16), 301, dtype)
    method = parse(spec)
    _, y = run(method, s, 290, pad=[0, 37])
    _, dense = run(Dense(kv=method.kv), s, 290, pad=[0, 37])
    close(y, dense, dtype)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_dense_equals_softmax(softcap, backend):
    s = Stream.random(Shape(2, 2, 3, 16), 40, torch.float32)
    _, y = run(Dense(), s, 33, softcap=softcap)
    for i, step in enumerate(y):
        q, k, v = s.q[..., 33 + i, :].double(), s.k[:, :, : 34 + i].double(), s.v[:, :, : 34 + i].double()
        logits = q @ k.transpose(-1, -2) / 4
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        close(step, logits.softmax(-1) @ v, torch.float32)


@pytest.mark.parametrize("prompt", [1, 7])
@pytest.mark.parametrize("spec", FULL)
def test_short_prompts_and_one_token(spec, prompt, backend):
    s = Stream.random(Shape(1, 2, 2, 16), prompt + 6)
    method = parse(spec)
    close(run(method, s, prompt)[1], run(Dense(kv=method.kv), s, prompt)[1], torch.float32)


def test_stream_is_near_dense():
    """Statistical: delta = 0 makes the normaliser exact, s samples leave an error of order 1/sqrt(s)."""
    s = Stream.random(Shape(1, 2, 2, 16), 130)
    _, dense = run(Dense(), s, 120)
    error = [(run(SubGenStream(0.0, 1, n), s, 120)[1] - dense).square().mean().sqrt().item() for n in (64, 4096)]
    assert error[1] < 0.05
    assert 4 < error[0] / error[1] < 16  # sqrt(4096 / 64) = 8


@pytest.mark.parametrize("blocks", [(1,) * 30, (256, 44), (7, 250, 43), (255, 1, 1, 43)])
@pytest.mark.parametrize("spec", [s for s in SMALL if not s.startswith(("H2O", "SubGen("))])
def test_appends_equal_one_append(spec, blocks):
    """The store does not see how its tokens were cut."""
    n = sum(blocks)
    shape = Shape(2, 2, 2, 16)
    s = Stream.random(shape, n + 1)
    method = parse(spec)
    one, many = method.store(shape, torch.float32), method.store(shape, torch.float32)
    one.append(s.k[:, :, :n], s.v[:, :, :n])
    start = 0
    for block in blocks:
        many.append(s.k[:, :, start : start + block], s.v[:, :, start : start + block])
        start += block
    assert one.lengths == many.lengths == [n, n]
    assert one.nbytes == many.nbytes
    step = (s.q[..., n, :], s.k[:, :, n], s.v[:, :, n])
    a, b = (method.decode(x, *step, scale=0.25) for x in (one, many))
    close(a, b, torch.float32)


@pytest.mark.parametrize("n", [1, 5, 24, 254, 255, 256, 300, 511])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", SMALL)
def test_counted_equals_closed_form(spec, dtype, n):
    shape, method = Shape(2, 2, 3, 16), parse(spec)
    s = Stream.random(shape, n + 1, dtype)
    with ops.backend("ref"):
        store, _ = run(method, Stream(s.q[..., :n, :], s.k[:, :, :n], s.v[:, :, :n]), n - 1) if n > 1 else (None, None)
        if store is None:
            store = method.store(shape, dtype)
            method.prefill(store, s.q[..., :1, :], s.k[:, :, :1], s.v[:, :, :1], scale=0.25)
        before = store.elements, store.bytes
        prompt = n - 1 if n > 1 else 1
        method.decode(store, s.q[..., n, :], s.k[:, :, n], s.v[:, :, n], scale=0.25)
    if isinstance(method, SubGenStream):
        predicted = method.traffic(n, shape, dtype, clusters=int(store.m.sum()))
        worst = method.traffic(n, shape, dtype)
        assert predicted.elements <= worst.elements
    elif spec.startswith("H2O(k=0.2"):
        # n is taken as the prompt by the closed form; here the prompt fixed the budget
        held = min(method.budget(prompt), n)
        predicted = H2O(held, local=0, kv=method.kv).traffic(n, shape, dtype)
    else:
        predicted = method.traffic(n, shape, dtype)
    assert (store.elements - before[0], store.bytes - before[1]) == (predicted.elements, predicted.bytes)


@pytest.mark.parametrize("n", [1, 30, 300])
@pytest.mark.parametrize("spec", SMALL)
def test_bytes_held_stay_within_the_bound(spec, n, backend):
    shape, method = Shape(2, 2, 2, 16), parse(spec)
    store, _ = run(method, Stream.random(shape, n + 5), n)
    slack = 1 if spec.startswith("H2O(k=0.2") else 0  # ceil(0.2 n) of the prompt, not of n + 5
    assert 0 < store.nbytes <= method.bound(n + 5 + slack, shape, torch.float32)
    assert store.nbytes <= store.allocated
    if isinstance(store, Slots) and not slack:
        assert store.allocated <= method.bound(10**6, shape, torch.float32)  # nothing but the budget exists


@pytest.mark.parametrize("spec", SMALL)
def test_left_padding_changes_nothing(spec, backend):
    """Row 1 is padded with keys of 1e9 and values of inf; it equals the same row alone."""
    method, shape = parse(spec), Shape(2, 2, 2, 16)
    s = Stream.random(shape, 310)
    pad = 41
    s.k[1, :, :pad], s.v[1, :, :pad] = 1e9, torch.inf
    _, both = run(method, s, 300, pad=[0, pad])
    alone = Stream(s.q[1:, ..., pad:, :], s.k[1:, :, pad:], s.v[1:, :, pad:])
    _, y = run(method, alone, 300 - pad)
    close(both[:, 1:], y, torch.float32)


@pytest.mark.parametrize("spec", [s for s in SMALL if not s.startswith(("H2O", "SubGen"))])
def test_padding_over_several_prompt_blocks(spec, backend):
    """Not the methods that drop tokens between blocks: there the cut of the prompt is part of the method."""
    method, shape, pad = parse(spec), Shape(2, 2, 2, 16), 60
    s = Stream.random(shape, 130)
    store, scale = method.store(shape, torch.float32), 0.25
    for a, b in ((0, 50), (50, 120)):
        pads = [0, min(max(pad - a, 0), b - a)]
        method.prefill(store, s.q[..., a:b, :], s.k[:, :, a:b], s.v[:, :, a:b], scale=scale, pad=pads)
    y = [method.decode(store, s.q[..., i, :], s.k[:, :, i], s.v[:, :, i], scale=scale) for i in range(120, 130)]
    _, whole = run(method, s, 120, pad=[0, pad])
    close(torch.stack(y), whole, torch.float32)


@pytest.mark.parametrize("spec", SMALL)
def test_rows_of_a_batch_are_independent(spec, backend):
    method = parse(spec)
    s = Stream.random(Shape(3, 2, 2, 16), 280)
    _, y = run(method, s, 270)
    _, swapped = run(method, s.rows([2, 1]), 270)
    close(y[:, [2, 1]], swapped, torch.float32)


@pytest.mark.parametrize(
    "spec",
    ["Dense()", "LMInfinite(k=20)", "Strided(k=20)", "SubGen(k=10, recent=8)", "SubGenStream(delta=0.0, t=1, s=8)"],
)
def test_grouped_queries_equal_repeated_heads(spec, backend):
    """Where the group does not choose together, G queries on one KV head equal G heads with copies of it."""
    method = parse(spec)
    s = Stream.random(Shape(2, 1, 3, 16), 60)
    _, grouped = run(method, s, 50)
    for g in range(3):  # one at a time: coins depend on the head's number
        _, y = run(method, Stream(s.q[:, :, g : g + 1], s.k, s.v), 50)
        close(grouped[:, :, :, g : g + 1], y, torch.float32)


@pytest.mark.parametrize("spec", [s for s in SMALL if not s.startswith("Dense")])
def test_equal_queries_of_a_group_choose_as_one(spec, backend):
    """A group of equal queries is one query: the choice, alpha and the scores do not depend on G."""
    method = parse(spec.replace("SparQ(r=4, k=16)", "SparQ(r=4, k=16, mean_value=True)"))
    s = Stream.random(Shape(2, 2, 1, 16), 290)
    _, one = run(method, s, 280)
    _, three = run(method, Stream(s.q.expand(-1, -1, 3, -1, -1), s.k, s.v), 280)
    if "mean_value" in repr(method) or not spec.startswith("SparQ"):
        close(three, one.expand_as(three), torch.float32)


@pytest.mark.parametrize("spec", SMALL + FULL)
def test_repr_is_the_spec(spec):
    assert parse(repr(parse(spec))) == parse(spec)
    assert repr(parse(repr(parse(spec)))) == repr(parse(spec))


@pytest.mark.parametrize("spec", SMALL)
def test_fork_and_select(spec, backend):
    method, shape = parse(spec), Shape(2, 2, 2, 16)
    s = Stream.random(shape, 282)
    store, _ = run(method, Stream(s.q[..., :281, :], s.k[:, :, :281], s.v[:, :, :281]), 270)
    step = lambda x, rows: method.decode(  # noqa: E731
        x, s.q[rows][..., 281, :], s.k[rows][:, :, 281], s.v[rows][:, :, 281], scale=0.25
    )
    fork, beams = store.fork(), store.fork()
    beams.select(torch.tensor([1, 0, 1]))
    y, again, chosen = step(store, [0, 1]), step(fork, [0, 1]), step(beams, [1, 0, 1])
    close(again, y, torch.float32)
    close(chosen, y[[1, 0, 1]], torch.float32)
    assert beams.lengths == [282] * 3
    assert beams.nbytes * 2 == store.nbytes * 3 or isinstance(method, SubGenStream) or "LowRank" in spec


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", [s for s in SMALL if not s.startswith(("LowRank", "H2O", "SubGen("))])
def test_half_precision_stays_near_float32(spec, dtype, backend):
    """The same rounded stream in the cache dtype and in float32: equal choices, outputs equal up to rounding.

    Not the methods that choose by rounded products (K P, score sums, distances): there the choice may differ.
    """
    method, shape = parse(spec), Shape(1, 2, 2, 16)
    s = Stream.random(shape, 281, dtype)
    wide = Stream(s.q.float(), s.k.float(), s.v.float())
    _, y = run(method, s, 280)
    _, exact = run(method, wide, 280)
    close(y, exact, dtype)
