"""The demo: questions about one long record, to every method at matched budgets, and what each step really moved."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .. import ops
from ..hf.attach import Cache, check_length
from ..hf.load import load
from ..methods import Dense
from ..methods.base import Method
from ..stores.base import Shape
from ..stores.full import Full
from . import budgets
from .tasks import record
from .traffic import step_traffic

LONGEST_ANSWER = 8  # tokens
# The figure has no room for the names of more methods; `skimkv eval --sweep rivals` runs these.
NOT_SHOWN = ("Quest", "StreamingLLM", "SnapKV", "TOVA")
ANY_SHAPE = Shape(1, 1, 1, 256)  # of a store that is made only to see its type


class Row(NamedTuple):
    """One method at one budget: right answers, and elements and bytes of one decode step of all layers.

    share: the part of dense's bytes that the method's parameters were solved for. asked: how many questions.
    cache_bytes: what the cache holds after the prompt.
    """

    method: Method
    share: float
    correct: int
    asked: int
    elements_predicted: int
    elements_counted: int
    bytes_predicted: int
    bytes_counted: int
    cache_bytes: int
    ms_per_token: float

    def point(self) -> tuple[str, float, float, bool]:
        """The row in the figure: (name, bytes, share of right answers, whether all tokens are kept)."""
        keeps_all = isinstance(self.method.store(ANY_SHAPE, torch.float32), Full)
        return type(self.method).__name__, self.bytes_counted, self.correct / self.asked, keeps_all

    def json(self) -> dict[str, Any]:
        """The row for --json, its method as a spec."""
        names = {"bytes_counted": "bytes_per_step"}
        left_out = ("method", "share", "bytes_predicted")
        figures = {names.get(k, k): v for k, v in self._asdict().items() if k not in left_out}
        return {"method": repr(self.method), **figures}


class Demo:
    """The bundled model with a record and questions: `plan` chooses the methods, `rows` asks them.

    The record is the prompt; a question comes after it, token by token through the method (question-blind), on
    a copy of the prefilled cache.
    """

    def __init__(self, lines: int, asked: int, seed: int = 0) -> None:
        threads = torch.get_num_threads()
        self.where = f"{ops.select_backend()[0]} backend, {threads} thread{'s'[: threads - 1]}"
        self.model, self._tokenizer = load("builtin")
        context, questions = record.records(1, lines, asked, seed)[0]
        self.prompt = torch.tensor([[self._tokenizer.bos_token_id, *self._tokens(context)]])
        self.questions = [(self._tokens(question), answer) for question, answer in questions]
        check_length(self.model, self.prompt.shape[1] + max(len(q) for q, _ in self.questions) + LONGEST_ANSWER)

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def _read_prompt(self, method: Method) -> Cache:
        cache = Cache(self.model, method)
        self.model(self.prompt, past_key_values=cache, logits_to_keep=1)
        return cache

    @torch.inference_mode()
    def plan(self) -> tuple[list[tuple[Method, float]], list[str]]:
        """The methods at 1, 1/2, 1/4 and 1/8 of dense's bytes, as (method, share), and what cannot reach a share."""
        matched, left_out = budgets.matched_methods(self._read_prompt(Dense()).stores)
        shown = [(method, share) for method, share in matched if type(method).__name__ not in NOT_SHOWN]
        return shown, [note for note in left_out if not note.startswith(NOT_SHOWN)]

    @torch.inference_mode()
    def rows(self, plan: list[tuple[Method, float]], on_answer: Callable[[], None] = lambda: None) -> Iterator[Row]:
        """Ask every method all questions, and give one row for each; on_answer is called after every question."""
        for method, share in plan:
            cache = self._read_prompt(method)
            correct, seconds = 0.0, list[float]()
            for question, answer in self.questions:
                text = self._answer(copy.deepcopy(cache), question, seconds)
                correct += record.score_line(text, answer)
                on_answer()
            cache_bytes, elements, moved = cache.nbytes, cache.elements, cache.bytes
            with ops.backend("ref"):  # the backend that counts what it reads
                self.model(torch.tensor([self.questions[0][0][:1]]), past_key_values=cache)
            predicted = step_traffic(method, cache.stores, steps_ago=1)
            yield Row(
                method, share, int(correct), len(self.questions),
                predicted.elements, cache.elements - elements, predicted.bytes, cache.bytes - moved,
                cache_bytes, 1e3 * statistics.median(seconds),
            )  # fmt: skip

    def _answer(self, cache: Cache, question: list[int], seconds: list[float]) -> str:
        """Answer greedily to the end of the line, one token at a time; `seconds` gets the time of each step."""
        text, token = "", 0
        for step in range(len(question) + LONGEST_ANSWER):
            if step >= len(question):
                text += self._tokenizer.decode([token])
                if "\n" in text:
                    break
            start = time.perf_counter()
            fed = question[step] if step < len(question) else token
            token = int(self.model(torch.tensor([[fed]]), past_key_values=cache).logits[0, -1].argmax())
            seconds.append(time.perf_counter() - start)
        return text


def finding(rows: list[Row]) -> str:
    """What the rows show at the smallest budget, in one sentence."""
    dense, least = rows[0], min(row.share for row in rows)
    ranked = sorted((row for row in rows if row.share == least), key=lambda row: -row.correct)
    best = [row for row in ranked if row.correct == ranked[0].correct]
    if not best[0].correct:
        return f"With about {least:.0%} of dense attention's bytes per token, no method answered a question right."
    names = [type(row.method).__name__ for row in best]
    who = " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"
    moved = f"{best[0].bytes_counted / dense.bytes_counted:.0%}" if len(best) == 1 else f"about {least:.0%}"
    text = f"With {moved} of dense attention's bytes per token, {who} answered {best[0].correct} of {best[0].asked}"
    text += f" questions right, dense {dense.correct}"
    if len(ranked) > len(best):
        second = ranked[len(best)]
        text += f"; the next best at that budget is {type(second.method).__name__} with {second.correct}"
    return text + "."
