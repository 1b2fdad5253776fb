"""`skimkv bench attention | token | memory`: a card for people, one JSON line with --json, a figure with --plot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

app = typer.Typer(help="Speed and memory, against what the machine's memory allows.", no_args_is_help=True)

SPARQ = "SparQ(r=32, k=128)"
METHODS = ["Dense()", SPARQ, SPARQ[:-1] + ", channels='int8')", SPARQ[:-1] + ", channels='int4')"]
Methods = Annotated[list[str] | None, typer.Option("--method", help="A method's spec; several times.")]
Lengths = Annotated[list[int] | None, typer.Option("--length", help="Cached tokens; several times.")]
Threads = Annotated[int, typer.Option(help="Threads; 0: as PyTorch is set.")]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON instead.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Plot = Annotated[Path | None, typer.Option(help="Save a figure here.")]


def _positive(name: str, *values: int) -> None:
    for value in values:
        if value < 1:
            raise ValueError(f"{name} = {value} must be at least 1")


def _figure(plot: Path | None) -> None:
    if plot is not None and not plot.absolute().parent.is_dir():
        raise ValueError(f"--plot {plot}: there is no folder {plot.parent}")


def _dtype(name: str) -> Any:
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ValueError(f"unknown dtype {name!r}; known: {', '.join(known)}")
    return known[name]


def _threads(threads: int) -> None:
    import torch

    if threads < 0:
        raise ValueError(f"threads = {threads} must be at least 0")
    if threads:
        torch.set_num_threads(threads)


def _cuda(device: str) -> Any:
    """The GPU to measure, or None for cpu. Raises ValueError if there is none."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device {device}: it must be cpu or cuda")
    if device == "cpu":
        return None
    from ..bench.cuda import Cuda

    return Cuda()


