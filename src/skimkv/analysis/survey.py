"""Let a model read pieces of a text, and take the statistics of every layer and head: `skimkv analyse`."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..eval.shared_prompt import RecordedLayer, record_prompt
from ..hf.cache import Cache
from ..hf.layer import Layer
from ..methods import Dense
from ..methods.sparq import TEMPERATURES
from ..methods.subgen import k_centres
from ..ops.blocks import softmax_with_sinks
from ..stores.base import Shape
from . import TOP, statistics

CENTRES = 16  # centres that greedy k-centre draws in a cloud (SubGen fig. 1)
DELTAS = (0.25, 0.5, 0.75, 1.0)  # cluster radii, in units of the median distance
MASS = 0.9  # of the attention of a query: how many tokens hold it
# How r dimensions are chosen: the names that `statistics.approximate_logits` takes, and what figures call them.
CHANNEL_CHOICES = {
    "top": "r largest of |q|",
    "group": "r largest, one choice a group",
    "first": "first r",
    "random": "random projection",
}


class Grid(NamedTuple):
    """The parameters at which agreement and alpha are measured; they follow from the heads and the piece's length."""

    r: list[int]  # channels
    k: list[int]  # positions
    channels: list[str]  # keys of CHANNEL_CHOICES
    alpha: tuple[int, int]  # (r, k) where alpha is estimated


@dataclass(frozen=True)
class Cloud:
    """The keys or the values of one head in one piece, as points: their map in two dimensions and their clusters."""

    layer: int
    head: int
    kind: str  # "keys" or "values"
    places: Tensor  # (n,2): by t-SNE
    centres: Tensor  # indices of the points that greedy k-centre chose
    deltas: list[float]
    clusters: list[Tensor]  # for each delta m(n): (n,)


