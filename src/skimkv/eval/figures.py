"""The figures of an evaluation: the demo, scores by bytes and by length, needles, ablations, and tuning.

Every function draws what was computed elsewhere (panels.py, demo.py, tune.py) and writes one file.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .. import plotting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST_GAP = 0.05  # between two labels of an axis, of its length
MARK = 1.04  # times the share of another mark: there the two marks of a demo hide each other
SIDE_BY_SIDE = "Lines that meet in the left panel are drawn side by side."
SHARE_LABEL = "bytes read per step, as a share of dense attention's (log scale)"
FINDING_LEGEND = "each mark: another r, at k = 128"  # what the marks of an ablation's lines are
ORACLE_LEGEND = " (oracle top-k: another k)"
COUNTS_LEGEND = "each mark: another r"
CHANGES_LEGEND = "each mark: SparQ, changed as the left says, with"

LengthPoint = tuple[float, float, float | None, float | None]  # (tokens, mean, low, high)
TrialPoint = tuple[str, float, float, float | None, float | None]  # (line, share of bytes, increase, low, high)
Cells = dict[tuple[float, float], float]  # (tokens of the prompt, depth) -> share of needles found


class Ablation(NamedTuple):
    """What one row of `ablation` shows.

    finding and counts: scores by how the keys are found, and by how many are read. changes: (r and k, what is
    changed, mean, low, high). greatest: the greatest score that is possible.
    """

    title: str
    finding: Sequence[plotting.ScorePoint]
    changes: Sequence[tuple[str, str, float, float | None, float | None]]
    counts: Sequence[plotting.ScorePoint]
    greatest: float


class DemoPoint(NamedTuple):
    """A method at one budget of the demo.

    share: of the bytes that dense attention reads. score: the share of right answers. ms: milliseconds per token.
    keeps_all: whether the method keeps all tokens. has_kernel: whether a kernel was timed, or else the reference.
    """

    name: str
    share: float
    score: float
    ms: float
    keeps_all: bool
    has_kernel: bool


def demo(
    points: Sequence[DemoPoint],
    path: Path,
    dense_bytes: int,
    title: str,
    subtitle: str,
    score: str = "questions answered right",
) -> None:
    """Draw the demo's score, a share, and its milliseconds per token, each against bytes per token.

    points: dense attention first. Each method is a line: solid if it keeps all tokens, dotted if it drops some. One
    whose reference was timed has hollow marks and no line among the times. The legend beside the panels has the best
    score at the fewest bytes on top. Scores of lines that meet are drawn a little apart, and then the subtitle says so.
    dense_bytes: what dense attention reads per token.
    """
    from matplotlib.lines import Line2D

    dense, *points = points
    lines: dict[str, list[DemoPoint]] = {}
    for point in sorted(points, key=lambda point: point.share):
        lines.setdefault(point.name, []).append(point)
    least = min(point.share for point in points)
    names = sorted(lines, key=lambda name: (lines[name][0].share > 1.3 * least, -lines[name][0].score))
    styles = plotting.line_styles(names)
    heights = _apart_where_they_meet({name: lines[name] for name in names})
    if any(heights[name] != [point.score for point in lines[name]] for name in names):
        subtitle = f"{subtitle}\n{SIDE_BY_SIDE}"
    fig = plotting.new_figure((12.4, 5.6), layout=None)
    score_panel, time_panel = fig.subplots(1, 2)
    handles = []
    for name in names:
        line, (colour, marker) = lines[name], styles[name]
        x, first = [point.share for point in line], line[0]
        style: dict[str, Any] = {
            "color": colour, "linestyle": "-" if first.keeps_all else ":", "marker": marker, "markersize": 7,
            "markerfacecolor": colour if first.has_kernel else "white", "linewidth": 1.8,
        }  # fmt: skip
        score_panel.plot(x, heights[name], zorder=3, clip_on=False, **style)
        if first.has_kernel:
            time_panel.plot(x, [point.ms for point in line], zorder=3, **style)
        handles.append(Line2D([], [], label=name, **style))
    star: dict[str, Any] = {"marker": "*", "markersize": 16, "color": "black", "linestyle": "none"}
    score_panel.plot(1, dense.score, zorder=4, clip_on=False, **star)
    time_panel.plot(1, dense.ms, zorder=4, **star)
    handles.append(Line2D([], [], label="Dense", **star))
    ticks = {"1/16": 1 / 16, "1/8": 1 / 8, "1/4": 1 / 4, "1/2": 1 / 2, "all": 1}
    ticks = {name: x for name, x in ticks.items() if x > least / 1.2}
    for ax, what in ((score_panel, score), (time_panel, "milliseconds per token")):
        plotting.mark_matched_shares(ax)
        labels = [f"{name}\n{x * dense_bytes / 1e6:.3g} MB" for name, x in ticks.items()]
        plotting.log2_axis(ax, list(ticks.values()), labels)
        ax.set_xlim(min(1 / 8, least) / 1.2, 1.2)
        ax.grid(axis="y", color="0.92", zorder=0)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_title(what, loc="left", fontsize=10.5, pad=12)
    score_panel.set_ylim(0, 1)
    score_panel.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    timed = [point.ms for point in (dense, *points) if point.has_kernel]
    time_panel.set_ylim(0, 1.06 * max(timed, default=dense.ms))
    fig.legend(handles=handles, loc="center left", bbox_to_anchor=(0.845, 0.47), frameon=False, fontsize=10,
               handlelength=3, labelspacing=0.75)  # fmt: skip
    fig.suptitle(title, x=0.02, y=0.985, ha="left", fontsize=12.5, weight="bold")
    fig.text(0.02, 0.93, subtitle, ha="left", va="top", fontsize=9, color="0.35", linespacing=1.4)
    fig.text(
        0.44, 0.02, "bytes read per generated token, and their share of dense attention's (log scale)", ha="center"
    )
    fig.subplots_adjust(left=0.05, right=0.84, top=0.78, bottom=0.145, wspace=0.13)
    fig.savefig(path)


class _Level(NamedTuple):
    """Neighbouring points of one line that have the same score: where they stand in it, and between which shares."""

    name: str
    places: Sequence[int]
    score: float
    least: float
    most: float


def _apart_where_they_meet(lines: Mapping[str, Sequence[DemoPoint]]) -> dict[str, list[float]]:
    """The scores of each line as they are drawn: all are true but those of lines that meet.

    Lines meet where they have the same score at the same shares, and where they keep the same score over shares that
    overlap. There they are drawn in their order around that score, the first one above the others: `plotting.FAN`
    apart, within 0 and 1, and nearer to their own score than to any other score at these shares.
    """
    levels = []
    for name, line in lines.items():
        for score, equal in itertools.groupby(range(len(line)), key=lambda i: round(line[i].score, 6)):
            places = list(equal)
            levels.append(_Level(name, places, score, line[places[0]].share, line[places[-1]].share))
    groups: list[list[_Level]] = []  # levels with one score that meet each other
    for level in sorted(levels, key=lambda level: (level.score, level.least)):
        if groups and groups[-1][0].score == level.score and _share_a_place([level], groups[-1]):
            groups[-1].append(level)
        else:
            groups.append([level])
    heights = {name: [point.score for point in line] for name, line in lines.items()}
    step, most = plotting.FAN
    for group in groups:
        score, meeting = group[0].score, [name for name in lines if any(level.name == name for level in group)]
        if len(meeting) > 1:
            others = (abs(other[0].score - score) for other in groups if _share_a_place(group, other))
            width = min(most, step * (len(meeting) - 1), min((gap for gap in others if gap > 0), default=1.0) / 2)
            top = min(1.0, max(score + width / 2, width))
            for level in group:
                for i in level.places:
                    heights[level.name][i] = max(0.0, top - width * meeting.index(level.name) / (len(meeting) - 1))
    return heights


def _share_a_place(a: Sequence[_Level], b: Sequence[_Level]) -> bool:
    """Whether the shares of two groups of levels overlap, or come as near as marks that hide each other."""
    (a_least, a_most), (b_least, b_most) = ((min(x.least for x in g), max(x.most for x in g)) for g in (a, b))
    return a_least <= b_most * MARK and b_least <= a_most * MARK


def scores(panels: Sequence[tuple[str, Sequence[plotting.ScorePoint], float, bool]], path: Path) -> None:
    """Draw scores against the share of dense's bytes.

    panels: (title, points, greatest possible score, whether scores are divergences from dense). Bands and bars are
    95% intervals. The grey line across is dense; dashed lines are at 1/2, 1/4 and 1/8 of its bytes. Below the panels
    stands that lines are drawn apart, where they are.
    """
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(name for _, points, *_ in panels for name, *_ in points if name != "Dense"))
    styles = plotting.line_styles(names)
    fig, axes = plotting.panel_grid(len(panels), 3, (4.4, 3.5), (0.4, 1.0), least_width=7.5)
    for ax, (title, points, greatest, from_dense) in zip(axes, panels, strict=True):
        plotting.draw_scores(ax, title, points, styles, greatest, from_dense)
    handles = [Line2D([], [], color=styles[n][0], marker=styles[n][1], linewidth=1.7, label=n) for n in names]
    if not all(from_dense for *_, from_dense in panels):
        handles.append(Line2D([], [], color="0.45", linewidth=1.2, label="Dense"))
    _legend(fig, handles, "outside upper center")
    panel_lines = [(len({name for name, *_ in points} - {"Dense"}), greatest) for _, points, greatest, _ in panels]
    fig.supxlabel(f"{SHARE_LABEL}\n{plotting.apart_note(panel_lines)}".rstrip(), fontsize=10)
    fig.supylabel("score; bar or band: 95% interval", fontsize=10)
    fig.savefig(path)


def _legend(
    fig: Figure, handles: Sequence[Any], place: Literal["outside upper center", "outside lower center"]
) -> None:
    """Put a legend outside the panels, in as many columns as the figure is wide enough for."""
    columns = plotting.legend_columns([str(handle.get_label()) for handle in handles], fig.get_size_inches()[0])
    fig.legend(handles=handles, loc=place, ncols=columns, frameon=False, fontsize=9)


def _say_apart(fig: Figure, panels: Sequence[tuple[int, float]]) -> None:
    """Say below the panels that their lines are drawn apart. panels: what `plotting.apart_note` takes."""
    if note := plotting.apart_note(panels):
        fig.supxlabel(textwrap.fill(note, int(fig.get_size_inches()[0] * plotting.LETTERS)), fontsize=8.5)


def lengths(panels: Sequence[tuple[str, str, Mapping[str, Sequence[LengthPoint]], float, bool]], path: Path) -> None:
    """Draw scores against the length of the prompt, a line for each method (SparQ fig. 6).

    panels: (title, name of the score, the points of each line, greatest possible score, whether scores are divergences
    from dense). Bands and bars are 95% intervals; dashed is dense. Below the panels stands that lines are drawn apart,
    where they are.
    """
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(name for _, _, lines, *_ in panels for name in lines if name != "Dense"))
    styles = {"Dense": ("black", "."), **plotting.line_styles(names)}
    fig, axes = plotting.panel_grid(len(panels), 3, (4.8, 3.7), (0.4, 0.8))
    for ax, (title, score, lines, greatest, from_dense) in zip(axes, panels, strict=True):
        for i, name in enumerate(sorted(lines, key=lambda name: name != "Dense")):
            x, y, low, high = zip(*sorted(lines[name], key=lambda p: p[0]), strict=True)
            colour, marker = styles[name]
            linestyle = "--" if name == "Dense" else "-"
            plotting.draw_line(ax, x, y, i, len(lines), greatest, linestyle=linestyle, color=colour, marker=marker,
                               markersize=5, linewidth=1.7)  # fmt: skip
            plotting.draw_intervals(ax, x, low, high, colour, i, len(lines))
        plotting.length_axis(ax, sorted({p[0] for line in lines.values() for p in line}))
        plotting.label_axes(ax, title, "tokens of the prompt (log scale)", f"{score}; bar or band: 95% interval")
        plotting.score_axis(ax, greatest)
        if from_dense:
            plotting.divergence_axis(ax, [mean for line in lines.values() for _, mean, *_ in line])
    shown = [name for name in ("Dense", *names) if any(name in lines for _, _, lines, *_ in panels)]
    handles = [
        Line2D([], [], color=styles[n][0], marker=styles[n][1], linestyle="--" if n == "Dense" else "-", label=n)
        for n in shown
    ]
    _legend(fig, handles, "outside upper center")
    _say_apart(fig, [(len(lines), greatest) for _, _, lines, greatest, _ in panels])
    fig.savefig(path)


def ablation(rows: Sequence[Ablation], path: Path) -> None:
    """Draw SparQ fig. 7, a row for each task: how keys are found, what is changed, how many positions are read.

    Below each panel a legend says what its lines and marks are.
    """
    from matplotlib.lines import Line2D

    fig = plotting.new_figure((15.5, 4.9 * len(rows) + 0.4), dpi=140)
    fig.get_layout_engine().set(w_pad=0.12)  # type: ignore[union-attr, call-arg]
    grid = fig.subplots(len(rows), 3, squeeze=False)
    for (finding_ax, change_ax, count_ax), row in zip(grid, rows, strict=True):
        panels = (
            (finding_ax, "how the keys are found", row.finding, FINDING_LEGEND),
            (count_ax, "how many are read", row.counts, COUNTS_LEGEND),
        )
        for ax, what, points, what_marks_are in panels:
            styles = plotting.line_styles(list(dict.fromkeys(name for name, *_ in points if name != "Dense")))
            plotting.draw_scores(ax, f"{row.title}: {what}", points, styles, row.greatest)
            ax.set_xlabel("bytes read per step, of dense's (log scale)", fontsize=9)
            ax.set_ylabel("score; bar or band: 95% interval", fontsize=9)
            handles = [Line2D([], [], color=s[0], marker=s[1], label=name) for name, s in styles.items()]
            if any(name == "Dense" for name, *_ in points):
                handles.append(Line2D([], [], color="0.45", linewidth=1.2, label="Dense"))
            oracle = ax is finding_ax and "oracle top-k" in styles
            _legend_under(ax, handles, what_marks_are + (ORACLE_LEGEND if oracle else ""))
        (low_end, high_end), (bottom, top) = finding_ax.get_ylim(), count_ax.get_ylim()
        for ax in (finding_ax, count_ax):
            ax.set_ylim(min(low_end, bottom), max(high_end, top))
        settings = list(dict.fromkeys(setting for setting, *_ in row.changes))
        kinds = list(dict.fromkeys(kind for _, kind, *_ in row.changes))
        distance = min(0.22, 0.8 / max(1, len(settings)))  # between two settings of one kind
        marks = []
        for i, (setting, (colour, marker)) in enumerate(plotting.line_styles(settings).items()):
            changes = [change for change in row.changes if change[0] == setting]
            y = [kinds.index(change[1]) + distance * (i - (len(settings) - 1) / 2) for change in changes]
            marks += change_ax.plot([change[2] for change in changes], y, marker, color=colour, markersize=6,
                                    label=setting, clip_on=False)  # fmt: skip
            for height, (_, _, _, low, high) in zip(y, changes, strict=True):
                if low is not None and high is not None:
                    change_ax.hlines(height, low, high, color=colour, linewidth=1)
        if row.changes:
            change_ax.set_yticks(range(len(kinds)), kinds, fontsize=8)
            change_ax.invert_yaxis()
            _legend_under(change_ax, marks, CHANGES_LEGEND)
            if math.isfinite(row.greatest):
                change_ax.set_xlim(0, row.greatest)
        plotting.label_axes(change_ax, f"{row.title}: what is changed", "score; bar: 95% interval", "")
    names = [({name for name, *_ in points} - {"Dense"}, row.greatest)
             for row in rows for points in (row.finding, row.counts)]  # fmt: skip
    _say_apart(fig, [(len(lines), greatest) for lines, greatest in names])
    fig.savefig(path)


def _legend_under(ax: Axes, handles: Sequence[Any], title: str) -> None:
    """Put a panel's legend below it, where it hides nothing. title: what the lines or marks are."""
    if handles:
        columns = plotting.legend_columns([str(handle.get_label()) for handle in handles], 4.5)
        ax.legend(handles=handles, title=title, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=columns,
                  frameon=False, fontsize=8.5, title_fontsize=8.5)  # fmt: skip


