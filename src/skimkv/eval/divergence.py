"""How far methods move the distribution of the next token on documents, for programs: KL(dense ‖ method)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..methods import parse
from ..methods.base import Method
from .forced import kl_divergence, take_documents
from .plan import Job, Setup, document_groups
from .results import Row, Tail, summary
from .run import Run
from .statistics import Interval, cluster_bootstrap
from .tasks import Example, kl
from .tasks import parse as parse_task

__all__ = ["MethodDivergence", "kl_divergence", "measure_divergence", "read_documents"]


def read_documents(
    tokenizer: Any, data: Path | None, context: int = 2048, reference: int = 256, limit: int = 20, seed: int = 0
) -> list[list[int]]:
    """Read the documents of the task kl, as tokens for `measure_divergence`: each context + reference token ids.

    data: a text file or a folder of *.txt; None is WikiText from the Hub. At most `limit` documents are taken, in an
    order that the seed gives. Raises ValueError if none has enough tokens.
    """
    taken = take_documents(tokenizer, kl.examples(data=data, seed=seed, context=context, reference=reference), limit)
    if not taken.documents:
        raise ValueError(
            f"no document of {data or 'the Hub'} has context + reference = {context + reference} tokens, the longest "
            f"has {taken.longest}"
        )
    return [ids for _, ids in taken.documents]


@dataclass(frozen=True, eq=False)
class MethodDivergence:
    """One method over all documents; `measure_divergence` makes it.

    kl (documents, m) float64: KL(dense ‖ method) in nats after each forced token. agrees (documents, m) bool: whether
    the most likely token is the same. row: the summary, as `skimkv eval` prints it. The intervals are 95% bootstraps
    over documents.
    """

    method: Method
    kl: Tensor
    agrees: Tensor
    row: Row

    @property
    def bytes_per_token(self) -> int:
        """What a decode step of one sequence moves in all layers."""
        return self.row.bytes_per_token or 0

    @property
    def share(self) -> float:
        """Its part of what dense attention moves."""
        return self.row.share or 0.0

    @property
    def mean(self) -> float:
        """The mean KL, in nats a token."""
        return self.row.mean

    @property
    def p99(self) -> float:
        """The 99th percentile of the KL over all tokens."""
        return self._tail.kl_p99

    @property
    def max(self) -> float:
        """The largest KL of a token."""
        return self._tail.kl_max

    @property
    def agreement(self) -> float:
        """The share of tokens after which both distributions have the same most likely token."""
        return self._tail.agreement

    @property
    def _tail(self) -> Tail:
        assert self.row.tail is not None
        return self.row.tail

    def mean_interval(self) -> Interval:
        """The interval of the mean KL; both ends are None for fewer than 5 documents."""
        return self.row.low, self.row.high

    def p99_interval(self) -> Interval:
        """The interval of the 99th percentile."""
        return self._tail.kl_p99_low, self._tail.kl_p99_high

    def difference(self, other: MethodDivergence) -> tuple[float, float | None, float | None]:
        """The mean of this method's KL less the other's on the same documents, and the ends of its interval.

        Raises ValueError if the two were measured on different numbers of documents or tokens.
        """
        if self.kl.shape != other.kl.shape:
            raise ValueError(
                f"{self.method} was measured on {tuple(self.kl.shape)} documents and tokens, {other.method} on "
                f"{tuple(other.kl.shape)}: measure both on the same"
            )
        differences = (self.kl - other.kl).mean(1).tolist()
        low, high = cluster_bootstrap(differences, range(len(differences)), -math.inf, math.inf)
        return float((self.kl - other.kl).mean()), low, high


def measure_divergence(
    model: Any,
    documents: Sequence[Sequence[int]],
    methods: Sequence[Method | str],
    context: int,
    batch: int = 8,
    counted: bool = False,
) -> list[MethodDivergence]:
    """Measure KL(dense ‖ method) of several methods over the same documents of a model; one result for each method.

    documents: token ids, all of one length; the first `context` are the prompt, and the others are forced. methods: as
    specs, or as objects, which need not be registered. batch: how many documents are decoded together. counted: decode
    with the reference backend and count the bytes, instead of computing them in closed form: for methods whose traffic
    depends on the data.

    Raises ValueError if there are no documents, if they differ in length, or if they have no token after the context.
    """
    lengths = {len(document) for document in documents}
    if len(lengths) != 1:
        raise ValueError(f"the documents have {sorted(lengths) or 'no'} tokens: give documents of one length")
    (length,) = lengths
    if not 0 < context < length:
        raise ValueError(f"context = {context} must be from 1 to {length - 1}, below the {length} tokens of a document")
    task = parse_task(f"kl(context={context}, reference={length - context})")
    examples = [(Example(str(i), str(i), "", ()), list(document)) for i, document in enumerate(documents)]
    parsed = [parse(method) for method in methods]
    job = Job(task, "forced", document_groups(examples, context), list(dict.fromkeys(parsed)))
    records = [record.json() for record in Run(Setup(model, None, "", batch=batch, counted=counted)).records(job)]
    rows, measured = {row.method: row for row in summary(records)}, []
    for method in parsed:
        own = [record for record in records if record["method"] == repr(method)]
        kl = torch.tensor([record["kl"] for record in own], dtype=torch.float64)
        agrees = torch.tensor([[letter == "1" for letter in record["agrees"]] for record in own])
        measured.append(MethodDivergence(method, kl, agrees, rows[repr(method)]))
    return measured
