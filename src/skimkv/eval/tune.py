"""The cheapest SparQ whose loss, or divergence from dense, stays within a bound, for one model and text: `skimkv tune`.

The text is cut into pieces: a dense prompt, read once for all methods, then tokens that are given one at a time, so
that the method decodes each before the next is scored. The loss is the mean of -log p of those tokens, in nats; the
divergence is the mean of KL(dense ‖ method) after them (divergence.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..methods import Dense, SparQ
from ..methods.base import Method
from ..stores.base import Shape
from .answer import Question, answer_questions
from .divergence import dense_logits, force_tokens
from .results import Results
from .shared_prompt import RecordedPrompt, record_prompt
from .statistics import TAIL, cluster_bootstrap, mean_and_interval, quantile, standard_error

RANKS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # values of r that are tried
COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)  # values of k that are tried


class Loss(NamedTuple):
    """The loss of one method: nats a token for each piece, and the bytes that a decode step of one sequence moves."""

    nats: list[float]
    bytes: int


class Trial(NamedTuple):
    """A method beside dense attention.

    increase: its loss over dense's, less 1, in the mean of the pieces; stderr, low and high are the standard error
    and the 95% interval of these paired differences. share: its part of the bytes that dense moves.
    """

    method: Method
    increase: float
    stderr: float | None
    low: float | None
    high: float | None
    bytes: int
    share: float

    @property
    def value(self) -> float:
        """What the target bounds: the increase of the loss."""
        return self.increase

    def json(self) -> dict[str, Any]:
        """The trial for --json, its method as a spec."""
        return {**self._asdict(), "method": repr(self.method)}


class DivergenceTrial(NamedTuple):
    """How far a method is from dense attention on all pieces.

    kl_mean: the mean of KL(dense ‖ method) in nats a token; low and high are its 95% interval by a bootstrap over
    pieces. kl_p99 and kl_max: its 99th percentile and maximum. agreement: the share of tokens after which the most
    likely token is the same. share: its part of the bytes that dense moves.
    """

    method: Method
    kl_mean: float
    low: float | None
    high: float | None
    kl_p99: float
    kl_max: float
    agreement: float
    bytes: int
    share: float

    @property
    def value(self) -> float:
        """What the target bounds: the mean KL."""
        return self.kl_mean

    def json(self) -> dict[str, Any]:
        """The trial for --json, its method as a spec."""
        return {**self._asdict(), "method": repr(self.method)}


def compare(method: Method, loss: Loss, dense: Loss) -> Trial:
    """Compare a method's loss with dense attention's on the same pieces."""
    dense_mean = fmean(dense.nats)
    differences = [(a - b) / dense_mean for a, b in zip(loss.nats, dense.nats, strict=True)]
    _, low, high = mean_and_interval(differences)
    share = loss.bytes / dense.bytes
    return Trial(method, fmean(differences), standard_error(differences), low, high, loss.bytes, share)


@dataclass
class Scorer:
    """Losses on pieces of `n` prompt tokens and the tokens after them, kept in a results file.

    pieces: token ids, all of one length; the first token after the prompt is fed and not scored, since its prediction
    is the dense prompt's. `key` tells this run's records from others in the file.
    """

    model: Any
    tokenizer: Any
    pieces: Sequence[Sequence[int]]
    n: int
    results: Results
    key: dict[str, Any]
    batch: int = 8
    _prompts: list[RecordedPrompt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._records = {
            (record["method"], record["id"]): record
            for record in self.results.records
            if all(record.get(name) == value for name, value in self.key.items())
        }

    @torch.inference_mode()
    def prompts(self) -> Iterator[tuple[RecordedPrompt, Sequence[Sequence[int]]]]:
        """The prompts and pieces, a batch at a time; a prompt is read when it is first needed, and then kept."""
        for number, start in enumerate(range(0, len(self.pieces), self.batch)):
            pieces = self.pieces[start : start + self.batch]
            if number == len(self._prompts):
                ids = torch.tensor([piece[: self.n] for piece in pieces], device=self.model.device)
                self._prompts.append(record_prompt(self.model, ids, new_tokens=len(pieces[0]) - self.n))
            yield self._prompts[number], pieces

    def loss(self, method: Method) -> Loss:
        """The method's loss on all pieces. Pieces whose losses the file holds are not run again."""
        records = self.records(method)
        return Loss([record["score"] for record in records], records[0]["bytes"])

    def trial(self, method: Method) -> Trial | DivergenceTrial:
        """The method beside dense attention."""
        return compare(method, self.loss(method), self.loss(Dense()))

    @torch.inference_mode()
    def records(self, method: Method) -> list[dict[str, Any]]:
        """The method's record of every piece. Those that the file lacks are made."""
        spec, ids = repr(method), [str(i) for i in range(len(self.pieces))]
        if any((spec, id_) not in self._records for id_ in ids):
            remaining = iter(ids)
            for number, (prompt, pieces) in enumerate(self.prompts()):
                for measured in self._measure(method, number, prompt, pieces):
                    self._add(spec, next(remaining), measured)
        return [self._records[spec, id_] for id_ in ids]

    def _measure(
        self, method: Method, number: int, prompt: RecordedPrompt, pieces: Sequence[Sequence[int]]
    ) -> Iterator[dict[str, Any]]:
        """What the records of the batch of that number say besides what they are of, its pieces in their order."""
        scored = len(pieces[0]) - self.n - 1
        questions = [Question(list(piece[self.n :]), scored) for piece in pieces]
        caches = [prompt.cache(method)]
        (answers,) = answer_questions(self.model, self.tokenizer, caches, prompt.logits, questions)
        for answer in answers:
            nats = answer.bits * math.log(2) / scored
            yield {"score": nats, "bytes": round(answer.cost.bytes / answer.steps)}

    def layers(self) -> list[tuple[Shape, torch.dtype]]:
        """The shape and dtype of each layer that a method serves."""
        prompt, _ = next(self.prompts())
        return [(layer.shape, layer.k.dtype) for layer in prompt.recorded.values()]

    def _add(self, spec: str, id_: str, measured: dict[str, Any]) -> None:
        if (spec, id_) not in self._records:
            record = {**self.key, "method": spec, "id": id_, **measured}
            self.results.add(record)
            self._records[spec, id_] = record


