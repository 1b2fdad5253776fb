"""The papers' figures of scores, queries, heavy hitters and clusters, drawn from what survey.py measured."""

from __future__ import annotations

import importlib
import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..methods.sparq import TEMPERATURES
from ..plotting import STYLES, label_axes, line_styles, log2_axis, new_figure, panel_grid, plain_log_ticks
from . import TOP, statistics
from .output_error import OutputError
from .survey import CENTRES, CHANNEL_CHOICES, DELTAS, Cloud, Findings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

TAU = {"coverage": "τ = √(D |q[i₁]| / |q|)", "sqrt_d": "τ = √D", "sqrt_r": "τ = √r"}  # of each temperature
BLUE, ORANGE = STYLES[0][0], STYLES[1][0]
LEAST_SHARE = 1e-6  # of the accumulated score: smaller shares are counted in words and not drawn
MIDDLE_LAYER = 0.5  # of the depth: the layer whose queries are drawn as a density
MOST_TICKS = 13  # of an axis of layers or heads
HEAVIEST = 5  # tokens of the vocabulary that have a name in the figure
LONGEST_NAME = 20  # letters of a token
SPACES = {" ": "space", "\n": "newline", "\t": "tab", "\r": "carriage return", "\xa0": "no-break space"}
SPACE_MARKERS = "\u2581\u0120"  # with which some vocabularies write a leading space


def draw_sparq(findings: Findings, path: Path) -> None:
    """Save SparQ's fig. 4, E1 and E2 in eight panels: mass of the top scores, tails of q, agreement, and alpha."""
    figure = new_figure((17, 7.6), dpi=130)
    (a, b, c, d), (e, f, g, h) = figure.subplots(2, 4)
    _top_mass_histogram(a, findings.top_mass.flatten())
    _top_mass_heads(b, figure, findings)
    middle = int(MIDDLE_LAYER * (len(findings.layers) - 1))
    _density(c, findings.q[middle], findings.layers[middle])
    _points_by_layer(d, findings.layers, statistics.kurtosis(findings.q), BLUE)
    d.axhline(0, color="0.5", linestyle="--", linewidth=1)
    _kurtosis_axis(d)
    _label(d, "Kurtosis of q, a point a head", "layer", "Fisher kurtosis (0: Gaussian)")
    _points_by_layer(e, findings.layers, statistics.tail_mass(findings.q), ORANGE)
    e.axhline(1, color="0.5", linestyle="--", linewidth=1)
    e.set_ylim(bottom=0)
    _label(e, "Mass of q beyond 3σ", "layer", "times a Gaussian's")
    _agreement_by_channels(f, findings)
    _agreement_by_positions(g, findings)
    _alpha(h, findings)
    figure.savefig(path)


def draw_h2o(findings: Findings, tokenizer: Any, path: Path) -> None:
    """Save H2O's fig. 2: sparsity by layer, accumulated scores by rank, and by how often a token occurs.

    The heaviest tokens of the vocabulary have marks of their own; their names stand beside the last panel.
    """
    figure = new_figure((16.5, 4.6), dpi=130)
    a, b, c = figure.subplots(1, 3)
    _points_by_layer(a, findings.layers, 100 * findings.sparsity, BLUE)
    a.set_ylim(0, 100)
    _label(a, "Scores that hardly count, a point a head", "layer", "% of scores below 1% of their row's largest")
    _scores_by_rank(b, findings)
    _scores_by_frequency(c, findings, tokenizer)
    figure.savefig(path)


def draw_subgen(findings: Findings, path: Path) -> None:
    """Save SubGen's fig. 1: t-SNE of keys above that of values, one column for each layer, with k-centre's centres."""
    layers = list(dict.fromkeys(cloud.layer for cloud in findings.clouds))
    figure = new_figure((3.1 * len(layers) + 0.6, 6.6), dpi=130)
    axes = figure.subplots(2, len(layers), squeeze=False)
    for cloud in findings.clouds:
        points = _cloud(axes[int(cloud.kind == "values")][layers.index(cloud.layer)], cloud)
    figure.colorbar(points, ax=axes, label="position in the text", shrink=0.7)
    title = f"t-SNE; orange: {CENTRES} centres by greedy k-centre"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, weight="bold")
    figure.savefig(path)


