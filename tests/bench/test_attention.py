"""`bench attention`: rows that keep the JSON contract, candidates that start from the same caches, and what fits."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

from skimkv import ops
from skimkv.bench import attention as bench
from skimkv.bench import machine as machines
from skimkv.bench.machine import Cpu, Cuda, nothing
from skimkv.bench.rounds import SELDOM
from skimkv.methods import Dense, parse
from skimkv.stores.base import Shape
from support.stand_in_machine import StandInGpu

ROW = {
    "method", "backend", "batch", "heads", "kv_heads", "head_dim", "length", "dtype", "threads", "sets", "ms", "ms_min",
    "ms_max", "bytes_predicted", "gb_per_s", "share_of_peak", "speedup_dense", "speedup_best", "speedup_torch",
    "speedup_theory", "best_of_torch", "kept", "calls",
}  # fmt: skip
METHODS = [
    "SparQ(r=8, k=32)", "SparQ(r=16, k=32)", "SparQ(r=8, k=32, channels='int8', mean_value=True)", "TopK(k=8)",
    "LowRank(r=8, k=16)", "H2O(k=64)", "LMInfinite(k=64)", "SubGen(k=48, recent=16)",
    "SubGenStream(delta=4.0, t=2, s=16)", "SparQ(r=8, k=32, channels='int4', mean_value=True)", "Skim(k=8)",
    "TopK(k=8, mean_value=True)", "Quest(page=16, k=32)", "Quest(page=8, k=32)", "SnapKV(k=64)", "TOVA(k=64)",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machines, "flush_bytes", lambda: 1 << 20)
    monkeypatch.setattr(bench, "SLOW", math.inf)  # all of PyTorch's paths are timed, however long they take


@pytest.mark.slow
@pytest.mark.parametrize("machine", [Cpu, StandInGpu])
def test_rows_keep_the_contract(machine):
    shape, dtype = Shape(2, 2, 2, 32), torch.bfloat16
    out = bench.attention(machine(), shape, [300, 600], METHODS, dtype, 2)
    assert set(out) == {"machine", "peak_gb_per_s", "peak", "rows", "crossover", "skipped", "waits_known"}
    assert out["skipped"] == [] and json.dumps(out)
    assert out["peak"] == ("read" if machine is Cpu else "copy")
    for n in (300, 600):
        rows = {row["method"]: row for row in out["rows"] if row["length"] == n}
        assert set(rows) >= {"Dense()", *(repr(parse(spec)) for spec in METHODS)}
        assert set(rows) >= {"torch:matmul:bfloat16", "torch:sdpa-math:bfloat16"}
        assert ("torch:matmul:float32" in rows) == (machine is Cpu)
        for name, row in rows.items():
            assert set(row) == ROW
            assert (row["sets"] > 1) == (machine is StandInGpu)
            assert (row["backend"] == "torch") == name.startswith("torch:")
            method = parse("Dense()" if name.startswith("torch:") else name)
            bytes_ = method.traffic(n, shape, dtype).bytes
            if method.store(shape, dtype).traffic_depends_on_data:
                assert 0 < row["bytes_predicted"] <= bytes_
            else:
                assert row["bytes_predicted"] == bytes_ * (2 if name.endswith("float32") else 1)
            assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
            assert 0 <= row["kept"] <= row["calls"] <= 2
        assert sum(row["best_of_torch"] for row in rows.values()) == 1
        assert min(row["speedup_best"] for row in rows.values()) <= 1


@torch.no_grad()
def test_bytes_that_depend_on_the_data_are_those_that_the_steps_read():
    shape, dtype, method = Shape(1, 2, 2, 32), torch.bfloat16, parse("Skim(k=8)")
    candidate = bench.candidates(Cpu(), shape, 600, [method], dtype, 2)[repr(method)]
    counted = []
    with ops.backend("ref"):
        for step in candidate:
            before = step.store.bytes
            step.run()
            counted.append(step.store.bytes - before)
            step.undo()
        of_steps = bench.step_bytes(candidate, method, shape, 600, dtype)
    assert len(counted) == 2
    assert of_steps == round(sum(counted) / 2)
    assert sum(counted) / 2 < method.traffic(600, shape, dtype).bytes


@pytest.mark.parametrize("machine", [Cpu, StandInGpu])
def test_pytorchs_paths_take_their_turn_in_some_rounds_only_on_a_cpu(machine):
    """They disturb the calls that follow them there; a GPU's graph takes no memory."""
    out = bench.attention(machine(), Shape(1, 1, 1, 16), [300], [], torch.float32, SELDOM + 2)
    calls = {(row["method"].split(":")[0], row["calls"]) for row in out["rows"]}
    assert calls == {("torch", 2 if machine is Cpu else SELDOM + 2), ("Dense()", SELDOM + 2)}


