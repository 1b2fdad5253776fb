"""Tensors that do not fit, budgets that do not fit in memory, and NaN: each has a defined end, and nothing is lost."""

from __future__ import annotations

import pytest
import torch

from skimkv.methods import (
    H2O,
    TOVA,
    Fixed,
    LMInfinite,
    LowRank,
    Quest,
    RocketKV,
    SnapKV,
    SparQ,
    Strided,
    SubGen,
    SubGenStream,
    TopK,
)
from skimkv.methods.lm_infinite import FirstAndRecent
from skimkv.ops import Token
from skimkv.stores.base import Shape
from skimkv.testing import empty_store
from support.refusals import refuses
from support.specs import EACH

pytestmark = pytest.mark.usefixtures("backend")
MOST = 2**31 - 1
B, H, G, D = SHAPE = Shape(2, 3, 2, 16)


def block(n, dtype=torch.float32):
    """q, k, v of a prompt of n."""
    return (torch.randn(B, H, *s, D).to(dtype) for s in ((G, n), (n,), (n,)))


def filled(method, n=20):
    store = empty_store(method, SHAPE, torch.float32)
    method.prefill(store, *block(n), scale=0.3)
    return store


def state(store):
    return list(store.lengths), store.nbytes, store.elements, store.bytes


BAD = {
    "batch": lambda k: k[:1],
    "heads": lambda k: k[:, :2],
    "head size": lambda k: k[..., :8],
    "no tokens axis": lambda k: k[:, :, 0],
    "extra axis": lambda k: k[None],
    "bfloat16": lambda k: k.bfloat16(),
    "float64": lambda k: k.double(),
    "int": lambda k: k.int(),
}


@pytest.mark.parametrize("wrong", BAD)
@pytest.mark.parametrize("method", EACH, ids=repr)
def test_shapes_and_dtypes_are_checked(method, wrong):
    q, k, v = block(5)
    bad = BAD[wrong](k), BAD[wrong](v)
    for store in (empty_store(method, SHAPE, torch.float32), filled(method)):
        before = state(store)
        calls = [lambda x=x, store=store: store.append(*x) for x in (bad, (bad[0], v), (k, bad[1]))]
        calls.append(lambda store=store: method.prefill(store, q, *bad, scale=0.3))
        if wrong not in ("no tokens axis", "extra axis"):
            calls.append(lambda store=store: method.decode(store, q[..., 0, :], *(x[:, :, 0] for x in bad), scale=0.3))
        for call in calls:
            refuses(call, r"^k ")
        assert state(store) == before


BAD_QUERIES = {
    "batch": lambda q: q[:1],
    "heads": lambda q: q[:, :2],
    "group": lambda q: q[:, :, :1],
    "head size": lambda q: q[..., :8],
    "extra axis": lambda q: q[None],
    "int": lambda q: q.int(),
}
BAD_PROMPTS = {  # in a decode step a query may have another type than the cache
    **BAD_QUERIES,
    "fewer tokens": lambda q: q[..., :3, :],
    "more tokens": lambda q: torch.cat([q, q], 3),
    "bfloat16": lambda q: q.bfloat16(),
    "float64": lambda q: q.double(),
}


@pytest.mark.parametrize("wrong", BAD_PROMPTS)
@pytest.mark.parametrize("method", EACH, ids=repr)
def test_queries_are_checked_before_a_token_enters(method, wrong):
    q, k, v = block(5)
    for store in (empty_store(method, SHAPE, torch.float32), filled(method)):
        before = state(store)
        refuses(lambda store=store: method.prefill(store, BAD_PROMPTS[wrong](q), k, v, scale=0.3), r"^q ")
        if wrong in BAD_QUERIES:
            bad = BAD_QUERIES[wrong](q[..., 0, :])
            refuses(lambda store=store, bad=bad: method.decode(store, bad, k[:, :, 0], v[:, :, 0], scale=0.3), r"^q ")
        assert state(store) == before


