"""The error of single attention outputs: worked by hand, on a model's heads, and on made-up heads."""

from __future__ import annotations

import pytest
import torch

from skimkv.analysis.output_error import (
    Heads,
    captured_heads,
    decode,
    effective_tokens,
    index_score_error,
    measure,
    percentile,
    reference,
    synthetic_heads,
)
from skimkv.methods import Dense, parse
from skimkv.stores.base import Shape
from support.tiny_models import family, prompt


def heads(n: int = 40) -> Heads:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, *size, generator=generator) for size in ((3, n, 16), (n, 16), (n, 16)))
    return Heads("captured", q, k, v, 0.25)


def test_error_by_hand() -> None:
    """Two tokens of equal weight, values 1 and 3: dense gives 2, the window of one gives 3, mean |v| is 2."""
    zero = torch.zeros(1, 1, 2, 1)
    two = Heads("captured", zero, zero[0], torch.tensor([[[1.0], [3.0]]]), 1.0)
    (error,) = measure([parse("TopK(k=1, oracle=True)")], [two], 1, torch.float32)
    assert error.error.tolist() == [[0.0]]
    three = Heads("captured", torch.zeros(1, 1, 3, 1), torch.zeros(1, 3, 1), torch.tensor([[[1.0], [2.0], [6.0]]]), 1.0)
    (error,) = measure([parse("LMInfinite(k=1, initial=0)")], [three], 1, torch.float32)
    torch.testing.assert_close(error.error, torch.tensor([[(4.0 - 3.0) / 3.0]]))
    assert error.json()["mean"] == pytest.approx(1 / 3)


def test_dense_has_no_error_and_counts_its_own_traffic() -> None:
    (error,) = measure([Dense()], [heads(), heads(50)], 4)
    assert error.error.shape == (2 * 6, 4)
    assert float(error.error.abs().max()) == 0
    assert error.share == 1
    expected = sum(
        Dense().traffic(n - 4 + i, Shape(1, 2, 3, 16), torch.bfloat16).bytes for n in (40, 50) for i in range(4)
    )
    assert error.bytes == expected
    assert error.json()["bytes_per_step"] == expected // 4


def test_the_bytes_of_a_step_are_those_of_one_text() -> None:
    """Two layers read two or three pieces of a text: a step decodes one token of one piece in both layers."""
    pieces = prompt(3, 48).tolist()
    once, more, mixed = (
        next(measure([Dense()], list(captured_heads(family("llama"), part)), 4)).json()["bytes_per_step"]
        for part in (pieces[:1], pieces, [pieces[0][:32], pieces[1]])
    )
    assert once == more and 0 < mixed < once


def test_fewer_bytes_give_more_error() -> None:
    methods = [parse(f"SparQ(r={r}, k={k})") for r, k in ((2, 4), (8, 16), (16, 39))]
    rows = [error.json() for error in measure(methods, [heads()], 5)]
    assert [row["mean"] for row in rows] == sorted((row["mean"] for row in rows), reverse=True)
    assert [row["share_of_dense"] for row in rows] == sorted(row["share_of_dense"] for row in rows)
    assert all(row["mean"] <= row["p95"] <= row["p99"] <= row["max"] for row in rows)
    assert rows[-1]["mean"] < 1e-6, "all rows are read"


def test_methods_that_drop_tokens_take_the_prompt() -> None:
    (error,) = measure([parse("H2O(k=12)")], [heads()], 3)
    assert 0 < error.share < 1 and float(error.error.mean()) > 0.01
    with pytest.raises(ValueError, match=r"H2O\(k=12\) chooses what it keeps of a prompt"):
        decode(parse("H2O(k=12)"), synthetic_heads(2, tokens=300), 2, torch.float32)


def test_effective_tokens() -> None:
    equal = torch.zeros(8)
    one = torch.tensor([50.0, 0, 0, 0])
    assert float(effective_tokens(equal)) == pytest.approx(8)
    assert float(effective_tokens(one)) == pytest.approx(1)
    assert float(effective_tokens(torch.tensor([0.0, 0, -torch.inf, 0]))) == pytest.approx(3)


def test_percentile() -> None:
    x = torch.arange(100.0).flip(0)
    assert [percentile(x, p) for p in (0.0, 0.95, 0.99, 1.0)] == [0, 94, 98, 99]


def test_captured_heads_are_those_of_the_model() -> None:
    model = family("llama")
    layers = list(captured_heads(model, prompt(1, 64).tolist()))
    assert len(layers) == 2
    dense = reference(layers[1], 5, torch.float32)
    weights = (layers[1].q[:, :, -1] @ layers[1].k.mT * layers[1].scale).softmax(-1)  # (H,G,n)
    torch.testing.assert_close(dense.y[-1], weights @ layers[1].v)


def test_synthetic_heads_run_from_sharp_to_diffuse() -> None:
    a, b, other = synthetic_heads(2, tokens=2048), synthetic_heads(2, tokens=2048), synthetic_heads(2, 2048, seed=1)
    assert a.q.shape == (12, 4, 2, 128) and a.k.shape == a.v.shape == (12, 2048, 128)
    assert torch.equal(a.k, b.k) and torch.equal(a.q, b.q) and not torch.equal(a.v, other.v)
    effective = reference(a, 2, torch.float32).effective.mean(-1)
    wanted = torch.tensor([min(4.0 * 2**i, 1024) for i in range(12)])
    torch.testing.assert_close(effective, wanted, rtol=0.05, atol=0)


def test_too_many_steps() -> None:
    with pytest.raises(ValueError, match="steps = 40 must be at least 1 and below the 40 tokens"):
        next(measure([Dense()], [heads()], 40))


@pytest.mark.parametrize("r", [4, 16, 64])
def test_the_score_error_of_an_index_of_gaussian_keys_is_its_closed_form(r: int) -> None:
    generator = torch.Generator().manual_seed(0)
    size = torch.randn(64, generator=generator).exp()
    k = torch.randn(2, 1100, 64, generator=generator) * size + 3 * size
    q = torch.randn(2, 2, 4, 64, generator=generator)
    predicted, measured = index_score_error(parse(f"Skim(r={r})"), Heads("synthetic", q, k, k, 0.125), 4)
    assert predicted.shape == measured.shape == (2, 2, 4)
    torch.testing.assert_close(predicted, measured, rtol=0.25, atol=0)


def test_skim_reports_its_score_error_beside_the_measured_one() -> None:
    short, made = heads(), synthetic_heads(2, tokens=600)
    skim, dense = measure([parse("Skim(k=16)"), Dense()], [made], 2)
    low, median, high = skim.json()["predicted_score_error"]
    assert 0.5 < low <= median <= high < 2
    assert "predicted_score_error" not in dense.json()
    (error,) = measure([parse("Skim(k=4)")], [short], 2)
    assert "predicted_score_error" not in error.json(), "40 tokens close no group"
    with pytest.raises(ValueError, match="40 tokens must be at least 256"):
        index_score_error(parse("Skim(k=4)"), short, 2)
