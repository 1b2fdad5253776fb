"""A step like the last one is taken again from what the store remembers of it: with the same result, and not else."""

from __future__ import annotations

import contextvars
import gc
import threading
import warnings
import weakref
from dataclasses import dataclass, replace

import pytest
import torch

from skimkv import ops
from skimkv.methods import Dense, SparQ, parse
from skimkv.ops import Token
from skimkv.ops.cpu import views
from skimkv.stores.base import Shape
from skimkv.stores.mean_value import MeanValue
from skimkv.stores.rotation import KeyRotation
from support.calls import functions_entered
from support.kernels import NATIVE, on

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native library is not built")

SHAPE, SCALE = Shape(2, 2, 2, 16), 0.25
SPECS = ["Dense()", "SparQ(r=4, k=12, channels='int8')", "TopK(k=9)", "LowRank(r=4, k=9)", "Skim(r=4, k=9)"]


@pytest.fixture(autouse=True)
def _kernels():
    torch.manual_seed(0)
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


def repeats(store):
    return store.choice is not None and store.choice.again is not None


@pytest.mark.parametrize("spec", SPECS)
def test_repeated_steps_are_those_of_a_method_that_remembers_nothing(spec):
    """Over the end of a chunk and of a group, and after a crop; a new method object remembers nothing."""
    method = parse(spec)
    store = read(method, 500)
    twin = store.fork()
    for i, token in enumerate(steps(30)):
        assert torch.equal(method.decode(store, *token, scale=SCALE), parse(spec).decode(twin, *token, scale=SCALE))
        assert repeats(store)
        if i == 20:
            store.crop(9), twin.crop(9)
    assert store.lengths == twin.lengths == [521, 521] and store.observed() == twin.observed()


SLOT_SPECS = [
    "LMInfinite(k=12, initial=4)", "LMInfinite(k=12, initial=0, positions='cache')", "LMInfinite(k=0.8, initial=4)",
    "Strided(k=12)", "Fixed(k=12)", "SubGen(k=6, recent=5)", "H2O(k=12)", "H2O(k=12, local=0, kv='int8')", "H2O(k=0.8)",
    "SnapKV(k=12, pool=3)",
]  # fmt: skip


def prompt(method, store, tokens):
    B, H, G, D = store.shape
    q, k, v = torch.randn(B, H, G, tokens, D), *torch.randn(2, B, H, tokens, D)
    for each in (store, store.fork()):
        method.prefill(each, q, k, v, scale=SCALE)
    return each


def assert_same_slots(a, b):
    assert a.lengths == b.lengths and a.filled == b.filled and a.observed() == b.observed()
    for row in range(a.shape.B):
        assert all(map(torch.equal, a.stored(row), b.stored(row)))


@pytest.mark.parametrize("spec", SLOT_SPECS)
def test_repeated_steps_over_slots_are_those_of_a_method_that_remembers_nothing(spec):
    """Until the slots are full and after; over other rows of the batch, another prompt, and a step that is undone."""
    method = parse(spec)
    store = method.store(SHAPE, torch.float32)
    twin = prompt(method, store, 9)
    for i, token in enumerate(steps(24)):
        if i == 10:
            store.select(torch.tensor([1, 0])), twin.select(torch.tensor([1, 0]))
        if i == 1 and store.score is None and store.filled[0] + 1 < store.budget[0]:
            mark = store.mark()
            method.decode(store, *token, scale=SCALE)
            store.rewind(mark)
        if i == 20:
            twin = prompt(method, store, 3)
        assert torch.equal(method.decode(store, *token, scale=SCALE), parse(spec).decode(twin, *token, scale=SCALE))
        assert repeats(store)
    assert_same_slots(store, twin)


def test_other_budgets_and_other_recent_tokens_are_seen():
    """Of the same memory: by `set_budget`, by the kernel itself, and by another method."""
    method = parse("H2O(k=0.5)")
    store = method.store(SHAPE, torch.float32)
    twin = prompt(method, store, 24)
    kernels, (k, score) = ops.kernels_for(store.device), (store.k, store.score)
    others = [
        lambda s, token: s.set_budget([12, 9]),
        lambda s, token: kernels.scored_slots(s, token[0], Token(*token[1:]), recent=[2, 5], scale=SCALE),
        lambda s, token: parse("H2O(k=0.5, local=0.1)").decode(s, *token, scale=SCALE),
        lambda s, token: kernels.append(s, *token[1:]),
    ]
    tokens = iter(steps(40))
    for other in [*others, lambda s, token: None]:
        for token in (next(tokens) for _ in range(6)):
            y = method.decode(store, *token, scale=SCALE)
            assert repeats(store) and torch.equal(y, parse("H2O(k=0.5)").decode(twin, *token, scale=SCALE))
        token = next(tokens)
        other(store, token), other(twin, token)
    assert_same_slots(store, twin)
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