def draw_clusters(findings: Findings, path: Path) -> None:
    """Save m(n), the clusters of SubGen's algorithm 1 after n tokens, for each delta; means over the clouds' heads."""
    figure = new_figure((11, 4.6), dpi=130)
    n = torch.arange(1, findings.tokens + 1)
    for ax, kind in zip(figure.subplots(1, 2, sharey=True), ("keys", "values"), strict=True):
        clouds = [cloud for cloud in findings.clouds if cloud.kind == kind]
        for i, (share, (colour, _)) in enumerate(zip(DELTAS, STYLES, strict=False)):
            m = torch.stack([cloud.clusters[i] for cloud in clouds]).double().mean(0)
            ax.loglog(n, m, color=colour, linewidth=1.8, label=f"δ = {share:g} × median distance")
        ax.loglog(n, n, "--", color="0.5", linewidth=1)
        ax.set(xlim=(1, None), ylim=(1, None))
        _label(ax, f"Clusters that {kind} form", "tokens n", "clusters m(n); dashed: every token its own")
        ax.legend(fontsize=8, frameon=False)
    figure.savefig(path)


def draw_output_error(errors: Sequence[OutputError], path: Path) -> None:
    """Save the errors of attention outputs against bytes: a panel for each source of heads, means and percentiles.

    A method at several settings is a line; the filled marker is the mean over heads and steps, the hollow one the 95th
    percentile.
    """
    sources = list(dict.fromkeys(error.source for error in errors))
    figure, axes = panel_grid(len(sources), 2, (5.6, 4.6), (0.3, 0.3))
    names = list(dict.fromkeys(_setting_free(error.method) for error in errors))
    styles = line_styles(names)
    least, most = (pick(100 * error.share for error in errors) for pick in (min, max))
    for ax, source in zip(axes, sources, strict=True):
        for name in names:
            line = [e for e in errors if e.source == source and _setting_free(e.method) == name]
            line.sort(key=lambda e: e.share)
            colour, marker = styles[name]
            rows = [e.json() for e in line]
            share = [100 * e.share for e in line]
            style: Any = {"color": colour, "marker": marker, "markersize": 5, "clip_on": False}
            ax.plot(share, [row["mean"] for row in rows], linewidth=1.7, label=name, **style)
            ax.plot(share, [row["p95"] for row in rows], linewidth=0.8, linestyle=":", markerfacecolor="none", **style)
        ticks = [x for x in (0.5, 1, 2, 4, 8, 16, 32, 64) if least / 2 <= x <= 2 * most]
        log2_axis(ax, ticks, [f"{x:g}" for x in ticks])
        ax.set_yscale("symlog", linthresh=1e-3)
        ax.set_ylim(bottom=0)
        label = "mean (filled), 95th percentile (hollow) of |y − dense| / mean |v|"
        _label(ax, f"{source} heads", "bytes read per step, % of dense attention's", label)
        ax.legend(fontsize=7, frameon=False)
    figure.savefig(path)


def _setting_free(spec: str) -> str:
    """A spec without its numbers, so that one method at several settings has one name."""
    return re.sub(r"=\d[\d.e-]*", "", spec)


def _label(ax: Axes, title: str, x: str, y: str) -> None:
    label_axes(ax, title, x, y, grid=False)
    ax.tick_params(labelsize=8)


def _points_by_layer(ax: Axes, layers: Sequence[int], x: Tensor, colour: str) -> None:
    """A point for each head in its layer's column, and a bar at their mean. x (L,heads)."""
    for i, row in enumerate(x.tolist()):
        wide = [i + (j / max(1, len(row) - 1) - 0.5) * 0.5 for j in range(len(row))]
        ax.plot(wide, row, "o", color=colour, markersize=3.5, alpha=0.75, linewidth=0, clip_on=False)
        ax.plot([i - 0.35, i + 0.35], [sum(row) / len(row)] * 2, color="black", linewidth=1.5)
    _whole_ticks(ax.xaxis, layers)


