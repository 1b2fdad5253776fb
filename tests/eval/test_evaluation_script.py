"""benchmarks/evaluation.py: a small run, which goes on where it was, and its tables."""

from __future__ import annotations

import warnings

import pytest

import skimkv
from benchmarks import evaluation as script
from skimkv.eval import budgets
from skimkv.methods import Dense, SparQ

TEXT = "The quick brown fox jumps over the lazy dog, and then it runs home through the wood. "
SMALL_SETTINGS = {"Dense()": 1.0, "SparQ(r=8, k=40)": 1 / 16, "LMInfinite(k=40)": 1 / 16}


@pytest.mark.slow
def test_a_small_run_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    """Two methods, two tasks and two contexts; a second run makes no record and keeps the times."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(TEXT * 300)
    solved = []
    monkeypatch.setattr(script, "solve_settings", lambda setup, document: solved.append(1) or SMALL_SETTINGS)
    monkeypatch.setattr(script, "ROUNDS", 2)
    command = [str(tmp_path), "--text", str(text), "--out", str(out), "--length", "600", "--limit", "1"]
    command += ["--contexts", "700", "300", "--documents", "1", "--tasks", "niah_single_1(length={0})", "record"]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="constrained_layout")  # a figure in which something lies far outside
        script.main(command)
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    assert set(files) == set("results.jsonl settings.json times.json tables.md readme.md figure.png".split())
    assert files["figure.png"].startswith(b"\x89PNG")
    rows = files["readme.md"].decode().splitlines()
    assert rows[0].startswith("| method | bytes | right, blind | right, aware | KL at 300, ")
    assert "`Dense()` | 100.0%" in rows[2] and len(rows) == 5
    assert all("—" not in row for row in rows), "every cell is measured"
    assert files["tables.md"].decode().count("## At ") == 1, "only shares that some setting was solved for"
    script.main(command)
    assert len(solved) == 1
    for name in ("results.jsonl", "times.json", "tables.md"):
        assert (out / name).read_bytes() == files[name], name
    script.main([*command[: command.index("--tasks")], "--tasks"])
    rows = (out / "tables.md").read_text().splitlines()
    assert len(solved) == 1 and sum(row.count("| — | — |") for row in rows) == 3, (
        "no answers, and divergences as before"
    )
    capsys.readouterr()


def test_settings_are_solved_at_every_share(monkeypatch):
    """Of SparQ and SnapKV there is a second form; what does not reach a share is left out."""
    monkeypatch.setattr(skimkv.eval.budgets, "METHODS", {m.__name__: m for m in (Dense, SparQ, skimkv.SnapKV)})
    setup = script.Setup(*skimkv.load("builtin"), "builtin")
    ids = list(range(100, 700))
    document = script.PlannedExample(None, ids, budgets.Question([5, 6, 7, 8], 0, 4), "")
    settings = script.solve_settings(setup, document)
    assert settings.pop("Dense()") == 1
    for share in script.SHARES:
        own = [spec for spec, solved in settings.items() if solved == share]
        names = [spec.split("(")[0] for spec in own]
        assert names in ([*["SparQ"] * 3, "SnapKV", "SnapKV"], ["SparQ"] * 3, ["SparQ"], []), own
        assert len(set(own)) == len(own) and ("pool=13" in own[-1] or "int4" in own[-1] if own else True)
    assert len(settings) > 6
