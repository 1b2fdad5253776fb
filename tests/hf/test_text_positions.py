"""Positions that a user or a model of images gives: what positions in the cache are then, against the stock model.

Keys and values of a model with one layer depend on their own token only. So what a method that counts positions in its
cache must answer is the stock model's answer to a text of the kept tokens alone, the first ones just before the others.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

import skimkv
from skimkv.stores.text_positions import Run, TextPositions, runs
from support.generation import GREEDY
from support.tiny_models import VOCAB, build, prompt, with_slow

SINKS, K, N = 4, 20, 61
SPECS = [f"StreamingLLM(k={K})", f"LMInfinite(k={K}, initial={SINKS}, positions='cache')"]
GAPS = {
    "none": [*range(N)],
    "before the recent tokens": [*range(30), *range(130, 161)],
    "among the first tokens": [0, 1, *range(50, 109)],
    "among the recent tokens": [*range(55), *range(90, 96)],
    "a restart": [*range(30), *range(31)],
    "a restart among the recent tokens": [*range(50), *range(11)],
    "from the beginning": [*range(70, 131)],
    "one position for all": [7] * N,
}


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


def image(start: int, side: int) -> list[tuple[int, int, int]]:
    """The positions (time, row, column) of the side^2 tokens of an image that comes at this position."""
    return [(start, start + row, start + column) for row in range(side) for column in range(side)]


def text(start: int, n: int) -> list[tuple[int, int, int]]:
    return [(p, p, p) for p in range(start, start + n)]


IMAGES = {
    "none": text(0, N),
    "before the recent tokens": [*text(0, 6), *image(6, 5), *text(11, 30)],
    "whole among the recent tokens": [*text(0, 47), *image(47, 3), *text(50, 5)],
    "cut by the first recent token": [*text(0, 33), *image(33, 4), *text(37, 12)],
    "among the first tokens": [*text(0, 1), *image(1, 3), *text(4, 51)],
    "two": [*text(0, 5), *image(5, 4), *text(9, 10), *image(19, 4), *text(23, 14)],
}


@pytest.fixture(scope="module")
def llama():
    model = build("llama", num_hidden_layers=1, **GROUPED)
    model.config.max_position_embeddings = 512
    yield model
    skimkv.detach(model)


@pytest.fixture(scope="module")
def qwen2_vl():
    """A model whose keys are turned by three positions each."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    language = {"intermediate_size": 96, "max_position_embeddings": 512, "rope_parameters": rope, **sizes, **tokens}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=language, vision_config=vision)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0, 0.4 if "attn" in name else 0.15)
    yield model
    skimkv.detach(model)


def kept(places: torch.Tensor) -> torch.Tensor:
    """The positions (axes,1,1 + K) of the kept tokens: the recent ones' own, and before them those of the first."""
    first, recent = places[..., :SINKS], places[..., SINKS - K - 1 :]
    return torch.cat([first + recent[..., 0].min() - 1 - first.max(), recent], -1)


@torch.no_grad()
def right(model, ids, places):
    """The stock model's logits after the kept tokens, and no others."""
    ids = torch.cat([ids[:, :SINKS], ids[:, SINKS - K - 1 :]], 1)
    mask = torch.ones_like(ids)  # else the library takes a gap for the end of one of several texts
    return model(ids, attention_mask=mask, position_ids=kept(places), use_cache=False).logits[:, -1]


@torch.no_grad()
def streamed(model, spec, ids, places, blocks):
    """The logits after the last token, which is decoded."""
    cache, start = skimkv.Cache(model, spec), 0
    for n in blocks:
        part = slice(start, start + n)
        out = model(ids[:, part], position_ids=places[..., part], past_key_values=cache)
        start += n
    assert start == ids.shape[1] and n == 1
    return out.logits[:, -1]


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    "blocks", [[60, 1], [2, 30, *[1] * 29], [10, 10, *[1] * 41]], ids=["prompt", "blocks", "steps"]
)
@pytest.mark.parametrize("gap", GAPS)
def test_a_gap_or_a_restart(llama, gap, blocks):
    ids, places = prompt(1, N), torch.tensor([GAPS[gap]])
    expected = right(llama, ids, places)
    if gap == "before the recent tokens":
        few = torch.cat([ids[:, :SINKS], ids[:, SINKS - K - 1 :]], 1)
        close(expected, llama(few, position_ids=torch.arange(21)[None], use_cache=False).logits[:, -1])
    for spec in SPECS:
        close(streamed(llama, spec, ids, places, blocks), expected)


@pytest.mark.parametrize("name", with_slow(FAMILIES, ("llama", "phi", "glm", "yarn")))
@pytest.mark.parametrize("first", [6, 30])
def test_every_layout_of_rotary_embeddings(name, first):
    """A prompt shorter or longer than the window, then single tokens, then a block, then single tokens."""
    kind, options = FAMILIES[name]
    model, ids, places = build(kind, num_hidden_layers=1, **options), prompt(1, N), torch.arange(N)[None]
    blocks, expected = [first, *[1] * (46 - first), 5, *[1] * 10], right(model, ids, places)
    for spec in SPECS:
        close(streamed(model, spec, ids, places, blocks), expected)
    other = streamed(model, SPECS[1].replace("cache", "text"), ids, places, blocks)
    assert (other - expected).abs().max() > 1e-2, "positions in the text are something else"


