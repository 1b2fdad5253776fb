"""A model reads pieces of a text, and analysis.py's statistics are taken of every layer and head: `skimkv analyse`."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..eval import shared_prompt as prompt
from ..hf.attach import Cache
from ..hf.layer import Layer
from ..methods import Dense
from ..methods.sparq import TEMPERATURES
from ..methods.subgen import k_centres
from . import statistics as analysis

TOP = 32  # positions, of SparQ fig. 4a
CENTRES = 16  # of SubGen fig. 1
DELTAS = (0.25, 0.5, 0.75, 1.0)  # of the median distance
HOWS = {
    "top": "r largest of |q|",
    "group": "r largest, one choice a group",
    "first": "first r",
    "random": "random projection",
}
LEAST = 4 * TOP  # tokens of a piece: half are history, of which the top 32 must be a choice


@dataclass
class Cloud:
    """The keys or values of one head of one piece: (n,2) t-SNE places, its k-centre points, m(n) for each delta."""

    layer: int
    head: int
    kind: str
    places: Tensor
    centres: Tensor
    deltas: list[float]
    clusters: list[Tensor]


@dataclass
class Findings:
    """E pieces, L layers, heads = H G query heads, m queries each. `layers` are those of full attention."""

    layers: list[int]
    tokens: int
    r: list[int]
    k: list[int]
    coverage: tuple[int, int]  # r, k of alpha
    hows: list[str]
    top_mass: Tensor = field(default_factory=Tensor)  # (L,heads,E m)
    q: Tensor = field(default_factory=Tensor)  # (L,heads,E m D)
    agreement: Tensor = field(default_factory=Tensor)  # (hows,r,k,L,heads): means over queries
    alpha: Tensor = field(default_factory=Tensor)  # (1 + temperatures,L,heads,E): the true mass first
    sparsity: Tensor = field(default_factory=Tensor)  # (L,heads)
    accumulated: Tensor = field(default_factory=Tensor)  # (E,L,H,n): mean over a group
    ratio: dict[str, float] = field(default_factory=dict)
    ids: Tensor = field(default_factory=Tensor)  # (E,n)
    clouds: list[Cloud] = field(default_factory=list)

    def heavy(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens of the vocabulary, their counts and accumulated scores, over all pieces and layers."""
        return analysis.by_token(self.ids.flatten(), self.accumulated.sum((1, 2)).flatten())

    def ranked(self) -> Tensor:
        """Accumulated scores by rank in each KV head, as shares of their sum, mean over pieces and heads -> (L,n)."""
        ordered = self.accumulated.sort(-1, descending=True).values
        return (ordered / ordered.sum(-1, keepdim=True)).mean((0, 2))

    def json(self, tokenizer: Any) -> dict[str, Any]:
        """The figures' numbers; a list in a layer has an entry per query head."""
        stats: Any = importlib.import_module("scipy.stats")
        heads = {
            "top_mass": self.top_mass.mean(-1), "kurtosis": analysis.kurtosis(self.q),
            "tail_mass": analysis.tail_mass(self.q), "sparsity": self.sparsity,
        }  # fmt: skip
        shares, true = self.ranked().mean(0), self.alpha[0]
        off = [float((x - true).abs().mean()) for x in self.alpha[1:]]
        exponent, fit = analysis.power_law(torch.arange(1, self.tokens + 1), shares)
        ids, count, score = self.heavy()
        best = score.topk(min(8, len(ids))).indices.tolist()
        return {
            "layers": [
                {"layer": layer, **{name: x[i].tolist() for name, x in heads.items()}}
                for i, layer in enumerate(self.layers)
            ],
            "agreement": [
                {"how": how, "r": r, "k": k, "mean": float(self.agreement[a, b, c].mean())}
                for a, how in enumerate(self.hows) for b, r in enumerate(self.r) for c, k in enumerate(self.k)
            ],
            "alpha": {
                "r": self.coverage[0], "k": self.coverage[1], "true": float(true.mean()),
                "off_by": dict(zip(TEMPERATURES, off, strict=True)),
            },
            "correlation_ratio": self.ratio,
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
                    "clusters": int(m[-1]), "exponent": analysis.power_law(torch.arange(1, len(m) + 1), m)[0],
                }
                for cloud in self.clouds for delta, m in zip(cloud.deltas, cloud.clusters, strict=True)
            ],
        }  # fmt: skip


def served(model: Any) -> int:
    """How many layers have full attention. Raises ValueError if the model cannot be served, or has none."""
    count = sum(isinstance(layer, Layer) for layer in Cache(model, Dense()).layers)
    if not count:
        raise ValueError(f"{type(model).__name__} has no layer of full attention")
    return count


