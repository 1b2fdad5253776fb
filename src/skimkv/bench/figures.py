"""The figures of benchmarks: attention, a sweep of it, whole tokens, memory, and the roofline."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..methods import parse
from ..plotting import STYLES, label_axes, length_axis, line_styles, new_figure, panel_grid
from .served_rows import BATCH, MEMORY, TRANSFORMERS, VLLM

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]  # of the JSON contract
LENGTHS = "cached tokens N (log scale)"
LINES = "solid: measured, dashed: what the bytes allow"
MARKS = "mark: measured, short line: what the bytes allow"  # of one length, where there are no lines


def attention(rows: Rows, path: Path) -> None:
    """Draw speed-up over our dense attention against length, from the rows of `bench attention --json`.

    One colour a method; dashed: what its bytes allow. The best of PyTorch's dense paths is a line of its own. Where all
    rows have one length, the methods stand beside each other.
    """
    fig = new_figure((9, 5.4))
    ax = fig.subplots()
    others = ("torch:", "onnxruntime:")
    names = [n for n in dict.fromkeys(r["method"] for r in rows) if not n.startswith(others) and n != "Dense()"]
    all_lengths = sorted({r["length"] for r in rows})
    places = itertools.count()
    for name, (colour, marker) in line_styles(names).items():
        line = sorted((r["length"], r["speedup_dense"], r["speedup_theory"]) for r in rows if r["method"] == name)
        own, measured, theory = zip(*line, strict=True)
        x = _places(own, all_lengths, next(places))
        _draw_allowed(ax, x, theory, all_lengths, colour)
        ax.plot(x, measured, "-", color=colour, marker=marker, linewidth=2, label=name)
    torch_best = sorted((r["length"], r["speedup_dense"]) for r in rows if r.get("best_of_torch"))
    if torch_best:
        own, speedups = zip(*torch_best, strict=True)
        x = _places(own, all_lengths, next(places))
        ax.plot(x, speedups, ":", color="black", marker="x", label="PyTorch's best dense")
    lengths = sorted({r["length"] for r in rows if r["method"].startswith("onnxruntime:")})
    if lengths:
        of_onnx = [(n, r["speedup_dense"]) for r in rows for n in [r["length"]] if r["method"].startswith(others[1])]
        best = [max(speedup for n, speedup in of_onnx if n == length) for length in lengths]
        x = _places(lengths, all_lengths, next(places))
        ax.plot(x, best, ":", color="0.5", marker="+", label="ONNX Runtime's best dense")
    ax.axhline(1, color="0.4", linewidth=1)
    shape = "batch {batch}, {heads} query heads on {kv_heads}, head size {head_dim}, {dtype}".format(**rows[0])
    label_axes(ax, f"Decode attention: {shape}\n{MARKS if len(all_lengths) == 1 else LINES}",
               _length_axis(ax, all_lengths, next(places)), "times as fast as our dense attention")  # fmt: skip
    ax.set_ylim(bottom=0)
    _legend_below(fig, ax, 2)
    fig.savefig(path)


def sweep(rows: Rows, path: Path) -> None:
    """Draw speed-up over the best dense attention, PyTorch's or ours: a panel for each batch, a line for each r.

    The band is over the k. Dashed: what the bytes of the smallest k allow. Where all rows have one length, the r stand
    beside each other. The rows are those of `bench attention --sweep paper --json`.
    """
    sparq_rows = [(parse(row["method"]), row) for row in rows if row["method"].startswith("SparQ(")]
    batches = sorted({row["batch"] for _, row in sparq_rows})
    widths = sorted({method.r for method, _ in sparq_rows})  # type: ignore[attr-defined]
    lengths = sorted({row["length"] for _, row in sparq_rows})
    fig, axes = panel_grid(len(batches), 2, (4.8, 3.5), (0.4, 1.0))
    for ax, batch in zip(axes, batches, strict=True):
        for i, ((colour, marker), r) in enumerate(zip(STYLES, widths, strict=False)):
            points: dict[int, list[tuple[float, float]]] = {}
            for method, row in sparq_rows:
                if row["batch"] == batch and method.r == r:  # type: ignore[attr-defined]
                    points.setdefault(row["length"], []).append((row["speedup_best"], row["speedup_theory"]))
            own = sorted(points)
            fastest, slowest = ([pick(measured for measured, _ in points[n]) for n in own] for pick in (max, min))
            allowed = [max(theory for _, theory in points[n]) for n in own]
            x = _places(own, lengths, i)
            if len(lengths) == 1:
                ax.vlines(x, slowest, fastest, color=colour, alpha=0.4, linewidth=4)
            else:
                ax.fill_between(x, slowest, fastest, color=colour, alpha=0.2, linewidth=0)
            ax.plot(x, fastest, "-", color=colour, marker=marker, linewidth=1.7, label=f"r = {r}")
            _draw_allowed(ax, x, allowed, lengths, colour)
        ax.axhline(1, color="0.4", linewidth=1)
        label_axes(ax, f"batch {batch}", _length_axis(ax, lengths, len(widths)), "times as fast as the best dense")
        ax.set_ylim(bottom=0)
    _legend_below(fig, axes[0], len(widths))
    lines = "solid: the fastest k, band: all k,\ndashed"
    if len(lengths) == 1:
        lines = "mark: the fastest k, bar: all k,\nshort line"
    fig.suptitle(f"{lines}: what the bytes of the smallest k allow", x=0.01, ha="left", fontsize=9)
    fig.savefig(path)


def token(rows: Rows, path: Path) -> None:
    """Draw a token's speed-up over dense against length (SparQ fig. 9 and 10), and its time in attention (fig. 3).

    Dashed: what the bytes of weights and cache allow. Where all rows have one length, the methods stand beside each
    other. The rows are those of `bench token --json`.
    """
    fig = new_figure((13, 5), dpi=140)
    faster, share = fig.subplots(1, 2)
    names = list(dict.fromkeys(row["method"] for row in rows))
    dense = {row["length"]: row for row in rows if row["method"] == "Dense()"}
    style = line_styles([name for name in names if name != "Dense()"])
    lengths = sorted({row["length"] for row in rows})
    for i, name in enumerate(names):
        line = sorted((row for row in rows if row["method"] == name), key=lambda row: row["length"])
        x = _places([row["length"] for row in line], lengths, i)
        colour, marker = style.get(name, ("black", "."))
        in_attention = [min(100, max(0, 100 * row["ms_attention"] / row["ms"])) for row in line]
        share.plot(x, in_attention, color=colour, marker=marker, linewidth=1.8, label=name, clip_on=False)
        if name == "Dense()":
            continue
        pairs = [(row, dense[row["length"]]) for row in line if row["length"] in dense]
        x = _places([row["length"] for row, _ in pairs], lengths, i)
        faster.plot(
            x, [row["speedup_dense"] for row, _ in pairs], color=colour, marker=marker, linewidth=1.8, label=name
        )
        if name != "transformers":
            allowed = [d["floor_ms"] / row["floor_ms"] for row, d in pairs]
            _draw_allowed(faster, x, allowed, lengths, colour)
    faster.axhline(1, color="0.4", linewidth=1)
    faster.set_ylim(bottom=0)
    share.set_ylim(0, 100)
    at_lengths, _ = (_length_axis(ax, lengths, len(names)) for ax in (faster, share))
    _legend_below(fig, share, 3)
    shape = "{shape}, {layers} layers, {weights} weights".format(**rows[0])
    label_axes(faster, f"A whole token: {shape}\n{MARKS if len(lengths) == 1 else LINES}", at_lengths,
               "times as fast as our dense decoding")  # fmt: skip
    label_axes(share, "Time in attention", at_lengths, "% of a token's time")
    fig.savefig(path)


def rivals(rows: Rows, path: Path) -> None:
    """Draw milliseconds a token of our methods and of other programs, one group of bars for each length.

    Of llama.cpp's settings the better one is drawn. The rows are those of `bench token --against --json`.
    """
    shown = [row for row in rows if row["better"] or not row["method"].startswith("llama.cpp")]
    names = list(dict.fromkeys(row["method"] for row in shown))
    lengths = sorted({row["length"] for row in shown})
    fig = new_figure((9, 5.2))
    ax = fig.subplots()
    styles, width = line_styles(names), 0.8 / len(names)
    for name in names:
        bars = [(lengths.index(row["length"]), row) for row in shown if row["method"] == name]
        x = [i + (names.index(name) - (len(names) - 1) / 2) * width for i, _ in bars]
        ms = [row["ms"] for _, row in bars]
        ends = [[row["ms"] - row["ms_min"] for _, row in bars], [row["ms_max"] - row["ms"] for _, row in bars]]
        ax.bar(x, ms, width, yerr=ends, color=styles[name][0], ecolor="0.3", label=name)
        for at, (_, row) in zip(x, bars, strict=True):
            ax.text(at, row["ms_max"], f"{row['ms']:.0f}", ha="center", va="bottom", fontsize=8)
    ax.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
    title = "A whole token: {shape}, {layers} layers, {weights} weights\nlines: from the shortest time to the longest"
    label_axes(ax, title.format(**rows[0]), "cached tokens N", "ms a token", grid=False)
    _legend_below(fig, ax, 2)
    fig.savefig(path)


def memory(rows: Rows, path: Path, shape: str) -> None:
    """Draw what a layer's cache holds against its length, and hollow by how much the process's peak grew.

    Where all rows have one length, the methods stand beside each other. The rows are those of `bench memory --json`.
    """
    fig = new_figure((9, 5.4))
    ax = fig.subplots()
    lengths = sorted({row["length"] for row in rows})
    styles = line_styles(list(dict.fromkeys(row["method"] for row in rows)))
    for i, (name, (colour, marker)) in enumerate(styles.items()):
        line = sorted((row["length"], row["nbytes"], row["peak_rss_growth"]) for row in rows if row["method"] == name)
        own, cache, peak = zip(*line, strict=True)
        x = _places(own, lengths, i)
        ax.plot(x, [n / 2**20 for n in cache], color=colour, marker=marker, linewidth=1.8, label=name)
        ax.plot(x, [n / 2**20 for n in peak], marker, color=colour, markerfacecolor="none", linewidth=0)
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter("{x:g}")
    cache_is = "filled" if len(lengths) == 1 else "line"
    title = f"Memory of a layer's cache: {shape}\n{cache_is}: the cache, hollow: growth of the process's peak"
    label_axes(ax, title, _length_axis(ax, lengths, len(styles)), "MiB (log scale)")
    _legend_below(fig, ax, 2)
    fig.savefig(path)


def generate(rows: Rows, path: Path) -> None:
    """Draw the time to the first token and that of a later one, one group of bars for each prompt and answer.

    The rows are those of `bench generate --json`.
    """
    fig = new_figure((13, 5.2))
    names = list(dict.fromkeys(row["method"] for row in rows))
    lengths = list(dict.fromkeys((row["prompt"], row["new"]) for row in rows))
    styles, width = line_styles(names), 0.8 / len(names)
    panels = (("first_ms", "Time to the first token"), ("ms", "Time of a later token"))
    for ax, (value, title) in zip(fig.subplots(1, 2), panels, strict=True):
        for row in rows:
            name, at = row["method"], lengths.index((row["prompt"], row["new"]))
            x = at + (names.index(name) - (len(names) - 1) / 2) * width
            ends = [[row[value] - row[f"{value}_min"]], [row[f"{value}_max"] - row[value]]]
            ax.bar(x, row[value], width, yerr=ends, color=styles[name][0], ecolor="0.3", label=None if at else name)
        ax.set_xticks(range(len(lengths)), [f"{prompt:,}+{new:,}" for prompt, new in lengths])
        label_axes(ax, title, "tokens of prompt + answer", "milliseconds", grid=False)
    _legend_below(fig, ax, 3)
    fig.suptitle("{shape}, {layers} layers, {weights} weights".format(**rows[0]), x=0.01, ha="left", fontsize=11)
    fig.savefig(path)


def serve(rows: Rows, path: Path) -> None:
    """Draw tokens per second at equal memory, with the batch above each bar, and latency at equal batch.

    The rows are those of `bench serve --json`. One group of bars for each length of prompts and answers; its methods
    are named by their classes, because their budgets depend on the length.
    """
    fig = new_figure((13, 5.2))
    panels = zip(fig.subplots(1, 2), (MEMORY, BATCH), ("tokens_per_s", "latency_s"), strict=True)
    names = list(dict.fromkeys(_served_name(row["method"]) for row in rows))
    styles, width = line_styles(names), 0.8 / len(names)
    for ax, equal, value in panels:
        shown = [row for row in rows if row["equal"] == equal]
        lengths = list(dict.fromkeys((row["prompt"], row["new"]) for row in shown))
        for row in shown:
            name = _served_name(row["method"])
            x = lengths.index((row["prompt"], row["new"])) + (names.index(name) - (len(names) - 1) / 2) * width
            first = row is next(other for other in shown if _served_name(other["method"]) == name)
            ax.bar(x, row[value], width, color=styles[name][0], label=name if first else None)
            ax.text(x, row[value], str(row["batch"]), ha="center", va="bottom", fontsize=8)
        ax.set_xticks(range(len(lengths)), [f"{prompt:,}+{new:,}" for prompt, new in lengths])
        smallest = "the smallest batch" if rows[0]["engine"] == VLLM else "dense attention's batch"
        limit = "{memory:,} bytes of caches".format(**rows[0]) if equal == MEMORY else smallest
        title = f"{'Throughput' if equal == MEMORY else 'Latency'} at {limit}\nabove the bars: the batch"
        unit = "tokens per second" if equal == MEMORY else "seconds for prompts and answers"
        label_axes(ax, title, "tokens of prompt + answer", unit, grid=False)
    _legend_below(fig, ax, len(names))
    fig.suptitle("{shape}, {layers} layers, {weights} weights".format(**rows[0]), x=0.01, ha="left", fontsize=11)
    fig.savefig(path)


def _places(x: Sequence[float], lengths: Sequence[float], place: int) -> list[float]:
    """Where a method's points stand: at their lengths, or at the method's place where all rows have one length."""
    return [place] * len(x) if len(lengths) == 1 else list(x)


def _draw_allowed(
    ax: Axes, x: Sequence[float], speedups: Sequence[float], lengths: Sequence[float], colour: str
) -> None:
    """Draw what the bytes allow: a dashed line, or a short line across a method's place at a single length."""
    if len(lengths) == 1:
        ax.plot(x, speedups, marker="_", markersize=22, markeredgewidth=1.5, color=colour, linewidth=0)
    else:
        ax.plot(x, speedups, "--", marker="_", color=colour, linewidth=1.2)