def test_slots_that_were_replaced_are_found():
    method = parse("LMInfinite(k=12, initial=4)")
    store = method.store(SHAPE, torch.float32)
    twin = prompt(method, store, 20)
    for token in steps(3):
        method.decode(store, *token, scale=SCALE), method.decode(twin, *token, scale=SCALE)
    old, store.k = store.k, store.k.clone()
    old.fill_(torch.nan)
    token = steps(1)[0]
    assert torch.equal(*(method.decode(s, *token, scale=SCALE) for s in (store, twin)))


def test_a_step_before_which_keys_are_turned_is_not_taken_again():
    method = parse("StreamingLLM(k=12)")
    store = method.store(SHAPE, torch.float32)
    store.rotation = KeyRotation.llama(SHAPE.D)
    twin = prompt(method, store, 9)
    for token in steps(8):
        y = method.decode(store, *token, scale=SCALE)
        assert not repeats(store) and torch.equal(y, parse("StreamingLLM(k=12)").decode(twin, *token, scale=SCALE))
    assert_same_slots(store, twin)


def test_an_output_that_is_kept_does_not_change():
    store, method = read(Dense()), Dense()
    kept = [method.decode(store, *token, scale=SCALE) for token in steps(70)]
    copies = [y.clone() for y in kept]
    kept[3].add_(1), copies[3].add_(1)
    for token in steps(70):
        method.decode(store, *token, scale=SCALE)
    assert all(map(torch.equal, kept, copies))
    assert len({y.untyped_storage().data_ptr() for y in kept}) == 70
    assert 0 < sum(y.nbytes for y in store.view.outputs.spare) <= views.SPARE_BYTES
    assert not kept[0].is_inference()


BAD_TOKENS = {
    "q is": lambda q, k, v: (q[..., :8], k, v),
    "no CPU kernel": lambda q, k, v: (q.double(), k, v),
    "k is": lambda q, k, v: (q, k[:1], v[:1]),
    "v is": lambda q, k, v: (q, k, v.half()),
    "k is .* meta": lambda q, k, v: (q, k.to("meta"), v.to("meta")),
    "not aligned": lambda q, k, v: (shifted(q), k, v),
}


