"""The cheapest SparQ whose loss stays within a bound, for one model and text: `skimkv tune`.

Pieces of the text: a dense prompt, read once for all methods, then tokens that are given one at a time, so that the
method decodes each before the next is scored. The loss is the mean of -log p of those tokens, in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import torch

from ..methods import Dense, SparQ
from ..methods.base import Method
from . import shared_prompt as prompt
from .answer import Ask, answer
from .results import Results, error, interval

RANKS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class Loss(NamedTuple):
    """Of one method: nats a token for each piece, and the bytes that a decode step of one sequence moves."""

    nats: list[float]
    bytes: int


class Tried(NamedTuple):
    """The loss over dense's, less 1: the mean of paired differences, its standard error and 95% interval."""

    method: Method
    increase: float
    stderr: float | None
    low: float | None
    high: float | None
    bytes: int
    share: float  # of dense's bytes

    def json(self) -> dict[str, Any]:
        return {**self._asdict(), "method": repr(self.method)}


def compare(method: Method, own: Loss, dense: Loss) -> Tried:
    """Both on the same pieces."""
    whole = fmean(dense.nats)
    differences = [(a - b) / whole for a, b in zip(own.nats, dense.nats, strict=True)]
    middle, low, high = interval(differences)
    assert middle is not None
    return Tried(method, middle, error(differences), low, high, own.bytes, own.bytes / dense.bytes)


@dataclass
class Scorer:
    """Losses on pieces of `n` prompt tokens and the tokens after them, kept in a results file.

    pieces: ids, all of one length; the first token after the prompt is fed and not scored, since its prediction is
    the dense prompt's. `key` tells this run's records from others in the file.
    """

    model: Any
    tokenizer: Any
    pieces: Sequence[Sequence[int]]
    n: int
    results: Results
    key: dict[str, Any]
    batch: int = 8
    _held: list[tuple[Any, Any, list[Sequence[int]]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._known = {
            (record["method"], record["id"]): record
            for record in self.results.records
            if all(record.get(name) == value for name, value in self.key.items())
        }

    @torch.inference_mode()
    def _prompts(self) -> Iterator[tuple[Any, Any, list[Sequence[int]]]]:
        """Read when first needed, then held: what all methods share."""
        for start in range(0, len(self.pieces), self.batch):
            if start // self.batch == len(self._held):
                part = list(self.pieces[start : start + self.batch])
                ids = torch.tensor([piece[: self.n] for piece in part], device=self.model.device)
                self._held.append((*prompt.read(self.model, ids), part))
            yield self._held[start // self.batch]

    @torch.inference_mode()
    def loss(self, method: Method) -> Loss:
        """Of all pieces; those that the file holds are not run again."""
        if any((repr(method), str(i)) not in self._known for i in range(len(self.pieces))):
            number = 0
            for held, logits, part in self._prompts():
                asks = [Ask(list(piece[self.n :]), len(piece) - self.n - 1) for piece in part]
                for said in answer(self.model, self.tokenizer, prompt.fill(self.model, held, method), logits, asks):
                    self._add(method, number, said.bits * math.log(2) / asks[0].scored, round(said.bytes / said.steps))
                    number += 1
        records = [self._known[repr(method), str(i)] for i in range(len(self.pieces))]
        return Loss([r["score"] for r in records], records[0]["bytes"])

    def layers(self) -> list[tuple[Any, torch.dtype]]:
        """(shape, dtype) of each layer that a method serves."""
        held, _, _ = next(self._prompts())
        return [(block.shape, block.dtype) for _, block in prompt.blocks(held)]

    def _add(self, method: Method, number: int, nats: float, moved: int) -> None:
        record = {**self.key, "method": repr(method), "id": str(number), "score": nats, "bytes": moved}
        if (repr(method), str(number)) not in self._known:
            self.results.add(record)
            self._known[repr(method), str(number)] = record


def search(
    ranks: Sequence[int],
    counts: Sequence[int],
    channels: Sequence[str],
    cost: Callable[[Method], float],
    within: Callable[[Method], bool],
    limit: float,
) -> Method | None:
    """The cheapest SparQ that is within the bound and costs less than `limit`; None if none is.

    With more channels r or positions k the loss falls and the cost rises, so that for each way to store the channels
    the bound is a staircase: it is walked from the most k and the least r, at most ranks + counts steps. What is no
    cheaper than the best so far is not asked. Where another way leads, the most r that is cheaper is asked first: if
    that is beyond the bound, so is all below it.
    """
    best: SparQ | None = None
    for way in channels:
        i, j = 0, len(counts) - 1
        while i < len(ranks) and j >= 0:
            row = [SparQ(r=r, k=counts[j], channels=way) for r in ranks[i:]]
            cheaper = [method for method in row if cost(method) < limit]
            if best is not None and best.channels != way and len(cheaper) > 1 and not within(cheaper[-1]):
                i += len(cheaper)
            elif cheaper and not within(cheaper[0]):
                i += 1
                continue
            elif cheaper:
                best, limit = cheaper[0], cost(cheaper[0])
            j -= 1
    return best


def cost(method: Method, layers: Sequence[tuple[Any, torch.dtype]], n: int) -> int:
    """Bytes of one step of one sequence after n tokens; layers: (shape, dtype) of each that the method serves."""
    return sum(method.traffic(n, shape._replace(B=1), dtype).bytes for shape, dtype in layers)


def grid(D: int, n: int) -> tuple[list[int], list[int]]:
    """The r up to the head size and the k below a prompt of n tokens that are tried."""
    return sorted({r for r in RANKS if r < D} | {D}), [k for k in COUNTS if k < n]


def tune(
    scorer: Scorer, channels: Sequence[str], target: float, tick: Callable[[str], None] = lambda what: None
) -> tuple[Tried | None, list[Tried], Loss]:
    """(the chosen one, all that were tried, dense's loss). target: the increase that is allowed, 0.01 for 1%."""
    tick(repr(Dense()))
    dense = scorer.loss(Dense())
    layers = scorer.layers()
    ranks, counts = grid(layers[0][0].D, scorer.n)
    tried: dict[Method, Tried] = {}

    def within(method: Method) -> bool:
        if method not in tried:
            tick(repr(method))
            tried[method] = compare(method, scorer.loss(method), dense)
        return tried[method].increase <= target

    def each(method: Method) -> int:
        return cost(method, layers, scorer.n)

    best = search(ranks, counts, channels, each, within, cost(Dense(), layers, scorer.n))
    return None if best is None else tried[best], list(tried.values()), dense
