"""The papers' figures: no scale is left, and what is not drawn is said."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from skimkv.analysis import LEAST_TOKENS, figures
from skimkv.analysis.survey import Findings, Grid, survey
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


class Pieces:
    """A tokenizer whose tokens are hard to read."""

    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def decode(self, ids: list[int]) -> str:
        return self.tokens[ids[0]]


@pytest.mark.parametrize(("text", "name"), [
    ("the", '"the"'), (" the", 'space + "the"'), ("\u2581the", 'space + "the"'), ("\u0120the", 'space + "the"'),
    ("\n", "newline"), ("\n\n", "2 newlines"), ("        ", "8 spaces"), (",\n", '"," + newline'), ("\x00", "U+0000"),
    ('"', "'\"'"), ("\u4f60", "token 0"), ("\ufffd", "token 0"), ("", "token 0"), ("é", '"é"'),
    ("a" * 30, '"' + "a" * 19 + '…"'),
])  # fmt: skip
def test_the_name_of_a_token_can_be_read(text: str, name: str) -> None:
    assert figures.token_name(Pieces(text), 0) == name


def made_up(layers: int, heads: int, queries: int, spread: float = 0.0) -> Findings:
    """Findings without a meaning. spread: 0 for queries of two values, whose kurtosis is -2, and else the larger."""
    n = 128
    q = torch.ones(layers, heads, 200)
    q[..., ::2] = -1
    q[..., 0] += spread
    accumulated = (1.0 + torch.arange(n, dtype=torch.float32)).expand(1, layers, 1, n)
    mass = torch.full((layers, heads, queries), 0.5)
    return Findings(
        list(range(layers)), n, Grid([1, 2, 4], [32], ["top"], (1, 32)), torch.arange(n)[None] // 4 % 13, mass,
        mass.long(), q, torch.full((1, 3, 1, layers, heads), 0.5), torch.full((4, layers, heads, 1), 0.5),
        mass[..., 0], accumulated, {}, [],
    )  # fmt: skip


@pytest.mark.parametrize(("layers", "heads", "queries", "spread"), [
    (1, 1, 1, 0.0), (4, 14, 1, 5.0), (28, 13, 3, 50.0), (126, 64, 1, 20.0),
])  # fmt: skip
def test_the_ticks_of_layers_heads_and_counts_are_whole(
    layers: int, heads: int, queries: int, spread: float, drawn: list[Any], tmp_path: Path
) -> None:
    """Few queries, and heads whose number matplotlib would cut at 2.5; no ticks run into each other."""
    figures.draw_sparq(made_up(layers, heads, queries, spread), tmp_path / "f.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    histogram, by_head, _, kurtosis, tail = figure.axes[:5]
    for axis in (histogram.yaxis, by_head.xaxis, by_head.yaxis, kurtosis.xaxis, tail.xaxis):
        shown = [label for label in axis.get_ticklabels() if label.get_text()]
        assert shown and all(float(label.get_text()).is_integer() for label in shown)
    for axis in (by_head.xaxis, by_head.yaxis, kurtosis.xaxis, kurtosis.yaxis):
        boxes = [label.get_window_extent() for label in axis.get_ticklabels() if label.get_text()]
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    low, high = kurtosis.get_ylim()
    shown = [label.get_text() for label in kurtosis.get_yticklabels() if label.get_text()]
    assert sum(low <= tick <= high for tick in kurtosis.get_yticks()) >= 2
    assert not any("10^" in label for label in shown), "plain numbers"


def test_the_heaviest_tokens_are_named_beside_the_panel(drawn: list[Any], tmp_path: Path) -> None:
    """Five marks, five names that meet neither each other nor the panels, and no mathematics in a token."""
    tokenizer = Pieces("\n", " the", "$x$", "\x00", "\u4f60", "\n\n", *"abcdefg")
    figures.draw_h2o(made_up(2, 1, 1), tokenizer, tmp_path / "f.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    ax = figure.axes[2]
    texts = ax.get_legend().get_texts()
    names = {figures.token_name(tokenizer, i) for i in range(13)}
    assert len(texts) == 5 and {text.get_text() for text in texts} <= names
    assert not ax.texts and not any(text.get_parse_math() for text in texts)
    boxes = [text.get_window_extent() for text in texts] + [panel.get_window_extent() for panel in figure.axes]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(box.x1 <= figure.bbox.x1 for box in boxes)
    assert len(ax.lines) == 6, "the other tokens are one line"
    assert not any("$" in label.get_text() for label in ax.get_xticklabels()), "counts are plain numbers"
