"""The papers' figures: no scale is left, and what is not drawn is said."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from skimkv.analysis import LEAST_TOKENS, figures
from skimkv.analysis.survey import survey
from support.tiny_models import family, prompt


class Words:
    """A tokenizer that only decodes."""

    def decode(self, ids: list[int]) -> str:
        return str(ids[0])


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that would be saved."""
    made: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: made.append(figure))
    return made


@pytest.mark.slow
def test_axes_are_the_scales(drawn: list[Any], tmp_path: Path) -> None:
    findings = survey(family("llama"), prompt(1, LEAST_TOKENS).tolist(), queries=3, clouds=1)
    accumulated = findings.accumulated.clone()
    accumulated[..., -5:] = 1e-40
    findings = dataclasses.replace(findings, accumulated=accumulated)
    figures.draw_sparq(findings, tmp_path / "sparq.png")
    figures.draw_h2o(findings, Words(), tmp_path / "h2o.png")
    histogram, _, _, _, _, channels, positions, alpha = drawn[0].axes[:8]
    for ax in (channels, positions, alpha):
        assert ax.get_ylim() == (0, 1)
    assert histogram.get_xlim() == alpha.get_xlim() == (0, 1)
    sparsity, by_rank, _ = drawn[1].axes
    assert sparsity.get_ylim() == (0, 100) and by_rank.get_ylim() == (1e-6, 1)
    undrawn = figures.describe_undrawn(findings.scores_by_rank())
    assert by_rank.get_xlabel() == f"rank of the token\n{undrawn}" and undrawn.startswith("not drawn")


def test_what_is_not_drawn_is_said() -> None:
    """Of two layers of four tokens, three shares lie below 1e-6: 4e-7 in one layer, 6e-7 in the other."""
    shares = torch.tensor([[0.9, 0.1, 3e-7, 1e-7], [0.5, 0.4, 0.1, 6e-7]], dtype=torch.float64)
    assert figures.describe_undrawn(shares) == "not drawn: 38% of the tokens, below 1e-06 each, 5.0e-07 in all"
    assert figures.describe_undrawn(shares[:, :2]) == "no token is below 1e-06"
