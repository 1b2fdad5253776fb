"""What generate() and people do to a cache between forward passes: reorder, repeat, select, crop, copy, reset."""

import copy

import pytest
import torch

import skimkv
from skimkv.eval.shared_prompt import copy_rows
from support.generation import BATCH_CHANGES, GREEDY, NEW, N
from support.specs import EACH
from support.tiny_models import family, new_family, padded, prompt

SPECS = [
    "Dense()",
    "SparQ(r=4, k=8)",
    "SparQ(r=4, k=8, channels='int4')",
    "SparQ(r=4, k=8, channels='int8', kv='int4')",
    "LMInfinite(k=8, initial=2)",
    "H2O(k=10)",
    "H2O(k=0.5)",
    "H2O(k=10, kv='int4')",
    "SubGen(k=5, recent=6)",
    "SubGenStream(delta=4.0, t=3, s=8)",
]
FORGETFUL = SPECS[4:]
every_spec = pytest.mark.parametrize("spec", SPECS)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield
    skimkv.detach(family("llama"))


def feed(cache, ids, mask=None):
    """Read ids and return the last logits; one token at a time, unless the cache is empty."""
    model = family("llama")
    blocks = ids.split(1 if cache.get_seq_length() else ids.shape[1], 1)
    for block in blocks:
        seen = cache.get_seq_length() + block.shape[1]
        m = torch.ones(len(ids), seen, dtype=torch.long) if mask is None else mask[:, :seen]
        places = (m.cumsum(1) - 1).clamp(min=0)[:, -block.shape[1] :]
        logits = model(block, attention_mask=m, position_ids=places, past_key_values=cache).logits[:, -1]
    return logits


def new(spec, ids=None, mask=None):
    cache = skimkv.Cache(family("llama"), spec)
    if ids is not None:
        feed(cache, ids, mask)
    return cache


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@every_spec
def test_rows_are_reordered_repeated_and_selected(spec):
    """Ragged rows, after some decoding: the next logits are those of the rows' own."""
    batch = padded([N, 11, 17])
    mask = torch.cat([batch["attention_mask"], torch.ones(3, 9, dtype=torch.long)], 1)
    cache = new(spec, batch["input_ids"], mask)
    feed(cache, prompt(3, 8, 3), mask)
    last = prompt(3, 1, 4)
    expected = feed(copy.deepcopy(cache), last, mask)

    for rows, change in BATCH_CHANGES.items():
        other, order = copy.deepcopy(cache), list(rows)
        change(other)
        close(feed(other, last[order], mask[order]), expected[order])
    assert cache.layers[0].store.lengths == [N + 8, 19, 25], "the original has not moved"


@every_spec
def test_batch_operations_before_the_first_token(spec):
    cache = new(spec)
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([0]))
    cache.crop(0)
    assert (cache.get_seq_length(), cache.nbytes, cache.allocated, cache.is_initialized) == (0, 0, 0, False)


@every_spec
def test_another_number_of_rows_is_refused(spec):
    cache = new(spec, prompt(1, N))
    with pytest.raises(ValueError, match=r"3 rows came, and the cache has 1: cache\.batch_repeat_interleave\(n\)"):
        family("llama").generate(prompt(1, N + 2), past_key_values=cache, num_return_sequences=3, do_sample=True)


@every_spec
def test_a_copied_prompt_answers_twice(spec):
    model, ids = family("llama"), prompt(1, N)
    read = new(spec, ids)
    answers = []
    for turn in (prompt(1, 5, 1), prompt(1, 5, 2), prompt(1, 5, 1)):
        text = torch.cat([ids, turn], 1)
        answers.append(model.generate(text, past_key_values=copy.deepcopy(read), **GREEDY).tolist())
    assert answers[0] == answers[2] != answers[1]
    assert read.get_seq_length() == N


@pytest.mark.parametrize("spec", SPECS[:4])
@pytest.mark.parametrize("n", [1, 7, 20])
def test_full_stores_are_cropped_at_any_time(spec, n):
    ids, batch = prompt(2, 40), padded([30, 22])
    mask = torch.cat([batch["attention_mask"], torch.ones(2, 20, dtype=torch.long)], 1)
    cache = new(spec, batch["input_ids"], mask)
    feed(cache, ids[:, :10], mask)
    cache.crop(-n)
    assert cache.get_seq_length() == 40 - n
    short = new(spec, batch["input_ids"][:, : 40 - n], mask)
    if n < 10:
        feed(short, ids[:, : 10 - n], mask)
    last = prompt(2, 1, 7)
    close(feed(cache, last, mask), feed(short, last, mask))
    assert cache.nbytes == short.nbytes


