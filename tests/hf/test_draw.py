"""Tokens are drawn as often as their scores say."""

import pytest
import torch

from skimkv.hf.draw import NotDrawable, draw


def test_tokens_come_as_often_as_their_softmax_says():
    """Within five standard deviations, for each of 50 tokens in each of two rows."""
    n, generator = 40_000, torch.Generator().manual_seed(0)
    scores = torch.randn(2, 50, generator=generator) * 2
    expected = scores.softmax(-1)
    for row in range(2):
        drawn = draw(scores[row].expand(n, -1), generator)[:, 0]
        found = drawn.bincount(minlength=50) / n
        error = (expected[row] * (1 - expected[row]) / n).sqrt()
        assert ((found - expected[row]).abs() < 5 * error + 1 / n).all()


def test_rows_have_numbers_of_their_own():
    scores = torch.zeros(200, 1000)
    assert len(draw(scores, torch.Generator().manual_seed(1)).unique()) > 100


def test_a_token_that_is_left_out_is_never_drawn(monkeypatch):
    """Neither by the smallest random number, nor by the largest."""
    scores = torch.full((1, 9), -torch.inf)
    scores[0, [3, 6]] = torch.tensor([0.0, 1.0])
    for number, token in ((0.0, 3), (1 - 2**-53, 6), (1.0, 6)):
        monkeypatch.setattr(
            torch, "rand", lambda shape, number=number, **_: torch.full(shape, number, dtype=torch.float64)
        )
        assert draw(scores).tolist() == [[token]]


def test_a_seed_repeats_its_tokens():
    scores = torch.randn(4, 300)
    first, again, other = (draw(scores, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_scores_that_cannot_be_drawn_by_are_refused(value):
    scores = torch.zeros(2, 9)
    scores[1, 4] = value
    with pytest.raises(NotDrawable, match="NaN or infinitely large, or none is finite"):
        draw(scores)
    with pytest.raises(NotDrawable, match="none is finite"):
        draw(torch.full((1, 9), -torch.inf))
