"""A decode step of all layers as one operation: it says the same, and what is more goes to the model's own forward."""

from __future__ import annotations

import copy
import pickle
import threading
from types import MethodType

import pytest
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.models.llama import modeling_llama

import skimkv
from skimkv import ops
from skimkv.hf import decode_step
from skimkv.hf.cache_step import CacheStep
from skimkv.hf.decode_step import StepForward, replace_modules, restore_modules, step_forward
from skimkv.hf.weights import quantise
from skimkv.ops import matrices
from support.calls import in_thread
from support.kernels import NATIVE

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
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
MIXED = {"sliding_window": 64, "layer_types": TYPES, "query_pre_attn_scalar": 16}
FAMILIES = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral with a window": ("mistral", {"sliding_window": 64}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", MIXED),
    "gemma3": ("gemma3_text", MIXED),
}
REPEATED = {
    "Dense": "Dense",
    "Dense with int8 rows": "Dense(kv='int8')",
    "SparQ": "SparQ(r=4, k=8)",
    "SparQ with int8 channels": "SparQ(r=4, k=8, channels='int8')",
    "Skim": "Skim(r=4, k=8)",
    "H2O": "H2O(k=12)",
    "LMInfinite": "LMInfinite(k=24)",
    "SubGen": "SubGen(k=12)",
    "TOVA": "TOVA(k=12)",
    "Quest": "Quest(k=8, page=4)",
}
ATTENDING = {  # which have no kernel for all of a step
    "LMInfinite at positions in its cache": "LMInfinite(k=24, positions='cache')",
    "SubGenStream": "SubGenStream(t=4, s=4, delta=0.5)",
}
METHODS = REPEATED | ATTENDING
DENSE = "Dense"
GELU = 2.0**-7  # PyTorch's has the difference of 1 and tanh, and may be rounded to a neighbour of ours in bfloat16


def of_kind(kind, **options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | options)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


def random_model(family="llama", weights="bfloat16", dtype=torch.bfloat16):
    kind, options = FAMILIES[family]
    model = of_kind(kind, **options)
    for name, tensor in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            tensor.copy_(torch.rand_like(tensor) + 0.5)
    return quantise(model.to(dtype), weights)


def new_cache(model, spec=DENSE):
    return skimkv.Cache(model, spec, max_tokens=64)


def prompt(batch=1, n=20):
    return torch.arange(batch * n).view(batch, n) * 7 % 251


def after_prompt(model, spec=DENSE, batch=1):
    """A cache of a prompt."""
    cache = new_cache(model, spec)
    with torch.no_grad():
        model(prompt(batch, 21), past_key_values=cache)
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
    steps, take = [], CacheStep.take

    def counting(self, *args):
        steps.append(self)
        return take(self, *args)

    monkeypatch.setattr(CacheStep, "take", counting)
    return steps


def use_own_forward(model):
    """Let a model's decoder run as its class does: that forward is not replaced, as it is not the class's."""
    model.model.forward = MethodType(type(model.model).forward, model.model)


def use_our_forward(model):
    """Undo `use_own_forward`."""
    del model.model.forward
    replace_modules(model)


def check_own_forward(model, found, *args, **kwargs):
    """That the model's own forward says what was found, on the same arguments of `logits`."""
    use_own_forward(model)
    expected = logits(model, *args, **kwargs)
    most = 0.0 if found.dtype == torch.bfloat16 else 2.0**-12  # where roundings move codes
    if most == 0 and "gemma" in model.config.model_type:
        most = GELU
    assert (found - expected).abs().max() <= most * expected.abs().max()
    use_our_forward(model)


