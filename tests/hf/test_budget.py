"""Small budgets: right positions, rows that do not see each other, bytes within the bound, exact crops."""

import pytest
import torch
from transformers import DynamicCache

import skimkv
from skimkv.hf.layer import Layer
from support.generation import GREEDY, NEW, N, assisted, draft_of, lookup
from support.tiny_models import WITH_FULL_ATTENTION, family, padded, prompt, with_slow

SMALL = [
    "SparQ(r=4, k=8)",
    "SparQ(r=4, k=8, channels='int8', mean_value=True)",
    "TopK(k=6)",
    "LowRank(r=4, k=8)",
    "LMInfinite(k=8, initial=2)",
    "H2O(k=10)",
    "H2O(k=0.5)",
    "SnapKV(k=0.5, window=3)",
    "TOVA(k=10)",
    "SubGen(k=5, recent=6)",
    "SubGenStream(delta=4.0, t=3, s=8)",
]
FAMILIES = ["llama", "gemma2", "gpt2"]
MIXED = ("gemma2", "gemma3", "gpt_oss")  # their sliding layers would need another mask than the full ones
# Every family with every method, but for the one that cannot cap logits. gpt2 takes the same way as llama: slow.
PAIRS = [(name, spec) for name in FAMILIES for spec in SMALL if (name, spec) != ("gemma2", SMALL[-1])]
EVERY_PAIR = [pytest.param(*pair, marks=pytest.mark.slow if pair[0] == "gpt2" else ()) for pair in PAIRS]


@pytest.fixture(autouse=True)
def detached():
    yield
    for name in WITH_FULL_ATTENTION:
        skimkv.detach(family(name))


def masked(model, ids, k, initial, steps):
    """The window by the model's own attention: dense prompt, then one token at a time under an explicit mask."""
    cache, tokens = DynamicCache(), []
    logits = model(ids, past_key_values=cache).logits[:, -1]
    for n in range(ids.shape[1], ids.shape[1] + steps):
        tokens.append(logits.argmax(-1))
        seen = torch.arange(n + 1)
        keep = (seen < initial) | (seen >= n - (k - initial)) if n > k else seen >= 0
        eager = model.config._attn_implementation == "eager"
        mask = torch.where(keep, 0.0, torch.finfo(torch.float32).min) if eager else keep
        step = {"attention_mask": mask.view(1, 1, 1, -1), "position_ids": torch.tensor([[n]])}
        logits = model(tokens[-1][:, None], past_key_values=cache, **step).logits[:, -1]
    return torch.stack(tokens, 1)


@torch.no_grad()
@pytest.mark.parametrize("name", with_slow(name for name in WITH_FULL_ATTENTION if name not in MIXED))
def test_positions_stay_right(name):
    """LM-Infinite, which drops what it does not read, against the model's own attention and a mask."""
    model, ids = family(name), prompt(1, N)
    expected = masked(model, ids, 12, 3, NEW)
    cache = skimkv.Cache(model, "LMInfinite(k=12, initial=3)")
    got = model.generate(ids, past_key_values=cache, **GREEDY)[:, N:]
    assert got.tolist() == expected.tolist()
    skimkv.detach(model)
    assert got.tolist() != model.generate(ids, **GREEDY)[:, N:].tolist(), "the window must change the text"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "spec"), EVERY_PAIR)
def test_a_padded_row_is_the_row_alone(name, spec):
    model, lengths = family(name), [N, 7, 15]
    batch = padded(lengths)
    together = model.generate(**batch, past_key_values=skimkv.Cache(model, spec), **GREEDY)
    for row, length in enumerate(lengths):
        ids = batch["input_ids"][row : row + 1, N - length :]
        alone = model.generate(ids, past_key_values=skimkv.Cache(model, spec), **GREEDY)
        assert together[row, N:].tolist() == alone[0, length:].tolist(), f"row {row}"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "spec"), [*EVERY_PAIR, *((name, "Dense()") for name in FAMILIES)])
