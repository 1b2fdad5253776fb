"""Modules whose decode steps are one operation: which ones a model has, and that it says the same with them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import skimkv
from skimkv import ops
from skimkv.hf.decode_modules import DecoderLayer, GatedMLP, ProjectedAttention, decode_modules
from skimkv.hf.weights import quantise
from skimkv.ops.cpu import layer_parts
from support.instruction_sets import NATIVE

native = pytest.mark.skipif(not NATIVE, reason="the native library is not built")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "llama with biases": (LlamaForCausalLM, LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES)),
}
OURS = GatedMLP, ProjectedAttention, DecoderLayer


def random_model(family, weights="bfloat16", dtype=torch.bfloat16):
    torch.manual_seed(0)
    kind, config = FAMILIES[family]
    model = kind(copy.deepcopy(config)).eval().requires_grad_(False)
    for name, tensor in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            tensor.copy_(torch.rand_like(tensor) + 0.5)
    return quantise(model.to(dtype), weights)


def logits(model, batch=1, steps=4, spec=None):
    """The logits of a prompt of 20 tokens, of a block of 3, and of single tokens after them."""
    ids = torch.arange(batch * (23 + steps)).view(batch, -1) * 7 % 251
    cache = None if spec is None else skimkv.Cache(model, spec)
    found = []
    for first, last in [(0, 20), (20, 23), *((23 + i, 24 + i) for i in range(steps))]:
        with torch.no_grad():
            out = model(ids[:, first:last], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        found.append(out.logits)
    return torch.cat(found, 1)


def one_by_one(module):
    """Let a module be called by itself: a hook that does nothing wants to see it."""
    return module.register_forward_hook(lambda module, inputs, output: None)


@pytest.fixture
def operations(monkeypatch):
    """How often an operation of several layers ran, by its name."""
    counts = {"GatedMLP": 0, "Projections": 0, "LayerEnd": 0}

    def count(kind):
        call = kind.__call__

        def counting(self, *args):
            counts[kind.__name__] += 1
            return call(self, *args)

        monkeypatch.setattr(kind, "__call__", counting)

    for kind in (layer_parts.GatedMLP, layer_parts.Projections, layer_parts.LayerEnd):
        count(kind)
    return counts


@native
@pytest.mark.parametrize("weights", ["bfloat16", "float32", "int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_says_the_same(family, weights, operations):
    """As a whole, with the feed-forward layers and the projections alone, and with every layer called by itself."""
    model = random_model(family, weights)
    for layer in model.model.layers:
        assert isinstance(layer, DecoderLayer) and isinstance(layer, layer.stands_for)
        assert isinstance(layer.self_attn, ProjectedAttention)
        assert isinstance(layer.self_attn, layer.self_attn.stands_for)
        assert type(layer.mlp) is GatedMLP
    assert decode_modules(model) == {}
    with skimkv.attach(model, "Dense"):
        ours, of_batch = logits(model), logits(model, batch=3)
        assert operations == {"GatedMLP": 0, "Projections": 20, "LayerEnd": 20}, "2 layers, 5 steps, of 1 and of 3 rows"
        hooks = [one_by_one(layer.input_layernorm) for layer in model.model.layers]
        assert torch.equal(ours, logits(model))
        assert operations == {"GatedMLP": 10, "Projections": 30, "LayerEnd": 20}
        hooks += [one_by_one(layer.mlp) for layer in model.model.layers]
        assert torch.equal(ours, logits(model))
        assert operations == {"GatedMLP": 20, "Projections": 40, "LayerEnd": 20}, "a layer with a hook is called"
        hooks += [one_by_one(part) for part in model.modules() if hasattr(part, "in_features")]
        assert torch.equal(ours, logits(model))
        assert torch.equal(of_batch, logits(model, batch=3))
        assert operations == {"GatedMLP": 20, "Projections": 40, "LayerEnd": 20}
        for hook in hooks:
            hook.remove()
        assert torch.equal(ours, logits(model))
        assert operations == {"GatedMLP": 20, "Projections": 50, "LayerEnd": 30}


@native
@pytest.mark.parametrize("family", FAMILIES)
def test_with_a_cache_of_transformers(family, operations):
    """And in float32, where a rounding of ours may differ from PyTorch's."""
    model = random_model(family, "float32", torch.float32)
    ours = logits(model)
    assert operations == {"GatedMLP": 0, "Projections": 10, "LayerEnd": 10}
    for part in model.modules():
        if hasattr(part, "in_features"):
            one_by_one(part)
    assert (ours - logits(model)).abs().max() <= 2e-5 * ours.abs().max()
    model.set_attn_implementation("eager")
    logits(model)
    assert operations["Projections"] == 10, "that function is the model's own file's"


