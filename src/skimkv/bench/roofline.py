"""`skimkv roofline`: how fast a decode step can be, and the share of its time that attention takes.

SparQ Attention (arXiv 2312.04985), section 2 and appendices C and D. A step is its products with the weights, then its
attention; each takes as long as the slower of its arithmetic and its transfers. Nothing else is counted, so that a
step is never faster than this.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from ..methods import Dense
from ..methods.base import Method
from ..stores.base import Shape
from .machine import Cpu
from .shapes import WEIGHT_BYTES, Hardware, ModelReads


class DecodeStep(NamedTuple):
    """One decode step of a batch, at best.

    seconds: of the whole step; attention: of its attention. intensity: multiply-adds per byte. memory_bound: memory is
    slower than arithmetic in both parts. held_bytes: all weights, also those that a step does not read, and cache.
    """

    method: str
    length: int
    seconds: float
    attention: float
    intensity: float
    memory_bound: bool
    held_bytes: int

    @property
    def share(self) -> float:
        """The share of the time that attention takes."""
        return self.attention / self.seconds


def decode_step(
    hardware: Hardware, model: ModelReads, method: Method, n: int, batch: int, weights: str | None, cache: torch.dtype
) -> DecodeStep:
    """Return the step after n tokens; every element of the cache that is read enters G multiply-adds (eq. C1).

    A sliding layer sees the current token as one of its window, so it reads one cached token less than that. Of a
    method whose bytes depend on the data, the closed form counts the most that are expected.
    weights: a key of WEIGHT_BYTES; None for a model that knows its weight_bytes. Arithmetic runs at the peak of 16-bit
    numbers, or of 32-bit ones where that is known and the cache has them.
    """
    shape = Shape(batch, model.H, model.G, model.D)
    held, read = min(n, model.window), min(n, max(model.window - 1, 0))
    full = model.layers - model.sliding
    by_method, in_window = method.traffic(n, shape, cache), Dense().traffic(read, shape, cache)
    cache_bytes = full * by_method.bytes + model.sliding * in_window.bytes
    cache_elements = full * by_method.elements + model.sliding * in_window.elements
    if weights is None:
        weight_bytes = float(model.weight_bytes or 0)
        held_weights = float(model.held_weight_bytes or weight_bytes)
    else:
        size = WEIGHT_BYTES[weights]
        weight_bytes, held_weights = model.weights * size, (model.held_weights or model.weights) * size
    products, sums = batch * model.weights, cache_elements * model.G
    rate = hardware.peak.get(cache.itemsize, hardware.peak[2])
    arithmetic = [products / rate, sums / rate]
    transfers = [weight_bytes / hardware.bandwidth, cache_bytes / hardware.bandwidth]
    seconds = [max(pair) for pair in zip(arithmetic, transfers, strict=True)]
    cache_size = full * method.bound(n, shape, cache) + model.sliding * Dense().bound(held, shape, cache)
    return DecodeStep(
        repr(method), n, sum(seconds), seconds[1], (products + sums) / (weight_bytes + cache_bytes),
        seconds == transfers, int(held_weights + cache_size),
    )  # fmt: skip


def crossing(hardware: Hardware, model: ModelReads, batch: int, weights: str | None, cache: torch.dtype) -> int | None:
    """Return the least power of two of tokens at which dense attention takes half of the step; None up to 2^24."""
    for power in range(25):
        if decode_step(hardware, model, Dense(), 1 << power, batch, weights, cache).share >= 0.5:
            return 1 << power
    return None


def _products_per_second(machine: Cpu, dtype: torch.dtype, times: int) -> float:
    """Return the multiply-adds per second of PyTorch's products of matrices, the largest that take no second in all."""
    for n in (256, 512, 1024):
        a = torch.ones(n, n, dtype=dtype)
        seconds = machine.least_seconds(partial(torch.mm, a, a), times)
        if seconds > 0.02:  # several sizes are as fast, where the processor has no instruction for the type
            break
    return n**3 / seconds


def measure_cpu(times: int = 5) -> Hardware:
    """Measure this machine's processor: the best read bandwidth and the best of PyTorch's products, in a second."""
    machine = Cpu()
    bandwidth = machine.best_bandwidth(times)
    peak = {dtype.itemsize: _products_per_second(machine, dtype, times) for dtype in (torch.float32, torch.bfloat16)}
    return Hardware(f"here: {machine.name}", bandwidth, {4: peak[4], 2: max(peak.values())}, None, "measured")
