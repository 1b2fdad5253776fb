"""What steps are said to move, beside what stores count, where a budget is a share of the prompt and in batches."""

from __future__ import annotations

import pytest
import torch

import skimkv
from skimkv.eval.divergence import measure_divergence
from skimkv.eval.traffic import RowCosts, cache_traffic
from skimkv.methods import METHODS
from skimkv.methods.slots import SlotMethod
from support.evaluation import builtin
from support.tiny_models import family, prompt

SHARES = (
    "H2O(k=0.25)", "H2O(k=0.4, local=0.1)", "H2O(k=0.4, pattern='strided')", "H2O(k=0.25, kv='int4')", "TOVA(k=0.25)",
    "SnapKV(k=0.25)", "RocketKV(k=0.25, top=8)", "LMInfinite(k=0.25, initial=4)",
    "LMInfinite(k=0.25, initial=4, positions='cache')", "StreamingLLM(k=0.25)", "Strided(k=0.25)",
    "Fixed(k=0.25, c=2)",
)  # fmt: skip


def feed(spec, lengths, steps):
    """A cache after prompts of these lengths and `steps` tokens, and what the last of them was counted to move."""
    model, most = family("llama"), max(lengths)
    cache = skimkv.Cache(model, spec)
    mask = torch.tensor([[0] * (most - n) + [1] * n for n in lengths])
    with torch.inference_mode(), skimkv.backend("ref"), skimkv.attach(model, spec):
        model(prompt(len(lengths), most), attention_mask=mask, past_key_values=cache)
        for _ in range(steps):
            before, mask = (cache.elements, cache.bytes), torch.cat([mask, mask.new_ones(len(lengths), 1)], 1)
            model(prompt(len(lengths), 1), attention_mask=mask, past_key_values=cache)
    return cache, (cache.elements - before[0], cache.bytes - before[1])


def test_every_method_with_slots_is_here():
    """SubGen alone takes no share."""
    named = {type(skimkv.parse(spec)) for spec in SHARES}
    assert named == {kind for kind in METHODS.values() if issubclass(kind, SlotMethod)} - {skimkv.SubGen}


@pytest.mark.parametrize("spec", SHARES)
def test_a_share_is_of_the_prompt_and_not_of_what_follows(spec):
    """After 80 tokens and 79 more; the next step moves no other amount where no slot is added."""
    cache, counted = feed(spec, [80], 79)
    said, row = cache_traffic(cache, steps_ago=1), RowCosts(cache).step(0)
    assert (said.elements, said.bytes) == (row.elements, row.bytes) == counted
    if not cache.stores[0].grows:
        assert cache_traffic(cache).bytes == counted[1]


@pytest.mark.parametrize("spec", SHARES)
def test_a_second_prompt_raises_a_budget_that_is_not_used_up(spec):
    """Half of 60 tokens and a few more are kept, and then half of more than 100 may be."""
    spec, model = spec.replace("0.25", "0.5"), family("llama")
    cache = skimkv.Cache(model, spec)
    with torch.inference_mode(), skimkv.backend("ref"), skimkv.attach(model, spec):
        for n, steps in ((60, 40), (10, 3)):
            model(prompt(1, n), past_key_values=cache)
            for _ in range(steps):
                before = cache.elements, cache.bytes
                model(prompt(1, 1), past_key_values=cache)
    counted = cache.elements - before[0], cache.bytes - before[1]
    said, row = cache_traffic(cache, steps_ago=1), RowCosts(cache).step(0)
    assert (said.elements, said.bytes) == (row.elements, row.bytes) == counted


@pytest.mark.parametrize("spec", [*SHARES, "Dense()", "H2O(k=12)", "SparQ(r=4, k=8)"])
def test_rows_of_different_lengths(spec):
    cache, counted = feed(spec, [40, 10], 9)
    said, costs = cache_traffic(cache, steps_ago=1), RowCosts(cache)
    assert (said.elements, said.bytes) == counted
    assert tuple(map(sum, zip(*(costs.step(row)[:2] for row in (0, 1)), strict=True))) == counted


def test_remembered_costs_are_those_of_the_row_s_own_prompt():
    """Both rows had 40 tokens once: the first after a prompt of 40, half of which stay, the second after one of 30."""
    cache, _ = feed("TOVA(k=0.5)", [40, 30], 15)
    costs, shape = RowCosts(cache), cache.stores[0].shape._replace(B=1)
    for row, steps_later, budget in ((0, 14, 20), (1, 4, 15)):
        layer = skimkv.TOVA(k=budget).traffic(40, shape, torch.float32)
        assert costs.step(row, steps_later).bytes == len(cache.stores) * layer.bytes


@pytest.mark.parametrize("spec", ["H2O(k=0.25)", "LMInfinite(k=0.25, initial=4)"])
def test_divergence_tells_the_bytes_that_are_counted(spec):
    model, _ = builtin()
    documents = [[int(t) % 50 for t in range(200)]]
    said, counted = (
        measure_divergence(model, documents, [spec], 100, counted=counted)[0].bytes_per_token
        for counted in (False, True)
    )
    assert said == counted
