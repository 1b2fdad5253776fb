"""The logits of one token after the other, by steps that keep what stays the same: those of steps that stand alone."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import skimkv
from skimkv.hf.angles import AngleTable
from skimkv.hf.cache_step import CacheStep
from skimkv.hf.next_logits import NextLogits
from support.kernels import NATIVE
from support.tiny_models import new_family, prompt

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native library is not built")

N, STEPS = 20, AngleTable.AT_ONCE + 20
KEPT = [
    "Dense", "Dense(kv='int8')", "Dense(kv='int4')", "SparQ(r=4, k=8)", "SparQ(r=4, k=8, channels='int8')",
    "Skim(r=4, k=8)", "H2O(k=30)", "LMInfinite(k=24)", "LMInfinite(k=24, positions='cache')", "SubGen(k=12)",
    "TOVA(k=30)", "Quest(k=8, page=4)", "StreamingLLM(k=24)",
]  # fmt: skip
ATTENDING = ["SubGenStream(t=4, s=4, delta=0.5)", "Skim(r=4, k=8, error=0.1)"]  # which have no kernel for a step


@pytest.fixture
def kept(monkeypatch):
    """Whether each step after another could keep what was prepared."""
    found, begin = [], CacheStep.begin_next
    monkeypatch.setattr(CacheStep, "begin_next", lambda self: found.append(begin(self)) or found[-1])
    return found


class Text:
    """A text that grows by the tokens that it is given: the logits of each by NextLogits, and by steps on their own."""

    def __init__(self, model, spec, rows=1, mask=None):
        self.model, self.mask = model, mask
        self.caches = [skimkv.Cache(model, spec, max_tokens=160) for _ in range(2)]
        self.next_logits, self.n = NextLogits(model), N
        self.known = []  # whether each step knew the most likely token
        with torch.no_grad():
            for cache in self.caches:
                model(prompt(rows, N), past_key_values=cache, attention_mask=mask)

    def add(self, tokens):
        """Take tokens (B,n) one by one, and compare."""
        for column in tokens.split(1, 1):
            inputs = {"position_ids": torch.full((1, 1), self.n)}
            if self.mask is not None:
                self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], 1)
                inputs = {"attention_mask": self.mask, "position_ids": self.mask.sum(1, keepdim=True) - 1}
            with torch.no_grad():
                found = self.next_logits(column, past_key_values=self.caches[0], use_cache=True, **inputs)
                alone = self.model(column, past_key_values=self.caches[1], **inputs).logits[:, -1]
            assert torch.equal(found.logits, alone), self.n
            self.known.append(found.most_likely is not None)
            if self.known[-1]:
                assert found.most_likely.tolist() == alone.argmax(-1, keepdim=True).tolist()
            self.n += 1


@pytest.mark.slow
@pytest.mark.parametrize("spec", KEPT + ATTENDING)
def test_the_same_as_steps_on_their_own(spec, kept):
    """Over new memory of the stores, and new angles; the first step looks, and the second prepares."""
    Text(new_family("llama"), spec).add(prompt(1, STEPS, seed=1))
    if spec in ATTENDING:
        assert not any(kept)
    else:
        assert len(kept) == STEPS - 2 and kept.count(False) <= 3


def test_padded_rows(kept):
    mask = torch.ones(3, N, dtype=torch.long)
    mask[0, :5] = 0
    Text(new_family("llama"), "SparQ(r=4, k=8)", 3, mask).add(prompt(3, 30, seed=1))
    assert len(kept) == 28 and all(kept)


def test_layers_that_the_library_caches(kept):
    text = Text(new_family("gemma3"), "SparQ(r=4, k=8)")
    text.add(prompt(1, 30, seed=1))
    assert len(kept) == 28 and all(kept)
    assert text.known == [False] + [True] * 29  # the first goes by the model's own forward


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("rows", [1, 3])
def test_embeddings_and_logits_by_matrices_of_every_kind(weights, rows):
    model, _ = skimkv.load("builtin", weights=weights)
    text = Text(model, "Dense", rows)
    text.add(prompt(rows, 6, seed=1))
    assert text.known == [False] + [True] * 5


def test_logits_that_pytorch_computes(monkeypatch):
    """Of a last layer for which the library has no product: then modules embed, and give the logits."""
    model = new_family("llama")
    model.lm_head = torch.nn.utils.parametrizations.weight_norm(model.lm_head)
    text = Text(model, "Dense")
    text.add(prompt(1, 6, seed=1))
    assert not any(text.known)


@pytest.mark.parametrize("spec", ["Dense", "H2O(k=30)"])
def test_what_others_do_with_the_cache_between_two_tokens(spec, kept):
    text = Text(new_family("llama"), spec)
    text.add(prompt(1, 8, seed=1))
    with torch.no_grad():
        for cache in text.caches:  # several tokens, which are no step
            text.model(prompt(1, 5, seed=2), past_key_values=cache)
    text.n += 5
    text.add(prompt(1, 8, seed=3))
    if spec == "Dense":
        for cache in text.caches:
            cache.crop(-4)
        text.n -= 4
        text.add(prompt(1, 8, seed=4))
    assert kept.count(False) == (2 if spec == "Dense" else 1)
    for cache in text.caches:
        cache.reorder_cache(torch.tensor([0]))
    text.add(prompt(1, 4, seed=5))


def test_another_cache(kept):
    """It is not what the loops do, and gives the right logits."""
    one, other = (Text(new_family("llama"), "SparQ(r=4, k=8)") for _ in range(2))
    one.add(prompt(1, 6, seed=1))
    other.model, other.next_logits = one.model, one.next_logits
    other.caches = [skimkv.Cache(one.model, "Dense", max_tokens=160) for _ in range(2)]
    with torch.no_grad():
        for cache in other.caches:
            one.model(prompt(1, N), past_key_values=cache)
    other.add(prompt(1, 6, seed=1))


def test_a_store_that_a_thread_uses(kept):
    text = Text(new_family("llama"), "SparQ(r=4, k=8)")
    text.add(prompt(1, 6, seed=1))
    (store, *_) = text.caches[0].stores
    with store.exclusive(), pytest.raises(RuntimeError, match="another thread"), torch.no_grad():
        text.next_logits(prompt(1, 1), past_key_values=text.caches[0], use_cache=True)
    assert not kept[-1] and all(store.exclusive().begin_if_free() for store in text.caches[0].stores)


def test_the_cache_ends_with_the_loop():
    text = Text(new_family("llama"), "SparQ(r=4, k=8)")
    text.add(prompt(1, 6, seed=1))
    cache = weakref.ref(text.caches[0])
    del text
    gc.collect()
    assert cache() is None