def _whole_ticks(axis: Axis, numbers: Sequence[int]) -> None:
    """Give an axis on which `numbers` stand at 0, 1, 2, … a tick at every one, or at every second or fourth."""
    every = 1
    while len(numbers) > MOST_TICKS * every:
        every *= 2
    axis.set_ticks(range(0, len(numbers), every), [str(number) for number in numbers[::every]])


def _kurtosis_axis(ax: Axes) -> None:
    """Make y logarithmic beyond -1 and 1 if it reaches that far, with ticks that are plain numbers."""
    low, high = ax.get_ylim()
    if low > -1 and high < 1:
        return
    ax.set_yscale("symlog", linthresh=1)
    low, high = ax.get_ylim()
    positive = plain_log_ticks(1, max(1, high))
    negative = [-tick for tick in plain_log_ticks(1, max(1, -low))]
    ticks = [tick for tick in (*reversed(negative), 0, *positive) if low <= tick <= high]
    ax.set_yticks(ticks, [f"{tick:,g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_ylim(low, high)


def _top_mass_histogram(ax: Axes, mass: Tensor) -> None:
    """SparQ fig. 4a, with a dashed line at the mean."""
    from matplotlib.ticker import MaxNLocator

    mean = float(mass.mean())
    ax.hist(mass.tolist(), bins=25, range=(0, 1), color=BLUE, edgecolor="white", linewidth=0.5)
    ax.axvline(mean, color="black", linewidth=1.2, linestyle="--")
    ax.set_xlim(0, 1)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))  # they are counted
    where = f"sum of softmax scores; dashed: the mean, {mean:.2f}"
    _label(ax, f"Mass of the {TOP} largest scores", where, "number of queries, all heads")


def _top_mass_heads(ax: Axes, figure: Figure, findings: Findings) -> None:
    """SparQ fig. 4b: an image of layers × heads."""
    heads, layers = findings.top_mass.mean(-1), findings.layers
    image = ax.imshow(heads.tolist(), cmap="viridis", vmin=0, vmax=1, aspect="auto", origin="lower")
    figure.colorbar(image, ax=ax, label="mean mass")
    _label(ax, "… for each head", "query head", "layer")
    _whole_ticks(ax.xaxis, range(heads.shape[1]))
    _whole_ticks(ax.yaxis, layers)


def _density(ax: Axes, q: Tensor, layer: int) -> None:
    """SparQ fig. 4c: a kernel density estimate of the components of q, on a log scale, beside a Gaussian's."""
    stats: Any = importlib.import_module("scipy.stats")
    x = q.flatten().double()
    x = ((x - x.mean()) / x.std())[:: max(1, len(x) // 20000)]
    grid = torch.linspace(-8, 8, 321, dtype=torch.float64)
    ax.semilogy(grid, stats.gaussian_kde(x.numpy())(grid.numpy()), color=BLUE, linewidth=1.8, label="q")
    normal = (-grid.square() / 2).exp() / math.sqrt(2 * math.pi)
    ax.semilogy(grid, normal, "--", color="0.5", linewidth=1.2, label="Gaussian")
    ax.set_ylim(1e-5, 2)
    ax.legend(fontsize=8, frameon=False)
    _label(ax, f"Components of q, layer {layer}, all heads", "standard deviations from the mean", "density (log)")


def _agreement_by_channels(ax: Axes, findings: Findings) -> None:
    """SparQ fig. 4e: a line for each way to choose channels, a band between the quartiles of layers and heads."""
    grid = findings.grid
    for i, (name, (colour, marker)) in enumerate(zip(grid.channels, STYLES, strict=False)):
        x = findings.agreement[i, :, 0].flatten(1)  # (r, layers heads)
        low, median, high = (x.quantile(p, dim=1).tolist() for p in (0.25, 0.5, 0.75))
        ax.plot(grid.r, median, color=colour, marker=marker, linewidth=1.8, label=CHANNEL_CHOICES[name])
        ax.fill_between(grid.r, low, high, color=colour, alpha=0.12, linewidth=0)
    k = grid.k[0]
    _label(ax, f"Which channels find the top {k}", "r, channels read (of D)", f"top-{k} agreement, quartiles")
    _agreement_axes(ax, grid.r)


def _agreement_by_positions(ax: Axes, findings: Findings) -> None:
    """SparQ fig. E2: a line for each k, channels by |q|."""
    grid = findings.grid
    for i, (k, (colour, marker)) in enumerate(zip(grid.k, STYLES, strict=False)):
        line = findings.agreement[0, :, i].flatten(1).mean(1).tolist()
        ax.plot(grid.r, line, color=colour, marker=marker, linewidth=1.8, label=f"k = {k}")
    _label(ax, "… for other k (r largest of |q|)", "r, channels read (of D)", "top-k agreement, mean")
    _agreement_axes(ax, grid.r)


def _agreement_axes(ax: Axes, r: Sequence[int]) -> None:
    log2_axis(ax, r, [str(channels) for channels in r])
    ax.set_ylim(0, 1)
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1])
    ax.legend(fontsize=8, frameon=False, loc="lower right")


