"""`skimkv bench token`: a whole decoded token of a model, ours beside transformers' own cache and attention.

The model has the shape of a real one and random weights, or is loaded with its own; its caches hold random keys and
values, and no prompt is run.
All ways to decode take turns, call by call, where their caches fit in memory together; other programs on the same GGUF
file take turns with them (`rivals`). Where transformers' own step is many times as slow as ours, it takes its turn in
some rounds only: it takes gigabytes from the system and gives them back, and the system is busy with them while the
next steps run. `ms_attention` is what a token takes longer than one after a few tokens, and `ms_weights` is the rest.
`ms_linear` is how long the linear layers alone take on a CPU, one after the other, with their part of Python, and with
what is between them where several are one operation: what is left of `ms_weights` is the rest of the model.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..hf.attach import attach, detach
from ..methods import Dense, parse
from ..methods.base import Method
from ..stores.base import Store
from . import models
from .machine import Call, Machine, nothing, peak_bandwidth
from .models import Decoder, NextToken, Subject
from .own_layers import OURS, PLAIN, linear_calls, twin_of
from .rivals import Program, Rival, programs
from .rounds import Timings, take_turns

FEW = 16  # tokens in the cache of a step whose time is that of the weights
WARM_UP = 4  # steps before the clock: memory is touched, kernels are compiled and captured
COMPILE: bool | str = True  # attach(compile=...)
SLOW = 4.0  # times as long as our fastest step; a step of transformers' that takes longer is seldom taken


def time_tokens(
    machine: Machine,
    subject: Subject,
    lengths: Sequence[int],
    methods: Sequence[str],
    rounds: int = 9,
    tick: Call = nothing,
    compile: bool = False,
    against: Mapping[str, Path] | None = None,
) -> dict[str, Any]:
    """Return the rows of the JSON contract; `transformers` is the library's own cache and attention, not compiled.

    interleaved: all rows of this length were measured in turn, call by call; where programs do not fit in memory
    together, ours were measured in turn with each of them. calls: how many steps were timed. kept: how many of them
    count, as in `attention`. speedup_dense: over our dense attention, measured; speedup_allowed: what the bytes of
    weights and caches allow.
    against: the path of a program by its kind (rivals.KINDS). Then its rows follow ours, `transformers` is left out,
    and every row has `speedup_rivals`, how many times as fast it is as each of the rivals. Of llama.cpp's rows, that of
    the better setting has `better`.
    Raises ValueError if caches do not fit in memory, if random ones cannot stand for the model's (`check_fillable`), if
    the model has too few positions, or if a program cannot be run.
    """
    model, against = subject.model, against or {}
    if subject.is_loaded:
        models.check_fillable(subject)
        models.check_tokens(model, max(lengths) + WARM_UP + rounds)
    specs: list[Method | None] = list(dict.fromkeys([Dense(), *map(parse, methods)]))
    specs = specs if against else [None, *specs]
    rows, peaks = [], []
    for n in lengths:
        decoders = [Decoder(spec, tokens) for tokens in (n, FEW) for spec in specs]
        rivals: list[tuple[Path, Program]] = []
        for kind, path in against.items():
            assert subject.file is not None
            turns = WARM_UP + rounds
            kind_programs = programs(kind, subject.file, n, machine.threads, turns, models.cache_shape(model).G)
            rivals += [(path, program) for program in kind_programs]
        groups = _groups(machine, subject, decoders, rivals, n, compile)
        parts, peak, observed = list[Timings](), 0.0, dict[str, list[dict[str, int]]]()
        for group in groups:
            measured, bandwidth, of_stores = _time_group(machine, subject, group, n, rounds, tick, compile)
            parts, peak, observed = [*parts, measured], max(peak, bandwidth), observed | of_stores
            gc.collect()
        peaks.append(peak)
        together = all(decoder.label in part.seconds for decoder in decoders for part in parts)
        if not together:
            parts = [Timings(
                {name: seconds for part in parts for name, seconds in part.seconds.items()},
                {name: waited for part in parts for name, waited in part.waited.items()},
            )]  # fmt: skip
        setting = {"shape": subject.shape, "weights": subject.weights, "length": n, "interleaved": together}
        for row in _joined([_rows(model, specs, rivals, n, rounds, part, peak, observed) for part in parts]):
            rows.append({**row, **setting, "compiled": compile and row["method"] != "transformers"})
    return {
        "machine": machine.name, "peak_gb_per_s": max(peaks) / 1e9, "peak": machine.peak, "rows": rows,
        "waits_known": machine.waiting_clock() is not None,
    }  # fmt: skip


Contender = Decoder | tuple[Path, Program]


def _groups(
    machine: Machine,
    subject: Subject,
    decoders: Sequence[Decoder],
    rivals: Sequence[Contender],
    n: int,
    compile: bool,
) -> list[list[Contender]]:
    """What is measured in turn: all, or else all of ours with each of the rivals, or else one after the other."""
    free = 0.85 * machine.free_bytes()
    choices: list[list[list[Contender]]] = [[[*decoders, *rivals]]]
    if rivals:
        choices.append([[*decoders, rival] for rival in rivals])
    for groups in [] if compile else choices:
        if all(sum(_bytes(subject, contender, n) for contender in group) < free for group in groups):
            return groups
    return [[contender] for contender in [*decoders, *rivals]]


def _joined(parts: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of one length from those of its groups, which have our methods in common.

    Our rows are those of the group with the better setting of llama.cpp, or of the first group; how many times as fast
    they are as a rival is that rival's group's. Rivals of different groups are compared by their medians.
    """
    if len(parts) == 1:
        return parts[0]
    rivals = [row for part in parts for row in part if "bytes_read" not in row]
    settings = [row for row in rivals if row["method"].startswith("llama.cpp")]
    better = min(settings, key=lambda row: row["ms"], default=None)
    chosen = next((part for part in parts if better in part), parts[0])
    ours = [row for row in chosen if "bytes_read" in row]
    for row in rivals:
        row["speedup_rivals"] = {other["method"]: other["ms"] / row["ms"] for other in rivals}
        row["better"] = row is better
    for row in ours:
        same = [other for part in parts for other in part if other["method"] == row["method"]]
        row["speedup_rivals"] = {name: ratio for other in same for name, ratio in other["speedup_rivals"].items()}
    return [*ours, *rivals]