@pytest.mark.parametrize("softcap", [0.0, -5.0, float("nan"), float("inf")])
@pytest.mark.parametrize("method", [m for m in EACH if not isinstance(m, SubGenStream)], ids=repr)
def test_a_soft_cap_is_positive(method, softcap):
    q, k, v = block(5)
    store = filled(method)
    before = state(store)
    refuses(lambda: method.prefill(store, q, k, v, scale=0.3, softcap=softcap), f"softcap = {softcap} must be positive")
    for call in (method.decode, lambda store, q, *token, **more: method.attend(store, q, Token(*token), **more)):
        with pytest.raises(ValueError, match=f"softcap = {softcap} must be positive"):
            call(store, q[..., 0, :], k[:, :, 0], v[:, :, 0], scale=0.3, softcap=softcap)
    assert state(store) == before


@pytest.mark.parametrize("pad", [[0], [0, 0, 0], [0, -1], [0, 6], [6, 0], []])
@pytest.mark.parametrize("method", EACH, ids=repr)
def test_pad_is_one_number_a_row_and_at_most_the_block(method, pad):
    store = filled(method)
    q, k, v = block(5)
    before = state(store)
    with pytest.raises(ValueError, match="pad"):
        store.append(k, v, pad)
    if not isinstance(method, SubGenStream):  # a later block of a stream takes no padding at all
        with pytest.raises(ValueError, match="pad"):
            method.prefill(store, q, k, v, scale=0.3, pad=pad)
    assert state(store) == before


@pytest.mark.parametrize("method", EACH, ids=repr)
def test_a_block_of_nothing_but_padding_adds_nothing(method):
    store = filled(method)
    before = list(store.lengths), store.nbytes
    store.append(*list(block(3))[1:], [3, 3])
    assert (store.lengths, store.nbytes) == before


@pytest.mark.parametrize("method", [SparQ(2, MOST, mean_value=True), TopK(MOST), LowRank(2, MOST)], ids=repr)
def test_a_budget_beyond_all_positions_is_dense(method):
    store = filled(method)
    q, k, v = block(1)
    y = method.decode(store, q[..., 0, :], k[:, :, 0], v[:, :, 0], scale=0.3)
    K, V = (torch.cat([getattr(c, name) for c in store.chunks], 2)[:, :, :21] for name in "kv")
    expected = (q[..., 0, :] @ K.transpose(-1, -2) * 0.3).softmax(-1) @ V
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", [LMInfinite(MOST), H2O(MOST), SubGen(MOST, 4)], ids=repr)
def test_slots_that_do_not_fit_in_memory(method):
    store = empty_store(method, Shape(64, 8, 1, 512), torch.float32)  # beyond any address space
    q, k, v = torch.zeros(64, 8, 1, 1, 512), torch.zeros(64, 8, 1, 512), torch.zeros(64, 8, 1, 512)
    refuses(lambda: method.prefill(store, q, k, v, scale=1.0), "(2147483647|2147483651) tokens does not fit in memory")


def outputs(method, k, v, q, prompt):
    store, y = empty_store(method, SHAPE, k.dtype), []
    method.prefill(store, q[..., :prompt, :], k[:, :, :prompt], v[:, :, :prompt], scale=0.3)
    for i in range(prompt, k.shape[2]):
        y.append(method.decode(store, q[..., i, :], k[:, :, i], v[:, :, i], scale=0.3))
    return torch.stack(y)