# Every method in one family, and every family by methods of each kind of store: a family changes what is around
# attention, a method only attention.
OF_EVERY_FAMILY = ("Dense", "SparQ with int8 channels", "H2O", "LMInfinite at positions in its cache")
PAIRS = [
    (family, method) for family in FAMILIES for method in METHODS if family == "llama" or method in OF_EVERY_FAMILY
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "method"), PAIRS)
def test_a_model_says_the_same(family, method, steps_at_once):
    """For one row and for three, from the first token after the prompt."""
    for weights in ("bfloat16", "int8"):
        model = random_model(family, weights)
        for batch in (1, 3):
            steps_at_once.clear()
            ours = logits(model, METHODS[method], batch)
            assert len(steps_at_once) == 6
            assert None not in steps_at_once[-1].addresses or method in ATTENDING
            check_own_forward(model, ours, METHODS[method], batch)


@pytest.fixture
def blocks_at_once(monkeypatch):
    """A list of the shapes of blocks that all layers took at once."""
    blocks, take = [], StepForward._take_block

    def noting(self, prepared, x, *args):
        y = take(self, prepared, x, *args)
        if y is not None:
            blocks.append(tuple(x.shape[:2]))
        return y

    monkeypatch.setattr(StepForward, "_take_block", noting)
    return blocks


def in_blocks(model, sizes, spec=DENSE, batch=1, **kwargs):
    """The logits of blocks of tokens that follow one another."""
    cache = skimkv.Cache(model, spec, max_tokens=max(64, sum(sizes)))
    tokens, found, first = prompt(batch, sum(sizes)), [], 0
    with torch.no_grad():
        for n in sizes:
            found.append(model(tokens[:, first : first + n], past_key_values=cache, **kwargs).logits)
            first += n
    return torch.cat(found, 1)


@pytest.mark.parametrize("spec", [DENSE, "SparQ(r=4, k=8)", "H2O(k=12)", "SnapKV(k=12, window=4)"])
def test_short_blocks_are_one_operation_too(spec, blocks_at_once, monkeypatch):
    """A prompt, and blocks after it; more than so many tokens, or rows of them, go layer by layer."""
    monkeypatch.setattr(decode_step, "MOST_BLOCK_TOKENS", 64)
    model, sizes = random_model("qwen3"), [7, 1, 20, 2]
    ours, of_three = in_blocks(model, sizes, spec), in_blocks(model, sizes, spec, batch=3)
    assert blocks_at_once == [(1, 7), (1, 20), (1, 2), (3, 7), (3, 20), (3, 2)]
    in_blocks(model, [22], spec, batch=3), in_blocks(model, [64], spec)
    assert blocks_at_once[6:] == [(1, 64)]
    use_own_forward(model)
    assert torch.equal(ours, in_blocks(model, sizes, spec))
    assert torch.equal(of_three, in_blocks(model, sizes, spec, batch=3))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_blocks_of_quantised_weights_may_be_longer(weights, blocks_at_once):
    """More tokens than one product takes, and more numbers than one thread normalises and adds."""
    model, sizes = quantise(of_kind("llama", hidden_size=256, head_dim=64).bfloat16(), weights), [300, 100, 513]
    ours = in_blocks(model, sizes)
    kind = matrices.PACKED if weights == "int8" else "Q4_0"
    assert blocks_at_once == [(1, n) for n in (300, 100) if ops.library_multiplies(n, kind, torch.bfloat16)]
    use_own_forward(model)
    assert torch.equal(ours, in_blocks(model, sizes))


def test_drafts_are_blocks(blocks_at_once):
    """Tokens that generate() looks up in the prompt are checked as a block, and those that are wrong are taken back."""
    model, ids, sizes = random_model(), torch.arange(1, 6).repeat(5)[None], list[int]()
    settings = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0, "prompt_lookup_num_tokens": 3}
    with skimkv.attach(model, DENSE):
        model.register_forward_pre_hook(
            lambda _, args, given: sizes.append(given["input_ids"].shape[1]), with_kwargs=True
        )
        ours = model.generate(ids, **settings)
        drafts = [(1, size) for size in sizes[1:] if size > 1]  # with the token before them; the first is the prompt
        assert drafts and blocks_at_once[-len(drafts) :] == drafts
        use_own_forward(model)
        assert torch.equal(ours, model.generate(ids, **settings))


