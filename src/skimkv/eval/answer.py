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
from ..hf.states import keeps_states
from .shared_prompt import forward
from .traffic import Cost, RowCosts, depends_on_data

BLOCK = 64  # tokens that are fed at once: the logits of all of them are in memory


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
    joint, times = joint_cache(caches), len(caches)
    answers = [_OpenAnswer(question) for _ in caches for question in questions]
    costs = [(RowCosts(cache), row) for cache in caches for row in range(len(questions))]
    logits, mask = logits.repeat(times, 1)[:, None], None if mask is None else mask.repeat(times, 1)
    end_tokens, start = find_end_tokens(model, tokenizer), 0
    # of some methods a step's cost could not be told after the steps that follow
    one_by_one = any(map(depends_on_data, caches)) or keeps_states(joint)
    while True:
        n = 1 if one_by_one else _tokens_at_once(questions, start)
        for answer, before in zip(answers, logits, strict=True):
            answer.score(start, before[-1:])
        tokens = [
            answer.next_tokens(start, n, before[-1], tokenizer, end_tokens)
            for answer, before in zip(answers, logits, strict=True)
        ]
        if all(answer.ended for answer in answers):
            break
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(answers), n)], 1)
        logits = forward(model, joint, torch.tensor(tokens, device=logits.device), mask).float()
        for answer, after, (cache_costs, row) in zip(answers, logits, costs, strict=True):
            answer.score(start + 1, after[:-1])
            answer.add_steps(n, cache_costs, row)
        start += n
    closed = [answer.close() for answer in answers]
    return [closed[i : i + len(questions)] for i in range(0, len(closed), len(questions))]


def _tokens_at_once(questions: Sequence[Question], start: int) -> int:
    """How many tokens can be fed in one block, which each layer decodes token by token.

    As many as every row still has, but for its last.
    """
    return max(1, min(min(len(question.feed) for question in questions) - 1 - start, BLOCK))


def find_end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end a text, by the model's generation config and by its tokenizer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    tokens = configured if isinstance(configured, list) else [configured]
    return {token for token in [*tokens, tokenizer.eos_token_id] if token is not None}
