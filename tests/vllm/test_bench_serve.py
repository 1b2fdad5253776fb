"""`skimkv bench serve --engine vllm` with vLLM's own engines."""

from __future__ import annotations

import pytest

from support import vllm_engines as engines
from support.command_line import answer, assert_mistake, run

pytestmark = pytest.mark.skipif(not engines.INSTALLED, reason="vLLM is not installed: make test-vllm")
SETTING = ["bench", "serve", "--engine", "vllm", "--shape", "tiny", "--layers", "1", "--weights", "float32"]
H2O = ["--method", "H2O(k=32, local=16)"]


def test_the_command_measures_stock_and_methods_at_the_same_bytes(capsys, tmp_path):
    block = 2 * 256 * 3 * 64 * 4  # KV heads, tokens, K twice and V, bytes: of a block of Dense()
    arguments = [*SETTING, *H2O, "--length", "200+20", "--requests", "6", "--memory", str(4 * block)]
    files = ["--out", str(tmp_path / "rows.jsonl"), "--plot", str(tmp_path / "figure.png")]
    result = answer(capsys, *arguments, *files)
    rows = {(row["equal"], row["method"]): row for row in result["rows"]}
    assert set(rows) == {(e, m) for e in ("memory", "batch") for m in ("vllm", "Dense()", H2O[1])}
    dense, h2o = rows["memory", "Dense()"], rows["memory", H2O[1]]
    assert (dense["blocks"], dense["block_size"], dense["batch"]) == (4, 256, 3)  # one block is vLLM's own
    assert (h2o["block_size"], h2o["batch"]) == (32, 6)
    assert {row["batch"] for (equal, _), row in rows.items() if equal == "batch"} == {3}
    for (equal, _), row in rows.items():
        answered = 6 if equal == "memory" else 3
        assert row["tokens_per_s"] == pytest.approx(answered * 20 / row["latency_s"])
        assert row["ratio_stock"] == pytest.approx(row["tokens_per_s"] / rows[equal, "vllm"]["tokens_per_s"])
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    status, out, _ = run(capsys, *arguments, *files)  # from the file
    assert status == 0 and f"6 requests, caches of {4 * block:,} bytes: tiny, 1 layer" in " ".join(out.split())
    for row in result["rows"]:
        assert f"{row['tokens_per_s']:,.0f}" in out


@pytest.mark.parametrize(("arguments", "words"), [
    (["--memory", "100K"], "vllm: "),
    (["--memory", "20M", "--method", "TOVA(k=64)"], "TOVA(k=64): skimkv in vLLM: TOVA(k=64) has no kernel"),
])  # fmt: skip
def test_an_engine_that_does_not_start_is_one_line(arguments, words, capsys):
    assert_mistake(run(capsys, *SETTING, "--length", "200+20", *arguments), words)
