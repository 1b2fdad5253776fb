"""How far a method moves the next-token distribution: KL(dense ‖ method) and top-1 agreement, token by token.

The beginning of a document is a prompt, which every method reads exactly. The tokens that follow are forced: they are
fed one at a time whatever the model would have said, and the method decodes each of them. After each, the whole
next-token distribution is compared with that of dense attention at the same position. Dense attention reads a document
once for all methods, and every method decodes the same tokens, so that methods are compared in pairs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..hf.cache import Cache
from ..hf.layer import Layer
from ..hf.states import keeps_states
from ..methods import Dense, parse
from ..methods.base import Method
from .generate import encode
from .shared_prompt import RecordedPrompt, forward, joint_cache, record_prompt
from .statistics import TAIL, Interval, cluster_bootstrap, quantile, quantile_bootstrap
from .tasks import Example, kl
from .traffic import Cost, RowCosts, depends_on_data

BLOCK = 64  # tokens that are fed at once, which each layer decodes one by one
SPARE_TOKENS = 16  # after those that are wanted, so that a cut through a word does not change them
MOST_LOGITS = 1 << 27  # that one block may give for all rows of a batch: 512 MiB in float32
MOST_DENSE_BYTES = 1 << 30  # of dense attention's logits that are kept for one batch of documents


class Documents(NamedTuple):
    """Documents with enough tokens: each as its example and its first tokens, all of one length.

    too_short: how many others were looked at before. longest: the tokens of the longest of them.
    """

    documents: list[tuple[Example, list[int]]]
    too_short: int
    longest: int


def take_documents(tokenizer: Any, examples: Iterable[Example], limit: int) -> Documents:
    """Tokenize examples with `tokens` = (context, reference); keep the first `limit` that have as many tokens."""
    documents: list[tuple[Example, list[int]]] = []
    too_short = longest = 0
    for example in examples:
        ids = _first_tokens(tokenizer, example.context, sum(example.tokens))
        if len(ids) < sum(example.tokens):
            too_short, longest = too_short + 1, max(longest, len(ids))
            continue
        documents.append((example, ids))
        if len(documents) == limit:
            break
    return Documents(documents, too_short, longest)


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


def _first_tokens(tokenizer: Any, text: str, n: int) -> list[int]:
    """The first n tokens of a text, or all if it has fewer; of a long text only the beginning is tokenized."""
    characters = 4 * n  # of usual text that is enough
    while True:
        ids = encode(tokenizer, text[:characters], chat=False)
        if len(ids) >= n + SPARE_TOKENS or characters >= len(text):
            return ids[:n]
        characters *= 2


class Divergence(NamedTuple):
    """What one method did to one document.

    kl: KL(dense ‖ method) in nats after each forced token. agrees: whether both distributions have the same most
    likely token there. steps and cost: the decoded tokens, and what they moved in sum, in closed form.
    """

    kl: list[float]
    agrees: list[bool]
    steps: int
    cost: Cost

    def json(self) -> dict[str, Any]:
        """The fields `kl` and `agrees` of a record: 5 significant digits, and a 1 or a 0 for each token."""
        return {"kl": [float(f"{x:.5g}") for x in self.kl], "agrees": "".join("01"[same] for same in self.agrees)}


def kl_divergence(dense: Tensor, logits: Tensor) -> Tensor:
    """KL(dense ‖ method) in nats between distributions that are given as logits, both (...,V) -> (...) in float64.

    It is 0 where they are equal, and infinite where the method excludes a token that dense attention does not. Rounding
    never makes it negative.
    """
    log_p, log_q = dense.double().log_softmax(-1), logits.double().log_softmax(-1)
    terms = log_p.exp() * (log_p - log_q)
    possible = log_p > -math.inf  # a token that dense attention excludes adds nothing, whatever the method says
    return torch.where(possible, terms, 0.0).sum(-1).clamp_min(0.0)


def documents_at_once(model: Any, batch: int, forced: int) -> int:
    """How many documents, at most `batch`, are read together so that dense attention's logits fit in memory."""
    vocabulary: int = model.config.get_text_config(decoder=True).vocab_size
    bytes_per_logit: int = model.dtype.itemsize
    return max(1, min(batch, MOST_DENSE_BYTES // (forced * vocabulary * bytes_per_logit)))


@torch.inference_mode()
def dense_logits(prompt: RecordedPrompt, ids: Tensor) -> Tensor:
    """Dense attention's logits after each of the tokens ids (B,m) that follow the prompts -> (B,m,V).

    The tokens are read in one block, as the rest of a prompt is; one at a time where layers keep states.
    """
    cache = prompt.cache(Dense())
    for layer in cache.layers:
        if isinstance(layer, Layer):
            layer.prefill_until = None
    at_once = 1 if keeps_states(cache) else ids.shape[1]
    return torch.cat([forward(prompt.model, cache, block, None) for block in ids.split(at_once, 1)], 1)


@torch.inference_mode()
def force_tokens(model: Any, caches: Sequence[Cache], ids: Tensor, dense: Tensor) -> list[list[Divergence]]:
    """Feed the tokens ids (B,m) to every cache, all in one batch, and compare what each predicts after every token.

    caches: of different methods behind the same B prompts without padding; they are used up. dense (B,m,V): dense
    attention's logits after each of the tokens. Returns the divergences of the first cache's rows, then the second's.
    """
    B, m = ids.shape
    joint, rows = joint_cache(caches), len(caches) * B
    costs = [RowCosts(cache) for cache in caches]
    # of some methods a step's cost could not be told after the steps that follow
    one_by_one = any(map(depends_on_data, caches)) or keeps_states(joint)
    at_once = 1 if one_by_one else max(1, min(BLOCK, MOST_LOGITS // (rows * dense.shape[-1])))
    kl = torch.empty(len(caches), B, m, dtype=torch.float64)
    agrees = torch.empty(len(caches), B, m, dtype=torch.bool)
    totals = [[Cost()] * B for _ in caches]
    for start in range(0, m, at_once):
        block = slice(start, min(start + at_once, m))
        logits = forward(model, joint, ids[:, block].repeat(len(caches), 1), None).unflatten(0, (len(caches), B))
        for row in range(B):
            expected = dense[row, block]
            for i, cache_costs in enumerate(costs):
                kl[i, row, block] = kl_divergence(expected, logits[i, row]).cpu()
                agrees[i, row, block] = (expected.argmax(-1) == logits[i, row].argmax(-1)).cpu()
                for steps_later in range(block.stop - block.start):
                    totals[i][row] = totals[i][row].plus(cache_costs.step(row, steps_later))
    return [
        [Divergence(kl[i, row].tolist(), agrees[i, row].tolist(), m, totals[i][row]) for row in range(B)]
        for i in range(len(caches))
    ]


@dataclass(frozen=True, eq=False)
class MethodDivergence:
    """One method over all documents; `measure_divergence` makes it.

    kl (documents, m) float64: KL(dense ‖ method) in nats after each forced token. agrees (documents, m) bool: whether
    the most likely token is the same. bytes_per_token: what a decode step of one sequence moves in all layers.
    share: its part of what dense attention moves. The intervals are 95% bootstraps over documents.
    """

    method: Method
    kl: Tensor
    agrees: Tensor
    bytes_per_token: int
    share: float

    @property
    def mean(self) -> float:
        """The mean KL, in nats a token."""
        return float(self.kl.mean())

    @property
    def p99(self) -> float:
        """The 99th percentile of the KL over all tokens."""
        return quantile(self.kl.flatten().tolist(), TAIL)

    @property
    def max(self) -> float:
        """The largest KL of a token."""
        return float(self.kl.max())

    @property
    def agreement(self) -> float:
        """The share of tokens after which both distributions have the same most likely token."""
        return float(self.agrees.double().mean())

    def mean_interval(self) -> Interval:
        """The interval of the mean KL; both ends are None for fewer than 5 documents."""
        return cluster_bootstrap(self.kl.mean(1).tolist(), range(len(self.kl)), 0, math.inf)

    def p99_interval(self) -> Interval:
        """The interval of the 99th percentile."""
        return quantile_bootstrap(self.kl.tolist(), TAIL)

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


@torch.inference_mode()
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
    parsed = [parse(method) for method in methods]
    divergences: list[list[Divergence]] = [[] for _ in parsed]
    moved, size = [0] * len(parsed), documents_at_once(model, batch, length - context)
    for start in range(0, len(documents), size):
        ids = torch.tensor([list(document) for document in documents[start : start + size]], device=model.device)
        prompt = record_prompt(model, ids[:, :context], new_tokens=length - context)
        dense = dense_logits(prompt, ids[:, context:])
        for i, method in enumerate(parsed):
            cache = prompt.cache(method)
            before = cache.bytes
            with ops.backend("ref") if counted else contextlib.nullcontext():
                (rows,) = force_tokens(model, [cache], ids[:, context:], dense)
            divergences[i] += rows
            if counted:  # stores count what the method reads, and not the layers that keep the library's cache
                costs, steps = RowCosts(cache), length - context
                moved[i] += cache.bytes - before
                moved[i] += sum(costs.library_layers(row, steps).bytes for row in range(len(ids)))
            else:
                moved[i] += sum(row.cost.bytes for row in rows)
    results = []
    for method, rows, total in zip(parsed, divergences, moved, strict=True):
        steps, dense_bytes = sum(row.steps for row in rows), sum(row.cost.dense_bytes for row in rows)
        kl, agrees = torch.tensor([row.kl for row in rows], dtype=torch.float64), torch.tensor([r.agrees for r in rows])
        results.append(MethodDivergence(method, kl, agrees, round(total / steps), total / dense_bytes))
    return results
