"""`skimkv bench attention --device cuda`: one decode step of attention on a GPU, beside PyTorch's dense paths.

A candidate is a CUDA graph of its step on several caches in turn, so many that what it reads is more than the L2 holds;
its replay is timed between two events. Candidates take turns, round after round, and a copy of memory is one of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import ops
from ..methods import Dense, parse
from ..methods.base import Method, Traffic
from ..ops.gpu import device
from ..stores.base import Shape, Store
from ..stores.full import Full
from .attention import Call, Rounds, crossover, filled, random_full
from .cuda import Cuda

SETS = 64  # caches in turn, at most
BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
PAPER = {"batch": (1, 4, 16, 64), "length": (1024, 4096, 16384, 65536), "r": (16, 32, 64), "k": (64, 128, 256, 512)}


class Candidate:
    """One way to take a step, on every set in turn: (the step, what undoes it)."""

    def __init__(self, steps: Sequence[tuple[Call, Call]]) -> None:
        self.steps = steps

    def run(self) -> None:
        for step, _ in self.steps:
            step()

    def back(self) -> None:
        for _, undo in self.steps:
            undo()


def _nothing() -> None: ...


def torch_dense(base: Full, q: Tensor, n: int, spare: int) -> dict[str, Call]:
    """PyTorch's own ways, in the cache's type: every SDPA backend that takes it. Its plain products copy K and V for
    every query head: they are left out where the copies would take more than a quarter of the `spare` bytes."""
    calls: dict[str, Call] = {}
    (B, H, G, D), (chunk,) = base.shape, base.chunks
    x, k, v = q.reshape(B, H * G, 1, D), chunk.k[:, :, :n], chunk.v[:, :, :n]

    def sdpa(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(x, k, v, enable_gqa=G > 1)

    for name in BACKENDS if 8 * G * k.nbytes < spare else BACKENDS[:-1]:
        call = partial(sdpa, getattr(SDPBackend, name))
        try:
            call()
        except RuntimeError:  # no kernel for this type or shape, or no memory for it
            continue
        calls[f"torch:sdpa-{name.split('_')[0].lower()}:{str(base.dtype).removeprefix('torch.')}"] = call
    return calls


def _kind(method: Method, shape: Shape, dtype: torch.dtype) -> str:
    """Methods of one kind read the same store."""
    store = method.store(shape._replace(B=1), dtype)
    if isinstance(store, Full) and store.projection is None:
        return f"{store.channels} {store.v_mean is not None} {store.form.bits}"
    return repr(method)


def room(methods: Sequence[Method], shape: Shape, dtype: torch.dtype, n: int) -> int:
    """Bytes that one set needs: K and V once, and what each kind of store adds."""
    whole = Dense().bound(n, shape, dtype)
    kinds = {_kind(m, shape, dtype): m for m in methods}
    return whole + sum(
        m.bound(n, shape, dtype) - (whole if isinstance(m.store(shape._replace(B=1), dtype), Full) else 0)
        for m in kinds.values()
    )


def sets(methods: Sequence[Method], shape: Shape, dtype: torch.dtype, n: int, l2: int, free: int) -> int:
    """How many sets are taken in turn: four times the L2 is read. 0: not even one fits in `free` bytes."""
    least = min(m.traffic(n, shape, dtype).bytes for m in methods)
    fit = int(0.85 * free) // room(methods, shape, dtype, n)
    return max(0, min(fit, SETS, -(-4 * l2 // least)))


def attention(
    shape: Shape,
    lengths: Sequence[int],
    methods: Sequence[str],
    dtype: torch.dtype = torch.bfloat16,
    rounds: int = 15,
    tick: Call = lambda: None,
    machine: Any = None,
) -> dict[str, Any]:
    """The rows of the JSON contract; `skipped`: a line for each length that does not fit in memory."""
    machine = machine or Cuda()
    specs = list(dict.fromkeys([Dense(), *map(parse, methods)]))
    rows, peaks, skipped = list[dict[str, Any]](), [0.0], list[str]()
    for n in lengths:
        free, need = machine.free(), room(specs, shape, dtype, n)
        times = sets(specs, shape, dtype, n, machine.l2, free - 2 * machine.copy)
        if not times:
            skipped.append(f"batch {shape.B}, {n} tokens: {need / 1e9:.1f} GB of caches, {free / 1e9:.1f} GB free")
            continue
        timed = race(machine, candidates(machine, shape, n, specs, dtype, times), rounds, tick)
        traffic = {repr(m): m.traffic(n, shape, dtype) for m in specs}
        peak = 2 * machine.copy / timed.ms("copy") * 1e3
        peaks.append(peak)
        rows += _rows(timed, traffic, shape, n, dtype, peak, times)
    cross = {repr(m): crossover(m, shape, dtype) for m in specs}
    found = {"machine": machine.name, "peak_gb_per_s": max(peaks) / 1e9, "peak": "copy", "rows": rows}
    return {**found, "crossover": cross, "skipped": skipped}


def candidates(
    machine: Any, shape: Shape, n: int, specs: Sequence[Method], dtype: torch.dtype, times: int
) -> dict[str, Candidate]:
    """Every method after n tokens, PyTorch's dense paths, and a copy of memory."""
    place, (B, H, G, D) = machine.device, shape
    draw = torch.Generator(place).manual_seed(1)
    parts: dict[str, list[tuple[Call, Call]]] = {}
    spare = machine.free() // times - room(specs, shape, dtype, n)
    for i in range(times):
        base, held = random_full(shape, dtype, n, i, place), dict[str, tuple[Store, Callable[[], None]]]()
        q, k, v = (torch.randn(B, H, m, D, device=place, generator=draw).to(dtype) for m in (G, 1, 1))
        for name, call in torch_dense(base, q, n, spare).items():
            parts.setdefault(name, []).append((call, _nothing))
        for method in specs:
            kind = _kind(method, shape, dtype)
            if kind not in held:
                store = filled(method, base, n)
                held[kind] = store, device.rewind(store)
            store, back = held[kind]
            step = partial(method.decode, store, q, k[:, :, 0], v[:, :, 0], scale=D**-0.5)
            parts.setdefault(repr(method), []).append((step, back))
    source, target = torch.ones(2, machine.copy // 4, device=place)
    parts["copy"] = [(partial(target.copy_, source), _nothing)]
    return {name: Candidate(steps) for name, steps in parts.items() if len(steps) == times or name == "copy"}


def race(machine: Any, ones: Mapping[str, Candidate], rounds: int, tick: Call = lambda: None) -> Rounds:
    """Seconds of a step of each, round after round."""
    for one in [*ones.values()] * 2:  # all before the first capture: kernels are compiled, and the scratch is as large
        one.run()  # as the largest of them needs it
        one.back()
    runs, standing = dict[str, Call](), device.epoch()
    for name, one in ones.items():
        runs[name] = machine.capture(one.run)
        one.back()
    assert device.epoch() == standing
    found = Rounds(runs)
    found.seconds = {name: [] for name in runs}
    for i in range(rounds + 1):
        for name, one in ones.items():
            one.back()
            seconds = machine.seconds(runs[name]) / len(one.steps)
            if i:
                found.seconds[name].append(seconds)
        tick()
    for one in ones.values():
        one.back()
    return found


def _rows(
    timed: Rounds, traffic: dict[str, Traffic], shape: Shape, n: int, dtype: torch.dtype, peak: float, times: int
) -> list[dict[str, Any]]:
    """The rows of the JSON contract at one length."""
    B, H, G, D = shape
    dense = repr(Dense())
    theirs = [name for name in timed.calls if name.startswith("torch:")]
    best, whole = min([*theirs, dense], key=timed.ms), traffic[dense].bytes
    rows = []
    for name in [*theirs, *traffic]:
        ms, spread = timed.ms(name), timed.seconds[name]
        moved = traffic[name].bytes if name in traffic else whole
        rows.append(
            {
                "method": name, "backend": ops.chosen("cuda")[0] if name in traffic else "torch", "batch": B,
                "heads": H * G, "kv_heads": H, "head_dim": D, "length": n,
                "dtype": str(dtype).removeprefix("torch."), "threads": 0, "sets": times, "ms": ms,
                "ms_min": min(spread) * 1e3, "ms_max": max(spread) * 1e3, "bytes_predicted": moved,
                "gb_per_s": moved / ms / 1e6, "share_of_peak": moved / ms * 1e3 / peak,
                "speedup_dense": timed.ratio(dense, name), "speedup_best": timed.ratio(best, name),
                "speedup_torch": timed.ratio(min(theirs, key=timed.ms), name) if theirs else None,
                "speedup_theory": whole / moved, "best_of_torch": bool(theirs) and name == min(theirs, key=timed.ms),
            }
        )  # fmt: skip
    return rows


def sweep(
    shape: Shape, dtype: torch.dtype, rounds: int, tick: Call = lambda: None, machine: Any = None, **grid: Sequence[int]
) -> dict[str, Any]:
    """SparQ over the grid of the paper's GPU tables, or what is given of it: batch, length, r and k."""
    machine, points = machine or Cuda(), {**PAPER, **grid}
    methods = [f"SparQ(r={r}, k={k})" for r, k in itertools.product(points["r"], points["k"])]
    found: dict[str, Any] = {"rows": [], "skipped": []}
    for batch in points["batch"]:
        part = attention(shape._replace(B=batch), points["length"], methods, dtype, rounds, tick, machine)
        rows, skipped = found["rows"] + part["rows"], found["skipped"] + part["skipped"]
        peak = max(part["peak_gb_per_s"], found.get("peak_gb_per_s", 0))
        found = {**part, "rows": rows, "skipped": skipped, "peak_gb_per_s": peak}
    return found