def _bytes(subject: Subject, contender: Contender, n: int) -> int:
    """An upper bound of the bytes that a contender takes besides our model."""
    if isinstance(contender, Decoder):
        return contender.bound(subject.model)
    assert subject.file is not None
    _, program = contender
    cache = Decoder(Dense(), n).bound(subject.model) * 2 // subject.model.dtype.itemsize  # in 16 bits
    # it may arrange the weights anew, beside the file that all map
    return int(program.copies * cache) + subject.file.stat().st_size


def _time_group(
    machine: Machine,
    subject: Subject,
    contenders: Sequence[Contender],
    n: int,
    rounds: int,
    tick: Call,
    compile: bool,
) -> tuple[Timings, float, dict[str, list[dict[str, int]]]]:
    """Take the steps of contenders in turn, of decoders by their labels, and those of PLAIN and OURS.

    The number is the bandwidth in bytes per second meanwhile. The dictionary has what the stores of each of our
    decoders tell of their last step (`Store.observed`). Raises ValueError if they do not fit in memory.
    """
    need, free = sum(_bytes(subject, contender, n) for contender in contenders), machine.free_bytes()
    if need > free:
        first = contenders[0]
        name = first.name if isinstance(first, Decoder) else first[1].name
        tokens = first.tokens if isinstance(first, Decoder) else n
        raise ValueError(f"{name} after {tokens} tokens: {need / 1e9:.1f} GB of caches, {free / 1e9:.1f} GB free")
    model, others = subject.model, dict[str, Rival]()
    named = {contender.label: contender for contender in contenders if isinstance(contender, Decoder)}
    with ExitStack() as running:
        for contender in contenders:
            if not isinstance(contender, Decoder):
                rival = running.enter_context(Rival(*contender))
                rival.start()  # before the next one is there, so that none runs while another one prepares itself
                others[rival.name] = rival
        calls: dict[str, Call] = {}
        stores = dict[str, list[Store]]()
        has_own = machine.device.type == "cpu" and not compile
        ours = twin_of(model) if has_own else model
        for name, decoder in named.items():
            of_decoder = model if decoder.method is None else ours
            cache = models.random_cache(of_decoder, decoder.method, decoder.tokens, WARM_UP + rounds)
            calls[name] = NextToken(of_decoder, cache)
            stores[name] = [] if decoder.method is None else cache.stores
        moves = machine.bandwidth_calls()

        def before(name: str) -> None:
            """Attach the candidate's method, if it is one of ours, and empty the processor's caches."""
            method = named[name].method if name in named else None
            if method is not None:
                attach(ours, method, compile=compile and COMPILE)
            elif name in named:
                detach(model)
            machine.between_calls()

        def clock(name: str, call: Call) -> float:
            """The seconds of a call; those of a rival are replaced by its own when it has finished."""
            return machine.wall_seconds(call) if name in named or name in others else machine.seconds(call)

        waits, own_wait = dict.fromkeys(others, 0.0), machine.waiting_clock()

        def take_turn(name: str) -> None:
            """Let a rival take its turn, and note for how long its threads waited."""
            waits[name] += others[name].take_turn()

        def waited() -> float:
            """The seconds that our threads have waited, and those of the rivals."""
            return (own_wait() if own_wait else 0.0) + sum(waits.values())

        def slow_steps(seconds: Mapping[str, float]) -> list[str]:
            """Return the steps of transformers' that are many times as slow as the fastest of all."""
            fastest = min((seconds[name] for name in named), default=0.0)
            return [name for name in named if named[name].method is None and seconds[name] > SLOW * fastest]

        if has_own:
            calls |= linear_calls(model, ours)
        calls |= {name: partial(take_turn, name) for name in others}
        calls |= {name: move for name, (move, _) in moves.items()}
        timings = take_turns(calls, rounds, clock, before, WARM_UP, tick, waited if own_wait else None, slow_steps)
        detach(ours)
        timings.seconds.update({name: rival.finish()[WARM_UP:] for name, rival in others.items()})
        observed = {name: [store.observed() for store in layers] for name, layers in stores.items()}
        return timings, peak_bandwidth(moves, timings.seconds), observed


