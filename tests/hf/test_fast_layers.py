"""Our products, normalisations and decode steps on the weights of a model as somebody loaded it, and how they go."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import skimkv
from skimkv.hf.cache_step import CacheStep
from skimkv.hf.decode_step import StepForward
from skimkv.hf.linear_forward import LinearForward, replace_linear
from skimkv.hf.norms import NormForward

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 300}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2}
OURS = LinearForward, NormForward, StepForward
GREEDY = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0, "eos_token_id": None}


def a_model(dtype=torch.float32):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).eval().to(dtype)


def ours_in(model):
    """The names of the parts that have a forward of ours."""
    return {name for name, part in model.named_modules() if isinstance(vars(part).get("forward"), OURS)}


def a_prompt(batch=1):
    return torch.randint(1, 300, (batch, 30), generator=torch.Generator().manual_seed(1))


def generate(model, batch=1):
    with torch.no_grad():
        return model.generate(a_prompt(batch), **GREEDY)


@pytest.fixture
def steps(monkeypatch):
    """A list that grows with every decode step of all layers at once."""
    found, take = [], CacheStep.take
    monkeypatch.setattr(CacheStep, "take", lambda self, *args: found.append(self) or take(self, *args))
    return found


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("method", ["Dense()", "SparQ(r=16, k=128)", "TOVA(k=128)"])
def test_an_attached_model_steps_on_its_own_weights_until_detach(method, batch, steps):
    model = a_model()
    expected = generate(model, batch)
    skimkv.attach(model, method)
    linear = {name for name, part in model.named_modules() if type(part) is nn.Linear}
    assert linear and linear | {"model", "model.norm"} <= ours_in(model)
    assert torch.equal(generate(model, batch), expected)
    assert len(steps) == GREEDY["max_new_tokens"] - 1
    for name in linear:
        layer = model.get_submodule(name)
        matrix = layer.forward.matrix(torch.zeros(1, 1, 8))
        assert matrix.memory[0].data_ptr() == layer.weight.data_ptr(), "no copy of the weights"
    skimkv.detach(model)
    assert not ours_in(model)
    assert torch.equal(generate(model, batch), expected) and len(steps) == GREEDY["max_new_tokens"] - 1


def test_one_keyword_turns_it_off(steps):
    model = a_model()
    with skimkv.attach(model, "Dense()", fast=False):
        generate(model)
        assert not ours_in(model) and not steps
        with skimkv.attach(model, "Dense()"):
            assert ours_in(model)
        assert not ours_in(model), "what stood before is back"
        skimkv.Cache(model, "Dense()")
        assert not ours_in(model), "what is attached says so"
    skimkv.detach(model)
    skimkv.Cache(model, "Dense()", fast=False)
    assert not ours_in(model)
    skimkv.Cache(model, "Dense()")
    assert ours_in(model)
    with skimkv.attach(model, "Dense()", fast=False):
        assert not ours_in(model)
    assert ours_in(model), "caches may be in use"


def test_load():
    fast = skimkv.load("builtin")[0]
    assert ours_in(fast)
    skimkv.attach(fast, "Dense()")
    skimkv.detach(fast)
    assert ours_in(fast), "what load gave stays"
    slow = skimkv.load("builtin", fast=False)[0]
    skimkv.attach(slow, "Dense()")
    assert not ours_in(slow)
    skimkv.attach(slow, "Dense()", fast=True)
    assert ours_in(slow)
    with pytest.raises(ValueError, match=r'weights="int8": fast=False is not possible; only our layers multiply'):
        skimkv.load("builtin", weights="int8", fast=False)


def test_copies_have_layers_of_their_own():
    model = a_model()
    with skimkv.attach(model, "Dense()"):
        twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model.lm_head))
    assert twins[0].lm_head.forward.linear is twins[0].lm_head and twins[1].forward.linear is twins[1]
    assert not ours_in(model)
    before = generate(twins[0])
    twins[0].lm_head.weight.data.neg_()
    assert not torch.equal(generate(twins[0]), before)
    skimkv.detach(twins[0])
    assert not ours_in(twins[0])


def linear_layers(dtype, bias):
    """A layer of PyTorch and the same with our forward."""
    torch.manual_seed(0)
    own = nn.Linear(64, 40, bias=bias).to(dtype)
    ours = copy.deepcopy(own)
    assert replace_linear(ours.modules()) == [ours]
    return own, ours


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_product_is_that_of_the_layer(backend, dtype, bias):
    own, ours = linear_layers(dtype, bias)
    for shape in ((64,), (1, 1, 64), (3, 5, 64), (2, 20, 64), (0, 64)):
        x = torch.randn(shape).to(dtype)
        expected = nn.functional.linear(
            x.double(), own.weight.double(), None if own.bias is None else own.bias.double()
        )
        found = ours(x)
        assert found.dtype == dtype and found.shape == expected.shape
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
        assert not x.numel() or (found - expected).abs().max() <= tolerance * expected.abs().max()


def test_what_goes_to_the_layers_own_forward():
    own, ours = linear_layers(torch.float32, bias=True)
    x = torch.randn(1, 64)
    y = ours(x.requires_grad_())
    y.sum().backward()
    assert ours.weight.grad is not None and x.grad is not None, "a gradient"
    with torch.no_grad():
        for wrong in (torch.randn(1, 63), x.half(), x.double()):
            with pytest.raises(RuntimeError) as expected:
                own(wrong)
            with pytest.raises(RuntimeError) as found:
                ours(wrong)
            assert str(found.value) == str(expected.value)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(ours(x), own(x)) and ours(x).dtype == torch.bfloat16
        torch.nn.utils.parametrize.register_parametrization(ours, "weight", nn.Identity())
        torch.nn.utils.parametrize.register_parametrization(own, "weight", nn.Identity())
        assert torch.equal(ours(x), own(x)), "another class of layers"
        meta = copy.deepcopy(own).to("meta")
        replace_linear(meta.modules())
        assert meta(x.to("meta")).shape == (1, 40)


@torch.no_grad()
def test_weights_that_change_count_at_once(steps):
    model = a_model()
    with skimkv.attach(model, "Dense()"):
        before = generate(model)
        up = model.model.layers[1].mlp.up_proj
        for change in (
            lambda: up.weight.data.mul_(-1),
            lambda: setattr(up, "weight", nn.Parameter(torch.randn(96, 64))),
            lambda: setattr(model.model.layers[0].self_attn, "q_proj", nn.Linear(64, 64, bias=True)),
            lambda: model.bfloat16(),
        ):
            change()
            after = generate(model)
            twin = copy.deepcopy(model)
            skimkv.detach(twin)
            assert torch.equal(after, generate(twin)), "as the model itself says"
            assert model.dtype == torch.bfloat16 or not torch.equal(after, before)
            before = after


def test_modules_that_are_left_alone():
    class Other(nn.Linear):
        """A layer of somebody else."""

    narrow, other, patched = nn.Linear(30, 8), Other(32, 8), nn.Linear(32, 8)
    patched.forward = patched.forward
    assert replace_linear([narrow, other, patched]) == []


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj", "model.layers.0.self_attn.k_proj"])
@pytest.mark.parametrize("attached_first", [False, True])
def test_a_bias_that_is_no_parameter(name, attached_first):
    """As torch.nn.utils.prune leaves it behind, or somebody who puts a tensor in its place."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, attention_bias=True)).eval()
    linear = model.get_submodule(name)
    nn.init.normal_(linear.bias)
    expected = copy.deepcopy(model)
    if attached_first:
        skimkv.attach(model, "Dense()")
        generate(model)
    for one in (model, expected):
        bias = one.get_submodule(name).bias.data
        del one.get_submodule(name).bias
        one.get_submodule(name).bias = 2 * bias
    if not attached_first:
        skimkv.attach(model, "Dense()")
    assert torch.equal(generate(model), generate(expected))


def test_weights_that_are_transposed_in_place():
    """Which changes neither their sizes nor where they begin."""
    model = a_model()
    expected = copy.deepcopy(model)
    with skimkv.attach(model, "Dense()"):
        before = generate(model)
        for one in (model, expected):
            weight = one.model.layers[1].self_attn.o_proj.weight
            weight.data = weight.data.t()
        found = generate(model)
    assert torch.equal(found, generate(expected)) and not torch.equal(found, before)


def test_an_attached_model_is_not_pickled():
    model = a_model()
    with skimkv.attach(model, "Dense()"):
        generate(model)
        with pytest.raises(TypeError, match=r"attached to cannot be pickled: detach\(model\) first"):
            pickle.dumps(model)
    assert torch.equal(generate(pickle.loads(pickle.dumps(model))), generate(model))
