"""Model families: hybrids of attention and states, and what is refused; all families where it is slow."""

import copy
from pathlib import Path

import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.generation import candidate_generator

import skimkv
from benchmarks.models import GREEDY, PROMPT, prompt, run, run_all, to_json, to_markdown
from skimkv.eval.answer import Question, answer_questions
from skimkv.eval.shared_prompt import copy_rows, record_prompt
from skimkv.eval.traffic import RowCosts, cache_traffic
from skimkv.hf.families import DIFFERS, EQUAL, PARTLY, Family, counts, recorded, remarks
from skimkv.hf.layer import Layer
from skimkv.hf.states import state_tensors
from skimkv.hf.supported import attends, describe_layers, model_layers
from support.generation import BATCH_CHANGES
from support.random_models import random_model, tiny_configuration
from support.refusals import refuses
from support.tiny_models import tokenizer

# With scikit-learn transformers adapts a draft's threshold, which fails on some models of one kind of layer.
candidate_generator.is_sklearn_available = lambda: False

ROOT = Path(__file__).parents[2]

# Convolutions; gated delta rules; a state space beside attention in the same layer.
HYBRIDS = {"lfm2": (1, 2), "qwen3_next": (1, 4), "falcon_h1": (2, 2)}
every_hybrid = pytest.mark.parametrize("name", HYBRIDS)
models = {}


def tiny(name):
    if name not in models:
        models[name] = random_model(tiny_configuration(name))
        models[name].generation_config.eos_token_id = None
    return models[name]


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield
    for model in models.values():
        skimkv.detach(model)


@pytest.mark.slow
@every_hybrid
def test_hybrids_generate_the_tokens_of_their_own_attention(name):
    """Every method at full budget; with Dense also a padded batch, beams, a second turn and a prompt in chunks."""
    found = run(name)
    assert (found.decoded, found.layers) == HYBRIDS[name]
    assert (found.status, found.lacks) == (EQUAL if found.decoded == found.layers else PARTLY, []), found.why


@every_hybrid
def test_the_method_takes_effect_and_says_on_how_many_layers(name):
    model, (decoded, layers) = tiny(name), HYBRIDS[name]
    own = model.generate(prompt(1), **GREEDY).tolist()
    sentence = describe_layers(model_layers(model))
    cache = skimkv.Cache(model, "LMInfinite(k=2, initial=1)")
    assert len(cache.layers) == layers
    assert model.generate(prompt(1), past_key_values=cache, **GREEDY).tolist() != own
    assert len(cache.stores) == decoded
    if decoded == layers:
        assert sentence == f"the method decodes all {layers} layers"
        return
    assert sentence.startswith(f"the method decodes {decoded} of {layers} layers; the others are linear attention")
    with pytest.warns(UserWarning, match=f"decodes {decoded} of {layers} layers; the others are linear attention"):
        skimkv.Cache(copy.deepcopy(model), "Dense()")


@every_hybrid
def test_states_count_in_what_is_held_and_in_what_a_step_moves(name):
    model, costs = tiny(name), {}
    for spec in ("Dense()", "TopK(k=4)"):
        cache = skimkv.Cache(model, spec)
        model(prompt(2), past_key_values=cache)
        model(prompt(2, 1), past_key_values=cache)
        states = [state for layer in cache.layers for state in state_tensors(layer)]
        held, numbers = sum(state.nbytes for state in states), sum(state.numel() for state in states)
        assert held and cache.nbytes == held + sum(store.nbytes for store in cache.stores)
        steps = [cache.method.traffic(PROMPT, store.shape, torch.float32) for store in cache.stores]
        whole = cache_traffic(cache, steps_ago=1)
        assert whole.bytes == 2 * held + sum(step.bytes for step in steps)
        assert whole.elements == 2 * numbers + sum(step.elements for step in steps)
        costs[spec] = RowCosts(cache).step(0)
        assert 2 * costs[spec].bytes == whole.bytes
    assert costs["TopK(k=4)"].dense_bytes == costs["Dense()"].bytes > costs["TopK(k=4)"].bytes


