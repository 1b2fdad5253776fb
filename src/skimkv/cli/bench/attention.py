"""`skimkv bench attention`: one decode step of one attention layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from .. import options, output
from . import common
from .table import STAGES, print_kept, print_table, progress


def _check_against(value: str) -> None:
    if value != "onnxruntime":
        raise ValueError(f"--against {value!r} is unknown; known is onnxruntime")
    from ...bench.onnx_baseline import check_installed

    with options.named("--against "):
        check_installed()


def attention(
    method: common.Methods = None,
    length: common.Lengths = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Measure a grid instead of --method and --length: paper is SparQ's GPU grid, with --device cuda.",
        ),
    ] = None,
    rounds: common.Rounds = 15,
    threads: common.Threads = 0,
    batch: Annotated[
        int,
        typer.Option(
            min=1, rich_help_panel=options.MODEL_OPTIONS, help="Number of sequences that are decoded together."
        ),
    ] = 1,
    heads: Annotated[
        int, typer.Option(min=1, rich_help_panel=options.MODEL_OPTIONS, help="Number of query heads.")
    ] = 32,
    kv_heads: Annotated[
        int,
        typer.Option(
            min=0,
            rich_help_panel=options.MODEL_OPTIONS,
            show_default="as many as query heads",
            help="Number of KV heads.",
        ),
    ] = 0,
    head_dim: common.HeadDim = 128,
    dtype: common.CacheDtype = "bfloat16",
    device: options.Device = "cpu",
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Show where the time of our steps goes: in every stage, per head; on a CPU."),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="NAME",
            callback=options.checked(_check_against),
            help="Time another library's dense attention too: onnxruntime, if it is installed; on a CPU.",
        ),
    ] = None,
    plot: options.Plot = None,
    as_json: options.Json = False,
) -> None:
    """Time one decode step of one attention layer, for every method and for PyTorch's dense attention.

    All candidates take turns, round after round, each round in another order. Before every call, of whichever
    candidate, the bench drives everything else out of the processor's caches, as a model's weights do. A call whose
    threads waited 100 µs and 1% of its time for a processor, because other processes used it, does not count. Beside
    the times stand the bytes that a step reads and the memory bandwidth that was measured meanwhile.

    Example:

        skimkv bench attention --length 16384 --method 'Skim(k=128)' --plot speed.png
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
    methods, machine = common.canonical_methods(method or common.METHODS), common.machine_to_measure(device, threads)
    from ...bench import attention as bench
    from ...bench import figures
    from ...stores.base import Shape

    shape, numbers = Shape(batch, kv_heads, heads // kv_heads, head_dim), options.torch_dtype(dtype)
    with progress() as tick:
        if sweep:
            result = bench.sweep(machine, shape, numbers, rounds, tick)
        else:
            result = bench.attention(
                machine, shape, length or common.LENGTHS, methods, numbers, rounds, tick, profile, against
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
    print_table(result, columns, title)
    print_kept(result, rounds)
    if profile:
        title = f"microseconds of one thread per head and stage ({machine.threads} threads for {kv_heads} heads)"
        print_table({**result, "rows": result["stages"]}, ["method", "length", *STAGES], title)
    for line in result["skipped"]:
        print(f"skipped: {line}")
    if not sweep:
        for row in (row for row in result["rows"] if row["best_of_torch"]):
            print(f"PyTorch's best at {row['length']} tokens: {row['method'].removeprefix('torch:')}")
    for name, n in result["crossover"].items():
        if name != "Dense()":
            reads = f"fewer bytes than dense from at most about {n} tokens on" if n else "never fewer bytes than dense"
            print(f"{name}: {reads}{_faster(result, name)}")


def _faster(result: Mapping[str, Any], name: str) -> str:
    if name not in result.get("faster_from", ()):
        return ""
    n = result["faster_from"][name]
    return f"; faster at every length measured from {n} on" if n else "; not faster at the longest length measured"