def test_padded_blocks_go_layer_by_layer(blocks_at_once):
    model, mask = random_model(), torch.ones(2, 9, dtype=torch.int64)
    in_blocks(model, [9], batch=2, attention_mask=mask)
    assert blocks_at_once == [(2, 9)]
    mask[1, :2] = 0
    in_blocks(model, [9], batch=2, attention_mask=mask)
    assert len(blocks_at_once) == 1


def test_what_pytorch_multiplies_goes_layer_by_layer(blocks_at_once):
    """A short piece of a prompt that is long is multiplied as the whole prompt is."""
    model, expected = random_model(), 0
    for tokens in (64, 65, 0):
        before = ops.tokens_of_prompt.set(tokens)
        try:
            in_blocks(model, [9])
            expected += ops.library_multiplies(9, matrices.FLOATS, torch.bfloat16)
        finally:
            ops.tokens_of_prompt.reset(before)
        assert len(blocks_at_once) == expected
    in_blocks(random_model(weights="int8"), [64])
    assert len(blocks_at_once) == expected + ops.library_multiplies(64, matrices.PACKED, torch.bfloat16)


def test_blocks_whose_tokens_see_later_ones_are_refused_as_before(blocks_at_once, monkeypatch):
    """One token alone has no later ones, so a step says nothing about the mask of a block."""
    model = random_model()

    def sees_all(config, inputs_embeds, **kwargs):
        B, n = inputs_embeds.shape[:2]
        return torch.zeros(B, 1, n, n) if n > 1 else None

    assert len(in_blocks(model, [4, 1, 4])[0]) == 9 and len(blocks_at_once) == 2
    monkeypatch.setattr(modeling_llama, "create_causal_mask", sees_all)
    replaced = random_model()
    with pytest.raises(ValueError, match="supports causal attention with left padding"):
        in_blocks(replaced, [4])
    assert len(blocks_at_once) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("weights", ["float32", "int4"])
def test_other_types(weights, dtype, steps_at_once):
    model = random_model("qwen3", weights, dtype)
    ours = logits(model)
    assert len(steps_at_once) == 6
    check_own_forward(model, ours)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_rounded_inputs_of_many_layers_are_no_other_arithmetic(weights, steps_at_once):
    """Where products round their inputs, two ways to compute the same differ by more the deeper a model is."""
    model = of_kind("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=24, head_dim=64)
    logits(quantise(model.bfloat16(), weights))
    assert len(steps_at_once) == 6


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["Dense", "SparQ(r=4, k=8, channels='int8')", "H2O(k=12)", "TOVA(k=12)"])
def test_generate_with_padding(spec, steps_at_once):
    """Rows of several lengths, with the masks and positions that generate() makes, in memory that has to grow."""
    model = random_model("llama")
    ids, mask = prompt(3), torch.ones(3, 20, dtype=torch.int64)
    mask[0, :7], mask[2, :1] = 0, 0
    settings = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 300, "pad_token_id": 0}
    with skimkv.attach(model, spec):
        ours = model.generate(ids, **settings)
        assert len(steps_at_once) == 299
        use_own_forward(model)
        assert torch.equal(ours, model.generate(ids, **settings))
        assert len(steps_at_once) == 299


