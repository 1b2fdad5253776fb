"""Positions: what happens past those of a model, and LMInfinite(positions="cache"), which never goes past them."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch

import skimkv
from skimkv.eval import generate as generation
from skimkv.hf.positions import GREATEST_POSITION, check_length, positions_of
from skimkv.hf.rotary import key_rotations
from skimkv.methods import Dense
from support.generation import GREEDY, draft_of
from support.refusals import refuses
from support.tiny_models import build, prompt, tokenizer

GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
CACHE = "LMInfinite(k=9, initial=3, positions='cache')"


@torch.no_grad()
def test_drafts_and_crop():
    model, ids = build("llama", **GROUPED), prompt(1, 24)
    tokens = model.generate(ids, past_key_values=skimkv.Cache(model, CACHE), **GREEDY)
    for options in ({"assistant_model": draft_of(model)}, {"prompt_lookup_num_tokens": 4}):
        drafted = model.generate(ids, past_key_values=skimkv.Cache(model, CACHE), **options, **GREEDY)
        assert drafted.tolist() == tokens.tolist()
    cache = skimkv.Cache(model, CACHE)
    model(ids, past_key_values=cache)
    refuses(lambda: cache.crop(-1), "drops tokens; 1 cannot be forgotten")


@torch.no_grad()
@pytest.mark.parametrize("spec", ["StreamingLLM(k=1.0)", "LMInfinite(k=1.0, positions='cache')"])
def test_a_budget_of_the_whole_prompt_counts_in_the_cache_too(spec):
    """It drops its first token after the prompt, and turns keys from there on as any other budget does."""
    model, ids = build("llama", **GROUPED), prompt(1, 24)
    same = spec.replace("1.0", "24")
    expected = model.generate(ids, past_key_values=skimkv.Cache(model, same), **GREEDY)
    assert model.generate(ids, past_key_values=skimkv.Cache(model, spec), **GREEDY).tolist() == expected.tolist()
    refuses(lambda: skimkv.Cache(build("gpt2"), spec), "no rotary position embeddings")


def test_models_that_cannot_turn_their_keys_are_refused():
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    ministral = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1}}
    for model, why in (
        (build("gpt2"), "no rotary position embeddings"),
        (build("llama", **GROUPED, rope_parameters=dynamic), "'dynamic'.* change with the length"),
        (build("llama", **GROUPED, **ministral), "scales its queries"),
    ):
        for call in (skimkv.attach, skimkv.Cache):
            before = dict(model.__dict__)
            refuses(
                lambda call=call, model=model: call(model, CACHE), f"{type(model).__name__}: .*{why}.*use LMInfinite"
            )
            assert model.__dict__ == before, "a refused model is left as it was"


def test_a_model_that_turns_its_keys_in_another_way_is_refused(monkeypatch):
    model = build("llama", **GROUPED)
    source = sys.modules[type(model).__module__]
    own = source.apply_rotary_pos_emb
    monkeypatch.setattr(source, "apply_rotary_pos_emb", lambda q, k, cos, sin: own(q, k, cos, -sin))
    refuses(lambda: skimkv.Cache(model, CACHE), "the keys of layer 0 are not turned")
    monkeypatch.undo()
    skimkv.Cache(model, CACHE)
    model.model.rotary_emb.inv_freq *= 0.5  # found again, and not remembered
    assert torch.equal(key_rotations(model)[0].frequencies, model.model.rotary_emb.inv_freq.double())


@torch.no_grad()
def test_past_the_positions_warns_once_for_each_model():
    for method in ("Dense()", "H2O(k=8)", "LMInfinite(k=20)"):
        model = build("llama", **GROUPED)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache = skimkv.Cache(model, method)
            model(prompt(1, 160), past_key_values=cache)
        with pytest.warns(UserWarning, match="161 tokens go past the 160 positions .* LlamaForCausalLM") as caught:
            model(prompt(1, 1), past_key_values=cache)
        assert len(caught) == 1 and "\n" not in str(caught[0].message)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(prompt(1, 1), past_key_values=cache)
            model(prompt(1, 200), past_key_values=skimkv.Cache(model, method))
    model = build("llama", **GROUPED)
    with skimkv.attach(model, "Dense()", compile="eager"), pytest.warns(UserWarning, match="161 tokens go past"):
        model.generate(prompt(1, 159), max_new_tokens=3, do_sample=False)
    model = build("llama", **GROUPED)
    with skimkv.attach(model, "TopK(k=4)"), pytest.warns(UserWarning, match="170 tokens go past"):
        model.generate(prompt(1, 170), **GREEDY)


@torch.no_grad()
def test_positions_in_the_cache_do_not_go_past_the_models():
    model = build("llama", **GROUPED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = skimkv.Cache(model, CACHE)
        sizes = []
        for block in (100, 100, *[1] * 20, 151):  # 9 are kept: 160 positions
            model(prompt(1, block), past_key_values=cache)
            sizes.append((cache.nbytes, cache.allocated))
        assert len(set(sizes)) == 1 and cache.get_seq_length() == 371
    with pytest.warns(UserWarning, match="161 tokens go past"):
        model(prompt(1, 152), past_key_values=cache)


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
@torch.no_grad()
def test_learned_positions_end_in_one_line(kind):
    model = build(kind, **({"ffn_dim": 96, "word_embed_proj_dim": 64} if kind == "opt" else {}))
    assert positions_of(model).table == 160
    with skimkv.attach(model, "Dense()"):
        refuses(lambda: model.generate(prompt(1, 161), **GREEDY), "161 tokens exceed the 160 positions")
        refuses(lambda: model.generate(prompt(1, 150), **GREEDY), "161 tokens exceed the 160 positions")
        whole = model.generate(prompt(1, 150), max_new_tokens=11, do_sample=False)
        assert whole.shape[1] == 161, "the last token is not fed"
    check_length(model, 160)
    refuses(lambda: check_length(model, 161), "161 tokens do not fit the 160 positions")
    cache = skimkv.Cache(model, "H2O(k=8)")
    model(prompt(1, 160), past_key_values=cache)
    refuses(lambda: model(prompt(1, 1), past_key_values=cache), "161 tokens exceed")
    skimkv.detach(model)
    assert not model._forward_pre_hooks and not model._forward_pre_hooks_with_kwargs
    with pytest.raises(IndexError):
        model(prompt(1, 161))


@pytest.mark.parametrize("compiled", [False, "eager"])
@torch.no_grad()
def test_a_text_whose_positions_begin_anew_stays_within_a_table(compiled):
    """200 tokens at positions 0 to 99, twice."""
    model, ids = build("gpt2"), prompt(1, 200)
    positions = torch.arange(100).repeat(2)[None]
    expected = model(ids, position_ids=positions).logits[:, 150:]
    with skimkv.attach(model, "Dense()", compile=compiled):
        cache = skimkv.Cache(model, "Dense()")
        model(ids[:, :150], position_ids=positions[:, :150], past_key_values=cache)
        steps = [
            model(ids[:, i : i + 1], position_ids=positions[:, i : i + 1], past_key_values=cache).logits
            for i in range(150, 200)
        ]
        torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=1e-4, atol=1e-4)
        refuses(lambda: model(ids[:, :1], past_key_values=cache), "201 tokens exceed the 160 positions")
        far = torch.tensor([[160]])
        refuses(lambda: model(ids[:, :1], position_ids=far, past_key_values=cache), "161 tokens exceed")


def test_generated_text_ends_with_a_table_of_positions():
    model, ids = build("gpt2"), prompt(1, 150)[0].tolist()
    with pytest.warns(UserWarning, match="GPT2LMHeadModel has 160 positions: at most 11 tokens follow"):
        assert generation.run(model, tokenizer(), ids, Dense(), 40).new_tokens == 11
    with pytest.warns(UserWarning, match="161 tokens go past the 160 positions"):
        assert generation.run(build("llama", **GROUPED), tokenizer(), ids, Dense(), 40).new_tokens == 40


def test_positions_that_float32_cannot_tell_apart_are_refused():
    model = build("llama", **GROUPED)
    cache = skimkv.Cache(model, CACHE)
    model(prompt(1, 20), past_key_values=cache)
    for layer in cache.layers:
        layer.seen = GREATEST_POSITION
        layer.store.lengths = [GREATEST_POSITION]
    refuses(lambda: model(prompt(1, 1), past_key_values=cache), "begin a new cache")
