"""attach, detach and Cache: which models are refused, what stays as it is, and how misuse ends."""

import copy
import json
import os
import subprocess
import sys
import warnings

import pytest
import torch
from transformers import DynamicCache, StaticCache

import skimkv
from support.generation import GREEDY, NEW, N
from support.refusals import refuses
from support.tiny_models import FAMILIES, WITH_FULL_ATTENTION, build, family, new_family, padded, prompt, with_slow

HEADS = {"num_key_value_heads": 2, "head_dim": 16}
MOE = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32}
REFUSED = [
    ("deepseek_v3", {"num_key_value_heads": 4, **MOE}, "one latent vector a token"),
    ("bloom", {}, "another attention function"),
    ("falcon", {}, "another attention function"),
    ("mpt", {}, "another attention function"),
    ("gptj", {"rotary_dim": 8, "n_embd": 64, "n_head": 4, "n_layer": 2}, "another attention function"),
    ("minimax", {**HEADS, "num_local_experts": 4}, "no cache but a MiniMaxCache"),
    ("bert", {}, "layer 0 is not causal"),
    ("doge", {"num_key_value_heads": 2}, "between cache and attention"),
    ("jetmoe", {"num_key_value_heads": 2, "kv_channels": 16, "num_local_experts": 4}, "between cache and attention"),
]


@pytest.fixture(autouse=True)
def detached():
    yield
    for name in FAMILIES:
        skimkv.detach(family(name))


@pytest.mark.parametrize(("kind", "options", "why"), REFUSED, ids=[kind for kind, _, _ in REFUSED])
def test_models_that_are_not_supported_are_refused(kind, options, why):
    model = build(kind, **options)
    before = model.config._attn_implementation, dict(model.__dict__)
    for call in (skimkv.attach, skimkv.Cache):
        refuses(lambda call=call: call(model, "Dense()"), f"{type(model).__name__} is not supported: .*{why}")
    assert before == (model.config._attn_implementation, model.__dict__), "a refused model is left as it was"


def test_refused_encoder_decoder_shared_layers_and_strangers():
    from transformers import AutoModelForSeq2SeqLM, BartConfig

    sizes = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    bart = BartConfig(vocab_size=97, d_model=32, encoder_layers=1, decoder_layers=1, **sizes)
    refuses(lambda: skimkv.attach(AutoModelForSeq2SeqLM.from_config(bart), "Dense()"), "encoder-decoder")
    for stranger in (torch.nn.Linear(2, 2), torch.compile(family("llama"), backend="eager"), None):
        for call in (skimkv.attach, skimkv.Cache):
            refuses(
                lambda call=call, model=stranger: call(model, "Dense()"), "is not a transformers model; if it wraps"
            )
        refuses(lambda model=stranger: skimkv.detach(model), f"{type(stranger).__name__} is not a transformers model")
    refuses(lambda: skimkv.attach(family("llama"), "Dens()"), "did you mean Dense")
    cache = skimkv.Cache(family("llama"), "SparQ(r=17, k=4)")
    refuses(lambda: family("llama")(prompt(), past_key_values=cache), "r = 17")


@torch.no_grad()
@pytest.mark.parametrize("name", with_slow(WITH_FULL_ATTENTION))
def test_other_caches_get_the_models_own_answer(name):
    """While a method is attached: no cache, library caches, chunks, right padding and 4-D masks, all bit for bit."""
    model, ids = new_family(name), prompt(2, N)  # to which no cache of another test gave our layers
    batch, right = padded([N, 10]), torch.ones(2, N, dtype=torch.long)
    right[1, 11:] = 0
    corner = torch.ones(2, 1, N, N, dtype=torch.bool).tril()
    corner[:, :, 12:, 3:6] = False
    if model.config._attn_implementation == "eager":
        corner = torch.where(corner, 0.0, torch.finfo(torch.float32).min)

    def answers():
        yield model(ids, use_cache=False).logits
        yield model(**batch).logits[:, -1]
        yield model(ids, attention_mask=right).logits[1, :11]
        places = torch.arange(N)[None]  # opt would count them from a 2-D mask
        yield model(ids, attention_mask=corner, position_ids=places, use_cache=False).logits
        for cache in (DynamicCache(config=model.config), DynamicCache()):
            for chunk in batch["input_ids"].split([9, 14, 1], 1):
                mask = batch["attention_mask"][:, : cache.get_seq_length() + chunk.shape[1]]
                yield model(chunk, attention_mask=mask, past_key_values=cache).logits[0]
        static = StaticCache(config=model.config, max_cache_len=N + NEW)
        yield model.generate(ids, past_key_values=static, **GREEDY)
        yield model.generate(ids, past_key_values=DynamicCache(), **GREEDY)

    expected = list(answers())
    with skimkv.attach(model, "LMInfinite(k=2, initial=1)", fast=False) as attached:
        attached.has_warned = True  # as the next test expects
        for i, (got, own) in enumerate(zip(answers(), expected, strict=True)):
            assert torch.equal(got, own), f"answer {i} differs by {(got - own).abs().max()}"