@pytest.mark.filterwarnings("ignore:.*layers")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sliding_layers_have_a_kernel_too(dtype, steps_at_once):
    """A window that is shorter than the text, and for a while longer: no method decodes these layers."""
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    model = of_kind("qwen2", use_sliding_window=True, sliding_window=24, layer_types=kinds).to(dtype)

    def run(mask=None, batch=1, start=20):
        cache, tokens = skimkv.Cache(model, "SparQ(r=4, k=8)"), prompt(batch, 40)
        with torch.no_grad():
            found = [
                model(
                    tokens[:, first:last],
                    past_key_values=cache,
                    attention_mask=None if mask is None else mask[:, :last],
                )
                for first, last in [(0, start), *((i, i + 1) for i in range(start, 40))]
            ]
        return torch.cat([out.logits for out in found], 1)

    mask = torch.ones(2, 40)
    mask[1, :2] = 0
    for given, batch, start, at_once in (
        (None, 1, 20, 20), (None, 3, 20, 20), (None, 2, 30, 10), (torch.ones(1, 40), 1, 20, 20), (mask, 2, 20, 20),
    ):  # fmt: skip
        if given is mask and dtype == torch.bfloat16:
            continue  # layer by layer the library attends where rows are padded, which rounds in another order
        steps_at_once.clear()
        ours = run(given, batch, start)
        assert len(steps_at_once) == at_once
        assert all(None not in step.addresses for step in steps_at_once)
        use_own_forward(model)
        expected = run(given, batch, start)
        assert (ours - expected).abs().max() <= (2e-5 if dtype == torch.float32 else 0.0) * expected.abs().max()
        use_our_forward(model)


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
        use_own_forward(model)
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
        use_own_forward(model)
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
        assert not steps_at_once
        caches[-1].activate_past_recording()
        step()
        assert len(steps_at_once) == 1 and set(steps_at_once[0].addresses) == {None}, "a draft can be taken back"
        step()
        assert len(steps_at_once) == 2 and not caches
        cache = after_prompt(model)
        model.config.output_hidden_states = True
        assert len(model(torch.tensor([[3]]), past_key_values=cache).hidden_states) == 4
        assert len(steps_at_once) == 2


@pytest.mark.parametrize("part", ["", ".self_attn", ".mlp", ".self_attn.k_proj", ".mlp.act_fn", ".input_layernorm"])
def test_a_hook_sees_its_layer_called(part, steps_at_once):
    model = random_model()
    before, seen = logits(model), []
    assert len(steps_at_once) == 6
    hook = model.get_submodule(f"model.layers.1{part}").register_forward_hook(lambda *args: seen.append(1))
    assert torch.equal(logits(model), before)
    assert len(steps_at_once) == 6 and len(seen) == 7
    hook.remove()
    assert torch.equal(logits(model), before)
    assert len(steps_at_once) == 12
    everywhere = torch.nn.modules.module.register_module_forward_hook(lambda *args: seen.append(1))
    try:
        seen.clear()
        assert torch.equal(logits(model), before)
    finally:
        everywhere.remove()
    assert len(steps_at_once) == 12 and len(seen) > 7 * 3 * 10


def twice(module):
    """A forward that gives twice what the module's own gives."""
    own = type(module).forward
    return lambda *args, **kwargs: 2 * own(module, *args, **kwargs)


def other_weight(part):
    part.weight = torch.nn.Parameter(torch.randn_like(part.weight), requires_grad=False)


def other_data(part):
    part.weight.data = torch.randn_like(part.weight)


def bias_in_place(part):
    part.bias.add_(1)


def no_bias(part):
    part.bias = None


def other_module(name):
    def change(part):
        part.set_submodule(name, torch.nn.Linear(64, part.get_submodule(name).out_features).bfloat16())

    return change


def attribute(name, value):
    return lambda part: setattr(part, name, value)


