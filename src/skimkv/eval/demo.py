"""The demo: one long record, the same questions to every method at matched budgets, what each step really moved."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .. import ops
from ..hf.attach import Cache, check_length, load
from ..methods import METHODS, Dense
from ..methods.base import Method
from ..stores.base import Shape
from ..stores.full import Full
from . import budgets
from .tasks import record

SHARES = (1 / 2, 1 / 4, 1 / 8)
LONGEST_ANSWER = 8  # tokens
ONE = Shape(1, 1, 1, 256)


class Row(NamedTuple):
    """One method at one budget. Elements and bytes are of one decode step, all layers; n is the prompt's length."""

    method: Method
    share: float  # of dense's bytes, that was asked for
    correct: int
    asked: int
    elements_predicted: int
    elements_counted: int
    bytes_predicted: int
    bytes_counted: int
    cache_bytes: int
    ms_per_token: float

    def point(self) -> tuple[str, float, float, bool]:
        """For the figure: name, bytes, share right, whether all tokens are still held."""
        name, kept = type(self.method).__name__, isinstance(self.method.store(ONE, torch.float32), Full)
        return name, self.bytes_counted, self.correct / self.asked, kept

    def json(self) -> dict[str, Any]:
        names = {"bytes_counted": "bytes_per_step"}
        left_out = ("method", "share", "bytes_predicted")
        figures = {names.get(k, k): v for k, v in self._asdict().items() if k not in left_out}
        return {"method": repr(self.method), **figures}


class Demo:
    """The bundled model has read nothing yet; `plan` fixes the methods, `rows` asks them.

    The record is the prompt; a question comes after it, token by token through the method (question-blind), on
    a copy of the prefilled cache.
    """

    def __init__(self, lines: int, asked: int, seed: int = 0) -> None:
        threads = torch.get_num_threads()
        self.where = f"{ops.chosen()[0]} backend, {threads} thread{'s'[: threads - 1]}"
        self.model, self._tokenizer = load("builtin")
        context, questions = record.records(1, lines, asked, seed)[0]
        self.prompt = torch.tensor([[self._tokenizer.bos_token_id, *self._tokens(context)]])
        self.questions = [(self._tokens(question), answer) for question, answer in questions]
        check_length(self.model, self.prompt.shape[1] + max(len(q) for q, _ in self.questions) + LONGEST_ANSWER)

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def _read(self, method: Method) -> Cache:
        cache = Cache(self.model, method)
        self.model(self.prompt, past_key_values=cache, logits_to_keep=1)
        return cache

    @torch.inference_mode()
    def plan(self) -> tuple[list[tuple[Method, float]], list[str]]:
        """Which method with which parameters at which share, and what cannot reach one, in words."""
        dense = budgets.stores(self._read(Dense()))
        found: list[tuple[Method, float]] = [(Dense(), 1.0)]
        missed = []
        for share in SHARES:
            for name, method in METHODS.items():
                if method is Dense:
                    continue
                fitting = budgets.at(method, share, dense)
                if fitting is None:
                    missed.append(f"{name} cannot read as little as 1/{round(1 / share)} of dense")
                else:
                    found.append((fitting, share))
        return found, missed

    @torch.inference_mode()
    def rows(self, plan: list[tuple[Method, float]], asked: Callable[[], None] = lambda: None) -> Iterator[Row]:
        """One row per method; `asked` is called after every question."""
        for method, share in plan:
            cache = self._read(method)
            correct, seconds = 0.0, list[float]()
            for question, answer in self.questions:
                text = self._ask(copy.deepcopy(cache), question, seconds)
                correct += record.right(text, answer)
                asked()
            held = cache.nbytes
            elements, moved = cache.elements, cache.bytes
            with ops.backend("ref"):  # the backend that counts what it reads
                self.model(torch.tensor([self.questions[0][0][:1]]), past_key_values=cache)
            closed = budgets.traffic(method, budgets.stores(cache), step=1)
            yield Row(
                method, share, int(correct), len(self.questions),
                closed.elements, cache.elements - elements, closed.bytes, cache.bytes - moved,
                held, 1e3 * statistics.median(seconds),
            )  # fmt: skip

    def _ask(self, cache: Cache, question: list[int], seconds: list[float]) -> str:
        """Greedy, one token at a time, to the end of the line; `seconds` gets the time of each step."""
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
    """What the rows show, in one sentence."""
    dense = rows[0]
    least = min(row.share for row in rows)
    last = sorted((row for row in rows if row.share == least), key=lambda row: -row.correct)
    best, rest = [r for r in last if r.correct == last[0].correct], [r for r in last if r.correct < last[0].correct]
    names = " and ".join(type(r.method).__name__ for r in best)
    moved = f"{best[0].bytes_counted / dense.bytes_counted:.0%}" if len(best) == 1 else f"about {least:.0%}"
    text = f"With {moved} of dense attention's bytes per token, {names} answered {best[0].correct} of {best[0].asked}"
    text += f" questions right, dense {dense.correct}"
    if rest:
        text += f"; the next best at that budget is {type(rest[0].method).__name__} with {rest[0].correct}"
    return text + "."
