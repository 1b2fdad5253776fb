"""`bench serve`: batches that fit into one memory, rows that are measured once, and what a row says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import skimkv
from skimkv.bench import serve as bench
from skimkv.bench.machine import Cpu
from skimkv.bench.models import random_llama
from skimkv.bench.own_layers import sharing_copy
from skimkv.bench.served_rows import Comparisons
from skimkv.methods import parse
from skimkv.stores.base import Shape

ROW = {
    "method", "shape", "layers", "weights", "prompt", "new", "memory", "equal", "engine", "batch", "tokens_per_s",
    "prompt_s", "decode_s", "latency_s", "ms_per_step", "allocated", "ratio_dense", "machine",
}  # fmt: skip
SEQUENCE = 2 * 2 * 64 * 2 * 40  # bytes of K and V of 40 tokens in one layer of `tiny`: 2 KV heads of 64 in bfloat16
METHODS = ["H2O(k=8, local=4)", "LMInfinite(k=8, initial=2)"]


def measure(records: Path | None = None, lengths: list[tuple[int, int]] | None = None, **options: Any) -> Any:
    settings: dict[str, Any] = {"memory": 2 * SEQUENCE, "methods": METHODS, "records": records, **options}
    return bench.serve(Cpu(), Comparisons("tiny", 1, "bfloat16", lengths or [(36, 4)], **settings))


def test_rows_keep_the_contract() -> None:
    out = measure()
    assert set(out) == {"machine", "rows"} and json.dumps(out)
    names = ["transformers", "Dense()", *METHODS]
    assert [(row["equal"], row["method"]) for row in out["rows"]] == [
        (e, m) for e in ("memory", "batch") for m in names
    ]
    for row in out["rows"]:
        assert set(row) == ROW
        assert row["latency_s"] == pytest.approx(row["prompt_s"] + row["decode_s"])
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * 4 / row["latency_s"])
        assert row["ms_per_step"] == pytest.approx(row["decode_s"] / 3 * 1e3)
        dense = next(other for other in out["rows"] if (other["equal"], other["method"]) == (row["equal"], "Dense()"))
        assert row["ratio_dense"] == pytest.approx(row["tokens_per_s"] / dense["tokens_per_s"])
    # 8 rows of K and V, and for H2O scores and positions of 4 bytes in each of 2 heads, instead of 40 rows
    h2o, window = 2 * SEQUENCE // (SEQUENCE // 5 + 8 * 2 * 8), 10
    batches = {(row["equal"], row["method"]): row["batch"] for row in out["rows"]}
    assert [batches["memory", name] for name in names] == [2, 2, h2o, window]
    assert {batches["batch", name] for name in names} == {2}


@pytest.mark.parametrize("method", [None, "Dense()", "H2O(k=8)", "H2O(k=8, kv='int4')", "SubGen(k=6, recent=2)"])
def test_the_bytes_of_a_sequence_are_those_that_its_cache_holds(method: str | None) -> None:
    spec = None if method is None else parse(method)
    held = bench.sequence_bytes(spec, Shape(7, 2, 2, 64), torch.bfloat16, 36, 4)
    if spec is None:
        assert held == SEQUENCE
    else:
        assert held <= spec.bound(40, Shape(1, 2, 2, 64), torch.bfloat16)
        assert held == SEQUENCE if method == "Dense()" else held < SEQUENCE // 2


def test_all_ways_generate_the_same_tokens_where_nothing_is_dropped() -> None:
    plain, prompts = random_llama("tiny", 2, "float32", 64), torch.arange(3 * 20).view(3, 20)
    models = bench.Models(sharing_copy(plain), plain)
    texts = []
    for method in (None, parse("Dense()"), parse("H2O(k=64)"), parse("LMInfinite(k=64)")):
        sequences = bench.Sequences(Cpu(), models, bench.Candidate(method, 3), prompts)
        sequences.read_prompts()
        tokens = [sequences.tokens]
        for _ in range(5):
            sequences.step()
            tokens.append(sequences.tokens)
        texts.append(torch.cat(tokens, 1).tolist())
    assert texts[1:] == texts[:1] * 3
    assert models.plain.config._attn_implementation != models.ours.config._attn_implementation
    assert models.plain.lm_head.weight is models.ours.lm_head.weight


def test_what_a_file_holds_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torn line and a damaged one cost what stood in them, and the rows of another version count for nothing."""
    file, taken = tmp_path / "serve.jsonl", list[Any]()
    original = bench._measure
    monkeypatch.setattr(bench, "_measure", lambda *args: taken.append(args[2]) or original(*args))  # type: ignore[func-returns-value]
    first = measure(file)
    whole = file.read_bytes()
    assert measure(file) == first and file.read_bytes() == whole
    assert [setting.equal for setting in taken] == ["memory", "batch"]
    assert measure(file, memory=3 * SEQUENCE)["rows"] != first["rows"]
    lines = whole.splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]) + lines[-1][:50])  # killed in the last line
    assert measure(file)["rows"][:4] == first["rows"][:4] and len(taken) == 5
    file.write_bytes(b"".join(lines[:-2]) + lines[-2][:50] + lines[-1])  # a line was added to a torn one
    with pytest.warns(UserWarning, match="serve.jsonl, line 8: it is damaged and left out"):
        assert measure(file)["rows"][:4] == first["rows"][:4]
    assert len(taken) == 6
    file.write_bytes(whole.replace(f'"skimkv": "{skimkv.__version__}"'.encode(), b'"skimkv": "0.0.9"'))
    measure(file)
    assert len(taken) == 8, "measured with another version"


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    for text in ("notes\n", "{}\n"):
        file.write_text(text)
        with pytest.raises(
            ValueError, match=r"notes.txt, line 1: no record of skimkv bench serve; choose another file"
        ):
            measure(file)
        assert file.read_text() == text


def test_a_sequence_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        ValueError, match=rf"^transformers: one sequence takes {SEQUENCE:,} bytes, and the limit is 100$"
    ):
        measure(memory=100)


def test_the_default_methods_have_a_fifth_of_all_tokens() -> None:
    methods = [parse(spec) for spec in bench.default_methods(512, 1024)]
    sizes = [bench.sequence_bytes(m, Shape(1, 1, 1, 64), torch.bfloat16, 512, 64) for m in methods]
    rows = 2 * 64 * 2
    assert sizes[0] == 307 * (rows + 8)
    assert sizes[2] == sizes[3] == 307 * rows
    assert sizes[1] < sizes[0] / 3