@native
def test_what_a_model_gives_out_besides(operations):
    """Hidden states and attentions are collected by hooks, which stay: from then on attention layers are called."""
    model = random_model("llama", "float32", torch.float32)
    plain = random_model("llama", "float32", torch.float32)
    for part in plain.modules():
        one_by_one(part)
    plain.set_attn_implementation("eager"), model.set_attn_implementation("eager")
    found = []
    for one in (model, plain):
        with torch.no_grad():
            cache = one(torch.arange(20)[None], use_cache=True).past_key_values
            found.append(
                one(torch.tensor([[3]]), past_key_values=cache, output_hidden_states=True, output_attentions=True)
            )
    ours, theirs = found
    assert len(ours.hidden_states) == 3 and len(ours.attentions) == 2
    for a, b in zip((*ours.hidden_states, *ours.attentions), (*theirs.hidden_states, *theirs.attentions), strict=True):
        assert (a - b).abs().max() <= 2e-5 * b.abs().max()
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        cache = model(torch.arange(20)[None], use_cache=True).past_key_values
        states = model(torch.tensor([[3]]), past_key_values=cache, output_hidden_states=True).hidden_states
    assert operations == {"GatedMLP": 4, "Projections": 0, "LayerEnd": 0}
    for a, b in zip(states, theirs.hidden_states, strict=True):
        assert (a - b).abs().max() <= 2e-5 * b.abs().max()


