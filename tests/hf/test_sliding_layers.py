"""Layers of sliding attention: full attention as long as the window covers all tokens, otherwise the library's own."""

import copy
import random
import warnings
from types import SimpleNamespace

import pytest
import torch

import skimkv
from skimkv.eval.answer import Question, answer_questions
from skimkv.eval.shared_prompt import record_prompt
from skimkv.eval.traffic import RowCosts, cache_traffic
from skimkv.hf.attention_interface import attention as attention_function
from skimkv.hf.sliding_layer import SlidingLayer
from skimkv.methods import Dense
from skimkv.stores.base import Workspace
from support.generation import GREEDY, MODES, N, conversation, draft_of, forward
from support.kernels import NATIVE
from support.refusals import refuses
from support.tiny_models import build, family, padded, prompt, tokenizer

SIZES = {"num_key_value_heads": 2, "head_dim": 16}
MIXED = ["sliding_attention", "full_attention"]


def mistral(window, **options):
    return build("mistral", **SIZES, sliding_window=window, **options)


def test_a_method_that_decodes_no_layer_is_refused():
    model = mistral(8)
    before = model.config._attn_implementation, dict(model.__dict__)
    refuses(lambda: skimkv.Cache(model, "Dense()"), "no layer of full attention.*its 2 layers see only the last 8 tok")
    refuses(lambda: skimkv.Cache(model, "Dense()", max_tokens=9), "last 8 tokens")
    refuses(lambda: record_prompt(model, prompt(1, 9)), "last 8 tokens")
    assert before == (model.config._attn_implementation, model.__dict__), "a refused model is left as it was"
    with skimkv.attach(model, "TopK(k=4)"):
        refuses(lambda: model.generate(prompt(1, N), **GREEDY), "last 8 tokens")
        refuses(lambda: model.generate(prompt(1, 5), max_new_tokens=5), "last 8 tokens")


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
def test_a_window_that_covers_all_positions_is_full_attention(mode):
    """Both layers slide, over as many tokens as the model has positions: methods decode both of them."""
    model, caches = mistral(160), []
    expected = mode(model, lambda: None if mode is not conversation and mode is not forward else library(model))

    def make(spec):
        caches.append(skimkv.Cache(model, spec))
        return caches[-1]

    for spec in ("Dense()", "SparQ(r=4, k=128)", "H2O(k=128)"):
        assert mode(model, lambda spec=spec: make(spec)).tolist() == expected.tolist(), spec
        assert all(len(cache.stores) == 2 for cache in caches)
    assert mode(model, lambda: make("LMInfinite(k=2, initial=1)")).tolist() != expected.tolist()


def library(model):
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


@pytest.mark.parametrize("window", [43, 44, 160])
def test_a_window_that_covers_the_prompt_and_the_new_tokens(window):
    """24 tokens, then 19 that are cached and one that is not: attach decodes both layers from a window of 43 on."""
    model = mistral(window)
    expected = model.generate(prompt(1, N), **GREEDY).tolist()
    with skimkv.attach(model, "TopK(k=64)"):
        out = model.generate(prompt(1, N), **GREEDY, return_dict_in_generate=True)
        assert out.sequences.tolist() == expected
        assert len(out.past_key_values.stores) == 2
        if window < 160:
            refuses(lambda: model.generate(prompt(1, N + 2), **GREEDY), f"last {window} tokens")
    cache = skimkv.Cache(model, "LMInfinite(k=2, initial=1)", max_tokens=43)
    assert model.generate(prompt(1, N), past_key_values=cache, **GREEDY).tolist() != expected
    skimkv.detach(model)


def test_drafts_stay_within_the_window():
    """Drafts are cached before they are verified: where one may not fit, the method is refused before it decodes."""
    model, options = mistral(64), {"max_new_tokens": 41, "do_sample": False}
    with skimkv.attach(model, "H2O(k=4)"):
        expected = model.generate(prompt(1, N), **options).tolist()
        assert model.generate(prompt(1, N), assistant_model=draft_of(model), **options).tolist() == expected
        refuses(lambda: model.generate(prompt(1, N), prompt_lookup_num_tokens=4, **options), "last 64 tokens")
        options["max_new_tokens"] = 37
        shorter = model.generate(prompt(1, N), prompt_lookup_num_tokens=4, **options).tolist()
        assert shorter[0] == expected[0][: N + 37]


