"""skimkv tune: the search finds the cheapest, losses are those of decoded tokens, a run goes on where it was."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from skimkv.cli.app import main
from skimkv.eval import tune
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
    """Differences of 0.1 and 0.3 to a dense loss of 2 in the mean."""
    found = tune.compare(Dense(), tune.Loss([1.1, 3.3], 50), tune.Loss([1.0, 3.0], 200))
    assert found.increase == pytest.approx(0.1) and found.share == 0.25
    assert found.stderr == pytest.approx(0.05)
    assert found.low is not None and found.low < 0 < found.increase


@pytest.fixture
def scorer(tmp_path):
    """Three pieces of 20 prompt tokens and 9 more, the first of them not scored."""
    pieces = prompt(3, 29).tolist()
    with Results(tmp_path / "t.jsonl") as results:
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


def test_what_is_known_is_not_run_again(scorer, monkeypatch):
    first = scorer.loss(SparQ(r=4, k=8))
    assert len(scorer.results.records) == 3
    again = tune.Scorer(None, None, scorer.pieces, 20, scorer.results, scorer.key)
    assert again.loss(SparQ(r=4, k=8)) == first
    other = tune.Scorer(None, None, scorer.pieces, 20, scorer.results, {**scorer.key, "mode": "y"})
    with pytest.raises(AttributeError):
        other.loss(SparQ(r=4, k=8))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    rng, path = random.Random(0), tmp_path / "text.txt"
    words = ["river", "mill", "stone", "the", "of", "a", "went", "to", "sea", "old", "and", "king"]
    path.write_text(" ".join(rng.choice(words) for _ in range(3000)))
    return path


def test_the_command(tmp_path, text, capsys):
    out, figure = tmp_path / "t.jsonl", tmp_path / "t.png"
    sizes = ["--prompt", "64", "--scored", "8", "--pieces", "3", "--target-loss", "2%"]
    argv = ["tune", "--text", str(text), *sizes, "--out", str(out)]
    assert main([*argv, "--plot", str(figure), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert figure.read_bytes().startswith(b"\x89PNG")
    chosen, tried = found["chosen"], found["searched"]
    assert chosen in tried and chosen["increase"] <= 0.02 == found["target"]
    assert chosen["bytes"] == min(t["bytes"] for t in tried if t["increase"] <= 0.02)
    assert chosen["share"] == pytest.approx(chosen["bytes"] / found["dense_bytes"])
    assert found["checked"]["method"] == chosen["method"] and found["checked"]["increase"] != chosen["increase"]
    whole = out.read_bytes()
    assert whole.count(b"\n") == 3 * (len(tried) + 1 + 2)
    out.write_bytes(whole[: len(whole) // 2])  # killed there
    assert main([*argv, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert {**again, "figure": None} == {**found, "figure": None}
    assert out.read_bytes() == whole
    assert main(argv) == 0 and out.read_bytes() == whole
    assert "other pieces" in capsys.readouterr().out


def test_nothing_within_the_target(tmp_path, text, capsys, monkeypatch):
    monkeypatch.setattr(tune, "grid", lambda D, n: ([1], [8]))
    argv = ["tune", "--text", str(text), "--prompt", "256", "--scored", "16", "--pieces", "2", "--target-loss", "0"]
    assert main([*argv, "--out", str(tmp_path / "t.jsonl")]) == 2
    err = capsys.readouterr().err
    assert "none of 3 SparQ stays within 0.000%" in err and "the nearest is SparQ(r=1, k=8" in err
    assert err.strip().count("\n") == 0


@pytest.mark.parametrize(("argv", "words"), [
    (["--target-loss", "many"], "--target-loss 'many' must be a share"),
    (["--target-loss", "150%"], "--target-loss '150%'"),
    (["--channels", "int2"], "--channels 'int2' is unknown"),
    (["--prompt", "8"], "--prompt 8 must be at least 32"),
    (["--pieces", "1"], "--pieces 1 must be at least 2"),
    (["--prompt", "5000"], "4096 positions"),
    (["--pieces", "400"], "tokens are too few for --pieces 400"),
    (["--text", "nowhere.txt"], "nowhere.txt: no such file"),
    (["--out", "no/such/t.jsonl"], "there is no folder no/such"),
])  # fmt: skip
def test_mistakes_are_one_line(argv, words, text, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "--text", str(text), *argv]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1
