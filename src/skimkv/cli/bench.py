"""`skimkv bench attention | token | generate | serve | memory`: a table, one JSON object with --json, a figure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..hf.load import DTYPES
from . import output
from .help import App
from .options import (
    MODEL_OPTIONS,
    Device,
    Json,
    Plot,
    check_dtype,
    check_readable,
    methods_option,
    number_of_bytes,
    output_file,
    resolve_device,
    size_option,
    torch_dtype,
)

if TYPE_CHECKING:
    from ..bench.machine import Machine

app = App(
    help="""Measure speed and memory beside what the machine's memory allows.

    Keys, values and weights are random: no model is needed.

        skimkv bench attention --length 16384
    """,
    no_args_is_help=True,
)

SPARQ = "SparQ(r=32, k=128"
METHODS = ["Dense()", f"{SPARQ})", f"{SPARQ}, channels='int8')", f"{SPARQ}, channels='int4')"]
RIVALS = ("llama.cpp", "fork")
RIVAL_METHODS = ["Dense()", f"{SPARQ}, channels='int8')"]
MEMORY_METHODS = [*METHODS, "H2O(k=512)", "LMInfinite(k=512)", "SubGen(k=448, recent=64)"]
LENGTHS = [4096, 16384]
# prompts and answers of H2O's table 2, 512 + 32, 512 and 1024 tokens, at a quarter
SERVED_LENGTHS = ["128+8", "128+128", "128+256"]
GENERATED_LENGTHS = ["4096+64"]


def _milliseconds(ms: float) -> str:
    return f"{ms:,.3f}" if ms < 100 else f"{ms:,.1f}"


STAGES = ("prepare", "score", "choose", "fetch", "attend", "append", "call")


def _microseconds(us: float | None) -> str:
    return "–" if us is None else f"{us:.2f}"


# Key of a row -> (heading of its column, how its numbers are written)
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "method": ("method", str),
    "batch": ("batch", str),
    "length": ("cached\ntokens", "{:,}".format),
    "ms": ("ms", _milliseconds),
    "ms_min": ("least\nms", _milliseconds),
    "ms_max": ("most\nms", _milliseconds),
    "ms_attention": ("ms in\nattention", _milliseconds),
    "ms_weights": ("ms in\nthe rest", _milliseconds),
    "floor_ms": ("ms at\nbandwidth", _milliseconds),
    "bytes_predicted": ("bytes\nread", "{:,}".format),
    "bytes_read": ("bytes\nread", "{:,}".format),
    "weight_bytes": ("weight bytes\nread", "{:,}".format),
    "gb_per_s": ("GB/s", "{:.1f}".format),
    "share_of_peak": ("of the\nbandwidth", "{:.0%}".format),
    "speedup_dense": ("speed-up\nto dense", "{:.2f}".format),
    "speedup_torch": ("to torch's\nbest", "{:.2f}".format),
    "speedup_transformers": ("to trans-\nformers", "{:.2f}".format),
    "speedup_theory": ("to dense\nby bytes", "{:.2f}".format),
    "speedup_llama.cpp": ("to llama.cpp's\nbetter -fa", "{:.2f}".format),
    "speedup_fork": ("to the\nfork's SparQ", "{:.2f}".format),
    "speedup_allowed": ("to dense\nby bytes", "{:.2f}".format),
    "prompt": ("prompt\ntokens", "{:,}".format),
    "new": ("new\ntokens", "{:,}".format),
    "tokens_per_s": ("tokens\nper s", "{:,.0f}".format),
    "ratio_dense": ("times\ndense's", "{:.2f}".format),
    "first_ms": ("ms to the\nfirst token", _milliseconds),
    "first_speedup": ("to trans-\nformers", "{:.2f}".format),
    "ms_later": ("ms of a\nlater one", _milliseconds),
    "prompt_s": ("s for\nprompts", "{:.2f}".format),
    "latency_s": ("s in\nall", "{:.2f}".format),
    "ms_per_step": ("ms a\nstep", _milliseconds),
    **{stage: (stage, _microseconds) for stage in STAGES},
    "nbytes": ("bytes\nheld", "{:,}".format),
    "allocated": ("bytes\nallocated", "{:,}".format),
    "peak_rss_growth": ("growth of the\nprocess's peak", "{:,}".format),
}

Methods = Annotated[list[str] | None, methods_option("Dense and three kinds of SparQ")]
MemoryMethods = Annotated[list[str] | None, methods_option("Dense, SparQ, H2O, LMInfinite and SubGen")]
Lengths = Annotated[
    list[int] | None,
    typer.Option(
        "--length",
        min=1,
        metavar="TOKENS",
        show_default=" and ".join(map(str, LENGTHS)),
        help="Number of tokens in the cache. May be given several times.",
    ),
]
CacheDtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        callback=check_dtype,
        rich_help_panel=MODEL_OPTIONS,
        help="Number format of queries, keys and values: float32, bfloat16 or float16.",
    ),
]
HeadDim = Annotated[
    int, typer.Option("--head-dim", min=1, rich_help_panel=MODEL_OPTIONS, help="Number of channels of a head.")
]
Rounds = Annotated[
    int, typer.Option("--rounds", min=1, help="Times that everything is measured; the median of them is shown.")
]
Threads = Annotated[
    int,
    typer.Option(
        "--threads",
        min=0,
        show_default="as PyTorch is set",
        help="Number of CPU threads; 0 leaves PyTorch's number as it is.",
    ),
]

ModelShape = Annotated[
    str,
    typer.Option(
        "--shape",
        metavar="NAME",
        rich_help_panel=MODEL_OPTIONS,
        help="The model whose shape is taken, such as llama-3-8b, qwen3-4b or smollm-135m.",
    ),
]
ModelLayers = Annotated[
    int,
    typer.Option(
        "--layers", min=0, rich_help_panel=MODEL_OPTIONS, help="Number of the model's layers to run; 0 runs all."
    ),
]
RandomWeights = Annotated[
    str,
    typer.Option(
        "--weights",
        metavar="FORMAT",
        rich_help_panel=MODEL_OPTIONS,
        help="Number format of the weights: int8 (on a CPU only), bfloat16 or float32.",
    ),
]


def _onnxruntime(value: str | None) -> str | None:
    if value is not None:
        if value != "onnxruntime":
            raise ValueError(f"--against {value!r} is unknown; known is onnxruntime")
        from ..bench.onnx_baseline import check_installed

        try:
            check_installed()
        except ValueError as error:
            raise ValueError(f"--against {error}") from None
    return value


@app.command()
def attention(
    method: Methods = None,
    length: Lengths = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Measure a grid instead of --method and --length: paper is SparQ's GPU grid, with --device cuda.",
        ),
    ] = None,
    rounds: Rounds = 15,
    threads: Threads = 0,
    batch: Annotated[
        int, typer.Option(min=1, rich_help_panel=MODEL_OPTIONS, help="Number of sequences that are decoded together.")
    ] = 1,
    heads: Annotated[int, typer.Option(min=1, rich_help_panel=MODEL_OPTIONS, help="Number of query heads.")] = 32,
    kv_heads: Annotated[
        int,
        typer.Option(
            min=0, rich_help_panel=MODEL_OPTIONS, show_default="as many as query heads", help="Number of KV heads."
        ),
    ] = 0,
    head_dim: HeadDim = 128,
    dtype: CacheDtype = "bfloat16",
    device: Device = "cpu",
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Show where the time of our steps goes: in every stage, per head; on a CPU."),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="NAME",
            callback=_onnxruntime,
            help="Time another library's dense attention too: onnxruntime, if it is installed; on a CPU.",
        ),
    ] = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Time one decode step of one attention layer, for every method and for PyTorch's dense attention.

    All candidates take turns, round after round, each round in another order. Before every call, of whichever
    candidate, the bench drives everything else out of the processor's caches, as a model's weights do. A call whose
    threads waited 100 µs and 1% of its time for a processor, because other processes used it, does not count. Beside
    the times stand the bytes that a step reads and the memory bandwidth that was measured meanwhile.

    Example:

        skimkv bench attention --length 16384 --method 'SparQ(r=32, k=128)' --plot speed.png
    """
    if sweep not in (None, "paper") or (sweep and (not device.startswith("cuda") or method or length)):
        raise ValueError(f"--sweep {sweep}: only paper is known, with --device cuda and neither --method nor --length")
    if profile and (sweep or not device.startswith("cpu")):
        raise ValueError("--profile: it is measured with --device cpu only, and without --sweep")
    if against and (sweep or not device.startswith("cpu")):
        raise ValueError(f"--against {against}: it is measured with --device cpu only, and without --sweep")
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        raise ValueError(f"--heads {heads} must be a multiple of --kv-heads {kv_heads}")
    methods, machine = _methods(method or METHODS), _machine(device, threads)
    from ..bench import attention as bench
    from ..bench import figures
    from ..stores.base import Shape

    shape, numbers = Shape(batch, kv_heads, heads // kv_heads, head_dim), torch_dtype(dtype)
    with _progress() as tick:
        if sweep:
            result = bench.sweep(machine, shape, numbers, rounds, tick)
        else:
            result = bench.attention(
                machine, shape, length or LENGTHS, methods, numbers, rounds, tick, profile, against
            )
    if not result["rows"]:
        raise ValueError(f"nothing fits in memory: {'; '.join(result['skipped'])}")
    if not sweep:
        result["faster_from"] = bench.faster_from(result["rows"])
    if plot is not None:
        (figures.sweep if sweep else figures.attention)(result["rows"], plot)
    if as_json:
        output.print_json(result)
        return
    columns = ["method", *(["batch"] if sweep else []), "length", "ms", "ms_min", "ms_max", "bytes_predicted"]
    columns += ["gb_per_s", "share_of_peak", "speedup_dense", "speedup_torch", "speedup_theory"]
    title = f"one decode step of a layer: batch {batch}, {heads} heads on {kv_heads}, head size {head_dim}, {dtype}"
    _print_table(result, columns, title)
    _print_kept(result, rounds)
    if profile:
        title = f"microseconds of one thread per head and stage ({machine.threads} threads for {kv_heads} heads)"
        _print_table({**result, "rows": result["stages"]}, ["method", "length", *STAGES], title)
    for line in result["skipped"]:
        print(f"skipped: {line}")
    if not sweep:
        for row in (row for row in result["rows"] if row["best_of_torch"]):
            print(f"PyTorch's best at {row['length']} tokens: {row['method'].removeprefix('torch:')}")
    for name, n in result["crossover"].items():
        if name != "Dense()":
            reads = f"fewer bytes than dense from about {n} tokens on" if n else "never fewer bytes than dense"
            print(f"{name}: {reads}{_faster(result, name)}")


def _gguf_file(value: Path | None) -> Path | None:
    if value is not None:
        check_readable("--model", value)
        if value.suffix != ".gguf":
            raise ValueError(f"--model {value}: give a GGUF file; for random weights of a model's shape give --shape")
    return value


def _programs(values: list[str] | None) -> list[str] | None:
    for text in values or ():
        kind, _, path = text.partition("=")
        if kind not in RIVALS or not path:
            raise ValueError(f"--against {text!r} must be llama.cpp=PATH or fork=PATH, the path of a llama-bench")
        if not Path(path).is_file() or not os.access(path, os.X_OK):
            raise ValueError(f"--against {text}: {path} is no program that can be run")
    return values


@app.command()
def token(
    context: typer.Context,
    method: Methods = None,
    length: Lengths = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of tokens timed; their median is shown.")] = 9,
    threads: Threads = 0,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the model around our attention; with --device cuda only.")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=_gguf_file,
            rich_help_panel=MODEL_OPTIONS,
            show_default="random weights",
            help="A GGUF file whose model is timed with its own weights, in the place of a random one; on a CPU only.",
        ),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=PATH",
            callback=_programs,
            help="Time another program on the same GGUF file, in turn with ours: llama.cpp=PATH of a llama-bench, "
            "fork=PATH of the llama-bench of the SparQ authors' llama.cpp. May be given several times.",
        ),
    ] = None,
    shape: ModelShape = "llama-2-7b",
    layers: ModelLayers = 8,
    weights: RandomWeights = "int8",
    device: Device = "cpu",
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Time whole decoded tokens of a model, for every method and for transformers' own cache and attention.

    The model has random weights, or those of a GGUF file, and a cache of random tokens. All candidates take turns,
    token by token, each round in another order. A token during which threads waited 100 µs and 1% of its time for a
    processor does not count. Beside the times stand the bytes that a token reads, and the time that memory needs for
    them at least.

    Example:

        skimkv bench token --shape smollm-135m --layers 0 --weights bfloat16 --method 'SparQ(r=16, k=128)'
        skimkv bench token --model llama.gguf --length 16384 --against llama.cpp=bin/llama-bench
    """
    from ..bench.shapes import check_model

    weights = DTYPES.get(weights, weights)
    check_model(shape, weights)
    if compile and not device.startswith("cuda"):
        raise ValueError("--compile: it is measured with --device cuda only")
    for option in ("shape", "layers", "weights"):
        if model is not None and getattr(context.get_parameter_source(option), "name", None) != "DEFAULT":
            raise ValueError(f"--{option}: a GGUF file has its own; give either --model or --{option}")
    if model is not None and not device.startswith("cpu"):
        raise ValueError(f"--model {model}: quantised weights run on a CPU only, not on --device {device}")
    if against and model is None:
        raise ValueError("--against: give --model FILE.gguf as well, which both read")
    specs = _methods(method or (RIVAL_METHODS if against else METHODS))
    machine = _machine(device, threads)
    from ..bench import figures
    from ..bench import token as bench

    lengths = length or LENGTHS
    with _progress() as tick:
        if model is None:
            result = bench.token(machine, shape, layers or None, weights, lengths, specs, rounds, tick, compile)
        else:
            subject = bench.gguf_subject(model)
            paths = {kind: Path(path) for kind, _, path in (text.partition("=") for text in against or ())}
            result = bench.time_tokens(machine, subject, lengths, specs, rounds, tick, against=paths)
            shape, weights = model.name, subject.weights
    if plot is not None:
        (figures.rivals if against else figures.token)(result["rows"], plot)
    if as_json:
        output.print_json(result)
        return
    if against:
        _print_rivals(result, f"a whole token: {shape}, {weights} weights", rounds)
        return
    columns = ["method", "length", "ms", "ms_attention", "ms_weights", "floor_ms", "bytes_read", "weight_bytes"]
    columns += ["speedup_dense", "speedup_allowed", "speedup_transformers"]
    layers_run = output.number(result["rows"][0]["layers"], "layer")
    _print_table(result, columns, f"a whole token: {shape}, {layers_run}, {weights} weights")
    _print_kept(result, rounds)
    _print_interleaved(result["rows"])


def _print_rivals(result: Mapping[str, Any], title: str, rounds: int) -> None:
    """Print our rows and those of other programs; of llama.cpp's settings the better one is in the table."""
    rows = result["rows"]
    shown = [row for row in rows if row["better"] or not row["method"].startswith("llama.cpp")]
    columns = ["method", "length", "ms", "ms_min", "ms_max", "speedup_dense"]
    for row in shown:
        better = next((r["method"] for r in rows if r["better"] and r["length"] == row["length"]), None)
        row["speedup_llama.cpp"] = row["speedup_rivals"].get(better)
        row["speedup_fork"] = row["speedup_rivals"].get("fork SparQ(r=32, k=128)")
    columns += [name for name in ("speedup_llama.cpp", "speedup_fork") if shown[0][name] is not None]
    _print_table({**result, "rows": shown}, columns, title)
    _print_kept(result, rounds)
    for row in rows:
        if row not in shown:
            print(f"{row['method']} at {row['length']} tokens took {_milliseconds(row['ms'])} ms: the other is better.")
    print("Our caches, and those of the fork, were filled without reading a prompt; llama-bench read one, unless it")
    print("was built to fill its cache too (benchmarks/llama_bench_fill.h).")
    _print_interleaved(rows)


