"""Figures of sweeps: score against length, SparQ's ablations, and whole tokens against length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from ..plotting import STYLES
from ..plotting import draw_scores as curve
from ..plotting import line_styles as styles
from ..plotting import shifted as apart

Line = Sequence[tuple[float, float, float | None]]  # (tokens, mean, standard error)


def _plain(ax: Axes, title: str, x: str, y: str) -> None:
    ax.set_title(title, loc="left", fontsize=10, weight="bold")
    ax.set_xlabel(x, fontsize=9)
    ax.set_ylabel(y, fontsize=9)
    ax.grid(color="0.92")
    ax.spines[["top", "right"]].set_visible(False)


def _lengths(ax: Axes, lengths: Sequence[float]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(lengths), [f"{n:,.0f}" for n in lengths], fontsize=8)
    ax.minorticks_off()


def scaling(panels: Sequence[tuple[str, str, Mapping[str, Line]]], path: Path) -> None:
    """Score against the length of the prompt, a line per method (SparQ fig. 6); panels: (title, score, lines).

    Bands are one standard error; dashed is dense.
    """
    names = list(dict.fromkeys(name for _, _, lines in panels for name in lines if name != "Dense"))
    style = {"Dense": ("black", "."), **styles(names)}
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    size = (4.8 * columns + 0.4, 3.7 * rows + 0.8)
    fig, axes = plt.subplots(rows, columns, figsize=size, dpi=150, squeeze=False, layout="constrained")
    for ax, (title, score, lines) in zip(axes.flat, panels, strict=False):
        for i, name in enumerate(sorted(lines, key=lambda name: name != "Dense")):
            line = sorted(lines[name], key=lambda p: p[0])
            (colour, marker), x, y = style[name], [p[0] for p in line], [p[1] for p in line]
            ax.plot(x, y, "--" if name == "Dense" else "-", color=colour, marker=marker, markersize=5, linewidth=1.7,
                    transform=apart(ax, i, len(lines)) if name != "Dense" else ax.transData)  # fmt: skip
            low, high = ([p[1] + sign * (p[2] or 0) for p in line] for sign in (-1, 1))
            ax.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0)
        _lengths(ax, sorted({p[0] for line in lines.values() for p in line}))
        _plain(ax, title, "tokens of the prompt (log scale)", score)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    shown = [name for name in ("Dense", *names) if any(name in lines for _, _, lines in panels)]
    handles = [
        Line2D([], [], color=style[n][0], marker=style[n][1], linestyle="--" if n == "Dense" else "-", label=n)
        for n in shown
    ]
    fig.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 3 * columns), frameon=False,
               fontsize=9)  # fmt: skip
    fig.savefig(path)
    plt.close(fig)


Points = Sequence[tuple[str, float, float, float | None]]  # (name, share of dense's bytes, mean, standard error)
Changes = Sequence[tuple[str, str, float, float | None]]  # (r and k, what differs, mean, standard error)


def ablation(rows: Sequence[tuple[str, Points, Changes, Points]], path: Path) -> None:
    """SparQ fig. 7, a row per task: (title, how keys are found, what is changed, how many positions are read)."""
    fig, axes = plt.subplots(
        len(rows), 3, figsize=(15.5, 4.3 * len(rows) + 0.3), dpi=140, squeeze=False, layout="constrained"
    )
    for (a, b, c), (title, finding, changes, counts) in zip(axes, rows, strict=True):
        for ax, what, points in ((a, "how the keys are found", finding), (c, "how many are read", counts)):
            style = styles(list(dict.fromkeys(name for name, *_ in points if name != "Dense")))
            curve(ax, f"{title}: {what}", points, style)
            ax.set_xlabel("cache bytes moved per step, of dense's (log scale)", fontsize=9)
            ax.set_ylabel("score; band: one standard error", fontsize=9)
            handles = [Line2D([], [], color=s[0], marker=s[1], label=name) for name, s in style.items()]
            if handles:
                ax.legend(handles=handles, frameon=False, fontsize=8)
        (low, high), (bottom, top) = a.get_ylim(), c.get_ylim()
        for ax in (a, c):
            ax.set_ylim(min(low, bottom), max(high, top))
        settings, kinds = (list(dict.fromkeys(row[i] for row in changes)) for i in (0, 1))
        for i, (setting, (colour, marker)) in enumerate(zip(settings, STYLES, strict=False)):
            mine = [row for row in changes if row[0] == setting]
            y = [kinds.index(row[1]) + 0.22 * (i - (len(settings) - 1) / 2) for row in mine]
            b.errorbar([row[2] for row in mine], y, xerr=[row[3] or 0 for row in mine], fmt=marker, color=colour,
                       markersize=6, linewidth=1, label=setting)  # fmt: skip
        if changes:
            b.set_yticks(range(len(kinds)), kinds, fontsize=8)
            b.invert_yaxis()
            b.legend(frameon=False, fontsize=8)
        _plain(b, f"{title}: what is changed", "score; bar: one standard error", "")
    fig.savefig(path)
    plt.close(fig)


def token(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Of `bench token --json`: speed-up over dense against length (SparQ fig. 9, 10), and time in attention (fig. 3).

    Dashed: what the bytes of weights and cache allow.
    """
    fig, (a, b) = plt.subplots(1, 2, figsize=(13, 5), dpi=140, layout="constrained")
    names = list(dict.fromkeys(row["method"] for row in rows))
    dense = {row["length"]: row for row in rows if row["method"] == "Dense()"}
    style = styles([name for name in names if name != "Dense()"])
    lengths = sorted({row["length"] for row in rows})
    for name in names:
        line = sorted((row for row in rows if row["method"] == name), key=lambda row: row["length"])
        x = [row["length"] for row in line]
        colour, marker = style.get(name, ("black", "."))
        b.plot(x, [100 * row["ms_attention"] / row["ms"] for row in line], color=colour, marker=marker, linewidth=1.8,
               label=name)  # fmt: skip
        if name == "Dense()":
            continue
        compared = [(row, dense[row["length"]]) for row in line if row["length"] in dense]
        x = [row["length"] for row, _ in compared]
        a.plot(x, [d["ms"] / row["ms"] for row, d in compared], color=colour, marker=marker, linewidth=1.8, label=name)
        if name != "transformers":
            a.plot(x, [d["floor_ms"] / row["floor_ms"] for row, d in compared], "--", color=colour, linewidth=1.2)
    a.axhline(1, color="0.4", linewidth=1)
    a.set_ylim(bottom=0)
    b.set_ylim(0, 100)
    for ax in (a, b):
        _lengths(ax, lengths)
        ax.legend(frameon=False, fontsize=8, loc="upper left")
    shape = "{shape}, {layers} layers, {weights} weights".format(**rows[0])
    _plain(a, f"A whole token: {shape}\nsolid: measured, dashed: what the bytes allow", "cached tokens N (log scale)",
           "times as fast as our dense decoding")  # fmt: skip
    _plain(b, "Time in attention", "cached tokens N (log scale)", "% of a token's time")
    fig.savefig(path)
    plt.close(fig)


