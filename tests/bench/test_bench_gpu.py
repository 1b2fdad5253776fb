"""What a benchmark on a GPU plans, counts and refuses; the machine is a stand-in, and no time is asserted."""

from __future__ import annotations

import json
import re
import time

import pytest
import torch
from typer.testing import CliRunner

from bench.test_attention import ROW, TOKEN
from skimkv import ops
from skimkv.bench import attention_gpu as bench_gpu
from skimkv.bench import cuda as bench_cuda
from skimkv.bench import figures_gpu as plots_gpu
from skimkv.bench import token_gpu as bench_gpu_token
from skimkv.bench.attention_gpu import room, sets
from skimkv.cli.app import app
from skimkv.methods import Dense, parse
from skimkv.stores.base import Shape


class Stand:
    """A GPU that is none: a captured call is the call."""

    def __init__(self, free=1 << 40):
        self.device, self.name, self.memory, self.l2, self.copy = (
            torch.device("cpu"),
            "stand-in",
            free,
            1 << 15,
            1 << 16,
        )

    def free(self):
        return self.memory

    def capture(self, call):
        call()
        return call

    def wait(self): ...

    def seconds(self, run):
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


@pytest.fixture(autouse=True)
def _reference():
    with ops.backend("ref"):
        yield


def test_attention_keeps_the_contract_and_takes_stores_back():
    shape, machine = Shape(2, 2, 2, 32), Stand()
    methods = ["SparQ(r=8, k=32)", "SparQ(r=16, k=32)", "SparQ(r=8, k=32, channels='int8')", "H2O(k=64)", "TopK(k=8)"]
    methods += ["LMInfinite(k=64)", "SubGenStream(delta=4.0, t=2, s=16)", "LowRank(r=8, k=16)"]
    out = bench_gpu.attention(shape, [300, 600], methods, torch.bfloat16, 2, machine=machine)
    assert out["machine"] == "stand-in" and out["peak"] == "copy" and out["skipped"] == []
    assert all(set(row) >= ROW and row["sets"] > 1 for row in out["rows"])
    for n in (300, 600):
        rows = {row["method"]: row for row in out["rows"] if row["length"] == n}
        assert set(rows) >= {"Dense()", "torch:sdpa-math:bfloat16", *(repr(parse(m)) for m in methods)}
        for name, row in rows.items():
            spec = "Dense()" if name.startswith("torch:") else name
            assert row["bytes_predicted"] == parse(spec).traffic(n, shape, torch.bfloat16).bytes
            assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
        assert sum(row["best_of_torch"] for row in rows.values()) == 1
        assert min(row["speedup_best"] for row in rows.values()) <= 1


def test_every_step_starts_from_the_same_length(monkeypatch):
    seen = []
    real = ops.dense
    monkeypatch.setattr(ops, "dense", lambda store, *args: seen.append(list(store.lengths)) or real(store, *args))
    bench_gpu.attention(Shape(1, 1, 1, 16), [300], [], torch.float32, 3, machine=Stand())
    assert len(seen) > 3 and all(lengths == [300] for lengths in seen)


def test_methods_of_one_kind_share_a_store_and_its_room():
    shape, dtype, n = Shape(1, 2, 1, 64), torch.float16, 4096
    one, two, other = (parse(m) for m in ("SparQ(r=8, k=32)", "SparQ(r=32, k=64)", "SparQ(r=8, k=32, channels='int8')"))
    dense = Dense().bound(n, shape, dtype)
    assert (
        room([Dense(), one, two], shape, dtype, n)
        == room([Dense(), one], shape, dtype, n)
        == one.bound(n, shape, dtype)
    )
    assert room([Dense(), one, other], shape, dtype, n) > one.bound(n, shape, dtype) > dense


def test_sets_exceed_the_l2_and_fit_in_memory():
    shape, dtype, methods = Shape(1, 32, 1, 128), torch.float16, [Dense(), parse("SparQ(r=32, k=128)")]
    read, need = (methods[1].traffic(4096, shape, dtype).bytes, room(methods, shape, dtype, 4096))
    assert (sets(methods, shape, dtype, 4096, 50 << 20, 1 << 40) - 1) * read < 4 * (50 << 20)
    assert sets(methods, shape, dtype, 4096, 50 << 20, 1 << 40) * read >= 4 * (50 << 20)
    assert sets(methods, shape, dtype, 4096, 50 << 20, 4 * need) == 3
    assert sets(methods, shape, dtype, 4096, 50 << 20, need) == 0


