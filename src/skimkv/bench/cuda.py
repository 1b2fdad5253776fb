"""The GPU as the benchmarks see it: a clock, memory and a name. Tests put another in its place."""

from __future__ import annotations

import gc
import statistics
from functools import partial
from typing import Any

import torch

from .. import ops
from .attention import Call


class Cuda:
    """The machine: its clock, its memory and its name. Raises ValueError if there is none."""

    copy = 1 << 30  # bytes copied to measure the bandwidth, read once and written once

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ValueError("--device cuda: PyTorch sees no CUDA device")
        name, why = ops.chosen("cuda")
        if name != "gpu":
            raise ValueError(f"--device cuda: the backend there is {name} ({why})")
        self.device = torch.device("cuda", torch.cuda.current_device())
        facts = torch.cuda.get_device_properties(self.device)
        self.l2: int = facts.L2_cache_size
        self.name = f"{facts.name}, torch {torch.__version__}, CUDA {torch.version.cuda}"

    def free(self) -> int:
        """Bytes that can still be had."""
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def capture(self, call: Call) -> Call:
        """The kernels of call(), which has run before, as one graph."""
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def seconds(self, run: Call) -> float:
        """From the start of the first kernel to the end of the last."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def bandwidth(machine: Any) -> float:
    """Bytes a second of a copy, read and written."""
    source, target = torch.ones(2, machine.copy // 4, device=machine.device)
    took: list[float] = [machine.seconds(partial(target.copy_, source)) for _ in range(9)]
    return int(machine.copy) * 2 / statistics.median(took)
