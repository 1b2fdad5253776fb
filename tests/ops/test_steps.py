"""Steps over a store that remembers the last one: whatever has changed since is seen, and nothing else is changed."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from dataclasses import replace

import pytest
import torch

from skimkv import ops
from skimkv.methods import Dense, SparQ, parse
from skimkv.ops import KernelStep, Token
from skimkv.ops.cpu import run
from skimkv.ops.cpu.run import CpuBackend
from skimkv.stores.base import Shape
from skimkv.stores.rotation import KeyRotation
from support.kernels import NATIVE, misaligned, on

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native library is not built")

SHAPE, SCALE = Shape(2, 2, 2, 16), 0.25


@pytest.fixture(autouse=True)
def _kernels():
    with on(None), torch.no_grad():
        yield


def steps(n, dtype=torch.float32):
    B, H, G, D = SHAPE
    return [(torch.randn(B, H, G, D).to(dtype), *torch.randn(2, B, H, D).to(dtype)) for _ in range(n)]


def read(method, tokens=270):
    store = method.store(SHAPE, torch.float32)
    k, v = torch.randn(2, *SHAPE[:2], tokens, SHAPE.D)
    store.append(k, v)
    return store


def prompt(method, store, tokens):
    B, H, G, D = store.shape
    q, k, v = torch.randn(B, H, G, tokens, D), *torch.randn(2, B, H, tokens, D)
    for each in (store, store.fork()):
        method.prefill(each, q, k, v, scale=SCALE)
    return each


def anew(method, store, *token):
    """The same step by a store that remembers nothing, and the store after it."""
    twin = store.fork()
    return method.decode(twin, *token, scale=SCALE), twin


def same(a, b):
    assert a.lengths == b.lengths and a.observed() == b.observed()
    for row in range(a.shape.B):
        if hasattr(a, "stored"):
            assert a.filled == b.filled and all(map(torch.equal, a.stored(row), b.stored(row)))


SPECS = [
    "Dense()", "SparQ(r=4, k=12, channels='int8')", "TopK(k=9)", "LowRank(r=4, k=9)", "Skim(r=4, k=9)", "Quest(4, 12)",
    "LMInfinite(k=12, initial=4)", "LMInfinite(k=12, initial=0, positions='cache')", "LMInfinite(k=0.8, initial=4)",
    "Strided(k=12)", "Fixed(k=12)", "SubGen(k=6, recent=5)", "H2O(k=12)", "H2O(k=12, local=0, kv='int8')", "H2O(k=0.8)",
    "SnapKV(k=12, pool=3)", "StreamingLLM(k=12)", "TOVA(k=12)", "TOVA(k=0.8)",
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
def test_a_store_that_remembers_gives_what_one_gives_that_does_not(spec):
    """Over the end of a chunk, over full slots, other rows of the batch, another prompt, and a step that is undone."""
    method = parse(spec)
    store = method.store(SHAPE, torch.float32)
    keeps_all = hasattr(store, "crop") and type(store).__name__ == "Full"
    if not keeps_all:
        store.rotation = KeyRotation.llama(SHAPE.D)
    prompt(method, store, 500 if keeps_all else 9)
    for i, token in enumerate(steps(30)):
        if i == 10:
            store.select(torch.tensor([1, 0]))
        if i == 20 and keeps_all:
            store.crop(9)
        elif i == 20:
            prompt(method, store, 3)
        if i == 1 and not keeps_all and store.score is None and store.filled[0] + 1 < store.budget[0]:
            mark = store.mark()
            method.decode(store, *token, scale=SCALE)
            store.rewind(mark)
        y, twin = anew(method, store, *token)
        memory = store.view
        assert torch.equal(method.decode(store, *token, scale=SCALE), y)
        assert store.view is memory or i in (0, 10, 12, 20) or store.view.capacity > memory.capacity
        same(store, twin)


def test_other_budgets_and_other_recent_tokens_are_seen():
    """Of the same memory: by `set_budget`, by the kernel itself, and by another method."""
    method = parse("H2O(k=0.5)")
    store = method.store(SHAPE, torch.float32)
    prompt(method, store, 24)
    k, score = store.k, store.score
    others = [
        lambda token: store.set_budget([12, 9]),
        lambda token: CpuBackend().run(
            KernelStep("scored_slots", recent=(2, 5)), store, token[0], Token(*token[1:]), {"scale": SCALE}
        ),
        lambda token: parse("H2O(k=0.5, local=0.1)").decode(store, *token, scale=SCALE),
        lambda token: None,
    ]
    tokens = iter(steps(40))
    for other in others:
        for token in (next(tokens) for _ in range(6)):
            y, twin = anew(method, store, *token)
            assert torch.equal(method.decode(store, *token, scale=SCALE), y)
            same(store, twin)
        other(next(tokens))
    assert store.k is k and store.score is score and store.budget == [12, 9]


@pytest.mark.parametrize("nan", [[], [3], [2, 9], range(12)], ids=str)
def test_the_token_that_h2o_drops_is_the_same_with_scores_that_are_not_numbers(nan):
    """A score that is NaN is the lowest; of several the oldest token goes, wherever it lies."""
    method = parse("H2O(k=12, local=0)")
    store = method.store(SHAPE, torch.float32)
    store = prompt(method, store, 20)
    order = torch.randperm(12)
    store.pos.copy_(store.pos[:, :, order])
    store.score.copy_(torch.rand(store.score.shape) + 1)
    store.score[:, :, 5:8] = -0.5  # equal ones: the oldest goes
    store.score[:, :, list(nan)] = torch.nan
    pos = store.pos.clone()
    candidates = list(nan) or [5, 6, 7]
    oldest = pos[:, :, candidates].argmin(-1)
    q, k, v = steps(1)[0]
    method.decode(store, 0 * q, k, v, scale=SCALE)
    now = store.lengths[0] - 1
    for b in range(SHAPE.B):
        for h in range(SHAPE.H):
            changed = (store.pos[b, h] == now).nonzero().flatten().tolist()
            assert changed == [candidates[oldest[b, h]]]


BAD_TOKENS = {
    "q is": lambda q, k, v: (q[..., :8], k, v),
    "no CPU kernel": lambda q, k, v: (q.double(), k, v),
    "k is": lambda q, k, v: (q, k[:1], v[:1]),
    "v is": lambda q, k, v: (q, k, v.half()),
    "k is .* meta": lambda q, k, v: (q, k.to("meta"), v.to("meta")),
    "not aligned": lambda q, k, v: (misaligned(q), k, v),
}


@pytest.mark.parametrize("says", BAD_TOKENS)
def test_what_does_not_fit_is_refused_after_steps_that_did(says):
    method = Dense()
    store, tokens = read(method), steps(4)
    for token in tokens[:2]:
        method.decode(store, *token, scale=SCALE)
    twin = store.fork()
    with pytest.raises(ValueError, match=says):
        method.decode(store, *BAD_TOKENS[says](*tokens[2]), scale=SCALE)
    assert store.lengths == twin.lengths
    assert torch.equal(*(method.decode(s, *tokens[3], scale=SCALE) for s in (store, twin)))


def test_strides_that_change_from_step_to_step_are_followed():
    store = read(Dense())
    forms = [lambda t: t, lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), lambda t: t.mT.contiguous().mT]
    for i, token in enumerate(steps(12)):
        y, _ = anew(Dense(), store, *token)
        assert torch.equal(Dense().decode(store, *map(forms[i // 2 % 3], token), scale=SCALE), y)


def test_keys_and_values_of_two_forms_are_described_once(monkeypatch):
    """As of a model that makes queries, keys and values by one product: they are copied in every step."""
    described, describe = [], run._describe
    monkeypatch.setattr(run, "_describe", lambda *args: described.append(args) or describe(*args))
    store = read(Dense())
    B, H, G, D = SHAPE
    for _ in range(5):
        q, (k, v) = torch.randn(B, H, G, D), torch.randn(B, H, 2 * D).split(D, -1)
        y, _ = anew(Dense(), store, q, k.contiguous(), v)
        described.clear()
        assert torch.equal(Dense().decode(store, q, k.contiguous(), v, scale=SCALE), y)
        last = len(described)
    assert last == 0


@pytest.mark.parametrize("spec", ["SparQ(r=4, k=8, mean_value=True)", "LMInfinite(k=12, initial=4)"])
def test_a_tensor_of_the_store_that_was_replaced_is_found(spec):
    method = parse(spec)
    store = method.store(SHAPE, torch.float32)
    twin = prompt(method, store, 20)
    for token in steps(3):
        method.decode(store, *token, scale=SCALE), method.decode(twin, *token, scale=SCALE)
    if spec.startswith("SparQ"):
        first = store.chunks[0]
        store.chunks = (replace(first, k=first.k.clone()), *store.chunks[1:])
        old, store.mean = first.k, copy.deepcopy(store.mean)
        with pytest.raises(AttributeError):
            store.chunks[0].k = old  # a chunk never changes: whoever remembers its addresses relies on that
    else:
        old, store.k = store.k, store.k.clone()
    old.fill_(torch.nan)
    token = steps(1)[0]
    assert torch.equal(*(method.decode(s, *token, scale=SCALE) for s in (store, twin)))


def test_another_step_between_two_equal_ones():
    """Of another method, with other options, by the kernels themselves, and by the reference."""
    method = SparQ(r=4, k=8)
    store, tokens = read(method), steps(20)
    others = [
        lambda token: Dense().decode(store, *token, scale=SCALE),
        lambda token: method.decode(store, *token, scale=SCALE, softcap=1.5),
        lambda token: method.decode(store, *token, scale=SCALE / 2),
        lambda token: method.decode(store, *token, scale=SCALE, sinks=torch.ones(2, 2)),
        lambda token: method.attend(store, token[0], None, scale=SCALE),
        lambda token: CpuBackend().prepare(method.kernel(store), store, torch.float32, SCALE / 3, None),
        lambda token: CpuBackend().append(store, *token[1:]),
    ]
    for i, other in enumerate(others):
        y, _ = anew(method, store, *tokens[2 * i])
        assert torch.equal(method.decode(store, *tokens[2 * i], scale=SCALE), y)
        other(tokens[2 * i + 1])
    twin = store.fork()
    with ops.backend("ref"):
        y = method.decode(store, *tokens[-1], scale=SCALE)
    assert torch.equal(y, method.step(twin, tokens[-1][0], Token(*tokens[-1][1:]), scale=SCALE, softcap=None))
    q, k, v = steps(1)[0]
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert method.decode(store, q.requires_grad_(), k, v, scale=SCALE).requires_grad


def test_every_step_uses_the_threads_that_torch_is_set_to(monkeypatch):
    store, tokens, seen = read(Dense()), steps(5), []
    lib = ops.cpu.run.library.library()
    take = lib.skimkv_step
    monkeypatch.setattr(lib, "skimkv_step", lambda *a: seen.append(a[5]) or take(*a))
    before = torch.get_num_threads()
    for threads, token in zip([1, 2, 2, 3, 1], tokens, strict=True):
        torch.set_num_threads(threads)
        Dense().decode(store, *token, scale=SCALE)
    torch.set_num_threads(before)
    assert seen == [1, 2, 2, 3, 1]


def test_the_memory_of_a_store_is_free_once_nobody_uses_it():
    """What remembers a step is in no circle of references: memory need not wait for Python's collector."""
    gc.collect()
    gc.disable()
    try:
        store = read(Dense())
        for token in steps(3):
            Dense().decode(store, *token, scale=SCALE)
        keys = weakref.ref(store.chunks[0].k)
        del store
        assert keys() is None
    finally:
        gc.enable()
