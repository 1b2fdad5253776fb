"""Results files and their summary: statistics by hand, and files that are left alone."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from skimkv.eval.results import Results, load, summary
from skimkv.eval.statistics import standard_error


def record(method, id_, score, **more):
    base = {"model": "m", "dtype": "float32", "seed": 0, "counted": False, "task": "lines", "mode": "blind"}
    return {**base, "method": method, "id": id_, "score": score, "prompt_tokens": 9, "steps": 2, "bytes": 10,
            "dense_bytes": 40, **more}  # fmt: skip


def test_summary():
    """By hand: differences 0, -1, -1 have mean -2/3, and the scores 1, 0, 0 a standard error of 1/3."""
    dense = [record("Dense()", str(i), 1.0) for i in range(4)]
    other = [record("TopK(k=2)", str(i), s) for i, s in enumerate([1.0, 0.0, 0.0])]
    first, second = summary([*dense, *other])
    assert (first.n, first.mean, first.stderr, first.diff_to_dense) == (4, 1.0, 0.0, 0.0)
    assert (second.n, second.mean, second.bytes_per_token, second.share) == (3, 1 / 3, 5, 0.25)
    assert second.stderr == pytest.approx(1 / 3) and second.diff_to_dense == pytest.approx(-2 / 3)
    for row in (first, second):
        assert (row.low, row.high, row.diff_low, row.diff_high, row.ms_per_token) == (None,) * 5, "fewer than 5"
    assert summary(other)[0].diff_to_dense is None
    assert summary(other[:1])[0].stderr is None
    assert summary(other, {("lines", "blind", "TopK(k=2)"): 1.5})[0].ms_per_token == 1.5
    other[0]["score"] = math.nan  # a model that overflows
    (third,) = summary(other)
    assert math.isnan(third.stderr) and json.dumps(third.json(), allow_nan=False)


def test_twenty_of_twenty_is_not_certain():
    """Each example has a context of its own: both rows are Wilson's, and 0.161 of the pairs might differ."""
    dense, other = ([record(name, str(i), 1.0) for i in range(20)] for name in ("Dense()", "TopK(k=2)"))
    first, second = (row.json() for row in summary([*dense, *other]))
    for row in (first, second):
        assert (row["low"], row["high"], row["stderr"]) == (pytest.approx(0.8389, abs=1e-4), 1.0, 0.0)
    assert (second["diff_low"], second["diff_high"]) == pytest.approx((-0.1611, 0.1611), abs=1e-4)
    assert (first["diff_to_dense"], first["diff_low"], first["diff_high"]) == (0.0, None, None), "dense is dense"


def test_differences_are_resampled_by_context():
    """Six records of five questions; three are lost as a whole: by question the interval would be half as wide."""
    ids = [f"{i}-{j}" for i in range(6) for j in range(5)]
    lost = {i: float(i[0] not in "024") for i in ids}
    for name in ("id", "context"):  # what earlier versions wrote, and what this one does
        more = {i: {"context": f"digest {i[0]}"} if name == "context" else {} for i in ids}
        dense = [record("Dense()", i, 1.0, **more[i]) for i in ids]
        other = [record("TopK(k=2)", i, lost[i], **more[i]) for i in ids]
        by_context = summary([*dense, *other])[1]
        alone = [{**row, "context": row["id"]} for row in (*dense, *other)]
        by_question = summary(alone)[1]
        assert by_context.diff_to_dense == by_question.diff_to_dense == -0.5
        wide, narrow = (row.diff_high - row.diff_low for row in (by_context, by_question))
        assert 1.9 < wide / narrow < 2.6, "the square root of 5 is 2.24"
        assert (by_context.low, by_context.high) == (by_question.low, by_question.high), "Wilson's, by question"


