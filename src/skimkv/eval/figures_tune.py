"""The figure of `skimkv tune`: the loss of what was tried against its bytes, the bound, and the chosen one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt

from ..plotting import STYLES

WAYS = ("copy", "int8", "int4", "none")


def tune(
    points: Sequence[tuple[str, float, float, float | None]],
    target: float,
    chosen: tuple[str, float, float] | None,
    setting: str,
    path: Path,
) -> None:
    """points: (channels, share of dense's bytes, increase of the loss, its standard error)."""
    fig, ax = plt.subplots(figsize=(8.6, 5.2), dpi=140, layout="constrained")
    for way, (colour, marker) in zip(WAYS, STYLES, strict=False):
        mine = sorted(point[1:] for point in points if point[0] == way)
        if mine:
            x, y, e = [p[0] for p in mine], [100 * p[1] for p in mine], [100 * (p[2] or 0) for p in mine]
            ax.errorbar(x, y, e, fmt=marker, color=colour, markersize=6, alpha=0.85, linewidth=1,
                        label=f"channels={way!r}")  # fmt: skip
    lowest: list[tuple[float, float]] = []
    for _, share, increase, _ in sorted(points, key=lambda p: p[1]):
        if not lowest or 100 * increase < lowest[-1][1]:
            lowest.append((share, 100 * increase))
    ax.step([p[0] for p in lowest], [p[1] for p in lowest], where="post", color="0.5", linewidth=1, zorder=0)
    ax.axhline(100 * target, color="black", linestyle="--", linewidth=1)
    ax.text(0.995, 100 * target, f"target {target:.2%} ", ha="right", va="bottom", fontsize=9,
            transform=ax.get_yaxis_transform())  # fmt: skip
    if chosen is not None:
        name, share, increase = chosen
        ax.plot(share, 100 * increase, "*", color="black", markersize=17, zorder=5)
        ax.annotate(name, (share, 100 * increase), (-8, -8), textcoords="offset points", weight="bold", fontsize=9,
                    va="top", ha="right" if share > 1 / 16 else "left")  # fmt: skip
    ax.set_xscale("log", base=2)
    least, most = min(p[1] for p in points), max(p[1] for p in points)
    ticks = [t for t in (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1) if least / 2 < t < 2 * most]
    ax.set_xticks(ticks, [f"1/{round(1 / t)}" if t < 1 else "all" for t in ticks])
    ax.minorticks_off()
    ax.set_yscale("symlog", linthresh=max(100 * target, 0.1))
    low, high = 100 * min(0.0, *(p[2] for p in points)), 130 * max(target, *(p[2] for p in points))
    marks = [m for m in (-5, -2, -1, -0.5, 0, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200) if 1.5 * low <= m <= high]
    ax.set_yticks(marks, [f"{m:g}%" for m in marks])
    ax.set_ylim(1.5 * low - 0.15 * max(100 * target, 0.1), high)
    ax.axhline(0, color="0.7", linewidth=1, zorder=0)
    ax.set_xlabel("cache bytes moved per step, as a share of dense attention (log scale)")
    ax.set_ylabel("increase of the loss over dense")
    ax.grid(color="0.93", zorder=0)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title(f"{setting}\nbars: one standard error; line: the least loss at those bytes", loc="left", fontsize=9)
    ax.legend(frameon=False, fontsize=9)
    fig.savefig(path)
    plt.close(fig)
