"""skimkv eval: runs resume exactly after any end, the JSON contract holds, mistakes are one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import skimkv
from skimkv import records
from skimkv.cli import eval as cli_eval
from skimkv.cli import main
from skimkv.cli.eval import Mode, Sweep
from skimkv.eval import results, sweeps
from skimkv.hf import fingerprint
from support.evaluation import SPECS, eval_argv
from support.tiny_models import family


@pytest.mark.slow
def test_a_torn_run_goes_on_where_it_was(tmp_path, capsys):
    """Cut the file at any place: the next run drops the torn line, makes what is missing, and nothing twice."""
    whole, torn = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl"
    assert main(eval_argv(whole)) == 0
    lines = whole.read_bytes().splitlines(keepends=True)
    assert len(lines) == 19 and "18 records" in capsys.readouterr().out, "a header and the records"
    ends = [0, 40, len(lines[0]), len(lines[0]) + 1, len(b"".join(lines[:7])) - 1, len(b"".join(lines[:11])) + 40]
    for end in ends:
        torn.write_bytes(whole.read_bytes()[:end])
        assert main(eval_argv(torn)) == 0
        assert torn.read_bytes().count(b"\n") == 19
        assert sorted(torn.read_bytes().splitlines()) == sorted(whole.read_bytes().splitlines()), end
    before = torn.read_bytes()
    assert main(eval_argv(torn)) == 0 and torn.read_bytes() == before
    assert main(eval_argv(torn, limit=9)) == 0 and torn.read_bytes().startswith(before), "a larger limit adds"
    assert torn.read_bytes().count(b"\n") == 28


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(tmp_path):
    out = tmp_path / "killed.jsonl"
    source = str(Path(skimkv.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "skimkv.cli", *eval_argv(out, limit=60)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if out.exists() and out.read_bytes().count(b"\n") >= 5:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    had = out.read_bytes()
    assert 5 <= had.count(b"\n") < 180, "it was killed in between"
    assert main(eval_argv(out)) == 0
    keys = [results.RecordKey.of(record) for record in results.load(out)]
    assert len(set(keys)) == len(keys) >= 18 and out.read_bytes().startswith(had[: had.rindex(b"\n") + 1])


def test_a_full_disk_ends_it_in_one_line(tmp_path, capsys, monkeypatch):
    """The third line is cut: the header and the record before are kept, and the next run makes the rest."""
    out, write, left = tmp_path / "r.jsonl", os.write, [2]

    def full(file: int, data: bytes) -> int:
        left[0] -= 1
        return write(file, data if left[0] >= 0 else data[:50])

    monkeypatch.setattr(records.os, "write", full)
    assert main(eval_argv(out)) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].endswith("bytes were written: the disk is full")
    monkeypatch.undo()
    assert out.read_bytes().count(b"\n") == 2 and main(eval_argv(out)) == 0 and len(results.load(out)) == 18


def test_json(tmp_path, capsys):
    out = tmp_path / "r.jsonl"
    assert main(eval_argv(out, "--json", "--mode", "both")) == 0
    answer = json.loads(capsys.readouterr().out)
    assert list(answer) == ["rows", "out", "machine"] and answer["out"] == str(out)
    names = "task mode method n mean low high stderr diff_to_dense diff_low diff_high bytes_per_token ms_per_token"
    assert all(list(row) == names.split() for row in answer["rows"])
    assert [(row["mode"], row["method"]) for row in answer["rows"]] == [(m, s) for m in sweeps.MODES for s in SPECS]
    assert {row["n"] for row in answer["rows"]} == {6}
    assert all(0 <= row["low"] < row["mean"] <= 1 and row["low"] < row["high"] <= 1 for row in answer["rows"][:2])
    assert all(row["diff_low"] is None for row in answer["rows"]), "two records are too few to resample"
    assert all(row["ms_per_token"] > 0 for row in answer["rows"]) and answer["machine"].endswith(", 1 thread")
    before = out.read_bytes()
    assert main(eval_argv(out, "--mode", "both")) == 0 and out.read_bytes() == before
    table = " ".join(capsys.readouterr().out.split())  # long names of processors take several lines
    assert answer["machine"] in table and "0.610 … 1.000" in table, "6 of 6 are right"


def test_a_finished_run_has_no_times(tmp_path, capsys):
    out = tmp_path / "r.jsonl"
    times = []
    for _ in range(2):
        assert main(eval_argv(out, "--json")) == 0
        times.append([row["ms_per_token"] for row in json.loads(capsys.readouterr().out)["rows"]])
    assert all(ms > 0 for ms in times[0]) and times[1] == [None] * len(SPECS)
    assert not any("ms" in json.loads(line) for line in out.read_text().splitlines())


def test_records_of_another_model_or_other_data_are_not_taken(tmp_path, capsys, monkeypatch):
    out = tmp_path / "r.jsonl"
    assert main(eval_argv(out)) == 0
    before = out.read_bytes()
    rows = results.load(out)
    assert len({row["source"] for row in rows}) == 6, "one for each example"
    original = fingerprint.of_model
    monkeypatch.setattr(fingerprint, "of_model", lambda *model: original(*model)[::-1])
    assert main(eval_argv(out)) == 2 and out.read_bytes() == before
    assert "r.jsonl has record(lines=12, asked=3), blind, Dense(), 0-0 of another model" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["hello\n", '{"model": "mine", "value": 1}', '{"skimkv": "settings"}\n'])
@pytest.mark.parametrize("options", [[], ["--task", "passkey(length=90000)"], ["--resume-anyway"]])
def test_other_files_are_left_alone(tmp_path, capsys, text, options):
    """Also where the command fails later."""
    path = tmp_path / "notes.json"
    path.write_text(text)
    assert main([*eval_argv(path), *options]) == 2
    assert path.read_text() == text and "line 1: no record" in capsys.readouterr().err


def test_a_results_file_is_left_as_it_was_when_the_command_fails(tmp_path, capsys):
    """Even its torn last line stays until a record is added."""
    out = tmp_path / "r.jsonl"
    assert main(eval_argv(out)) == 0
    out.write_bytes(out.read_bytes()[:-20])
    before = out.read_bytes()
    assert main([*eval_argv(out), "--task", "record(lines=900, asked=1)"]) == 2
    assert out.read_bytes() == before and "no example fits" in capsys.readouterr().err


def test_a_file_of_another_version_or_backend_asks_for_resume_anyway(tmp_path, capsys, monkeypatch):
    out = tmp_path / "r.jsonl"
    assert main(eval_argv(out)) == 0
    header, *records = out.read_text().splitlines(keepends=True)
    backend = json.loads(header)["backend"]
    assert json.loads(header)["versions"]["skimkv"] == skimkv.__version__
    foreign = "".join([header.replace(skimkv.__version__, "0.0.9"), *records])
    out.write_text(foreign)
    assert main(eval_argv(out, limit=9)) == 2 and out.read_text() == foreign
    error = capsys.readouterr().err
    assert f"written by skimkv 0.0.9 with the backend {backend}" in error and "--resume-anyway" in error
    assert main(eval_argv(out, "--resume-anyway", limit=9)) == 0
    assert out.read_text().startswith(foreign) and out.read_text().count("\n") == 28
    out.write_text("".join(records))  # a file of a version that wrote no header
    before = out.read_text()
    assert main(eval_argv(out, "--count")) == 2 and out.read_text() == before
    assert "this is skimkv" in (error := capsys.readouterr().err) and "with the backend ref: give" in error
    assert main(eval_argv(out)) == 0 and out.read_text() == before, "the same version and backend"


def test_ctrl_c_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    out, write, left = tmp_path / "r.jsonl", os.write, [8]

    def interrupted(file: int, data: bytes) -> int:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return write(file, data)

    monkeypatch.setattr(records.os, "write", interrupted)
    assert main(eval_argv(out)) == 130
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error == f"skimkv: interrupted: 6 records are in {out}; the same command goes on where it stopped"
    monkeypatch.undo()
    assert main(eval_argv(out)) == 0 and len(results.load(out)) == 18


def test_options_name_what_there_is():
    assert [sweep.value for sweep in Sweep] == list(sweeps.SWEEPS)
    assert [mode.value for mode in Mode] == [*sweeps.MODES, "both"]


def test_divergences(tmp_path, capsys):
    """Units and figures of their own in the table, keys of their own in JSON, and the rows of other tasks as before."""
    text = tmp_path / "words.txt"
    text.write_text(" ".join(f"the {i % 7} mill of the {i % 11} king" for i in range(800)))
    argv = ["eval", "--task", "kl(context=64, reference=6)", "--task", "record(lines=8, asked=1)", "--limit", "5",
            "--data", str(text), "--method", "Dense()", "--method", "SparQ(r=4, k=8)",
            "--out", str(tmp_path / "r.jsonl")]  # fmt: skip
    assert main([*argv, "--json"]) == 0
    dense, sparse, *others = json.loads(capsys.readouterr().out)["rows"]
    assert dense["kl_max"] < 1e-9 and dense["agreement"] == 1 and sparse["mode"] == "forced" and sparse["n"] == 5
    assert 0 < sparse["kl_mean"] == sparse["mean"] < sparse["kl_p99"] <= sparse["kl_max"]
    assert sparse["low"] <= sparse["mean"] <= sparse["high"] and sparse["kl_p99_low"] <= sparse["kl_p99"]
    assert sparse["agreement_low"] <= sparse["agreement"] <= sparse["agreement_high"] <= 1
    assert sparse["diff_to_dense"] == pytest.approx(sparse["mean"]) and len(others) == 2
    assert all(set(sparse) - set(row) == {key for key in sparse if key.startswith(("kl_", "agree"))} for row in others)
    assert main(argv) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "same top token" in table and "nats a token" in "".join(table.replace("│", " ").split("  "))
    assert "lower is" in table and f"{sparse['kl_p99']:.3g}" in table
    assert main([*argv[:2], "kl(context=10000)", *argv[3:]]) == 2
    assert "exceed the model's 8192 positions" in capsys.readouterr().err


def note_of(shown: str, start: str) -> str:
    """The sentence of the notes under a table that begins like this, on one line; "" if there is none."""
    line = " ".join(shown.split())
    at = line.find(start)
    return "" if at < 0 else line[at : line.index(". ", at) + 1] if ". " in line[at:] else line[at:]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "low", "high"), [
    ("float32", 0, 1e-9), ("float16", 1e-9, 1e-3), ("bfloat16", 0, 1e-1),
])  # fmt: skip
def test_the_floor_of_the_number_format_stands_below_divergences(tmp_path, capsys, dtype, low, high):
    """It is the divergence of Dense() itself; without Dense() the note asks for it."""
    text = tmp_path / "words.txt"
    text.write_text(" ".join(f"the {i % 7} mill of the {i % 11} king" for i in range(400)))
    argv = ["eval", "--task", "kl(context=64, reference=6)", "--limit", "3", "--data", str(text), "--dtype", dtype,
            "--method", "SparQ(r=4, k=8)", "--out", str(tmp_path / "r.jsonl")]  # fmt: skip
    assert main([*argv, "--method", "Dense()", "--json"]) == 0
    floor = next(r["mean"] for r in json.loads(capsys.readouterr().out)["rows"] if r["method"] == "Dense()")
    assert low <= floor < high
    assert main([*argv, "--method", "Dense()"]) == 0
    assert note_of(capsys.readouterr().out, "Rounding alone") == (
        f"Rounding alone moves dense attention by {floor:.2g} nats a token in this number format: smaller divergences "
        "say nothing."
    )
    assert main(argv) == 0
    assert "Give --method 'Dense()' too: its divergence is what rounding alone does" in " ".join(
        capsys.readouterr().out.split()
    )


def test_topk_that_is_not_renormalised_says_so(tmp_path, capsys):
    note = "TopK(k) adds the k largest weights as they are, and does not renormalise them; with oracle=True it does."
    for method, said in (("TopK(k=8)", True), ("TopK(k=8, oracle=True)", False), ("SparQ(r=4, k=8)", False)):
        argv = ["eval", "--task", "record(lines=8, asked=1)", "--limit", "2", "--method", method]
        assert main([*argv, "--out", str(tmp_path / f"{method}.jsonl")]) == 0
        assert (note in " ".join(capsys.readouterr().out.split())) == said, method


def test_what_stands_where_no_time_is_given(tmp_path, capsys):
    """A run that counts has no times because it counts, and a run that adds nothing because it adds nothing."""
    argv = eval_argv(tmp_path / "counted.jsonl", "--count", limit=1)
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert "With --count no time is taken" in shown and "were there before" not in shown
    argv = eval_argv(tmp_path / "timed.jsonl", limit=1)
    assert main(argv) == 0 and "no time is" not in capsys.readouterr().out
    assert main(argv) == 0 and "the records were there before" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "layers"), [("gemma3", "1 of 2"), ("llama", None)])
def test_the_matched_sweep_says_of_which_layers_its_shares_are(name: str, layers: str | None):
    notes = cli_eval._matched_notes(family(name))
    assert len(notes) == (layers is not None)
    for note in notes:
        assert note.startswith(
            f"The sweep matches 1/2, 1/4 and 1/8 of the bytes that dense attention reads in the {layers}"
        )


def test_the_note_on_the_matched_sweep_is_printed_for_that_sweep_alone(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(cli_eval, "_matched_notes", lambda model: ["What is matched."])
    argv = [
        "eval",
        "--task",
        "record(lines=12)",
        "--limit",
        "1",
        "--out",
        str(tmp_path / "r.jsonl"),
        "--method",
        "Dense()",
    ]
    monkeypatch.setitem(sweeps.SWEEPS, "rivals", ("Dense()",))
    monkeypatch.setattr("skimkv.eval.plan.matched_to", lambda setup, job: ([skimkv.Dense()], []))
    assert main([*argv, "--sweep", "rivals"]) == 0 and "What is matched." not in capsys.readouterr().out
    assert main([*argv, "--sweep", "matched"]) == 0 and "What is matched." in capsys.readouterr().out
