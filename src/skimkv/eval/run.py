"""Carry out the plan of an evaluation: read each prompt once, answer with every method, and record the answers.

Question-blind: the context is the prompt, and the question comes after it, token by token through the method, so
that no method could choose for it in advance. Question-aware: the question belongs to the dense prompt.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..hf.cache import Cache
from ..methods.base import Method
from ..records import package_versions
from .answer import Answer, answer_questions
from .forced import Divergence, dense_logits, documents_at_once, force_tokens
from .plan import Job, Plan, PlannedExample, Setup, record_key
from .results import Record, RecordKey, Results
from .shared_prompt import RecordedPrompt, copy_rows, record_prompt
from .timing import StepTimes, ms_per_token
from .traffic import RowCosts, depends_on_data

CACHES_AT_ONCE = 6  # methods whose caches of one prompt are in memory together, and which decode in one batch


class Prompts(NamedTuple):
    """Prompts that the model has read in one batch, and the examples that go on after them.

    rows: the prompt of each example. mask: where prompts are padded on the left. dense (prompts,m,V): dense attention's
    logits after each forced token, where they are what methods are compared with.
    """

    recorded: RecordedPrompt
    examples: list[PlannedExample]
    rows: list[int]
    mask: Tensor | None
    dense: Tensor | None

    def part(self, start: int, stop: int) -> Prompts:
        """Some of the examples, whose logits, mask and dense logits have a row for each of them."""
        rows = self.rows[start:stop]
        recorded = self.recorded._replace(logits=self.recorded.logits[rows])
        mask, dense = (None if x is None else x[rows] for x in (self.mask, self.dense))
        return Prompts(recorded, self.examples[start:stop], rows, mask, dense)


KeptPrompts = dict[tuple[str, str, int], Prompts]  # by task, mode and number of the batch


def run_evaluation(
    setup: Setup,
    plan: Plan,
    results: Results,
    on_progress: Callable[[int, int, Record | None], None] = lambda done, total, record: None,
    times: StepTimes | None = None,
    prompts: KeptPrompts | None = None,
) -> list[dict[str, Any]]:
    """Make the records of the plan that the file lacks, and add them to it; return all of the plan, old and new.

    on_progress is called with the number of records that are there, how many the plan has, and the newest one. times
    and prompts: as of `Run`. Raises ValueError if the file's records are of another model or of other data.
    """
    sources = plan.sources(setup)
    records = results.find(sources)
    run = Run(setup, set(records), times, prompts)
    on_progress(len(records), len(sources), None)
    for job in plan.jobs:
        for record in run.records(job):
            results.add(record.json())
            records[record.key] = record.json()
            on_progress(len(records), len(sources), record)
    return [records[key] for key in sources]


@dataclass
class Run:
    """An evaluation as it is carried out.

    done: the keys of records that are there already. times: takes the time per token of every method that makes a
    record, in each task and mode, before the first batch that it answers here; None takes no times, and where traffic
    is counted none are taken, since the backend that counts is slow. prompts: takes the prompts that are read, and
    gives them to later calls; None keeps none.
    """

    setup: Setup
    done: set[RecordKey] = field(default_factory=set)
    times: StepTimes | None = None
    prompts: KeptPrompts | None = None

    @torch.inference_mode()
    def records(self, job: Job) -> Iterator[Record]:
        """Make the records of a job that are not done yet.

        The batches are the same whatever is done, so that a record does not depend on where a run was interrupted.
        """
        for number, groups in enumerate(_batches_of_groups(job.groups, self._prompts_at_once(job))):
            examples = [planned for group in groups for planned in group]
            if self._missing(job, job.methods, examples):
                prompts = self._read(job, groups, number)
                for start in range(0, len(job.methods), CACHES_AT_ONCE):
                    methods = job.methods[start : start + CACHES_AT_ONCE]
                    if self._missing(job, methods, examples):
                        yield from self._answers(job, prompts, methods)

    @property
    def _batch(self) -> int:
        return 1 if self.setup.counted else self.setup.batch

    def _prompts_at_once(self, job: Job) -> int:
        if not job.task.is_of_documents:
            return self._batch
        return documents_at_once(self.setup.model, self._batch, len(job.groups[0][0].question.feed))

    def _missing(self, job: Job, methods: Sequence[Method], examples: Sequence[PlannedExample]) -> set[RecordKey]:
        """The keys of these methods' records of these examples that are not done."""
        return {record_key(self.setup, job, m, planned) for m in methods for planned in examples} - self.done

    def _read(self, job: Job, groups: Sequence[list[PlannedExample]], number: int) -> Prompts:
        """Read the prompts of groups, all of the batch of that number, unless they are kept."""
        at = job.task.spec, job.mode, number
        if self.prompts is not None and at in self.prompts:
            return self.prompts[at]
        model = self.setup.model
        rows = [row for row, group in enumerate(groups) for _ in group]
        examples = [planned for group in groups for planned in group]
        ids, mask = _pad_left([group[0].prompt for group in groups], model.device)
        new_tokens = max(len(planned.question.feed) + planned.question.new_tokens for planned in examples)
        recorded, dense = record_prompt(model, ids, mask, new_tokens, self.setup.reader), None
        if job.task.is_of_documents:
            dense = dense_logits(recorded, _feeds(examples, model.device))
        prompts = Prompts(recorded, examples, rows, mask, dense)
        if self.prompts is not None:
            self.prompts[at] = prompts
        return prompts

    def _answers(self, job: Job, prompts: Prompts, methods: Sequence[Method]) -> Iterator[Record]:
        """Answer the examples with each method from its own cache."""
        caches = [prompts.recorded.cache(method) for method in methods]
        for joint in _decoded_together(caches, self.setup.counted):
            joint_methods = [cache.method for cache in joint]
            for start in range(0, len(prompts.rows), self._batch):
                part = prompts.part(start, start + self._batch)
                missing = self._missing(job, joint_methods, part.examples)
                if not missing:
                    continue
                self._take_times(job, joint, part)
                answers = self._answer([copy_rows(cache, part.rows) for cache in joint], part)
                for method, method_answers in zip(joint_methods, answers, strict=True):
                    for planned, answer in zip(part.examples, method_answers, strict=True):
                        if record_key(self.setup, job, method, planned) in missing:
                            yield self._record(job, method, planned, answer)

    def _take_times(self, job: Job, caches: Sequence[Cache], part: Prompts) -> None:
        """Time those methods of the caches that have no time yet, each alone and on a copy of its cache."""
        questions = [planned.question for planned in part.examples]
        for cache in caches:
            at = job.task.spec, job.mode, repr(cache.method)
            if self.times is not None and not self.setup.counted and at not in self.times:
                copied, logits = copy_rows(cache, part.rows), part.recorded.logits
                ms = ms_per_token(self.setup.model, copied, logits, questions, part.mask)
                if ms is not None:
                    self.times[at] = ms

    def _answer(self, caches: Sequence[Cache], part: Prompts) -> Sequence[Sequence[Answer | Divergence]]:
        """Answer the examples' questions with each cache, which has a row for each example.

        With dense logits the tokens of the questions are forced and the predictions after them compared. Where traffic
        is counted there are one cache and one row, since the counters are those of a whole batch.
        """
        setup, answers = self.setup, list[Any]()
        before = caches[0].elements, caches[0].bytes
        with ops.backend("ref") if setup.counted else contextlib.nullcontext():
            if part.dense is None:
                questions, logits = [planned.question for planned in part.examples], part.recorded.logits
                answers += answer_questions(setup.model, setup.tokenizer, caches, logits, questions, part.mask)
            else:
                answers += force_tokens(setup.model, caches, _feeds(part.examples, part.dense.device), part.dense)
        if setup.counted:
            ((answer,),) = answers
            sliding = RowCosts(caches[0]).library_layers(0, answer.steps)
            elements, moved = caches[0].elements - before[0], caches[0].bytes - before[1]
            counted = {"elements": elements + sliding.elements, "bytes": moved + sliding.bytes}
            answers = [[answer._replace(cost=answer.cost._replace(**counted))]]
        return answers

    def _record(self, job: Job, method: Method, planned: PlannedExample, answer: Answer | Divergence) -> Record:
        example, given = planned.example, dict[str, Any]()
        if isinstance(answer, Divergence):
            score = job.task.module.score(answer.kl, example)
            given = {"output": "", "new_tokens": 0, **answer.json()}
        else:
            score = job.task.module.score(answer.bits if example.given else answer.text, example)
            given = {"output": answer.text, "new_tokens": answer.tokens}
        return Record(
            key=record_key(self.setup, job, method, planned),
            source=planned.source,
            context=hashlib.sha256(json.dumps(example.context).encode()).hexdigest()[:16],
            score=score,
            at=list(example.at),
            prompt_tokens=len(planned.prompt),
            fed_tokens=len(planned.question.feed),
            steps=answer.steps,
            **answer.cost._asdict(),
            batch=self._batch,
            backend="ref" if self.setup.counted else ops.select_backend(self.setup.model.device.type)[0],
            versions=package_versions(),
            **given,
        )


