"""One layer of a cache: a token that is decoded takes fewer calls than a block of tokens, and gives the same."""

from __future__ import annotations

import pytest
import torch

from skimkv.hf.attention_interface import attention
from skimkv.hf.layer import Layer
from skimkv.methods import parse
from skimkv.stores.base import Workspace
from support.calls import functions_entered
from support.kernels import NATIVE

B, H, G, D = 2, 2, 3, 16
SPECS = [
    "Dense()", "SparQ(r=4, k=8, channels='int8')", "LMInfinite(k=12, initial=4)", "H2O(k=12)", "Quest(page=4, k=8)",
]  # fmt: skip


class Blocks(Layer):
    """A layer that takes every token as a block."""

    def attend_token(self, q, k, v, softmax):
        return None


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def block(n, dtype=torch.float32):
    """What a model makes of n tokens: q (B,H*G,n,D) · k, v (B,H,n,D), with a token's heads together in memory."""
    return [torch.randn(B, n, heads, D, dtype=dtype).transpose(1, 2) for heads in (H * G, H, H)]


def attend(layer, q, k, v, pads=(0, 0)):
    """What a model calls for one layer -> (B,n,H*G,D)."""
    counts = torch.tensor(pads)
    counts.pads, counts.error, counts.start = list(pads), None, layer.seen
    key, value = layer.update(k, v)
    return attention("sdpa", torch.nn.Module(), q, key, value, counts, scaling=0.25, dropout=0.0)[0]


def pair(spec):
    return [kind(parse(spec), Workspace()) for kind in (Layer, Blocks)]


@pytest.mark.parametrize("pads", [(0, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_a_token_gives_what_a_block_of_one_token_gives(spec, pads):
    layer, blocks = pair(spec)
    for n in (9, 1, 1, 1, 4, 1, 1, 1):
        tokens = block(n)
        y, want = (attend(each, *tokens, pads=pads) for each in (layer, blocks))
        assert torch.equal(y, want) and y.shape == (B, n, H * G, D) and y.is_contiguous()
    assert layer.seen == blocks.seen == 19 and layer.cached_tokens == blocks.cached_tokens
    assert layer.store.lengths == [19 - pad for pad in pads]


def test_a_token_of_a_prompt_or_of_a_draft_is_part_of_a_block():
    """A prompt may be one token, or end in a chunk of one; a token that may be taken back is put on record."""
    tokens = [block(1) for _ in range(8)]
    for spec in ("LMInfinite(k=5, initial=2)", "H2O(k=5)"):
        layer, blocks = pair(spec)
        for i, token in enumerate(tokens):
            if i == 1:
                layer.prompt_end = blocks.prompt_end = 4
            if i == 6:
                layer.activate_past_recording(), blocks.activate_past_recording()
            y, want = (attend(each, *token) for each in (layer, blocks))
            assert torch.equal(y, want)
        assert len(layer.log) == len(blocks.log) == 2
        layer.crop(-1), blocks.crop(-1)
        assert layer.store.lengths == [7, 7] and torch.equal(*(attend(each, *tokens[7]) for each in (layer, blocks)))


@pytest.mark.skipif(not NATIVE, reason="the native library is not built")
@pytest.mark.parametrize("spec", ["Dense()", "LMInfinite(k=12, initial=4)"])
def test_a_decoded_token_enters_few_functions(spec):
    """Each takes microseconds once a model has read its weights, and PyTorch's own Python functions do too."""
    layer = Layer(parse(spec), Workspace())
    with torch.no_grad():
        attend(layer, *block(20))
        for _ in range(2):
            attend(layer, *block(1))
        names = functions_entered(attend, layer, *block(1))
    ours = names[names.index("attention") :]
    assert {"unflatten", "__enter__", "__getattr__", "__instancecheck__", "attend_block"}.isdisjoint(ours), ours
    assert len(ours) <= 36, ours
