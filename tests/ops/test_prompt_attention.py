"""A prompt's causal attention by the CPU's library against float64, on every instruction set of this machine."""

from __future__ import annotations

import ctypes
import re

import pytest
import torch

from skimkv import ops
from skimkv.ops.cpu import library, prompt_attention
from skimkv.ops.cpu.prompt_attention import attend, attend_and_score
from skimkv.ops.cpu.structs import CPrompt
from skimkv.ops.key_scores import reference
from skimkv.stores.base import Shape
from skimkv.stores.full import Full
from support.kernels import EPS, ISAS, NATIVE, TYPES, on
from support.refusals import refuses

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native library is not built")

# B, H, G, n, m, D: blocks of 128 keys and panels of 12, 24 or 48 queries that are full, begun, and one more than full.
SHAPES = [
    (1, 1, 1, 1, 1, 16), (2, 1, 2, 3, 140, 64), (1, 2, 1, 128, 128, 128), (1, 1, 3, 49, 49, 33), (1, 1, 4, 20, 257, 17),
    (1, 1, 1, 131, 400, 40), (1, 1, 1, 50, 50, 256), (1, 1, 1, 9, 9, 576), (1, 1, 1, 400, 400, 24),
]  # fmt: skip


def draw(B, H, G, n, m, D, dtype, seed=0):
    """q, k and v as a model has them: the heads of a token lie together."""
    torch.manual_seed(seed)
    q = torch.randn(B, n, H, G, D).to(dtype).permute(0, 2, 3, 1, 4)
    k, v = torch.randn(2, B, m, H, D).to(dtype).transpose(2, 3)
    return q, k, v


def exact(q, k, v, scale, softcap=None, sinks=None):
    """The result in float64, the softmax weights' mean of |v|, and the largest logit."""
    q, k, v = (x.double() for x in (q, k, v))
    n, m = q.shape[3], k.shape[2]
    logits = q @ k.unsqueeze(2).transpose(-1, -2) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(torch.arange(m) > m - n + torch.arange(n)[:, None], -torch.inf)
    top = logits.amax(-1, keepdim=True)
    weights = (logits - top).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks.double()[..., None, None] - top).exp()
    weights = weights / total
    return weights @ v.unsqueeze(2), weights @ v.unsqueeze(2).abs(), logits[logits > -torch.inf].abs().max()


def agrees(y, q, k, v, scale, **softmax):
    """float32 sums of D products and of keys; of bfloat16, weights may be rounded too; y is rounded to its type."""
    want, size, logit = exact(q, k, v, scale, **softmax)
    weights = EPS[q.dtype] if q.dtype == torch.bfloat16 else 0
    bound = (2.0**-24 * (16 * logit + 16) + weights) * size + EPS[q.dtype] * want.abs() + 1e-7
    assert y.dtype == q.dtype and y.shape == q.shape
    assert ((y.double() - want).abs() <= bound).all(), ((y.double() - want).abs() / bound).max()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TYPES.values(), ids=str)
def test_attention(isa, dtype):
    for i, shape in enumerate(SHAPES):
        q, k, v = draw(*shape, dtype)
        softmax = {"softcap": 2.0} if i % 4 % 3 else {}
        if i % 4 > 1:
            softmax["sinks"] = torch.linspace(-3, 6, shape[1] * shape[2]).view(shape[1:3])
        scale = (2.0 if i % 3 else -1.0) * shape[-1] ** -0.5
        with on(isa):
            agrees(attend(q, k, v, scale=scale, **softmax), q, k, v, scale, **softmax)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TYPES.values(), ids=str)
