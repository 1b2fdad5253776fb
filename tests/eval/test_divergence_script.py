"""benchmarks/divergence.py: grids, settings chosen on one half and reported on the other, and a small run."""

from __future__ import annotations

import json
import random

import pytest

from benchmarks import divergence as script


def test_grids():
    found = list(script.settings("SparQ(r=[4, 8], k=[16, 32], channels='int4')"))
    assert found == [f"SparQ(r={r}, k={k}, channels='int4')" for r in (4, 8) for k in (16, 32)]
    assert {script.family(method) for method in found} == {"SparQ(channels='int4')"}
    assert script.family("Dense()") == "Dense" and list(script.settings("Dense()")) == ["Dense()"]
    assert script.BASELINE in {script.family(method) for grid in script.GRIDS for method in script.settings(grid)}
    with pytest.raises(ValueError, match="unknown method"):
        list(script.settings("Spark(r=[1, 2])"))


def records(method, share, scores):
    """A record for each document: its mean divergence, and twice that in every other token."""
    return [
        {"method": method, "score": kl, "kl": [2 * kl, 0.0], "agrees": "01", "bytes": round(1e6 * share),
         "dense_bytes": 10**6, "seed": 0, "id": str(i)} for i, kl in enumerate(scores)
    ]  # fmt: skip


def test_settings_are_chosen_on_one_half_and_reported_on_the_other():
    """Documents 0, 2, ... choose; r=2 is best there at 5%, and r=8 is a bad buy: more bytes and more divergence."""
    cheap = records("SparQ(r=1, k=8)", 0.02, [0.4, 0.8] * 5)
    middle = records("SparQ(r=2, k=8)", 0.04, [0.1, 0.2] * 5)
    wrong = records("SparQ(r=8, k=8)", 0.045, [0.3, 0.01] * 5)
    exact = records("H2O(k=9)", 0.05, [0.1, 0.3] * 5)
    lines = script.families([*cheap, *middle, *wrong, *exact])
    sparq, other = lines
    assert [sparq.at_budget(share) for share in (0.01, 0.02, 0.05)] == [None, cheap[0]["method"], middle[0]["method"]]
    assert [found.method for found in sparq.front()] == [cheap[0]["method"], middle[0]["method"]]
    assert sparq.front()[1].kl_mean == pytest.approx(0.2) and sparq.front()[1].tail.kl_p99 == 0.4
    assert sparq.share_for(0.4) == pytest.approx((0.02 * 0.04) ** 0.5), "halfway between 0.8 and 0.2"
    assert sparq.share_for(0.1) is None and sparq.share_for(0.9) is None
    mean, p99 = sparq.at_share((0.02 * 0.04) ** 0.5)
    assert mean == pytest.approx(0.4) and p99 == pytest.approx(0.8) and sparq.at_share(0.041) is None
    rows = script.budget_rows(lines, "H2O", (0.02, 0.05))
    assert [(row["family"], row["budget"]) for row in rows] == [("SparQ", 0.02), ("SparQ", 0.05), ("H2O", 0.05)]
    assert rows[1]["diff_to_baseline"] == pytest.approx(-0.1) and "diff_to_baseline" not in rows[0]
    assert other.share_for(0.3) is None, "one setting is no line"
    again = records("H2O(k=4)", 0.025, [0.5, 0.5] * 5)
    targets = script.target_rows(script.families([*cheap, *middle, *exact, *again]), "H2O", (0.4,))
    assert targets[0]["times_fewer_than_baseline"] == pytest.approx(targets[1]["share"] / targets[0]["share"])


def test_a_small_run(tmp_path, capsys):
    """It goes on from the records that are there, and writes the same figures again."""
    rng, text, out = random.Random(0), tmp_path / "words.txt", tmp_path / "out"
    text.write_text(" ".join(rng.choice(["river", "mill", "stone", "of", "a", "king"]) for _ in range(2500)))
    argv = [str(text), "--out", str(out), "--context", "64", "--reference", "4", "--documents", "6", "--dtype",
            "float32", "--method", "SparQ(r=[4, 16, 64], k=[8, 32])", "--baseline", "SparQ"]  # fmt: skip
    assert script.main([*argv, "--counted", "TopK(k=[8, 16], oracle=True)"]) == 0
    shown = capsys.readouterr().out
    assert "oracle top-k" in shown and "share of dense's bytes for a mean KL of" in shown
    found = json.loads((out / "divergence.json").read_text())
    assert found["reported_documents"] == 3 and (out / "divergence.png").read_bytes().startswith(b"\x89PNG")
    front = found["curves"]["SparQ"]
    assert len(front) > 1 and front[-1]["kl_mean"] < front[0]["kl_mean"] and front[-1]["share"] > front[0]["share"]
    size = (out / "results.jsonl").stat().st_size
    assert script.main([*argv, "--counted", "TopK(k=[8, 16], oracle=True)"]) == 0
    assert json.loads((out / "divergence.json").read_text()) == found
    assert (out / "results.jsonl").stat().st_size == size
    assert script.main([*argv[:-1], "Dense"]) == 2
    assert "--baseline Dense is none of the families: SparQ" in capsys.readouterr().err
