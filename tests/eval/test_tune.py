"""Tuning: the search finds the cheapest SparQ, and losses are those of decoded tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from skimkv.eval import tune
from skimkv.eval.divergence import measure_divergence
from skimkv.eval.results import Results
from skimkv.methods import Dense, SparQ
from support.tiny_models import family, prompt, tokenizer

RANKS, COUNTS, WAYS = (1, 2, 4, 8, 16), (8, 16, 32, 64), ("int4", "int8", "copy")
SIZE = {"int4": 0.5, "int8": 1.0, "copy": 2.0}


@pytest.mark.parametrize("seed", range(40))
def test_the_search_finds_the_cheapest(seed):
    """Against all of the grid, for random costs and losses that are monotone; at most a staircase is asked."""
    rng = random.Random(seed)
    n, weight = rng.randrange(50, 4000), rng.uniform(0.2, 3)
    noise = {way: rng.uniform(0, 4) for way in WAYS}
    bound, limit = rng.uniform(0.5, 12), rng.choice([1e9, 40.0 * n])
    asked: list[SparQ] = []

    def cost(m: Any) -> float:
        return n * m.r * SIZE[m.channels] + 256 * m.k

    def loss(m: Any) -> float:
        return 16 / m.r + weight * 64 / m.k + noise[m.channels]

    def within(m: Any) -> bool:
        asked.append(m)
        return loss(m) <= bound

    found = tune.search(RANKS, COUNTS, WAYS, cost, within, limit)
    grid = [SparQ(r=r, k=k, channels=way) for way in WAYS for r in RANKS for k in COUNTS]
    fitting = [m for m in grid if loss(m) <= bound and cost(m) < limit]
    if not fitting:
        assert found is None
    else:
        assert found is not None and cost(found) == min(map(cost, fitting)) and loss(found) <= bound
    assert len({m for m in asked if m.channels == "int4"}) <= len(RANKS) + len(COUNTS)
    assert len(set(asked)) <= 3 * (len(RANKS) + len(COUNTS)) < len(grid)


def test_compare():
    """Differences of 0.1 and 0.3 to a dense loss of 2 in the mean: two pieces give no interval, six do."""
    for times in (1, 3):
        found = tune.compare(Dense(), tune.Loss([1.1, 3.3] * times, 50), tune.Loss([1.0, 3.0] * times, 200))
        assert found.increase == pytest.approx(0.1) and found.share == 0.25
        if times == 1:
            assert found.stderr == pytest.approx(0.05) and (found.low, found.high) == (None, None)
        else:
            assert found.low is not None and found.high is not None and 0 < found.low < 0.1 < found.high


@pytest.fixture
def scorer(tmp_path):
    """Three pieces of 20 prompt tokens and 9 more, the first of them not scored."""
    pieces = prompt(3, 29).tolist()
    with Results(tmp_path / "t.jsonl", "cpu") as results:
        key = {"model": "m", "dtype": "float32", "task": "tune", "mode": "x"}
        yield tune.Scorer(family("llama"), tokenizer(), pieces, 20, results, key, batch=2)


def test_the_loss_is_that_of_the_decoded_tokens(scorer):
    with torch.inference_mode():
        logits = scorer.model(torch.tensor(scorer.pieces)).logits.log_softmax(-1)
    own = [-float(sum(logits[b, i - 1, ids[i]] for i in range(21, 29))) / 8 for b, ids in enumerate(scorer.pieces)]
    dense = scorer.loss(Dense())
    assert dense.nats == pytest.approx(own, rel=1e-4)
    # two layers, two KV heads of 16 in float32: 2ND + 2D, in the mean of steps with 20 to 27 tokens cached
    assert dense.bytes == pytest.approx(2 * 2 * 4 * (2 * 23.5 + 2) * 16)
    assert scorer.loss(SparQ(r=16, k=64)).nats == pytest.approx(own, rel=1e-4), "all of the cache"
    assert scorer.loss(SparQ(r=1, k=1)).nats != pytest.approx(own, rel=1e-2), "the method decides"


def test_what_is_known_is_not_run_again(scorer):
    first = scorer.loss(SparQ(r=4, k=8))
    assert len(scorer.results.records) == 3
    again = tune.Scorer(None, None, scorer.pieces, 20, scorer.results, scorer.key)
    assert again.loss(SparQ(r=4, k=8)) == first
    other = tune.Scorer(None, None, scorer.pieces, 20, scorer.results, {**scorer.key, "mode": "y"})
    with pytest.raises(AttributeError):
        other.loss(SparQ(r=4, k=8))


def test_the_cheapest_within_a_divergence(tmp_path, monkeypatch):
    """Against all of a small grid, each measured by itself; what is recorded are the same divergences."""
    monkeypatch.setattr(tune, "grid", lambda D, n: ([2, 4, 8], [2, 4, 8]))
    model, pieces = family("llama"), prompt(5, 29).tolist()
    grid = [SparQ(r=r, k=k, channels=way) for way in ("int8", "copy") for r in (2, 4, 8) for k in (2, 4, 8)]
    alone = measure_divergence(model, [piece[:-1] for piece in pieces], grid, 20)
    target = 1.01 * sorted(measured.mean for measured in alone)[6]
    with Results(tmp_path / "t.jsonl", "cpu") as results:
        key = {"model": "m", "dtype": "float32", "task": "kl", "mode": "x"}
        scorer = tune.DivergenceScorer(model, tokenizer(), pieces, 20, results, key, batch=2)
        chosen, trials, dense = tune.tune(scorer, ("int8", "copy"), target)
    assert chosen is not None and chosen.value <= target and max(dense.nats) < 1e-9
    by_method = {measured.method: measured for measured in alone}
    for trial in trials:
        same = by_method[trial.method]
        assert trial.value == pytest.approx(same.mean, rel=1e-3) and trial.share == pytest.approx(same.share, rel=1e-2)
        assert trial.bytes == pytest.approx(same.bytes_per_token, abs=2)
    cost = {m.method: tune.step_bytes(m.method, scorer.layers(), 20) for m in alone}
    assert cost[chosen.method] == min(cost[m.method] for m in alone if m.mean <= target) < max(cost.values())