def _length_axis(ax: Axes, lengths: Sequence[float], places: int) -> str:
    """Make x the axis of lengths, or that of `places` methods at a single length, and return its label."""
    if len(lengths) > 1:
        length_axis(ax, lengths)
        return LENGTHS
    ax.set_xticks([])
    ax.set_xlim(-0.6, max(1, places) - 0.4)
    return f"{lengths[0]:,.0f} cached tokens; from left to right as in the legend"


def _served_name(spec: str) -> str:
    """The class of a method, and the form of its rows where it is not that of the model."""
    if spec in (TRANSFORMERS, VLLM):
        return spec
    method = parse(spec)
    return type(method).__name__ + (f" ({method.kv})" if method.kv else "")


def _legend_below(fig: Figure, ax: Axes, columns: int) -> None:
    """Put the legend of a panel's lines below all panels, where it hides none of them."""
    handles, names = ax.get_legend_handles_labels()
    fig.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def roofline(
    hardware: Rows,
    curves: Sequence[tuple[str, Sequence[int], Sequence[float], Sequence[float]]],
    rows: Rows,
    setting: str,
    path: Path,
) -> None:
    """Draw attainable multiply-adds against intensity (SparQ fig. 2), with a point where dense decoding stands.

    Beside it, on the first machine: share of the time in attention (fig. 3) and speed-up over dense. hardware and rows
    are those of `roofline --json`; curves: (method, lengths, shares of the time in attention, speed-ups).
    """
    fig = new_figure((16.5, 5.2), dpi=130)
    roof, share, faster = fig.subplots(1, 3)
    for fact, (colour, marker) in zip(hardware, STYLES, strict=False):
        top, speed = fact["multiply_adds_per_s"], fact["bytes_per_s"]
        ridge = top / speed
        roof.loglog([0.1, ridge, 10 * max(ridge, 100)], [0.1 * speed, top, top], color=colour, linewidth=1.8,
                    label=fact["name"])  # fmt: skip
        points = [r["intensity"] for r in rows if r["hardware"] == fact["name"] and r["method"] == "Dense()"]
        roof.loglog(points, [min(top, x * speed) for x in points], marker, color=colour, markersize=8,
                    markeredgecolor="white")  # fmt: skip
    for (name, lengths, shares, gains), (colour, _) in zip(curves, [("#000000", ""), *STYLES], strict=False):
        share.plot(lengths, [100 * x for x in shares], color=colour, linewidth=1.8, label=name)
        if name != "Dense()":
            faster.plot(lengths, gains, color=colour, linewidth=1.8, label=name)
    first = hardware[0]["name"]
    label_axes(roof, "Where dense decoding stands under the roof", "arithmetic intensity: multiply-adds per byte",
               "multiply-adds per second, at most")  # fmt: skip
    label_axes(share, f"Time in attention, {first}", LENGTHS, "% of the step's time in attention")
    label_axes(faster, f"Speed-up of the whole step, {first}", LENGTHS, "times as fast as a dense step, at most")
    roof.legend(frameon=False, fontsize=8, loc="lower right")
    share.set_ylim(0, 100)
    faster.axhline(1, color="0.4", linewidth=1)
    faster.set_ylim(bottom=0)
    ticks = [2**i for i in range(8, 19, 2)]
    for ax in (share, faster):
        length_axis(ax, ticks)
        ax.set_xticks(ticks, [f"{n // 1024}k" if n >= 1024 else str(n) for n in ticks])
        ax.legend(frameon=False, fontsize=8, loc="upper left")
    fig.suptitle(setting, x=0.01, ha="left", fontsize=11)
    fig.savefig(path)
