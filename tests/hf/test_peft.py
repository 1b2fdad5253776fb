"""Models of PEFT: adapters that change weights or add tokens decode with a method; learned prefixes are refused."""

import copy
import re
from pathlib import Path

import peft
import pytest
import torch

import skimkv
from support.generation import GREEDY, N, draft_of
from support.tiny_models import family, padded, prompt

FULL = ["Dense()", "SparQ(r=4, k=128)", "H2O(k=128)"]  # every position fits the budget
DROPS = "LMInfinite(k=4, initial=1)"


def own_llama():
    """A model of the test's own, on which nothing of another test's caches is left."""
    model = copy.deepcopy(family("llama"))
    skimkv.detach(model)
    return model


def lora():
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def tokens(model, **options):
    inputs = {"input_ids": prompt(1, N), **GREEDY, **options}
    return model.generate(**inputs).tolist()


def same_at_full_budget(model):
    """Assert that methods of that budget leave the adapter's tokens as they are, which are not the model's own."""
    own = tokens(model)
    assert own != tokens(family("llama"))
    for spec in FULL:
        with skimkv.attach(model, spec):
            assert tokens(model) == own, spec
    return own


@pytest.fixture
def model():
    """A LoRA model with two adapters, of which the first is active."""
    model = peft.get_peft_model(own_llama(), lora(), adapter_name="first")
    model.add_adapter("second", lora())
    return model.eval()


def with_virtual_tokens(config):
    """A model whose adapter puts five learned tokens, or their keys and values, before the text."""
    model = peft.get_peft_model(own_llama(), config)
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in model.prompt_encoder.parameters():
            weight.normal_()
    return model.eval()


OPTIONS = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 5}
PREFIX = peft.PrefixTuningConfig(**OPTIONS)


@pytest.mark.parametrize("spec", FULL)
def test_lora_at_full_budget(model, spec):
    own, batch = tokens(model), padded([N, 13])
    own_batch = tokens(model, **batch)
    assert own != tokens(family("llama")), "the adapter must matter"
    with skimkv.attach(model, spec):
        assert tokens(model) == own
        assert tokens(model, **batch) == own_batch
    cache = skimkv.Cache(model, spec)
    assert tokens(model, past_key_values=cache) == own
    assert cache.get_seq_length() == N + GREEDY["max_new_tokens"] - 1
    skimkv.detach(model)


def test_the_method_decodes_and_leaves_no_trace(model):
    inner = model.get_base_model()
    clean, own = dict(inner.__dict__), tokens(model)
    with skimkv.attach(model, DROPS):
        dropped = tokens(model)
    assert dropped != own
    assert tokens(model, past_key_values=skimkv.Cache(model, DROPS)) == dropped
    skimkv.detach(model)
    assert tokens(model) == own
    assert set(inner.__dict__) == set(clean)


@pytest.mark.slow
@pytest.mark.parametrize("spec", FULL)
def test_adapters_are_switched_mixed_disabled_and_merged(model, spec):
    def answers():
        ids = prompt(2, N)
        for name in ("second", "first"):
            model.set_adapter(name)
            yield tokens(model)
        yield tokens(model, input_ids=ids, adapter_names=["first", "second"])
        with model.disable_adapter():
            yield tokens(model)
        model.merge_adapter()
        yield tokens(model)
        model.unmerge_adapter()

    own = list(answers())
    assert own[0] != own[1] != own[3] != own[0]
    assert own[3] == tokens(family("llama"))
    with skimkv.attach(model, spec):
        assert list(answers()) == own
    merged = model.merge_and_unload()
    with skimkv.attach(merged, spec):
        assert tokens(merged) == own[1]


@pytest.mark.slow
def test_a_compiled_step_follows_the_adapter(model):
    own = {}
    for name in ("first", "second"):
        model.set_adapter(name)
        own[name] = tokens(model)
    with skimkv.attach(model, "SparQ(r=4, k=128)", compile="eager"):
        for name in ("first", "second", "first"):
            model.set_adapter(name)
            assert tokens(model) == own[name]


def test_adapters_of_transformers_itself():
    model = own_llama()
    model.add_adapter(lora(), "first")
    assert same_at_full_budget(model)


def test_other_kinds_of_adapters():
    options = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "k_proj"], "r": 4, "init_weights": False}
    for config in (peft.LoHaConfig(**options), peft.OFTConfig(**{**options, "r": 0, "oft_block_size": 8})):
        assert same_at_full_budget(peft.get_peft_model(own_llama(), config).eval()), config.peft_type
    mixed = peft.get_peft_model(own_llama(), lora(), mixed=True).eval()
    own = tokens(mixed)
    assert tokens(mixed, past_key_values=skimkv.Cache(mixed, "H2O(k=128)")) == own


def test_a_lora_model_drafts_and_verifies(model):
    own = tokens(model)
    with skimkv.attach(model, "H2O(k=128)"):
        assert tokens(model, assistant_model=draft_of(family("llama"))) == own
        assert tokens(model, prompt_lookup_num_tokens=4) == own


@pytest.mark.parametrize(
    "config",
    [peft.PromptTuningConfig(**OPTIONS), peft.PromptEncoderConfig(**OPTIONS, encoder_hidden_size=16)],
    ids=["prompt tuning", "p-tuning"],
)
def test_virtual_tokens_at_full_budget(config):
    model = with_virtual_tokens(config)
    own, together = same_at_full_budget(model), tokens(model, input_ids=prompt(2, N))
    for spec in FULL:
        with skimkv.attach(model, spec):
            assert tokens(model, input_ids=prompt(2, N)) == together
        cache = skimkv.Cache(model, spec)
        assert tokens(model, past_key_values=cache) == own
        assert cache.get_seq_length() == 5 + N + GREEDY["max_new_tokens"] - 1
    with pytest.raises(
        ValueError, match=r"counts its virtual tokens as tokens of the text.* this one holds 48 tokens$"
    ):
        tokens(model, input_ids=torch.cat([torch.tensor(own), prompt(1, 9)], 1), past_key_values=cache)
    cache.reset()
    with pytest.raises(ValueError, match=r"_TUNING puts its virtual tokens before the padding.* one at a time$"):
        tokens(model, **padded([N, 9]), past_key_values=cache)
    skimkv.detach(model)


def test_learned_prefixes_are_refused():
    """PEFT puts a cache of its own in the place of the one that generate() was given, without a word."""
    model = with_virtual_tokens(PREFIX)
    inner, own = model.get_base_model(), tokens(model)
    refusal = r"^PeftModelForCausalLM is not supported while its active adapter is of type PREFIX_TUNING: .*skimkv's$"
    for call in (skimkv.attach, skimkv.Cache):
        with pytest.raises(ValueError, match=refusal):
            call(model, "Dense()")
    assert "_skimkv" not in inner.__dict__
    for options in ({}, {"past_key_values": skimkv.Cache(inner, "Dense()")}):
        with skimkv.attach(inner, "Dense()"), pytest.raises(ValueError, match=refusal):
            tokens(model, **options)
        skimkv.detach(model)
    assert tokens(model) == own
    with model.disable_adapter(), skimkv.attach(model, "H2O(k=128)"):
        assert tokens(model) == tokens(family("llama"))


def test_skimkv_does_not_import_peft():
    source = Path(skimkv.__file__).parent
    found = [p.name for p in source.rglob("*.py") if re.search(r"^\s*(import|from) peft", p.read_text(), re.M)]
    assert found == []
