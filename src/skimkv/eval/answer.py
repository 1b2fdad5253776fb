"""Answers to questions about a prompt: what is fed after the prompt, then what the model says, greedily.

All rows of a batch go in step, each with its own question; the caches of several methods can share the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..hf.cache import Cache
from ..hf.joint import joint_cache
from ..hf.layer import Layer
from ..hf.states import keeps_states
from .shared_prompt import copy_rows, forward
from .traffic import Cost, RowCosts, depends_on_data

BLOCK = 64  # tokens that are fed at once: the logits of all of them are in memory
MOST_OPEN = 3 / 4  # of a batch's answers: where no more are open, the rows of the others leave it


class Question(NamedTuple):
    """What is fed to the model after the prompt, and where its answer ends.

    feed: token ids, of which the last `scored` count for the answer's bits. Then at most `new_tokens` are generated,
    to the first `stop` after some text, or to `chars` characters; "" and 0 are no bound. With new_tokens = 0 nothing
    is generated. enough: "all" ends the text once it holds all `answers`, in any case of letters; "any" once it holds
    one of them.
    """

    feed: list[int]
    scored: int = 0
    new_tokens: int = 0
    stop: str = ""
    chars: int = 0
    enough: str = ""
    answers: tuple[str, ...] = ()

    def cut(self, text: str) -> tuple[str, bool]:
        """Cut a text where the answer ends; return it and whether it had reached its end."""
        start = len(text) - len(text.lstrip())
        end = text.find(self.stop, start) if self.stop else -1
        if end < 0 and self.chars and len(text) >= self.chars:
            end = self.chars
        return (text, self._is_enough(text)) if end < 0 else (text[:end], True)

    def _is_enough(self, text: str) -> bool:
        """Whether the text holds as many of the answers as can count."""
        if not self.enough:
            return False
        contained = [answer.lower() in text.lower() for answer in self.answers]
        return all(contained) if self.enough == "all" else any(contained)


class Answer(NamedTuple):
    """What the model said to a question, and what it cost.

    tokens: how many were generated. bits: of the question's scored tokens; likeliest: whether greedy decoding would
    have chosen each of them. steps: how many tokens were decoded. cost: the sum over these steps, in closed form.
    """

    text: str
    tokens: int
    bits: float
    likeliest: bool
    steps: int
    cost: Cost


class _OpenAnswer:
    """An answer of one row of the batch, while tokens are fed and generated."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.ids: list[int] = []
        self.text, self.bits, self.likeliest, self.steps, self.cost = "", 0.0, True, 0, Cost()
        self.ended = not question.new_tokens and not question.feed

    def score(self, first: int, logits: Tensor) -> None:
        """Add the bits of the tokens first, first + 1, ... of the feed, where they count.

        logits (m,V): the model's, each before the token that it scores.
        """
        feed = self.question.feed
        for i in range(max(first, len(feed) - self.question.scored), min(first + len(logits), len(feed))):
            self.bits -= float(logits[i - first].log_softmax(-1)[feed[i]]) / math.log(2)
            self.likeliest &= int(logits[i - first].argmax()) == feed[i]

    def next_tokens(self, start: int, n: int, logits: Tensor, tokenizer: Any, end_tokens: set[int]) -> list[int]:
        """The n tokens to feed from position `start` after the prompt; logits (V) are those before them.

        The last token of all need not be fed: the answer has then ended.
        """
        feed = self.question.feed
        if self.ended:
            return [0]
        if start < len(feed):
            self.ended = start + 1 == len(feed) and not self.question.new_tokens
            return feed[start : start + n]
        token = int(logits.argmax())
        if token in end_tokens:
            self.ended = True
            return [token]
        self.ids.append(token)
        self.text, self.ended = self.question.cut(tokenizer.decode(self.ids, skip_special_tokens=True))
        self.ended |= len(self.ids) == self.question.new_tokens
        return [token]

    def add_steps(self, n: int, costs: RowCosts, row: int) -> None:
        """Count the n tokens that were decoded last, unless the answer had ended before them."""
        if not self.ended:
            self.steps += n
            for steps_later in range(n):
                self.cost = self.cost.plus(costs.step(row, steps_later))

    def close(self) -> Answer:
        """The answer as it stands."""
        return Answer(self.text, len(self.ids), self.bits, self.likeliest, self.steps, self.cost)


