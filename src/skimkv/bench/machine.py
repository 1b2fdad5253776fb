"""The machines that benchmarks run on: a clock, a memory, a bandwidth and a name, for a CPU and for a CUDA GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import platform
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..ops.cpu import library as native
from ..stores.base import Store

LEAST_FLUSH = 192 << 20  # bytes that are read, at least, to drive everything else out of a CPU's caches
CPUS = Path("/sys/devices/system/cpu")
COPY_BYTES = 1 << 30  # bytes of a buffer that is read or copied to measure a GPU's bandwidth
Call = Callable[[], Any]


def nothing() -> None:
    """Do nothing: the default of every callback of the benchmarks."""


class Machine(ABC):
    """What a benchmark needs to know of the machine it runs on, and how it takes times there.

    name: processor with the instruction set in use, or GPU and software, for people. device: where caches lie.
    threads: of a step; 0 on a GPU. peak: how the bandwidth is measured, "read" or "read or copy". cache_bytes: of the
    cache that several sets of key-value caches, taken in turn, must exceed; 0 where `between_calls` empties it instead.
    dense_dtypes: types in which PyTorch's dense attention is measured besides the cache's own. least_steps: steps that
    are timed together at least.
    """

    least_steps = 1

    name: str
    device: torch.device
    threads: int
    peak: str
    cache_bytes: int
    dense_dtypes: tuple[torch.dtype, ...]

    @abstractmethod
    def free_bytes(self) -> int:
        """Return how many bytes of memory can still be had for caches."""

    @abstractmethod
    def bandwidth_calls(self) -> dict[str, tuple[Call, int]]:
        """Return calls that do nothing but move memory, each with the bytes that it moves; the fastest counts."""

    def between_calls(self, refresh: Call = nothing) -> None:
        """Do what stands between two attention calls of a model, outside the clock.

        A model reads its weights then, which drives all else out of the caches, and `refresh` writes the query.
        """
        return None

    def capture(self, call: Call) -> Call:
        """Return what is timed instead of `call`, which has run before."""
        return call

    def footing(self, stores: Sequence[Store]) -> tuple[int, ...]:
        """Return numbers that change when a captured step of these stores is no longer valid."""
        return ()

    def undo(self, store: Store) -> Call:
        """Return a call that takes the store's numbers back to what they are now, so that a step can be taken again."""
        return partial(store.rewind, store.mark())

    def waiting_clock(self) -> Callable[[], float] | None:
        """Return a clock of the seconds that this process's threads have waited for a processor, all together.

        None where that does not matter, or where the system does not tell.
        """
        return None

    def wait(self) -> None:
        """Return when all work that was given to the device is done."""
        return None

    def seconds(self, call: Call) -> float:
        """Run the call and return how long the device worked on it."""
        return self.wall_seconds(call)

    def wall_seconds(self, call: Call) -> float:
        """Run the call and return how long its caller waited for the result."""
        self.wait()
        start = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - start


class Cpu(Machine):
    """The processor, with as many threads as PyTorch is set to when this is made."""

    peak = "read"
    cache_bytes = 0
    device = torch.device("cpu")
    dense_dtypes = (torch.bfloat16, torch.float32, torch.float16)  # the fastest of them is not always the cache's

    def __init__(self) -> None:
        self.threads = torch.get_num_threads()
        isa = native.isa() if ops.select_backend()[0] == "cpu" else None
        self.name = f"{_processor()}{f' with {isa}' if isa else ''}, {self.threads} thread{'s'[: self.threads - 1]}"

    @functools.cached_property
    def _buffer(self) -> Tensor:
        return torch.ones(flush_bytes() // 4)

    def free_bytes(self) -> int:
        """Return the system's estimate of the memory that programs can still take, or 2^62 where it gives none."""
        gc.collect()
        facts = Path("/proc/meminfo")
        lines = facts.read_text().splitlines() if facts.exists() else []
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 1 << 62)

    def seconds(self, call: Call) -> float:
        """Run the call and return how long it took; nothing else of Python is inside the time."""
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def bandwidth_calls(self) -> dict[str, tuple[Call, int]]:
        """Return reads of one buffer by several access patterns: 1 to 8 streams in each thread."""
        buffer = self._buffer
        return {f"read:{n} streams": (partial(read, buffer, n), buffer.nbytes) for n in (1, 2, 4, 8)}

    def between_calls(self, refresh: Call = nothing) -> None:
        """Read a buffer of twice the processor's last-level caches, then refresh the query."""
        read(self._buffer)
        refresh()

    def waiting_clock(self) -> Callable[[], float] | None:
        """Return a clock that adds up the waiting times in /proc/self/task/*/schedstat; None where there is no such."""
        return RunQueueClock() if Path("/proc/self/schedstat").exists() else None

    def best_bandwidth(self, times: int = 5) -> float:
        """Return the bytes per second that this processor reads, at best of several tries, in about half a second."""
        return max(moved / self.least_seconds(call, times) for call, moved in self.bandwidth_calls().values())

    def least_seconds(self, call: Call, times: int) -> float:
        """Return the least seconds of several calls, after one that does not count."""
        call()
        return min(self.seconds(call) for _ in range(times))


