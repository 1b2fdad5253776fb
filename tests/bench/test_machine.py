"""Machines: what a CPU tells of itself, how a step is undone, and the refusal where there is no GPU."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from skimkv import ops
from skimkv.bench import machine as machines
from skimkv.bench.caches import filled_store, random_store
from skimkv.bench.machine import Cpu, Cuda, machine_for, peak_bandwidth
from skimkv.methods import parse
from skimkv.stores.base import Shape
from skimkv.stores.full import Full
from support.kernels import ISAS, ISAS_AND_REFERENCE, on


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machines, "flush_bytes", lambda: 1 << 20)


def test_a_cpu_names_itself_and_its_threads():
    machine = machine_for(torch.device("cpu"))
    assert isinstance(machine, Cpu)
    assert machine.name.endswith(", 1 thread") and machine.threads == 1
    assert machine.free_bytes() > 1 << 20
    assert machine.capture(print) is print


@pytest.mark.parametrize("isa", ISAS_AND_REFERENCE)
def test_a_cpu_names_the_instruction_set_in_use(isa):
    with on(isa):
        assert (f" with {isa}, " in Cpu().name) if isa in ISAS else (" with " not in Cpu().name)


@pytest.mark.usefixtures("backend")
def test_bandwidth_calls_read_the_buffer():
    for call, moved in Cpu().bandwidth_calls().values():
        call()
        assert moved == 1 << 20


def write_cache(cpus: Path, cpu: int, index: int, level: int, size: str, shared: str) -> None:
    folder = cpus / f"cpu{cpu}" / "cache" / f"index{index}"
    folder.mkdir(parents=True)
    for name, text in {"level": str(level), "size": size, "shared_cpu_list": shared}.items():
        (folder / name).write_text(f"{text}\n")


def test_the_buffer_is_twice_the_last_level_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Three processors on two caches of 240 MB: a cache counts once, the smaller ones and other processors do not."""
    monkeypatch.undo()
    monkeypatch.setattr(machines.os, "sched_getaffinity", lambda process: {0, 1, 4}, raising=False)
    assert (machines.last_level_cache(tmp_path), machines.flush_bytes(tmp_path)) == (0, 192 << 20)
    for cpu, shared in ((0, "0-3"), (1, "0-3"), (4, "4-7"), (8, "8-11")):
        write_cache(tmp_path, cpu, 0, 2, "2048K", str(cpu))
        write_cache(tmp_path, cpu, 1, 3, "245760K", shared)
    (tmp_path / "cpu0" / "cache" / "index2").mkdir()  # of which the system tells nothing
    assert machines.last_level_cache(tmp_path) == 480 << 20
    assert machines.flush_bytes(tmp_path) == 960 << 20


def test_the_query_is_refreshed_between_calls():
    log: list[int] = []
    Cpu().between_calls(lambda: log.append(1))
    assert log == [1]


def test_the_peak_is_that_of_the_fastest_pattern():
    calls = {"slow": (print, 100), "fast": (print, 300)}
    assert peak_bandwidth(calls, {"slow": [1.0, 1.0, 9.0], "fast": [1.0, 2.0, 2.0]}) == 150


@pytest.mark.parametrize("spec", ["Dense()", "SparQ(r=8, k=32, channels='int8')", "H2O(k=64)", "LMInfinite(k=64)"])
def test_a_step_is_undone(spec):
    method, shape = parse(spec), Shape(1, 2, 2, 32)
    store = filled_store(method, random_store(shape, torch.float32, 300))
    undo, size = Cpu().undo(store), store.nbytes
    token = torch.randn(1, 2, 2, 32), torch.randn(1, 2, 32), torch.randn(1, 2, 32)
    first = method.decode(store, *token, scale=0.2)
    assert store.lengths == [301]
    undo()
    assert (store.lengths, store.nbytes) == ([300], size)
    undo()  # a second time changes nothing
    assert store.lengths == [300]
    if isinstance(store, Full):
        torch.testing.assert_close(method.decode(store, *token, scale=0.2), first)


def test_without_schedstat_waiting_is_not_known(monkeypatch):
    monkeypatch.setattr(machines.Path, "exists", lambda path: False)
    assert Cpu().waiting_clock() is None


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system has no schedstat")
def test_the_clock_of_waiting_knows_threads_that_come_and_go(tmp_path: Path):
    clock = Cpu().waiting_clock()
    before = clock()
    assert clock() >= before > 0
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait)
    thread.start()
    inside = clock()
    assert str(thread.native_id) in clock._files
    leave.set()
    thread.join()
    while Path(f"/proc/self/task/{thread.native_id}").exists():
        time.sleep(0.001)
    assert clock() >= inside >= before and str(thread.native_id) not in clock._files


def test_a_gpu_without_our_kernels_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with ops.backend("ref"), pytest.raises(ValueError, match=r"the backend there is ref \(forced by backend\(\)\)"):
        Cuda()
