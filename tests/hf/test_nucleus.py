"""Top-p without sorting all tokens keeps the tokens of the library's processor, but for equals."""

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from skimkv.hf.nucleus import CANDIDATES, Nucleus, without_sorting_all

V = 5000
IDS = torch.zeros(3, 1, dtype=torch.long)


def scores(seed, spread, dtype=torch.float32):
    """Logits (3,V) of a vocabulary, as a model that computes in `dtype` gives them."""
    return (torch.randn(3, V, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype).float()


class Counted(TopPLogitsWarper):
    """It notes its calls."""

    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return super().__call__(input_ids, scores)


def check(warper, x):
    """As many tokens are kept, with the same scores, and the likelier ones."""
    found, expected = Nucleus(warper)(IDS[: len(x)], x), warper(IDS[: len(x)], x)
    assert torch.equal(found.sort(-1).values, expected.sort(-1).values)
    assert torch.equal(found, x.where(found != warper.filter_value, warper.filter_value))
    return found, expected


@pytest.mark.parametrize("spread", [1, 4, 12])
@pytest.mark.parametrize("top_p", [0.0, 0.1, 0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("least", [1, 7, CANDIDATES + 44])
def test_the_librarys_tokens_are_kept(spread, top_p, least):
    """Of a model that computes in bfloat16 many tokens are equal."""
    warper = TopPLogitsWarper(top_p, min_tokens_to_keep=least)
    for seed in range(20):
        found, expected = check(warper, scores(seed, spread))
        assert torch.equal(found, expected)
        check(warper, scores(seed, spread, torch.bfloat16))


def test_few_tokens_are_sorted_where_they_tell():
    """Peaked logits have few likely tokens, flat ones have more than are sorted."""
    warper = Counted(0.9)
    for seed in range(20):
        Nucleus(warper)(IDS, scores(seed, 12))
    assert warper.calls == 0
    Nucleus(warper)(IDS, scores(0, 0.1))
    assert warper.calls == 1


def test_the_candidates_end_among_equals():
    x = torch.full((1, V), -20.0)
    x[0, 100 : 100 + CANDIDATES + 5] = 1.0
    check(TopPLogitsWarper(0.5), x)
    assert (Nucleus(Counted(0.5))(IDS[:1], x) == 1).sum() == (CANDIDATES + 5 + 1) // 2


def test_a_sum_that_reaches_top_p_exactly():
    x = torch.full((1, V), -torch.inf)
    x[0, [7, 900, 4000, 4999]] = 0.0
    for top_p in (0.25, 0.5, 0.75):
        check(TopPLogitsWarper(top_p), x)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_scores_that_are_no_numbers_are_the_librarys(value):
    x = scores(0, 12)
    x[1, 40] = value
    if value == -torch.inf:
        x[2] = value
    warper = TopPLogitsWarper(0.9)
    assert torch.equal(Nucleus(warper)(IDS, x).isfinite(), warper(IDS, x).isfinite())


@pytest.mark.parametrize("temperature", [1e-3, 1e-5, 1e-6])
def test_equal_tokens_at_a_low_temperature(temperature):
    x = torch.zeros(1, V)
    x[0, :3] = 60 / temperature
    found, _ = check(TopPLogitsWarper(0.7), x)
    assert found.isfinite().sum() == 3


def test_after_top_k_and_a_value_of_its_own():
    found = TopKLogitsWarper(64)(IDS, scores(3, 4))
    warper = TopPLogitsWarper(0.9, filter_value=-7.0)
    check(warper, found)


def test_other_processors_stay():
    class Own(TopPLogitsWarper):
        """A processor of a user."""

    others = [TemperatureLogitsWarper(0.5), Own(0.5)]
    found = without_sorting_all(LogitsProcessorList([*others, TopPLogitsWarper(0.5)]))
    assert found[:2] == others and type(found[2]) is Nucleus and isinstance(found, LogitsProcessorList)
