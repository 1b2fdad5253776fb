"""Tuning: the search finds the cheapest setting, and losses are those of decoded tokens."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from skimkv.cli.tune import KNOWN
from skimkv.eval import tune
from skimkv.eval.divergence import measure_divergence
from skimkv.eval.plan import Setup
from skimkv.eval.results import Results
from skimkv.methods import Dense, Skim, SnapKV, SparQ
from support.refusals import refuses
from support.tiny_models import family, prompt, tokenizer


@pytest.mark.parametrize("seed", range(40))
def test_the_search_finds_the_cheapest(seed):
    """Against all of the grid, for random costs and errors that are monotone; of a line that is too dear, one trial."""
    rng = random.Random(seed)
    n, weight, bound = rng.randrange(50, 4000), rng.uniform(0.2, 3), rng.uniform(0.5, 12)
    asked = []

    def cost(method):
        return n * method.r + 256 * method.k

    def error(method):
        return 16 / method.r + weight * 64 / method.k

    def within(method):
        asked.append(method)
        return error(method) <= bound

    lines = [[SparQ(r=r, k=k) for k in (8, 16, 32, 64, 128)] for r in (1, 2, 4, 8, 16)]
    found = tune.search(lines, cost, within)
    fitting = [method for line in lines for method in line if error(method) <= bound]
    assert (found is None) == (not fitting)
    if found is not None:
        assert cost(found) == min(map(cost, fitting)) and error(found) <= bound
    assert len(asked) == len(set(asked)) <= 4 * len(lines)
    for line in lines:
        tried = [method for method in asked if method in line]
        assert not tried or error(tried[0]) <= bound or len(tried) == 1


def test_sizes_that_a_method_refuses_are_left_out(tmp_path):
    """LMInfinite keeps 16 tokens and so takes no k up to 16; every other name gives its lines too."""
    with Results(tmp_path / "t.jsonl", "cpu") as results:
        setup = Setup(family("llama"), tokenizer(), "m", batch=2)
        pieces = tune.Pieces(setup, results, prompt(2, 128).tolist(), 100, "x", is_kl=False)
        (line,) = pieces.lines(["LMInfinite"], [])
        assert [method.k for method in line] == [24, 32, 48, 64, 96]
        assert all(any(pieces.lines([name], ["int8"])) for name in KNOWN)


def test_lines_are_made_before_anything_is_tried(pieces, monkeypatch):
    monkeypatch.setattr(tune.Pieces, "trial", lambda *args: pytest.fail("it is tried"))
    with pytest.raises(KeyError):
        tune.tune(pieces, ["Nothing"], [], 1.0)


def test_no_finer_number_format_is_named_where_there_is_none(pieces, monkeypatch):
    monkeypatch.setattr(tune.Pieces, "lines", lambda *args: [])
    monkeypatch.setattr(tune.Pieces, "trial", lambda *args: SimpleNamespace(value=0.5))
    for dtype, advice in ((torch.float32, "$"), (torch.bfloat16, ", or --dtype float32$")):
        pieces.setup = pieces.setup._replace(model=SimpleNamespace(dtype=dtype))
        refuses(lambda: tune.tune(pieces, [], [], 0.1), f"itself: give a larger target{advice}")


@pytest.fixture
def pieces(tmp_path):
    """Three pieces of 20 prompt tokens and 8 more, the first of them not scored."""
    setup = Setup(family("llama"), tokenizer(), "m", batch=2)
    with Results(tmp_path / "t.jsonl", "cpu") as results:
        yield tune.Pieces(setup, results, prompt(3, 28).tolist(), 20, "x", is_kl=False)


def test_the_loss_is_that_of_the_decoded_tokens(pieces):
    with torch.inference_mode():
        logits = pieces.setup.model(torch.tensor(pieces.pieces)).logits.log_softmax(-1)
    own = [-float(sum(logits[b, i - 1, ids[i]] for i in range(21, 28))) / 7 for b, ids in enumerate(pieces.pieces)]
    dense = pieces.trial(Dense())
    assert [record["loss"] for record in pieces.records(Dense())] == pytest.approx(own, rel=1e-4)
    # two layers, two KV heads of 16 in float32: 2ND + 2D, in the mean of steps with 20 to 27 tokens cached
    assert dense.bytes == pytest.approx(2 * 2 * 4 * (2 * 23.5 + 2) * 16) and dense.value == 0
    assert pieces.trial(SparQ(r=16, k=64)).value == pytest.approx(0, abs=1e-4), "all of the cache"
    few = pieces.trial(SparQ(r=1, k=1))
    increases = [a["loss"] / b - 1 for a, b in zip(pieces.records(few.method), own, strict=True)]
    assert few.value == pytest.approx(sum(increases) / 3, abs=0.02) and abs(few.value) > 1e-2 > few.share - 0.3
    assert few.stderr is not None and (few.low, few.high) == (None, None), "three pieces give no interval"


def test_what_is_known_is_not_run_again(pieces, monkeypatch):
    first = pieces.trial(SparQ(r=4, k=8))
    assert len(pieces.results.records) == 6
    monkeypatch.setattr("skimkv.eval.run.Run._answers", lambda *args: pytest.fail("it is run again"))
    again = tune.Pieces(pieces.setup, pieces.results, pieces.pieces, 20, "x", is_kl=False)
    assert again.trial(SparQ(r=4, k=8)) == first
    with pytest.raises(ValueError, match="of another model or other data"):
        tune.Pieces(pieces.setup, pieces.results, prompt(3, 28, seed=9).tolist(), 20, "x", False).trial(Dense())


def test_the_cheapest_within_a_divergence(tmp_path, monkeypatch):
    """Against all of a small grid, each measured by itself; what is recorded are the same divergences."""
    monkeypatch.setattr(tune, "RANKS", (2, 4, 8))
    monkeypatch.setattr(tune, "COUNTS", (2, 4, 8))
    texts = prompt(5, 28).tolist()
    setup = Setup(family("llama"), tokenizer(), "m", batch=2)
    with Results(tmp_path / "t.jsonl", "cpu") as results:
        pieces = tune.Pieces(setup, results, texts, 20, "x", is_kl=True)
        lines = pieces.lines(["Skim", "SparQ", "SnapKV"], ["int8", "copy"])
        grid = [method for line in lines for method in line]
        assert {type(method) for method in grid} == {Skim, SparQ, SnapKV}
        alone = measure_divergence(setup.model, texts, grid, 20)
        target = 1.01 * sorted(measured.mean for measured in alone)[len(alone) // 3]
        tried = []
        chosen, trials = tune.tune(
            pieces, ["Skim", "SparQ", "SnapKV"], ["int8", "copy"], target, lambda *t: tried.append(t)
        )
        assert [method for method, trial in tried if trial is None] == [Dense(), *(t.method for t in trials)]
        with pytest.raises(ValueError, match=r"1e-30 is below .*, which is what rounding in float32 does to dense"):
            tune.tune(pieces, ["Skim"], [], 1e-30)
    assert chosen is not None and chosen.value <= target
    by_method = {measured.method: measured for measured in alone}
    for trial in trials:
        same = by_method[trial.method]
        assert trial.value == pytest.approx(same.mean, rel=1e-3) and trial.share == pytest.approx(same.share, rel=1e-2)
        assert trial.bytes == pytest.approx(same.bytes_per_token, abs=2)
    assert chosen.bytes == min(trial.bytes for trial in trials if trial.value <= target)
    assert len(trials) < len(grid)
