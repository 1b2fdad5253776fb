"""`skimkv bench token`: a whole decoded token of a model, ours beside transformers' own cache and attention.

The model has the shape of a real one and random weights; its caches hold random keys and values, and no prompt is run.
All ways to decode take turns, call by call, where their caches fit in memory together; other programs on the same GGUF
file take turns with them (`rivals`). Where transformers' own step is many times as slow as ours, it takes its turn in
some rounds only: it takes gigabytes from the system and gives them back, and the system is busy with them while the
next steps run. `ms_attention` is timed around every layer's cache and attention on a CPU. A GPU runs ahead of its host,
so there it is what a token takes longer than one after a few tokens. `ms_weights` is the rest. `ms_linear` is how long
the linear layers alone take on a CPU, one after the other, with their part of Python, and with what is between them
where several are one operation: what is left of `ms_weights` is the rest of the model.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from ctypes import c_int64
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..hf.attach import Cache, attach, detach
from ..hf.cache_step import CacheStep
from ..hf.decode_modules import decode_modules
from ..hf.decode_step import StepForward, replace_forward, restore_forward, step_forward
from ..hf.float_modules import FloatLinear
from ..hf.layer import Layer
from ..hf.norms import norms_of
from ..hf.weights import Linear8
from ..methods import Dense, parse
from ..methods.base import Method
from ..stores import memory
from ..stores.base import Shape
from .caches import filled_store, keys_values, random_store
from .machine import Call, Machine, nothing, peak_bandwidth
from .rivals import Program, Rival, programs
from .rounds import Timings, take_turns
from .shapes import check_model

FEW = 16  # tokens in the cache of a step on a GPU whose time is that of the weights
WARM_UP = 4  # steps before the clock: memory is touched, kernels are compiled and captured
COMPILE: bool | str = True  # attach(compile=...)
SLOW = 4.0  # a step of transformers' that takes so many times as long as the fastest of ours is seldom taken
PLAIN, OURS = "linear layers of transformers", "linear layers of ours"  # what is timed beside tokens on a CPU


def random_llama(
    shape: str, layers: int | None, weights: str, positions: int, device: torch.device | str = "cpu"
) -> LlamaForCausalLM:
    """Return a Llama of that shape with random weights, in eval mode; None layers: as many as the shape has.

    Raises ValueError if the shape or the format of the weights is unknown.
    """
    sizes = check_model(shape, weights)
    config = LlamaConfig(
        hidden_size=sizes.hidden, intermediate_size=sizes.intermediate, num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads, num_hidden_layers=layers or sizes.layers, vocab_size=sizes.vocabulary,
        head_dim=sizes.head_dim, max_position_embeddings=positions,
    )  # fmt: skip
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config).to(dtype)  # type: ignore[arg-type]
    draw = torch.Generator(device).manual_seed(0)
    for parent in list(model.modules()):
        for name, part in list(parent.named_children()):
            if isinstance(part, torch.nn.Linear) and weights == "int8":
                setattr(parent, name, Linear8.random(part.in_features, part.out_features, draw, dtype))
    for parent in model.modules():
        for name, empty in list(parent.named_parameters(recurse=False)):
            if empty.is_meta:
                random = memory.empty(empty.shape, dtype, device).fill_(1)
                if empty.ndim > 1:
                    random.normal_(0, 0.02, generator=draw)
                setattr(parent, name, torch.nn.Parameter(random, requires_grad=False))
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    result: LlamaForCausalLM = model.eval()
    return result


class Subject(NamedTuple):
    """The model whose tokens are timed. shape: its name, or the file. weights: their format. file: of GGUF, if any."""

    model: LlamaForCausalLM
    shape: str
    weights: str
    file: Path | None = None


def gguf_subject(path: Path) -> Subject:
    """Load the model of a GGUF file, of any architecture that can be loaded; it needs no tokenizer.

    Raises ValueError, in one line with the path, if it cannot be read.
    """
    from ..hf.gguf_llama import load_gguf_model, read_contents

    model: Any = load_gguf_model(path)
    return Subject(model, str(path), read_contents(path).weights, path)


def cache_shape(model: LlamaForCausalLM) -> Shape:
    """Return the shape of one layer's cache, for one sequence."""
    config: Any = model.config
    H = config.num_key_value_heads
    return Shape(1, H, config.num_attention_heads // H, config.head_dim)


def weight_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of weights that one token reads: all but the embedding table, of which it reads a row."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return sum(t.nbytes for name, t in tensors if "embed_tokens" not in name)


def random_cache(model: LlamaForCausalLM, method: Method | None, tokens: int, more: int) -> Any:
    """Return a cache of random tokens with room for `more`: the method's, or for None that of transformers."""
    shape, dtype = cache_shape(model), model.dtype
    cache: Any = DynamicCache(config=model.config) if method is None else Cache(model, method)
    for i, layer in enumerate(cache.layers):
        base = random_store(shape, dtype, tokens, more, i, model.device)
        if method is None:
            cache.update(*keys_values(base), i)
        else:
            assert isinstance(layer, Layer)
            layer.take_store(filled_store(method, base, more))
    return cache


class Decoder(NamedTuple):
    """One way to decode: by a method, or for None as transformers does, after so many tokens."""

    method: Method | None
    tokens: int

    @property
    def name(self) -> str:
        """The method's spec, or `transformers`."""
        return "transformers" if self.method is None else repr(self.method)

    @property
    def label(self) -> str:
        """The name, and after how many tokens."""
        return f"{self.name} after {self.tokens}"

    def bound(self, model: LlamaForCausalLM) -> int:
        """Return an upper bound of the bytes that its cache takes in all layers."""
        size = (self.method or Dense()).bound(self.tokens, cache_shape(model), model.dtype)
        return size * len(model.model.layers)


def next_token(model: LlamaForCausalLM, cache: Any) -> None:
    """Take one decode step, as generate() does for each token."""
    ids, places = torch.tensor([[[5]], [[cache.get_seq_length()]]], device=model.device)
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=cache, position_ids=places, use_cache=True)