@native
def test_autocast_chooses_types_layer_by_layer(operations):
    model = random_model("llama", "float32", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = logits(model, spec="Dense")
        assert operations == {"GatedMLP": 0, "Projections": 0, "LayerEnd": 0}
    exact = logits(model, spec="Dense")
    assert ours.dtype == torch.bfloat16 or not torch.equal(ours, exact)
    assert (ours - exact).abs().max() <= 0.1 * exact.abs().max()


def test_in_the_reference_every_layer_is_called_by_itself(operations):
    model = random_model("qwen3")
    with ops.backend("ref"):
        logits(model)
    assert operations == {"GatedMLP": 0, "Projections": 0, "LayerEnd": 0}


def test_other_families_and_modules_with_hooks_stay():
    gemma = quantise(GemmaForCausalLM(GemmaConfig(**SIZES)), "int8")
    assert not [part for part in gemma.modules() if isinstance(part, OURS)], "another activation, other attention"
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    first, second = model.model.layers
    first.mlp.register_forward_hook(lambda module, inputs, output: None)
    second.register_forward_hook(lambda module, inputs, output: None)

    class Other(type(second.self_attn)):
        pass

    second.self_attn.__class__ = Other
    assert set(decode_modules(model)) == {"model.layers.0", "model.layers.0.self_attn", "model.layers.1.mlp"}


def test_code_of_another_version_stays(monkeypatch):
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    first = model.model.layers[0]

    def forward(self, hidden_states, *args, **kwargs):
        """Scale the states first, as no version does that was seen."""
        return first(hidden_states * self.scaling, *args, **kwargs)

    monkeypatch.setattr(type(first.self_attn), "forward", forward)
    assert set(decode_modules(model)) == {f"model.layers.{i}{part}" for i in range(2) for part in ("", ".mlp")}
    monkeypatch.setattr(type(first), "forward", forward)
    assert set(decode_modules(model)) == {"model.layers.0.mlp", "model.layers.1.mlp"}


@native
@pytest.mark.parametrize("part", ["mlp.up_proj", "self_attn.v_proj", "self_attn.o_proj"])
def test_what_changes_between_two_steps_is_noticed(part, operations):
    model = random_model("llama")
    before = logits(model)
    layer = model.get_submodule(f"model.layers.1.{part}")
    other = torch.randn_like(layer.weight)

    layer.weight.data, weight = other, layer.weight.data
    data = logits(model)
    layer.weight = torch.nn.Parameter(other.clone(), requires_grad=False)
    assert not torch.equal(data, before) and torch.equal(logits(model), data)
    layer.weight.data.copy_(weight)  # in its place: nothing is to be noticed
    assert torch.equal(logits(model), before)
    bias = torch.nn.Parameter(torch.randn(layer.out_features).bfloat16(), requires_grad=False)
    layer.bias = bias
    with_bias = logits(model)
    bias.add_(1)
    assert not torch.equal(with_bias, before) and not torch.equal(logits(model), with_bias)
    layer.bias = None
    assert torch.equal(logits(model), before)
    model.set_submodule(f"model.layers.1.{part}", torch.nn.Linear(64, layer.out_features, bias=False).bfloat16())
    assert not torch.equal(logits(model), before)
    model.set_submodule(f"model.layers.1.{part}", layer)
    assert torch.equal(logits(model), before)
    layer.forward = lambda x: torch.zeros(*x.shape[:-1], layer.out_features, dtype=x.dtype)
    assert not torch.equal(logits(model), before), "as libraries that move weights replace it"
    del layer.forward
    handle = layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0,))
    assert not torch.equal(logits(model), before)
    handle.remove()
    assert torch.equal(logits(model), before)


@native
def test_copies_are_of_their_own_tensors():
    model = random_model("llama", "int8")
    before = logits(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(twin), before)
        twin.model.layers[0].mlp.up_proj.weight.zero_()
        assert not torch.equal(logits(twin), before)
        assert torch.equal(logits(model), before)


@native
def test_gradients_are_refused_and_training_is_transformers_own(operations):
    model = random_model("llama")
    x = torch.randn(1, 1, 64).bfloat16().requires_grad_()
    with pytest.raises(ValueError, match="weights for inference have no gradient"):
        model.model.layers[0].mlp(x)
    with torch.no_grad():
        model.model.layers[0].mlp(x)
    assert operations["GatedMLP"] == 1
    logits(model.train())
    assert operations["Projections"] == operations["LayerEnd"] == 0, "attention may drop weights there"


@native
def test_a_prompt_of_many_tokens_and_angles_that_do_not_fit(operations):
    model = random_model("llama")
    layer = model.model.layers[0]
    with torch.no_grad():
        layer.mlp(torch.randn(1, 16, 64).bfloat16())
        layer.mlp(torch.randn(2, 8, 64).bfloat16())
        assert operations["GatedMLP"] == 0
        assert layer.mlp(torch.randn(2, 0, 64).bfloat16()).shape == (2, 0, 64)
        assert operations["GatedMLP"] == 0
        prepared = []
        for shape in ((3, 5), (1, 1), (2, 16), (4, 1)):
            layer.mlp(torch.randn(*shape, 64).bfloat16())
            prepared.append(layer.mlp._joint._operation)
        assert operations["GatedMLP"] == 3 and len(set(map(id, prepared))) == 1, (
            "one operation for all numbers of tokens"
        )
        cos = torch.ones(1, 1, 16).bfloat16()
        assert layer.self_attn.project(torch.randn(1, 1, 64).bfloat16(), (cos[..., :8], cos[..., :8])) is None
        assert layer.self_attn.project(torch.randn(1, 1, 64).bfloat16(), None) is None
        assert layer.self_attn.project(torch.randn(1, 1, 64).bfloat16(), (cos, cos)) is not None
