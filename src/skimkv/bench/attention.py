"""`skimkv bench attention`: one decode step of attention, ours beside PyTorch's, against the memory's speed.

Every candidate is called in turn, round after round, and ratios are taken within a round: two blocks of runs a
second apart see different machines. Before each call a buffer larger than the caches is read, because in a model
the weights pass through them between two attention layers, and q and k are rotated, as a model does last.
"""

from __future__ import annotations

import ctypes
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import ops
from ..methods import Dense, parse
from ..methods.base import Method, Traffic
from ..ops.cpu import library as native
from ..stores.base import Shape, Store
from ..stores.full import Chunk, Full
from ..stores.slots import Slots

FLUSH = 192 << 20  # bytes read before a timed call
BLOCK = 4096  # tokens filled at once
Call = Callable[[], Any]


def read(buffer: Tensor, streams: int = 4) -> None:
    """Read every byte of a contiguous buffer, in `streams` runs per thread; the sum of PyTorch without the library."""
    if ops.chosen()[0] != "cpu":
        buffer.sum()
        return
    fn = native.library().skimkv_read
    fn.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    fn(buffer.data_ptr(), buffer.nbytes, streams, torch.get_num_threads(), native.parallel())


def machine() -> str:
    """The processor's name, as far as the system tells it, and the threads in use."""
    name, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((s.split(":")[1].strip() for s in lines if s.startswith("model name")), name)
    return f"{name}, {torch.get_num_threads()} threads"


def random_full(shape: Shape, dtype: torch.dtype, n: int, seed: int = 0, device: torch.device | str = "cpu") -> Full:
    """n tokens of standard normal keys and values."""
    store, draw = Full(shape, dtype, device), torch.Generator(device).manual_seed(seed)
    store._reserve(n + 1)
    for chunk in store.chunks:
        for t in (chunk.k, chunk.v):
            t.normal_(generator=draw)
    store.lengths = [n] * shape.B
    return store


def filled(method: Method, base: Full, n: int) -> Store:
    """The method's store after n tokens of `base`, whose K and V a Full store shares unless it codes them."""
    store = method.store(base.shape, base.dtype, base.device)
    if isinstance(store, Full) and not store.form.bits:
        for chunk in base.chunks:
            store._reserve(chunk.start + chunk.cap)
            mine = store.chunks[-1]
            store.chunks[-1] = Chunk(chunk.start, chunk.cap, chunk.k, chunk.v, mine.index, mine.scale)
        rows = slice(0, base.shape.B)
        for start in range(0, n, BLOCK) if store.channels != "none" else ():
            k = torch.cat([c.k[:, :, there] for c, there, _ in base._spans(start, min(start + BLOCK, n))], 2)
            x = k if store.projection is None else (k.float() @ store.projection).to(k.dtype)
            store._append_index(rows, start, x.transpose(-1, -2))
        if store.v_mean is not None:
            store.v_mean += torch.stack([c.v[:, :, : n - c.start].float().sum(2) for c in base.chunks]).sum(0) / n
        store.lengths = [n] * base.shape.B
    elif isinstance(store, Slots) and store.score is not None:
        # what it would have chosen does not matter to the clock: the first `budget` tokens, with random scores
        budget = min(method.budget(n), n)  # type: ignore[attr-defined]
        store.reserve(budget)
        store.k.copy_(store.form.encode(base.chunks[0].k[:, :, :budget]))
        store.v.copy_(store.form.encode(base.chunks[0].v[:, :, :budget]))
        assert store.score is not None
        assert store.pos is not None
        store.score.uniform_()
        store.pos.copy_(torch.arange(budget, dtype=torch.int32).expand_as(store.pos))
        store.filled, store.budget = [budget] * base.shape.B, [budget] * base.shape.B
        store.lengths = [n] * base.shape.B
    else:
        if isinstance(store, Full):
            store._reserve(n + 1)  # in one chunk, as those of `base`
        for start in range(0, n, BLOCK):
            spans = list(base._spans(start, min(start + BLOCK, n)))
            k, v = (torch.cat([getattr(c, name)[:, :, there] for c, there, _ in spans], 2) for name in "kv")
            store.append(k, v)
    return store


def torch_dense(base: Full, q: Tensor, n: int) -> dict[str, Call]:
    """PyTorch's own ways to the same result: every SDPA backend and plain products, in each float type."""
    calls: dict[str, Call] = {}
    B, H, G, D = base.shape
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        k, v = (torch.cat([getattr(c, name) for c in base.chunks], 2)[:, :, :n].to(dtype) for name in "kv")
        x = q.to(dtype)
        name = str(dtype).removeprefix("torch.")

        def matmul(x: Tensor = x, k: Tensor = k, v: Tensor = v) -> Tensor:
            weights = ((x * D**-0.5) @ k.transpose(-1, -2)).softmax(-1)
            y: Tensor = weights @ v
            return y

        calls[f"torch:matmul:{name}"] = matmul
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):

            def sdpa(b: SDPBackend = backend, x: Tensor = x, k: Tensor = k, v: Tensor = v) -> Tensor:
                with sdpa_kernel(b):
                    return F.scaled_dot_product_attention(x.reshape(B, H * G, 1, D), k, v, enable_gqa=G > 1)

            try:
                sdpa()
            except RuntimeError:
                continue  # no kernel for this type
            calls[f"torch:sdpa-{backend.name.split('_')[0].lower()}:{name}"] = sdpa
    return calls


