"""`skimkv bench attention`: one decode step of one attention layer, ours beside PyTorch's, against the memory's speed.

In a model the weights pass through the processor's caches between two attention calls. On a CPU a buffer larger than
these caches is read before each call, whichever candidate it is of, and the query is rotated, as a model does last: no
call finds anything of its own in the caches, and the candidates come in another order in every round. No gradients are
recorded, as in `generate()`: a step that might have to record some takes a longer way through Python. On a GPU a
candidate is a CUDA graph of its step on several sets of key-value caches in turn, so many that what it reads is more
than the L2 holds.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..methods import Dense, parse
from ..methods.base import Method
from ..ops.cpu.memory import StoreMemory
from ..ops.cpu.run import STAGES, stage_times
from ..stores.base import Shape, Store
from ..stores.full import Full
from . import onnx_baseline
from .caches import filled_store, keys_values, random_store
from .machine import Call, Machine, nothing, peak_bandwidth
from .rounds import Timings, is_delayed, take_turns
from .torch_baseline import dense_calls, dtype_of

SLOW = 2.0  # times as long as PyTorch's fastest path; one of its paths that takes longer is not timed
MOST_SETS = 64  # of caches that are taken in turn
PAPER_GRID = {
    "batch": (1, 4, 16, 64), "length": (1024, 4096, 16384, 65536), "r": (16, 32, 64), "k": (64, 128, 256, 512),
}  # fmt: skip


class Step(NamedTuple):
    """A decode step on one set of caches, its store, what takes the store back, and what writes the query anew."""

    run: Call
    refresh: Call
    store: Store | None = None  # None: a dense path of PyTorch's, which changes nothing
    undo: Call = nothing


class Candidate(list[Step]):
    """One way to decode: its step on every set in turn."""

    def run(self) -> None:
        """Take the step on every set."""
        for step in self:
            step.run()

    def undo(self) -> None:
        """Take every store back to its length before the step."""
        for step in self:
            step.undo()

    def refresh(self) -> None:
        """Write every query anew."""
        for step in self:
            step.refresh()


@torch.no_grad()
def attention(
    machine: Machine,
    shape: Shape,
    lengths: Sequence[int],
    methods: Sequence[str],
    dtype: torch.dtype = torch.bfloat16,
    rounds: int = 15,
    tick: Call = nothing,
    profile: bool = False,
    against: str | None = None,
) -> dict[str, Any]:
    """Return the rows of the JSON contract for every length and method; PyTorch's dense paths are rows too.

    `skipped` has a line for each length whose caches do not fit in memory, and for each length at which paths of
    PyTorch's were too slow to be timed. kept: the calls of a row that count, which
    are those that other processes did not delay (`rounds.is_delayed`); if all were delayed, all count and kept is 0.
    calls: how many were timed: PyTorch's paths are called in some rounds only on a CPU.
    waits_known: whether the system tells how long threads waited. profile: `stages` has a row for each method, as
    `stage_row` gives it. against: "onnxruntime" adds rows of its dense attention, by the type of its cache; on a CPU.
    """
    specs = list(dict.fromkeys([Dense(), *map(parse, methods)]))
    rows, peaks, skipped, stages = list[dict[str, Any]](), [0.0], list[str](), list[dict[str, Any]]()
    onnx = against == "onnxruntime"
    for n in lengths:
        sets = sets_in_turn(machine, specs, shape, dtype, n, onnx)
        if not sets:
            need, free = set_bytes(machine, specs, shape, dtype, n, onnx) / 1e9, machine.free_bytes() / 1e9
            skipped.append(f"batch {shape.B}, {n} tokens: {need:.1f} GB of caches, {free:.1f} GB free")
            continue
        contenders = candidates(machine, shape, n, specs, dtype, sets, onnx)
        timings, peak = race(machine, contenders, rounds, tick)
        if slow := [name.removeprefix("torch:") for name in contenders if name not in timings.seconds]:
            skipped.append(f"{n} tokens: PyTorch's {', '.join(slow)}: over {SLOW:g} times as long as its best path")
        for method in specs if profile else ():
            stages.append({**stage_row(machine, contenders[repr(method)], shape, rounds, tick), "length": n})
            stages[-1]["method"] = repr(method)
        peaks.append(peak)
        moved = {repr(method): step_bytes(contenders[repr(method)], method, shape, n, dtype) for method in specs}
        rows += _rows(machine, timings, moved, specs, shape, n, dtype, peak, sets)
    crossings = {repr(method): crossover(method, shape, dtype) for method in specs}
    return {
        "machine": machine.name, "peak_gb_per_s": max(peaks) / 1e9, "peak": machine.peak, "rows": rows,
        "crossover": crossings, "skipped": skipped, "waits_known": machine.waiting_clock() is not None,
        **({"stages": stages} if profile else {}),
    }  # fmt: skip


def sweep(
    machine: Machine, shape: Shape, dtype: torch.dtype, rounds: int, tick: Call = nothing, **grid: Sequence[int]
) -> dict[str, Any]:
    """Time SparQ over the grid of the paper's GPU tables, or over what is given instead: batch, length, r and k."""
    points = {**PAPER_GRID, **grid}
    methods = [f"SparQ(r={r}, k={k})" for r, k in itertools.product(points["r"], points["k"])]
    parts = [
        attention(machine, shape._replace(B=batch), points["length"], methods, dtype, rounds, tick)
        for batch in points["batch"]
    ]
    joined = {name: [item for part in parts for item in part[name]] for name in ("rows", "skipped")}
    return {**parts[-1], **joined, "peak_gb_per_s": max(part["peak_gb_per_s"] for part in parts)}


