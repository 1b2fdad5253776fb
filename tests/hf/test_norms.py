"""Which normalisations of a model become one operation of the library, and that a model says the same with them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from skimkv.hf.decode_step import restore_modules
from skimkv.hf.matrix_modules import MatrixLinear
from skimkv.hf.norms import NormForward, replace_norms
from skimkv.hf.watch import Watch
from support.tiny_models import build, prompt

GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
LAYER = {"input_layernorm", "post_attention_layernorm"}
# gemma multiplies with 1 + w
FAMILIES = {"llama": LAYER, "qwen3": LAYER | {"self_attn.q_norm", "self_attn.k_norm"}, "gemma": LAYER}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_replaced_and_that_logits_stay(backend, family, dtype):
    model, parts = build(family, **GROUPED).to(dtype).requires_grad_(False), FAMILIES[family]
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.copy_(torch.rand_like(weight) + 0.5)
    ids = prompt(1, 40)
    before = model(ids).logits
    names = {"model.norm"} | {f"model.layers.{i}.{part}" for i in range(2) for part in parts}
    state = model.state_dict()
    replace_norms(model.modules())
    assert model.state_dict().keys() == state.keys()
    after = model(ids).logits
    assert {name for name, part in model.named_modules() if forward_of(part) and forward_of(part).product()} == names
    most = before.abs().max() * (2.0**-5 if dtype == torch.bfloat16 else 2.0**-17)
    assert (after - before).abs().max() <= most
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(ids).logits, after)
        assert all(forward_of(part) is None or forward_of(part).norm is part for part in twin.modules())
    restore_modules(model.modules())
    assert torch.equal(model(ids).logits, before) and not any(map(forward_of, model.modules()))


def forward_of(module):
    """The forward of ours that a module has, if any."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, NormForward) else None


class Other(LlamaRMSNorm):
    """A normalisation that does something else by the names of Llama's."""

    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


def test_a_module_with_a_hook_or_a_forward_of_its_own_stays():
    model = build("llama", **GROUPED)
    first, second = model.model.layers
    model.model.norm.register_forward_hook(lambda module, inputs, output: output)
    first.input_layernorm.forward = own = lambda x: x
    second.input_layernorm = Other(64)
    replace_norms(model.modules())
    assert forward_of(model.model.norm) is None and first.input_layernorm.forward is own
    x = torch.randn(3, 64)
    assert torch.equal(second.input_layernorm(x), Other(64)(x)) and forward_of(second.input_layernorm).product() is None
    assert forward_of(first.post_attention_layernorm).product() is not None


def test_what_changes_after_the_first_call_is_noticed(monkeypatch):
    """Its eps, its class and the code of its class, its weights, and a forward that somebody gives it."""
    norm = LlamaRMSNorm(64).requires_grad_(False)
    replace_norms(norm.modules())
    x = torch.randn(3, 64)

    def check():
        assert torch.equal(norm(x), type(norm).forward(norm, x)) or forward_of(norm).product() is not None
        return norm(x)

    before = check()
    norm.variance_epsilon = 1.0
    changed = check()
    assert (changed - before).abs().max() > 0.1
    expected = x / (x.square().mean(-1, keepdim=True) + 1).sqrt()
    assert (changed - expected).abs().max() < 1e-5
    norm.variance_epsilon = 1e-6
    norm.__class__ = Other
    assert torch.equal(check(), type(norm).forward(norm, x)) and forward_of(norm).product() is None
    norm.__class__ = LlamaRMSNorm
    assert torch.equal(check(), before)
    with monkeypatch.context() as context:
        context.setattr(LlamaRMSNorm, "forward", lambda self, hidden_states: self.weight * hidden_states)
        assert torch.equal(check(), x)
    assert torch.equal(check(), before)
    norm.weight.mul_(2)
    assert torch.equal(check(), 2 * before)
    norm.weight = torch.nn.Parameter(norm.weight / 2, requires_grad=False)
    assert torch.equal(check(), before)


def test_what_a_watch_sees():
    """Every attribute that a forward names, of the module and of its configuration, and what it finds in its file."""
    model = build("qwen3", **GROUPED).model
    attention = model.layers[0].self_attn
    for name in ("head_dim", "scaling", "layer_idx", "sliding_window", "training", "attention_dropout"):
        watch, value = Watch([attention]), getattr(attention, name)
        assert watch.is_unchanged()
        setattr(attention, name, object())
        assert not watch.is_unchanged() and not watch.computes_as(Watch([attention]))
        setattr(attention, name, value)
        assert watch.is_unchanged() and watch.computes_as(Watch([attention]))
    watch = Watch(list(model.layers), model)
    model.config.num_hidden_layers = 1
    assert not watch.is_unchanged()
    model.config.num_hidden_layers = 2
    attention.q_proj.weight.data = torch.zeros(64, 64)
    assert watch.is_unchanged(), "it was not told of this module"
    watch = Watch([attention.q_proj])
    attention.q_proj.weight.data = torch.zeros(64, 64)
    assert not watch.is_unchanged() and watch.computes_as(Watch([attention.q_proj]))


def test_a_module_of_ours_notes_what_is_set_in_it():
    """By any way that leads to its dictionaries; what puts a tensor elsewhere is found by its address."""
    layer = MatrixLinear(torch.ones(8, 32), "floats", 8, 32)
    other = MatrixLinear(torch.ones(8, 32), "floats", 8, 32)
    changes = {
        "an attribute": lambda: setattr(layer, "forward", print),
        "an attribute that is deleted": lambda: delattr(layer, "forward"),
        "a parameter": lambda: setattr(layer, "weight", other.weight),
        "a parameter in its dictionary": lambda: layer._parameters.__setitem__("bias", None),
        "a parameter that is registered": lambda: layer.register_parameter("bias", other.bias),
        "a buffer": lambda: setattr(layer, "order", torch.arange(8)),
        "another type": lambda: layer.double(),
        "the class": lambda: setattr(layer, "__class__", type("Other", (MatrixLinear,), {})),
        "memory": lambda: setattr(layer.weight, "data", torch.zeros(8, 32)),
    }
    for what, change in changes.items():
        watch, of_pytorch = Watch([layer]), Watch([torch.nn.Linear(2, 2)])
        assert watch.is_unchanged()
        change()
        assert not watch.is_unchanged(), what
        assert of_pytorch.is_unchanged()
    twin = copy.deepcopy(layer)
    watch = Watch([twin])
    twin._parameters["bias"] = None
    assert not watch.is_unchanged()
