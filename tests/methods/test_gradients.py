"""Decode steps through which gradients flow: they are those of dense attention, and nothing is cut in silence."""

from __future__ import annotations

import warnings

import pytest
import torch

import skimkv
from skimkv.methods import base, parse
from skimkv.testing import SHAPE, Sequences, empty_store
from support.laws import FULL
from support.tiny_models import family


@pytest.fixture(autouse=True)
def _no_warning_yet():
    base._warn_of_gradients.cache_clear()
    base._warn_of_codes.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("spec", ["Dense()", *(spec for spec in FULL if "int" not in spec)])
def test_gradients_are_those_of_dense_attention(spec, backend):
    """A prompt of 12 tokens and 4 steps: the gradient of every q, k and v, and of the sinks."""
    x, method = Sequences.random(SHAPE, 16), parse(spec)
    own, exact = ([t.clone().double().requires_grad_() for t in x] for _ in range(2))
    sinks, exact_sinks = (torch.full((SHAPE.H, SHAPE.G), 1.5).requires_grad_() for _ in range(2))
    weight = torch.randn(4, *SHAPE, dtype=torch.float64)
    store = empty_store(method, SHAPE, torch.float64)
    q, k, v = own
    options = {"scale": 0.25, "sinks": sinks}
    method.prefill(store, q[..., :12, :], k[:, :, :12], v[:, :, :12], **options)
    y = torch.stack([method.decode(store, q[..., i, :], k[:, :, i], v[:, :, i], **options) for i in range(12, 16)])
    (y * weight).sum().backward()
    q, k, v = exact
    for i in range(12, 16):
        logits = q[..., i, :] @ k[:, :, : i + 1].transpose(-1, -2) * 0.25
        e = logits.exp()
        weights = e / (e.sum(-1, keepdim=True) + exact_sinks.double().exp()[..., None])
        (weights @ v[:, :, : i + 1] * weight[i - 12]).sum().backward()
    for mine, theirs in zip(own, exact, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(sinks.grad, exact_sinks.grad)


@pytest.mark.parametrize(
    "spec", ["H2O(k=6)", "H2O(k=6, local=0)", "TOVA(k=6)", "SnapKV(k=6)", "Quest(2, 6)", "Skim(k=2)", "SubGen(4, 3)"]
)
def test_one_backward_pass_goes_through_many_steps_that_drop_tokens(spec, backend):
    x, method = Sequences.random(SHAPE, 24), parse(spec)
    q, k, v = (t.clone().requires_grad_() for t in x)
    store = method.store(SHAPE, torch.float32)
    method.prefill(store, q[..., :12, :], k[:, :, :12], v[:, :, :12], scale=0.25)
    steps = [method.decode(store, q[..., i, :], k[:, :, i], v[:, :, i], scale=0.25) for i in range(12, 24)]
    torch.stack(steps).square().sum().backward()
    for grad in (q.grad[..., 12:, :], k.grad, v.grad):
        assert grad.isfinite().all() and grad.abs().max() > 0


def test_a_models_step_with_gradients_warns_once_and_trains():
    model = family("llama")
    ids = torch.arange(9)[None] % 60
    grads = []
    for cache in (skimkv.Cache(model, "SparQ(r=8, k=64)"), None):
        model.zero_grad()
        out = model(ids[:, :8], past_key_values=cache, use_cache=True)
        if cache is not None:
            with pytest.warns(UserWarning, match="no backward pass"):
                out = model(ids[:, 8:], past_key_values=cache)
        else:
            out = model(ids[:, 8:], past_key_values=out.past_key_values)
        assert out.logits.requires_grad
        out.logits.square().sum().backward()
        grads.append([layer.self_attn.q_proj.weight.grad.clone() for layer in model.model.layers])
        skimkv.detach(model)
    for mine, theirs in zip(*grads, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_codes_that_pass_no_gradient_on_say_so_once(kv, backend):
    x, method = Sequences.random(SHAPE, 6), parse(f"Dense(kv='{kv}')")
    q, k, v = (t.clone().requires_grad_() for t in x)
    store = method.store(SHAPE, torch.float32)
    words = f"kv='{kv}' keeps keys and values as codes"
    with pytest.warns(UserWarning, match=words) as said:
        y = [method.decode(store, q[..., i, :], k[:, :, i], v[:, :, i], scale=0.25) for i in range(6)]
    assert sum(words in str(warning.message) for warning in said) == 1
    torch.stack(y).square().sum().backward()
    assert q.grad is not None and (k.grad, v.grad) == (None, None)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        method.decode(store, q[..., 0, :], k[:, :, 0], v[:, :, 0], scale=0.25)


def test_without_gradients_the_kernel_computes():
    x, method = Sequences.random(SHAPE, 5), parse("Dense()")
    store = method.store(SHAPE, torch.float32)
    method.prefill(store, x.q.requires_grad_(), x.k, x.v, scale=0.25)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        y = method.decode(store, x.q[..., 0, :], x.k[:, :, 0], x.v[:, :, 0], scale=0.25)
    assert not y.requires_grad
    assert torch.isfinite(y).all()