@pytest.mark.parametrize("blocks", [[60, 1], [2, 30, *[1] * 29]], ids=["prompt", "blocks"])
@pytest.mark.parametrize("where", IMAGES)
def test_positions_on_three_axes(qwen2_vl, where, blocks):
    ids, places = prompt(1, N), torch.tensor(IMAGES[where]).T[:, None]
    assert places.shape == (3, 1, N)
    for spec in SPECS:
        close(streamed(qwen2_vl, spec, ids, places, blocks), right(qwen2_vl, ids, places))


@torch.no_grad()
def test_rows_with_gaps_of_their_own_are_padded_reordered_copied_and_compiled(llama):
    """The second row is padded. Afterwards rows change places, and a copy goes on like the original."""
    ids, spec = prompt(2, N, 5), SPECS[0]
    places = torch.tensor([GAPS["before the recent tokens"], [0] * 9 + GAPS["a restart"][9:]])
    mask = torch.ones(2, N, dtype=torch.long)
    mask[1, :9] = 0
    expected = torch.cat([right(llama, ids[b : b + 1, s:], places[b : b + 1, s:]) for b, s in ((0, 0), (1, 9))])
    for compiled in (False, "eager"):
        with skimkv.attach(llama, "Dense()", compile=compiled):
            cache = skimkv.Cache(llama, spec)
            llama(ids[:, :40], attention_mask=mask[:, :40], position_ids=places[:, :40], past_key_values=cache)
            cache.reorder_cache(torch.tensor([1, 0]))
            twin = copy.deepcopy(cache)
            for one in (cache, twin):
                for t in range(40, N):
                    step = {"attention_mask": mask[:, : t + 1].flip(0), "position_ids": places[:, t : t + 1].flip(0)}
                    logits = llama(ids[:, t : t + 1].flip(0), past_key_values=one, **step).logits[:, -1]
                close(logits.flip(0), expected)


@torch.no_grad()
def test_drafts_and_chunks(llama):
    """Tokens that are taken back, and a prompt that is read in chunks, whose method drops tokens after the last one."""
    ids, places = prompt(1, N), torch.tensor([GAPS["among the recent tokens"]])
    cache = skimkv.Cache(llama, SPECS[0])
    llama(ids[:, :52], position_ids=places[:, :52], past_key_values=cache)
    cache.activate_past_recording()
    for length in (60, 57, 60):
        start = cache.get_seq_length()
        llama(ids[:, start:length], position_ids=places[:, start:length], past_key_values=cache)
        cache.crop(start + 2 - length)
    assert cache.get_seq_length() == 58
    llama(ids[:, 58:60], position_ids=places[:, 58:60], past_key_values=cache)
    logits = llama(ids[:, 60:], position_ids=places[:, 60:], past_key_values=cache).logits[:, -1]
    close(logits, right(llama, ids, places))
    whole = llama.generate(ids, past_key_values=skimkv.Cache(llama, SPECS[0]), **GREEDY)
    chunks = llama.generate(ids, past_key_values=skimkv.Cache(llama, SPECS[0]), prefill_chunk_size=13, **GREEDY)
    assert whole.tolist() == chunks.tolist()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo")
@torch.no_grad()
def test_a_user_s_own_compilation(llama):
    """torch.compile(model) after attach: the positions are those that it is given."""
    ids, places = prompt(1, N), torch.tensor(GAPS["before the recent tokens"])[None]
    expected = right(llama, ids, places)
    with skimkv.attach(llama, SPECS[0]):
        compiled, cache = torch.compile(llama, backend="eager"), skimkv.Cache(llama, SPECS[0])
        compiled(ids[:, :60], position_ids=places[:, :60], past_key_values=cache)
        close(compiled(ids[:, 60:], position_ids=places[:, 60:], past_key_values=cache).logits[:, -1], expected)


def test_runs_by_hand():
    assert runs([]) == []
    assert runs([0, 1, 2]) == [Run(0, 0, 1)]
    assert runs([5, 6, 6, 6, 7]) == [Run(0, 5, 1), Run(2, 6, 0), Run(4, 7, 1)]
    assert runs([3, 3, 3, 9, 0]) == [Run(0, 3, 0), Run(3, 9, 1), Run(4, 0, 1)]


def test_text_positions_by_hand():
    """Tokens of a plain text are not noted; those that come anew replace what was noted."""
    places = TextPositions(2)
    assert places.distance(0, first=4, dropped=7) == 7
    places.place(0, 0, runs([0, 1, 2]), [0, 1, 2])
    places.place(0, 3, runs([3, 13, 14]), [3])
    assert [places.of(0, token) for token in range(7)] == [0, 1, 2, 3, 13, 14, 15]
    assert places.distance(0, first=4, dropped=0) == 9 and places.distance(0, first=4, dropped=3) == 12
    places.place(0, 4, runs([4, 5]), [])
    assert [places.of(0, token) for token in range(7)] == [*range(7)] and places._runs == [[], []]
    places.place(1, 2, runs([50, 60]), [50, 60])
    assert places.distance(1, first=4, dropped=1) == 1
    assert places.select([1, 0, 1]).distance(2, first=4, dropped=1) == 1
