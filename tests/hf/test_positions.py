"""Positions: what happens past those of a model, and LMInfinite(positions="cache"), which never goes past them."""

from __future__ import annotations

import copy
import sys
import warnings

import pytest
import torch
from transformers import AttentionInterface

import skimkv
from skimkv.eval import generate as generation
from skimkv.hf.positions import GREATEST_POSITION, check_length, positions_of
from skimkv.hf.rotary import key_rotations
from skimkv.methods import Dense
from support.generation import GREEDY, draft_of
from support.refusals import refuses
from support.tiny_models import build, padded, prompt, tokenizer, with_slow

GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 40}
# layouts of rotary embeddings: halves of all channels, halves of some, neighbours of all, neighbours of some, scaled
FAMILIES = {
    "llama": ("llama", GROUPED),
    "gpt_neox": ("gpt_neox", {}),
    "phi": ("phi", {}),
    "cohere": ("cohere", {"num_key_value_heads": 2}),
    "glm": ("glm", GROUPED),
    "yarn": ("llama", {**GROUPED, "rope_parameters": YARN}),
}
K, INITIAL = 9, 3
CACHE = f"LMInfinite(k={K}, initial={INITIAL}, positions='cache')"


class StreamingLLM:
    """A plain simulation: unrotated keys are cached, and rotated at their positions in the cache at every step.

    The model is fed position 0 everywhere, where its own rotation is none; its own functions then rotate here.
    """

    def __init__(self, model):
        self.model = copy.deepcopy(model)
        self.source = sys.modules[type(model).__module__]
        self.rotary = next(m for m in self.model.modules() if type(m).__name__.endswith("RotaryEmbedding"))
        self.cached = {}
        AttentionInterface.register("streaming_llm_simulation", self.attend)
        self.model.set_attn_implementation("streaming_llm_simulation")

    def turn(self, x, positions):
        """Rotate x (1,H,n,D) by the model's own functions, to these positions."""
        cos, sin = (f / self.rotary.attention_scaling for f in self.rotary(x, torch.tensor([positions])))
        width = x.shape[-1] if self.model.config.model_type == "glm" else cos.shape[-1]  # its function slices itself
        turned, _ = self.source.apply_rotary_pos_emb(x[..., :width], x[..., :width], cos, sin)
        return torch.cat([turned, x[..., width:]], -1)

    def attend(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        layer, n = module.layer_idx, query.shape[2]
        keys, values = (
            torch.cat([old, new], 2) if old is not None else new
            for old, new in zip(self.cached.get(layer, (None, None)), (key, value), strict=True)
        )
        m = keys.shape[2]
        q, k = self.turn(query, list(range(m - n, m))), self.turn(keys, list(range(m)))
        G = q.shape[1] // k.shape[1]
        logits = q @ k.repeat_interleave(G, 1).transpose(2, 3) * scaling
        future = torch.ones(n, m, dtype=torch.bool).triu(m - n + 1)
        y = logits.masked_fill(future, -torch.inf).softmax(-1) @ values.repeat_interleave(G, 1)
        if m > K:
            keys, values = (torch.cat([x[:, :, :INITIAL], x[:, :, INITIAL - K :]], 2) for x in (keys, values))
        self.cached[layer] = keys, values
        return y.transpose(1, 2).contiguous(), None

    @torch.no_grad()
    def logits(self, ids, blocks):
        """The logits after every block of one text, ids (1,n)."""
        self.cached.clear()
        parts = ids.split(blocks, 1)
        return torch.stack([self.model(x, position_ids=x * 0, use_cache=False).logits[0, -1] for x in parts])


@torch.no_grad()
def streamed(model, ids, blocks, method=CACHE):
    """The same logits from skimkv: (blocks,B,V)."""
    cache = skimkv.Cache(model, method)
    return torch.stack([model(x, past_key_values=cache).logits[:, -1] for x in ids.split(blocks, 1)])


@pytest.mark.parametrize("name", with_slow(FAMILIES, ("llama", "phi", "glm", "yarn")))
@pytest.mark.parametrize("first", [6, 30])
def test_positions_in_the_cache_are_streaming_llm(name, first):
    """A prompt shorter or longer than the window, then single tokens, then a block, then single tokens."""
    kind, options = FAMILIES[name]
    model, ids = build(kind, **options), prompt(2, first + 40)
    blocks = [first, *[1] * 25, 5, *[1] * 10]
    got = streamed(model, ids, blocks)
    simulation = StreamingLLM(model)
    for row in range(2):
        torch.testing.assert_close(got[:, row], simulation.logits(ids[row : row + 1], blocks), rtol=0, atol=2e-4)
    other = streamed(model, ids, blocks, CACHE.replace("cache", "text"))
    assert (got[-1] - other[-1]).abs().max() > 1e-2, "positions in the text are something else"


@torch.no_grad()
def test_padded_rows_beams_and_copies_stream_as_rows_alone():
    model, batch, more = build("llama", **GROUPED), padded([24, 5, 13]), prompt(3, 30, 1)
    cache, mask = skimkv.Cache(model, CACHE), batch["attention_mask"]
    model(**batch, position_ids=(mask.cumsum(1) - 1).clamp(0), past_key_values=cache)

    def feed(cache, token):
        nonlocal mask
        mask = torch.cat([mask, mask.new_ones(len(token), 1)], 1)
        places = mask.sum(1, keepdim=True) - 1
        return model(token, attention_mask=mask, position_ids=places, past_key_values=cache).logits[:, -1]

    for i in range(20):
        feed(cache, more[:, i : i + 1])
    order = torch.tensor([1, 0, 1])
    cache.reorder_cache(order)
    mask = mask[order]
    twin = copy.deepcopy(cache)
    got = torch.stack([feed(cache, more[order, i : i + 1]) for i in range(20, 30)])
    mask = mask[:, :-10]
    assert torch.equal(torch.stack([feed(twin, more[order, i : i + 1]) for i in range(20, 30)]), got)
    simulation, lengths = StreamingLLM(model), [24, 5, 13]
    for column, row in enumerate(order.tolist()):
        n = lengths[row]
        alone = torch.cat([batch["input_ids"][row : row + 1, 24 - n :], more[row : row + 1]], 1)
        expected = simulation.logits(alone, [n, *[1] * 30])[-10:]
        torch.testing.assert_close(got[:, column], expected, rtol=0, atol=2e-4)


@torch.no_grad()
def test_generate_and_drafts_and_crop():
    model, ids = build("llama", **GROUPED), prompt(1, 24)
    tokens = model.generate(ids, past_key_values=skimkv.Cache(model, CACHE), **GREEDY)
    simulation = StreamingLLM(model)
    expected = simulation.logits(tokens[:, :-1], [24, *[1] * (tokens.shape[1] - 25)]).argmax(-1)
    assert tokens[0, 24:].tolist() == expected.tolist()
    for options in ({"assistant_model": draft_of(model)}, {"prompt_lookup_num_tokens": 4}):
        drafted = model.generate(ids, past_key_values=skimkv.Cache(model, CACHE), **options, **GREEDY)
        assert drafted.tolist() == tokens.tolist()
    cache = skimkv.Cache(model, CACHE)
    model(ids, past_key_values=cache)
    refuses(lambda: cache.crop(-1), "has dropped tokens")


def test_models_that_cannot_turn_their_keys_are_refused():
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    ministral = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1}}
    for model, why in (
        (build("gpt2"), "no rotary position embeddings"),
        (build("llama", **GROUPED, rope_parameters=dynamic), "'dynamic'.* change with the length"),
        (build("llama", **GROUPED, **ministral), "scales its queries"),
    ):
        for call in (skimkv.attach, skimkv.Cache):
            before = dict(model.__dict__)
            refuses(
                lambda call=call, model=model: call(model, CACHE), f"{type(model).__name__}: .*{why}.*use LMInfinite"
            )
            assert model.__dict__ == before, "a refused model is left as it was"