def test_slow_paths_of_pytorch_are_named_and_not_timed(monkeypatch):
    monkeypatch.setattr(bench, "SLOW", 2.0)
    seconds = {"torch:a": 1.0, "torch:b": 2.0, "torch:c": 2.1, "Dense()": 0.5, "SparQ(r=8, k=32)": 9.0}
    assert bench.slow_paths(seconds) == ["torch:c"]
    monkeypatch.setattr(bench, "slow_paths", lambda seconds: ["torch:matmul:float32"])
    out = bench.attention(Cpu(), Shape(1, 1, 1, 16), [300], [], torch.float32, 2)
    assert out["skipped"] == ["300 tokens: PyTorch's matmul:float32: over 2 times as long as its best path"]
    assert "torch:matmul:float32" not in {row["method"] for row in out["rows"]}


@pytest.mark.parametrize("machine", [Cpu, StandInGpu])
def test_every_step_starts_from_the_same_length(machine, monkeypatch):
    lengths, decode = [], Dense.decode

    def spy(self, store, *args, **kwargs):
        lengths.append(list(store.lengths))
        return decode(self, store, *args, **kwargs)

    monkeypatch.setattr(Dense, "decode", spy)
    bench.attention(machine(), Shape(1, 1, 1, 16), [300], [], torch.float32, 3)
    assert len(lengths) > 3
    assert all(cached == [300] for cached in lengths)


def test_steps_are_timed_as_a_model_takes_them_without_gradients(monkeypatch):
    recorded, decode = [], Dense.decode

    def spy(self, store, *args, **kwargs):
        recorded.append(torch.is_grad_enabled())
        return decode(self, store, *args, **kwargs)

    monkeypatch.setattr(Dense, "decode", spy)
    with torch.enable_grad():
        bench.attention(Cpu(), Shape(1, 1, 1, 16), [300], [], torch.float32, 2, profile=True)
    assert len(recorded) > 4 and not any(recorded)


def test_methods_of_one_kind_share_a_store_and_its_room():
    shape, dtype, n, machine = Shape(1, 2, 1, 64), torch.float16, 4096, StandInGpu()
    narrow, wide = parse("SparQ(r=8, k=32)"), parse("SparQ(r=32, k=64)")
    int8, quantised = parse("SparQ(r=8, k=32, channels='int8')"), parse("SparQ(r=8, k=32, kv='int8')")
    whole = Dense().bound(n, shape, dtype)

    def size(*methods, machine=machine):
        return bench.set_bytes(machine, [Dense(), *methods], shape, dtype, n)

    assert size() == whole
    assert size(narrow) == size(narrow, wide) == narrow.bound(n, shape, dtype)
    assert size(narrow, int8) == size(narrow) + int8.bound(n, shape, dtype) - whole
    assert size(narrow, quantised) == size(narrow) + quantised.bound(n, shape, dtype)
    assert size(machine=Cpu()) == whole + 2 * 2 * n * 64 * (2 + 4)  # K and V again, in bfloat16 and in float32