@pytest.mark.parametrize("spec", FORGETFUL)
def test_stores_that_drop_tokens_are_cropped_while_recording(spec):
    """The snapshot and the log: back by any number of tokens since the last crop, and no further."""
    ids, later = prompt(1, N), prompt(1, 12, 1)
    cache = new(spec, ids)
    with pytest.raises(ValueError, match="drops tokens; 1 cannot be forgotten, 0 are on record"):
        cache.crop(-1)
    cache.crop(0)
    before = cache.nbytes
    cache.activate_past_recording()
    assert all(layer.is_croppable and layer.record_past for layer in cache.layers)
    for back in (0, 3, 12):
        feed(cache, later)
        assert cache.nbytes > before, "the snapshot counts too"
        with pytest.raises(ValueError, match="13 cannot be forgotten, 12 are on record"):
            cache.crop(-13)
        cache.crop(-back)
        ids = torch.cat([ids, later[:, : 12 - back]], 1)
        assert cache.get_seq_length() == ids.shape[1]
        plain = new(spec, ids[:, :N])
        if ids.shape[1] > N:
            feed(plain, ids[:, N:])
        last = prompt(1, 1, 7)
        close(feed(copy.deepcopy(cache), last), feed(plain, last))
    with pytest.raises(ValueError, match="minus the number"):
        cache.crop(5)


@pytest.mark.parametrize("spec", ["StreamingLLM(k=8, sinks=2)", "LMInfinite(k=8, initial=2, positions='cache')"])
def test_crop_keeps_the_positions_of_tokens_that_are_decoded_again(spec):
    """There is a gap in the positions before the last tokens that stay."""
    model, ids, outs = new_family("llama"), prompt(1, 40), []
    for drafted in (0, 2):
        cache, at = skimkv.Cache(model, spec), torch.arange(40)[None]
        at[:, 15:] += 30
        cache.activate_past_recording()
        parts = [slice(0, 12), *(slice(t, t + 1) for t in range(12, 18))]
        for part in parts:
            model(ids[:, part], position_ids=at[:, part], past_key_values=cache)
        if drafted:
            model(ids[:, 30:32], position_ids=at[:, 18:20], past_key_values=cache)
            cache.crop(-drafted)
        logits = [
            model(ids[:, t : t + 1], position_ids=at[:, t : t + 1], past_key_values=cache).logits for t in range(18, 26)
        ]
        outs.append(torch.cat(logits))
    close(*outs)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_crop_takes_a_tensor(name):
    """Assisted decoding of older versions gives a tensor, in which the library's sliding layers count in place."""
    model, ids = family(name), prompt(1, 20)
    cache, plain = (skimkv.Cache(model, "SparQ(r=4, k=8)") for _ in range(2))
    for one, back in [(cache, torch.tensor(-4)), (plain, -4)]:
        one.activate_past_recording()
        model(ids, past_key_values=one)
        one.crop(back)
    for token in prompt(1, 3, 1).T:
        close(*(model(token[None], past_key_values=one).logits for one in (cache, plain)))
    skimkv.detach(model)


def test_rows_that_are_too_short_are_not_cropped():
    """Rows of six and two tokens: three cannot be forgotten, and the sliding layer, which could, forgets nothing."""
    model, batch = family("gemma3"), padded([6, 2])
    cache = skimkv.Cache(model, "Dense()")
    model(**batch, past_key_values=cache)
    with pytest.raises(ValueError, match=r"cannot forget 3 tokens of rows that have \[6, 2\]"):
        cache.crop(-3)
    assert [layer.get_seq_length() for layer in cache.layers] == [6, 6]
    skimkv.detach(model)


@pytest.mark.parametrize("spec", ["Dense()", "H2O(k=10)"])
def test_what_cannot_be_cropped_leaves_the_cache_as_it_is(spec):
    """Where one kind of layer can forget and the other cannot, none does: the text goes on."""
    model = family("gemma3")  # a sliding layer of 8 tokens and one of full attention
    for n, back, reason in [(5, 2, "H2O.* drops tokens"), (20, 2, "has dropped|drops tokens"), (20, 0, None)]:
        ids = prompt(1, n + 1)
        cache = skimkv.Cache(model, spec)
        model(ids[:, :n], past_key_values=cache)
        plain = copy.deepcopy(cache)
        if reason is not None and (n > 8 or "H2O" in spec):
            with pytest.raises(ValueError, match=reason):
                cache.crop(-back)
        else:
            cache.crop(-back)
            ids = ids[:, : n - back + 1]
            plain = skimkv.Cache(model, spec)
            model(ids[:, :-1], past_key_values=plain)
        assert [layer.get_seq_length() for layer in cache.layers] == [ids.shape[1] - 1] * 2
        close(*(model(ids[:, -1:], past_key_values=c).logits for c in (cache, plain)))
    cache.activate_past_recording()
    model(prompt(1, 3, 1), past_key_values=cache)
    with pytest.raises(ValueError, match="4 cannot be forgotten, 3 are on record"):
        cache.crop(-4)
    cache.crop(-3)
    assert [layer.get_seq_length() for layer in cache.layers] == [21, 21]
    cache = skimkv.Cache(model, spec)
    cache.activate_past_recording()
    for ids in (prompt(1, 5), prompt(1, 6, 1)):
        model(ids, past_key_values=cache)
    cache.crop(-6)  # past the window and back: all of it is on record
    plain = skimkv.Cache(model, spec)
    model(prompt(1, 5), past_key_values=plain)
    close(*(model(prompt(1, 1, 2), past_key_values=c).logits for c in (cache, plain)))
    skimkv.detach(model)