def test_drafts_of_sliding_layers_alone():
    """The first layer of this model slides: a draft that leaves after it has no layer that a method decodes."""
    model = family("gemma3")
    with skimkv.attach(model, "H2O(k=12)"):
        expected = model.generate(prompt(1, N), **GREEDY).tolist()
        assert model.generate(prompt(1, N), assistant_early_exit=1, **GREEDY).tolist() == expected
    assert model.config.num_hidden_layers == 2


@torch.no_grad()
def test_never_beyond_the_window():
    """A token that would not see all tokens before it is refused, decoded or in a block, compiled or not."""
    for compiled in (False, "eager"):
        model = mistral(30, max_position_embeddings=30)
        with skimkv.attach(model, "Dense()", compile=compiled):
            cache = skimkv.Cache(model, "Dense()")
            model(prompt(1, 26), past_key_values=cache)
            for _ in range(4):
                model(prompt(1, 1), past_key_values=cache)
            refuses(lambda: model(prompt(1, 1), past_key_values=cache), "31 tokens exceed this cache.* last 30")  # noqa: B023
        cache = skimkv.Cache(model, "Dense()")
        refuses(lambda: model(prompt(1, 31), past_key_values=cache), "31 tokens")  # noqa: B023


def test_mixed_layers_are_counted_in_one_warning():
    model = copy.deepcopy(family("gemma3"))
    with pytest.warns(UserWarning, match="decodes 1 of 2 layers; the others see only the last 8 tokens"):
        skimkv.Cache(model, "H2O(k=8)")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        skimkv.Cache(model, "H2O(k=8)")
        skimkv.attach(model, "H2O(k=8)")
        model.generate(prompt(1, N), **GREEDY)
    skimkv.detach(model)
    assert len(skimkv.Cache(model, "Dense()", max_tokens=8).layers) == 2
    kinds = [type(layer).__name__ for layer in skimkv.Cache(model, "Dense()", max_tokens=8).layers]
    assert kinds == ["Layer", "Layer"]
    with pytest.warns(UserWarning, match="1 of 2"):
        skimkv.attach(copy.deepcopy(family("gemma3")), "H2O(k=8)")


