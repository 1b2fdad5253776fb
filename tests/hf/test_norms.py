"""Which normalisations of a model become one operation of the library, and that a model says the same with them."""

from __future__ import annotations

import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from skimkv.hf.norms import RMSNorm, is_llama_norm, norms_of, replace_norms

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "initializer_range": 0.2,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
LAYER = {"input_layernorm", "post_attention_layernorm"}
FAMILIES = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)), LAYER),
    "qwen3": (
        lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS)),
        LAYER | {"self_attn.q_norm", "self_attn.k_norm"},
    ),
    "gemma": (lambda: GemmaForCausalLM(GemmaConfig(**SIZES, **HEADS)), None),  # multiplies with 1 + w
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_replaced_and_that_logits_stay(backend, family, dtype):
    torch.manual_seed(0)
    make, parts = FAMILIES[family]
    model = make().to(dtype).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.copy_(torch.rand_like(weight) + 0.5)
    ids = torch.arange(2, 42)[None] * 7 % 257
    before = model(ids).logits
    names = (
        set() if parts is None else {"model.norm"} | {f"model.layers.{i}.{part}" for i in range(2) for part in parts}
    )
    state = model.state_dict()
    replace_norms(model)
    assert {name for name, part in model.named_modules() if isinstance(part, RMSNorm)} == names
    assert model.state_dict().keys() == state.keys()
    assert norms_of(model) == {}
    after = model(ids).logits
    most = before.abs().max() * (2.0**-5 if dtype == torch.bfloat16 else 2.0**-17)
    assert (after - before).abs().max() <= most


def test_a_module_with_a_hook_or_code_of_its_own_stays():
    model = FAMILIES["llama"][0]()
    model.model.norm.register_forward_hook(lambda module, inputs, output: output)

    class Twice(type(model.model.norm)):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    model.model.layers[0].input_layernorm = Twice(64)
    assert not is_llama_norm(model.model.norm)
    assert not is_llama_norm(model.model.layers[0].input_layernorm)
    assert set(norms_of(model)) == {
        "model.layers.0.post_attention_layernorm",
        "model.layers.1.input_layernorm",
        "model.layers.1.post_attention_layernorm",
    }
