"""At full budget generate() gives the tokens of the model's own attention, whatever the model and the mode."""

import contextlib
import copy
import functools

import pytest
import torch
from transformers import DynamicCache, pipeline

import skimkv
from support.tiny_models import FAMILIES, family, padded, prompt, tokenizer

N = 24  # prompt
NEW = 20
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
# Every position fits, so these are dense attention by other roads.
FULL = ["SparQ(r=4, k=128)", "TopK(k=128)", "LMInfinite(k=128)", "H2O(k=128)", "SubGen(k=64, recent=128)"]
MORE = [
    "SparQ(r=4, k=128, channels='none')",
    "SparQ(r=4, k=128, channels='int8', mean_value=True)",
    "SparQ(r=4, k=128, channels='int4')",
    "TopK(k=128, oracle=True)",
    "LowRank(r=4, k=128)",
]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are too small for two
    yield
    torch.set_num_threads(before)


def draft_of(model):
    """An assistant that is often right and often wrong: the model with a little noise on its head."""
    draft = copy.deepcopy(model)
    torch.manual_seed(1)
    head = draft.get_output_embeddings().weight.data
    head += 0.1 * head.std() * torch.randn_like(head)
    return draft


def greedy(model, cache):
    return model.generate(prompt(1, N), past_key_values=cache(), **GREEDY)


def sampling(model, cache):
    torch.manual_seed(5)
    options = {"max_new_tokens": NEW, "do_sample": True, "top_k": 20, "num_return_sequences": 3}
    return model.generate(prompt(1, N), past_key_values=cache(), **options)


def padding(model, cache):
    return model.generate(**padded([N, 9, 17]), past_key_values=cache(), **GREEDY)


def beam(model, cache):
    options = {"num_beams": 3, "num_return_sequences": 2, **GREEDY}
    return model.generate(**padded([N, 13]), past_key_values=cache(), **options)


def assisted(model, cache):
    return model.generate(prompt(1, N), past_key_values=cache(), assistant_model=draft_of(model), **GREEDY)


def lookup(model, cache):
    ids = prompt(1, N // 2).repeat(1, 2)
    return model.generate(ids, past_key_values=cache(), prompt_lookup_num_tokens=4, **GREEDY)


def chunks(model, cache):
    """22 = 7 + 7 + 7 + 1: the last chunk looks like a decode step."""
    return model.generate(**padded([22, 12]), past_key_values=cache(), prefill_chunk_size=7, **GREEDY)


def conversation(model, cache):
    """Four turns on one cache, which has not seen the last token said; the fourth adds no other."""
    held, said = cache(), prompt(1, N)
    for turn in (prompt(1, 9, 1), prompt(1, 1, 2), prompt(1, 0), prompt(1, 0)):
        said = torch.cat([model.generate(said, past_key_values=held, max_new_tokens=7, do_sample=False), turn], 1)
    return said


@torch.no_grad()
def forward(model, cache):
    """No generate(): a padded block, a padded block, then single tokens through forward; the last logits' order."""
    batch, held = padded([N, 15]), cache()
    if held is None:
        pytest.skip("forward takes an explicit cache")
    mask, said = batch["attention_mask"], []
    for block in batch["input_ids"].split([6, N - 10, 1, 1, 1, 1], 1):
        seen = held.get_seq_length() + block.shape[1]
        places = (mask[:, :seen].cumsum(1) - 1).clamp(min=0)[:, -block.shape[1] :]
        out = model(block, attention_mask=mask[:, :seen], position_ids=places, past_key_values=held, use_cache=True)
        said.append(out.logits[:, -1])
    return torch.stack(said[1:]).argsort(-1)[..., -3:]


MODES = [greedy, sampling, padding, beam, assisted, lookup, chunks, conversation, forward]


def own(model, mode):
    return mode(model, lambda: DynamicCache(config=model.config))


def identical(model, mode, spec):
    expected = own(model, mode)
    with torch.no_grad():
        caches = []
        got = mode(model, lambda: caches.append(skimkv.Cache(model, spec)) or caches[-1])
    skimkv.detach(model)
    assert got.tolist() == expected.tolist()
    assert own(model, mode).tolist() == expected.tolist(), "detach must leave the model as it was"
    assert all(cache.get_seq_length() > N for cache in caches) or mode is forward


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("name", FAMILIES)
def test_dense_is_the_models_own_attention(name, mode):
    identical(family(name), mode, "Dense()")


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize(
    ("name", "spec"),
    [*((name, spec) for name in ("llama", "gemma2", "gpt2") for spec in FULL), *(("llama", spec) for spec in MORE)],
)
def test_every_method_at_full_budget(name, spec, mode):
    identical(family(name), mode, spec)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_coded_rows_are_near_and_every_road_is_the_same(name):
    """The error of the logits follows the step, 17 times as large in 4 bits; tokens are equal however verified."""
    model, ids = family(name), prompt(1, N)
    with torch.no_grad():
        expected = model(ids).logits[:, -6:].log_softmax(-1)
        for method in (skimkv.Dense, functools.partial(skimkv.H2O, 128)):
            errors = []
            for kv in ("int8", "int4"):
                cache = skimkv.Cache(model, method(kv=kv))
                model(ids[:, : N - 5], past_key_values=cache)
                said = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(N - 5, N)]
                errors.append((torch.cat(said, 1).log_softmax(-1) - expected[:, 1:]).square().mean().sqrt())
                a, b = (mode(model, lambda: skimkv.Cache(model, method(kv=kv))).tolist() for mode in (greedy, assisted))  # noqa: B023
                assert a == b and a[0][:N] == ids[0].tolist()
            assert errors[0] < 0.02 * expected.std() and 8 < errors[1] / errors[0] < 40, errors
    skimkv.detach(model)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("llama", "gemma2", "gpt2")])
