"""skimkv bench: tables, JSON and figures of the three commands, on a CPU and on a stand-in for a GPU."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from skimkv.bench import attention as bench_attention
from skimkv.bench import machine as machines
from skimkv.bench import memory, rivals
from skimkv.cli.bench.table import STAGES
from skimkv.stores.base import Shape
from support.command_line import answer, assert_mistake, run
from support.gguf_files import tiny, write
from support.kernels import NATIVE
from support.rival_programs import write_program
from support.stand_in_machine import StandInGpu

ATTENTION = ["bench", "attention", "--heads", "2", "--head-dim", "32", "--rounds", "1"]
TOKEN = ["bench", "token", "--shape", "tiny", "--layers", "1", "--length", "300", "--rounds", "1"]
GENERATE = ["bench", "generate", "--shape", "tiny", "--layers", "1", "--length", "40+3", "--rounds", "1"]
MEMORY = ["bench", "memory", "--heads", "2", "--length", "1000", "--method", "Dense()"]
SPARQ = ["--method", "SparQ(r=8, k=32)"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machines, "flush_bytes", lambda: 1 << 20)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch):
    """Put a stand-in in the place of the GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machines, "Cuda", StandInGpu)
    monkeypatch.setattr(bench_attention, "PAPER_GRID", {"batch": (1, 2), "length": (300,), "r": (4,), "k": (8, 16)})


@pytest.mark.slow
@pytest.mark.parametrize(("args", "words", "keys"), [
    ([*ATTENTION, "--length", "300", *SPARQ], "PyTorch's best at 300 tokens", {"crossover", "faster_from", "skipped"}),
    ([*TOKEN, *SPARQ], "a whole token: tiny, 1 layer, int8 weights", {"peak_gb_per_s"}),
    (MEMORY, "memory of a layer: 2 KV heads of 64, bfloat16", set()),
    ([*GENERATE, *SPARQ], "a prompt and its answer: tiny, 1 layer, bfloat16 weights", {"waits_known"}),
])  # fmt: skip
def test_a_command_prints_a_table_or_json_and_draws(args, words, keys, tmp_path: Path, capsys, monkeypatch):
    def measured_here(command, **options):
        """What a process of its own would print, which test_memory.py starts."""
        spec, sizes, tokens, dtype = json.loads(command[-1])
        sizes = memory.measure(spec, Shape(*sizes), tokens, getattr(torch, dtype))
        return SimpleNamespace(returncode=0, stdout=json.dumps(sizes))

    monkeypatch.setattr(memory, "subprocess", SimpleNamespace(run=measured_here))
    figure = tmp_path / "figure.png"
    status, out, _ = run(capsys, *args)
    assert status == 0
    assert words in out and "Dense()" in out
    result = answer(capsys, *args, "--plot", str(figure))
    assert set(result) >= {"machine", "rows"} | keys
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_a_gguf_file_against_other_programs(tmp_path: Path, monkeypatch, capsys):
    for module in (rivals, machines):  # nobody waits for a processor
        monkeypatch.setattr(module, "RunQueueClock", lambda process="self": lambda: 5.0)
    model, figure = tmp_path / "tiny.gguf", tmp_path / "figure.png"
    write(model, tiny(num_key_value_heads=6))
    args = ["bench", "token", "--model", str(model), "--length", "300", "--rounds", "1", "--method", "SparQ(r=8, k=16)"]
    for kind in ("llama.cpp", "fork"):
        args += ["--against", f"{kind}={write_program(tmp_path / kind, model, kind)}"]
    status, out, _ = run(capsys, *args, "--plot", str(figure))
    text = " ".join(out.split())
    assert status == 0 and "a whole token: tiny.gguf, Q8_0 weights" in text
    assert "to llama.cpp's" in out and "fork's SparQ" in out
    assert "llama.cpp -fa 1 at 300 tokens took 159.0 ms: the other is better." in text
    assert "SparQ(r=8, k=16)" in text and "fork dense" in text
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert len(answer(capsys, *args)["rows"]) == 6


def test_a_gguf_file_alone_has_the_table_of_every_model(tmp_path: Path, capsys):
    model = tmp_path / "tiny.gguf"
    write(model, tiny())
    result = answer(capsys, "bench", "token", "--model", str(model), "--length", "300", "--rounds", "1", *SPARQ)
    assert [row["method"] for row in result["rows"]] == ["transformers", "Dense()", SPARQ[1]]
    assert {(row["shape"], row["weights"]) for row in result["rows"]} == {(str(model), "Q8_0")}


