"""The style that all figures share: colours, axes and the panels that evaluation and benchmarks both draw.

matplotlib is imported inside functions only, so that importing this module costs nothing. Figures are made without
pyplot: they need no display, and no state outlives them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Transform

# Okabe and Ito's colours and two more, which all kinds of colour vision tell apart, and then four that are closer to
# some of them; in grey, the markers tell all apart.
STYLES = [
    ("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"),
    ("#E69F00", "v"), ("#56B4E9", "P"), ("#7F7F7F", "X"), ("#000000", "<"), ("#882255", "p"), ("#A89A00", ">"),
    ("#6A3D9A", "h"), ("#8C510A", "d"), ("#A6D96A", "8"), ("#F4A6B7", "H"),
]  # fmt: skip
MATCHED_SHARES = (1 / 2, 1 / 4, 1 / 8)  # of the bytes that dense attention reads: where methods are compared

DIVERGENCE_RANGE = 1e-7  # of the largest divergence that is drawn: what is below it is the rounding of logits
FAN = 0.004, 0.03  # of the axis: how far lines that meet are drawn apart, each from the next, and all together
MOST_BANDS = 4  # of intervals in a panel; those of more lines are bars
BAR_DISTANCE = 1.3  # points from one line's bars to the next line's
LETTERS = 14  # of a legend at font size 9, in an inch
HANDLE = 9  # letters: what a mark and the space around an entry of a legend take

# (line, share of dense's bytes, mean, low, high); the ends of the mean's interval are None where there is none
ScorePoint = tuple[str, float, float, float | None, float | None]


def line_styles(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Give every name a (colour, marker); after the last of STYLES, colours come again with other markers."""
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


def label_axes(ax: Axes, title: str, x: str, y: str, grid: bool = True) -> None:
    """Set a panel's title and its axes' labels in the style of all figures."""
    ax.set_title(title, loc="left", fontsize=10, weight="bold")
    ax.set_xlabel(x, fontsize=9)
    ax.set_ylabel(y, fontsize=9)
    if grid:
        ax.grid(color="0.92")
    ax.spines[["top", "right"]].set_visible(False)


