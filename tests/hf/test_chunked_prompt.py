"""generate(prefill_chunk_size=...): the prompt's attention is exact, so a prompt in chunks is the prompt in one go."""

import functools
import inspect

import pytest
import torch
from transformers import GenerationMixin

import skimkv
from support.tiny_models import VOCAB, build, family

SPECS = [
    "Dense()",
    "Dense(kv='int4')",
    "SparQ(r=4, k=8)",
    "SparQ(r=4, k=8, channels='int8', mean_value=True)",
    "SparQ(r=4, k=8, channels='int4', kv='int4')",
    "TopK(k=6)",
    "LowRank(r=4, k=8)",
    "LMInfinite(k=40, initial=4)",
    "H2O(k=40)",
    "H2O(k=0.1)",
    "H2O(k=40, kv='int8')",
    "Quest(page=16, k=48)",
    "SnapKV(k=0.1)",
    "TOVA(k=40)",
    "SubGen(k=20, recent=20)",
    "SubGenStream(delta=4.0, t=3, s=16)",
    "Strided(k=40, local=8)",
    "Fixed(k=40, l=16, c=2)",
]
OPTIONS = {"max_new_tokens": 12, "do_sample": False}


@functools.cache
def model():
    """A tiny llama with room for long prompts."""
    return build("llama", num_key_value_heads=2, head_dim=16, max_position_embeddings=1024)


def random_ids(rows, n, seed=0):
    return torch.randint(3, VOCAB, (rows, n), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def detached():
    yield
    skimkv.detach(model())
    skimkv.detach(family("llama"))


def generate(ids, spec, size, cache=None, **options):
    cache = cache or skimkv.Cache(model(), spec)
    text = model().generate(ids, past_key_values=cache, prefill_chunk_size=size, **OPTIONS, **options)
    return text, cache


@pytest.mark.slow
@pytest.mark.parametrize(("n", "size", "pads"), [(600, 128, [0]), (193, 64, [0, 90, 64])])
@pytest.mark.parametrize("spec", SPECS)
def test_a_prompt_in_chunks(spec, n, size, pads):
    """193 = 3 * 64 + 1; the second row's padding ends in the second chunk, the third row's fills one chunk exactly."""
    ids, mask = random_ids(len(pads), n), (torch.arange(n) >= torch.tensor(pads)[:, None]).long()
    whole, expected = generate(ids, spec, None, attention_mask=mask)
    text, cache = generate(ids, spec, size, attention_mask=mask)
    assert text.tolist() == whole.tolist()
    assert cache.nbytes == expected.nbytes, "nothing of the prompt stays behind"
    assert [store.lengths for store in cache.stores] == [store.lengths for store in expected.stores]
    if len(pads) == 1:
        with skimkv.attach(model(), spec):
            assert model().generate(ids, prefill_chunk_size=size, **OPTIONS).tolist() == whole.tolist()


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, marks=[] if spec.startswith("SubGen") else pytest.mark.slow)
        for spec in SPECS
        if "kv=" not in spec
    ],
)
def test_a_second_turn_in_chunks(spec):
    """Its attention is exact over what the cache has kept, and over the turn.

    Older versions of the library feed the chunks of a second turn with the wrong mask: that is refused.
    """
    first, turn = random_ids(1, 150), random_ids(1, 101, 1)
    answers = []
    if "prefill_ids" not in inspect.getsource(GenerationMixin._prefill):
        text, cache = generate(first, spec, 32)
        with pytest.raises(ValueError, match="the attention mask covers"):
            generate(torch.cat([text, turn], 1), spec, 32, cache)
        return
    for size in (None, 32):
        text, cache = generate(first, spec, size)
        answers.append(generate(torch.cat([text, turn], 1), spec, size, cache)[0].tolist())
    assert answers[0] == answers[1]


def test_a_prompt_that_was_interrupted_goes_on(monkeypatch):
    ids = random_ids(1, 600)
    whole, _ = generate(ids, "H2O(k=40)", None)
    cache, forward, calls = skimkv.Cache(model(), "H2O(k=40)"), model().forward, []

    @functools.wraps(forward)
    def interrupted(*args, **kwargs):
        calls.append(cache.nbytes)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(model(), "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(ids, "H2O(k=40)", 128, cache)
    assert cache.get_seq_length() == 384
    assert calls[1] > 0 and calls[2] == 2 * calls[1] and calls[3] == 3 * calls[1], "the chunks are all kept"
    assert generate(ids, "H2O(k=40)", None, cache)[0].tolist() == whole.tolist()
    cache.reset()
    assert cache.nbytes == 0
    assert generate(ids, "H2O(k=40)", 128, cache)[0].tolist() == whole.tolist()


def test_a_prompt_by_hand_is_evicted_block_by_block():
    """Without generate() nobody knows where a prompt ends: every block is a prompt of its own, as documented."""
    ids = random_ids(1, 100)
    cache = skimkv.Cache(model(), "LMInfinite(k=40, initial=4)")
    with torch.no_grad():
        for block in ids.split(50, 1):
            model()(block, past_key_values=cache)
            assert cache.stores[0].history(slice(0, 1))[0].shape[2] == 40