# What may change between two steps: where, how, and whether all layers are one operation still.
CHANGES = {
    "eps of a layer": ("layers.1.input_layernorm", attribute("variance_epsilon", 1.0), True),
    "eps after attention": ("layers.1.post_attention_layernorm", attribute("variance_epsilon", 1.0), True),
    "eps of heads": ("layers.1.self_attn.q_norm", attribute("variance_epsilon", 1.0), True),
    "eps of the last normalisation": ("norm", attribute("variance_epsilon", 1.0), True),
    "the scale of logits": ("layers.1.self_attn", attribute("scaling", 1.0), True),
    "an activation": ("layers.1.mlp", attribute("act_fn", torch.nn.GELU()), False),
    "the scale of angles": ("rotary_emb", attribute("attention_scaling", 2.0), True),
    "the frequencies of angles": ("rotary_emb", attribute("inv_freq", torch.rand(8)), True),
    "a matrix": ("layers.2.self_attn.v_proj", other_weight, True),
    "a matrix's data": ("layers.1.mlp.up_proj", other_data, True),
    "a normalisation's weights": ("layers.0.input_layernorm", other_weight, True),
    "the last normalisation's data": ("norm", other_data, True),
    "the embedding": ("embed_tokens", other_data, True),
    "a bias": ("layers.1.self_attn.q_proj", bias_in_place, True),
    "no bias": ("layers.1.self_attn.q_proj", no_bias, True),
    "a layer of PyTorch's": ("layers.1", other_module("self_attn.o_proj"), False),
    "a forward of a layer's own": ("layers.1.mlp", lambda part: setattr(part, "forward", twice(part)), False),
    "a forward of a product's own": (
        "layers.1.mlp.gate_proj",
        lambda part: setattr(part, "forward", twice(part)),
        False,
    ),
    "a forward of a normalisation's own": ("norm", lambda part: setattr(part, "forward", twice(part)), False),
    "a hook": ("layers.1.mlp", lambda part: part.register_forward_pre_hook(lambda _, args: (args[0] * 2,)), False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_two_steps_is_noticed(change, steps_at_once):
    where, apply, is_at_once = CHANGES[change]
    model = of_kind("qwen3", attention_bias=True).bfloat16()
    model.model.layers[1].self_attn.q_proj.bias.normal_()
    model = quantise(model, "bfloat16")
    before = logits(model)
    assert len(steps_at_once) == 6
    apply(model.model.get_submodule(where))
    ours = logits(model)
    assert not torch.equal(ours, before)
    assert len(steps_at_once) == (12 if is_at_once else 6)
    check_own_forward(model, ours)


def plus_one(self, hidden_states):
    """Llama's normalisation, and one; by the names that its own code has."""
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype) + 1


def scaled_mlp(self, x):
    """Llama's feed-forward layer, by 1.01."""
    return 1.01 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def turned_back(x):
    """Llama's rotation with another sign."""
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((x2, -x1), dim=-1)


def scaled(function, factor=1.01):
    """A method whose result, or its states, are scaled."""

    def forward(self, *args, **kwargs):
        out = function(self, *args, **kwargs)
        return (out[0] * factor, *out[1:]) if isinstance(out, tuple) else out * factor

    return forward


def scaled_embedding(self, input_ids=None, inputs_embeds=None, **kwargs):
    """Llama's forward, which scales what it embeds, but not what was embedded before."""
    embeds = self.embed_tokens(input_ids) * 2 if inputs_embeds is None else inputs_embeds
    return OWN_FORWARD(self, inputs_embeds=embeds, **kwargs)


OWN_FORWARD = modeling_llama.LlamaModel.forward
ARITHMETIC = {
    "a normalisation": (modeling_llama.LlamaRMSNorm, "forward", plus_one),
    "a feed-forward layer": (modeling_llama.LlamaMLP, "forward", scaled_mlp),
    "the sign of a rotation": (modeling_llama, "rotate_half", turned_back),
    "an attention layer": (modeling_llama.LlamaAttention, "forward", scaled(modeling_llama.LlamaAttention.forward)),
    "a residual": (modeling_llama.LlamaDecoderLayer, "forward", scaled(modeling_llama.LlamaDecoderLayer.forward)),
    "an embedding": (modeling_llama.LlamaModel, "forward", scaled_embedding),
}


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
@pytest.mark.parametrize("change", ARITHMETIC)
def test_changed_arithmetic_is_the_models_own(change, weights, steps_at_once, monkeypatch):
    """Under the same names: before the first step, and between two."""
    early, late = random_model(weights=weights), random_model(weights=weights)
    before = logits(late)
    assert len(steps_at_once) == 6
    with monkeypatch.context() as context:
        context.setattr(*ARITHMETIC[change])
        for model in (early, late):
            ours = logits(model)
            assert not torch.equal(ours, before)
            assert len(steps_at_once) == 6
            check_own_forward(model, ours)
    for model in (early, late):
        assert torch.equal(logits(model), before)
    assert len(steps_at_once) == 18


def test_a_class_of_another_arithmetic_is_called(steps_at_once):
    """A subclass that a module got before its first step, or between two."""
    model = random_model()
    mlp = model.model.layers[1].mlp

    class Scaled(type(mlp)):
        forward = scaled_mlp

    before, own = logits(model), type(mlp)
    assert len(steps_at_once) == 6
    mlp.__class__ = Scaled
    ours = logits(model)
    assert not torch.equal(ours, before) and len(steps_at_once) == 6
    check_own_forward(model, ours)
    mlp.__class__ = own
    assert torch.equal(logits(model), before) and len(steps_at_once) == 12

    class Same(type(mlp)):
        def forward(self, x):
            return super().forward(x) * 1

    mlp.__class__ = Same
    assert torch.equal(logits(model), before) and len(steps_at_once) == 12, "a trial tells little of others' code"


def test_layers_are_compared_once(steps_at_once, monkeypatch):
    """While only weights change; another attribute, or another kind of step, is compared anew."""
    model, calls = random_model(), []
    own = type(model.model).forward
    monkeypatch.setattr(type(model.model), "forward", lambda *args, **kwargs: calls.append(1) or own(*args, **kwargs))
    logits(model)
    compared = len(calls)  # of a step and of a block
    logits(model)
    assert len(calls) == compared
    model.model.layers[0].mlp.up_proj.weight.data = torch.randn(96, 64).bfloat16()
    logits(model)
    assert len(calls) == compared
    model.model.norm.variance_epsilon = 0.5
    logits(model)
    assert len(calls) == 2 * compared and len(steps_at_once) == 24


class Doubled(torch.nn.Linear):
    """A linear layer that computes something else."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_layers_that_are_taken_out_or_replaced(steps_at_once):
    model = random_model()
    whole = model.model.layers
    model.model.layers = torch.nn.ModuleList(list(whole)[:2])
    model.config.num_hidden_layers = 2
    ours = logits(model)
    assert len(steps_at_once) == 6 and len(steps_at_once[0].addresses) == 2
    check_own_forward(model, ours)
    model.model.layers = whole
    assert torch.equal(ours, logits(model)), "transformers runs as many as the configuration says"
    assert len(steps_at_once) == 6
    model.config.num_hidden_layers = 3
    assert not torch.equal(ours, logits(model))
    assert len(steps_at_once) == 12
    model.model.layers[1] = modeling_llama.LlamaDecoderLayer(model.config, 1).eval().bfloat16()
    assert not torch.equal(ours, logits(model))
    assert len(steps_at_once) == 18, "the products of transformers' layer became ours"
    model.model.layers[1].mlp.up_proj = Doubled(64, 96, bias=False).eval().bfloat16()
    logits(model)
    assert len(steps_at_once) == 18, "a product that computes something else is called"


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
    assert len(steps_at_once) <= 1


def test_a_window_is_kept(steps_at_once):
    model = random_model("mistral with a window")
    cache, one = new_cache(model), torch.tensor([[3]])
    with torch.no_grad():
        model(prompt(n=61), past_key_values=cache)
        for _ in range(3):
            model(one, past_key_values=cache)
        assert len(steps_at_once) == 3
        with pytest.raises(ValueError, match="65 tokens exceed this cache"):
            model(one, past_key_values=cache)


def test_positions_are_warned_of_once():
    model = random_model()
    model.config.max_position_embeddings = 24
    with pytest.warns(UserWarning, match="25 tokens go past the 24 positions") as found:
        logits(model)
    assert len(found) == 1


@pytest.mark.parametrize("spec", ["Dense", "H2O(k=12, score='mean')"])
def test_a_step_that_was_interrupted_spoils_its_cache(spec, steps_at_once, monkeypatch):
    """Between layers, or in a layer that attends by itself: the exception comes as it was raised."""
    model, one = random_model(), torch.tensor([[3]])
    cache = after_prompt(model, spec)
    with torch.no_grad():
        model(one, past_key_values=cache)

    class Interrupted(BaseException):
        pass

    def interrupted(self, *args):
        raise Interrupted

    with monkeypatch.context() as context, torch.no_grad():
        if spec == "Dense":
            context.setattr(ops.Layers, "__call__", interrupted)
        else:
            context.setattr(cache.layers[1], "attend", interrupted)
        with pytest.raises(Interrupted):
            model(one, past_key_values=cache)
    with torch.no_grad():
        with pytest.raises((RuntimeError, ValueError), match=r"half updated|the cache holds|interrupted"):
            model(one, past_key_values=cache)
        model(one, past_key_values=after_prompt(model, spec))


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_method_that_cannot_prepare_a_step_leaves_the_stores_free(tokens, monkeypatch):
    """In the first step of a text, and in one that follows another."""
    model, left = random_model(), [tokens]

    def fails_at_last(self, stores, token=None):
        left[0] -= 1
        if not left[0]:
            raise ValueError("not to be prepared")

    monkeypatch.setattr(skimkv.StreamingLLM, "prepare", fails_at_last)
    cache = skimkv.Cache(model, "StreamingLLM(k=50, sinks=2)")
    with pytest.raises(ValueError, match="not to be prepared"):
        model.generate(torch.arange(20)[None], past_key_values=cache, max_new_tokens=9, do_sample=False)
    assert left == [0]
    for store in cache.stores:
        assert store.exclusive().begin_if_free()


def test_a_cache_that_another_thread_uses_is_refused():
    model = random_model()
    cache = after_prompt(model)
    with cache.stores[1].exclusive():
        error = in_thread(torch.no_grad()(lambda: model(torch.tensor([[3]]), past_key_values=cache)))
    assert "in use by another thread" in str(error)
    assert cache.stores[0].exclusive().free


def test_threads_with_caches_of_their_own(steps_at_once):
    model = random_model()
    expected = {spec: logits(model, spec, steps=20) for spec in ("Dense", "H2O(k=12)", "TOVA(k=12)")}
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
        assert torch.equal(logits(twin), before) and len(steps_at_once) == 6
        twin.model.layers[0].mlp.up_proj.weight.zero_()
        assert not torch.equal(logits(twin), before)
        assert torch.equal(logits(model), before)


def test_types_of_layers_that_are_not_turned(steps_at_once, monkeypatch):
    """Where a model knows no angles for a type of its layers, its own forward computes."""
    model = random_model("gemma3")
    own = type(model.model.rotary_emb).forward

    def forward(self, x, position_ids, layer_type):
        if layer_type == "full_attention":
            raise KeyError(layer_type)
        return own(self, x, position_ids, layer_type)

    def only_sliding(self, *args, **kwargs):
        monkeypatch.setattr(type(model.model.rotary_emb), "forward", own)
        try:
            return before(self, *args, **kwargs)
        finally:
            monkeypatch.setattr(type(model.model.rotary_emb), "forward", forward)

    before = type(model.model).forward
    expected = logits(model)
    assert steps_at_once
    steps_at_once.clear()
    monkeypatch.setattr(type(model.model), "forward", only_sliding)
    monkeypatch.setattr(type(model.model.rotary_emb), "forward", forward)
    replace_modules(model)
    found = logits(model)
    assert (found - expected).abs().max() <= GELU * expected.abs().max() and not steps_at_once


def test_other_models_keep_their_forward():
    model = of_kind("llama")

    def forward(self, input_ids=None, **kwargs):
        return self.embed_tokens(input_ids)

    model.model.forward = forward
    replace_modules(model)
    assert model.model.forward is forward, "somebody else's stays"
    del model.model.forward
    replace_modules(model)
    assert isinstance(step_forward(model.model), StepForward)
    ours = logits(model)  # with layers of transformers, it finds nothing to do
    restore_modules([model.model])
    assert "forward" not in model.model.__dict__ and torch.equal(ours, logits(model))
    gemma = of_kind("gemma").bfloat16()
    quantise(gemma, "int8")
    ours = logits(gemma)
    check_own_forward(gemma, ours)
