"""Models with attention sinks: at full budget every method gives the tokens of the model's own attention."""

import copy
import functools

import pytest
import torch
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import skimkv
from skimkv.hf.attention_interface import attention as attention_function
from skimkv.hf.layer import Layer
from skimkv.hf.sliding_layer import SlidingLayer
from support.generation import N, beam, chunks, padding
from support.tiny_models import build, padded, prompt

# Two layers of full attention, two sliding ones between them.
LAYERS = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 8,
    "num_key_value_heads": 2,
}
FAMILIES = {
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "flint": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "granite_swa": {"attention_multiplier": 0.25},
    "granitemoe_swa": {"attention_multiplier": 0.25, "num_local_experts": 4, "shared_intermediate_size": 32},
}
# One for each way to keep tokens; test_full_budget_equals_dense of methods/test_laws.py has every method with sinks.
METHODS = ["Dense()", "SparQ(r=4, k=128)", "LMInfinite(k=128)", "H2O(k=128)", "SubGen(k=64, recent=128)"]


@functools.cache
def model_of(kind):
    if kind not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this version of transformers has no {kind}")
    return build(kind, **LAYERS, **FAMILIES[kind])


@functools.cache
def expected(kind, mode):
    model = model_of(kind)
    return mode(model, lambda: DynamicCache(config=model.config)).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("spec", METHODS)
def test_every_method_at_full_budget(spec):
    """Batches with padding, beams, and a prompt in chunks."""
    model = model_of("gpt_oss")
    for mode in (padding, beam, chunks):
        answer = expected("gpt_oss", mode)
        assert mode(model, lambda: skimkv.Cache(model, spec)).tolist() == answer, mode.__name__
    cache = skimkv.Cache(model, spec)
    assert [type(layer) for layer in cache.layers] == [Layer, SlidingLayer, SlidingLayer, Layer]
    skimkv.detach(model)


def decoded_logits(model, cache, batch, first):
    """Logits of a padded batch, whose first tokens are the prompt and the others are fed one by one."""
    ids, mask, logits = batch["input_ids"], batch["attention_mask"], []
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for a, b in [(0, first), *((i, i + 1) for i in range(first, ids.shape[1]))]:
        place = {"attention_mask": mask[:, :b], "position_ids": positions[:, a:b]}
        logits.append(model(ids[:, a:b], past_key_values=cache, use_cache=True, **place).logits[:, -1])
    return torch.stack(logits).float()


@pytest.mark.parametrize("spec", METHODS)
def test_bfloat16_is_as_near_to_float32_as_the_library(spec):
    """Random weights make near ties, which bfloat16 decides by chance: the judge is the same model in float32."""
    model, batch = copy.deepcopy(model_of("gpt_oss")).bfloat16(), padded([40, 25, 33, 38])
    with torch.no_grad():
        exact, library = (
            decoded_logits(of, DynamicCache(config=of.config), batch, 30)
            for of in (copy.deepcopy(model).float(), model)
        )
        ours = decoded_logits(model, skimkv.Cache(model, spec), batch, 30)
    errors = [(logits - exact).square().mean().sqrt().item() for logits in (library, ours)]
    assert errors[1] < 1.25 * errors[0], errors


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "gpt_oss"])
def test_the_other_families(kind):
    model = model_of(kind)
    for mode in (padding, beam):
        answer = expected(kind, mode)
        for spec in ("Dense()", "SparQ(r=4, k=128)", "H2O(k=128)"):
            assert mode(model, lambda spec=spec: skimkv.Cache(model, spec)).tolist() == answer, (mode.__name__, spec)
    skimkv.detach(model)


def test_the_sinks_are_seen_and_must_be_passed():
    """Without weight on the sinks the logits are others; and a module that has sinks must not forget to pass them."""
    model, ids = model_of("gpt_oss"), prompt(1, N)
    with torch.no_grad():
        own = model(ids).logits
        logits = model(ids, past_key_values=skimkv.Cache(model, "Dense()", fast=False)).logits
        torch.testing.assert_close(logits, own, rtol=1e-4, atol=1e-4)
        attention = model.model.layers[0].self_attn
        before = attention.sinks.data.clone()
        attention.sinks.data.fill_(-torch.inf)
        other = model(ids, past_key_values=skimkv.Cache(model, "Dense()")).logits
        attention.sinks.data.copy_(before)
        assert (other - own).abs().max() > 0.01 * own.abs().max()
        cache = skimkv.Cache(model, "Dense()")
        q, k = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)
        cache.update(k, k.clone(), 0)
        with pytest.raises(ValueError, match=r"^skimkv: GptOssAttention has attention sinks and does not pass them"):
            attention_function("eager", attention, q, k, k, None, scaling=0.25)
        with pytest.raises(ValueError, match=r"^s_aux is \(3,\); must be one sink for each of 4 heads"):
            attention_function("eager", attention, q, k, k, None, scaling=0.25, s_aux=torch.zeros(3))
    skimkv.detach(model)


def test_a_compiled_step_passes_the_sinks():
    full = {**LAYERS, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    model, options = build("gpt_oss", **full, **FAMILIES["gpt_oss"]), {"max_new_tokens": 6, "do_sample": False}
    answer = model.generate(prompt(1, N), **options)
    with skimkv.attach(model, "H2O(k=128)", compile="eager"):
        assert torch.equal(model.generate(prompt(1, N), **options), answer)
