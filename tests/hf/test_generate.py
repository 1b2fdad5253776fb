"""At full budget generate() gives the tokens of the model's own attention, whatever the model and the mode."""

import contextlib
import copy
import functools

import pytest
import torch
from transformers import DynamicCache

import skimkv
from support.generation import (
    MODES,
    N,
    assisted,
    beam,
    chunks,
    forward,
    greedy,
    lookup,
    padding,
    sampling,
)  # fmt: skip
from support.tiny_models import WITH_FULL_ATTENTION, family, prompt, with_slow

# Every position fits the budget, so these compute dense attention in another way.
FULL = ["SparQ(r=4, k=128)", "TopK(k=128)", "LMInfinite(k=128)", "H2O(k=128)", "SubGen(k=64, recent=128)"]


def library_answer(model, mode):
    return mode(model, lambda: DynamicCache(config=model.config)).tolist()


@functools.cache
def expected(name, mode):
    """The answer of the model's own attention."""
    return library_answer(family(name), mode)


def compare(name, mode, spec):
    """Raise unless the method gives the answer of the model's own attention."""
    model, caches = family(name), []
    answer = expected(name, mode)  # before the model is touched
    with torch.no_grad():
        got = mode(model, lambda: caches.append(skimkv.Cache(model, spec)) or caches[-1])
    skimkv.detach(model)
    assert got.tolist() == answer
    assert (caches and all(cache.get_seq_length() > N for cache in caches)) or mode is forward


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("name", with_slow(WITH_FULL_ATTENTION, quick=("llama", "gemma2")))
def test_dense_is_the_models_own_attention(name, mode):
    compare(name, mode, "Dense()")
    assert library_answer(family(name), mode) == expected(name, mode), "detach must leave the model as it was"


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize(
    ("name", "spec"),
    [
        *((name, spec) for name in ("llama", "gemma2") for spec in FULL),
        *(pytest.param("gpt2", spec, marks=pytest.mark.slow) for spec in FULL),
    ],
)
def test_every_method_at_full_budget(name, spec, mode):
    compare(name, mode, spec)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_quantised_rows_are_near_and_assisted_decoding_is_greedy(name):
    """The logits' error grows with the quantisation step, 17 times as large in 4 bits; drafts change no token."""
    model, ids = family(name), prompt(1, N)
    with torch.no_grad():
        expected = model(ids).logits[:, -6:].log_softmax(-1)
        for method in (skimkv.Dense, functools.partial(skimkv.H2O, 128)):
            errors = []
            for kv in ("int8", "int4"):
                cache = skimkv.Cache(model, method(kv=kv))
                model(ids[:, : N - 5], past_key_values=cache)
                logits = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(N - 5, N)]
                errors.append((torch.cat(logits, 1).log_softmax(-1) - expected[:, 1:]).square().mean().sqrt())
                a, b = (mode(model, lambda: skimkv.Cache(model, method(kv=kv))).tolist() for mode in (greedy, assisted))  # noqa: B023
                assert a == b and a[0][:N] == ids[0].tolist()
            assert errors[0] < 0.02 * expected.std() and 8 < errors[1] / errors[0] < 40, errors
    skimkv.detach(model)


@pytest.mark.parametrize("name", with_slow(WITH_FULL_ATTENTION))
def test_attach_inserts_the_cache(name):
    """Where the caller gives no cache, generate() makes ours; after the block the model is as it was."""
    model = family(name)
    skimkv.detach(model)  # tests share the model, and some leave it attached
    for mode in (greedy, sampling, padding, beam, assisted, lookup, chunks):
        expected = mode(model, lambda: None)
        with skimkv.attach(model, skimkv.SparQ(r=4, k=128)) as attached:
            assert attached.method == skimkv.SparQ(r=4, k=128)
            out = mode(model, lambda: None)
        assert out.tolist() == expected.tolist(), mode.__name__
    assert model.config._attn_implementation == ("eager" if name in ("gemma2", "gpt_oss") else "sdpa")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    """Other dtypes: the same logits to the dtype's rounding, prompt and decoded token."""
    model = copy.deepcopy(family("llama")).to(dtype)
    ids = prompt(1, N)
    # there is no kernel for float64, the oracle's dtype
    backend = skimkv.backend("ref") if dtype == torch.float64 else contextlib.nullcontext()
    with torch.no_grad(), backend:
        expected = model(ids).logits[:, -5:]
        cache = skimkv.Cache(model, "SparQ(r=16, k=128)")
        model(ids[:, : N - 4], past_key_values=cache)
        got = torch.cat([model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(N - 4, N)], 1)
    bound = 20 * torch.finfo(dtype).eps * expected.abs().max()
    assert (got - expected[:, 1:]).abs().max() < bound
    assert cache.layers[0].store.dtype == dtype
