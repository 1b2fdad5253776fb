"""The caches that are kept between the turns of conversations: which is found, what it is cut to, which one goes."""

from __future__ import annotations

import pytest
import torch

import skimkv
from skimkv.hf.cache import Cache
from skimkv.serve.conversations import FEW, LEAST_READ, Conversations
from support import tiny_models

PLENTY = 10**9


def read(ids: torch.Tensor, method: str = "SparQ(r=4, k=16)", name: str = "llama") -> Cache:
    """A cache that holds these tokens (n,)."""
    cache = Cache(tiny_models.family(name), skimkv.parse(method))
    with torch.no_grad():
        tiny_models.family(name)(ids[None], past_key_values=cache, use_cache=True)
    return cache


def texts(*shared: int, n: int = 80) -> list[torch.Tensor]:
    """The first is a text of n tokens; each other one has its first `shared` tokens, and differs from there on."""
    first = tiny_models.prompt(n=n)[0]
    others = []
    for count in shared:
        other = first.clone()
        other[count:] = tiny_models.VOCAB + 2 - other[count:]  # no token is its own mirror image: 99 is odd
        others.append(other)
    return [first, *others]


def test_the_longest_common_beginning_is_found():
    first, second, third = texts(40, 60)
    kept = Conversations(4, PLENTY)
    kept.keep(first[:70], read(first[:70]))
    kept.keep(second, read(second))
    cache = kept.take(third)
    assert cache is not None and cache.get_seq_length() == 60
    assert [store.lengths for store in cache.stores] == [[60], [60]]
    assert len(kept) == 1


def test_a_cache_is_cut_so_that_more_than_one_token_is_read():
    (text,) = texts()
    kept = Conversations(4, PLENTY)
    kept.keep(text, read(text))
    cache = kept.take(text)
    assert cache is not None and cache.get_seq_length() == len(text) - LEAST_READ
    assert kept.take(text) is None  # it was taken


def test_a_conversation_that_only_begins_alike_stays():
    first, branch = texts(FEW)
    kept = Conversations(4, PLENTY)
    original = read(first)
    keys = original.stores[0].uncounted("k").clone()  # type: ignore[attr-defined]
    kept.keep(first, original)
    copied = kept.take(branch)
    assert copied is not None and copied is not original and copied.get_seq_length() == FEW
    with torch.no_grad():
        tiny_models.family("llama")(branch[None, FEW:], past_key_values=copied, use_cache=True)
    assert kept.take(first[: len(first)]) is original
    assert torch.equal(original.stores[0].uncounted("k"), keys[:, :, : len(first) - LEAST_READ])  # type: ignore[attr-defined]


def test_a_prompt_that_was_read_anew_takes_the_place_of_its_conversation():
    """Otherwise the same conversation would fill the room of others."""
    first, other = texts(60)
    kept = Conversations(4, PLENTY)
    for ids in (other, first[:70], first, first):
        kept.keep(ids, read(ids))
    assert len(kept) == 2 and kept.held(first) == kept.held(other) == len(first) - LEAST_READ


def test_too_little_in_common_is_not_used():
    first, other = texts(FEW - 1)
    kept = Conversations(4, PLENTY)
    kept.keep(first, read(first))
    assert kept.take(other) is None
    assert kept.take(first[:FEW]) is None
    assert kept.take(first[:1]) is None
    assert len(kept) == 1


@pytest.mark.filterwarnings("ignore:Gemma2ForCausalLM")
@pytest.mark.parametrize(
    ("name", "method"),
    [("llama", "H2O(k=16)"), pytest.param("gemma2", "SparQ(r=4, k=16)", marks=pytest.mark.slow)],
)
def test_what_cannot_be_cropped_is_used_whole_or_not(name: str, method: str) -> None:
    first, branch = texts(60)
    kept = Conversations(4, PLENTY)
    kept.keep(first[:70], read(first[:70], method, name))
    assert kept.take(branch) is None
    assert kept.take(first[:71]) is None  # one token is not read but decoded
    cache = kept.take(first)
    assert cache is not None and cache.get_seq_length() == 70


def test_the_conversation_that_was_used_longest_ago_goes():
    first, second, third = texts(0, 40)
    kept = Conversations(2, PLENTY)
    kept.keep(first[:50], read(first[:50]))
    kept.keep(second, read(second))
    kept.keep(first[:60], kept.take(first[:60]) and read(first[:60]))  # type: ignore[arg-type]
    assert len(kept) == 2
    kept.keep(third, read(third))
    assert len(kept) == 2
    assert kept.take(second) is None
    assert kept.take(first[:60]) is not None


def test_bytes_are_bounded():
    first, second = texts(0)
    one = read(first).allocated
    kept = Conversations(9, int(1.5 * one))
    kept.keep(first, read(first))
    assert (len(kept), kept.nbytes) == (1, one)
    kept.keep(second, read(second))
    assert (len(kept), kept.nbytes) == (1, one)
    assert kept.take(second) is not None
    small = Conversations(9, one - 1)
    small.keep(first, read(first))
    assert (len(small), small.nbytes) == (0, 0)


def test_nothing_is_kept_where_nothing_may_be():
    (text,) = texts()
    kept = Conversations(0, PLENTY)
    kept.keep(text, read(text))
    assert len(kept) == 0
