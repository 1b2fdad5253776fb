"""Caches that are saved and loaded: the text goes on as if they had stayed, and nothing else loads."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import skimkv
from skimkv.hf import saved_cache
from support.random_models import random_model, tiny_configuration
from support.refusals import refuses
from support.specs import EACH
from support.tiny_models import FAMILIES, build, family, prompt

N = 80


def tokens_after(model, cache, ids, steps=70):
    """The logits of greedy steps after the cached tokens: (B,steps,V)."""
    found, token = [], ids
    with torch.no_grad():
        for _ in range(steps):
            logits = model(token, past_key_values=cache).logits[:, -1:]
            found.append(logits)
            token = logits.argmax(-1)
    return torch.cat(found, 1)


def read(model, method, batch=2):
    """A cache that has read a prompt, and the next token of every row."""
    cache, ids = skimkv.Cache(model, method), prompt(batch, N)
    with torch.no_grad():
        logits = model(ids, past_key_values=cache).logits[:, -1:]
    return cache, logits.argmax(-1)


def opened(path):
    """The header and the tensors of a file."""
    with safe_open(path, "pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in [*file.keys()]}


@pytest.mark.slow
@pytest.mark.parametrize("method", EACH, ids=repr)
def test_a_text_goes_on(method, tmp_path):
    model, path = family("llama"), tmp_path / "prompt.safetensors"
    cache, token = read(model, method)
    tokens_after(model, cache, token, 3)
    cache.save(path)
    loaded = skimkv.Cache.load(path, model)
    assert repr(loaded.method) == repr(cache.method) and loaded.get_seq_length() == cache.get_seq_length()
    assert loaded.nbytes == cache.nbytes
    assert [(s.lengths, s.elements, s.bytes) for s in loaded.stores] == [
        (s.lengths, s.elements, s.bytes) for s in cache.stores
    ]
    assert torch.equal(tokens_after(model, loaded, token), tokens_after(model, cache, token))
    assert loaded.nbytes == cache.nbytes


@pytest.mark.filterwarnings("ignore:.*layers")
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt_oss", "qwen3_next", "falcon_h1", "lfm2"])
def test_layers_of_other_kinds(name, tmp_path):
    """Sliding layers that the library caches, sinks, linear attention, a state space beside attention, convolutions."""
    model = family(name) if name in FAMILIES else random_model(tiny_configuration(name))
    cache, token = read(model, "SparQ(r=4, k=8, channels='int4')")
    cache.save(tmp_path / "c")
    loaded = skimkv.Cache.load(tmp_path / "c", model)
    assert torch.equal(tokens_after(model, loaded, token, 20), tokens_after(model, cache, token, 20))


def test_padding_rows_and_generate(tmp_path):
    model, ids = family("llama"), prompt(2, N)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    cache = skimkv.Cache(model, "Skim(k=8)")
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    first = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=5, **settings)
    cache.save(tmp_path / "c", first[0].tolist())
    loaded = skimkv.Cache.load(tmp_path / "c", model, "Skim(k=8)", first[0].tolist())
    mask = torch.cat([mask, mask.new_ones(2, 5)], 1)
    outs = [
        model.generate(first, attention_mask=mask, past_key_values=one, max_new_tokens=9, **settings)
        for one in (cache, loaded)
    ]
    assert torch.equal(*outs)


def test_copies_and_caches_whose_model_is_gone(tmp_path):
    model = build("llama")
    cache, token = read(model, "TOVA(k=16)")
    twin, pickled = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    twin.save(tmp_path / "c")
    copy.copy(cache).save(tmp_path / "e")
    loaded = skimkv.Cache.load(tmp_path / "c", model)
    assert torch.equal(tokens_after(model, loaded, token, 5), tokens_after(model, cache, token, 5))
    with pytest.raises(ValueError, match="a cache that was pickled does not know its model"):
        pickled.save(tmp_path / "d")
    skimkv.detach(model)
    del model
    gc.collect()
    with pytest.raises(ValueError, match="the model of this cache is not in memory any more"):
        twin.save(tmp_path / "d")


def test_what_differs_is_named(tmp_path):
    model, path = family("llama"), tmp_path / "c"
    cache, _ = read(model, "Dense()")
    cache.save(path, [1, 2])
    other = build("llama")
    other.lm_head.weight.data += 1
    for load, words in (
        (
            lambda: skimkv.Cache.load(path, model, "SparQ(r=4, k=8)"),
            r"its method is 'Dense\(\)', not 'SparQ\(r=4, k=8\)'",
        ),
        (lambda: skimkv.Cache.load(path, model, tokens=[1, 3]), "its tokens is"),
        (lambda: skimkv.Cache.load(path, other), "its weights is"),
        (lambda: skimkv.Cache.load(path, family("qwen3")), "its model is 'LlamaForCausalLM', not 'Qwen3ForCausalLM'"),
        (lambda: skimkv.Cache.load(tmp_path / "none", model), "not a saved cache"),
    ):
        refuses(load, words)
    header, tensors = opened(path)
    for name, value in (("skimkv", "0.0.1"), ("transformers", "4.0"), ("dtype", "torch.float16"), ("format", "0")):
        save_file(tensors, tmp_path / "changed", header | {name: value})
        with pytest.raises(ValueError, match=f"its {name} is '{value}', not"):
            skimkv.Cache.load(tmp_path / "changed", model)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a saved cache"):
        skimkv.Cache.load(path, model)


def test_only_known_classes_are_made(tmp_path):
    model, path = family("llama"), tmp_path / "c"
    cache, _ = read(model, "Dense()")
    cache.save(path)
    header, tensors = opened(path)
    layers = json.loads(header["layers"])
    layers[0]["own"]["seen"] = {"kind": "Popen", "fields": {}}
    changed = json.dumps(layers)
    contents = saved_cache._contents(changed, [tensors[str(i)] for i in range(len(tensors))])
    save_file(tensors, path, header | {"layers": changed, "contents": contents})
    with pytest.raises(ValueError, match="not a saved cache: 'Popen'"):
        skimkv.Cache.load(path, model)


@pytest.mark.parametrize("method", ["SparQ(r=4, k=8, channels='int4')", "H2O(k=16)", "SubGen(k=8, recent=8)"])
def test_a_changed_file_is_refused(method, tmp_path):
    """A bit of any tensor, a number of tokens, or a tensor of another size: nothing of it reaches a kernel."""
    model, path = family("llama"), tmp_path / "c"
    cache, _ = read(model, method)
    cache.save(path)
    header, tensors = opened(path)
    changes = [(header | {"layers": header["layers"].replace(f"{N}", f"{10 * N}")}, tensors)]
    for name in list(tensors)[:6]:
        bit = tensors[name].clone()
        bit.view(torch.uint8).view(-1)[-1] ^= 1
        changes += [(header, tensors | {name: bit}), (header, tensors | {name: tensors[name].flatten()[:-1].clone()})]
    for described, changed in changes:
        save_file(changed, path, described)
        with pytest.raises(ValueError, match="c: damaged: it does not hold what was written"):
            skimkv.Cache.load(path, model)


def test_a_write_that_ends_early_leaves_what_was_there(tmp_path, monkeypatch):
    model, path = family("llama"), tmp_path / "c"
    cache, _ = read(model, "Dense()")
    cache.save(path)
    before = path.read_bytes()

    def full(*args):
        raise OSError("no space left")

    monkeypatch.setattr(saved_cache, "save_file", full)
    with pytest.raises(OSError, match="no space left"):
        cache.save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["c"]
    monkeypatch.undo()
    with pytest.raises(OSError, match="none/c: it cannot be written: "):
        cache.save(tmp_path / "none" / "c")


def test_after_an_interrupted_call_it_is_refused(tmp_path):
    """One layer has taken a token that the other never saw."""
    model = family("llama")
    cache, token = read(model, "H2O(k=16)", 1)

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    try:
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            model(token, past_key_values=cache)
    finally:
        hook.remove()
    refuses(lambda: cache.save(tmp_path / "c"), f"was interrupted: its layers have seen {N} to {N + 1} tokens")
    assert not [*tmp_path.iterdir()]


def test_in_the_middle_of_a_draft_it_is_refused(tmp_path):
    model = family("llama")
    cache, token = read(model, "H2O(k=16)", 1)
    cache.activate_past_recording()
    with torch.no_grad():
        model(token, past_key_values=cache)
    with pytest.raises(ValueError, match="layer 0 is in the middle of a prompt, or of a draft"):
        cache.save(tmp_path / "c")