def store_kind(method: Method, shape: Shape, dtype: torch.dtype) -> str:
    """Return a name that methods share when they read the same store, which is then made only once."""
    store = method.store(shape._replace(B=1), dtype)
    if isinstance(store, Full) and store.projection is None:
        page = None if store.pages is None else store.pages.page
        return f"{store.channels} {store.v_mean is not None} {store.group_means} {page} {method.kv}"
    return repr(method)


def _shares_rows(method: Method, shape: Shape, dtype: torch.dtype) -> bool:
    """Whether the method's store shares K and V with the others of its set."""
    return method.kv is None and isinstance(method.store(shape._replace(B=1), dtype), Full)


def set_bytes(
    machine: Machine, methods: Sequence[Method], shape: Shape, dtype: torch.dtype, n: int, onnx: bool = False
) -> int:
    """Return the bytes of one set: K and V once, what each kind of store adds, and other formats of K and V.

    onnx: with those of ONNX Runtime.
    """
    (B, H, _, D), whole = shape, Dense().bound(n, shape, dtype)
    kinds = {store_kind(method, shape, dtype): method for method in methods}
    shared = {kind for kind, method in kinds.items() if _shares_rows(method, shape, dtype)}
    stores = sum(method.bound(n, shape, dtype) - whole * (kind in shared) for kind, method in kinds.items())
    types: list[torch.dtype] = [*_dense_dtypes(machine, dtype)[1:], *(onnx_baseline.CACHES if onnx else ())]
    copies: int = sum(2 * B * H * n * D * t.itemsize for t in types)
    return whole + stores + copies