def test_a_model_that_turns_its_keys_in_another_way_is_refused(monkeypatch):
    model = build("llama", **GROUPED)
    source = sys.modules[type(model).__module__]
    own = source.apply_rotary_pos_emb
    monkeypatch.setattr(source, "apply_rotary_pos_emb", lambda q, k, cos, sin: own(q, k, cos, -sin))
    refuses(lambda: skimkv.Cache(model, CACHE), "the keys of layer 0 are not turned")
    monkeypatch.undo()
    skimkv.Cache(model, CACHE)
    model.model.rotary_emb.inv_freq *= 0.5  # found again, and not remembered
    assert torch.equal(key_rotations(model)[0].frequencies, model.model.rotary_emb.inv_freq.double())


@torch.no_grad()
def test_past_the_positions_warns_once_for_each_model():
    for method in ("Dense()", "H2O(k=8)", "LMInfinite(k=20)"):
        model = build("llama", **GROUPED)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache = skimkv.Cache(model, method)
            model(prompt(1, 160), past_key_values=cache)
        with pytest.warns(UserWarning, match="161 tokens go past the 160 positions .* LlamaForCausalLM") as caught:
            model(prompt(1, 1), past_key_values=cache)
        assert len(caught) == 1 and "\n" not in str(caught[0].message)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(prompt(1, 1), past_key_values=cache)
            model(prompt(1, 200), past_key_values=skimkv.Cache(model, method))
    model = build("llama", **GROUPED)
    with skimkv.attach(model, "Dense()", compile="eager"), pytest.warns(UserWarning, match="161 tokens go past"):
        model.generate(prompt(1, 159), max_new_tokens=3, do_sample=False)
    model = build("llama", **GROUPED)
    with skimkv.attach(model, "TopK(k=4)"), pytest.warns(UserWarning, match="170 tokens go past"):
        model.generate(prompt(1, 170), **GREEDY)