@dataclass
class DivergenceScorer(Scorer):
    """Divergences from dense attention on such pieces, of which the last token is not fed.

    A record's score is the mean KL of its piece, and `loss` gives these means.
    """

    _dense: list[Tensor] = field(default_factory=list)  # dense attention's logits, by the number of the batch

    def trial(self, method: Method) -> DivergenceTrial:
        """The method beside dense attention."""
        records, dense = self.records(method), self.records(Dense())
        kl = [record["kl"] for record in records]
        means, tokens = [record["score"] for record in records], [x for piece in kl for x in piece]
        low, high = cluster_bootstrap(means, range(len(means)), 0, math.inf)
        agreement = fmean(record["agrees"].count("1") / len(record["agrees"]) for record in records)
        moved = records[0]["bytes"]
        tail = quantile(tokens, TAIL), max(tokens)
        return DivergenceTrial(method, fmean(means), low, high, *tail, agreement, moved, moved / dense[0]["bytes"])

    def _measure(
        self, method: Method, number: int, prompt: RecordedPrompt, pieces: Sequence[Sequence[int]]
    ) -> Iterator[dict[str, Any]]:
        ids = torch.tensor([piece[self.n : -1] for piece in pieces], device=self.model.device)
        if number == len(self._dense):
            self._dense.append(dense_logits(prompt, ids))
        (rows,) = force_tokens(self.model, [prompt.cache(method)], ids, self._dense[number])
        for row in rows:
            yield {"score": fmean(row.kl), "bytes": round(row.cost.bytes / row.steps), **row.json()}


def search(
    ranks: Sequence[int],
    counts: Sequence[int],
    channels: Sequence[str],
    cost: Callable[[Method], float],
    within: Callable[[Method], bool],
    limit: float,
) -> Method | None:
    """The cheapest SparQ that is within the bound and costs less than `limit`; None if there is none.

    With more channels r or positions k the loss falls and the cost rises, so that for each way to store the channels
    the bound is a staircase: it is walked from the most k and the least r, at most ranks + counts steps. A method that
    is no cheaper than the best so far is not tried. Where another way of storing leads, the largest r that is cheaper
    is tried first: if that is beyond the bound, so is every smaller r.
    """
    best: SparQ | None = None
    for way in channels:
        i, j = 0, len(counts) - 1
        while i < len(ranks) and j >= 0:
            methods = [SparQ(r=r, k=counts[j], channels=way) for r in ranks[i:]]
            cheaper = [method for method in methods if cost(method) < limit]
            if best is not None and best.channels != way and len(cheaper) > 1 and not within(cheaper[-1]):
                i += len(cheaper)
            elif cheaper and not within(cheaper[0]):
                i += 1
                continue
            elif cheaper:
                best, limit = cheaper[0], cost(cheaper[0])
            j -= 1
    return best


def step_bytes(method: Method, layers: Sequence[tuple[Shape, torch.dtype]], n: int) -> int:
    """Bytes of one step of one sequence after n tokens; layers: (shape, dtype) of each that the method serves."""
    return sum(method.traffic(n, shape._replace(B=1), dtype).bytes for shape, dtype in layers)


def grid(D: int, n: int) -> tuple[list[int], list[int]]:
    """The values of r up to the head size D, and those of k below a prompt of n tokens, that are tried."""
    return sorted({r for r in RANKS if r < D} | {D}), [k for k in COUNTS if k < n]


def tune(
    scorer: Scorer, channels: Sequence[str], target: float, on_trial: Callable[[str], None] = lambda spec: None
) -> tuple[Trial | DivergenceTrial | None, list[Trial | DivergenceTrial], Loss]:
    """Find the cheapest SparQ that stays within the target.

    target: the greatest increase of the loss (0.01 for 1%), or for a DivergenceScorer the greatest mean KL in nats.
    Returns (the chosen one or None, all that were tried, dense's loss); on_trial is called with each spec before it is
    tried.
    """
    on_trial(repr(Dense()))
    dense = scorer.loss(Dense())
    layers = scorer.layers()
    ranks, counts = grid(layers[0][0].D, scorer.n)
    trials: dict[Method, Trial | DivergenceTrial] = {}

    def within(method: Method) -> bool:
        """Whether the method is within the target; it is tried once."""
        if method not in trials:
            on_trial(repr(method))
            trials[method] = scorer.trial(method)
        return trials[method].value <= target

    def cost(method: Method) -> int:
        """The bytes of one of its steps."""
        return step_bytes(method, layers, scorer.n)

    best = search(ranks, counts, channels, cost, within, cost(Dense()))
    return None if best is None else trials[best], list(trials.values()), dense