def test_training_while_attached():
    model, ids = copy.deepcopy(family("gemma2")).train(), prompt(2, N)
    grads = []
    for _ in range(2):
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        grads.append(model.get_input_embeddings().weight.grad.clone())
        skimkv.attach(model, "H2O(k=4)").has_warned = True
    assert torch.equal(*grads)


def static(model):
    return StaticCache(config=model.config, max_cache_len=N + NEW)


@torch.no_grad()
def by_hand(model, cache):
    """A loop of forward passes, as people write it."""
    out = model(prompt(1, N), past_key_values=cache)
    for _ in range(3):
        out = model(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values)


@torch.no_grad()
def by_hand_without_a_cache(model, cache):
    ids = prompt(1, N)
    for _ in range(3):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)


def by_generate(model, cache):
    model.generate(prompt(1, N), past_key_values=cache, **GREEDY)


DENSE = {
    "generate() with a cache of the library": (by_generate, lambda model: DynamicCache(), "a DynamicCache"),
    "generate() with a static cache": (by_generate, static, "a StaticCache"),
    "a loop": (by_hand, lambda model: None, "no cache"),
    "a loop with a cache of the library": (by_hand, lambda model: DynamicCache(config=model.config), "a DynamicCache"),
    "a loop without a cache": (by_hand_without_a_cache, lambda model: None, "no cache"),
    "a forward of the decoder": (
        lambda model, cache: model.get_decoder()(prompt(1, N)),
        lambda model: None,
        "no cache",
    ),
    "scoring": (lambda model, cache: model(prompt(1, N), labels=prompt(1, N)), lambda model: None, "no cache"),
    "a user's own compilation": (
        lambda model, cache: torch.no_grad()(torch.compile(model, backend="eager"))(prompt(1, N)),
        lambda model: None,
        "no cache",
    ),
}


