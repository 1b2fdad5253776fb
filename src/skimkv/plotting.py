"""The style that all figures share: colours, axes and the panels that evaluation and benchmarks both draw.

matplotlib is imported inside functions only, so that importing this module costs nothing. Figures are made without
pyplot: they need no display, and no state outlives them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Transform

# Okabe and Ito's colours and two more. All kinds of colour vision tell them apart; in grey, the markers do.
STYLES = [
    ("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"),
    ("#E69F00", "v"), ("#56B4E9", "P"), ("#7F7F7F", "X"), ("#000000", "<"), ("#882255", "p"), ("#A89A00", ">"),
]  # fmt: skip
MATCHED_SHARES = (1 / 2, 1 / 4, 1 / 8)  # of the bytes that dense attention reads: where methods are compared

ScorePoint = tuple[str, float, float, float | None]  # (line, share of dense's bytes, mean, standard error)


def line_styles(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Give every name a (colour, marker); from the eleventh name on, colours come again with other markers."""
    n = len(STYLES)
    return {name: (STYLES[i % n][0], STYLES[(i + i // n) % n][1]) for i, name in enumerate(names)}


def new_figure(size: tuple[float, float], dpi: int = 150, layout: str | None = "constrained") -> Figure:
    """Make an empty figure of size (width, height) in inches. Call its `subplots`, draw, then `savefig`."""
    from matplotlib.figure import Figure

    return Figure(figsize=size, dpi=dpi, layout=layout)  # type: ignore[arg-type]


def panel_grid(
    count: int, most_columns: int, panel: tuple[float, float], margin: tuple[float, float], least_width: float = 0.0
) -> tuple[Figure, list[Axes]]:
    """Make a figure of `count` equal panels, in rows of at most `most_columns`; return it and the panels in order.

    panel and margin are (width, height) in inches: the size of one panel, and what the figure has besides panels.
    """
    columns = min(most_columns, count)
    rows = -(-count // columns)
    width, height = (n * inches + rest for n, inches, rest in zip((columns, rows), panel, margin, strict=True))
    figure = new_figure((max(least_width, width), height))
    axes = figure.subplots(rows, columns, squeeze=False)
    for unused in axes.flat[count:]:
        unused.set_visible(False)
    return figure, list(axes.flat[:count])


def save(figure: Figure, path: Path) -> None:
    """Write the figure to a file; the ending of its name gives the format."""
    figure.savefig(path)


def label_axes(ax: Axes, title: str, x: str, y: str, grid: bool = True) -> None:
    """Set a panel's title and its axes' labels in the style of all figures."""
    ax.set_title(title, loc="left", fontsize=10, weight="bold")
    ax.set_xlabel(x, fontsize=9)
    ax.set_ylabel(y, fontsize=9)
    if grid:
        ax.grid(color="0.92")
    ax.spines[["top", "right"]].set_visible(False)


def length_axis(ax: Axes, lengths: Sequence[float]) -> None:
    """Make x a logarithmic axis of lengths in tokens, with a tick at each of them."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(lengths), [f"{n:,.0f}" for n in lengths], fontsize=8)
    ax.minorticks_off()


def mark_matched_shares(ax: Axes) -> None:
    """Draw a dashed vertical line at 1/2, 1/4 and 1/8 of dense attention's bytes."""
    for share in MATCHED_SHARES:
        ax.axvline(share, color="0.8", linestyle="--", linewidth=1, zorder=0)


def shifted(ax: Axes, i: int, n: int) -> Transform:
    """Data coordinates for line i of n, moved up or down by a few points: equal lines do not hide each other."""
    from matplotlib.transforms import ScaledTranslation

    points = 0.6 * ((n - 1) / 2 - i) / 72
    figure: Any = ax.get_figure(root=True)
    return ax.transData + ScaledTranslation(0, points, figure.dpi_scale_trans)


def draw_scores(ax: Axes, title: str, points: Sequence[ScorePoint], styles: Mapping[str, tuple[str, str]]) -> None:
    """Draw a score against the share of dense attention's bytes, one line for every name that `styles` has.

    A band is one standard error. The point named "Dense" becomes a grey line across the panel.
    """
    for _, _, mean, error in (point for point in points if point[0] == "Dense"):
        ax.axhline(mean, color="0.45", linewidth=1.2, zorder=1)
        ax.axhspan(mean - (error or 0), mean + (error or 0), color="0.45", alpha=0.12, linewidth=0, zorder=0)
    names = list(dict.fromkeys(name for name, *_ in points if name in styles))
    for i, name in enumerate(names):
        line = sorted(point[1:] for point in points if point[0] == name)
        x, y, errors = [p[0] for p in line], [p[1] for p in line], [p[2] or 0 for p in line]
        colour, marker = styles[name]
        where = shifted(ax, i, len(names))
        ax.plot(x, y, color=colour, marker=marker, markersize=5, linewidth=1.7, zorder=3, transform=where)
        low, high = ([a + sign * b for a, b in zip(y, errors, strict=True)] for sign in (-1, 1))
        if len(x) == 1:
            ax.errorbar(x, y, errors, color=colour, linewidth=1, zorder=2)
        ax.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0, zorder=2)
    mark_matched_shares(ax)
    ax.set_xscale("log", base=2)
    ax.set_xticks([1 / 8, 1 / 4, 1 / 2, 1], ["⅛", "¼", "½", "all"])
    ax.minorticks_off()
    ax.set_title(title, loc="left", fontsize=10, weight="bold")
    ax.spines[["top", "right"]].set_visible(False)
