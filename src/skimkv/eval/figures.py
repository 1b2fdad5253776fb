"""Figures from results: what is drawn was computed elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from ..plotting import draw_scores as curve
from ..plotting import line_styles as styles


def quality(points: Sequence[tuple[str, float, float, bool]], path: Path, title: str, subtitle: str) -> None:
    """Share of right answers against bytes per token: points are (method, bytes, share right, all tokens held).

    The first point is dense attention. One line a method, solid if it holds all tokens, dotted if it dropped some;
    its name where it ends at the left, at the fewest bytes. Dashed: 1/2, 1/4 and 1/8 of dense.
    """
    fig, ax = plt.subplots(figsize=(9, 5.4), dpi=150)
    (_, dense, best, _), points = points[0], points[1:]
    names = list(dict.fromkeys(name for name, *_ in points))
    ends: list[tuple[float, float, str, str]] = []
    looks = styles(names)
    for i, name in enumerate(names):
        colour, marker = looks[name]
        line = sorted((moved / dense, right, held) for at, moved, right, held in points if at == name)
        x, style = [p[0] for p in line], "-" if line[0][2] else ":"
        # drawn a little apart, so that equal results do not hide one another
        y = [p[1] + 0.004 * (len(names) / 2 - i) for p in line]
        ax.plot(x, y, style, color=colour, marker=marker, markersize=7, linewidth=2, zorder=3, clip_on=False)
        ends.append((y[0], x[0], name, colour))
    ax.plot(1, best, marker="*", markersize=16, color="black", zorder=4, clip_on=False)
    ax.annotate("Dense:\nreads it all", (1, best), (0, -12), textcoords="offset points", ha="center", va="top")
    least = min(x for _, x, _, _ in ends)
    _label(ax, [end for end in ends if end[1] < 1.3 * least], least)
    for right, moved, name, colour in ends:
        if moved >= 1.3 * least:
            ax.annotate(
                name, (moved, right), (9, 0), textcoords="offset points", va="center", color=colour, weight="bold"
            )
    for share in (2, 4, 8):
        ax.axvline(1 / share, color="0.8", linestyle="--", linewidth=1, zorder=0)
    ax.set_xscale("log", base=2)
    ax.set_xlim(least / 1.75, 1.12)
    ax.set_ylim(-0.03, 1.06)
    ticks = [1 / 8, 1 / 4, 1 / 2, 1]
    ax.set_xticks(
        ticks, [f"{n}\n{t * dense / 1e6:.2f} MB" for t, n in zip(ticks, ("1/8", "1/4", "1/2", "all"), strict=True)]
    )
    ax.minorticks_off()
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    ax.set_xlabel("cache bytes moved per generated token, as a share of dense attention (log scale)")
    ax.set_ylabel("questions answered right")
    ax.grid(axis="y", color="0.92", zorder=0)
    ax.spines[["top", "right"]].set_visible(False)
    fig.suptitle(title, x=0.02, y=0.985, ha="left", fontsize=12.5, weight="bold")
    fig.text(0.02, 0.93, subtitle, ha="left", va="top", fontsize=9, color="0.35", linespacing=1.4)
    fig.subplots_adjust(left=0.085, right=0.97, top=0.845, bottom=0.135)
    fig.savefig(path)
    plt.close(fig)


def _label(ax: Axes, ends: list[tuple[float, float, str, str]], least: float) -> None:
    """Names left of the lines' ends, moved apart where they would overlap."""
    gap, x = 0.052, least / 1.06
    ends = sorted(ends)
    at = [y for y, *_ in ends]
    for i in range(1, len(at)):
        at[i] = max(at[i], at[i - 1] + gap)
    for place, (y, end, name, colour) in zip(at, ends, strict=True):
        ax.text(x / 1.06, place, name, ha="right", va="center", color=colour, weight="bold")
        ax.plot([x / 1.05, end / 1.02], [place, y], color=colour, linewidth=0.7, alpha=0.7)


def curves(panels: Sequence[tuple[str, Sequence[tuple[str, float, float, float | None]]]], path: Path) -> None:
    """Score against the share of dense's bytes, a panel per task: points are (method, share, mean, standard error).

    Bands are one standard error. Grey, across: dense. Dashed, down: 1/2, 1/4 and 1/8 of dense.
    """
    names = list(dict.fromkeys(name for _, points in panels for name, *_ in points if name != "Dense"))
    style = styles(names)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    size = (max(7.5, 4.4 * columns + 0.4), 3.5 * rows + 1.0)
    fig, axes = plt.subplots(rows, columns, figsize=size, dpi=150, squeeze=False, layout="constrained")
    for ax, (title, points) in zip(axes.flat, panels, strict=False):
        curve(ax, title, points, style)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    handles = [Line2D([], [], color=style[n][0], marker=style[n][1], linewidth=1.7, label=n) for n in names]
    handles.append(Line2D([], [], color="0.45", linewidth=1.2, label="Dense"))
    widest = max(len(str(handle.get_label())) for handle in handles) + 9
    fits = max(2, int(size[0] * 14 / widest))  # 14 letters an inch
    fig.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), fits), frameon=False, fontsize=9)
    fig.supxlabel("cache bytes moved per step, as a share of dense attention (log scale)", fontsize=10)
    parts = "score", "band: one standard error", "lines that meet are drawn side by side"
    fig.supylabel(("; " if size[1] > 6 else "\n").join(parts), fontsize=10)  # it is 5 inches in one line
    fig.savefig(path)
    plt.close(fig)


def heat(panels: Sequence[tuple[str, dict[tuple[float, float], float]]], path: Path) -> None:
    """Needles found, a panel per method: cells are (tokens of the prompt, depth) -> share found. Blue: found."""
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    fig, axes = plt.subplots(
        rows, columns, figsize=(3.3 * columns + 1, 2.5 * rows + 0.8), dpi=150, squeeze=False, layout="constrained"
    )
    image = None
    for ax, (title, cells) in zip(axes.flat, panels, strict=False):
        lengths, depths = sorted({n for n, _ in cells}), sorted({d for _, d in cells})
        grid = [[cells.get((n, d), float("nan")) for n in lengths] for d in depths]
        image = ax.imshow(grid, cmap="RdBu", vmin=-0.2, vmax=1.2, aspect="auto")
        for edges, line in ((lengths, ax.axvline), (depths, ax.axhline)):
            for i in range(1, len(edges)):
                line(i - 0.5, color="white", linewidth=1)
        ax.set_xticks(range(len(lengths)), [f"{n:,.0f}" for n in lengths], fontsize=8)
        ax.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths], fontsize=8)
        ax.set_title(title, fontsize=9, loc="left")
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    fig.supxlabel("tokens of the prompt", fontsize=10)
    fig.supylabel("depth of the needle", fontsize=10)
    if image is not None:
        fig.colorbar(image, ax=axes, label="share found", ticks=[0, 0.5, 1], shrink=0.8).ax.set_ylim(0, 1)
    fig.savefig(path)
    plt.close(fig)