def needles(panels: Sequence[tuple[str, Cells]], path: Path) -> None:
    """Draw the share of needles that each method found, a panel for each (title, cells); blue is found."""
    fig, axes = plotting.panel_grid(len(panels), 4, (3.3, 2.5), (1, 0.8))
    image = None
    for ax, (title, cells) in zip(axes, panels, strict=True):
        tokens, depths = sorted({n for n, _ in cells}), sorted({depth for _, depth in cells})
        grid = [[cells.get((n, depth), float("nan")) for n in tokens] for depth in depths]
        image = ax.imshow(grid, cmap="RdBu", vmin=-0.2, vmax=1.2, aspect="auto")
        for edges, draw_edge in ((tokens, ax.axvline), (depths, ax.axhline)):
            for i in range(1, len(edges)):
                draw_edge(i - 0.5, color="white", linewidth=1)
        ax.set_xticks(range(len(tokens)), [f"{n:,.0f}" for n in tokens], fontsize=8)
        ax.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=8)
        ax.set_title(title, fontsize=9, loc="left")
    fig.supxlabel("tokens of the prompt", fontsize=10)
    fig.supylabel("depth of the needle", fontsize=10)
    if image is not None:
        fig.colorbar(image, ax=fig.axes, label="share found", ticks=[0, 0.5, 1], shrink=0.8).ax.set_ylim(0, 1)
    fig.savefig(path)