def shifted(t):
    raw = torch.zeros(t.nbytes + 1, dtype=torch.uint8).numpy()[1:]
    return torch.from_numpy(raw.view("float32").reshape(t.shape))


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
    method = Dense()
    store = read(method)
    twin = store.fork()
    forms = [lambda t: t, lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), lambda t: t.mT.contiguous().mT]
    for i, token in enumerate(steps(12)):
        y = method.decode(store, *map(forms[i // 2 % 3], token), scale=SCALE)
        assert torch.equal(y, Dense().decode(twin, *token, scale=SCALE))


def test_a_tensor_of_the_store_that_was_replaced_is_found():
    method = SparQ(r=4, k=8, mean_value=True)
    store = read(method)
    twin = store.fork()
    for token in steps(3):
        method.decode(store, *token, scale=SCALE), method.decode(twin, *token, scale=SCALE)
    first = store.chunks[0]
    store.chunks = (replace(first, k=first.k.clone()), *store.chunks[1:])
    first.k.fill_(torch.nan)
    store.mean = MeanValue(store.v_mean.clone())
    token = steps(1)[0]
    assert torch.equal(*(method.decode(s, *token, scale=SCALE) for s in (store, twin)))
    with pytest.raises(AttributeError):
        store.chunks[0].k = first.k  # a chunk never changes: whoever remembers its addresses relies on that


def test_another_step_between_two_equal_ones():
    """Of another method, with other options, by the kernels themselves, and by the reference."""
    method = SparQ(r=4, k=8)
    store, tokens = read(method), steps(20)
    twin, softcap = store.fork(), 1.5
    kernels = ops.kernels_for(store.device)

    def others(s):
        yield lambda token: Dense().decode(s, *token, scale=SCALE)
        yield lambda token: method.decode(s, *token, scale=SCALE, softcap=softcap)
        yield lambda token: method.decode(s, *token, scale=SCALE / 2)
        yield lambda token: method.decode(s, *token, scale=SCALE, sinks=torch.ones(2, 2))
        yield lambda token: kernels.dense(s, token[0], Token(*token[1:]), scale=SCALE)
        yield lambda token: kernels.append(s, *token[1:])

    for i, (a, b) in enumerate(zip(others(store), others(twin), strict=True)):
        for token in tokens[3 * i : 3 * i + 2]:
            y = method.decode(store, *token, scale=SCALE)
            assert repeats(store) and torch.equal(y, SparQ(r=4, k=8).decode(twin, *token, scale=SCALE))
        x, y = a(tokens[3 * i + 2]), b(tokens[3 * i + 2])
        assert x is y is None or torch.equal(x, y)
    with ops.backend("ref"):
        y = method.decode(store, *tokens[-1], scale=SCALE)
    assert torch.equal(y, method.step(twin, tokens[-1][0], Token(*tokens[-1][1:]), scale=SCALE, softcap=None))
    q, k, v = steps(1)[0]
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert method.decode(store, q.requires_grad_(), k, v, scale=SCALE).requires_grad


@dataclass(frozen=True, repr=False)
class Loud(Dense):
    """Dense attention that counts how often its own `fused` is called."""

    def fused(self, kernels, store, q, token, **softmax):
        calls.append(store)
        return super().fused(kernels, store, q, token, **softmax)


@dataclass(frozen=True, repr=False)
class Twice(Dense):
    """Dense attention whose result is doubled in `attend`."""

    def attend(self, *args, **kwargs):
        return 2 * super().attend(*args, **kwargs)


calls = []


def test_a_method_with_a_step_of_its_own_is_always_asked():
    calls.clear()
    store = read(Loud())
    twin = store.fork()
    loud, twice = Loud(), Twice()
    for token in steps(3):
        loud.decode(store, *token, scale=SCALE)
        Dense().decode(twin, *token, scale=SCALE)
    assert len(calls) == 3 and not repeats(store)
    for token in steps(3):
        assert torch.equal(twice.decode(store, *token, scale=SCALE), 2 * Dense().decode(twin, *token, scale=SCALE))


def test_a_copy_remembers_no_step_of_the_store_that_it_was_made_of():
    method = Dense()
    store = read(method)
    for token in steps(2):
        method.decode(store, *token, scale=SCALE)
    twin = store.fork()
    assert repeats(store) and twin.choice is twin.view is None
    before = store.uncounted("k").clone()
    method.decode(twin, *steps(1)[0], scale=SCALE)
    assert torch.equal(store.uncounted("k"), before)


@pytest.fixture(params=["in C", "in Python"])
def described(request, monkeypatch):
    """Both ways to compare a step's tensors with those of the last one; before PyTorch 2.10 there is one."""
    if request.param == "in Python":
        monkeypatch.setattr(views.library, "tensor_descriptions", lambda: None)
    elif views.library.tensor_descriptions() is None:
        pytest.skip("this PyTorch does not describe its tensors in C")
    return request.param


@pytest.mark.parametrize("spec", ["Dense()", "SparQ(r=4, k=12)", "LMInfinite(k=12, initial=4)", "H2O(k=12)"])
def test_a_repeated_step_enters_few_functions(spec, described):
    """Each takes microseconds once a model has read its weights; so does `isinstance` of an abstract class."""
    method = parse(spec)
    store, tokens = read(method, 20), steps(3)
    for token in tokens[:2]:
        method.decode(store, *token, scale=SCALE)
    names = functions_entered(method.decode, store, *tokens[2], scale=SCALE)
    assert names[:3] == ["decode", "take", "next_numbers"] and names[-1] == "advance", names
    assert len(names) <= (5 if described == "in C" else 6), names


def test_every_step_uses_the_threads_that_torch_is_set_to(described):
    method = Dense()
    store, tokens, seen = read(method), steps(6), []
    method.decode(store, *tokens[0], scale=SCALE)
    again = store.choice.again
    assert (again.run is None) == (described == "in Python")
    run = again.run or again._run_in_python
    again.run = lambda *a: seen.append(a[6]) or run(*a)
    for threads, token in zip([1, 2, 2, 3, 1], tokens[1:], strict=True):
        torch.set_num_threads(threads)
        method.decode(store, *token, scale=SCALE)
    assert seen == [1, 2, 2, 3, 1] and store.choice.again is again


@pytest.mark.parametrize("attribute", [None, 5, "text"])
def test_a_pytorch_that_describes_its_tensors_in_another_way_is_asked_in_python(attribute, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", attribute, raising=False)
    assert views.library.tensor_descriptions.__wrapped__() is None


def test_the_memory_of_a_store_is_free_once_nobody_uses_it(described):
    """What remembers a step is in no circle of references: memory need not wait for Python's collector."""
    gc.collect()
    gc.disable()
    try:
        method = Dense()
        store, tokens = read(method), steps(3)
        for token in tokens:
            method.decode(store, *token, scale=SCALE)
        assert repeats(store)
        keys = weakref.ref(store.chunks[0].k)
        del store
        assert keys() is None
    finally:
        gc.enable()


OTHER_FORMS = {
    "type": lambda q, k, v: (q.bfloat16(), k, v),
    "type of the token": lambda q, k, v: (q, k.double(), v.double()),
    "shape": lambda q, k, v: (q[:1], k, v),
    "dimensions": lambda q, k, v: (q, k, v[0]),
    "strides": lambda q, k, v: (q, k.mT.contiguous().mT, v),
    "device": lambda q, k, v: (q, k, v.to("meta")),
    "no tensor": lambda q, k, v: (None, k, v),
    "no tensor of PyTorch": lambda q, k, v: (q, k.numpy(), v),
}


@pytest.mark.parametrize("what", OTHER_FORMS)
def test_tensors_of_another_form_are_left_to_others(what, described):
    """The repeated step does nothing, leaves no error behind, and is taken with the next tensors of its own form."""
    method = Dense()
    store, tokens = read(method), steps(4)
    twin = store.fork()
    for token in tokens[:2]:
        method.decode(store, *token, scale=SCALE), method.decode(twin, *token, scale=SCALE)
    again, spare = store.choice.again, len(store.view.outputs.spare)
    other = OTHER_FORMS[what](*tokens[2])
    if described == "in Python" and what.startswith("no tensor"):
        with pytest.raises(AttributeError):
            again.take(store, *other, SCALE, None)
    else:
        assert again.take(store, *other, SCALE, None) is None
        assert len(store.view.outputs.spare) == spare
    assert again.take(store, *tokens[2], SCALE, 1.5) is None
    assert again.take(store, *tokens[2], SCALE / 2, None) is None
    assert store.lengths == [272, 272] and store.exclusive().free
    assert torch.equal(again.take(store, *tokens[3], SCALE, None), method.decode(twin, *tokens[3], scale=SCALE))


@pytest.mark.parametrize("numbers", [[20], [], None, [20, 4096], ["text", 20], [-1, 20], [20.5, 20]], ids=str)
def test_numbers_that_do_not_fit_the_cache_are_refused(numbers):
    """The list is read in C, where every item, its type and its size are checked."""
    store, tokens = read(Dense(), 20), steps(3)
    for token in tokens[:2]:
        Dense().decode(store, *token, scale=SCALE)
    again = store.choice.again
    if again.run is None:
        pytest.skip("this PyTorch does not describe its tensors in C")
    memory = store.chunks[0].k.view(torch.int32)  # bits: memory without tokens may hold NaN
    before, y = memory.clone(), torch.zeros(tokens[2][0].shape)
    assert again.run(again.tensor_step, numbers, *tokens[2], y, 1) in (views.library.OTHER_FORM, views.library.REFUSED)
    assert not y.any() and torch.equal(memory, before)
    again.take(store, *tokens[2], SCALE, None)
    assert store.lengths == [23, 23]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("strides", ["contiguous", "others"])
def test_tensors_of_every_type_and_stride_are_described(dtype, strides, described):
    """With one row, head and query too, where a dimension's stride does not matter."""
    method, form = Dense(), (lambda t: t) if strides == "contiguous" else lambda t: t.repeat(1, 2, *[1] * (t.ndim - 2))
    for B, H, G, D in [(2, 3, 2, 16), (1, 1, 1, 64)]:
        store = method.store(Shape(B, H, G, D), dtype)
        store.append(*torch.randn(2, B, H, 9, D).to(dtype))
        twin, run = store.fork(), []
        for _ in range(6):
            q, k, v = (form(t.to(dtype))[:, :H] for t in (torch.randn(B, H, G, D), *torch.randn(2, B, H, D)))
            y = method.decode(store, q, k, v, scale=SCALE)
            run.append(store.choice.again)
            assert torch.equal(y, Dense().decode(twin, q, k, v, scale=SCALE))
        assert len({*map(id, run)}) == 1  # each step after the first was the repeated one


@pytest.mark.parametrize("spec", ["Dense()", "LMInfinite(k=12, initial=4)"])
def test_a_store_that_another_thread_uses_refuses_a_repeated_step(spec):
    """And a step that fails leaves the store free, and as it was."""
    method, tokens = parse(spec), steps(5)
    store = read(method, 20)
    for token in tokens[:2]:
        method.decode(store, *token, scale=SCALE)
    errors = []

    def step():
        try:
            method.decode(store, *tokens[2], scale=SCALE)
        except RuntimeError as error:
            errors.append(str(error))

    with store.exclusive():
        other = threading.Thread(target=contextvars.copy_context().run, args=(torch.no_grad()(step),))
        other.start()
        other.join()
    assert errors == ["this cache is in use by another thread; give every request a cache of its own"]
    assert store.lengths == [22, 22]
    q, k, v = tokens[3]
    with pytest.raises(ValueError, match="not aligned"):
        method.decode(store, shifted(q), k, v, scale=SCALE)
    assert store.lengths == [22, 22] and store.exclusive().free
    method.decode(store, *tokens[4], scale=SCALE)
    assert store.lengths == [23, 23]
