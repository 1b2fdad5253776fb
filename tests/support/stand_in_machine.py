"""A machine for tests of the benchmarks: it plans as a GPU does, and computes on the CPU."""

from __future__ import annotations

import time
from typing import Any

import torch

from skimkv.bench.machine import Call, Machine

COPY = 1 << 16  # bytes


class StandInGpu(Machine):
    """A GPU with a small L2 cache and as much free memory as the test says; a captured call is the call itself."""

    device = torch.device("cpu")
    name = "stand-in"
    peak = "copy"
    threads = 0
    cache_bytes = 1 << 15
    dense_dtypes = ()

    def __init__(self, device: Any = None, free: int = 1 << 40) -> None:
        self.free = free

    def free_bytes(self) -> int:
        """Return what the test said."""
        return self.free

    def bandwidth_calls(self) -> dict[str, tuple[Call, int]]:
        """Return a small copy."""
        source, target = torch.ones(2, COPY // 4)
        return {"copy": (lambda: target.copy_(source), 2 * COPY)}

    def capture(self, call: Call) -> Call:
        """Run the call once, as a capture does on the host."""
        call()
        return call

    def seconds(self, call: Call) -> float:
        """Run the call and return its seconds."""
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