def _rows(
    model: PreTrainedModel,
    specs: Sequence[Method | None],
    programs: Sequence[tuple[Path, Program]],
    n: int,
    rounds: int,
    timings: Timings,
    peak: float,
    observed: Mapping[str, Sequence[Mapping[str, int]]],
) -> list[dict[str, Any]]:
    """The times and bytes of the rows at one length.

    Bytes are those of the step in the middle; what of them depends on the data is as observed in the last step.
    """
    layers, weights = models.layer_count(model), models.weight_bytes(model)
    dense_label = Decoder(Dense(), n).label
    rivals = [program.name for _, program in programs if program.name in timings.seconds]
    rows, label_of = list[dict[str, Any]](), dict(zip(rivals, rivals, strict=True))
    for spec in specs:
        decoder, few = Decoder(spec, n), Decoder(spec, FEW).label
        label_of[decoder.name] = label = decoder.label
        linear = PLAIN if spec is None else OURS
        middle = n + WARM_UP + rounds // 2
        moved = models.step_bytes(model, spec or Dense(), middle, observed[label])
        dense = models.step_bytes(model, Dense(), middle)
        ms_attention = timings.ms_longer(label, few)
        rows.append({
            "method": decoder.name, **_times(timings, label, dense_label), "layers": layers,
            "ms_attention": ms_attention, "ms_weights": timings.ms(label) - ms_attention,
            "ms_linear": timings.ms(linear) if linear in timings.seconds else None,
            "floor_ms": (moved + weights) / peak * 1e3,
            "cache_bytes": moved, "bytes_read": moved, "weight_bytes": weights,
            "speedup_allowed": (dense + weights) / (moved + weights),
            "speedup_transformers": timings.ratio(Decoder(None, n).label, label) if None in specs else None,
        })  # fmt: skip
    rows += [{"method": name, **_times(timings, name, dense_label), "layers": layers} for name in rivals]
    if rivals:
        settings = [name for name in rivals if name.startswith("llama.cpp")]
        better = min(settings, key=timings.ms, default=None)
        for row in rows:
            row["speedup_rivals"] = {name: timings.ratio(name, label_of[row["method"]]) for name in rivals}
            row["better"] = row["method"] == better
    return rows


def _times(timings: Timings, name: str, dense: str) -> dict[str, Any]:
    """What a row says of the times of a candidate; dense is the name of our dense attention."""
    ms_min, ms_max = timings.ms_range(name)
    return {
        "calls": len(timings.seconds[name]), "kept": timings.undelayed(name),
        "ms": timings.ms(name), "ms_min": ms_min, "ms_max": ms_max,
        "speedup_dense": timings.ratio(dense, name),
    }  # fmt: skip