def _alpha(ax: Axes, findings: Findings) -> None:
    """SparQ fig. 4f: estimates of alpha against the true mass, for each temperature."""
    true = findings.alpha[0].flatten()
    ax.plot([0, 1], [0, 1], color="0.5", linewidth=1, linestyle="--")
    for i, (name, (colour, marker)) in enumerate(zip(TEMPERATURES, STYLES, strict=False)):
        estimate = findings.alpha[1 + i].flatten()
        label = f"{TAU[name]}: off by {float((estimate - true).abs().mean()):.3f}"
        ax.plot(
            true, estimate, marker, color=colour, markersize=3.5, alpha=0.6, linewidth=0, label=label, clip_on=False
        )
    ax.set(xlim=(0, 1), ylim=(0, 1))
    ax.legend(fontsize=8, frameon=False, loc="upper left", handletextpad=0.2)
    r, k = findings.grid.alpha
    _label(ax, f"α, from r = {r}, k = {k}", f"true mass of the top {k}", "α by the approximate scores")


def _scores_by_rank(ax: Axes, findings: Findings) -> None:
    """H2O fig. 2b: a line for each layer, and a power law through their mean."""
    from matplotlib import colormaps

    shares = findings.scores_by_rank()
    rank = torch.arange(1, shares.shape[1] + 1)
    for i, line in enumerate(shares):
        colour = colormaps["viridis"](0.9 * i / max(1, len(shares) - 1))
        label = f"layer {findings.layers[i]}" if len(shares) <= 6 or i in (0, len(shares) - 1) else None
        ax.loglog(rank, line, color=colour, linewidth=1.4, label=label)
    p, fit = statistics.fit_power_law(rank, shares.mean(0))
    offset = shares.mean(0).log().mean() - p * rank.double().log().mean()  # the line passes through the means
    power_law = offset.exp() * rank.double() ** p
    ax.loglog(rank, power_law, "--", color="0.4", linewidth=1.2, label=f"rank^{p:.2f}, R² = {fit:.2f}")
    ax.set_xlim(left=1)
    _plain_log_axis(ax.xaxis)
    ax.set_ylim(LEAST_SHARE, 1)
    ax.legend(fontsize=8, frameon=False, loc="upper right")
    _label(
        ax,
        "Accumulated scores by rank",
        f"rank of the token\n{describe_undrawn(shares)}",
        "share of the accumulated score",
    )


def describe_undrawn(shares: Tensor) -> str:
    """What lies below the axis of the shares of the accumulated score, in words. shares (layers, ranks)."""
    below = shares < LEAST_SHARE
    if not below.any():
        return f"no token is below {LEAST_SHARE:g}"
    mass = float((shares * below).sum(-1).mean())
    return f"not drawn: {float(below.double().mean()):.0%} of the tokens, below {LEAST_SHARE:g} each, {mass:.1e} in all"


