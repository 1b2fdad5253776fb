"""The papers' figures of scores, queries, heavy hitters and clusters, drawn from what survey.py measured."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..methods.sparq import TEMPERATURES
from ..plotting import STYLES, label_axes, line_styles, log2_axis, new_figure, panel_grid
from . import TOP, statistics
from .output_error import OutputError
from .survey import CENTRES, CHANNEL_CHOICES, DELTAS, Cloud, Findings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TAU = {"coverage": "τ = √(D |q[i₁]| / |q|)", "sqrt_d": "τ = √D", "sqrt_r": "τ = √r"}  # of each temperature
BLUE, ORANGE = STYLES[0][0], STYLES[1][0]
LEAST_SHARE = 1e-6  # of the accumulated score: smaller shares are counted in words and not drawn
MIDDLE_LAYER = 0.5  # of the depth: the layer whose queries are drawn as a density


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
    d.set_yscale("symlog", linthresh=1)
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
    """Save H2O's fig. 2: sparsity by layer, accumulated scores by rank, and by how often a token occurs."""
    figure = new_figure((15, 4.6), dpi=130)
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
    every = max(1, len(layers) // 8)
    ax.set_xticks(range(0, len(layers), every), [str(layer) for layer in layers[::every]])


def _top_mass_histogram(ax: Axes, mass: Tensor) -> None:
    """SparQ fig. 4a, with a dashed line at the mean."""
    mean = float(mass.mean())
    ax.hist(mass.tolist(), bins=25, range=(0, 1), color=BLUE, edgecolor="white", linewidth=0.5)
    ax.axvline(mean, color="black", linewidth=1.2, linestyle="--")
    where: Any = {"transform": ax.get_xaxis_transform(), "ha": "right", "va": "top"}
    ax.text(mean - 0.02, 0.97, f"mean {mean:.2f}", fontsize=8, **where)
    ax.set_xlim(0, 1)
    _label(ax, f"Mass of the {TOP} largest scores", "sum of softmax scores", "queries, all heads")


def _top_mass_heads(ax: Axes, figure: Figure, findings: Findings) -> None:
    """SparQ fig. 4b: an image of layers × heads."""
    heads, layers = findings.top_mass.mean(-1), findings.layers
    image = ax.imshow(heads.tolist(), cmap="viridis", vmin=0, vmax=1, aspect="auto", origin="lower")
    figure.colorbar(image, ax=ax, label="mean mass")
    _label(ax, "… for each head", "query head", "layer")
    every = 4 if len(layers) > 12 else 1
    ax.set_yticks(range(0, len(layers), every), [str(layer) for layer in layers[::every]])
    if heads.shape[1] <= 12:
        ax.set_xticks(range(heads.shape[1]))


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
    """H2O fig. 2c: a point for each token of the vocabulary, the five heaviest by name."""
    ids, count, score = findings.scores_by_token()
    ax.loglog(count, score, "o", color=ORANGE, markersize=3.5, alpha=0.5, linewidth=0, clip_on=False)
    ax.set_xlim(left=1)
    near: Any = {"textcoords": "offset points", "fontsize": 8, "ha": "right"}
    for i in score.topk(min(5, len(ids))).indices.tolist():
        ax.annotate(repr(tokenizer.decode([int(ids[i])])), (float(count[i]), float(score[i])), (-5, 4), **near)
    _label(ax, "Heavy hitters and frequency", "times a token occurs in the text", "accumulated score, all layers")


def _cloud(ax: Axes, cloud: Cloud) -> Any:
    """The points of one cloud, coloured by position, and its centres; what a colour bar needs."""
    x, y = cloud.places.T
    points = ax.scatter(x, y, c=range(len(x)), cmap="cividis", s=5, alpha=0.7, linewidths=0)
    ax.scatter(x[cloud.centres], y[cloud.centres], s=42, c=ORANGE, edgecolors="white", linewidths=0.8)
    ax.set(xticks=[], yticks=[])
    ax.set_title(f"{cloud.kind}, layer {cloud.layer}, head {cloud.head}", fontsize=9, loc="left")
    return points