def memory(rows: Sequence[Mapping[str, Any]], path: Path, shape: str) -> None:
    """Of `bench memory --json`: what a layer's cache holds against its length; hollow: by how much the peak grew."""
    fig, ax = plt.subplots(figsize=(9, 5.4), dpi=150, layout="constrained")
    names = list(dict.fromkeys(row["method"] for row in rows))
    for name, (colour, marker) in styles(names).items():
        line = sorted((row["length"], row["nbytes"], row["peak_rss_growth"]) for row in rows if row["method"] == name)
        x, held, peak = zip(*line, strict=True)
        ax.plot(x, [n / 2**20 for n in held], color=colour, marker=marker, linewidth=1.8, label=name)
        ax.plot(x, [n / 2**20 for n in peak], marker, color=colour, markerfacecolor="none", linewidth=0)
    _lengths(ax, sorted({row["length"] for row in rows}))
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter("{x:g}")
    _plain(ax, f"Memory of a layer's cache: {shape}\nline: held; hollow: growth of the process's peak",
           "cached tokens N (log scale)", "MiB (log scale)")  # fmt: skip
    ax.legend(frameon=False, fontsize=8, loc="upper left")
    fig.savefig(path)
    plt.close(fig)


def speedup(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Speed-up over our own dense attention against length, from the rows of `bench attention --json`.

    One colour a method; dashed, what its bytes allow. The best of PyTorch's dense paths is a line of its own.
    """
    fig, ax = plt.subplots(figsize=(9, 5.4), dpi=150)
    torch_rows = [r for r in rows if r.get("best_of_torch")]
    names = [n for n in dict.fromkeys(r["method"] for r in rows) if not n.startswith("torch:") and n != "Dense()"]
    for name, (colour, marker) in styles(names).items():
        line = sorted((r["length"], r["speedup_dense"], r["speedup_theory"]) for r in rows if r["method"] == name)
        x, measured, theory = zip(*line, strict=True)
        ax.plot(x, theory, "--", color=colour, linewidth=1.2)
        ax.plot(x, measured, "-", color=colour, marker=marker, linewidth=2, label=name)
    if torch_rows:
        ends = sorted((r["length"], r["speedup_dense"]) for r in torch_rows)
        ax.plot(*zip(*ends, strict=True), ":", color="black", marker="x", label="PyTorch's best dense")
    ax.axhline(1, color="0.4", linewidth=1)
    lengths = sorted({r["length"] for r in rows})
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
    ax.minorticks_off()
    ax.set_xlabel("cached tokens N")
    ax.set_ylabel("times as fast as our dense attention")
    ax.set_ylim(bottom=0)
    ax.grid(color="0.92")
    ax.spines[["top", "right"]].set_visible(False)
    first = rows[0]
    shape = "batch {batch}, {heads} query heads on {kv_heads}, head size {head_dim}, {dtype}".format(**first)
    ax.set_title(f"Decode attention: {shape}\nsolid: measured, dashed: what the bytes allow", loc="left")
    ax.legend(frameon=False, loc="upper left")
    fig.tight_layout()
    fig.savefig(path)
    plt.close(fig)