class OwnLayers:
    """The modules of a model in whose place ours can stand: its own, and ours with the same weights."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        linear = {n: part for n, part in model.named_modules() if hasattr(part, "in_features")}
        self.model = model
        self.ours: dict[str, Any] = decode_modules(model) | norms_of(model)
        self.plain: dict[str, Any] = {name: model.get_submodule(name) for name in self.ours} | linear
        self.ours |= {
            name: FloatLinear(part.weight, part.weight.dtype) if type(part) is torch.nn.Linear else part
            for name, part in linear.items()
        }

    def use(self, layers: Mapping[str, torch.nn.Module]) -> None:
        """Let the model have these layers, `plain` or `ours`, and with ours the forward that runs them at once."""
        for name, layer in layers.items():
            self.model.set_submodule(name, layer)
        if layers is self.ours:
            replace_forward(self.model)
        else:
            restore_forward(self.model)

    def calls(self) -> dict[str, Call]:
        """Products of one token with all linear layers, one after the other, by PLAIN and OURS."""
        return {PLAIN: partial(_call_all, self._products()), OURS: partial(_call_all, self._operations())}

    def _products(self) -> list[Call]:
        linear = [part for part in self.plain.values() if hasattr(part, "in_features")]
        return [partial(part, self._ones(part.in_features)) for part in linear]

    def _operations(self) -> list[Call]:
        """All layers but attention as one operation, and the product after them."""
        self.use(self.ours)
        forward = step_forward(self.model.model)
        assert forward is not None
        x = self._ones(self.model.lm_head.in_features)
        angles = self._ones(self.model.model.layers[0].self_attn.head_dim)
        return [partial(_call_operation, forward, x, angles), partial(self.model.lm_head, x)]

    def _ones(self, size: int) -> torch.Tensor:
        return torch.ones(1, 1, size, dtype=self.model.dtype)


def _call_operation(forward: StepForward, x: torch.Tensor, angles: torch.Tensor) -> None:
    operation = forward.operation(x)
    assert operation is not None
    operation(x, angles, angles, None)


def _call_all(calls: Sequence[Call]) -> None:
    with torch.inference_mode():
        for call in calls:
            call()


class AttentionClock:
    """Takes decode steps, and notes for each of them the seconds in every layer's cache update and attention.

    Where a step is one operation of the library, that says how long attention took; what Python does with the cache
    before and after it is added.
    """

    def __init__(self, model: LlamaForCausalLM, cache: Any) -> None:
        self.model, self.cache, self.seconds, self.inside = model, cache, list[float](), 0.0
        self.steps_at_once = 0  # steps that were one operation
        cache.update = self._timed(cache.update)
        if isinstance(cache, Cache):
            self._begin = self._timed(cache.begin_step)
            cache.begin_step = self._begin_step  # type: ignore[method-assign, assignment]

    def next_token(self) -> None:
        """Take one decode step with whatever attention function the model has now.

        Raises RuntimeError if a step is not one operation, and those before it were.
        """
        self.inside, name, before = 0.0, self.model.config._attn_implementation, self.steps_at_once
        function = ALL_ATTENTION_FUNCTIONS[name]
        # with a function in the place of ours, no step is one operation: the second step shows whether they are
        is_at_once = before > 0 or len(self.seconds) == 1
        if not is_at_once:
            AttentionInterface.register(name, self._timed(function))
        try:
            next_token(self.model, self.cache)
        finally:
            AttentionInterface.register(name, function)
        if before and self.steps_at_once == before:
            raise RuntimeError("a decode step was not one operation, as those before it: its attention was not timed")
        self.seconds.append(self.inside)

    def _begin_step(self, *args: Any) -> CacheStep | None:
        """Begin a step of the cache, whose time in the library is taken by the library."""
        step: CacheStep | None = self._begin(*args)
        forward = step_forward(self.model.model)
        if step is None or forward is None:
            return step
        take, clock, outside = step.take, c_int64(), 0.0
        forward.attention_ns = clock

        def timed_take(run: Callable[[Sequence[int]], torch.Tensor]) -> torch.Tensor:
            """Take the step; of the operation itself, only attention counts as inside."""

            def timed_run(addresses: Sequence[int]) -> torch.Tensor:
                """Run the operation, whose seconds are outside."""
                nonlocal outside
                start = time.perf_counter()
                result = run(addresses)
                outside = time.perf_counter() - start
                return result

            start = time.perf_counter()
            result = take(timed_run)
            self.inside += time.perf_counter() - start - outside + clock.value / 1e9
            self.steps_at_once += 1
            return result

        step.take = timed_take  # type: ignore[method-assign]
        return step

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            """Call the function, and add its seconds to those inside."""
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.inside += time.perf_counter() - start
            return result

        return timed


class Measured(NamedTuple):
    """Seconds of a decoder's steps.

    attention: of those in attention, where it was timed. waited: for a processor, where that is known. linear: of the
    linear layers alone, where they were timed. seldom: whether it took its turn in some rounds only, as in `Timings`.
    """

    steps: list[float]
    attention: list[float]
    waited: list[float]
    linear: Sequence[float] = ()
    seldom: bool = False


def time_together(
    machine: Machine,
    model: LlamaForCausalLM,
    decoders: Sequence[Decoder],
    rounds: int,
    tick: Call,
    compile: bool,
    rivals: Sequence[Rival] = (),
) -> tuple[dict[str, Measured], float]:
    """Take the steps of these decoders in turn, by name, and those of rivals that were started.

    The number is the bandwidth in bytes per second meanwhile.
    """
    named = {decoder.label: decoder for decoder in decoders}
    others = {rival.name: rival for rival in rivals}
    clocks, calls = dict[str, AttentionClock](), dict[str, Call]()
    for name, decoder in named.items():
        cache = random_cache(model, decoder.method, decoder.tokens, WARM_UP + rounds)
        if _by_difference(machine, compile):
            calls[name] = partial(next_token, model, cache)
        else:
            clocks[name] = AttentionClock(model, cache)
            calls[name] = clocks[name].next_token
    moves = machine.bandwidth_calls()
    layers = OwnLayers(model)

    def before(name: str) -> None:
        """Attach the candidate's method, if it is one of ours, and empty the processor's caches."""
        if name in named:
            method = named[name].method
            layers.use(layers.plain if method is None or _by_difference(machine, compile) else layers.ours)
            if method is None:
                detach(model)
            else:
                attach(model, method, compile=compile and COMPILE)
        elif name in (PLAIN, OURS):
            layers.use(layers.plain if name == PLAIN else layers.ours)
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

    if clocks:
        calls |= layers.calls()
    calls |= {name: partial(take_turn, name) for name in others}
    calls |= {name: move for name, (move, _) in moves.items()}
    timings = take_turns(calls, rounds, clock, before, WARM_UP, tick, waited if own_wait else None, slow_steps)
    layers.use(layers.plain)
    detach(model)
    timings.seconds.update({name: rival.finish()[WARM_UP:] for name, rival in others.items()})
    measured = {
        name: Measured(
            timings.seconds[name],
            clocks[name].seconds[WARM_UP:] if name in clocks else [],
            timings.waited.get(name, []),
            timings.seconds.get(PLAIN if name in named and named[name].method is None else OURS, []),
            name in timings.seldom,
        )
        for name in (*named, *others)
    }
    return measured, peak_bandwidth(moves, timings.seconds)


def _by_difference(machine: Machine, compile: bool) -> bool:
    """Whether the time in attention is what a step takes longer than one after a few tokens."""
    return compile or machine.device.type != "cpu"


def token(
    machine: Machine,
    shape: str,
    layers: int | None,
    weights: str,
    lengths: Sequence[int],
    methods: Sequence[str],
    rounds: int = 9,
    tick: Call = nothing,
    compile: bool = False,
) -> dict[str, Any]:
    """Return what `time_tokens` does, of a model of that shape with random weights.

    Raises ValueError if the shape or the weights are unknown, or if a method's caches do not fit in memory.
    """
    if weights == "int8" and machine.device.type == "cuda":
        raise ValueError("--weights int8: there is no GPU kernel for them; give bfloat16 or float32")
    model = random_llama(shape, layers, weights, max(lengths) + 1024, machine.device)
    return time_tokens(machine, Subject(model, shape, weights), lengths, methods, rounds, tick, compile)


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
    Raises ValueError if caches do not fit in memory, or if a program cannot be run.
    """
    model, against = subject.model, against or {}
    specs: list[Method | None] = list(dict.fromkeys([Dense(), *map(parse, methods)]))
    specs = specs if against else [None, *specs]
    rows, peaks = [], []
    for n in lengths:
        decoders = [Decoder(spec, n) for spec in specs]
        if _by_difference(machine, compile):
            decoders += [Decoder(spec, FEW) for spec in specs]
        contenders: list[Contender] = [*decoders]
        for kind, path in against.items():
            assert subject.file is not None
            turns = WARM_UP + rounds
            kind_programs = programs(kind, subject.file, n, machine.threads, turns, cache_shape(model).G)
            contenders += [(path, program) for program in kind_programs]
        groups = _groups(machine, subject, decoders, contenders[len(decoders) :], n, compile)
        parts: list[dict[str, Measured]] = []
        peak = 0.0
        for group in groups:
            measured, bandwidth = _time_group(machine, subject, group, n, rounds, tick, compile)
            parts, peak = [*parts, measured], max(peak, bandwidth)
            gc.collect()
        peaks.append(peak)
        together = all(decoder.label in part for decoder in decoders for part in parts)
        if not together:
            parts = [{name: x for part in parts for name, x in part.items()}]
        setting = {"shape": subject.shape, "weights": subject.weights, "length": n, "interleaved": together}
        for row in _joined([_rows(model, specs, n, rounds, part, peak) for part in parts]):
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
) -> tuple[dict[str, Measured], float]:
    """Time contenders in turn, and programs among them. Raises ValueError if they do not fit in memory."""
    need, free = sum(_bytes(subject, contender, n) for contender in contenders), machine.free_bytes()
    if need > free:
        first = contenders[0]
        name = first.name if isinstance(first, Decoder) else first[1].name
        tokens = first.tokens if isinstance(first, Decoder) else n
        raise ValueError(f"{name} after {tokens} tokens: {need / 1e9:.1f} GB of caches, {free / 1e9:.1f} GB free")
    decoders = [contender for contender in contenders if isinstance(contender, Decoder)]
    with ExitStack() as running:
        rivals = list[Rival]()
        for contender in contenders:
            if not isinstance(contender, Decoder):
                rivals.append(running.enter_context(Rival(*contender)))
                rivals[-1].start()  # before the next one is there, so that none runs while another one prepares itself
        return time_together(machine, subject.model, decoders, rounds, tick, compile, rivals)