@pytest.mark.parametrize("counted_first", [False, True])
def test_an_example_that_was_counted_too_is_one_example(counted_first):
    """Ten examples, twice: as one run, whose bytes are the counted ones; 0 of 10 is 0 to 0.278 by Wilson's interval."""
    runs = [[record(name, str(i), score, counted=counted, bytes=12 if counted else 10) for i in range(10)]
            for name, score in (("Dense()", 1.0), ("H2O(k=64)", 0.0)) for counted in (False, True)]  # fmt: skip
    rows = summary([r for run in (reversed(runs) if counted_first else runs) for r in run])
    (other,) = (row for row in rows if row.method == "H2O(k=64)")
    assert (other.n, other.mean, other.bytes_per_token) == (10, 0.0, 6)
    assert (other.low, other.high) == (0.0, pytest.approx(0.2775, abs=1e-4))
    counted_only = summary([*runs[0], *runs[3]])[1]
    assert (counted_only.diff_to_dense, counted_only.diff_high) == (other.diff_to_dense, other.diff_high) != (None,) * 2


def test_documents_of_several_seeds_are_not_independent():
    """Four seeds read the same eight documents: every interval of the tail is that of one seed."""

    def documents(seed):
        return [
            record("TopK(k=2)", str(i), (i + 1) * 0.5, task="kl", seed=seed, context=f"digest {i}",
                   kl=[(i + 1) * x / 10 for x in range(10)], agrees="1101111" + "01"[i % 2] * 3)
            for i in range(8)
        ]  # fmt: skip

    (one,), (all_seeds,) = summary(documents(0)), summary([r for seed in range(4) for r in documents(seed)])
    assert all_seeds.n == 4 * one.n and one.tail.kl_p99_low < one.tail.kl_p99 <= one.tail.kl_p99_high
    assert all_seeds.tail == one.tail


def test_standard_error():
    assert standard_error([1.0]) is None and standard_error([1.0, 3.0]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "text",
    [
        "hello", "hello\n", '{"a": 1}\n', '{"model": 1}\n{"mo', '{"model": "gpt", "layers": 3}', "{", "\n",
        '{"skimkv": "result', '{"skimkv": 1}\n', "[" * 100_000 + "\n", "\0\0\0", "7\n",
        json.dumps(record("Dense()", "0", 1.0)),
    ],
)  # fmt: skip
def test_other_files_are_left_alone(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match="line 1: no record"):
        Results(path, "cpu", resume_anyway=True)
    assert path.read_text() == text


def test_a_file_of_a_later_format_is_left_alone(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"skimkv": "results", "format": 2}\n')
    with pytest.raises(ValueError, match="of format 2, of another version of skimkv"):
        Results(path, "cpu")


def test_only_regular_files_hold_records(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/full"), Path("/dev/zero"), tmp_path / "pipe", tmp_path):
        for call in (lambda path=path: Results(path, "cpu"), lambda path=path: load(path)):
            with pytest.raises(ValueError, match="records are kept in a regular file") as error:
                call()
            assert str(path) in str(error.value)


def test_nothing_is_written_before_the_first_record(tmp_path):
    path = tmp_path / "r.jsonl"
    with Results(path, "cpu") as results:
        assert path.read_bytes() == b""
        results.add(record("Dense()", "0", 1.0))
        results.add(record("Dense()", "1", 1.0))
    header, *records = map(json.loads, path.read_text().splitlines())
    assert (header["skimkv"], header["format"], header["backend"]) == ("results", 1, "cpu")
    assert set(header["versions"]) == {"skimkv", "torch", "transformers"} and records == load(path)


def test_a_torn_line_is_dropped(tmp_path):
    path, lines = tmp_path / "r.jsonl", [json.dumps(record("Dense()", str(i), 1.0)) + "\n" for i in range(2)]
    path.write_text(lines[0] + lines[1][:30])
    assert len(load(path)) == 1
    with Results(path, "cpu") as results:
        assert [row["id"] for row in results.records] == ["0"] and path.read_text() == lines[0] + lines[1][:30]
        results.add(json.loads(lines[1]))
    assert path.read_text() == "".join(lines)


def test_one_writer_at_a_time(tmp_path):
    with Results(tmp_path / "r.jsonl", "cpu"), pytest.raises(ValueError, match="another run"):
        Results(tmp_path / "r.jsonl", "cpu")
    with Results(tmp_path / "r.jsonl", "cpu") as again:
        assert again.records == []