def test_a_sweep_says_what_does_not_fit_and_is_drawn(tmp_path):
    grid = {"batch": (1, 2, 64), "length": (300, 600), "r": (4, 8), "k": (16, 32)}
    shape, machine = Shape(1, 1, 1, 32), Stand(2 << 20)
    out = bench_gpu.sweep(shape, torch.float16, 1, machine=machine, **grid)
    assert {(row["batch"], row["length"]) for row in out["rows"]} == {(1, 300), (1, 600), (2, 300), (2, 600)}
    assert len({row["method"] for row in out["rows"] if row["backend"] != "torch"}) == 5
    assert len(out["skipped"]) == 2
    assert all(re.match(r"batch 64, [36]00 tokens: \d+\.\d GB of caches, \d+\.\d GB free", s) for s in out["skipped"])
    plots_gpu.sweep(out["rows"], tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
    json.dumps(out)


@pytest.mark.parametrize("compile", [False, True])
def test_a_whole_token(compile, monkeypatch):
    monkeypatch.setattr(bench_gpu_token, "BACKEND", "eager")
    methods = ["Dense()", "SparQ(r=8, k=32)"]
    out = bench_gpu_token.token("tiny", 2, "float32", [300, 600], methods, 2, machine=Stand(), compile=compile)
    names = ["transformers", "Dense()", "SparQ(r=8, k=32)"]
    assert [(row["method"], row["length"]) for row in out["rows"]] == [(m, n) for n in (300, 600) for m in names]
    for row in out["rows"]:
        assert set(row) >= TOKEN and row["compiled"] is (compile and row["method"] != "transformers")
        assert row["ms"] == pytest.approx(row["ms_attention"] + row["ms_weights"])
        if row["method"] != "transformers":
            closed = parse(row["method"]).traffic(
                row["length"] + bench_gpu_token.WARM + 1, Shape(1, 2, 2, 64), torch.float32
            )
            assert row["cache_bytes"] == 2 * closed.bytes
            assert row["speedup_allowed"] >= 1 or row["method"] != "Dense()"


def test_the_commands_print_cards_and_json(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_cuda, "Cuda", Stand)
    monkeypatch.setattr(bench_gpu, "PAPER", {"batch": (1, 2), "length": (300,), "r": (4,), "k": (8, 16)})
    small, figure = ["--heads", "2", "--head-dim", "32", "--rounds", "1", "--device", "cuda"], str(tmp_path / "f.png")
    calls = [
        ["attention", *small, "--length", "300", "--method", "SparQ(r=8, k=32)", "--plot", figure],
        ["attention", *small, "--sweep", "paper", "--plot", figure],
        ["token", *small[4:], "--shape", "tiny", "--weights", "float32", "--layers", "1", "--length", "300"],
    ]
    for args in calls:
        card = CliRunner().invoke(app, ["bench", *args], catch_exceptions=False).stdout
        assert "stand-in; copies" in " ".join(card.split()), card
        out = CliRunner().invoke(app, ["bench", *args, "--json"], catch_exceptions=False).stdout
        assert json.loads(out.splitlines()[-1])["machine"] == "stand-in"
    assert (tmp_path / "f.png").exists()
    monkeypatch.setattr(bench_cuda, "Cuda", lambda: Stand(1))
    with pytest.raises(ValueError, match=r"nothing fits in the GPU's memory: batch 1, 300 tokens: 0.0 GB of caches"):
        CliRunner().invoke(app, ["bench", *calls[0]], catch_exceptions=False)


def test_a_token_that_does_not_fit_and_one_of_8_bits():
    with pytest.raises(ValueError, match=r"Dense\(\) after 600 tokens: .* GB of caches, 0.0 GB free"):
        bench_gpu_token.token("tiny", 2, "float32", [600], ["Dense()"], 2, machine=Stand(1 << 20))
    with pytest.raises(ValueError, match="--weights int8: there is no GPU kernel for them; bfloat16 or float32"):
        bench_gpu_token.token("tiny", 2, "int8", [600], ["Dense()"], 2, machine=Stand())


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["attention", "--device", "tpu"], "--device tpu: it must be cpu or cuda"),
        (["attention", "--sweep", "paper"], "--sweep paper: only paper is known, with --device cuda"),
        (["attention", "--sweep", "all", "--device", "cuda"], "--sweep all: only paper is known"),
        (["token", "--device", "tpu"], "--device tpu: it must be cpu or cuda"),
        (["token", "--compile"], "--compile: it is measured with --device cuda only"),
    ],
)
def test_bad_input_is_one_line(args, says):
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        CliRunner().invoke(app, ["bench", *args], catch_exceptions=False)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["attention", "token"])
def test_without_a_gpu_one_line_says_so(command):
    with pytest.raises(ValueError, match=r"^--device cuda: PyTorch sees no CUDA device$"):
        CliRunner().invoke(app, ["bench", command, "--device", "cuda"], catch_exceptions=False)


@pytest.mark.gpu
def test_on_a_gpu():
    with ops.backend("gpu"):
        out = bench_gpu.attention(Shape(1, 8, 1, 128), [2048], ["SparQ(r=32, k=128)", "H2O(k=256)"], torch.float16, 3)
    assert {row["method"] for row in out["rows"]} >= {"Dense()", "SparQ(r=32, k=128)", "H2O(k=256)"}