def _feeds(examples: Sequence[PlannedExample], device: Any) -> Tensor:
    """The tokens (B,m) that are forced after the prompts of documents, all of one number."""
    return torch.tensor([planned.question.feed for planned in examples], device=device)


def _decoded_together(caches: list[Cache], counted: bool) -> list[list[Cache]]:
    """Which caches decode in one batch: all, but for those that must be alone to be counted."""
    alone = [cache for cache in caches if counted or depends_on_data(cache)]
    together = [cache for cache in caches if cache not in alone]
    return [*([together] if together else []), *([cache] for cache in alone)]


def _batches_of_groups(groups: list[list[PlannedExample]], batch: int) -> Iterator[list[list[PlannedExample]]]:
    """Groups whose examples fill one batch together; at least one group."""
    filled: list[list[PlannedExample]] = []
    for group in groups:
        if filled and sum(map(len, filled)) + len(group) > batch:
            yield filled
            filled = []
        filled.append(group)
    yield filled


def _pad_left(prompts: list[list[int]], device: Any) -> tuple[Tensor, Tensor | None]:
    """Token ids and mask, both (B,n); no mask where nothing is padded."""
    n = max(map(len, prompts))
    ids = torch.tensor([[0] * (n - len(prompt)) + prompt for prompt in prompts], device=device)
    if all(len(prompt) == n for prompt in prompts):
        return ids, None
    return ids, torch.tensor([[0] * (n - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
