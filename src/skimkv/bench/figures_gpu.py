"""The figure of a sweep on a GPU: speed-up against length, a panel per batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from ..methods import parse
from ..plotting import STYLES
from .figures_sweeps import _lengths, _plain


def sweep(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Times as fast as the best dense attention, PyTorch's or ours: a line for each r, a band over the k.

    Dashed: what the bytes of the smallest k allow. Rows as `bench attention --device cuda --sweep paper` gives them.
    """
    found = [(parse(row["method"]), row) for row in rows if row["method"].startswith("SparQ(")]
    batches = sorted({row["batch"] for _, row in found})
    widths = sorted({method.r for method, _ in found})  # type: ignore[attr-defined]
    columns = min(2, len(batches))
    size = (4.8 * columns + 0.4, 3.5 * -(-len(batches) // columns) + 0.5)
    fig, axes = plt.subplots(-(-len(batches) // columns), columns, figsize=size, dpi=150, squeeze=False,
                             layout="constrained")  # fmt: skip
    for ax, batch in zip(axes.flat, batches, strict=False):
        for (colour, marker), r in zip(STYLES, widths, strict=False):
            mine: dict[int, list[tuple[float, float]]] = {}
            for method, row in found:
                if row["batch"] == batch and method.r == r:  # type: ignore[attr-defined]
                    mine.setdefault(row["length"], []).append((row["speedup_best"], row["speedup_theory"]))
            x = sorted(mine)
            high, low, theory = ([pick(mine[n]) for n in x] for pick in (_fastest, _slowest, _allowed))
            ax.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
            ax.plot(x, high, "-", color=colour, marker=marker, linewidth=1.7, label=f"r = {r}")
            ax.plot(x, theory, "--", color=colour, linewidth=1)
        ax.axhline(1, color="0.4", linewidth=1)
        _lengths(ax, sorted({row["length"] for _, row in found}))
        _plain(ax, f"batch {batch}", "cached tokens N (log scale)", "times the best dense")
        ax.set_ylim(bottom=0)
    for ax in axes.flat[len(batches) :]:
        ax.set_visible(False)
    axes.flat[0].legend(frameon=False, fontsize=9)
    fig.savefig(path)
    plt.close(fig)


def _fastest(of: list[tuple[float, float]]) -> float:
    return max(measured for measured, _ in of)


def _slowest(of: list[tuple[float, float]]) -> float:
    return min(measured for measured, _ in of)


def _allowed(of: list[tuple[float, float]]) -> float:
    return max(theory for _, theory in of)