def test_sets_exceed_the_cache_and_fit_in_memory():
    shape, dtype, methods = Shape(1, 32, 1, 128), torch.float16, [Dense(), parse("SparQ(r=32, k=128)")]
    machine = StandInGpu()
    machine.cache_bytes = 50 << 20
    read = methods[1].traffic(4096, shape, dtype).bytes
    sets = bench.sets_in_turn(machine, methods, shape, dtype, 4096)
    assert sets * read >= 4 * machine.cache_bytes > (sets - 1) * read
    need = bench.set_bytes(machine, methods, shape, dtype, 4096)
    for free, fit in ((4 * need, 3), (need, 0)):
        machine.free = free
        assert bench.sets_in_turn(machine, methods, shape, dtype, 4096) == fit
    assert bench.sets_in_turn(Cpu(), methods, shape, dtype, 4096) == 1


def test_a_sweep_says_what_does_not_fit():
    grid = {"batch": (1, 2, 64), "length": (300, 600), "r": (4, 8), "k": (16, 32)}
    machine = StandInGpu(free=2 << 20)
    out = bench.sweep(machine, Shape(1, 1, 1, 32), torch.float16, 1, **grid)
    assert {(row["batch"], row["length"]) for row in out["rows"]} == {(1, 300), (1, 600), (2, 300), (2, 600)}
    assert len({row["method"] for row in out["rows"] if row["backend"] != "torch"}) == 5
    assert len(out["skipped"]) == 2
    assert all(re.match(r"batch 64, [36]00 tokens: \d+\.\d GB of caches, \d+\.\d GB free", s) for s in out["skipped"])


def test_crossover_is_where_the_bytes_cross():
    shape, dtype = Shape(1, 2, 1, 64), torch.bfloat16
    method = parse("SparQ(r=16, k=64)")
    n = bench.crossover(method, shape, dtype)
    fewer = [method.traffic(m, shape, dtype).bytes < Dense().traffic(m, shape, dtype).bytes for m in (n, n // 2)]
    assert fewer == [True, False]


def test_a_method_is_faster_from_the_length_after_which_it_never_is_slower():
    speeds = {"A": (2, 0.5, 2, 3), "B": (2, 2, 2, 2), "C": (2, 2, 2, 1)}
    rows = [{"method": m, "backend": "cpu", "length": n, "speedup_dense": x}
            for m, all_ in speeds.items() for n, x in zip((1, 2, 4, 8), all_, strict=True)]  # fmt: skip
    assert bench.faster_from(rows) == {"A": 4, "B": 1, "C": None}


def test_rotate_turns_pairs_of_channels():
    x, to = torch.randn(2, 3, 8), torch.empty(2, 3, 8)
    bench.rotate(x, to)
    turn = torch.polar(torch.ones(()), torch.ones(()))
    turned = torch.complex(x[..., :4], x[..., 4:]) * turn
    torch.testing.assert_close(to, torch.cat([turned.real, turned.imag], -1))


@pytest.mark.gpu
def test_on_a_gpu():
    with ops.backend("gpu"):
        methods = ["SparQ(r=32, k=128)", "H2O(k=256)"]
        out = bench.attention(Cuda(), Shape(1, 8, 1, 128), [2048], methods, torch.float16, 3)
    assert {row["method"] for row in out["rows"]} >= {"Dense()", "SparQ(r=32, k=128)", "H2O(k=256)"}


@pytest.mark.parametrize("sets", [1, 3])
def test_a_step_that_is_timed_several_times_at_once_counts_once(sets):
    """On a machine that times at least eight steps together, on one set of caches or on several."""
    steps = [0]

    class Counter(StandInGpu):
        """A machine on which every step takes a second."""

        least_steps = 8

        def seconds(self, call):
            before = steps[0]
            call()
            return float(steps[0] - before) or 1.0  # of a copy of memory

    def step():
        steps[0] += 1

    candidate = bench.Candidate([bench.Step(step, nothing)] * sets)
    timings, _ = bench.race(Counter(), {"Dense()": candidate}, 3)
    assert timings.ms("Dense()") == 1e3