@pytest.mark.parametrize(
    ("name", "way"),
    [pytest.param("llama", way, marks=pytest.mark.slow if "compilation" in way else ()) for way in DENSE]
    + [("opt", way) for way in DENSE if "compilation" not in way],
)
def test_dense_answers_of_an_attached_model_are_named_once(name, way):
    """Somebody might take them for the method's: a warning says so, once for each attach, and only there."""
    run, make_cache, what = DENSE[way]
    model = family(name)
    for _ in range(2):
        with skimkv.attach(model, "H2O(k=8)"):
            with pytest.warns(
                UserWarning, match=rf"^H2O\(k=8\) is attached, but \w+ was called with {what}: .*"
            ) as got:
                run(model, make_cache(model))
            assert len([w for w in got if "is attached" in str(w.message)]) == 1 and "\n" not in str(got[0].message)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                run(model, make_cache(model))
    cache = skimkv.Cache(model, "H2O(k=8)")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, make_cache(model))
        skimkv.detach(model)
        run(model, make_cache(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with skimkv.attach(model, "H2O(k=8)"):
            model.generate(prompt(1, N), **GREEDY)
            model(prompt(1, N), past_key_values=cache)
            if name == "llama":
                skimkv.attach(model, "StreamingLLM(k=8)")  # which runs the model to see how it turns keys


def test_attach_nests_and_leaves_no_trace(tmp_path):
    model = family("llama")
    clean, ids = dict(model.__dict__), prompt(1, N)
    own = model.generate(ids, **GREEDY).tolist()
    with skimkv.attach(model, "LMInfinite(k=2, initial=1)"):
        outer = model.generate(ids, **GREEDY).tolist()
        with skimkv.attach(model, "Dense()"):
            assert model.generate(ids, **GREEDY).tolist() == own
        assert model.generate(ids, **GREEDY).tolist() == outer != own
        model.save_pretrained(tmp_path)
        twin = copy.deepcopy(model)
    assert "skimkv" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    assert model.__dict__ == clean
    assert model.generate(ids, **GREEDY).tolist() == own
    assert twin.generate(ids, **GREEDY).tolist() == outer, "a copy of an attached model is attached itself"
    with pytest.raises(KeyError, match="boom"), skimkv.attach(model, "Dense()"):
        raise KeyError("boom")
    assert model.__dict__ == clean
    skimkv.detach(model)
    cache = skimkv.Cache(model, "Dense()")
    with skimkv.attach(model, "TopK(k=4)"):
        pass
    assert model.generate(ids, past_key_values=cache, **GREEDY).tolist() == own, "a cache made before stays good"
    assert model.generate(ids, **GREEDY).tolist() == own


def test_masks_that_are_not_left_padding():
    model, ids = family("llama"), prompt(3, N)
    for row, position, where in ((1, 20, slice(20, None)), (2, 5, slice(5, 7)), (0, 4, slice(4, 5))):
        mask = torch.ones(3, N, dtype=torch.long)
        mask[0, :2] = 0
        mask[row, where] = 0
        refuses(
            lambda mask=mask: model(ids, attention_mask=mask, past_key_values=skimkv.Cache(model, "Dense()")),
            f"row {row}, position {position}",
        )
    short, square = torch.ones(3, N - 1), torch.ones(3, 1, N, N, dtype=torch.bool).tril()
    refuses(lambda: model(ids, attention_mask=short, past_key_values=skimkv.Cache(model, "Dense()")), "23 of 24")
    refuses(lambda: model(ids, attention_mask=square, past_key_values=skimkv.Cache(model, "Dense()")), "mask of shape")
    cache, batch = skimkv.Cache(model, "Dense()"), padded([N, 10])
    model(**batch, past_key_values=cache)
    refuses(lambda: model(prompt(2, 1), past_key_values=cache), r"cache holds \[24, 24\] .* it holds \[24, 10\]")


def test_arguments_that_change_the_answer():
    model, ids = family("llama"), prompt(1, N)
    for option in ({"output_attentions": True}, {"position_bias": torch.zeros(1)}):
        cache = skimkv.Cache(model, "Dense()")
        refuses(lambda option=option, cache=cache: model(ids, past_key_values=cache, **option), next(iter(option)))


def test_a_block_that_never_reaches_the_attention_function():
    model, ids = family("llama"), prompt(1, N)
    cache = skimkv.Cache(model, "Dense()")
    model.set_attn_implementation("eager")
    refuses(lambda: model(ids, past_key_values=cache), "a cached block never reached", RuntimeError)
    skimkv.detach(model)
    cache.reset()
    refuses(lambda: model.generate(ids, past_key_values=cache, **GREEDY), "never reached", RuntimeError)


@torch.no_grad()
def test_an_interrupted_forward_spoils_the_cache_and_says_so(monkeypatch):
    model, ids = family("llama"), prompt(1, N)
    cache = skimkv.Cache(model, "Dense()")
    model(ids, past_key_values=cache)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1], "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, :1], past_key_values=cache)
    refuses(lambda: model(ids[:, :1], past_key_values=cache), "half updated", RuntimeError)
    cache.reset()
    assert model.generate(ids, past_key_values=cache, **GREEDY).tolist() == model.generate(ids, **GREEDY).tolist()


def test_masks_that_lose_their_attributes_between_devices():
    """A device map copies the mask from layer to layer: a copy carries the counts, which is all our layers need."""
    model, batch = copy.deepcopy(family("llama")), padded([N, 10])
    expected = model.generate(**batch, **GREEDY)

    def copied(module, args, kwargs):
        return args, {**kwargs, "attention_mask": kwargs["attention_mask"].clone()}

    for block in model.model.layers:
        block.register_forward_pre_hook(copied, with_kwargs=True)
    cache = skimkv.Cache(model, "Dense()")
    assert model.generate(**batch, past_key_values=cache, **GREEDY).tolist() == expected.tolist()
    refuses(lambda: model(**batch), "lost its form between devices", RuntimeError)


@pytest.mark.parametrize(("name", "value"), [("SKIMKV_BACKEND", "foo"), ("SKIMKV_ISA", "sse9")])
@pytest.mark.slow
def test_a_bad_variable_is_refused_before_the_first_token(name, value):
    code = "import skimkv; model, _ = skimkv.load('builtin'); skimkv.Cache(model, 'H2O(k=16)')"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, name: value}, capture_output=True, text=True)
    assert done.returncode != 0 and "ValueError" in done.stderr and value in done.stderr.splitlines()[-1]
