"""skimkv tune: the choice is the cheapest within the target, a run goes on where it was, mistakes are one line."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from skimkv.cli import main
from skimkv.cli.tune import Channels, Target, _nearest
from skimkv.eval import tune
from skimkv.eval.results import Results
from skimkv.stores.full import CHANNELS


@pytest.fixture
def text(tmp_path: Path) -> Path:
    rng, path = random.Random(0), tmp_path / "text.txt"
    words = ["river", "mill", "stone", "the", "of", "a", "went", "to", "sea", "old", "and", "king"]
    path.write_text(" ".join(rng.choice(words) for _ in range(3000)))
    return path


@pytest.fixture
def tuned(tmp_path, text, capsys):
    """Chooses, and chooses again after its records were cut, as by a kill: (what is found, records, what is shown)."""
    out, figure = tmp_path / "t.jsonl", tmp_path / "t.png"

    def tune(*options):
        argv = ["tune", "--text", str(text), "--prompt", "64", "--scored", "8", *options, "--out", str(out)]
        assert main([*argv, "--plot", str(figure), "--json"]) == 0
        found, whole = json.loads(capsys.readouterr().out), out.read_bytes()
        assert figure.read_bytes().startswith(b"\x89PNG")
        out.write_bytes(whole[: len(whole) // 2])
        assert main([*argv, "--json"]) == 0
        assert {**json.loads(capsys.readouterr().out), "figure": None} == {**found, "figure": None}
        assert out.read_bytes() == whole
        assert main(argv) == 0 and out.read_bytes() == whole
        return found, whole, capsys.readouterr().out

    return tune


def test_a_target_of_loss(tuned):
    """The cheapest that was tried within the target is chosen."""
    found, records, shown = tuned("--pieces", "3", "--target-loss", "2%")
    chosen, tried = found["chosen"], found["searched"]
    assert chosen in tried and chosen["increase"] <= 0.02 == found["target"]
    assert chosen["bytes"] == min(t["bytes"] for t in tried if t["increase"] <= 0.02)
    assert chosen["share"] == pytest.approx(chosen["bytes"] / found["dense_bytes"])
    assert found["checked"]["method"] == chosen["method"] and found["checked"]["increase"] != chosen["increase"]
    assert records.count(b"\n") == 1 + 3 * (len(tried) + 1 + 2), "a header, and each piece by each method"
    assert {t["method"].partition("(")[0] for t in tried} == {"Skim", "SparQ"}
    assert "On 3 other pieces: " in shown and "±" not in shown and "95%:" not in shown, "3 pieces give no interval"
    assert chosen["low"] is None and chosen["high"] is None


@pytest.mark.slow
def test_a_target_of_divergence(tmp_path, text, tuned, capsys):
    found, _, shown = tuned("--pieces", "5", "--channels", "int4", "--target-kl", "0.02")
    assert found["target"] == 0.02 and found["dense_kl"] < 1e-9
    chosen, tried = found["chosen"], found["searched"]
    assert chosen in tried and chosen["low"] < chosen["kl_mean"] < chosen["high"] and chosen["kl_mean"] <= 0.02
    assert chosen["bytes"] == min(t["bytes"] for t in tried if t["kl_mean"] <= 0.02) < max(t["bytes"] for t in tried)
    assert any(t["kl_mean"] > 0.02 for t in tried) and chosen["kl_mean"] < chosen["kl_p99"] <= chosen["kl_max"]
    assert found["checked"]["method"] == chosen["method"] and found["checked"]["kl_mean"] != chosen["kl_mean"]
    assert "within 0.02 nats" in shown and "mean KL" in shown and "On 5 other pieces" in shown
    argv = ["tune", "--text", str(text), "--prompt", "64", "--scored", "8", "--pieces", "5", "--channels", "int4"]
    assert main([*argv, "--target-kl", "0", "--out", str(tmp_path / "u.jsonl")]) == 2
    err = capsys.readouterr().err
    assert "the target 0 is below" in err.splitlines()[-1] and "what rounding in float32 does" in err


def test_ctrl_c_says_how_to_go_on(tmp_path, text, capsys, monkeypatch):
    add, left = Results.add, [5]

    def interrupted(results, record):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        add(results, record)

    monkeypatch.setattr(Results, "add", interrupted)
    out = tmp_path / "t.jsonl"
    sizes = ["--prompt", "64", "--scored", "8", "--pieces", "3"]
    assert main(["tune", "--text", str(text), *sizes, "--out", str(out)]) == 130
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line == f"skimkv: interrupted: 4 records are in {out}; the same command goes on where it stopped"


def test_nothing_within_the_target(tmp_path, text, capsys, monkeypatch):
    monkeypatch.setattr(tune, "RANKS", (1,))
    monkeypatch.setattr(tune, "COUNTS", (8,))
    text.write_text(" ".join(text.read_text().split()[:60] * 50))  # what comes again is known by looking back only
    argv = ["tune", "--text", str(text), "--prompt", "256", "--scored", "16", "--pieces", "2", "--target-loss", "0"]
    argv += ["--search", "SparQ"]
    assert main([*argv, "--out", str(tmp_path / "t.jsonl")]) == 2
    err = capsys.readouterr().err
    line = err.strip().splitlines()[-1]
    assert "none of 3 settings stays within 0% of dense's loss; the nearest is S" in line


def test_the_order_of_search_changes_nothing(tmp_path, text, capsys):
    """Skim moves fewer bytes than its closed form tells, and so it must be tried after SparQ too."""
    argv = ["tune", "--text", str(text), "--prompt", "64", "--scored", "8", "--pieces", "2", "--target-kl", "0.01"]
    found = []
    for number, names in enumerate((["SparQ", "Skim"], ["Skim", "SparQ"])):
        order = [word for name in names for word in ("--search", name)]
        assert main([*argv, *order, "--channels", "int4", "--out", str(tmp_path / f"{number}.jsonl"), "--json"]) == 0
        found.append({**json.loads(capsys.readouterr().out), "out": ""})
    assert found[0] == found[1] and found[0]["chosen"]["bytes"] < found[0]["dense_bytes"]
    assert {t["method"].partition("(")[0] for t in found[0]["searched"]} == {"Skim", "SparQ"}


def test_a_piece_may_have_as_many_tokens_as_the_model_has_positions(tmp_path, text, capsys, monkeypatch):
    """As of `eval`: the last token of a piece is decoded too, and is the last of the positions."""
    limit = 96
    monkeypatch.setattr("skimkv.hf.positions.max_positions", lambda model: limit)
    monkeypatch.setattr(tune, "RANKS", (8,))
    monkeypatch.setattr(tune, "COUNTS", (48,))
    argv = ["tune", "--text", str(text), "--scored", "8", "--pieces", "2", "--search", "SparQ", "--target-loss", "90%"]
    argv += ["--out", str(tmp_path / "t.jsonl")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main([*argv, "--prompt", str(limit - 8)]) == 0
    capsys.readouterr()
    assert main([*argv, "--prompt", str(limit - 7)]) == 2
    assert f"{limit + 1} tokens do not fit the {limit} positions" in capsys.readouterr().err


def test_where_nothing_moves_fewer_bytes_than_dense():
    dense_like = SimpleNamespace(share=1.2, value=0.0, method="Skim(k=8)")
    near = SimpleNamespace(share=0.5, value=0.3, method="SparQ(r=2, k=8)")
    target = Target(0.1, is_kl=True)
    assert _nearest([dense_like], target).startswith("no method moves fewer bytes than dense")
    assert "none of 1 settings" in _nearest([dense_like, near], target)
    assert "the nearest is SparQ(r=2, k=8), 0.3 nats with 50.0%" in _nearest([dense_like, near], target)


def test_channels_are_those_of_the_stores():
    assert [kind.value for kind in Channels] == list(CHANNELS)
