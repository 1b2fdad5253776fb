"""`skimkv roofline`: what a method can gain on a machine that one does not have, from bytes and data sheets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..hf.load import DTYPES
from . import options, output
from .bench.common import METHODS, Methods

if TYPE_CHECKING:
    from ..bench.roofline import DecodeStep
    from ..bench.shapes import Hardware, ModelReads

LENGTHS = [4096, 16384, 65536]
HARDWARE = ["a100", "h100", "a10"]


def roofline(
    method: Methods = None,
    hardware: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            show_default=", ".join(HARDWARE),
            help="A machine: a100, a100-80, h100, h100-pcie, h200, a10, ipu; or here, which measures this processor "
            "in a second. May be given several times.",
        ),
    ] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            show_default=", ".join(map(str, LENGTHS)),
            help="Number of tokens in the cache. May be given several times.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Number of sequences that are decoded together.")] = 1,
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            rich_help_panel=options.MODEL_OPTIONS,
            help="The model: a name such as llama-3-8b, builtin, a folder with a config.json, or a GGUF file.",
        ),
    ] = "llama-2-7b",
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            rich_help_panel=options.MODEL_OPTIONS,
            help="Sizes instead of --model, separated by commas: hidden, intermediate, heads, kv_heads, layers, "
            "vocabulary and, where it is not hidden / heads, head_dim.",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            rich_help_panel=options.MODEL_OPTIONS,
            show_default="bfloat16, or as a GGUF file has them",
            help="Number format of the weights: int4, int8, bfloat16, float16 or float32.",
        ),
    ] = None,
    cache: Annotated[
        str,
        typer.Option(
            metavar="DTYPE",
            callback=options.check_dtype,
            rich_help_panel=options.MODEL_OPTIONS,
            help="Number format of keys and values: bfloat16, float16 or float32.",
        ),
    ] = "bfloat16",
    plot: options.Plot = None,
    as_json: options.Json = False,
) -> None:
    """Compute how fast a decode step can be at best, and how much time a method can save.

    A step must read the weights and a part of the cache that depends on the method, and must compute with both. Its
    time is the larger of the time for memory and the time for arithmetic. No model runs: the bytes follow from the
    sizes, and a machine's peak speeds come from its data sheet. Where the bytes of a method depend on the data, as with
    Skim, the command takes the largest number that is expected.

    Example:

        skimkv roofline --model llama-3-8b --hardware h100 --length 16384 --weights int8
    """
    names = list(dict.fromkeys(hardware or HARDWARE))
    from_file = weights is None and sizes is None and model.endswith(".gguf")
    weights = None if from_file else DTYPES.get(weights or "bfloat16", weights)
    _check(names, weights)
    reads, weights_name = _model(model, sizes)
    weights_name = weights_name if weights is None else weights
    from ..bench import roofline as bench
    from ..bench.shapes import HARDWARE as KNOWN
    from ..methods import Dense, parse
    from ..stores.base import Shape

    dtype, setting = options.torch_dtype(cache), f"{reads.name}, batch {batch}, weights {weights_name}, cache {cache}"
    methods = list(dict.fromkeys([Dense(), *map(parse, method or METHODS)]))
    for spec in methods:
        with options.named(f"{spec} does not fit {reads.name}: "):
            spec.store(Shape(1, reads.H, reads.G, reads.D), dtype)
    places = [bench.measure_cpu() if name == "here" else KNOWN[name] for name in names]

    def steps_of(place: Hardware, n: int) -> list[DecodeStep]:
        """The steps of all methods after n tokens; the first method is dense."""
        return [bench.decode_step(place, reads, method, n, batch, weights, dtype) for method in methods]

    rows = [
        _row(place, step, steps[0])
        for place in places
        for steps in [steps_of(place, n) for n in sorted(dict.fromkeys(length or LENGTHS))]
        for step in steps
    ]
    facts = [
        {
            "name": place.name,
            "bytes_per_s": place.bandwidth,
            "memory_bytes": place.memory,
            "source": place.source,
            "multiply_adds_per_s": place.peak.get(dtype.itemsize, place.peak[2]),
            "half_at": bench.crossing(place, reads, batch, weights, dtype),
        }
        for place in places
    ]
    if plot is not None:
        from ..bench import figures

        lengths = [round(2 ** (i / 4)) for i in range(32, 73)]  # from 2^8 to 2^18 tokens
        dense, *others = zip(*(steps_of(places[0], n) for n in lengths), strict=True)
        curves = [
            (
                line[0].method,
                lengths,
                [step.share for step in line],
                [d.seconds / s.seconds for d, s in zip(dense, line, strict=True)],
            )
            for line in (dense, *others)
        ]
        figures.roofline(facts, curves, rows, setting, plot)
    if as_json:
        output.print_json(
            {
                "model": reads._asdict(),
                "batch": batch,
                "weights": weights_name,
                "cache": cache,
                "hardware": facts,
                "rows": rows,
                "figure": None if plot is None else str(plot),
            }
        )
        return
    _print_tables(rows, facts, setting, reads)
    if plot is not None:
        print(f"Figure: {plot}")


def _check(hardware: Sequence[str], weights: str | None) -> None:
    """Raises ValueError if a machine or the format of the weights is unknown."""
    from ..bench.shapes import HARDWARE as KNOWN
    from ..bench.shapes import WEIGHT_BYTES

    if weights is not None and weights not in WEIGHT_BYTES:
        raise ValueError(f"--weights {weights!r} is unknown; known: {', '.join(WEIGHT_BYTES)}")
    for name in hardware:
        if name != "here" and name not in KNOWN:
            raise ValueError(f"--hardware {name!r} is unknown; known: {', '.join(KNOWN)}, here")


def _model(name: str, sizes: str | None) -> tuple[ModelReads, str]:
    """What a step of the model reads, and the types of a GGUF file's weights, "" for another model.

    Raises ValueError if there is no such model, or if the sizes fit none.
    """
    from ..bench.shapes import FIELDS, MODELS, reads_of_folder, reads_of_gguf, reads_of_sizes

    if sizes is not None:
        try:
            numbers = [int(x) for x in sizes.split(",")]
        except ValueError:
            raise ValueError(f"--sizes {sizes!r} must be numbers, {FIELDS}[,head_dim]") from None
        with options.named(f"--sizes {sizes}: "):
            return reads_of_sizes(f"sizes {sizes}", numbers), ""
    if name in MODELS:
        return reads_of_sizes(name, MODELS[name]), ""
    if name == "builtin":
        from ..hf.load import BUILTIN

        return reads_of_folder(BUILTIN)._replace(name=name), ""
    if name.endswith(".gguf"):
        options.check_model(name)
        with options.named("--model "):
            return reads_of_gguf(Path(name))
    if Path(name).is_dir():
        return reads_of_folder(Path(name)), ""
    raise ValueError(
        f"--model {name!r} is unknown: give builtin, a folder with a config.json, a GGUF file, or {', '.join(MODELS)}"
    )


def _row(place: Hardware, step: DecodeStep, dense: DecodeStep) -> dict[str, Any]:
    """The row of a step; dense: that of dense attention after as many tokens."""
    return {
        "hardware": place.name,
        "method": step.method,
        "length": step.length,
        "ms": step.seconds * 1e3,
        "ms_attention": step.attention * 1e3,
        "share_attention": step.share,
        "speedup": dense.seconds / step.seconds,
        "speedup_attention": dense.attention / step.attention,
        "intensity": step.intensity,
        "bound": "memory" if step.memory_bound else "compute",
        "held_bytes": step.held_bytes,
        "fits": None if place.memory is None else step.held_bytes <= place.memory,
    }


def _print_tables(
    rows: Sequence[dict[str, Any]], facts: Sequence[dict[str, Any]], setting: str, model: ModelReads
) -> None:
    """Print a table with a part for each machine, and a sentence about each of them."""
    columns = ("method", "tokens", "ms", "in attention", "speed-up", "of attention", "limit", "GB held")
    table, last = output.table(f"a decode step at best; {setting}", *columns), None
    table.columns[0].min_width = 24
    for row in rows:
        if row["hardware"] != last:
            last = row["hardware"]
            table.add_section()
            table.add_row(f"[bold]{last}[/]")
        table.add_row(
            row["method"],
            f"{row['length']:,}",
            output.three_digits(row["ms"]),
            f"{row['share_attention']:.0%}",
            f"{row['speedup']:.2f} ×",
            f"{row['speedup_attention']:.2f} ×",
            row["bound"],
            output.three_digits(row["held_bytes"] / 1e9) + ("" if row["fits"] in (None, True) else ", too much"),
        )
    output.print_table(table, 132)
    console = output.console(132)
    for fact in facts:
        half = f"from {fact['half_at']:,} tokens on" if fact["half_at"] else "at no length up to 2^24"
        console.print(
            f"{fact['name']}: {_with_unit(fact['bytes_per_s'])}B/s, {_with_unit(fact['multiply_adds_per_s'])} "
            f"multiply-adds/s ({fact['source']}); dense attention is half of a step {half}.",
            soft_wrap=True,
        )
    if model.sliding:
        console.print(f"{model.sliding} of {model.layers} layers see only the last {model.window} tokens.")


def _with_unit(x: float) -> str:
    """A number in thousands of millions (G), or in millions of millions (T)."""
    return f"{x / 1e12:.3g} T" if x >= 1e12 else f"{x / 1e9:.3g} G"