@contextmanager
def _progress(what: str) -> Iterator[Callable[[], None]]:
    bar = Progress(
        SpinnerColumn(),
        TextColumn(what),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda: bar.advance(task)


def _card(result: dict[str, Any], columns: dict[str, str], title: str) -> None:
    """One table; columns: key of a row -> format."""
    does = "copies" if result.get("peak") == "copy" else "reads"
    peak = f"{does} {result.get('peak_gb_per_s', 0):.1f} GB/s at best"
    table = Table(title=title, caption=f"{result['machine']}; {peak}")
    for name in columns:
        table.add_column(name.replace("_", " "), justify="left" if name == "method" else "right", overflow="fold")
    for row in result["rows"]:
        table.add_row(*(format(row[name], form) for name, form in columns.items()))
    from .show import wide

    wide(150).print(table)


def _faster_from(rows: list[dict[str, Any]]) -> dict[str, int | None]:
    """The shortest measured length from which on a method was always faster than our dense attention, or None."""
    found: dict[str, int | None] = {}
    ours = [row["method"] for row in rows if row["backend"] != "torch" and row["method"] != "Dense()"]
    for name in dict.fromkeys(ours):
        line = [(row["length"], row["speedup_dense"] > 1) for row in rows if row["method"] == name]
        slow = max((n for n, faster in line if not faster), default=0)
        found[name] = min((n for n, _ in line if n > slow), default=None)
    return found


def _faster(result: dict[str, Any], name: str) -> str:
    if name not in result.get("faster_from", ()):
        return ""
    n = result["faster_from"][name]
    return f"; faster in all that was measured from {n} on" if n else "; at the longest length measured not faster"


@app.command()
def attention(
    method: Methods = None,
    length: Lengths = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="KV heads; 0: as many as query heads.")] = 0,
    head_dim: Annotated[int, typer.Option(help="Head size.")] = 128,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    rounds: Annotated[int, typer.Option(help="Rounds over all candidates.")] = 15,
    threads: Threads = 0,
    device: Device = "cpu",
    sweep: Annotated[str | None, typer.Option(help="paper: SparQ on the grid of its GPU tables, with cuda.")] = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """One decode step of attention: every method, beside PyTorch's dense paths and the measured bandwidth."""
    from ..bench import attention as bench
    from ..bench import attention_gpu as bench_gpu
    from ..stores.base import Shape

    if sweep not in (None, "paper") or (sweep and (device != "cuda" or method or length)):
        raise ValueError(f"--sweep {sweep}: only paper is known, with --device cuda and neither --method nor --length")
    _figure(plot)
    machine = _cuda(device)

    kv, lengths, methods = kv_heads or heads, length or [4096, 16384], method or METHODS
    _positive("batch, heads, kv-heads, head-dim, rounds and length", batch, heads, kv, head_dim, rounds, *lengths)
    if heads % kv:
        raise ValueError(f"heads = {heads} must be a multiple of kv-heads = {kv}")
    _threads(threads)
    shape = Shape(batch, kv, heads // kv, head_dim)
    with _progress("timing") as tick:
        if sweep:
            result = bench_gpu.sweep(shape, _dtype(dtype), rounds, tick, machine)
        elif machine:
            result = bench_gpu.attention(shape, lengths, methods, _dtype(dtype), rounds, tick, machine)
        else:
            result = bench.attention(shape, lengths, methods, _dtype(dtype), rounds, tick)
    if not result["rows"]:
        raise ValueError(f"nothing fits in the GPU's memory: {'; '.join(result['skipped'])}")
    if not sweep:
        result["faster_from"] = _faster_from(result["rows"])
    if plot is not None:
        from ..bench.figures_gpu import sweep as swept
        from ..bench.figures_sweeps import speedup

        (swept if sweep else speedup)(result["rows"], plot)
    if as_json:
        print(json.dumps(result))
        return
    shown = {"method": "", "length": "", "ms": ".3f", "ms_min": ".3f", "ms_max": ".3f", "bytes_predicted": ","}
    shown |= {"gb_per_s": ".1f", "share_of_peak": ".0%"}
    if sweep:
        shown = {"batch": "", **shown}
    shown |= {"speedup_dense": ".2f", "speedup_torch": ".2f", "speedup_theory": ".2f"}
    _card(result, shown, f"attention, batch {batch}, {heads} heads on {kv}, head size {head_dim}, {dtype}")
    for line in result.get("skipped", ()):
        print(f"skipped: {line}")
    for row in result["rows"]:
        if row["best_of_torch"] and not sweep:
            print(f"PyTorch's best at {row['length']} tokens: {row['method'].removeprefix('torch:')}")
    for name, n in result["crossover"].items():
        if name != "Dense()":
            bytes_ = f"fewer bytes than dense from about {n} tokens on" if n else "never fewer bytes than dense"
            print(f"{name}: {bytes_}{_faster(result, name)}")


@app.command()
def token(
    method: Methods = None,
    length: Lengths = None,
    shape: Annotated[str, typer.Option(help="Of which model: llama-2-7b, llama-3-8b, …")] = "llama-2-7b",
    layers: Annotated[int, typer.Option(help="How many of its layers; 0: all.")] = 8,
    weights: Annotated[str, typer.Option(help="int8, bfloat16 or float32.")] = "int8",
    rounds: Annotated[int, typer.Option(help="Tokens timed.")] = 9,
    threads: Threads = 0,
    device: Device = "cpu",
    compile: Annotated[bool, typer.Option("--compile", help="attach(compile=True), with cuda.")] = False,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """One whole token of a model with random weights and a random cache, and the floor that its bytes set."""
    from ..bench import token as bench_token

    if compile and device != "cuda":
        raise ValueError("--compile: it is measured with --device cuda only")
    _figure(plot)
    machine = _cuda(device)
    lengths, methods = length or [4096, 16384], method or METHODS
    if plot is not None and "Dense()" not in methods:
        raise ValueError(f"--plot {plot}: Dense() is not among the methods, there is nothing to compare with")
    _positive("rounds and length", rounds, *lengths)
    _threads(threads)
    with _progress("timing") as tick:
        if machine:
            from ..bench.token_gpu import token as whole

            result = whole(shape, layers or None, weights, lengths, methods, rounds, tick, machine, compile)
        else:
            result = bench_token.token(shape, layers or None, weights, lengths, methods, rounds, tick)
    if plot is not None:
        from ..bench.figures_sweeps import token as drawn

        drawn(result["rows"], plot)
    if as_json:
        print(json.dumps(result))
        return
    shown = {"method": "", "length": "", "ms": ".1f", "ms_attention": ".1f", "ms_weights": ".1f", "floor_ms": ".1f"}
    shown |= {"cache_bytes": ",", "weight_bytes": ",", "speedup_transformers": ".2f"}
    _card(result, shown, f"token, {shape}, {result['rows'][0]['layers']} layers, {weights} weights")


@app.command()
def memory(
    method: Methods = None,
    length: Lengths = None,
    heads: Annotated[int, typer.Option(help="KV heads.")] = 8,
    group: Annotated[int, typer.Option(help="Query heads per KV head.")] = 4,
    head_dim: Annotated[int, typer.Option(help="Head size.")] = 64,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """What one layer's cache holds, has allocated, and adds to the process's peak, against its length."""
    from ..bench import token as bench_token
    from ..stores.base import Shape

    _figure(plot)
    lengths = length or [4096, 16384]
    _positive("heads, group, head-dim and length", heads, group, head_dim, *lengths)
    methods = method or [*METHODS, "H2O(k=512)", "LMInfinite(k=512)", "SubGen(k=448, recent=64)"]
    result = bench_token.memory(Shape(1, heads, group, head_dim), lengths, methods, _dtype(dtype))
    if plot is not None:
        from ..bench.figures_sweeps import memory as drawn

        drawn(result["rows"], plot, f"{heads} KV heads of {head_dim}, {dtype}")
    if as_json:
        print(json.dumps(result))
        return
    shown = {"method": "", "length": "", "nbytes": ",", "allocated": ",", "peak_rss_growth": ","}
    _card(result, shown, f"memory of a layer, {heads} KV heads of {head_dim}, {dtype}")