@torch.inference_mode()
def survey(
    model: Any, pieces: Sequence[Sequence[int]], queries: int, clouds: int = 5, seed: int = 0,
    tick: Callable[[str], None] = lambda what: None,
) -> Findings:  # fmt: skip
    """One piece after another. Raises ValueError if the layers of full attention differ in shape."""
    served(model)  # refuses
    n = len(pieces[0])
    at = analysis.positions(n, queries)
    each: list[dict[str, list[Tensor]]] = []
    values = []
    for piece in pieces:
        held = prompt.blocks(prompt.read(model, torch.tensor([piece], device=model.device))[0])
        shapes = {block.shape for _, block in held}
        if len(shapes) > 1:
            raise ValueError(f"the layers' shapes differ: {', '.join(map(str, sorted(shapes)))}")
        (_, _, G, D), layers = held[0][1].shape, [i for i, _ in held]
        hows = ["top", "group", "first", "random"] if G > 1 else ["top", "first", "random"]
        r, k = sorted({max(1, D * i // 16) for i in (1, 2, 4, 8, 16)}), [k for k in (32, 64, 128) if 4 * k <= n]
        found = Findings(layers, n, r, k, (max(1, D // 4), min(128, n // 4)), hows, ids=torch.tensor(pieces))
        each.append({})
        for _, block in held:
            for name, x in _layer(block, at, found).items():
                each[-1].setdefault(name, []).append(x.cpu())
            tick("scores")
        values.append(torch.stack([block.v[0].cpu() for _, block in held], 1))  # (H,L,n,D)
    whole = {name: torch.stack([torch.stack(one[name]) for one in each]) for name in each[0]}  # (E,L,...)
    found.top_mass, found.q = (whole[name].permute(1, 2, 0, 3, *range(4, whole[name].ndim)).flatten(2) for name in
                               ("top_mass", "q"))  # fmt: skip
    found.agreement = whole["agreement"].mean(0).permute(1, 2, 3, 0, 4)
    found.alpha = whole["alpha"].permute(2, 1, 3, 0)
    found.sparsity, found.accumulated = whole["sparsity"].mean(0), whole["accumulated"]
    V = torch.stack(values)  # (E,H,L,n,D)
    for axis, name in ((0, "batch"), (3, "sequence"), (2, "layer"), (1, "head"), (4, "channel")):
        if V.shape[axis] > 1:
            found.ratio[name] = analysis.correlation_ratio(V, axis)
    found.clouds = list(_clouds(held, clouds, random.Random(seed), tick))
    return found


def _layer(block: prompt.Block, at: Tensor, found: Findings) -> dict[str, Tensor]:
    """One layer's statistics of one piece; heads are the H G query heads."""
    q, k = block.q[0].float(), block.k[0].float()  # (H,G,n,D), (H,n,D)
    scale, softcap = block.given["scale"], block.given["softcap"]
    at = at.to(q.device)
    x = q[:, :, at]
    exact = analysis.logits(x, k, at, scale, softcap)
    past = exact == -torch.inf
    s = exact.softmax(-1)
    r, count = found.coverage
    alpha = [analysis.top_mass(s, count)]
    alpha += [analysis.coverage(x, k, at, scale, softcap, r, count, name) for name in TEMPERATURES]
    agreement = []
    for how in found.hows:
        seen = [analysis.projected(x, k, r, how).masked_fill_(past, -torch.inf) for r in found.r]
        agreement.append([[analysis.agreement(exact, y, k_).mean(-1).flatten() for k_ in found.k] for y in seen])
    return {
        "top_mass": analysis.top_mass(s, TOP).flatten(0, 1),  # (heads,m)
        "q": x.flatten(0, 1),  # (heads,m,D)
        "alpha": torch.stack([a.mean(-1).flatten() for a in alpha]),  # (1 + temperatures,heads)
        "agreement": torch.stack([torch.stack([torch.stack(row) for row in rows]) for rows in agreement]),
        "sparsity": analysis.sparsity(q, k, scale, softcap).flatten(),
        "accumulated": ops.columns(q, k, scale, softcap),  # (H,n)
    }


def _clouds(
    held: list[tuple[int, prompt.Block]], most: int, draw: random.Random, tick: Callable[[str], None]
) -> Iterator[Cloud]:
    """One head, drawn at random, of up to `most` layers from the first to the last (SubGen fig. 1)."""
    manifold: Any = importlib.import_module("sklearn.manifold")
    few = min(most, len(held))
    chosen = sorted({round(i * (len(held) - 1) / max(1, few - 1)) for i in range(few)})
    for layer, block in (held[i] for i in chosen):
        head = draw.randrange(block.shape.H)
        for kind, x in (("keys", block.k[0, head]), ("values", block.v[0, head])):
            x = x.float().cpu()
            places = manifold.TSNE(perplexity=min(30, len(x) // 4), random_state=0).fit_transform(x.numpy())
            median = analysis.median_distance(x)
            clusters = [analysis.founders(x, share * median).cumsum(0) for share in DELTAS]
            centres = k_centres(x[None], min(CENTRES, len(x)))[0]
            deltas = [share * median for share in DELTAS]
            yield Cloud(layer, head, kind, torch.from_numpy(places), centres, deltas, clusters)
            tick("clusters")