@torch.no_grad()
@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_the_librarys_sliding_layers_count_in_bytes_read(name):
    """min(window, n) rows of K and V, for every method and for dense alike; a window of 8 has 7 tokens before it."""
    model, batch = family(name), padded([N, 3])
    for spec in ("TopK(k=4)", "Dense()"):
        cache = skimkv.Cache(model, spec)
        model(**batch, past_key_values=cache)
        mask = torch.cat([batch["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
        model(prompt(2, 1), attention_mask=mask, past_key_values=cache)
        (store,) = cache.stores
        shape, method, dense = store.shape._replace(B=1), cache.method, Dense()
        for row, n in ((0, N), (1, 3)):
            cost = RowCosts(cache).step(row)
            sliding = dense.traffic(min(n, 7), shape, torch.float32)
            own, full = method.traffic(n, shape, torch.float32), dense.traffic(n, shape, torch.float32)
            assert cost.bytes == own.bytes + sliding.bytes and cost.elements == own.elements + sliding.elements
            assert cost.dense_bytes == full.bytes + sliding.bytes
            assert cost.dense_elements == full.elements + sliding.elements
        whole = cache_traffic(cache, steps_ago=1)
        assert whole.bytes == sum(RowCosts(cache).step(row).bytes for row in (0, 1))
    skimkv.detach(model)


def test_evaluation_decodes_sliding_layers_that_see_all_tokens():
    """Two methods behind one recorded prompt, in one batch: 24 tokens, 6 that are fed and 4 that are generated."""
    model, questions = mistral(34), [Question(prompt(1, 6, 1)[0].tolist(), scored=5, new_tokens=4)]
    full = mistral(None)  # the same weights
    answers = []
    for each, specs in ((full, ["Dense()", "TopK(k=4)"]), (model, ["Dense()", "TopK(k=4)"])):
        recorded = record_prompt(each, prompt(1, N), new_tokens=10)
        caches = [recorded.cache(skimkv.methods.parse(spec)) for spec in specs]
        assert all(len(cache.stores) == 2 for cache in caches)
        with torch.inference_mode():
            answers.append(answer_questions(each, tokenizer(), caches, recorded.logits, questions))
    assert answers[0] == answers[1]
    assert answers[1][0][0].cost.bytes > answers[1][1][0].cost.bytes > 0
    refuses(lambda: record_prompt(model, prompt(1, N), new_tokens=11), "last 34 tokens")


@torch.no_grad()
def test_counted_steps_and_the_closed_form_agree_on_sliding_layers():
    """Stores count what they read; the library's layers are added in closed form, step by step."""
    model = family("gemma3")
    cache = skimkv.Cache(model, "TopK(k=4)")
    model(prompt(1, 5), past_key_values=cache)
    steps = []
    for _ in range(6):
        model(prompt(1, 1), past_key_values=cache)
        own = cache.method.traffic(cache.get_seq_length() - 1, cache.stores[0].shape, torch.float32)
        steps.append(RowCosts(cache).step(0).bytes - own.bytes)
    assert steps == sorted(steps) and steps[0] < steps[1] < steps[2] == steps[-1], "the window is full after 7 tokens"
    assert RowCosts(cache).library_layers(0, 6).bytes == sum(steps)
    skimkv.detach(model)


def gemma3(window):
    model = copy.deepcopy(family("gemma3"))
    model.config.sliding_window = window
    for layer in model.model.layers:
        layer.self_attn.sliding_window = window if layer.self_attn.sliding_window else None
    return model


ACTIONS = ("token", "layer by layer", "reference", "block", "copy", "repeat", "select", "file", "reset", "record")


class Twins:
    """A cache of ours and the library's, which take the same tokens."""

    def __init__(self, model, pads):
        self.model, self.pads, self.seen = model, pads, 0
        self.ours, self.stock = skimkv.Cache(model, "Dense()"), library(model)

    @property
    def slid(self):
        return next(layer for layer in self.ours.layers if isinstance(layer, SlidingLayer))

    def feed(self, ids):
        """Take tokens (B,n), of which the first ones of a text may be padding, and compare the last one's logits."""
        self.seen += ids.shape[1]
        mask = (torch.arange(self.seen) >= torch.tensor(self.pads)[:, None]).long() if any(self.pads) else None
        found, expected = (
            self.model(ids, past_key_values=cache, attention_mask=mask).logits[:, -1]
            for cache in (self.ours, self.stock)
        )
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
        theirs = self.stock.layers[0].keys  # the first layer slides
        assert self.slid.kept == theirs.shape and self.slid.nbytes == 2 * theirs.nbytes

    def reset(self):
        self.ours.reset()
        self.stock, self.seen = library(self.model), 0


@pytest.mark.slow
@pytest.mark.skipif(not NATIVE, reason="the native library is not built")
@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*layers")
@pytest.mark.parametrize("seed", range(12))
def test_a_window_survives_all_that_happens_to_a_cache(seed, tmp_path):
    """Random steps of a cache whose sliding layers have their tokens in a store or as the library keeps them."""
    model, draw, rows = gemma3(8 if seed % 4 < 2 else 40), random.Random(seed), 1 + seed % 3
    skimkv.attach(model, "Dense()")
    twins, in_store = Twins(model, [draw.choice((0, 2, 3)) if seed % 2 else 0 for _ in range(rows)]), 0
    twins.feed(prompt(rows, 4 + seed))
    for action in ["token", "file", *draw.choices(ACTIONS, (8, 2, 1, 1, 1, 1, 1, 1, 0.3, 0.5), k=40)]:
        if action == "copy":
            twins.ours = copy.deepcopy(twins.ours)
        elif action == "repeat" and rows < 4:
            twins.ours.batch_repeat_interleave(2)
            twins.stock.batch_repeat_interleave(2)
            rows, twins.pads = 2 * rows, [pad for pad in twins.pads for _ in range(2)]
        elif action == "select":
            chosen = sorted(draw.sample(range(rows), max(1, rows - 1)))
            twins.ours.batch_select_indices(torch.tensor(chosen))
            twins.stock.batch_select_indices(torch.tensor(chosen))
            rows, twins.pads = len(chosen), [twins.pads[row] for row in chosen]
        elif action == "file":
            twins.ours.save(tmp_path / "cache")
            twins.ours = skimkv.Cache.load(tmp_path / "cache", model)
        elif action == "reset":
            twins.reset()
            twins.feed(prompt(rows, 6))
        elif action == "record":
            for cache in (twins.ours, twins.stock):
                cache.activate_past_recording()
            twins.feed(prompt(rows, 3))
            twins.seen -= 2
            for cache in (twins.ours, twins.stock):
                cache.crop(-2)
                cache.layers[0].record_past = False
            twins.ours.layers[1].record_past = False
        ids = prompt(rows, 3 if action == "block" else 1, seed=draw.randrange(1000))
        if action == "layer by layer":
            hook = model.get_submodule("model.layers.1").register_forward_hook(lambda *args: None)
            twins.feed(ids)
            hook.remove()
        else:
            with skimkv.backend("ref" if action == "reference" else "cpu"):
                twins.feed(ids)
        in_store += twins.slid.store is not None
    assert in_store > 10
    skimkv.detach(model)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_keyword_or_a_type_that_only_the_library_knows_is_left_to_it(dtype):
    torch.manual_seed(0)
    layer, module = (
        SlidingLayer(6, Workspace()),
        SimpleNamespace(num_key_value_groups=2, is_causal=True, _parameters={}),
    )
    keys, values = layer.update(*torch.randn(2, 1, 2, 7, 16, dtype=dtype))
    for unknown in ({}, {"a_keyword": 1}, {}):
        q, (k, v) = torch.randn(1, 4, 1, 16, dtype=dtype), torch.randn(2, 1, 2, 1, 16, dtype=dtype)
        keys, values = torch.cat([keys, k], 2)[:, :, -6:], torch.cat([values, v], 2)[:, :, -6:]
        expected = torch.nn.functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True).transpose(1, 2)
        y, _ = attention_function("sdpa", module, q, *layer.update(k, v), None, scaling=0.25, **unknown)
        assert (y - expected).abs().max() <= 1e-5
        assert not NATIVE or (layer.store is None) == (bool(unknown) or dtype == torch.float64)
    assert layer.get_seq_length() == 10 and layer.pending is None


@pytest.mark.skipif(not NATIVE, reason="the native library is not built")
@torch.no_grad()
def test_a_store_that_another_thread_uses_is_not_left():
    model = family("gemma3")
    cache = skimkv.Cache(model, "Dense()")
    for ids in (prompt(1, 12), prompt(1, 1)):
        model(ids, past_key_values=cache)
    slid = next(layer for layer in cache.layers if isinstance(layer, SlidingLayer))
    with slid.store.exclusive(), pytest.raises(RuntimeError, match="in use by another thread"):
        copy.deepcopy(cache)
    assert copy.deepcopy(cache).layers[0].keys.shape[2] == 7
    skimkv.detach(model)


@torch.no_grad()
def test_a_token_that_never_reaches_attention_is_noticed():
    model = family("gemma3")
    cache = skimkv.Cache(model, "Dense()")
    model(prompt(1, 12), past_key_values=cache)
    q, (k, v) = torch.randn(1, 4, 1, 16), torch.randn(2, 1, 2, 1, 16)
    marked, _ = cache.update(k, v, 0)
    with pytest.raises(RuntimeError, match="changes its values between cache and attention"):
        attention_function("sdpa", model.model.layers[0].self_attn, q, marked, v.clone(), None, scaling=1.0)
    with pytest.raises(RuntimeError, match="never reached the attention function"):
        cache.update(k, v, 1)
    skimkv.detach(model)


@pytest.mark.slow
@pytest.mark.skipif(not NATIVE, reason="the native library is not built")
@torch.no_grad()
def test_a_short_text_takes_no_memory_of_the_whole_window():
    """The store grows as the text does, in steps of all layers and of a loop that prepares one from the other."""
    most = 599
    model = gemma3(most + 1)
    model.config.max_position_embeddings = 2000
    settings = {"do_sample": False, "eos_token_id": None}
    text, expected = prompt(2, 9), model.generate(prompt(2, 9), max_new_tokens=800, **settings)
    cache, slots = skimkv.Cache(model, "Dense()"), []
    slid = next(layer for layer in cache.layers if isinstance(layer, SlidingLayer))
    for _ in range(8):
        text = model.generate(text, past_key_values=cache, max_new_tokens=100, **settings)
        slots.append(slid.store.capacity)
    assert slots == [128, 256, 512, 512, 512, most, most, most]
    assert torch.equal(text, expected)
    skimkv.detach(model)
