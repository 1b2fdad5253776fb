"""Tokens that are forced: after each, a method's distribution of the next one is compared with dense attention's.

The beginning of a document is a prompt, which every method reads exactly. The tokens that follow are forced: they are
fed one at a time whatever the model would have said, and the method decodes each of them. After each, the whole
next-token distribution is compared with that of dense attention at the same position. Dense attention reads a document
once for all methods, and every method decodes the same tokens, so that methods are compared in pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..hf.cache import Cache
from ..hf.joint import joint_cache
from ..hf.layer import Layer
from ..hf.states import keeps_states
from ..methods import Dense
from .generate import check_logits, encode
from .shared_prompt import RecordedPrompt, forward
from .tasks import Example
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
    likely token there. loss: the mean of -log p of the forced tokens but the first, in nats; None where there is no
    other. steps and cost: the decoded tokens, and what they moved in sum, in closed form.
    """

    kl: list[float]
    agrees: list[bool]
    loss: float | None
    steps: int
    cost: Cost

    def json(self) -> dict[str, Any]:
        """The fields of a record: kl to 5 significant digits, a 1 or a 0 for each token in `agrees`, and the loss."""
        agrees = "".join("01"[same] for same in self.agrees)
        return {"kl": [float(f"{x:.5g}") for x in self.kl], "agrees": agrees, "loss": self.loss}


def kl_divergence(dense: Tensor, logits: Tensor) -> Tensor:
    """KL(dense ‖ method) in nats between distributions that are given as logits, both (...,V) -> (...) in float64.

    It is 0 where they are equal, and infinite where the method excludes a token that dense attention does not. Rounding
    never makes it negative.
    """
    log_p, log_q = dense.double().log_softmax(-1), logits.double().log_softmax(-1)
    terms = log_p.exp() * (log_p - log_q)
    possible = log_p != -math.inf  # a token that dense attention excludes adds nothing, whatever the method says
    return torch.where(possible, terms, 0.0).sum(-1).clamp_min(0.0)


def documents_at_once(model: Any, batch: int, forced: int) -> int:
    """How many documents, at most `batch`, are read together so that dense attention's logits fit in memory."""
    vocabulary: int = model.config.get_text_config(decoder=True).vocab_size
    bytes_per_logit: int = model.dtype.itemsize
    return max(1, min(batch, MOST_DENSE_BYTES // (forced * vocabulary * bytes_per_logit)))


@torch.inference_mode()
def dense_logits(prompt: RecordedPrompt, ids: Tensor) -> Tensor:
    """Dense attention's logits after each of the tokens ids (B,m) that follow the prompts -> (B,m,V).

    The tokens are read in one block, as the rest of a prompt is; one at a time where layers keep states. Raises
    ValueError where a logit is no number or infinite.
    """
    cache = prompt.cache(Dense())
    for layer in cache.layers:
        if isinstance(layer, Layer):
            layer.prefill_until = None
    at_once = 1 if keeps_states(cache) else ids.shape[1]
    logits = torch.cat([forward(prompt.model, cache, block, None) for block in ids.split(at_once, 1)], 1)
    check_logits(logits, prompt.model.dtype)
    return logits


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
    nats = torch.empty(len(caches), B, m - 1)
    totals = [[Cost()] * B for _ in caches]
    for start in range(0, m, at_once):
        block = slice(start, min(start + at_once, m))
        logits = forward(model, joint, ids[:, block].repeat(len(caches), 1), None).unflatten(0, (len(caches), B))
        for row in range(B):
            expected = dense[row, block]
            for i, cache_costs in enumerate(costs):
                kl[i, row, block] = kl_divergence(expected, logits[i, row]).cpu()
                agrees[i, row, block] = (expected.argmax(-1) == logits[i, row].argmax(-1)).cpu()
                following = ids[row, block.start + 1 : block.stop + 1]
                log_p = logits[i, row, : len(following)].float().log_softmax(-1)
                nats[i, row, block.start : block.start + len(following)] = -log_p.gather(-1, following[:, None])[:, 0]
                for steps_later in range(block.stop - block.start):
                    totals[i][row] = totals[i][row].plus(cache_costs.step(row, steps_later))
    return [
        [
            Divergence(
                kl[i, row].tolist(),
                agrees[i, row].tolist(),
                float(nats[i, row].mean()) if m > 1 else None,
                m,
                totals[i][row],
            )
            for row in range(B)
        ]
        for i in range(len(caches))
    ]