def test_sparq_at_full_budget_on_the_other_families(name):
    for mode in (padding, beam, assisted, conversation):
        identical(family(name), mode, "SparQ(r=4, k=128)")


@pytest.mark.filterwarnings("ignore:.*no full-attention layer")
@pytest.mark.parametrize("name", FAMILIES)
def test_attach_inserts_the_cache(name):
    """Every mode without a cache of the caller's: generate() makes ours, and none is left when the block ends."""
    model = family(name)
    for mode in (greedy, sampling, padding, beam, assisted, lookup, chunks):
        expected = mode(model, lambda: None)
        with skimkv.attach(model, skimkv.SparQ(r=4, k=128)) as attached:
            assert attached.method == skimkv.SparQ(r=4, k=128)
            out = mode(model, lambda: None)
        assert out.tolist() == expected.tolist(), mode.__name__
    assert model.config._attn_implementation == ("eager" if name == "gemma2" else "sdpa")


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_pipeline(name):
    model, words = family(name), tokenizer()
    texts = [words.decode(row) for row in (*prompt(1, N), *prompt(1, 9, 1), *prompt(1, 14, 2))]
    say = pipeline("text-generation", model=model, tokenizer=words, device="cpu")
    options = {"batch_size": 3, "return_full_text": False, **GREEDY}
    expected = say(texts, **options)
    with skimkv.attach(model, "TopK(k=128)"):
        assert say(texts, **options) == expected
    with skimkv.attach(model, "LMInfinite(k=4, initial=1)"):
        assert say(texts, **options) != expected, "a method that drops tokens must be heard"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    """Other dtypes: the same logits to the dtype's rounding, prompt and decoded token."""
    model = copy.deepcopy(family("llama")).to(dtype)
    ids = prompt(1, N)
    # there is no kernel for float64, the oracle's dtype
    backend = skimkv.backend("ref") if dtype == torch.float64 else contextlib.nullcontext()
    with torch.no_grad(), backend:
        expected = model(ids).logits[:, -5:]
        cache = skimkv.Cache(model, "SparQ(r=16, k=128)")
        model(ids[:, : N - 4], past_key_values=cache)
        got = torch.cat([model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(N - 4, N)], 1)
    bound = 20 * torch.finfo(dtype).eps * expected.abs().max()
    assert (got - expected[:, 1:]).abs().max() < bound
    assert cache.layers[0].store.dtype == dtype
