"""`skimkv bench token`: whole decoded tokens of a model, beside transformers and other programs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import options, output
from . import common
from .table import milliseconds, print_interleaved, print_kept, print_table, progress

RIVAL_METHODS = common.METHODS[:3]


def token(
    context: typer.Context,
    method: common.Methods = None,
    length: common.Lengths = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of tokens timed; their median is shown.")] = 9,
    threads: common.Threads = 0,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the model around our attention; with --device cuda only.")
    ] = False,
    model: common.LoadedModel = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=PATH",
            callback=options.checked(common.check_program),
            help="Time another program on the same GGUF file, in turn with ours: llama.cpp=PATH of a llama-bench, "
            "fork=PATH of the llama-bench of the SparQ authors' llama.cpp. May be given several times.",
        ),
    ] = None,
    shape: common.ModelShape = "llama-2-7b",
    layers: common.ModelLayers = 8,
    weights: common.RandomWeights = "int8",
    device: options.Device = "cpu",
    plot: options.Plot = None,
    as_json: options.Json = False,
) -> None:
    """Time whole decoded tokens of a model, for every method and for transformers' own cache and attention.

    The model has random weights, or with --model its own, and a cache of random tokens. All candidates take turns,
    token by token, each round in another order. A token during which threads waited 100 µs and 1% of its time for a
    processor does not count. The table also shows the bytes that a token reads, and the shortest time in which the
    memory can deliver them.

    Example:

        skimkv bench token --shape smollm-135m --layers 0 --weights bfloat16 --method 'SparQ(r=16, k=128)'
        skimkv bench token --model Qwen/Qwen3-0.6B --weights int8
        skimkv bench token --model llama.gguf --length 16384 --against llama.cpp=bin/llama-bench
    """
    make_subject = common.subject_maker(context, model, shape, layers, weights, device)
    if compile and not device.startswith("cuda"):
        raise ValueError("--compile: it is measured with --device cuda only")
    if against and (model is None or not model.endswith(".gguf")):
        raise ValueError("--against: give --model FILE.gguf as well, which both read")
    specs = common.canonical_methods(method or (RIVAL_METHODS if against else common.METHODS))
    machine = common.machine_to_measure(device, threads)
    from ...bench import figures
    from ...bench import token as bench

    lengths = length or common.LENGTHS
    with progress() as tick:
        subject = make_subject(machine, max(lengths) + 1024)
        paths = {kind: Path(path) for kind, _, path in (text.partition("=") for text in against or ())}
        result = bench.time_tokens(machine, subject, lengths, specs, rounds, tick, compile, paths)
    title = f"a whole token: {common.name_for_people(subject.shape)}"
    if plot is not None:
        (figures.rivals if against else figures.token)(result["rows"], plot)
    if as_json:
        output.print_json(result)
        return
    if against:
        _print_rivals(result, f"{title}, {subject.weights} weights", rounds)
        return
    columns = ["method", "length", "ms", "ms_attention", "ms_weights"]
    if result["rows"][0]["ms_linear"] is not None:
        columns += ["ms_linear"]
    columns += ["floor_ms", "bytes_read", "weight_bytes", "speedup_dense", "speedup_allowed", "speedup_transformers"]
    layers_run = output.number(result["rows"][0]["layers"], "layer")
    print_table(result, columns, f"{title}, {layers_run}, {subject.weights} weights")
    print_kept(result, rounds)
    print_interleaved(result["rows"])


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
    print_table({**result, "rows": shown}, columns, title)
    print_kept(result, rounds)
    for row in rows:
        if row not in shown:
            print(f"{row['method']} at {row['length']} tokens took {milliseconds(row['ms'])} ms: the other is better.")
    print("Our caches, and those of the fork, were filled without reading a prompt; llama-bench read one, unless it")
    print("was built to fill its cache too (benchmarks/llama_bench_fill.h).")
    print_interleaved(rows)