def sets_in_turn(
    machine: Machine, methods: Sequence[Method], shape: Shape, dtype: torch.dtype, n: int, onnx: bool = False
) -> int:
    """Return how many sets are taken in turn, so that four times the machine's cache is read; 0 if none fits."""
    fewest_bytes = min(method.traffic(n, shape, dtype).bytes for method in methods)
    wanted = max(1, -(-4 * machine.cache_bytes // fewest_bytes))
    fit = int(0.85 * machine.free_bytes()) // set_bytes(machine, methods, shape, dtype, n, onnx)
    return min(wanted, fit, MOST_SETS)


def candidates(
    machine: Machine, shape: Shape, n: int, methods: Sequence[Method], dtype: torch.dtype, sets: int, onnx: bool = False
) -> dict[str, Candidate]:
    """Return every method after n tokens, and PyTorch's dense paths, on `sets` sets of caches; onnx: its paths too."""
    (B, H, G, D), place = shape, machine.device
    candidates_by_name: dict[str, Candidate] = {}
    spare = machine.free_bytes() // sets - set_bytes(machine, methods, shape, dtype, n, onnx)

    def steps_on_set(seed: int) -> Iterator[tuple[str, Step]]:
        """One set of caches, and the step of every candidate on it."""
        draw = torch.Generator(place).manual_seed(seed)
        base = random_store(shape, dtype, n, seed=seed, device=place)
        q, unrotated = (torch.randn(B, H, G, D, device=place, generator=draw).to(dtype) for _ in "qu")
        token = [torch.randn(B, H, D, device=place, generator=draw).to(dtype) for _ in "kv"]
        refresh = partial(rotate, unrotated, q)
        stores: dict[str, tuple[Store, Call]] = {}
        for name, call in dense_calls(q, *keys_values(base), _dense_dtypes(machine, dtype), spare).items():
            yield name, Step(call, refresh)
        if onnx:
            for name, (call, write_query, _) in onnx_baseline.dense_calls(
                q, *keys_values(base), token, machine.threads
            ).items():
                yield name, Step(call, write_query)
        for method in methods:
            kind = store_kind(method, shape, dtype)
            if kind not in stores:
                store = filled_store(method, base)
                stores[kind] = store, machine.undo(store)
            store, undo = stores[kind]
            yield repr(method), Step(partial(method.decode, store, q, *token, scale=D**-0.5), refresh, store, undo)

    for i in range(sets):
        for name, step in steps_on_set(i):
            candidates_by_name.setdefault(name, Candidate()).append(step)
    return {name: candidate for name, candidate in candidates_by_name.items() if len(candidate) == sets}


def _dense_dtypes(machine: Machine, dtype: torch.dtype) -> list[torch.dtype]:
    """The formats in which PyTorch's dense paths are measured: the cache's own first."""
    return list(dict.fromkeys([dtype, *machine.dense_dtypes]))


def rotate(x: Tensor, to: Tensor) -> None:
    """Write a rotary embedding of x (...,D), by an angle of one, into `to`."""
    half = x.shape[-1] // 2
    to.copy_(x * math.cos(1) + torch.cat([-x[..., half:], x[..., :half]], -1) * math.sin(1))


def race(
    machine: Machine, candidates: Mapping[str, Candidate], rounds: int, tick: Call = nothing
) -> tuple[Timings, float]:
    """Return the seconds of one step of each candidate, and the machine's bandwidth in bytes per second.

    Paths of PyTorch's that are slow in the warm-up (`slow_paths`) are left out. On a CPU the others take their turn in
    some rounds only (`Timings.seldom`): they take memory from the system and give it back, and the step of another
    candidate that follows one takes up to 0.04 ms more.
    """

    repeats = {name: -(-machine.least_steps // len(candidate)) for name, candidate in candidates.items()}
    steps_timed = {name: repeats[name] * len(candidate) for name, candidate in candidates.items()}

    def call_of(name: str) -> Call:
        """Return the candidate's steps, as often as they are timed together; a single step without a loop around it."""
        candidate = candidates[name]
        return candidate[0].run if steps_timed[name] == 1 else partial(repeat, candidate.run, repeats[name])

    warm_up = dict[str, float]()
    for name in [*candidates] * 2:  # all before the first capture: what is made once is made then
        warm_up[name] = machine.seconds(call_of(name)) / steps_timed[name]
        candidates[name].undo()
    slow = slow_paths(warm_up)
    candidates = {name: candidate for name, candidate in candidates.items() if name not in slow}
    stores = [step.store for candidate in candidates.values() for step in candidate if step.store is not None]
    valid, calls = machine.footing(stores), dict[str, Call]()
    for name, candidate in candidates.items():
        calls[name] = machine.capture(call_of(name))
        candidate.undo()
    assert machine.footing(stores) == valid
    moves = machine.bandwidth_calls()

    def before(name: str) -> None:
        """Bring stores and processor caches into the state in which every call finds them."""
        if name in candidates:
            candidates[name].undo()
        machine.between_calls(candidates[name].refresh if name in candidates else nothing)

    both = {**calls, **{name: move for name, (move, _) in moves.items()}}
    clock = machine.waiting_clock()
    theirs = [name for name in candidates if name.startswith("torch:")] if machine.threads else []
    measured = take_turns(
        both, rounds, lambda _, call: machine.seconds(call), before, tick=tick, waited=clock, seldom=lambda _: theirs
    )
    for candidate in candidates.values():
        candidate.undo()
    steps = {name: [s / steps_timed[name] for s in measured.seconds[name]] for name in candidates}
    return Timings(steps, measured.waited, measured.seldom), peak_bandwidth(moves, measured.seconds)


def repeat(call: Call, times: int) -> None:
    """Run a call `times` times."""
    for _ in range(times):
        call()


def slow_paths(seconds: Mapping[str, float]) -> list[str]:
    """Return PyTorch's paths that take more than SLOW times as long as the fastest of them.

    They are of no interest, and over long caches they disturb the others: each call takes gigabytes of memory from the
    system and gives them back, and keeps all processors busy for a second.
    """
    theirs = [name for name in seconds if name.startswith("torch:")]
    return [name for name in theirs if seconds[name] > SLOW * min(seconds[other] for other in theirs)]


def stage_row(
    machine: Machine, candidate: Candidate, shape: Shape, rounds: int, tick: Call = nothing
) -> dict[str, float | None]:
    """Return the microseconds of one thread that every stage of a step takes for one KV head; medians of the rounds.

    call: the rest of the time in which the threads were at the step's disposal: Python, the start and the end of the
    work on several threads, and waiting for one another. Stages are None where the step is not one of the C++ attention
    kernels.
    """
    rows, delays = list[dict[str, float | None]](), list[bool]()
    clock, heads = machine.waiting_clock() or float, shape.B * shape.H
    for _ in range(rounds):
        (step,) = candidate
        step.undo()
        machine.between_calls(step.refresh)
        assert step.store is not None
        start = clock()
        if isinstance(step.store.view, StoreMemory):
            with stage_times(step.store) as seconds:
                whole = machine.seconds(step.run)
        else:
            seconds, whole = {}, machine.seconds(step.run)
        delays.append(is_delayed(whole, clock() - start))
        rest = whole * max(1, machine.threads) - sum(seconds.values())
        us: dict[str, float | None] = dict.fromkeys(STAGES)
        rows.append({**us, **{stage: s * 1e6 / heads for stage, s in {**seconds, "call": rest}.items()}})
        step.undo()
        tick()
    kept = [row for row, delayed in zip(rows, delays, strict=True) if not delayed] or rows
    columns = {stage: [row[stage] for row in kept] for stage in rows[0]}
    return {
        stage: None if None in numbers else statistics.median(x for x in numbers if x is not None)
        for stage, numbers in columns.items()
    }


def step_bytes(candidate: Candidate, method: Method, shape: Shape, n: int, dtype: torch.dtype) -> int:
    """Return the bytes that a step after n tokens reads and writes, the mean over the sets.

    Where a method reads as many rows as the data ask for, its steps are taken once more, and what they read is counted.
    """
    moved = []
    for step in candidate:
        assert step.store is not None
        observed = dict[str, int]()
        if step.store.traffic_depends_on_data:
            step.run()
            observed = step.store.observed()
            step.undo()
        moved.append(method.traffic(n, shape, dtype, **observed).bytes)
    return round(statistics.fmean(moved))


def _rows(
    machine: Machine,
    timings: Timings,
    ours: Mapping[str, int],
    methods: Sequence[Method],
    shape: Shape,
    n: int,
    dtype: torch.dtype,
    peak: float,
    sets: int,
) -> list[dict[str, Any]]:
    """The rows of the JSON contract at one length; ours: the bytes of every method's step."""
    (B, H, G, D), dense = shape, repr(Dense())
    backends = {repr(method): _backend(machine, method) for method in methods}
    theirs = [name for name in timings.seconds if name.startswith("torch:")]
    onnx = [name for name in timings.seconds if name.startswith("onnxruntime:")]
    backends |= dict.fromkeys(onnx, "onnxruntime")
    best_of_torch = min(theirs, key=timings.ms)
    best = min([*theirs, dense], key=timings.ms)
    whole = ours[dense]
    moved = {name: whole * dtype_of(name).itemsize // dtype.itemsize for name in (*theirs, *onnx)} | dict(ours)
    rows = []
    for name, bytes_ in moved.items():
        ms, (ms_min, ms_max) = timings.ms(name), timings.ms_range(name)
        rows.append({
            "method": name, "backend": backends.get(name, "torch"), "batch": B, "heads": H * G,
            "kv_heads": H, "head_dim": D, "length": n, "dtype": str(dtype).removeprefix("torch."),
            "threads": machine.threads, "sets": sets, "kept": timings.undelayed(name),
            "calls": len(timings.seconds[name]),
            "ms": ms, "ms_min": ms_min, "ms_max": ms_max,
            "bytes_predicted": bytes_, "gb_per_s": bytes_ / ms / 1e6, "share_of_peak": bytes_ / ms * 1e3 / peak,
            "speedup_dense": timings.ratio(dense, name), "speedup_best": timings.ratio(best, name),
            "speedup_torch": timings.ratio(best_of_torch, name), "speedup_theory": whole / bytes_,
            "best_of_torch": name == best_of_torch,
        })  # fmt: skip
    return rows


def _backend(machine: Machine, method: Method) -> str:
    """The backend that takes the method's steps; a method without a kernel runs its reference anywhere."""
    name = ops.select_backend(machine.device.type)[0]
    return name if method.has_kernel(name) else "ref"


def crossover(method: Method, shape: Shape, dtype: torch.dtype) -> int | None:
    """Return the shortest length at which the method surely reads fewer bytes than dense attention.

    Where bytes depend on the data, the most that are expected count. Lengths are tried in steps of an eighth of an
    octave; None up to 2^21.
    """

    def fewer(n: int) -> bool:
        """Whether the method reads fewer bytes after n tokens."""
        return method.traffic(n, shape, dtype).bytes < Dense().traffic(n, shape, dtype).bytes

    return next((n for n in (int(2 ** (i / 8)) for i in range(168)) if fewer(n)), None)


def faster_from(rows: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
    """Return for each method the shortest measured length from which on it was always faster than our dense attention.

    None: it was not faster at the longest length. The rows are those of the JSON contract.
    """
    crossovers: dict[str, int | None] = {}
    ours = [row["method"] for row in rows if row["backend"] not in ("torch", "onnxruntime")]
    for name in dict.fromkeys(name for name in ours if name != "Dense()"):
        line = [(row["length"], row["speedup_dense"] > 1) for row in rows if row["method"] == name]
        slow = max((n for n, faster in line if not faster), default=0)
        crossovers[name] = min((n for n, _ in line if n > slow), default=None)
    return crossovers