@pytest.mark.parametrize("method", EACH, ids=repr)
def test_a_mode_of_autograd_may_end_between_two_steps(method):
    """What inference mode has made can be written to, selected, copied and trained with outside of it."""
    ids, logits = prompt(1, 31), []
    for first, then in ((torch.no_grad, torch.no_grad), (torch.inference_mode, torch.enable_grad)):
        with first():
            cache = new(method, ids[:, :24])
            cache.batch_repeat_interleave(2)
            feed(cache, ids[:, 24:26].repeat(2, 1))
            cache = copy.deepcopy(cache)
        for mode, t in ((torch.no_grad, 26), (first, 27), (then, 28)):
            with mode():
                if t == 27:
                    cache.reorder_cache(torch.tensor([1, 0]))
                y = feed(cache, ids[:, t : t + 1].repeat(2, 1))
        with first():
            feed(cache, ids[:, 29:30].repeat(2, 1))
        logits.append(y.detach())
    assert y.requires_grad
    close(*logits)


@every_spec
def test_reset_is_a_new_cache(spec):
    model, ids = family("llama"), prompt(1, N)
    cache = new(spec, prompt(2, 30, 5))
    cache.reset()
    assert (cache.get_seq_length(), cache.nbytes, cache.elements) == (0, 0, 0)
    again = model.generate(ids, past_key_values=cache, **GREEDY)
    assert again.tolist() == model.generate(ids, past_key_values=new(spec), **GREEDY).tolist()


def test_recording_ends_with_the_next_generate():
    """Assisted decoding leaves the cache recording; a plain generate() must not log for ever."""
    model = family("llama")
    cache = new("H2O(k=10)")
    ids = prompt(1, N // 2).repeat(1, 2)
    text = model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=3, **GREEDY)
    before = cache.nbytes
    model.generate(text, past_key_values=cache, **GREEDY)
    assert cache.nbytes == before
    assert cache.layers[0].log == []


def test_a_layer_cannot_be_initialised_before_the_first_attention_call():
    """Only the attention call knows how many query heads share a KV head; the library's own hook says so in a line."""
    layer, keys = skimkv.Cache(family("llama"), "Dense()").layers[0], torch.zeros(1, 2, 0, 16)
    with pytest.raises(RuntimeError, match="cannot be initialised before the model's first attention call; run a prom"):
        layer.lazy_initialization(keys, keys)


def test_traffic_is_summed_over_layers():
    """Reference backend: what the decode steps of a generate() read and wrote is the closed form, layer by layer."""
    method = skimkv.SparQ(r=4, k=8)
    with skimkv.backend("ref"):
        cache = new("SparQ(r=4, k=8)", prompt(1, N))
        elements, data = cache.elements, cache.bytes
        feed(cache, prompt(1, NEW, 1))
    shape = cache.layers[0].store.shape
    steps = [method.traffic(n, shape, torch.float32) for n in range(N, N + NEW)]
    assert cache.elements - elements == 2 * sum(step.elements for step in steps)
    assert cache.bytes - data == 2 * sum(step.bytes for step in steps)
    assert repr(cache).startswith("Cache(")


@pytest.mark.parametrize("spec", ["SparQ(r=4, k=8)", "H2O(k=10)"])
def test_the_layers_of_a_cache_share_one_workspace_and_two_caches_none(spec):
    def workspace(cache):
        assert len(cache.stores) == 2
        ours = {id(store.workspace) for store in cache.stores}
        assert ours == {id(layer.workspace) for layer in cache.layers} and len(ours) == 1
        return ours

    cache, other = new(spec, prompt(2, N)), new(spec, prompt(2, N))
    first = workspace(cache)
    assert workspace(other) != first
    twin = copy.deepcopy(cache)
    rows = copy_rows(cache, [1, 1, 0])
    assert len({*first, *workspace(other), *workspace(twin), *workspace(rows)}) == 4
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.activate_past_recording()
    feed(cache, prompt(2, 5, 1))
    cache.crop(-3)
    assert workspace(cache) == first, "whatever happens to the stores"
    cache.reset()
    feed(cache, prompt(1, N))
    assert workspace(cache) == first