def log2_axis(ax: Axes, ticks: Sequence[float], labels: Sequence[str], **style: Any) -> None:
    """Make x a logarithmic axis with these ticks. style: what `Axes.set_xticks` takes."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(ticks), list(labels), **style)
    ax.minorticks_off()


def length_axis(ax: Axes, lengths: Sequence[float]) -> None:
    """Make x a logarithmic axis of lengths in tokens, with a tick at each of them."""
    log2_axis(ax, lengths, [f"{n:,.0f}" for n in lengths], fontsize=8)


def plain_log_ticks(low: float, high: float) -> list[float]:
    """The ticks of a logarithmic axis from low to high, both above 0: 1, 2, 5, 10 … or, over many decades, only powers.

    Write them as plain numbers (`"{x:,g}"`). There are at most nine, and at least two wherever high is 5 times low.
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = [1, 2, 5] if math.log10(high / low) < 2.4 else [1]
    every = -(-len(decades) // 9)
    ticks = [step * 10.0**decade for decade in decades[::every] for step in steps]
    return [tick for tick in ticks if low <= tick <= high]


def legend_columns(names: Sequence[str], inches: float) -> int:
    """How many columns a legend of these names at font size 9 can have within this width; it has at least one."""
    for columns in range(len(names), 1, -1):
        longer, rest = divmod(len(names), columns)  # matplotlib fills the first columns first
        lengths = [longer + (i < rest) for i in range(columns)]
        starts = [sum(lengths[:i]) for i in range(columns)]
        widths = (max(map(len, names[start : start + n])) for start, n in zip(starts, lengths, strict=True))
        if sum(widths) + columns * HANDLE <= inches * LETTERS:
            return columns
    return 1


def mark_matched_shares(ax: Axes) -> None:
    """Draw a dashed vertical line at 1/2, 1/4 and 1/8 of dense attention's bytes."""
    for share in MATCHED_SHARES:
        ax.axvline(share, color="0.8", linestyle="--", linewidth=1, zorder=0)


def score_axis(ax: Axes, greatest: float) -> None:
    """Let y begin and end where the scale of scores does, from 0 to `greatest`; without an end, y fits the data."""
    if math.isfinite(greatest):
        ax.set_ylim(0, greatest)


def divergence_axis(ax: Axes, means: Sequence[float]) -> None:
    """Make y a logarithmic axis of divergences around these means; what is only rounding lies below it."""
    ax.set_yscale("log")
    shown = [mean for mean in means if 0 < mean < math.inf]
    if shown:
        ax.set_ylim(max(min(shown), max(shown) * DIVERGENCE_RANGE) / 2, max(shown) * 2)


def side_by_side(scores: Sequence[float], i: int, n: int, greatest: float) -> list[float]:
    """The scores of line i of n as they are drawn: equal lines do not hide each other, and none leaves 0 to `greatest`.

    All scores of a line are moved by nearly the same, at most 3% of the axis, and the first line comes to lie on top.
    """
    step, most = FAN
    width = min(most, step * (n - 1))
    up = greatest * width * (n - 1 - i) / max(1, n - 1)
    return [min(score * (1 - width) + up, greatest) for score in scores]  # NaN stays NaN


def shifted(ax: Axes, i: int, n: int, right: float = 0.0, down: float = 0.6) -> Transform:
    """Data coordinates for line i of n, each `right` and `down` points from the one before it, around the true place.

    So equal lines do not hide each other. `side_by_side` is for scores whose scale has an end.
    """
    from matplotlib.transforms import ScaledTranslation

    steps = (i - (n - 1) / 2) / 72
    figure: Any = ax.get_figure(root=True)
    return ax.transData + ScaledTranslation(right * steps, -down * steps, figure.dpi_scale_trans)


def draw_line(ax: Axes, x: Sequence[float], y: Sequence[float], i: int, n: int, greatest: float, **style: Any) -> None:
    """Draw line i of the n lines of a panel of scores, a little apart from the others: `apart_note` says so.

    style: what `Axes.plot` takes.
    """
    if math.isfinite(greatest):
        ax.plot(x, side_by_side(y, i, n, greatest), clip_on=False, **style)
    else:
        ax.plot(x, y, transform=shifted(ax, i, n), **style)
        _reach(ax, x, y)


def _reach(ax: Axes, x: Sequence[float], y: Sequence[float]) -> None:
    """Let axes that fit their data reach these points. What is drawn with `shifted` may not do so itself."""
    points = [point for point in zip(x, y, strict=True) if all(map(math.isfinite, point))]
    ax.update_datalim(points or [(math.nan, math.nan)])
    ax.autoscale_view()


def apart_note(panels: Sequence[tuple[int, float]]) -> str:
    """The sentence with which a figure says that `draw_line` moved its lines; "" where no panel has two of them.

    panels: (number of lines, greatest possible score) of each panel.
    """
    moved = [greatest for lines, greatest in panels if lines > 1]
    if not moved:
        return ""
    distance = f", at most {FAN[1]:.0%} of the axis," if all(map(math.isfinite, moved)) else ""
    return f"Lines are drawn a little apart{distance} so that they hide each other less."


def draw_intervals(
    ax: Axes, x: Sequence[float], low: Sequence[float | None], high: Sequence[float | None], colour: str, i: int, n: int
) -> None:
    """Draw the intervals of line i of n: None is no interval.

    A few lines have bands. More than MOST_BANDS would hide each other, and so would a line of one point: these have
    bars, beside each other.
    """
    nothing = math.nan
    low, high = ([nothing if end is None else end for end in ends] for ends in (low, high))
    if n > MOST_BANDS or len(x) == 1:
        beside = shifted(ax, i, n, BAR_DISTANCE if n > MOST_BANDS else 0.0, 0.0)
        ax.vlines(x, low, high, color=colour, linewidth=1, alpha=0.55, zorder=2, transform=beside)
        _reach(ax, [*x, *x], [*low, *high])
    else:
        ax.fill_between(x, low, high, color=colour, alpha=0.1, linewidth=0, zorder=2)


def draw_scores(
    ax: Axes,
    title: str,
    points: Sequence[ScorePoint],
    styles: Mapping[str, tuple[str, str]],
    greatest: float = 1.0,
    from_dense: bool = False,
) -> None:
    """Draw a score against the share of dense attention's bytes, one line for every name that `styles` has.

    A band or a bar is the 95% interval of the mean. The point named "Dense" becomes a grey line across the panel.
    greatest: the greatest score that is possible. from_dense: scores are divergences from dense attention; their axis
    is logarithmic, and dense itself, which has only rounding, is not drawn.
    """
    if from_dense:
        points = [point for point in points if point[0] != "Dense"]
    for _, _, mean, low, high in (point for point in points if point[0] == "Dense"):
        ax.axhline(mean, color="0.45", linewidth=1.2, zorder=1, clip_on=False)
        if low is not None and high is not None:
            ax.axhspan(low, high, color="0.45", alpha=0.1, linewidth=0, zorder=0)
    names = list(dict.fromkeys(name for name, *_ in points if name in styles))
    for i, name in enumerate(names):
        line = sorted((point[1:] for point in points if point[0] == name), key=lambda p: p[:2])
        x, y, low_ends, high_ends = zip(*line, strict=True)
        colour, marker = styles[name]
        draw_line(ax, x, y, i, len(names), greatest, color=colour, marker=marker, markersize=5, linewidth=1.7, zorder=3)
        draw_intervals(ax, x, low_ends, high_ends, colour, i, len(names))
    mark_matched_shares(ax)
    least = min((share for _, share, *_ in points), default=1.0)
    ticks = {1 / 64: "1/64", 1 / 32: "1/32", 1 / 16: "1/16", 1 / 8: "1/8", 1 / 4: "1/4", 1 / 2: "1/2", 1: "all"}
    shown = [tick for tick in ticks if tick >= min(least, 1 / 8)]
    log2_axis(ax, shown, [ticks[tick] for tick in shown])
    left, right = ax.get_xlim()  # which need not reach the points beside the ticks
    most = max((share for _, share, *_ in points), default=1.0)
    ax.set_xlim(min(left, least / 1.1), max(right, most * 1.1 if most > 1 else 1.0))
    score_axis(ax, greatest)
    if from_dense:
        divergence_axis(ax, [mean for _, _, mean, *_ in points])
        ax.grid(axis="y", color="0.93", zorder=0)
    ax.set_title(title, loc="left", fontsize=10, weight="bold")
    ax.spines[["top", "right"]].set_visible(False)
