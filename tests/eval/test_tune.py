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
from skimkv.methods import H2O, Dense, LowRank, Quest, Skim, SnapKV, SparQ, TopK
from skimkv.stores.base import Shape
from support.refusals import refuses
from support.tiny_models import family, prompt, tokenizer


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_the_search_finds_the_cheapest(seed, known):
    """Against all of the grid, for random costs and errors that are monotone; of a line that is too dear, one trial.

    Bytes of every second line are not known before a trial, or all are.
    """
    rng = random.Random(seed)
    n, weight, bound = rng.randrange(50, 4000), rng.uniform(0.2, 3), rng.uniform(0.5, 12)
    limit = n * 16 + 256 * rng.choice([20, 200])
    asked = []

    def cost(method):
        return n * method.r + 256 * method.k

    def error(method):
        return 16 / method.r + weight * 64 / method.k

    def is_known(method):
        return known or method.r in (1, 4, 16)

    def attempt(method):
        asked.append(method)
        return cost(method), error(method) <= bound

    lines = [[SparQ(r=r, k=k) for k in (8, 16, 32, 64, 128)] for r in (1, 2, 4, 8, 16)]
    found = tune.search(lines, lambda method: cost(method) if is_known(method) else None, attempt, limit)
    fitting = [method for line in lines for method in line if error(method) <= bound and cost(method) < limit]
    assert (found is None) == (not fitting)
    if found is not None:
        assert cost(found) == min(map(cost, fitting)) and error(found) <= bound
    assert len(asked) == len(set(asked)) <= 4 * len(lines)
    for line in lines:
        tried = [method for method in asked if method in line]
        assert not tried or error(tried[0]) <= bound or len(tried) == 1 or not is_known(line[0])


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


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_bytes_that_are_known_are_those_that_are_measured(tmp_path, name):
    """Sliding layers add the same to every method; what Skim and SnapKV move, only a trial tells."""
    with Results(tmp_path / "t.jsonl", "cpu") as results:
        setup = Setup(family(name), tokenizer(), "m", batch=2)
        pieces = tune.Pieces(setup, results, prompt(2, 128).tolist(), 100, "x", is_kl=True)
        of_sliding = pieces.trial(Dense()).bytes - pieces.step_bytes(Dense())
        assert (of_sliding > 0) == (name == "gemma3")
        methods = [SparQ(4, 16), SparQ(8, 32, channels="int8"), Quest(16, 48), H2O(12, 4), TopK(8), LowRank(4, 8)]
        for method in methods:
            assert pieces.step_bytes(method) + of_sliding == pieces.trial(method).bytes
        assert pieces.step_bytes(Skim(k=8)) is None and pieces.step_bytes(SnapKV(k=8)) is None


@pytest.fixture
def skim_moves(pieces, monkeypatch):
    """Let Skim(k=...) move 60 k bytes and what is given, and other methods their closed form; the KL is 1 / k."""
    dense = pieces.trial(Dense())

    def use(fixed_bytes):
        def trial(self, method):
            if method == Dense():
                return dense
            moved = fixed_bytes + 60 * method.k if isinstance(method, Skim) else self.step_bytes(method)
            return dense._replace(method=method, value=1 / method.k, bytes=moved, share=moved / dense.bytes)

        monkeypatch.setattr(tune.Pieces, "trial", trial)
        return dense

    return use


@pytest.mark.parametrize("k", [8, 16])
def test_the_order_of_names_and_channels_changes_nothing(pieces, skim_moves, k):
    """Skim moves far less here than its closed form without data, which exceeds dense attention's bytes."""
    dense, found = skim_moves(1000), []
    assert sum(Skim(k=k).traffic(23, Shape(1, 2, 2, 16), torch.float32).bytes for _ in range(2)) > dense.bytes
    for names in (["SparQ", "Skim"], ["Skim", "SparQ"]):
        for channels in (["int4", "copy"], ["copy", "int4"]):
            chosen, trials = tune.tune(pieces, names, channels, 1 / k)
            assert chosen.method == Skim(k=k)
            found.append([t.method for t in trials])
    assert all(tried == found[0] for tried in found)


def test_what_moves_as_much_as_dense_is_not_chosen(pieces, skim_moves):
    skim_moves(skim_moves(0).bytes)
    chosen, trials = tune.tune(pieces, ["Skim"], [], 1 / 8)
    assert chosen is None and trials
    chosen, _ = tune.tune(pieces, ["Skim", "SparQ"], ["copy"], 1 / 8)
    assert chosen.method == SparQ(r=2, k=8)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_of_what_was_tried_the_fewest_bytes_are_chosen(tmp_path, name):
    """With every target that a grid of real measurements gives, also where the library computes sliding layers."""
    names, channels = ["SparQ", "Skim"], ["int4", "copy"]
    with Results(tmp_path / "t.jsonl", "cpu") as results:
        setup = Setup(family(name), tokenizer(), "m", batch=4)
        pieces = tune.Pieces(setup, results, prompt(2, 90).tolist(), 80, "x", is_kl=True)
        dense = pieces.trial(Dense())
        grid = [pieces.trial(method) for line in pieces.lines(names, channels) for method in line]
        for target in sorted(t.value for t in grid)[:: len(grid) // 12]:
            chosen, trials = tune.tune(pieces, names, channels, target)
            fitting = [t.bytes for t in trials if t.value <= target and t.bytes < dense.bytes]
            assert (chosen.bytes if chosen else None) == min(fitting, default=None)
            assert len(trials) < len(grid) // 2


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
        assert {method.r for method in grid if isinstance(method, Skim)} == {None, 2}, "an eighth of the head size too"
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
