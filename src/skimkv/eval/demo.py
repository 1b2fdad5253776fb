"""The demo: questions about one long record, to every method at equal budgets, and what each step really moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import ops
from ..hf.cache import Cache
from ..hf.load import load
from ..hf.positions import check_length
from ..methods import Dense
from ..methods.base import Method
from . import budgets
from .answer import Question, answer_questions
from .figures import DemoPoint
from .shared_prompt import copy_rows, record_prompt
from .tasks import record
from .timing import alternating_ms
from .traffic import step_traffic

LONGEST_ANSWER = 8  # tokens
ROUNDS = 9  # in which the methods take turns to be timed
QUESTIONS_AT_ONCE = 4  # in one batch; more would need more copies of the cache at a time


class Row(NamedTuple):
    """One method at one budget: right answers, bytes and time, and elements and bytes of one decode step of all layers.

    budget: the share of dense's bytes that the method's parameters were solved for. share_of_dense: the share that it
    read on average, over all steps of its answers. asked: how many questions. cache_bytes: what the cache holds after
    the prompt. has_kernel: whether the time is that of a kernel; otherwise it is that of the reference in PyTorch.
    """

    method: Method
    budget: float
    correct: int
    asked: int
    elements_predicted: int
    elements_counted: int
    bytes_predicted: int
    bytes_counted: int
    cache_bytes: int
    ms_per_token: float
    share_of_dense: float
    has_kernel: bool

    def point(self) -> DemoPoint:
        """The row in the figure."""
        name, score, keeps_all = (
            type(self.method).__name__,
            self.correct / self.asked,
            budgets.keeps_all_tokens(self.method),
        )
        return DemoPoint(name, self.share_of_dense, score, self.ms_per_token, keeps_all, self.has_kernel)

    def json(self) -> dict[str, Any]:
        """The row for --json, its method as a spec."""
        names = {"bytes_counted": "bytes_per_step"}
        left_out = ("method", "budget", "bytes_predicted", "has_kernel")
        figures = {names.get(k, k): v for k, v in self._asdict().items() if k not in left_out}
        return {"method": repr(self.method), **figures}


class Demo:
    """The bundled model with a record and questions: `plan` chooses the methods, `rows` asks them.

    The record is the prompt, which the model reads once for all methods; a question comes after it, token by token
    through the method (question-blind), on a copy of the prefilled cache.
    """

    @torch.inference_mode()
    def __init__(self, lines: int, asked: int, seed: int = 0) -> None:
        threads = torch.get_num_threads()
        self.where = f"{ops.select_backend()[0]} backend, {threads} thread{'s'[: threads - 1]}"
        self.model, self._tokenizer = load("builtin")
        context, questions = record.records(1, lines, asked, seed)[0]
        ids = [self._tokenizer.bos_token_id, *self._tokens(context)]
        self.answers = [answer for _, answer in questions]
        self.questions = [Question(self._tokens(question), 0, LONGEST_ANSWER, "\n") for question, _ in questions]
        self.prompt_tokens = len(ids)
        most = max(len(question.feed) for question in self.questions) + LONGEST_ANSWER
        check_length(self.model, len(ids) + most)
        self._prompt = record_prompt(self.model, torch.tensor([ids]), new_tokens=most)

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    @torch.inference_mode()
    def plan(self) -> tuple[list[tuple[Method, float]], list[str]]:
        """The methods at 1, 1/2, 1/4 and 1/8 of dense's bytes, as (method, share), and what cannot reach a share."""
        mean_share = budgets.measured_share(self._prompt, self.questions[:QUESTIONS_AT_ONCE])
        return budgets.matched_methods(self._prompt.cache(Dense()).stores, mean_share, without=budgets.SLOW_REFERENCES)

    @torch.inference_mode()
    def rows(self, plan: list[tuple[Method, float]], on_answers: Callable[[int], None] = lambda new: None) -> list[Row]:
        """Ask every method all questions, then time all of them in turns; one row for each method of the plan.

        on_answers is called with the number of new answers.
        """
        rows, caches = [], []
        for method, budget in plan:
            cache = self._prompt.cache(method)
            correct, share = self._ask(cache, on_answers)
            cache_bytes, elements, moved = cache.nbytes, cache.elements, cache.bytes
            with ops.backend("ref"):  # the backend that counts what it reads
                self.model(torch.tensor([self.questions[0].feed[:1]]), past_key_values=cache)
            predicted = step_traffic(method, cache.stores, steps_ago=1)
            rows.append(
                Row(
                    method, budget, correct, len(self.questions),
                    predicted.elements, cache.elements - elements, predicted.bytes, cache.bytes - moved,
                    cache_bytes, 0.0, share, method.has_kernel(ops.select_backend()[0]),
                )
            )  # fmt: skip
            caches.append(cache)
        times = alternating_ms(self.model, caches, self.questions[0].feed[0], ROUNDS)
        return [row._replace(ms_per_token=ms) for row, ms in zip(rows, times, strict=True)]

    def _ask(self, cache: Cache, on_answers: Callable[[int], None]) -> tuple[int, float]:
        """How many questions are answered right from copies of the cache, and with which share of dense's bytes."""
        correct, moved, of_dense = 0.0, 0, 0
        for start in range(0, len(self.questions), QUESTIONS_AT_ONCE):
            questions = self.questions[start : start + QUESTIONS_AT_ONCE]
            logits = self._prompt.logits.expand(len(questions), -1)
            copies = copy_rows(cache, [0] * len(questions))
            (given,) = answer_questions(self.model, self._tokenizer, [copies], logits, questions)
            right = self.answers[start : start + QUESTIONS_AT_ONCE]
            correct += sum(record.score_line(answer.text, number) for answer, number in zip(given, right, strict=True))
            moved += sum(answer.cost.bytes for answer in given)
            of_dense += sum(answer.cost.dense_bytes for answer in given)
            on_answers(len(questions))
        return int(correct), moved / of_dense


def finding(rows: list[Row]) -> str:
    """What the rows show at the smallest budget, in one sentence."""
    dense, least = rows[0], min(row.budget for row in rows)
    ranked = sorted((row for row in rows if row.budget == least), key=lambda row: -row.correct)
    best = [row for row in ranked if row.correct == ranked[0].correct]
    if not best[0].correct:
        return f"With about {least:.0%} of dense attention's bytes per token, no method answered a question right."
    names = [type(row.method).__name__ for row in best]
    who = " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"
    moved = f"{best[0].share_of_dense:.0%}" if len(best) == 1 else f"about {least:.0%}"
    text = f"With {moved} of dense attention's bytes per token, {who} answered {best[0].correct} of {best[0].asked}"
    text += f" questions right, dense {dense.correct}"
    if len(ranked) > len(best):
        second = ranked[len(best)]
        text += f"; the next best at that budget is {type(second.method).__name__} with {second.correct}"
    fastest = min(best, key=lambda row: row.ms_per_token)
    return (
        f"{text}. {type(fastest.method).__name__} took {fastest.ms_per_token:.1f} ms per token there, dense attention "
        f"{dense.ms_per_token:.1f} ms."
    )