class RunQueueClock:
    """The seconds that the threads of a process have waited in the run queue, as Linux counts them.

    process: its id in /proc. Files stay open between two readings, which follow each other closely around a call that
    is timed.
    """

    def __init__(self, process: int | str = "self") -> None:
        self._tasks = f"/proc/{process}/task"
        self._files: dict[str, int] = {}
        self._nanoseconds: dict[str, int] = {}  # of every thread, also of those that have ended

    def __call__(self) -> float:
        """Return the seconds so far, of all threads that there are or were."""
        for thread in os.listdir(self._tasks):
            if thread not in self._files:
                with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
                    self._files[thread] = os.open(f"{self._tasks}/{thread}/schedstat", os.O_RDONLY)
        for thread, file in list(self._files.items()):
            try:  # the second of three numbers, after the time that the thread ran
                self._nanoseconds[thread] = int(os.pread(file, 100, 0).split()[1])
            except ProcessLookupError:
                os.close(self._files.pop(thread))
        return sum(self._nanoseconds.values()) / 1e9

    def __del__(self) -> None:
        for file in self._files.values():
            os.close(file)


class Cuda(Machine):
    """A CUDA GPU. Raises ValueError if PyTorch sees none, or if our kernels do not run there."""

    peak = "read or copy"
    threads = 0
    dense_dtypes = ()
    least_steps = 8  # so that the time between an event and the first kernel does not count

    def __init__(self, device: torch.device | str = "cuda") -> None:
        if not torch.cuda.is_available():
            raise ValueError(f"--device {device}: PyTorch sees no CUDA device here")
        name, why = ops.select_backend("cuda")
        if name != "gpu":
            raise ValueError(f"--device {device}: the backend there is {name} ({why})")
        index = torch.device(device).index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        facts = torch.cuda.get_device_properties(self.device)
        self.cache_bytes = facts.L2_cache_size
        self.name = f"{facts.name}, torch {torch.__version__}, CUDA {torch.version.cuda}"

    def free_bytes(self) -> int:
        """Return the GPU's free memory, after PyTorch has given back what it does not use."""
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0]) - 2 * COPY_BYTES

    def bandwidth_calls(self) -> dict[str, tuple[Call, int]]:
        """Return a copy of memory, which reads as many bytes as it writes, and two ways to read it only."""
        source, target = torch.ones(2, COPY_BYTES // 4, device=self.device)
        return {
            "copy": (partial(target.copy_, source), 2 * COPY_BYTES),
            "read: sum": (source.sum, COPY_BYTES),
            "read: product": (partial(torch.dot, source, target), 2 * COPY_BYTES),
        }

    def capture(self, call: Call) -> Call:
        """Return the replay of one CUDA graph with all kernels of the call."""
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def footing(self, stores: Sequence[Store]) -> tuple[int, ...]:
        """Return the addresses and sizes that captured kernels of these stores point to."""
        from ..ops.gpu import device

        return device.footing(stores)

    def undo(self, store: Store) -> Call:
        """Return a call that takes any store, and what the GPU knows of it, back to how they are now."""
        from ..ops.gpu import device

        return device.rewind(store)

    def wait(self) -> None:
        """Return when all work that was given to the GPU is done."""
        torch.cuda.synchronize(self.device)

    def seconds(self, call: Call) -> float:
        """Run the call and return the time from the start of its first kernel to the end of its last."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def flush_bytes(cpus: Path = CPUS) -> int:
    """Return the bytes of the buffer that is read between two calls: twice the last-level caches, and at least 192 MiB.

    A buffer that fits into the caches would drive nothing out of them, and the speed of reading it would be theirs.
    """
    return max(LEAST_FLUSH, 2 * last_level_cache(cpus))


def last_level_cache(cpus: Path = CPUS) -> int:
    """Return the bytes of all last-level caches of the processors that this process may use.

    Each is counted once, however many processors share it, and whole, though other machines on the same hardware may
    use a part of it. 0 where the system does not tell.
    """
    sizes: dict[str, tuple[int, int]] = {}  # by the processors that share the cache: its level and its bytes
    for cpu in sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ():
        found = []
        for index in (cpus / f"cpu{cpu}" / "cache").glob("index*"):
            with contextlib.suppress(OSError, ValueError):  # some kernels leave files out
                level, size, shared = (
                    (index / name).read_text().strip() for name in ("level", "size", "shared_cpu_list")
                )
                unit = {"K": 10, "M": 20, "G": 30}.get(size[-1], 0)
                found.append((int(level), int(size.rstrip("KMG")) << unit, shared))
        if found:
            level_, bytes_, shared = max(found)
            sizes[shared] = level_, bytes_
    last = max((level for level, _ in sizes.values()), default=0)
    return sum(bytes_ for level, bytes_ in sizes.values() if level == last)


def machine_for(device: torch.device) -> Machine:
    """Return the machine with this device. Raises ValueError unless it is a CPU or a CUDA GPU that can be measured."""
    if device.type == "cpu":
        return Cpu()
    if device.type != "cuda":
        raise ValueError(f"--device {device}: benchmarks run on cpu or cuda")
    return Cuda(device)


def read(buffer: Tensor, streams: int = 4) -> None:
    """Read every byte of a contiguous CPU buffer, in `streams` streams per thread; without our library, sum it up."""
    if ops.select_backend()[0] != "cpu":
        buffer.sum()
        return
    function = native.library().skimkv_read
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    function(buffer.data_ptr(), buffer.nbytes, streams, torch.get_num_threads(), native.thread_pool())


def peak_bandwidth(calls: Mapping[str, tuple[Call, int]], seconds: Mapping[str, list[float]]) -> float:
    """Return bytes per second of the fastest of `Machine.bandwidth_calls`, each by the median of its seconds."""
    return max(moved / statistics.median(seconds[name]) for name, (_, moved) in calls.items())


def _processor() -> str:
    """The processor's name, as far as the system tells it."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
