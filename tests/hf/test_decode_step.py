"""A decode step of all layers as one operation: it says the same, and what is more than a step goes layer by layer."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from transformers import (
    AttentionInterface,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import skimkv
from skimkv import ops
from skimkv.hf.decode_step import StepForward, replace_forward, restore_forward, step_forward
from skimkv.hf.weights import quantise
from skimkv.ops.cpu import layer_parts
from support.instruction_sets import NATIVE

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native library is not built")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "vocab_size": 300,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=None)),
    "mistral with a window": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=64)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES)),
}
METHODS = {
    "Dense": "Dense",
    "Dense with int8 rows": "Dense(kv='int8')",
    "SparQ": "SparQ(r=4, k=8)",
    "SparQ with int8 channels": "SparQ(r=4, k=8, channels='int8')",
    "Skim": "Skim(r=4, k=8)",
    "H2O": "H2O(k=12)",
    "LMInfinite": "LMInfinite(k=24)",
    "SubGen": "SubGen(k=12)",
}
DENSE = "Dense"


def random_model(family="llama", weights="bfloat16", dtype=torch.bfloat16):
    torch.manual_seed(0)
    kind, config = FAMILIES[family]
    model = kind(copy.deepcopy(config)).eval().requires_grad_(False)
    return quantise(model.to(dtype), weights)


def new_cache(model, spec=DENSE):
    return skimkv.Cache(model, spec, max_tokens=64)


def prompt(batch=1, n=20):
    return torch.arange(batch * n).view(batch, n) * 7 % 251


def after_prompt(model, spec=DENSE, batch=1):
    """A cache of a prompt and one token, whose next step repeats the last one."""
    cache = new_cache(model, spec)
    with torch.no_grad():
        model(prompt(batch), past_key_values=cache)
        model(prompt(batch, 1), past_key_values=cache)
    return cache


def logits(model, spec=DENSE, batch=1, steps=6, **kwargs):
    """The logits of a prompt and of single tokens after it."""
    cache, found, tokens = new_cache(model, spec), [], prompt(batch, 20 + steps)
    with torch.no_grad():
        for first, last in [(0, 20), *((20 + i, 21 + i) for i in range(steps))]:
            found.append(model(tokens[:, first:last], past_key_values=cache, **kwargs).logits)
    return torch.cat(found, 1)


@pytest.fixture
def steps_at_once(monkeypatch):
    """A list that grows by one with every step of all layers at once."""
    steps, call = [], layer_parts.Layers.__call__

    def counting(self, *args):
        steps.append(self)
        return call(self, *args)

    monkeypatch.setattr(layer_parts.Layers, "__call__", counting)
    return steps


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_says_the_same(family, method, steps_at_once):
    """For one row and for three; the first step of a cache goes layer by layer, and those after it repeat it."""
    for weights in ("bfloat16", "int8"):
        model = random_model(family, weights)
        for batch in (1, 3):
            steps_at_once.clear()
            ours = logits(model, METHODS[method], batch)
            assert len(steps_at_once) == 5
            restore_forward(model)
            assert torch.equal(ours, logits(model, METHODS[method], batch))
            assert len(steps_at_once) == 5
            replace_forward(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("weights", ["float32", "int4"])
def test_other_types(weights, dtype, steps_at_once):
    model = random_model("qwen3", weights, dtype)
    ours = logits(model)
    assert len(steps_at_once) == 5
    restore_forward(model)
    assert torch.equal(ours, logits(model))


@pytest.mark.parametrize("spec", ["Dense", "SparQ(r=4, k=8, channels='int8')", "H2O(k=12)"])
def test_generate_with_padding(spec, steps_at_once):
    """Rows of several lengths, with the masks and positions that generate() makes, in memory that has to grow."""
    model = random_model("llama")
    ids, mask = prompt(3), torch.ones(3, 20, dtype=torch.int64)
    mask[0, :7], mask[2, :1] = 0, 0
    settings = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 300, "pad_token_id": 0}
    with skimkv.attach(model, spec):
        ours = model.generate(ids, **settings)
        at_once = len(steps_at_once)
        assert 290 <= at_once <= 298, "the first step goes layer by layer, and so does one that needs more memory"
        restore_forward(model)
        assert torch.equal(ours, model.generate(ids, **settings))
        assert len(steps_at_once) == at_once


def test_arguments_of_a_step(steps_at_once):
    model = random_model()
    inner, one = model.model, torch.tensor([[3]])
    with torch.no_grad():
        expected = inner(input_ids=one, past_key_values=after_prompt(model))
        assert len(steps_at_once) == 1 and type(expected).__name__ == "BaseModelOutputWithPast"
        for kwargs in (
            {"input_ids": one, "position_ids": torch.tensor([[21]]), "attention_mask": torch.ones(1, 22)},
            {"inputs_embeds": inner.embed_tokens(one), "use_cache": True, "return_dict": True},
            {"input_ids": one, "attention_mask": torch.ones(1, 30, dtype=torch.bool), "output_attentions": False},
        ):
            steps_at_once.clear()
            cache = after_prompt(model)
            out = inner(past_key_values=cache, **kwargs)
            assert len(steps_at_once) == 1 and out.past_key_values is cache and cache.get_seq_length() == 22
            assert torch.equal(out.last_hidden_state, expected.last_hidden_state)
        steps_at_once.clear()
        shifted = inner(input_ids=one, past_key_values=after_prompt(model), position_ids=torch.tensor([[25]]))
        assert len(steps_at_once) == 1
        assert not torch.equal(shifted.last_hidden_state, expected.last_hidden_state)
        restore_forward(model)
        again = inner(input_ids=one, past_key_values=after_prompt(model), position_ids=torch.tensor([[25]]))
        assert torch.equal(shifted.last_hidden_state, again.last_hidden_state)


LAYER_BY_LAYER = {
    "a block of two": {"input_ids": torch.tensor([[3, 4]])},
    "hidden states": {"output_hidden_states": True},
    "a tuple": {"return_dict": False},
    "no cache": {"use_cache": False},
    "a keyword of a model's own": {"num_items_in_batch": 3},
}


@pytest.mark.parametrize("reason", LAYER_BY_LAYER)
def test_what_is_more_than_a_step_goes_layer_by_layer(reason, steps_at_once):
    model = random_model()
    kwargs = {"input_ids": torch.tensor([[3]])} | LAYER_BY_LAYER[reason]
    with torch.no_grad():
        found = model.model(past_key_values=after_prompt(model), **kwargs)
        assert not steps_at_once
        restore_forward(model)
        expected = model.model(past_key_values=after_prompt(model), **kwargs)
    assert torch.equal(found[0], expected[0]) and len(found) == len(expected)


def test_contexts_in_which_it_goes_layer_by_layer(steps_at_once):
    model = random_model()
    caches = [after_prompt(model) for _ in range(7)]

    def step(cache=None):
        model(torch.tensor([[3]]), past_key_values=cache or caches.pop())

    step()
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            step()
        with ops.backend("ref"):
            step()
        step(DynamicCache(config=model.config))
        model.model.layers[1].self_attn.train()
        step()
        model.eval()
        name, called = model.config._attn_implementation, []
        function = AttentionInterface()[name]
        AttentionInterface.register(name, lambda *args, **kwargs: called.append(1) or function(*args, **kwargs))
        try:
            step()
        finally:
            AttentionInterface.register(name, function)
        assert len(called) == 3, "another attention function is called"
        caches[-1].activate_past_recording()
        step()
        assert not steps_at_once
        step()
        assert len(steps_at_once) == 1 and not caches
        cache = after_prompt(model)
        model.config.output_hidden_states = True
        assert len(model(torch.tensor([[3]]), past_key_values=cache).hidden_states) == 4
        assert len(steps_at_once) == 1


@pytest.mark.parametrize("part", ["", ".self_attn", ".mlp", ".self_attn.k_proj", ".mlp.act_fn", ".input_layernorm"])
def test_a_hook_sees_its_layer_called(part, steps_at_once):
    model = random_model()
    before, seen = logits(model), []
    assert len(steps_at_once) == 5
    hook = model.get_submodule(f"model.layers.1{part}").register_forward_hook(lambda *args: seen.append(1))
    assert torch.equal(logits(model), before)
    assert len(steps_at_once) == 5 and len(seen) == 7
    hook.remove()
    assert torch.equal(logits(model), before)
    assert len(steps_at_once) == 10
    everywhere = torch.nn.modules.module.register_module_forward_hook(lambda *args: seen.append(1))
    try:
        seen.clear()
        assert torch.equal(logits(model), before)
    finally:
        everywhere.remove()
    assert len(steps_at_once) == 10 and len(seen) > 7 * 3 * 10


@pytest.mark.parametrize(
    "part", ["layers.1.mlp.up_proj", "layers.2.self_attn.v_proj", "norm", "layers.0.input_layernorm"]
)
def test_what_changes_between_two_steps_is_noticed(part, steps_at_once):
    model = random_model()
    layer, one = model.get_submodule(f"model.{part}"), torch.tensor([[3]])

    def step():
        with torch.no_grad():
            return model(one, past_key_values=after_prompt(model)).logits

    before, weight = step(), layer.weight
    other = torch.randn_like(weight)
    layer.weight.data, data = other, layer.weight.data
    changed = step()
    assert not torch.equal(changed, before)
    layer.weight.data = data
    assert torch.equal(step(), before)
    layer.weight = torch.nn.Parameter(other.clone(), requires_grad=False)
    assert torch.equal(step(), changed)
    layer.weight = weight
    assert torch.equal(step(), before) and len(steps_at_once) == 5
    layer.forward = lambda x: type(layer).forward(layer, x)
    assert torch.equal(step(), before) and len(steps_at_once) == 5, "a forward of its own is called"
    del layer.forward
    assert torch.equal(step(), before) and len(steps_at_once) == 6


def test_layers_that_are_taken_out_or_replaced(steps_at_once):
    model = random_model()
    whole = model.model.layers
    model.model.layers = torch.nn.ModuleList(list(whole)[:2])
    model.config.num_hidden_layers = 2
    ours = logits(model)
    assert len(steps_at_once) == 5 and steps_at_once[0].count == 2
    restore_forward(model)
    assert torch.equal(ours, logits(model))
    replace_forward(model)
    model.model.layers = whole
    assert torch.equal(ours, logits(model)), "transformers runs as many as the configuration says"
    assert len(steps_at_once) == 5
    model.config.num_hidden_layers = 3
    assert not torch.equal(ours, logits(model))
    assert len(steps_at_once) == 10
    model.model.layers[1] = LlamaDecoderLayer(model.config, 1).eval().bfloat16()
    assert not torch.equal(ours, logits(model))
    assert len(steps_at_once) == 10, "a layer of transformers' is called"


def test_masks_are_refused_as_layer_by_layer(steps_at_once):
    model, one = random_model(), torch.tensor([[3]])
    gap = torch.ones(1, 22)
    gap[0, 5] = 0
    for message, mask in {
        "the attention mask covers 9 of 22 positions": torch.ones(1, 9),
        "masked after a real token": gap,
        "the attention mask says the cache holds": torch.ones(1, 22).index_fill(1, torch.arange(3), 0),
    }.items():
        with torch.no_grad(), pytest.raises(ValueError, match=message):
            model(one, past_key_values=after_prompt(model), attention_mask=mask)
    assert not steps_at_once


def test_a_window_is_kept(steps_at_once):
    model = random_model("mistral with a window")
    cache, one = new_cache(model), torch.tensor([[3]])
    with torch.no_grad():
        model(prompt(n=61), past_key_values=cache)
        for _ in range(3):
            model(one, past_key_values=cache)
        assert len(steps_at_once) == 2
        with pytest.raises(ValueError, match="65 tokens exceed this cache"):
            model(one, past_key_values=cache)


def test_positions_are_warned_of_once():
    model = random_model()
    model.config.max_position_embeddings = 24
    with pytest.warns(UserWarning, match="25 tokens go past the 24 positions") as found:
        logits(model)
    assert len(found) == 1


def test_a_step_that_was_interrupted_spoils_its_cache(steps_at_once, monkeypatch):
    model, one = random_model(), torch.tensor([[3]])
    cache = after_prompt(model)

    def interrupted(self, *args):
        raise KeyboardInterrupt

    with monkeypatch.context() as context, torch.no_grad():
        context.setattr(layer_parts.Layers, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(one, past_key_values=cache)
    with torch.no_grad():
        with pytest.raises((RuntimeError, ValueError), match=r"half updated|the cache holds"):
            model(one, past_key_values=cache)
        model(one, past_key_values=after_prompt(model))


def test_a_cache_that_another_thread_uses_is_refused():
    model, one = random_model(), torch.tensor([[3]])
    cache = after_prompt(model)
    with cache.stores[1].exclusive(), torch.no_grad():
        errors = []

        def step():
            try:
                with torch.no_grad():
                    model(one, past_key_values=cache)
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    assert len(errors) == 1 and "in use by another thread" in errors[0]
    assert cache.stores[0].exclusive().free


def test_threads_with_caches_of_their_own(steps_at_once):
    model = random_model()
    expected = {spec: logits(model, spec, steps=20) for spec in ("Dense", "H2O(k=12)")}
    found = {}
    threads = [
        threading.Thread(target=lambda spec=spec: found.update({spec: logits(model, spec, steps=20)}))
        for spec in expected
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[spec], expected[spec]) for spec in expected)


def test_copies_are_of_their_own_modules(steps_at_once):
    model = random_model(weights="int8")
    before = logits(model)
    skimkv.detach(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert step_forward(twin.model).model is twin.model
        steps_at_once.clear()
        assert torch.equal(logits(twin), before) and len(steps_at_once) == 5
        twin.model.layers[0].mlp.up_proj.weight.zero_()
        assert not torch.equal(logits(twin), before)
        assert torch.equal(logits(model), before)


def test_other_models_keep_their_forward(monkeypatch):
    model = LlamaForCausalLM(LlamaConfig(**SIZES))

    def forward(self, input_ids=None, **kwargs):
        """Embed, as no version does that was seen."""
        return self.embed_tokens(input_ids)

    class Other(type(model.model)):
        pass

    model.model.__class__ = Other
    replace_forward(model)
    assert step_forward(model.model) is None
    model.model.__class__ = Other.__base__
    model.model.forward = forward
    replace_forward(model)
    assert model.model.forward is forward, "somebody else's stays"
    del model.model.forward
    with monkeypatch.context() as context:
        context.setattr(type(model.model), "forward", forward)
        replace_forward(model)
        assert step_forward(model.model) is None
    replace_forward(model)
    assert isinstance(step_forward(model.model), StepForward)
    ours = logits(model)  # with layers of transformers, it finds nothing to do
    restore_forward(model)
    assert "forward" not in model.model.__dict__ and torch.equal(ours, logits(model))
