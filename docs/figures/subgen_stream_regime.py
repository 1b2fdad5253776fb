"""Draw where SubGenStream's error guarantee holds: `python docs/figures/subgen_stream_regime.py [OUT.png]`.

The script measures |y - dense| / |dense| of `skimkv.SubGenStream` against `skimkv.Dense` on synthetic keys, over the
sharpness delta * |q| (q carries the scale) and over t, the samples of each cluster. Theorem 1 of the paper
(arXiv 2402.06082) asks for t to grow like exp(2 delta |q|). The script also measures how sharp the heads of the bundled
model are. It takes about two minutes on two cores.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import skimkv

TOKENS, HEAD_SIZE, HEADS, CLUSTERS = 1024, 64, 4, 4
DELTA = 1.0
SHARPNESS = [0.5 * i for i in range(15)]  # delta * |q|
SAMPLES_PER_CLUSTER = [1, 4, 16, 64, 256, 1024, 4096]
RESERVOIRS = [TOKENS // 16, TOKENS // 4, TOKENS, 2 * TOKENS, 8 * TOKENS]
SEEDS = 2
DEMO_DELTA = 49.48  # `skimkv demo` uses this delta for SubGenStream at 1/8 of dense attention's bytes


@dataclass
class Data:
    """Keys, values and queries of HEADS heads; every query is one unit direction times each sharpness.

    k, v (1,H,N,D) · q (1,H,G,D) with G = len(SHARPNESS).
    """

    k: Tensor
    v: Tensor
    q: Tensor


def make(lookup: bool, seed: int) -> Data:
    """Draw clusters of keys of radius DELTA whose centres are far apart.

    With `lookup`, one key of each cluster points in the direction of the query and all others point away from it, as in
    a head that looks one token up. Without, the keys lie around their centres in random directions.
    """
    draw = torch.Generator().manual_seed(seed)

    def unit(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(torch.randn(*shape, generator=draw), dim=-1)

    direction = unit(HEADS, 1, HEAD_SIZE)
    centres = 4 * DELTA * unit(HEADS, CLUSTERS, HEAD_SIZE)
    centres -= (centres * direction).sum(-1, keepdim=True) * direction  # no centre is nearer to the query than another
    cluster = torch.arange(TOKENS) % CLUSTERS
    offsets = unit(HEADS, TOKENS, HEAD_SIZE)
    if lookup:
        offsets = -direction.expand_as(offsets).clone()
        places = TOKENS // 2 + torch.randperm(TOKENS // (2 * CLUSTERS), generator=draw)[:1] * CLUSTERS
        offsets[:, places[0] : places[0] + CLUSTERS] = direction
    offsets[:, :CLUSTERS] = 0  # the first key of a cluster is its representative
    k = centres[:, cluster] + 0.99 * DELTA * offsets
    v = torch.randn(HEADS, TOKENS, HEAD_SIZE, generator=draw) + unit(HEADS, 1, HEAD_SIZE) * HEAD_SIZE**0.5
    q = direction * torch.tensor(SHARPNESS)[:, None] / DELTA
    return Data(k[None], v[None], q[None])


def decode(method: skimkv.Method, data: Data) -> Tensor:
    """Cache all tokens but the last, decode the last: y (H,G,D)."""
    store = method.store(skimkv.Shape(1, HEADS, len(SHARPNESS), HEAD_SIZE), torch.float32)
    store.append(data.k[:, :, :-1], data.v[:, :, :-1])
    return method.decode(store, data.q, data.k[:, :, -1], data.v[:, :, -1], scale=1.0)[0]


def error(lookup: bool, t: int, s: int) -> Tensor:
    """The median over heads and seeds of |y - dense| / |dense|, for each sharpness (G,)."""
    errors = []
    for seed in range(SEEDS):
        data = make(lookup, seed)
        dense = decode(skimkv.Dense(), data)
        y = decode(skimkv.SubGenStream(delta=DELTA, t=t, s=s, seed=seed), data)
        errors.append((y - dense).norm(dim=-1) / dense.norm(dim=-1))
    return torch.cat(errors).median(0).values


QUERY_NORMS: list[Tensor] = []


@dataclass(frozen=True, repr=False)
class Recorder(skimkv.Dense):
    """Dense attention that also notes the norms of the scaled queries of every prompt."""

    def prefill(self, store: Any, q: Tensor, k: Tensor, v: Tensor, *, scale: float, **rest: Any) -> Tensor:
        QUERY_NORMS.append((q * scale).norm(dim=-1).flatten())
        return super().prefill(store, q, k, v, scale=scale, **rest)


def bundled_sharpness() -> Tensor:
    """The 5th, 50th and 95th percentile of delta * |q| over all heads of the bundled model, which reads LICENSE."""
    model, tokenizer = skimkv.load("builtin")
    text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    ids = torch.tensor([tokenizer(text[:6000]).input_ids])
    with torch.inference_mode():
        model(ids, past_key_values=skimkv.Cache(model, Recorder()))
    skimkv.detach(model)
    return DEMO_DELTA * torch.cat(QUERY_NORMS).quantile(torch.tensor([0.05, 0.5, 0.95]))


def draw(maps: Sequence[tuple[str, Tensor]], lines: Sequence[tuple[int, Tensor]], model: Tensor, path: Path) -> None:
    """Two maps of the error over sharpness and t, and one panel of lines over sharpness, one for each s."""
    import matplotlib
    from matplotlib.colors import LogNorm

    from skimkv.plotting import label_axes, new_figure, save

    figure = new_figure((13, 4.4))
    axes = figure.subplots(1, 3)
    rows = list(range(len(SAMPLES_PER_CLUSTER)))
    bound = [2 * x / math.log(SAMPLES_PER_CLUSTER[1]) for x in SHARPNESS]  # exp(2x) as a row, t growing by one factor
    for ax, (title, errors) in zip(axes, maps, strict=False):
        colours = {"norm": LogNorm(0.01, 100), "cmap": "RdYlBu_r"}
        image = ax.pcolormesh(SHARPNESS, rows, errors.clamp(0.01, 100), shading="nearest", **colours)
        ax.plot(SHARPNESS, bound, color="black", linewidth=2)
        ax.text(1.45, 4.2, "t = exp(2 δ|q|)", ha="center", fontsize=9, color="white")
        ax.set(xlim=(-0.25, max(SHARPNESS) + 0.25), ylim=(-0.5, len(rows) - 0.5))
        ax.set_yticks(rows, [str(t) for t in SAMPLES_PER_CLUSTER])
        label_axes(ax, title, "sharpness δ|q|", "t, samples of each cluster", grid=False)
    bar = figure.colorbar(image, ax=axes[1], label="error |y − dense| / |dense|")
    bar.ax.axhline(1, color="black", linewidth=1)

    ax = axes[2]
    colours = matplotlib.colormaps["viridis"](torch.linspace(0.1, 0.85, len(lines)).numpy())
    for (s, errors), colour in zip(lines, colours, strict=True):
        name = f"s = {s // TOKENS} N" if s >= TOKENS else f"s = N / {TOKENS // s}"
        ax.plot(SHARPNESS, errors, marker="o", markersize=4, color=colour, label=name)
    ax.axhline(1, color="black", linewidth=1)
    ax.set(yscale="log", ylim=(0.008, 30), xlim=(0, max(SHARPNESS)))
    low, middle, high = model.tolist()
    note = "Heads of the bundled model lie\nfar to the right: "
    note += f"median {middle:.0f},\n90% of queries from {low:.0f} to {high:.0f}"
    ax.text(max(SHARPNESS) - 0.1, 24, note, ha="right", va="top", fontsize=9)
    label_axes(ax, f"Lookup head, t = {SAMPLES_PER_CLUSTER[-1]}", "sharpness δ|q|", "error |y − dense| / |dense|")
    ax.legend(fontsize=8, frameon=False, loc="upper left", title="samples of values", title_fontsize=8)
    save(figure, path)


def main() -> None:
    """Measure, draw, and print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", nargs="?", type=Path, default=Path(__file__).with_name("subgen_stream_regime.png"))
    path = parser.parse_args().path
    maps = []
    for title, lookup in (("Diffuse head: keys around their centres", False), ("Lookup head: one key matters", True)):
        errors = torch.stack([error(lookup, t, RESERVOIRS[-1]) for t in SAMPLES_PER_CLUSTER])
        maps.append((title, errors))
        print(title, *(f"t={t}: {row.tolist()}" for t, row in zip(SAMPLES_PER_CLUSTER, errors, strict=True)), sep="\n")
    lines = [(s, error(True, SAMPLES_PER_CLUSTER[-1], s)) for s in RESERVOIRS]
    print("by s:", *(f"s={s}: {row.tolist()}" for s, row in lines), sep="\n")
    model = bundled_sharpness()
    print(f"delta |q| of the bundled model at delta = {DEMO_DELTA}, 5th, 50th and 95th percentile: {model.tolist()}")
    draw(maps, lines, model, path)


if __name__ == "__main__":
    main()