@torch.no_grad()
def test_positions_in_the_cache_do_not_go_past_the_models():
    model = build("llama", **GROUPED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = skimkv.Cache(model, CACHE)
        sizes = []
        for block in (100, 100, *[1] * 20, 151):  # 9 are kept: 160 positions
            model(prompt(1, block), past_key_values=cache)
            sizes.append((cache.nbytes, cache.allocated))
        assert len(set(sizes)) == 1 and cache.get_seq_length() == 371
    with pytest.warns(UserWarning, match="161 tokens go past"):
        model(prompt(1, 152), past_key_values=cache)


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
@torch.no_grad()
def test_learned_positions_end_in_one_line(kind):
    model = build(kind, **({"ffn_dim": 96, "word_embed_proj_dim": 64} if kind == "opt" else {}))
    assert positions_of(model).table == 160
    with skimkv.attach(model, "Dense()"):
        refuses(lambda: model.generate(prompt(1, 161), **GREEDY), "161 tokens exceed the 160 positions")
        refuses(lambda: model.generate(prompt(1, 150), **GREEDY), "161 tokens exceed the 160 positions")
        whole = model.generate(prompt(1, 150), max_new_tokens=11, do_sample=False)
        assert whole.shape[1] == 161, "the last token is not fed"
    check_length(model, 160)
    refuses(lambda: check_length(model, 161), "161 tokens do not fit the 160 positions")
    cache = skimkv.Cache(model, "H2O(k=8)")
    model(prompt(1, 160), past_key_values=cache)
    refuses(lambda: model(prompt(1, 1), past_key_values=cache), "161 tokens exceed")
    skimkv.detach(model)
    assert not model._forward_pre_hooks and not model._forward_pre_hooks_with_kwargs
    with pytest.raises(IndexError):
        model(prompt(1, 161))


@pytest.mark.parametrize("compiled", [False, "eager"])
@torch.no_grad()
def test_a_text_whose_positions_begin_anew_stays_within_a_table(compiled):
    """200 tokens at positions 0 to 99, twice."""
    model, ids = build("gpt2"), prompt(1, 200)
    positions = torch.arange(100).repeat(2)[None]
    expected = model(ids, position_ids=positions).logits[:, 150:]
    with skimkv.attach(model, "Dense()", compile=compiled):
        cache = skimkv.Cache(model, "Dense()")
        model(ids[:, :150], position_ids=positions[:, :150], past_key_values=cache)
        steps = [
            model(ids[:, i : i + 1], position_ids=positions[:, i : i + 1], past_key_values=cache).logits
            for i in range(150, 200)
        ]
        torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=1e-4, atol=1e-4)
        refuses(lambda: model(ids[:, :1], past_key_values=cache), "201 tokens exceed the 160 positions")
        far = torch.tensor([[160]])
        refuses(lambda: model(ids[:, :1], position_ids=far, past_key_values=cache), "161 tokens exceed")


def test_generated_text_ends_with_a_table_of_positions():
    model, ids = build("gpt2"), prompt(1, 150)[0].tolist()
    with pytest.warns(UserWarning, match="GPT2LMHeadModel has 160 positions: at most 11 tokens follow"):
        assert generation.run(model, tokenizer(), ids, Dense(), 40).new_tokens == 11
    with pytest.warns(UserWarning, match="161 tokens go past the 160 positions"):
        assert generation.run(build("llama", **GROUPED), tokenizer(), ids, Dense(), 40).new_tokens == 40


def test_positions_that_float32_cannot_tell_apart_are_refused():
    model = build("llama", **GROUPED)
    cache = skimkv.Cache(model, CACHE)
    model(prompt(1, 20), past_key_values=cache)
    for layer in cache.layers:
        layer.seen = GREATEST_POSITION
        layer.store.lengths = [GREATEST_POSITION]
    refuses(lambda: model(prompt(1, 1), past_key_values=cache), "begin a new cache")
