"""skimkv analyse on the bundled model: its tables, figures and JSON, and mistakes on its command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from skimkv.cli import main


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The mill stood by the river, and the river ran to the sea. " * 60)
    return path


@pytest.mark.slow
def test_the_command(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures"
    sizes = ["--tokens", "128", "--pieces", "2", "--queries", "3", "--clouds", "1"]
    assert main(["analyse", "--text", str(text), *sizes, "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["pieces"]) == (128, 2)
    assert [row["layer"] for row in found["layers"]] == [0, 1, 2, 3]
    for row in found["layers"]:
        names = "top_mass", "tokens_of_90_percent", "kurtosis", "tail_mass", "sparsity"
        assert all(len(row[name]) == 4 for name in names)
        assert all(1 <= x <= 128 for x in row["tokens_of_90_percent"])
        assert all(0 < x <= 1.001 for x in row["top_mass"]) and all(0 <= x < 1 for x in row["sparsity"])
    whole = [x["mean"] for x in found["agreement"] if x["r"] == 64]
    assert len(whole) == 4 and min(whole) > 0.99, "all 64 channels"
    assert set(found["alpha"]["off_by"]) == {"coverage", "sqrt_d", "sqrt_r"}
    assert set(found["correlation_ratio"]) == {"batch", "sequence", "layer", "head", "channel"}
    assert {(c["kind"], c["layer"]) for c in found["clusters"]} == {("keys", 0), ("values", 0)}
    for path in found["figures"]:
        assert Path(path).read_bytes().startswith(b"\x89PNG")
    assert len(found["figures"]) == 4


@pytest.mark.slow
def test_its_tables(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tokens", "128", "--pieces", "1", "--queries", "2", "--clouds", "1"]
    sizes += ["--steps", "2", "--method", "SparQ(r=8, k=16)"]
    assert main(["analyse", "--text", str(text), *sizes, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    titles = "1 piece of 128 tokens", "agreement on the top 32", "clusters of 128 values"
    for words in (*titles, "random projection", "diffuse"):
        assert words in shown
    assert shown.count("Figure: ") == 5


@pytest.mark.slow
def test_errors_of_methods(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tokens", "128", "--pieces", "1", "--queries", "2", "--clouds", "1", "--steps", "3"]
    methods = ["--method", "Dense()", "--method", "SparQ(r=8, k=16)", "--method", "SparQ(r=16, k=32)"]
    assert main(["analyse", "--text", str(text), *sizes, *methods, "--out", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    dense, little, more = found["output_error"]
    assert (dense["mean"], dense["share_of_dense"], dense["heads"]) == (0, 1, "captured")
    assert little["mean"] > more["mean"] > 0 and little["share_of_dense"] < more["share_of_dense"] < 1
    assert sum(little[kind]["query_heads"] for kind in ("sharp", "diffuse") if little[kind]) == 16
    assert Path(found["figures"][-1]).read_bytes().startswith(b"\x89PNG")


def test_without_scikit_learn(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert main(["analyse"]) == 2
    err = capsys.readouterr().err
    assert "pip install 'skimkv[analyse]'" in err and err.count("\n") == 1