@dataclass
class Rounds:
    """Seconds per candidate, one entry a round."""

    calls: dict[str, Call]
    after: dict[str, Call] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def run(
        self, rounds: int, flush: Tensor, tick: Callable[[], None] = lambda: None, last: Call = lambda: None
    ) -> None:
        """One warm-up, then `rounds` rounds over all candidates, each call behind a read of the flush buffer and
        `last`, what a model does between its weights and its attention."""
        self.seconds = {name: [] for name in self.calls}
        for i in range(rounds + 1):
            for name, call in self.calls.items():
                read(flush)
                last()
                start = time.perf_counter()
                call()
                took = time.perf_counter() - start
                if name in self.after:
                    self.after[name]()
                if i:
                    self.seconds[name].append(took)
            tick()

    def ms(self, name: str) -> float:
        return statistics.median(self.seconds[name]) * 1e3

    def ratio(self, slow: str, fast: str) -> float:
        """Median over rounds of seconds(slow) / seconds(fast)."""
        pairs = zip(self.seconds[slow], self.seconds[fast], strict=True)
        return statistics.median(a / b for a, b in pairs)


def rotate(x: Tensor, to: Tensor) -> None:
    """A rotary embedding of x (...,D), by an angle of one, into `to`."""
    half = x.shape[-1] // 2
    to.copy_(x * math.cos(1) + torch.cat([-x[..., half:], x[..., :half]], -1) * math.sin(1))


def peak_calls(buffer: Tensor) -> dict[str, Call]:
    """Reads of the whole buffer by several access patterns; the best of them is the machine's read bandwidth."""
    return {f"read:{streams}": partial(read, buffer, streams) for streams in (1, 2, 4, 8)}


def crossover(method: Method, shape: Shape, dtype: torch.dtype) -> int | None:
    """The smallest n at which the method moves fewer bytes than dense does: below it it cannot win."""

    def fewer(n: int) -> bool:
        return method.traffic(n, shape, dtype).bytes < Dense().traffic(n, shape, dtype).bytes

    return next((n for n in (int(2 ** (i / 8)) for i in range(168)) if fewer(n)), None)


def attention(
    shape: Shape,
    lengths: Sequence[int],
    methods: Sequence[str],
    dtype: torch.dtype = torch.bfloat16,
    rounds: int = 15,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The rows of the JSON contract, for every length and method; PyTorch's paths are rows too."""
    flush = torch.ones(FLUSH // 4)
    specs = [parse(m) for m in methods]
    specs = specs if Dense() in specs else [Dense(), *specs]
    rows, peaks = [], []
    for n in lengths:
        base, draw = random_full(shape, dtype, n), torch.Generator().manual_seed(1)
        B, H, G, D = shape
        q, still = (torch.randn(B, H, G, D, generator=draw).to(dtype) for _ in range(2))
        k, v = (torch.randn(B, H, D, generator=draw).to(dtype) for _ in "kv")
        calls = torch_dense(base, q, n)
        after, traffic = dict[str, Call](), dict[str, Traffic]()
        torch_names = list(calls)
        for method in specs:
            store, name = filled(method, base, n), repr(method)
            calls[name] = partial(method.decode, store, q, k, v, scale=D**-0.5)
            if isinstance(store, Full):
                after[name] = partial(store.crop, 1)
            traffic[name] = method.traffic(n, shape, dtype)
        calls |= peak_calls(flush)
        timed = Rounds(calls, after)
        timed.run(rounds, flush, tick, partial(rotate, still, q))
        peak = max(flush.nbytes / statistics.median(timed.seconds[name]) for name in calls if name.startswith("read:"))
        peaks.append(peak)
        best = min(torch_names, key=timed.ms)
        whole = Dense().traffic(n, shape, dtype).bytes
        for name in [*torch_names, *map(repr, specs)]:
            scale = (torch.float32.itemsize if name.endswith("float32") else 2) / dtype.itemsize
            moved = traffic[name].bytes if name in traffic else int(whole * scale)
            rows.append(
                {
                    "method": name,
                    "backend": ops.chosen()[0] if name in traffic else "torch",
                    "batch": B,
                    "heads": H * G,
                    "kv_heads": H,
                    "head_dim": D,
                    "length": n,
                    "dtype": str(dtype).removeprefix("torch."),
                    "threads": torch.get_num_threads(),
                    "ms": timed.ms(name),
                    "ms_min": min(timed.seconds[name]) * 1e3,
                    "ms_max": max(timed.seconds[name]) * 1e3,
                    "bytes_predicted": moved,
                    "gb_per_s": moved / timed.ms(name) / 1e6,
                    "share_of_peak": moved / timed.ms(name) * 1e3 / peak,
                    "speedup_dense": timed.ratio(repr(Dense()), name),
                    "speedup_torch": timed.ratio(best, name),
                    "speedup_theory": whole / moved,
                    "best_of_torch": name == best,
                }
            )
        del calls, timed, base
    cross = {repr(m): crossover(m, shape, dtype) for m in specs}
    return {"machine": machine(), "peak_gb_per_s": max(peaks) / 1e9, "rows": rows, "crossover": cross}