@dataclass(frozen=True)
class Findings:
    """What was measured: E pieces of n tokens, L layers with full attention, m queries for each of H G query heads.

    In the shapes below, `heads` is H G.
    """

    layers: list[int]
    tokens: int
    grid: Grid
    ids: Tensor  # (E,n)
    top_mass: Tensor  # (L,heads,E m)
    tokens_of_mass: Tensor  # (L,heads,E m): how many tokens hold MASS of the attention
    q: Tensor  # (L,heads,E m D)
    agreement: Tensor  # (channels,r,k,L,heads): means over queries
    alpha: Tensor  # (1 + temperatures,L,heads,E): the true mass first
    sparsity: Tensor  # (L,heads)
    accumulated: Tensor  # (E,L,H,n): accumulated scores of each key, means over a query group
    correlation_ratio: dict[str, float]
    clouds: list[Cloud]

    def scores_by_token(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens of the vocabulary, how often each occurs, and its accumulated score over pieces and layers."""
        return statistics.scores_by_token(self.ids.flatten(), self.accumulated.sum((1, 2)).flatten())

    def scores_by_rank(self) -> Tensor:
        """Return accumulated scores by rank, as shares of their KV head's sum; means over pieces and heads -> (L,n)."""
        ordered = self.accumulated.sort(-1, descending=True).values
        return (ordered / ordered.sum(-1, keepdim=True)).mean((0, 2))

    def json(self, tokenizer: Any) -> dict[str, Any]:
        """Return the figures' numbers for --json; a list in a layer has one entry for each query head."""
        stats: Any = importlib.import_module("scipy.stats")
        heads = {
            "top_mass": self.top_mass.mean(-1),
            "tokens_of_90_percent": self.tokens_of_mass.float().mean(-1),
            "kurtosis": statistics.kurtosis(self.q),
            "tail_mass": statistics.tail_mass(self.q),
            "sparsity": self.sparsity,
        }
        (r, k), true = self.grid.alpha, self.alpha[0]
        errors = [float((estimate - true).abs().mean()) for estimate in self.alpha[1:]]
        shares = self.scores_by_rank().mean(0)
        exponent, fit = statistics.fit_power_law(torch.arange(1, self.tokens + 1), shares)
        ids, count, score = self.scores_by_token()
        best = score.topk(min(8, len(ids))).indices.tolist()
        return {
            "layers": [
                {"layer": layer, **{name: x[i].tolist() for name, x in heads.items()}}
                for i, layer in enumerate(self.layers)
            ],
            "agreement": [
                {"how": how, "r": r, "k": k, "mean": float(self.agreement[a, b, c].mean())}
                for a, how in enumerate(self.grid.channels)
                for b, r in enumerate(self.grid.r)
                for c, k in enumerate(self.grid.k)
            ],
            "alpha": {
                "r": r, "k": k, "true": float(true.mean()), "off_by": dict(zip(TEMPERATURES, errors, strict=True)),
            },
            "correlation_ratio": self.correlation_ratio,
            "accumulated": {
                "exponent": exponent, "r2": fit, "top_5_percent": float(shares[: max(1, self.tokens // 20)].sum()),
            },
            "heavy_hitters": {
                "spearman": float(stats.spearmanr(count, score).statistic),
                "spearman_per_occurrence": float(stats.spearmanr(count, score / count).statistic),
                "top": [
                    {"token": tokenizer.decode([int(ids[i])]), "count": int(count[i]), "score": float(score[i])}
                    for i in best
                ],
            },
            "clusters": [
                {
                    "layer": cloud.layer, "head": cloud.head, "kind": cloud.kind, "delta": delta,
                    "clusters": int(m[-1]), "exponent": statistics.fit_power_law(torch.arange(1, len(m) + 1), m)[0],
                }
                for cloud in self.clouds for delta, m in zip(cloud.deltas, cloud.clusters, strict=True)
            ],
        }  # fmt: skip


def count_layers(model: Any) -> int:
    """Return how many layers have full attention. Raises ValueError if the model is not supported, or has none."""
    count = sum(isinstance(layer, Layer) for layer in Cache(model, Dense()).layers)
    if not count:
        raise ValueError(f"{type(model).__name__} has no layer of full attention")
    return count


@torch.inference_mode()
def survey(
    model: Any,
    pieces: Sequence[Sequence[int]],
    queries: int,
    clouds: int = 5,
    seed: int = 0,
    tick: Callable[[str], None] = lambda what: None,
) -> Findings:
    """Read pieces of equal length one after another, and measure every layer of full attention.

    queries: positions of each piece whose scores are used. clouds: layers of the last piece that are drawn as clouds,
    one random head of each. tick: called after every layer and every cloud with a word for what was done.
    Raises ValueError if the model is not supported, or if its layers of full attention differ in shape.
    """
    count_layers(model)  # raises ValueError
    at = statistics.query_positions(len(pieces[0]), queries)
    measured: list[dict[str, Tensor]] = []
    values = []
    for piece in pieces:
        layers = record_prompt(model, torch.tensor([piece], device=model.device)).recorded
        shapes = {layer.shape for layer in layers.values()}
        if len(shapes) > 1:
            raise ValueError(f"the layers' shapes differ: {', '.join(map(str, sorted(shapes)))}")
        grid = _grid(shapes.pop(), len(piece))
        of_layers = []
        for layer in layers.values():
            of_layers.append(_measure_layer(layer, at, grid))
            tick("scores")
        measured.append({name: torch.stack([layer[name] for layer in of_layers]) for name in of_layers[0]})
        values.append(torch.stack([layer.v[0].cpu() for layer in layers.values()], 1))  # (H,L,n,D)
    x = {name: torch.stack([of_piece[name] for of_piece in measured]) for name in measured[0]}  # each (E,L,...)
    return Findings(
        layers=list(layers),
        tokens=len(pieces[0]),
        grid=grid,
        ids=torch.tensor(pieces),
        top_mass=x["top_mass"].permute(1, 2, 0, 3).flatten(2),
        tokens_of_mass=x["tokens_of_mass"].permute(1, 2, 0, 3).flatten(2),
        q=x["q"].permute(1, 2, 0, 3, 4).flatten(2),
        agreement=x["agreement"].mean(0).permute(1, 2, 3, 0, 4),
        alpha=x["alpha"].permute(2, 1, 3, 0),
        sparsity=x["sparsity"].mean(0),
        accumulated=x["accumulated"],
        correlation_ratio=_correlation_ratios(torch.stack(values)),
        clouds=list(_clouds(layers, clouds, random.Random(seed), tick)),
    )


def _grid(shape: Shape, n: int) -> Grid:
    channels = [name for name in CHANNEL_CHOICES if name != "group" or shape.G > 1]
    r = sorted({max(1, shape.D * i // 16) for i in (1, 2, 4, 8, 16)})
    return Grid(r, [k for k in (32, 64, 128) if 4 * k <= n], channels, (max(1, shape.D // 4), min(128, n // 4)))


def _measure_layer(layer: RecordedLayer, at: Tensor, grid: Grid) -> dict[str, Tensor]:
    """One layer's statistics of one piece, on the CPU; `heads` are the H G query heads."""
    q, k = layer.q[0].float(), layer.k[0].float()  # (H,G,n,D), (H,n,D)
    softmax = layer.softmax
    scale, softcap, sinks = softmax["scale"], softmax.get("softcap"), softmax.get("sinks")
    at = at.to(q.device)
    x = q[:, :, at]
    exact = statistics.logits(x, k, at, scale, softcap)
    scores = softmax_with_sinks(exact, None if sinks is None else sinks[..., None])
    r, count = grid.alpha
    alpha = [statistics.top_mass(scores, count)]
    alpha += [statistics.estimated_alpha(x, k, at, r, count, name, **softmax) for name in TEMPERATURES]
    statistics_by_name = {
        "top_mass": statistics.top_mass(scores, TOP).flatten(0, 1),  # (heads,m)
        "tokens_of_mass": statistics.tokens_of_mass(scores, MASS).flatten(0, 1),  # (heads,m)
        "q": x.flatten(0, 1),  # (heads,m,D)
        "alpha": torch.stack([mass.mean(-1).flatten() for mass in alpha]),  # (1 + temperatures,heads)
        "agreement": _agreement(x, k, exact, grid),  # (channels,r,k,heads)
        "sparsity": statistics.sparsity(q, k, scale, softcap).flatten(),  # (heads,)
        "accumulated": ops.key_scores(q, k, **softmax),  # (H,n)
    }
    return {name: tensor.cpu() for name, tensor in statistics_by_name.items()}


def _agreement(q: Tensor, k: Tensor, exact: Tensor, grid: Grid) -> Tensor:
    """Agreement with the exact logits, means over the queries -> (channels,r,k,heads)."""
    masked = exact == -torch.inf
    rows = []
    for channels in grid.channels:
        for r in grid.r:
            approximate = statistics.approximate_logits(q, k, r, channels).masked_fill_(masked, -torch.inf)
            rows += [statistics.agreement(exact, approximate, count).mean(-1).flatten() for count in grid.k]
    return torch.stack(rows).reshape(len(grid.channels), len(grid.r), len(grid.k), -1)


def _correlation_ratios(values: Tensor) -> dict[str, float]:
    """The excess correlation ratio of values (E,H,L,n,D) along every axis with more than one entry."""
    axes = {"batch": 0, "sequence": 3, "layer": 2, "head": 1, "channel": 4}
    return {name: statistics.correlation_ratio(values, i) for name, i in axes.items() if values.shape[i] > 1}


def _clouds(
    layers: Mapping[int, RecordedLayer], most: int, draw: random.Random, tick: Callable[[str], None]
) -> Iterator[Cloud]:
    """One head, drawn at random, of up to `most` layers from the first to the last (SubGen fig. 1)."""
    manifold: Any = importlib.import_module("sklearn.manifold")
    count, numbers = min(most, len(layers)), list(layers)
    chosen = sorted({round(i * (len(layers) - 1) / max(1, count - 1)) for i in range(count)})
    for number in (numbers[i] for i in chosen):
        layer = layers[number]
        head = draw.randrange(layer.shape.H)
        for kind, x in (("keys", layer.k[0, head]), ("values", layer.v[0, head])):
            x = x.float().cpu()
            places = manifold.TSNE(perplexity=min(30, len(x) // 4), random_state=0).fit_transform(x.numpy())
            deltas = [share * statistics.median_distance(x) for share in DELTAS]
            clusters = [statistics.cluster_founders(x, delta).cumsum(0) for delta in deltas]
            centres = k_centres(x[None], min(CENTRES, len(x)))[0]
            yield Cloud(number, head, kind, torch.from_numpy(places), centres, deltas, clusters)
            tick("clusters")