def _rows(
    model: LlamaForCausalLM,
    specs: Sequence[Method | None],
    n: int,
    rounds: int,
    measured: Mapping[str, Measured],
    peak: float,
) -> list[dict[str, Any]]:
    """The times and bytes of the rows at one length; bytes are those of the step in the middle."""
    layers, weights, shape = len(model.model.layers), weight_bytes(model), cache_shape(model)
    ours = {Decoder(spec, n).name: measured[Decoder(spec, n).label] for spec in specs}
    labels = {Decoder(spec, tokens).label for spec in specs for tokens in (n, FEW)}
    rivals = {name: x for name, x in measured.items() if name not in labels}
    both = {**ours, **rivals}
    waited = {name: x.waited for name, x in both.items() if x.waited}
    seldom = [name for name, x in both.items() if x.seldom]
    timings = Timings({name: x.steps for name, x in both.items()}, waited, seldom)
    rows = []
    for spec in specs:
        name, attention = Decoder(spec, n).name, ours[Decoder(spec, n).name].attention
        linear = ours[name].linear
        moved, dense = (
            layers * (method or Dense()).traffic(n + WARM_UP + rounds // 2, shape, model.dtype).bytes
            for method in (spec, None)
        )
        if attention:
            ms_attention = timings.ms_of_part(name, attention)
        else:
            few = measured[Decoder(spec, FEW).label].steps
            ms_attention = timings.ms(name) - statistics.median(few) * 1e3
        rows.append({
            **_times(timings, name), "layers": layers,
            "ms_attention": ms_attention, "ms_weights": timings.ms(name) - ms_attention,
            "ms_linear": statistics.median(linear) * 1e3 if linear else None,
            "floor_ms": (moved + weights) / peak * 1e3,
            "cache_bytes": moved, "bytes_read": moved, "weight_bytes": weights,
            "speedup_allowed": (dense + weights) / (moved + weights),
            "speedup_transformers": timings.ratio("transformers", name) if None in specs else None,
        })  # fmt: skip
    rows += [{**_times(timings, name), "layers": layers} for name in rivals]
    if rivals:
        settings = [name for name in rivals if name.startswith("llama.cpp")]
        better = min(settings, key=timings.ms, default=None)
        for row in rows:
            row["speedup_rivals"] = {name: timings.ratio(name, row["method"]) for name in rivals}
            row["better"] = row["method"] == better
    return rows


def _times(timings: Timings, name: str) -> dict[str, Any]:
    """What a row says of the times of a candidate."""
    ms_min, ms_max = timings.ms_range(name)
    return {
        "method": name, "calls": len(timings.seconds[name]), "kept": timings.undelayed(name),
        "ms": timings.ms(name), "ms_min": ms_min, "ms_max": ms_max,
        "speedup_dense": timings.ratio("Dense()", name),
    }  # fmt: skip