def test_bytes_stay_at_the_bound(name, spec):
    model, method, batch = family(name), skimkv.parse(spec), padded([N, 15])
    cache = skimkv.Cache(model, method)
    with skimkv.backend("ref"):  # the one that counts
        model.generate(**batch, past_key_values=cache, **GREEDY)
    assert cache.get_seq_length() == N + NEW - 1, "tokens seen, padding included, whatever was dropped"
    layers = [layer for layer in cache.layers if isinstance(layer, Layer)]
    library = [layer for layer in cache.layers if layer not in layers]
    assert len(layers) == (1 if name == "gemma2" else 2)
    for layer in layers:
        assert layer.store.lengths == [N + NEW - 1, 15 + NEW - 1]
        later = layer.store.observed() if isinstance(method, skimkv.SnapKV) else {}  # tokens that stay after the prompt
        assert 0 < layer.nbytes <= method.bound(N + NEW - 1, layer.store.shape, torch.float32, **later)
    total = sum(layer.nbytes for layer in layers) + sum(2 * layer.keys.nbytes for layer in library)
    assert cache.nbytes == total <= cache.allocated
    assert cache.bytes > cache.elements > 0


# A draft by a second model costs more than one from the text, and what it proposes is taken back in the same way.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "spec", "mode"),
    [
        *((name, spec, lookup) for name in FAMILIES for spec in SMALL if (name, spec) in PAIRS),
        *(("llama", spec, assisted) for spec in SMALL),
        ("gemma2", "SparQ(r=4, k=8)", assisted), ("gemma2", "H2O(k=10)", assisted),
    ],
)  # fmt: skip
def test_assisted_is_greedy(name, spec, mode):
    """A draft read in one block, verified and taken back is as if it never was: same tokens, same cache."""
    model = family(name)
    ids = prompt(1, N) if mode is assisted else prompt(1, N // 2).repeat(1, 2)
    caches = [skimkv.Cache(model, spec) for _ in range(2)]
    plain = model.generate(ids, past_key_values=caches[0], **GREEDY)
    drafted = mode(model, lambda: caches[1])
    assert drafted.tolist() == plain.tolist()
    assert caches[1].get_seq_length() == caches[0].get_seq_length()
    ends = [model.generate(plain, past_key_values=cache, max_new_tokens=8, do_sample=False) for cache in caches]
    assert ends[0].tolist() == ends[1].tolist()
    assert caches[1].nbytes == caches[0].nbytes


def test_assisted_decoding_starts_with_a_new_cache():
    """transformers feeds the whole text again to a cache that already holds it; its own answers are wrong then."""
    model = family("llama")
    cache = skimkv.Cache(model, "Dense()")
    text = model.generate(prompt(1, N), past_key_values=cache, **GREEDY)
    with pytest.raises(ValueError, match=r"assisted decoding .* 43 tokens"):
        model.generate(text, past_key_values=cache, prompt_lookup_num_tokens=3, **GREEDY)


def test_a_method_that_cannot_cap_logits_says_so():
    model = family("gemma2")
    with pytest.raises(ValueError, match="cannot cap logits"):
        model.generate(prompt(1, N), past_key_values=skimkv.Cache(model, SMALL[-1]), **GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SMALL)
def test_an_assistant_with_a_method_of_its_own(spec):
    """The assistant keeps its cache between drafts and takes back what was refused; the answer is the model's."""
    model = family("llama")
    expected = model.generate(prompt(1, N), **GREEDY)
    draft = draft_of(model)
    with skimkv.attach(draft, spec):
        assert model.generate(prompt(1, N), assistant_model=draft, **GREEDY).tolist() == expected.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("spec", SMALL)
def test_beams_at_a_small_budget(spec):
    """Beam search reorders the cache: with one row it must give what a search without a cache between steps gives."""
    model, batch = family("llama"), padded([N, 13])
    options = {"num_beams": 3, **GREEDY}
    together = model.generate(**batch, past_key_values=skimkv.Cache(model, spec), **options)
    alone = model.generate(batch["input_ids"][1:, N - 13 :], past_key_values=skimkv.Cache(model, spec), **options)
    assert together[1, N:].tolist() == alone[0, 13:].tolist()
    again = model.generate(**batch, past_key_values=skimkv.Cache(model, spec), **options)
    assert again.tolist() == together.tolist()
