"""`skimkv roofline`: what a method can gain on a machine that one does not have, from bytes and data sheets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .bench import METHODS


def roofline(
    model: Annotated[str, typer.Option(help="llama-2-7b, …, builtin, or a folder with a config.json.")] = "llama-2-7b",
    sizes: Annotated[
        str | None, typer.Option(help="Instead: hidden,intermediate,heads,kv_heads,layers,vocabulary[,head_dim].")
    ] = None,
    hardware: Annotated[
        list[str] | None, typer.Option(help="a100, a100-80, h100, h100-pcie, h200, a10, ipu, here; may be repeated.")
    ] = None,
    method: Annotated[list[str] | None, typer.Option(help="'SparQ(r=32, k=128)'; may be repeated.")] = None,
    length: Annotated[list[int] | None, typer.Option(min=1, help="Cached tokens; may be repeated.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences decoded at once.")] = 1,
    weights: Annotated[str, typer.Option(help="int8, bfloat16, float16 or float32.")] = "bfloat16",
    cache: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    plot: Annotated[Path | None, typer.Option(help="Save a figure here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead.")] = False,
) -> None:
    """Arithmetic intensity, the share of a step that attention takes, and the speed-up a method can reach there."""
    from ..bench import roofline as roof
    from ..methods import Dense, parse
    from ..stores.base import Shape
    from .bench import _dtype

    dtype = _dtype(cache)
    if weights not in roof.WEIGHTS:
        raise ValueError(f"--weights {weights!r} is unknown; known: {', '.join(roof.WEIGHTS)}")
    if plot is not None and not plot.absolute().parent.is_dir():
        raise ValueError(f"--plot {plot}: there is no folder {plot.parent}")
    names = list(dict.fromkeys(hardware or ["a100", "h100", "a10"]))
    for name in names:
        if name != "here" and name not in roof.HARDWARE:
            raise ValueError(f"--hardware {name!r} is unknown; known: {', '.join(roof.HARDWARE)}, here")
    shape = _model(model, sizes)
    methods = [parse(spec) for spec in method or METHODS]
    methods = list(dict.fromkeys([Dense(), *methods]))
    for each in methods:
        try:
            each.store(Shape(1, shape.H, shape.G, shape.D), dtype)
        except ValueError as error:
            raise ValueError(f"{each} does not fit {shape.name}: {error}") from None
    places = [roof.here() if name == "here" else roof.HARDWARE[name] for name in names]
    lengths = sorted(dict.fromkeys(length or [4096, 16384, 65536]))
    rows = []
    for place in places:
        for n in lengths:
            steps = [roof.step(place, shape, each, n, batch, weights, dtype) for each in methods]
            for one in steps:
                rows.append({
                    "hardware": place.name, "method": one.method, "length": n, "ms": one.seconds * 1e3,
                    "ms_attention": one.attention * 1e3, "share_attention": one.share,
                    "speedup": steps[0].seconds / one.seconds, "speedup_attention": steps[0].attention / one.attention,
                    "intensity": one.intensity, "bound": "memory" if one.memory_bound else "compute",
                    "held_bytes": one.held, "fits": None if place.memory is None else one.held <= place.memory,
                })  # fmt: skip
    facts = [
        {
            "name": place.name, "bytes_per_s": place.bandwidth, "memory_bytes": place.memory, "source": place.source,
            "multiply_adds_per_s": place.peak.get(dtype.itemsize, place.peak[2]),
            "half_at": roof.crossing(place, shape, batch, weights, dtype),
        }
        for place in places
    ]  # fmt: skip
    setting = f"{shape.name}, batch {batch}, weights {weights}, cache {cache}"
    if plot is not None:
        from ..bench import figures_roofline as plots_roofline

        plots_roofline.roofline(facts, _curves(places[0], shape, methods, batch, weights, dtype), rows, setting, plot)
    answer = {"model": shape._asdict(), "batch": batch, "weights": weights, "cache": cache, "hardware": facts}
    if as_json:
        print(json.dumps({**answer, "rows": rows, "figure": None if plot is None else str(plot)}))
        return
    _show(rows, facts, setting, shape)
    if plot is not None:
        print(f"Figure: {plot}")


def _model(name: str, sizes: str | None) -> Any:
    from ..bench import roofline as roof
    from ..bench.token import HEAD, SHAPES
    from ..hf.load import BUILTIN

    if sizes is not None:
        try:
            return roof.llama(f"sizes {sizes}", [int(x) for x in sizes.split(",")])
        except ValueError as error:
            if "invalid literal" in str(error):
                raise ValueError(f"--sizes {sizes!r} must be numbers, {roof.FIELDS}[,head_dim]") from None
            raise ValueError(f"--{error}") from None
    shapes = {**SHAPES, **roof.LARGER}
    if name in shapes:
        return roof.llama(name, shapes[name], HEAD.get(name, 128))
    if name == "builtin":
        return roof.of_folder(BUILTIN)._replace(name=name)
    if Path(name).is_dir():
        return roof.of_folder(Path(name))
    raise ValueError(f"--model {name!r} is unknown: builtin, a folder with a config.json, or {', '.join(shapes)}")


def _curves(place: Any, shape: Any, methods: Sequence[Any], batch: int, weights: str, dtype: Any) -> list[Any]:
    """(method, lengths, shares of time in attention, speed-ups) from 2^8 to 2^18 tokens, for the figure."""
    from ..bench import roofline as roof

    lengths = [round(2 ** (i / 4)) for i in range(32, 73)]
    whole = [roof.step(place, shape, methods[0], n, batch, weights, dtype) for n in lengths]
    found = []
    for method in methods:
        steps = [roof.step(place, shape, method, n, batch, weights, dtype) for n in lengths]
        gains = [a.seconds / b.seconds for a, b in zip(whole, steps, strict=True)]
        found.append((repr(method), lengths, [s.share for s in steps], gains))
    return found


def _show(rows: Sequence[dict[str, Any]], facts: Sequence[dict[str, Any]], setting: str, shape: Any) -> None:
    """A table for a person, and a sentence for each machine."""
    out = Table(title=f"a decode step at best; {setting}", title_style="dim", title_justify="left")
    out.add_column("method", overflow="fold", min_width=40)
    for name in ("tokens", "ms", "in attention", "speed-up", "of attention", "limit", "GB held"):
        out.add_column(name, justify="right")
    last = None
    for row in rows:
        if row["hardware"] != last:
            last = row["hardware"]
            out.add_section()
            out.add_row(f"[bold]{last}[/]")
        out.add_row(
            row["method"], f"{row['length']:,}", f"{row['ms']:.3g}", f"{row['share_attention']:.0%}",
            f"{row['speedup']:.2f} ×", f"{row['speedup_attention']:.2f} ×", row["bound"],
            f"{row['held_bytes'] / 1e9:.1f}" + ("" if row["fits"] in (None, True) else ", too much"),
        )  # fmt: skip
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=max(132, console.width))
    console.print(out)
    for fact in facts:
        half = f"from {fact['half_at']:,} tokens on" if fact["half_at"] else "at no length up to 2^24"
        console.print(
            f"{fact['name']}: {fact['bytes_per_s'] / 1e12:.3g} TB/s, {fact['multiply_adds_per_s'] / 1e12:.3g} T "
            f"multiply-adds/s ({fact['source']}); dense attention is half of a step {half}.", soft_wrap=True
        )  # fmt: skip
    if shape.sliding:
        console.print(f"{shape.sliding} of {shape.layers} layers see only the last {shape.window} tokens.")