@pytest.mark.parametrize("when", [3, 258, 260, 261])
@pytest.mark.parametrize("method", EACH, ids=repr)
def test_a_nan_key_makes_its_head_nan_and_no_other(method, when):
    """Of row 0, head 1, while it is held: old, recent, the first generated token, the one after."""
    q, k, v = block(264)
    clean = outputs(method, k, v, q, 260)
    k[0, 1, when] = torch.nan
    y = outputs(method, k, v, q, 260)
    first = max(when - 260, 0)  # the step that sees it first
    if isinstance(method, Strided | Fixed):  # a later token took its slot
        store = empty_store(method, SHAPE, k.dtype)
        taken = [store.slot_of(p, method.k) for p in range(264)]
        last = max(first, next((p for p in range(when + 1, 264) if taken[p] == taken[when]), 264) - 260)
    elif isinstance(method, SnapKV | TOVA) and when < 260:
        last = first  # it may have been dropped with the prompt
    elif isinstance(method, TOVA):
        last = first + 1  # its own query may drop it
    elif isinstance(method, FirstAndRecent | SubGen | H2O) and when < (260 if isinstance(method, H2O) else 258):
        last = first  # it may have been dropped with the prompt
    elif isinstance(method, FirstAndRecent | SubGen | H2O):
        last = when - 260 + (2 if isinstance(method, H2O) else 3)
    else:
        last = 4
    assert y[first:last, 0, 1].isnan().all()
    own = slice(None) if isinstance(method, TOVA) else 1  # the heads of a layer choose together
    assert isinstance(method, TOVA) == (own != 1) and not y[:, 0, 0].isnan().any()
    y[:, 0, own] = clean[:, 0, own] = 0
    torch.testing.assert_close(y, clean, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("method", [m for m in EACH if isinstance(m, Quest | RocketKV)], ids=repr)
def test_an_infinite_key_on_the_side_of_the_query_makes_its_head_nan(method):
    """As in dense attention: no page can be compared with one whose bound is infinite."""
    q, k, v = block(30)
    q[..., 3] = q[..., 3].abs() + 10  # so that every method scores by this channel
    clean = outputs(method, k, v, q, 29)
    k[0, 1, 28, 3] = torch.inf
    y = outputs(method, k, v, q, 29)
    assert y[:, 0, 1].isnan().all()
    y[:, 0, 1] = clean[:, 0, 1] = 0
    torch.testing.assert_close(y, clean, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("method", EACH, ids=repr)
def test_a_nan_query_makes_its_head_nan_and_no_other(method):
    q, k, v = block(30)
    clean = outputs(method, k, v, q, 29)
    q[1, 2, 0, 29] = torch.nan
    y = outputs(method, k, v, q, 29)
    assert y[0, 1, 2, 0].isnan().all()
    y[0, 1, 2] = clean[0, 1, 2] = 0  # the group chooses together: its other query may change
    torch.testing.assert_close(y, clean, atol=1e-6, rtol=1e-5)


def test_a_stream_refuses_what_it_cannot_do():
    method = SubGenStream(0.5, 2, 3)
    q, k, v = block(4)
    store = filled(method)
    with pytest.raises(ValueError, match="padding"):
        method.prefill(store, q, k, v, scale=0.3, pad=[1, 0])
    with pytest.raises(ValueError, match=r"softcap|cap logits"):
        method.decode(store, q[..., 0, :], k[:, :, 0], v[:, :, 0], scale=0.3, softcap=5.0)
    first = method.store(store.shape, store.dtype)
    with pytest.raises(ValueError, match=r"softcap|cap logits"):
        method.prefill(first, q, k, v, scale=0.3, softcap=5.0)
    assert not any(first.lengths)


@pytest.mark.parametrize("method", [m for m in EACH if not hasattr(m.store(SHAPE, torch.float32), "chunks")], ids=repr)
def test_what_was_dropped_cannot_be_cropped(method):
    store = filled(method)
    with pytest.raises(ValueError, match="cannot forget"):
        store.crop(1)


@pytest.mark.parametrize("method", EACH, ids=repr)
def test_decoding_without_a_prompt(method):
    """The first token may come through decode: it attends to itself alone."""
    store = empty_store(method, SHAPE, torch.float32)
    q, k, v = block(2)
    for i in range(2):
        y = method.decode(store, q[..., i, :], k[:, :, i], v[:, :, i], scale=0.3)
        if i == 0:
            torch.testing.assert_close(y, v[:, :, None, 0].expand_as(y))
    assert y.isfinite().all() and store.lengths == [2, 2]
