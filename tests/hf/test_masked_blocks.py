"""Attention a block of queries at a time is the library's own, and skips the keys that a mask hides."""

from __future__ import annotations

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import skimkv
from skimkv.hf import masked_blocks
from support.tiny_models import build, prompt


def sliding(n, window, pads):
    """The mask (B,1,n,n) of a sliding window over rows with padding on the left."""
    i, j = torch.arange(n)[:, None], torch.arange(n)
    shown = (j <= i) & (j > i - window)
    return shown & (j >= torch.tensor(pads)[:, None, None, None])


def attend(mask, monkeypatch, queries=8):
    """The library's result, the same in blocks, and the numbers of keys that it was called with."""
    monkeypatch.setattr(masked_blocks, "QUERIES", queries)
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    q, k, v = torch.randn(2, 4, 50, 16), torch.randn(2, 2, 50, 16), torch.randn(2, 2, 50, 16)
    counts, own = [], ALL_ATTENTION_FUNCTIONS["sdpa"]

    def function(module, query, key, *args, **kwargs):
        counts.append(key.shape[2])
        return own(module, query, key, *args, **kwargs)

    monkeypatch.setattr(masked_blocks, "ALL_ATTENTION_FUNCTIONS", {"sdpa": function})
    y = masked_blocks.attend_in_blocks(module, q, k, v, mask, scaling=0.25)
    return own(module, q, k, v, mask, scaling=0.25)[0], y, counts


@pytest.mark.parametrize("is_bool", [True, False])
def test_a_window(is_bool, monkeypatch):
    mask = sliding(50, 5, [0, 0])
    if not is_bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    whole, y, counts = attend(mask, monkeypatch)
    torch.testing.assert_close(y, whole, rtol=1e-5, atol=1e-6)
    assert counts == [8, 12, 12, 12, 12, 12, 6]
    assert masked_blocks.blocks_of(mask) is masked_blocks.blocks_of(mask), "it is found once"


def test_rows_with_padding(monkeypatch):
    mask = sliding(50, 5, [0, 13])
    whole, y, counts = attend(mask, monkeypatch)
    real = torch.tensor([[True] * 50, [False] * 13 + [True] * 37])
    torch.testing.assert_close(y[real], whole[real], rtol=1e-5, atol=1e-6)
    assert sum(counts) < 100
    numbers = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert attend(numbers, monkeypatch)[2] == [50], "a query that sees no key weighs all alike"


@pytest.mark.parametrize(
    "mask", [None, sliding(50, 50, [0, 0]), sliding(50, 40, [0, 0])], ids=["none", "causal", "wide"]
)
def test_what_hides_less_than_half_is_one_call(mask, monkeypatch):
    whole, y, counts = attend(mask, monkeypatch)
    assert torch.equal(y, whole) and counts == [50]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_with_sliding_layers(attention, monkeypatch):
    """The prompt of Gemma 3 in blocks: logits and tokens are the model's own, batches with padding included."""
    monkeypatch.setattr(masked_blocks, "QUERIES", 8)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    options = {"num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 3, "sliding_window": 6}
    model = build("gemma3_text", **options, layer_types=kinds).requires_grad_(False)
    model.set_attn_implementation(attention)
    ids, mask = prompt(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[1, :17] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    text = model.generate(ids, **options)
    logits = model(ids, attention_mask=mask).logits[mask.bool()]
    found, find = [], masked_blocks._find_blocks
    monkeypatch.setattr(masked_blocks, "_find_blocks", lambda m: found.append(find(m)) or found[-1])
    with skimkv.attach(model, "Dense()"):
        assert torch.equal(model.generate(ids, **options), text)
        ours = model(ids, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-4 * float(logits.abs().max()))
    assert any(found) == (attention == "sdpa"), "the eager functions say their weights"