def answer_questions(
    model: Any,
    tokenizer: Any,
    caches: Sequence[Cache],
    logits: Tensor,
    questions: Sequence[Question],
    mask: Tensor | None = None,
) -> list[list[Answer]]:
    """Answer the questions with every cache, all in one batch; return the answers of the first cache, then the second.

    caches: of different methods behind the same prompts, with a row for every question; they are used up. logits
    (questions,V) and mask (questions,n), where rows are padded on the left, are those of the prompts.
    """
    answers = [[_OpenAnswer(question) for question in questions] for _ in caches]
    logits = logits.repeat(len(caches), 1)[:, None]
    batch = _Batch(
        list(zip(caches, answers, strict=True)), logits, None if mask is None else mask.repeat(len(caches), 1)
    )
    end_tokens, start, shortest = find_end_tokens(model, tokenizer), 0, min(len(q.feed) for q in questions)
    while True:
        # a block is as long as every row still has tokens, but for its last; each layer decodes it token by token
        n = 1 if batch.one_by_one else max(1, min(shortest - 1 - start, BLOCK))
        tokens = []
        for answer, before in zip(batch.answers, batch.logits, strict=True):
            answer.score(start, before[-1:])
            tokens.append(answer.next_tokens(start, n, before[-1], tokenizer, end_tokens))
        open_rows = [row for row, answer in enumerate(batch.answers) if not answer.ended]
        if not open_rows:
            break
        if len(open_rows) <= MOST_OPEN * len(tokens) and batch.can_lose_rows:
            batch, tokens = batch.keep(open_rows), [tokens[row] for row in open_rows]
        batch.feed(model, tokens)
        for answer, after, (costs, row) in zip(batch.answers, batch.logits, batch.costs, strict=True):
            answer.score(start + 1, after[:-1])
            answer.add_steps(n, costs, row)
        start += n
    return [[answer.close() for answer in own] for own in answers]


class _Batch:
    """Caches that decode together, and the answers of all their rows, those of the first cache first.

    parts: each cache, and the answers of its rows. logits (rows,m,V): after the tokens that were fed last. mask
    (rows,tokens): of all tokens so far, where some are padding.
    """

    def __init__(
        self, parts: Sequence[tuple[Cache, Sequence[_OpenAnswer]]], logits: Tensor, mask: Tensor | None
    ) -> None:
        caches = [cache for cache, _ in parts]
        self.parts, self.logits, self.mask = parts, logits, mask
        self.answers = [answer for _, own in parts for answer in own]
        self.costs = [(costs, row) for cache, own in parts for costs in [RowCosts(cache)] for row in range(len(own))]
        self.joint = joint_cache(caches)
        # of some methods a step's cost could not be told after the steps that follow
        self.one_by_one = any(map(depends_on_data, caches)) or keeps_states(self.joint)
        # the joint cache has the library's layers of all rows, and the caches then have not
        self.can_lose_rows = len(caches) == 1 or all(type(layer) is Layer for layer in caches[0].layers)

    def feed(self, model: Any, tokens: Sequence[Sequence[int]]) -> None:
        """Decode the next tokens of every row."""
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), len(tokens[0]))], 1)
        self.logits = forward(model, self.joint, torch.tensor(tokens, device=self.logits.device), self.mask).float()

    def keep(self, rows: Sequence[int]) -> _Batch:
        """A batch of these rows only, in the same order."""
        parts, first = list[tuple[Cache, Sequence[_OpenAnswer]]](), 0
        for cache, answers in self.parts:
            own = [row - first for row in rows if first <= row < first + len(answers)]
            if own:
                kept = cache if len(own) == len(answers) else copy_rows(cache, own)
                parts.append((kept, [answers[row] for row in own]))
            first += len(answers)
        return _Batch(parts, self.logits[rows], None if self.mask is None else self.mask[rows])


def find_end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end a text, by the model's generation config and by its tokenizer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    tokens = configured if isinstance(configured, list) else [configured]
    return {token for token in [*tokens, tokenizer.eos_token_id] if token is not None}
