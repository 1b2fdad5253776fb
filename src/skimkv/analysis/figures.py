"""The papers' figures of scores, queries, heavy hitters and clusters, from what survey.py found."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import Tensor

from ..methods.sparq import TEMPERATURES
from ..plotting import STYLES
from . import statistics as analysis
from .survey import CENTRES, DELTAS, HOWS, TOP, Findings

TAUS = {"coverage": "τ = √(D |q[i₁]| / |q|)", "sqrt_d": "τ = √D", "sqrt_r": "τ = √r"}
MIDDLE = 0.5  # of the layers: whose queries are drawn as a density


def _titled(ax: Axes, title: str, x: str, y: str) -> None:
    ax.set_title(title, loc="left", fontsize=10, weight="bold")
    ax.set_xlabel(x, fontsize=9)
    ax.set_ylabel(y, fontsize=9)
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)


def _strip(ax: Axes, layers: Sequence[int], x: Tensor, colour: str) -> None:
    """A point per head in each layer's column, a bar at their mean. x (L,heads)."""
    for i, row in enumerate(x.tolist()):
        wide = [i + (j / max(1, len(row) - 1) - 0.5) * 0.5 for j in range(len(row))]
        ax.plot(wide, row, "o", color=colour, markersize=3.5, alpha=0.75, linewidth=0)
        ax.plot([i - 0.35, i + 0.35], [sum(row) / len(row)] * 2, color="black", linewidth=1.5)
    every = max(1, len(layers) // 8)
    ax.set_xticks(range(0, len(layers), every), [str(layer) for layer in layers[::every]])


def sparq(found: Findings, path: Path) -> None:
    """SparQ fig. 4 and E1, E2, in eight panels."""
    fig, axes = plt.subplots(2, 4, figsize=(17, 7.6), dpi=130, layout="constrained")
    (a, b, c, d), (e, f, g, h) = axes
    mass = found.top_mass.flatten()
    a.hist(mass.tolist(), bins=25, range=(0, 1), color=STYLES[0][0], edgecolor="white", linewidth=0.5)
    a.axvline(float(mass.mean()), color="black", linewidth=1.2, linestyle="--")
    a.text(float(mass.mean()) - 0.02, 0.97, f"mean {mass.mean():.2f}", transform=a.get_xaxis_transform(), fontsize=8,
           ha="right", va="top")  # fmt: skip
    _titled(a, f"Mass of the {TOP} largest scores", "sum of softmax scores", "queries, all heads")
    heads = found.top_mass.mean(-1)
    image = b.imshow(heads.tolist(), cmap="viridis", vmin=0, vmax=1, aspect="auto", origin="lower")
    fig.colorbar(image, ax=b, label="mean mass")
    _titled(b, "… for each head", "query head", "layer")
    b.set_yticks(range(len(found.layers)), list(map(str, found.layers)))
    if len(found.layers) > 12:
        b.set_yticks(range(0, len(found.layers), 4), [str(i) for i in found.layers[::4]])
    if heads.shape[1] <= 12:
        b.set_xticks(range(heads.shape[1]))
    middle = int(MIDDLE * (len(found.layers) - 1))
    _density(c, found.q[middle], found.layers[middle])
    _strip(d, found.layers, analysis.kurtosis(found.q), STYLES[0][0])
    d.axhline(0, color="0.5", linestyle="--", linewidth=1)
    d.set_yscale("symlog", linthresh=1)
    _titled(d, "Kurtosis of q, a point a head", "layer", "Fisher kurtosis (0: Gaussian)")
    _strip(e, found.layers, analysis.tail_mass(found.q), STYLES[1][0])
    e.axhline(1, color="0.5", linestyle="--", linewidth=1)
    _titled(e, "Mass of q beyond 3σ", "layer", "times a Gaussian's")
    top = found.k[0]
    for how, (colour, marker) in zip(found.hows, STYLES, strict=False):
        x = found.agreement[found.hows.index(how), :, 0].flatten(1)  # (r, layers heads)
        low, middle_, high = (x.quantile(p, dim=1).tolist() for p in (0.25, 0.5, 0.75))
        f.plot(found.r, middle_, color=colour, marker=marker, linewidth=1.8, label=HOWS[how])
        f.fill_between(found.r, low, high, color=colour, alpha=0.12, linewidth=0)
    _titled(f, f"Which channels find the top {top}", "r, channels read (of D)", f"top-{top} agreement, quartiles")
    for k, (colour, marker) in zip(found.k, STYLES, strict=False):
        line = found.agreement[0, :, found.k.index(k)].flatten(1).mean(1).tolist()
        g.plot(found.r, line, color=colour, marker=marker, linewidth=1.8, label=f"k = {k}")
    _titled(g, "… for other k (r largest of |q|)", "r, channels read (of D)", "top-k agreement, mean")
    for ax in (f, g):
        ax.set_xscale("log", base=2)
        ax.set_xticks(found.r, [str(r) for r in found.r])
        ax.minorticks_off()
        ax.set_ylim(0, 1.35)
        ax.set_yticks([0, 0.25, 0.5, 0.75, 1])
        ax.legend(fontsize=8, frameon=False, loc="upper left")
    true = found.alpha[0].flatten()
    h.plot([0, 1], [0, 1], color="0.5", linewidth=1, linestyle="--")
    for name, (colour, marker) in zip(TEMPERATURES, STYLES, strict=False):
        guess = found.alpha[1 + TEMPERATURES.index(name)].flatten()
        error = float((guess - true).abs().mean())
        h.plot(true, guess, marker, color=colour, markersize=3.5, alpha=0.6, linewidth=0,
               label=f"{TAUS[name]}: off by {error:.3f}")  # fmt: skip
    r, k = found.coverage
    least = min(float(found.alpha.min()), 0.9)
    h.set(xlim=(least - 0.02, 1.01), ylim=(least - 0.02, 1.01))
    h.legend(fontsize=8, frameon=False, loc="upper left", handletextpad=0.2)
    _titled(h, f"α, from r = {r}, k = {k}", f"true mass of the top {k}", "α by the approximate scores")
    fig.savefig(path)
    plt.close(fig)


def _density(ax: Axes, q: Tensor, layer: int) -> None:
    """A kernel density estimate of the components of q, on a log scale, beside a Gaussian's."""
    stats: Any = importlib.import_module("scipy.stats")
    x = q.flatten().double()
    x = ((x - x.mean()) / x.std())[:: max(1, len(x) // 20000)]
    grid = torch.linspace(-8, 8, 321, dtype=torch.float64)
    ax.semilogy(grid, stats.gaussian_kde(x.numpy())(grid.numpy()), color=STYLES[0][0], linewidth=1.8, label="q")
    normal = (-grid.square() / 2).exp() / math.sqrt(2 * math.pi)
    ax.semilogy(grid, normal, "--", color="0.5", linewidth=1.2, label="Gaussian")
    ax.set_ylim(1e-5, 2)
    ax.legend(fontsize=8, frameon=False)
    _titled(ax, f"Components of q, layer {layer}, all heads", "standard deviations from the mean", "density (log)")


def h2o(found: Findings, tokenizer: Any, path: Path) -> None:
    """H2O fig. 2: sparsity by layer, accumulated scores by rank, and by how often a token occurs."""
    fig, (a, b, c) = plt.subplots(1, 3, figsize=(15, 4.6), dpi=130, layout="constrained")
    _strip(a, found.layers, 100 * found.sparsity, STYLES[0][0])
    a.set_ylim(min(90.0, 100 * float(found.sparsity.min()) - 2), 100)
    _titled(a, "Scores that hardly count, a point a head", "layer", "% of scores below 1% of their row's largest")
    ranked = found.ranked()
    rank = torch.arange(1, ranked.shape[1] + 1)
    shades = plt.colormaps["viridis"]
    for i, line in enumerate(ranked):
        shade = shades(0.9 * i / max(1, len(ranked) - 1))
        label = f"layer {found.layers[i]}" if len(ranked) <= 6 or i in (0, len(ranked) - 1) else None
        b.loglog(rank, line, color=shade, linewidth=1.4, label=label)
    p, fit = analysis.power_law(rank, ranked.mean(0))
    middle = ranked.mean(0).log().mean() - p * rank.double().log().mean()  # the line passes through the means
    fitted = middle.exp() * rank.double() ** p
    b.loglog(rank, fitted, "--", color="0.4", linewidth=1.2, label=f"rank^{p:.2f}, R² = {fit:.2f}")
    b.set_ylim(float(ranked[ranked > 0].min()) / 2, 4 * float(ranked.max()))
    b.legend(fontsize=8, frameon=False)
    _titled(b, "Accumulated scores by rank", "rank of the token", "share of the accumulated score")
    ids, count, score = found.heavy()
    c.loglog(count, score, "o", color=STYLES[1][0], markersize=3.5, alpha=0.5, linewidth=0)
    for i in score.topk(min(5, len(ids))).indices.tolist():
        text = repr(tokenizer.decode([int(ids[i])]))
        c.annotate(text, (float(count[i]), float(score[i])), (-5, 4), textcoords="offset points", fontsize=8,
                   ha="right")  # fmt: skip
    _titled(c, "Heavy hitters and frequency", "times a token occurs in the text", "accumulated score, all layers")
    fig.savefig(path)
    plt.close(fig)


def subgen(found: Findings, path: Path) -> None:
    """SubGen fig. 1: t-SNE of keys over that of values, a column per layer; the centres are drawn in."""
    layers = list(dict.fromkeys(cloud.layer for cloud in found.clouds))
    fig, axes = plt.subplots(
        2, len(layers), figsize=(3.1 * len(layers) + 0.6, 6.6), dpi=130, squeeze=False, layout="constrained"
    )
    points = None
    for cloud in found.clouds:
        ax = axes[int(cloud.kind == "values")][layers.index(cloud.layer)]
        x, y = cloud.places.T
        points = ax.scatter(x, y, c=range(len(x)), cmap="cividis", s=5, alpha=0.7, linewidths=0)
        ax.scatter(x[cloud.centres], y[cloud.centres], s=42, c=STYLES[1][0], edgecolors="white", linewidths=0.8)
        ax.set(xticks=[], yticks=[])
        ax.set_title(f"{cloud.kind}, layer {cloud.layer}, head {cloud.head}", fontsize=9, loc="left")
    if points is not None:
        fig.colorbar(points, ax=axes, label="position in the text", shrink=0.7)
    fig.suptitle(f"t-SNE; orange: {CENTRES} centres by greedy k-centre", x=0.01, ha="left", fontsize=11, weight="bold")
    fig.savefig(path)
    plt.close(fig)


def clusters(found: Findings, path: Path) -> None:
    """m(n), the clusters of SubGen's algorithm 1 after n tokens, for each delta; the mean over the heads drawn."""
    fig, axes = plt.subplots(1, 2, figsize=(11, 4.6), dpi=130, sharey=True, layout="constrained")
    n = torch.arange(1, found.tokens + 1)
    for ax, kind in zip(axes, ("keys", "values"), strict=True):
        mine = [cloud.clusters for cloud in found.clouds if cloud.kind == kind]
        for i, (share, (colour, _)) in enumerate(zip(DELTAS, STYLES, strict=False)):
            m = torch.stack([each[i] for each in mine]).double().mean(0)
            ax.loglog(n, m, color=colour, linewidth=1.8, label=f"δ = {share:g} × median distance")
        ax.loglog(n, n, "--", color="0.5", linewidth=1)
        _titled(ax, f"Clusters that {kind} form", "tokens n", "clusters m(n); dashed: every token its own")
        ax.legend(fontsize=8, frameon=False)
    fig.savefig(path)
    plt.close(fig)