def test_neither_threads_nor_strides_change_a_bit(isa, dtype):
    q, k, v = draw(1, 2, 2, 230, 300, 32, dtype)
    with on(isa):
        y = attend(q, k, v, scale=0.3)
        assert torch.equal(y, attend(*(x.contiguous() for x in (q, k, v)), scale=0.3))
        wide = torch.zeros(1, 2, 300, 65, dtype=dtype)
        wide[..., 1::2] = k  # the numbers of a key lie apart
        assert torch.equal(y, attend(q, wide[..., 1::2], v, scale=0.3))
        shared = k[:, :1].expand(-1, 2, -1, -1)
        assert torch.equal(attend(q, shared, v, scale=0.3), attend(q, shared.contiguous(), v, scale=0.3))
    for threads in (2, 3):
        with on(isa, threads):
            assert torch.equal(y, attend(q, k, v, scale=0.3))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TYPES.values(), ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_what_keys_receive(isa, dtype, threads):
    """The attention adds up what every key receives, and its own result stays the same."""
    for i, shape in enumerate(SHAPES):
        q, k, v = draw(*shape, dtype)
        softmax: dict = {"scale": shape[-1] ** -0.5, "softcap": 2.0 if i % 4 % 3 else None}
        if i % 4 > 1:
            softmax["sinks"] = torch.linspace(-3, 6, shape[1] * shape[2]).view(shape[1:3])
        with on(isa, threads):
            y, scores = attend_and_score(q, k, v, **softmax)
            assert torch.equal(y, attend(q, k, v, **softmax))
        assert scores.dtype == torch.float32
        want = torch.stack([reference(*row, **softmax) for row in zip(q.double(), k.double(), strict=True)])
        torch.testing.assert_close(scores.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_what_keys_receive_does_not_depend_on_how_many_panels_are_kept(isa):
    """A prompt so long that the weights of one panel only are kept at a time; the maximum moves in every block."""
    q, k, v = draw(1, 1, 1, 60, 90000, 16, torch.float32)
    k = k * torch.linspace(1, 9, 90000)[:, None]
    with on(isa, 2):
        y, scores = attend_and_score(q, k, v, scale=0.25)
        agrees(y, q, k, v, 0.25)
    want = reference(q[0].double(), k[0].double(), 0.25)
    torch.testing.assert_close(scores[0].double(), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_logits_that_grow_and_numbers_that_are_none(isa):
    """The maximum moves in every block; a NaN in a query or in a key that it sees makes NaN, and nothing else does."""
    q, k, v = draw(1, 1, 1, 300, 300, 16, torch.float32)
    k = k.sign() * torch.linspace(1, 60, 300)[:, None]
    with on(isa):
        agrees(attend(q, k, v, scale=1.0), q, k, v, 1.0)
        agrees(attend(q, -k, v, scale=1e-3), q, -k, v, 1e-3)
        q[..., 7, 3] = k[..., 200, 0] = torch.nan
        empty = attend(q, k, v, scale=1.0).isnan().all(-1)[0, 0, 0]
    assert empty.nonzero().flatten().tolist() == [7, *range(200, 300)]


def test_the_layout_is_that_of_a_model():
    q, k, v = draw(2, 2, 3, 5, 5, 16, torch.float32)
    y = attend(q, k, v, scale=0.25)
    assert y.permute(0, 3, 1, 2, 4).is_contiguous()


def test_who_attends(monkeypatch):
    """PyTorch where it was asked for, for a gradient, for what the library has not, and where PyTorch is faster."""
    calls = []
    monkeypatch.setattr(prompt_attention, "attend", lambda *x, **options: calls.append(x) or attend(*x, **options))
    monkeypatch.setattr(prompt_attention, "FAST", ISAS)
    monkeypatch.setattr(library, "has_matrix_units", lambda: False)
    q, k, v = draw(1, 2, 2, 6, 6, 16, torch.float32)

    def called(q=q, k=k, v=v, **softmax):
        calls.clear()
        store = Full(Shape(1, 2, 2, q.shape[-1]), q.dtype)
        y = ops.causal_attention(store, q, k, v, scale=0.25, **softmax)
        torch.testing.assert_close(y.double(), exact(q, k, v, 0.25, **softmax)[0], rtol=1e-2, atol=1e-2)
        return bool(calls)

    assert called() and called(softcap=2.0) and called(sinks=torch.ones(2, 2))
    assert called(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert not called(q.double(), k.double(), v.double())
    assert not called(q.clone().requires_grad_()) and not called(v=v.clone().requires_grad_())
    with torch.no_grad():
        assert called(q.clone().requires_grad_())
    with ops.backend("ref"):
        assert not called()
    assert not called(*draw(1, 2, 2, 2, 2, 577, torch.float32))
    monkeypatch.setattr(library, "has_matrix_units", lambda: True)
    assert called() and not called(q.bfloat16(), k.bfloat16(), v.bfloat16())
    monkeypatch.setattr(prompt_attention, "FAST", ())
    assert not called()


@pytest.mark.parametrize("fast", [(), ISAS], ids=["PyTorch", "library"])
def test_scores_come_with_the_attention(monkeypatch, fast):
    """The attention is the reference's, and says what the keys of every row received: with a history, with padding, and
    of a row that has no token."""
    monkeypatch.setattr(prompt_attention, "FAST", fast)
    q, k, v = draw(3, 2, 2, 40, 40, 16, torch.float32)
    store = Full(Shape(3, 2, 2, 16), torch.float32)
    softmax = {"scale": 0.25, "softcap": 4.0, "sinks": torch.ones(2, 2)}
    nothing = q[:, :, :, :0], k[:, :, :0], v[:, :, :0]
    for pad in ([3, 0, 40], None):
        assert ops.causal_attention(store, *nothing, **softmax).shape == (3, 2, 2, 0, 16)
        scores: list = []
        y = ops.causal_attention(store, q, k, v, pad=pad, scores=scores, **softmax)
        assert torch.equal(y, ops.causal_attention(store, q, k, v, pad=pad, **softmax))
        with ops.backend("ref"):
            torch.testing.assert_close(y, ops.causal_attention(store, q, k, v, pad=pad, **softmax))
        assert pad is None or not y[0, :, :, :3].any()
        for b, p in enumerate(pad or [0] * 3):
            keys = torch.cat([store.history(slice(b, b + 1))[0][0], k[b, :, p:]], 1)
            want = reference(q[b, :, :, p:].double(), keys.double(), **softmax)
            torch.testing.assert_close(scores[b].double(), want, rtol=1e-5, atol=1e-6)
        store.append(k[:, :, :9], v[:, :, :9], [0, 4, 0])
    assert ops.causal_attention(store, *nothing, **softmax).shape == (3, 2, 2, 0, 16)


WRONG = {
    "v (1, 2, 5, 16); both must be (1, 2, 6, 16)": lambda q, k, v: {"v": v[:, :, :5]},
    "k is (1, 1, 6, 16)": lambda q, k, v: {"k": k[:, :1]},
    "k torch.bfloat16 (1, 2, 6, 16) on cpu": lambda q, k, v: {"k": k.bfloat16()},
    "v torch.float32 (1, 2, 6, 16) on meta": lambda q, k, v: {"v": v.to("meta")},
    "with a gradient": lambda q, k, v: {"q": q.clone().requires_grad_()},
    "softcap = -1 must be positive": lambda q, k, v: {"softcap": -1},
    "sinks is torch.float32 (2,) on cpu": lambda q, k, v: {"sinks": torch.ones(2)},
    "n must be from 1 to m": lambda q, k, v: {"k": k[:, :, :2], "v": v[:, :, :2]},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_refused(message):
    q, k, v = draw(1, 2, 2, 6, 6, 16, torch.float32)
    refuses(lambda: attend(**{"q": q, "k": k, "v": v, "scale": 1.0, **WRONG[message](q, k, v)}), re.escape(message))


def test_the_library_validates_before_it_follows_an_address():
    x = torch.zeros(4, 16)
    right = dict.fromkeys(("q", "k", "v", "y"), x.data_ptr()) | dict.fromkeys(("B", "H", "G", "n", "m"), 1) | {"D": 16}
    for message, wrong in {
        "B, H and G must be at least 1": {"G": 0},
        "D must be from 1 to 576": {"D": 577},
        "n must be from 1 to m": {"n": 2},
        "and m below 2^31": {"m": 2**31},
        "dtype is unknown": {"dtype": 3},
        "q, k, v or y is NULL": {"y": None},
        "not aligned to its elements": {"v": x.data_ptr() + 2},
        "sinks is not aligned": {"sinks": x.data_ptr() + 1},
        "v or y is NULL": {"v": None, "y": None},
        "received is not aligned": {"received": x.data_ptr() + 2, "parts": 1},
        "parts must be at least 1 with `received`, or else 0": {"parts": 1},
        "parts must be at least 1": {"received": x.data_ptr()},
    }.items():
        op = CPrompt(**right | wrong)
        error = library.library().skimkv_prompt_attention_run(ctypes.addressof(op), 1, None)
        assert error is not None and message in error.decode()
    assert b"operation is NULL" in library.library().skimkv_prompt_attention_run(None, 1, None)
    op = CPrompt(**right)
    assert library.library().skimkv_prompt_attention_run(ctypes.addressof(op), *library.threads()) is None