@every_hybrid
def test_one_recorded_prompt_serves_two_methods_in_one_batch(name):
    """The answers are those that each method gives alone, from a prompt that it read itself."""
    model, questions = tiny(name), [Question(prompt(1, 6, 1)[0].tolist(), scored=5, new_tokens=4)]
    specs = ["Dense()", "TopK(k=4)"]
    recorded = record_prompt(model, prompt(1), new_tokens=10)
    caches = [recorded.cache(skimkv.methods.parse(spec)) for spec in specs]
    together = answer_questions(model, tokenizer(), caches, recorded.logits, questions)
    for spec, answers in zip(specs, together, strict=True):
        cache = skimkv.Cache(model, spec)
        logits = model(prompt(1), past_key_values=cache).logits[:, -1]
        for layer in cache.layers:
            if isinstance(layer, Layer):
                layer.prefill_until = PROMPT  # the question is decoded, and no second prompt
        alone = answer_questions(model, tokenizer(), [copy_rows(cache, [0])], logits, questions)
        assert answers[0].text == alone[0][0].text
        assert answers[0].bits == pytest.approx(alone[0][0].bits, rel=1e-4)
        assert answers[0].cost == alone[0][0].cost


@every_hybrid
def test_rows_are_selected_and_repeated(name):
    model, last = tiny(name), prompt(3, 1, 4)
    cache = skimkv.Cache(model, "H2O(k=12)")
    model(prompt(3), past_key_values=cache)
    expected = model(last, past_key_values=copy.deepcopy(cache)).logits
    for rows, change in BATCH_CHANGES.items():
        other = copy.deepcopy(cache)
        change(other)
        logits = model(last[list(rows)], past_key_values=other).logits
        torch.testing.assert_close(logits, expected[list(rows)], rtol=1e-4, atol=1e-4)
    rows = copy_rows(cache, [1, 1])
    model(last[[1, 1]], past_key_values=rows)
    torch.testing.assert_close(model(last, past_key_values=cache).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_states_that_cannot_go_back_are_not_cropped(name):
    model = tiny(name)
    cache = skimkv.Cache(model, "Dense()")
    assert not cache.is_croppable
    cache.crop(0)
    cache.activate_past_recording()
    model(prompt(1), past_key_values=cache)
    twin = copy.deepcopy(cache)
    refuses(lambda: cache.crop(-3), "cannot forget 3 tokens: this model has layers of linear")
    cache.crop(0)
    logits = [model(prompt(1, 1, 2), past_key_values=each).logits for each in (cache, twin)]
    assert torch.equal(*logits), "nothing was forgotten"
    refuses(lambda: model.generate(prompt(1), prompt_lookup_num_tokens=3, **GREEDY), "stateful")


def test_convolutions_go_back():
    """Assisted decoding crops at every step; what comes after it uses the same cache."""
    model, ids = tiny("lfm2"), prompt(1, 12).repeat(1, 2)
    own, ours = (lambda: DynamicCache(config=model.config)), (lambda: skimkv.Cache(model, "H2O(k=128)"))
    texts = []
    for make_cache in (own, ours):
        cache = make_cache()
        text = model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=4, **GREEDY)
        texts.append(model.generate(text, past_key_values=cache, **GREEDY).tolist())
    assert texts[0] == texts[1]
    cache = skimkv.Cache(model, "Dense()")
    cache.activate_past_recording()
    model(prompt(1), past_key_values=cache)
    cache.crop(-5)
    short = skimkv.Cache(model, "Dense()")
    model(prompt(1)[:, :-5], past_key_values=short)
    logits = [model(prompt(1, 1, 2), past_key_values=each).logits for each in (cache, short)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_reset_forgets_states():
    for name in HYBRIDS:
        model = tiny(name)
        cache = skimkv.Cache(model, "Dense()")
        model(prompt(2, seed=5), past_key_values=cache)
        cache.reset()
        again = model.generate(prompt(2), past_key_values=cache, **GREEDY)
        assert again.tolist() == model.generate(prompt(2), **GREEDY).tolist(), name


def test_refused_for_what_they_are():
    refuses(lambda: skimkv.Cache(tiny("mamba"), "Dense()"), "^MambaForCausalLM has no layer of full attention")
    for name in ("lfm2", "falcon_h1"):
        refuses(lambda name=name: skimkv.attach(tiny(name), "Dense()", compile="eager"), "compiled: not all of its")


def test_a_setting_that_differs_between_layers_is_read_layer_by_layer():
    """Where layers differ in a setting, reading it from the whole configuration raises the library's own error."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=97
    )
    model = LlamaForCausalLM(config)
    config.kv_lora_rank = None
    config.per_layer_config = {1: {"kv_lora_rank": 8}}
    with pytest.raises(RuntimeError, match="per-layer"):
        _ = config.kv_lora_rank
    refuses(lambda: model_layers(model), "one latent vector a token")


def test_images_make_blocks_in_the_mask():
    """A block of an image sees itself in both directions, which no method does; without one the mask is causal."""
    model, kinds = tiny("gemma4_unified"), torch.zeros(1, PROMPT, dtype=torch.long)
    with pytest.warns(UserWarning, match="1 of 2 layers"):
        cache = skimkv.Cache(model, "Dense()")
    expected = model(prompt(1), mm_token_type_ids=kinds).logits
    logits = model(prompt(1), mm_token_type_ids=kinds, past_key_values=cache).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    kinds[0, 3:9] = 1
    cache = skimkv.Cache(model, "Dense()")
    refuses(lambda: model(prompt(1), mm_token_type_ids=kinds, past_key_values=cache), "the model made a mask of shape")


def test_how_a_class_attends_is_read_from_its_code():
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
    from transformers.models.mpt.modeling_mpt import MptAttention
    from transformers.models.stablelm.modeling_stablelm import StableLmAttention

    kinds = [attends(kind) for kind in (LlamaAttention, StableLmAttention, MptAttention, LlamaMLP)]
    assert kinds == ["interface", "interface", "alone", None]


def test_the_page_shows_what_the_package_knows():
    """`python benchmarks/models.py` writes both."""
    record = recorded()
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    assert page.endswith("\n\n" + to_markdown(record))
    assert to_json(record) == (ROOT / "src/skimkv/hf/families.json").read_text(encoding="utf-8")
    assert counts(record)[DIFFERS] == 0
    assert {family.name for family in record.families if family.status == EQUAL} > {"llama", "stablelm", "falcon_h1"}
    for family in record.families:
        assert "\n" not in family.why and (family.why or family.status == EQUAL)
        assert family.status != PARTLY or 0 < family.decoded < family.layers
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    equal, partly = (counts(record)[status] for status in (EQUAL, PARTLY))
    assert f"{equal + partly} of {len(record.families)} families" in readme


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_family_of_the_installed_transformers():
    """What runs is what docs/models.md says; with another transformers, that no family gives other tokens."""
    known, found = recorded(), run_all()
    assert [family for family in found.families if family.status == DIFFERS] == []
    if transformers.__version__ == known.transformers:
        before = {family.name: family for family in known.families}
        differ = [(before.get(family.name), family) for family in found.families if before.get(family.name) != family]
        assert differ == [], "python benchmarks/models.py writes the lists anew"
        assert len(before) == len(found.families)


def test_remarks_are_whole_sentences():
    family = Family("x", "XForCausalLM", PARTLY, 1, 2, "the other layers slide", ["a prompt in chunks"])
    assert remarks(family) == "the other layers slide; the library itself cannot do this: a prompt in chunks"