@pytest.mark.slow
@pytest.mark.parametrize("command", [
    ["token", "--length", "300"], ["generate", "--length", "30+3"],
])  # fmt: skip
def test_a_model_has_its_own_weights(command, capsys):
    """Its name is in the title; --weights is that of load, and without it the numbers are the checkpoint's."""
    args = ["bench", *command, "--model", "builtin", "--rounds", "1", *SPARQ]
    status, out, _ = run(capsys, *args)
    assert status == 0 and "builtin, 4 layers, float32 weights" in " ".join(out.split())
    rows = answer(capsys, *args, "--weights", "int4")["rows"]
    assert [row["method"] for row in rows] == ["transformers", "Dense()", SPARQ[1]]
    assert {(row["shape"], row["weights"], row["layers"]) for row in rows} == {("builtin", "int4", 4)}


@pytest.mark.skipif(not NATIVE, reason="the native library is not built")
def test_a_profile_shows_every_stage_per_head(capsys):
    args = [*ATTENTION, "--length", "300", "--profile", *SPARQ, "--method", "SubGenStream(delta=4.0, t=2, s=16)"]
    _, out, _ = run(capsys, *args)
    assert "microseconds of one thread per head and stage (1 threads for 2 heads)" in " ".join(out.split())
    rows = {row["method"]: row for row in answer(capsys, *args)["stages"]}
    dense, sparq, stream = (rows[name] for name in ("Dense()", SPARQ[1], "SubGenStream(delta=4.0, t=2, s=16)"))
    for row, stages in ((dense, {"attend", "append", "call"}), (sparq, set(STAGES))):
        timed = {stage for stage in STAGES if row[stage] > 0}
        assert "attend" in timed and timed <= stages and row["length"] == 300
    assert stream["call"] > 0 and all(stream[stage] is None for stage in STAGES if stage != "call")


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("args", [
    [*ATTENTION, "--length", "300", *SPARQ], [*ATTENTION, "--sweep", "paper"], [*TOKEN, *SPARQ, "--weights", "float32"],
])  # fmt: skip
def test_the_same_commands_on_a_gpu(args, tmp_path: Path, capsys):
    _, out, _ = run(capsys, *args, "--device", "cuda")
    assert "stand-in; copies" in " ".join(out.split())
    figure = tmp_path / "figure.png"
    result = answer(capsys, *args, "--device", "cuda", "--plot", str(figure))
    assert result["machine"] == "stand-in" and result["peak"] == "copy"
    assert figure.exists()


@pytest.mark.usefixtures("stand_in")
def test_what_does_not_fit_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(machines, "Cuda", lambda device: StandInGpu(free=1))
    mistake = run(capsys, *ATTENTION, "--length", "300", "--device", "cuda")
    assert_mistake(mistake, "nothing fits in memory: batch 1, 300 tokens: 0.0 GB of caches, 0.0 GB free")


def test_it_says_how_many_calls_count(monkeypatch, capsys):
    """The stand-in for the clock of waiting stands still, or moves by a second at every look, or is not there."""
    args = [*ATTENTION, "--length", "300", "--rounds", "4", *SPARQ]
    for ticks, words in (
        (itertools.repeat(5.0), "calls count: their threads waited less than 100 µs, or 1%, for a processor."),
        (itertools.count(1.0), "Dense() at 300 tokens: no call was undisturbed, and its times are those of all calls"),
        (None, "This system does not tell how long threads wait for a processor: all calls count."),
    ):
        clock = ticks and partial(next, ticks)
        monkeypatch.setattr(machines.Cpu, "waiting_clock", lambda self, clock=clock: clock)
        status, out, _ = run(capsys, *args)
        assert status == 0 and words in " ".join(out.split()), out
    for row in answer(capsys, *args)["rows"]:
        assert row["kept"] == row["calls"] == (1 if row["method"].startswith("torch:") else 4)


def test_threads_are_set(monkeypatch, capsys):
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    assert answer(capsys, *ATTENTION, "--length", "300", "--threads", "2", *SPARQ)["rows"]
    assert threads == [2]


@pytest.mark.parametrize("command", ["token", "generate"])
def test_a_gguf_file_excludes_what_it_has_itself(command, tmp_path: Path, capsys):
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"GGUF")
    args = ["bench", command, "--model", str(model)]
    for option in ("--shape=tiny", "--layers=2"):
        name = option.partition("=")[0]
        assert_mistake(run(capsys, *args, option), f"{name}: a GGUF file has its own; give either --model or {name}")
    mistake = run(capsys, *args, "--weights=int8")
    assert_mistake(mistake, f"--weights='int8': {model} has formats of its own; leave it out")
    assert_mistake(run(capsys, *args, "--device", "cuda"), "quantised weights run on a CPU only, not on --device cuda")
    assert_mistake(run(capsys, *args), f"{model}: truncated or damaged")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["attention", "token"])
def test_without_a_gpu_one_line_says_so(command, capsys):
    assert_mistake(run(capsys, "bench", command, "--device", "cuda"), "--device cuda: PyTorch sees no CUDA device here")