def _print_interleaved(rows: Sequence[Mapping[str, Any]]) -> None:
    """Say so if the candidates of a length were not measured in turn."""
    if not all(row["interleaved"] for row in rows):
        print(
            "The candidates were measured one after the other: their caches do not fit in memory together, or the "
            "model is compiled."
        )


def _check_lengths(values: list[str] | None) -> list[str] | None:
    for text in values or ():
        prompt, _, new = text.partition("+")
        if not (prompt.isdecimal() and new.isdecimal() and int(prompt) and int(new)):
            raise ValueError(f"--length {text!r} must be tokens of a prompt + new tokens, such as 512+1024")
    return values


def _pairs(lengths: Sequence[str]) -> list[tuple[int, int]]:
    """The tokens of a prompt and the new tokens, for each of these texts."""
    return [(int(prompt), int(new)) for prompt, _, new in (text.partition("+") for text in lengths)]


def _lengths_option(default: Sequence[str]) -> Any:
    """Make the option for prompts and answers of several lengths."""
    return typer.Option(
        "--length", metavar="P+N", callback=_check_lengths, show_default=" and ".join(default),
        help="Tokens of a prompt, and new tokens after it. May be given several times.",
    )  # fmt: skip


@app.command()
def generate(
    method: Methods = None,
    length: Annotated[list[str] | None, _lengths_option(GENERATED_LENGTHS)] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Times that everything is generated.")] = 3,
    threads: Threads = 0,
    shape: ModelShape = "smollm-135m",
    layers: ModelLayers = 8,
    weights: RandomWeights = "bfloat16",
    device: Device = "cpu",
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Time a prompt and its answer through generate(), for every method and for transformers alone.

    The model has random weights, and the prompt is random. Every candidate runs what a user runs: `model.generate()`,
    for ours after `attach(model, method)`. All take turns, generation by generation. The time to the first token is
    that of the prompt; the memory is what the cache has allocated at the end.

    Example:

        skimkv bench generate --shape smollm-135m --layers 0 --length 4096+64 --method 'SparQ(r=16, k=128)'
    """
    from ..bench.shapes import check_model

    weights = DTYPES.get(weights, weights)
    check_model(shape, weights)
    pairs = _pairs(length or GENERATED_LENGTHS)
    if min(new for _, new in pairs) < 2:
        raise ValueError("--length P+N: N must be at least 2, because the first new token is timed with the prompt")
    methods, machine = _methods(method or METHODS), _machine(device, threads)
    from ..bench import figures
    from ..bench.generate import generate as measure

    with _progress() as tick:
        result = measure(machine, shape, layers or None, weights, pairs, methods, rounds, tick)
    rows = result["rows"]
    if plot is not None:
        figures.generate(rows, plot)
    if as_json:
        output.print_json(result)
        return
    columns = ["method", "prompt", "new", "first_ms", "first_speedup", "ms_later", "speedup_transformers"]
    shown = {**result, "rows": [{**row, "ms_later": row["ms"], "length": row["prompt"]} for row in rows]}
    layers_run = output.number(rows[0]["layers"], "layer")
    title = f"a prompt and its answer: {shape}, {layers_run}, {weights} weights"
    _print_table(shown, [*columns, "tokens_per_s", "allocated"], title)
    _print_kept({**shown, "peak": machine.peak}, rounds)


@app.command()
def serve(
    method: Annotated[
        list[str] | None, methods_option("H2O, LMInfinite and SubGen")
    ] = None,
    length: Annotated[list[str] | None, _lengths_option(SERVED_LENGTHS)] = None,
    memory: Annotated[str, size_option("The memory that the caches of each method may take, such as 5M or 2G.")] = "5M",
    threads: Threads = 0,
    shape: ModelShape = "smollm-135m",
    layers: ModelLayers = 8,
    weights: RandomWeights = "bfloat16",
    device: Device = "cpu",
    out: Annotated[
        Path | None,
        output_file("File of records (JSON Lines) to add to; what it holds already is not measured again."),
    ] = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Measure the tokens per second of the largest batch whose caches fit into one memory, for every method.

    A cache that is smaller makes room for more sequences, which share the reading of the weights (H2O, tables 2, 3 and
    7). Beside it stands the latency at dense attention's batch. All candidates take turns, step by step. Without
    --method, each method keeps a fifth of all tokens of a sequence, H2O with and without 4-bit rows.

    Example:

        skimkv bench serve --length 128+256 --memory 5M --out serve.jsonl --plot serve.png
    """
    from ..bench.shapes import check_model

    weights = DTYPES.get(weights, weights)
    check_model(shape, weights)
    methods, machine = _methods(method or []), _machine(device, threads)
    from ..bench import figures
    from ..bench.serve import serve as measure

    lengths = _pairs(length or SERVED_LENGTHS)
    limit = number_of_bytes("--memory", memory)
    with _progress() as tick:
        result = measure(machine, shape, layers or None, weights, lengths, limit, methods, out, tick)
    if plot is not None:
        figures.serve(result["rows"], plot)
    if as_json:
        output.print_json(result)
        return
    columns = [
        "method",
        "prompt",
        "new",
        "batch",
        "tokens_per_s",
        "ratio_dense",
        "ms_per_step",
        "prompt_s",
        "latency_s",
    ]
    rows, model = result["rows"], f"{shape}, {output.number(result['rows'][0]['layers'], 'layer')}, {weights} weights"
    for equal, title in (("memory", f"caches within {limit:,} bytes"), ("batch", "dense attention's batch")):
        part = {**result, "rows": [row for row in rows if row["equal"] == equal]}
        more = ["allocated"] if equal == "memory" else []
        _print_table(part, [*columns, *more], f"{title}: {model}")


@app.command()
def memory(
    method: MemoryMethods = None,
    length: Lengths = None,
    heads: Annotated[int, typer.Option(min=1, rich_help_panel=MODEL_OPTIONS, help="Number of KV heads.")] = 8,
    group: Annotated[
        int, typer.Option(min=1, rich_help_panel=MODEL_OPTIONS, help="Number of query heads that share a KV head.")
    ] = 4,
    head_dim: HeadDim = 64,
    dtype: CacheDtype = "bfloat16",
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Measure what the cache of one layer holds, has allocated, and adds to the peak memory of a process.

    Each size is measured in a process of its own, which reads a prompt in blocks and decodes one token.

    Example:

        skimkv bench memory --length 32768 --method 'Dense()' --method 'H2O(k=512)'
    """
    from ..bench import figures
    from ..bench.memory import memory as measure
    from ..stores.base import Shape

    methods, shape = _methods(method or MEMORY_METHODS), Shape(1, heads, group, head_dim)
    with _progress() as tick:
        result = measure(shape, length or LENGTHS, methods, torch_dtype(dtype), tick)
    setting = f"{heads} KV heads of {head_dim}, {dtype}"
    if plot is not None:
        figures.memory(result["rows"], plot, setting)
    if as_json:
        output.print_json(result)
        return
    columns = ["method", "length", "nbytes", "allocated", "peak_rss_growth"]
    _print_table(result, columns, f"memory of a layer: {setting}")


def _methods(specs: Sequence[str]) -> list[str]:
    """Return the specs as methods print themselves. Raises ValueError if one is wrong."""
    from ..methods import parse

    return [repr(parse(spec)) for spec in specs]


def _machine(device: str, threads: int) -> Machine:
    """Set PyTorch's threads, and return the machine to measure. Raises ValueError if it is not there."""
    import torch

    from ..bench.machine import machine_for

    if threads:
        torch.set_num_threads(threads)
    if device.startswith("mps"):
        return machine_for(torch.device(device))  # which says what benchmarks run on
    return machine_for(resolve_device(device))


@contextmanager
def _progress() -> Iterator[Callable[[], None]]:
    """Show how many rounds were measured; yields what counts one more."""
    bar = output.progress_bar()
    bar.disable = not bar.console.is_terminal
    with bar:
        task = bar.add_task("measuring", total=None)
        yield lambda: bar.advance(task)


def _print_table(result: Mapping[str, Any], columns: Sequence[str], title: str) -> None:
    """Print these columns of the rows, and below them the machine, with its bandwidth if that was measured."""
    table = output.table(title, *(COLUMNS[name][0] for name in columns))
    table.columns[0].no_wrap = True
    for row in result["rows"]:
        table.add_row(*(COLUMNS[name][1](row[name]) for name in columns))
    table.caption = result["machine"]
    if "peak" in result:
        does = "copies" if result["peak"] == "copy" else "reads"
        table.caption += f"; {does} {result['peak_gb_per_s']:.1f} GB/s at best"
    output.console(160).print(table)


def _print_kept(result: Mapping[str, Any], rounds: int) -> None:
    """Say how many calls count, and what those are that do not; nothing for a GPU, which is not shared."""
    rows = result["rows"]
    if not result["waits_known"]:
        if result["peak"] == "read":
            print("This system does not tell how long threads wait for a processor: all calls count.")
        return
    kept = sum(row["kept"] for row in rows)
    print(f"{kept} of {len(rows) * rounds} calls count: their threads waited less than 100 µs, or 1%, for a processor.")
    for row in rows:
        if not row["kept"]:
            where = f"{row['method']} at {row['length']} tokens"
            print(f"{where}: no call was undisturbed, and its times are those of all calls; use an idle machine")


def _faster(result: Mapping[str, Any], name: str) -> str:
    if name not in result.get("faster_from", ()):
        return ""
    n = result["faster_from"][name]
    return f"; faster at every length measured from {n} on" if n else "; not faster at the longest length measured"