def tuning(
    points: Sequence[TrialPoint],
    target: float,
    chosen: tuple[str, float, float] | None,
    setting: str,
    path: Path,
    from_dense: bool = False,
) -> None:
    """Draw what `skimkv tune` tried: the increase of the loss over dense against bytes, the bound, the chosen method.

    points: (line, share of dense's bytes, increase of the loss, the ends of its interval). chosen: (method, share,
    increase). setting: the first line of the title. from_dense: instead of increases, these are divergences from dense
    attention in nats. All names stand outside the axes, where they hide no point.
    """
    scale, what = (1, "mean KL from dense, in nats a token") if from_dense else (100, "increase of the loss over dense")
    fig = plotting.new_figure((8.6, 5.6), dpi=140)
    ax = fig.subplots()
    handles = []
    for name, (colour, marker) in plotting.line_styles(list(dict.fromkeys(point[0] for point in points))).items():
        own = sorted(point[1:] for point in points if point[0] == name)
        x, y = [p[0] for p in own], [scale * p[1] for p in own]
        handles += ax.plot(x, y, marker, color=colour, markersize=6, alpha=0.85, label=name)
        for share, _, low_end, high_end in own:
            if low_end is not None and high_end is not None:
                ax.vlines(share, scale * low_end, scale * high_end, color=colour, alpha=0.85, linewidth=1)
    lowest: list[tuple[float, float]] = []
    for _, share, value, *_ in sorted(points, key=lambda p: p[1]):
        if not lowest or scale * value < lowest[-1][1]:
            lowest.append((share, scale * value))
    ax.step([p[0] for p in lowest], [p[1] for p in lowest], where="post", color="0.5", linewidth=1, zorder=0)
    ax.axhline(scale * target, color="black", linestyle="--", linewidth=1)
    ax.text(1.01, scale * target, f"target\n{target:g}" if from_dense else f"target\n{100 * target:.4g}%", ha="left",
            va="center", fontsize=9, transform=ax.get_yaxis_transform())  # fmt: skip
    if chosen is not None:
        name, share, value = chosen
        handles += ax.plot(share, scale * value, "*", color="black", markersize=17, zorder=5, label=f"chosen: {name}")
    least, most = min(p[1] for p in points), max(p[1] for p in points)
    ticks = [t for t in (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1) if least / 1.5 < t < 1.5 * most]
    plotting.log2_axis(ax, ticks, [f"1/{round(1 / t)}" if t < 1 else "all" for t in ticks])
    left, right = ax.get_xlim()  # which need not reach the ticks
    ax.set_xlim(min([left, *ticks]), max([right, *ticks]))
    if from_dense:
        plotting.divergence_axis(ax, [target, *(p[2] for p in points)])
    else:
        _increase_axis(ax, 100 * target, [100 * p[2] for p in points])
    ax.set_xlabel(SHARE_LABEL)
    ax.set_ylabel(what)
    ax.grid(color="0.93", zorder=0)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title(f"{setting}\nbars: 95% intervals; line: the least at those bytes", loc="left", fontsize=9)
    _legend(fig, handles, "outside lower center")
    fig.savefig(path)


def _increase_axis(ax: Axes, target: float, increases: Sequence[float]) -> None:
    """Make y an axis of increases of the loss in percent, logarithmic beyond the target."""
    ax.set_yscale("symlog", linthresh=max(target, 0.1))
    low, high = min(0.0, *increases), 1.3 * max(target, *increases)
    ax.set_ylim(bottom := 1.5 * low - 0.15 * max(target, 0.1), high)
    heights = ax.yaxis.get_transform().transform([bottom, high])
    marks: dict[float, float] = {}  # each with its place on the axis, from 0 to 1
    for mark in (0, 200, 100, 50, 20, 10, 5, 2, 1, 0.5, 0.2, -5, -2, -1, -0.5):
        place = float((ax.yaxis.get_transform().transform([mark])[0] - heights[0]) / (heights[1] - heights[0]))
        if 1.5 * low <= mark <= high and all(abs(place - other) > LEAST_GAP for other in marks.values()):
            marks[mark] = place
    ax.set_yticks(list(marks), [f"{mark:g}%" for mark in marks])
    ax.axhline(0, color="0.7", linewidth=1, zorder=0)