def _scores_by_frequency(ax: Axes, findings: Findings, tokenizer: Any) -> None:
    """H2O fig. 2c: a point for each token of the vocabulary, the heaviest with marks that a legend names."""
    ids, count, score = findings.scores_by_token()
    heaviest = score.topk(min(HEAVIEST, len(ids))).indices.tolist()
    others = [i for i in range(len(ids)) if i not in heaviest]
    ax.loglog(count[others], score[others], "o", color="0.5", markersize=3.5, alpha=0.5, linewidth=0, clip_on=False)
    marks = []
    for i, (colour, marker) in zip(heaviest, STYLES, strict=False):
        name = token_name(tokenizer, int(ids[i]))
        marks += ax.loglog(
            count[i], score[i], marker, color=colour, markersize=7, markerfacecolor="none", markeredgewidth=1.4,
            label=name, clip_on=False,
        )  # fmt: skip
    legend = ax.legend(
        handles=marks, title="heaviest tokens", loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8,
        title_fontsize=8, numpoints=1, handletextpad=0.2,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)  # a token may have a $
    ax.set_xlim(left=1)
    _plain_log_axis(ax.xaxis)
    _plain_log_axis(ax.yaxis)
    _label(ax, "Heavy hitters and frequency", "times a token occurs in the text", "accumulated score, all layers")


def _plain_log_axis(axis: Axis) -> None:
    """Write the ticks of a logarithmic axis as plain numbers, with some between the powers where these are few."""
    low, high = axis.get_view_interval()
    ticks = plain_log_ticks(low, high)
    if len(ticks) > 1:
        axis.set_ticks(ticks, [f"{tick:,g}" for tick in ticks])
        axis.set_ticks([], minor=True)


def token_name(tokenizer: Any, token: int) -> str:
    """What a token is called in a figure: its text in quotes, and spaces and control characters by their names.

    A token with letters that the font of figures lacks, or with a part of a letter only, is called by its number.
    """
    text = tokenizer.decode([token])
    for marker in SPACE_MARKERS:
        text = text.replace(marker, " ") if text.startswith(marker) else text
    names = []
    for (is_text, name), part in itertools.groupby(text, _letter_kind):
        letters = "".join(part)
        if is_text:
            shown = letters if len(letters) <= LONGEST_NAME else letters[: LONGEST_NAME - 1] + "…"
            names.append(f"'{shown}'" if '"' in shown else f'"{shown}"')
        else:
            names.append(name if len(letters) == 1 else f"{len(letters)} {name}s")
    return " + ".join(names) if names and _can_be_written(text) else f"token {token}"


def _letter_kind(letter: str) -> tuple[bool, str]:
    """Whether a letter can be seen, and its name if it cannot."""
    name = SPACES.get(letter, "" if letter.isprintable() else f"U+{ord(letter):04X}")
    return not name, name


def _can_be_written(text: str) -> bool:
    """Whether the font of figures has all letters of a text that can be seen, and none stands for a broken letter."""
    from matplotlib import font_manager

    glyphs = font_manager.get_font(font_manager.findfont(font_manager.FontProperties())).get_charmap()
    return "\ufffd" not in text and all(ord(letter) in glyphs for letter in text if _letter_kind(letter)[0])


def _cloud(ax: Axes, cloud: Cloud) -> Any:
    """The points of one cloud, coloured by position, and its centres; what a colour bar needs."""
    x, y = cloud.places.T
    points = ax.scatter(x, y, c=range(len(x)), cmap="cividis", s=5, alpha=0.7, linewidths=0)
    ax.scatter(x[cloud.centres], y[cloud.centres], s=42, c=ORANGE, edgecolors="white", linewidths=0.8)
    ax.set(xticks=[], yticks=[])
    ax.set_title(f"{cloud.kind}, layer {cloud.layer}, head {cloud.head}", fontsize=9, loc="left")
    return points
