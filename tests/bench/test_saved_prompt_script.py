"""benchmarks/saved_prompt.py: it reads, saves and loads, and says so."""

from __future__ import annotations

import json

from benchmarks import saved_prompt


def test_a_small_model(capsys):
    arguments = ["--shape", "tiny", "--layers", "1", "--length", "600", "--rounds", "1", "--method", "H2O(k=64)"]
    saved_prompt.main(arguments)
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["method"] == "H2O(k=64)" and row["ratio"] == row["read_s"] / row["load_s"] and row["bytes"] > 1000
