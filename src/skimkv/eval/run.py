"""Carry out the plan of an evaluation: read each prompt once, answer with every method, and record the answers.

Question-blind: the context is the prompt, and the question comes after it, token by token through the method, so
that no method could choose for it in advance. Question-aware: the question belongs to the dense prompt.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from .. import ops
from ..hf.cache import Cache
from ..methods.base import Method
from ..records import package_versions
from .answer import Answer, answer_questions
from .divergence import Divergence, dense_logits, documents_at_once, force_tokens
from .plan import Job, Plan, PlannedExample, Setup, record_key
from .results import Record, RecordKey, Results
from .shared_prompt import RecordedPrompt, copy_rows, record_prompt
from .timing import StepTimes, ms_per_token
from .traffic import RowCosts, depends_on_data

CACHES_AT_ONCE = 6  # methods whose caches of one prompt are in memory together, and which decode in one batch
T = TypeVar("T")


def run_evaluation(
    setup: Setup,
    plan: Plan,
    results: Results,
    on_progress: Callable[[int, int, Record | None], None] = lambda done, total, record: None,
    times: StepTimes | None = None,
) -> list[dict[str, Any]]:
    """Make the records of the plan that the file lacks, and add them to it; return all of the plan, old and new.

    on_progress is called with the number of records that are there, how many the plan has, and the newest one. times:
    takes the time per token of every method that makes a record, in each task and mode; None takes no times.
    Raises ValueError if the file's records are of another model or of other data.
    """
    sources = plan.sources(setup)
    records = results.find(sources)
    done = set(records)
    on_progress(len(records), len(sources), None)
    for job in plan.jobs:
        for record in run_job(setup, job, done, times):
            results.add(record.json())
            records[record.key] = record.json()
            on_progress(len(records), len(sources), record)
    return [records[key] for key in sources]


@torch.inference_mode()
def run_job(setup: Setup, job: Job, done: set[RecordKey], times: StepTimes | None = None) -> Iterator[Record]:
    """Make the records of a job that are not done yet.

    The batches are the same whatever is done, so that a record does not depend on where a run was interrupted.
    With `times`, each method is timed before the first batch that it answers here; not where traffic is counted, since
    the backend that counts is slow.
    """
    for groups in _batches_of_groups(job.groups, _documents_at_once(setup, job)):
        rows = [row for row, group in enumerate(groups) for _ in group]  # of the prompts' batch, for each example
        examples = [planned for group in groups for planned in group]
        if not _missing(setup, job, job.methods, examples, done):
            continue
        ids, mask = _pad_left([group[0].prompt for group in groups], setup.model.device)
        questions = [planned.question for planned in examples]
        new_tokens = max(len(question.feed) + question.new_tokens for question in questions)
        prompt = record_prompt(setup.model, ids, mask, new_tokens)
        dense = None
        if job.task.is_of_documents:
            dense = dense_logits(prompt, _feeds(examples, setup.model.device))
        for methods in _chunks(job.methods, CACHES_AT_ONCE):
            if _missing(setup, job, methods, examples, done):
                yield from _answer_examples(setup, job, prompt, mask, dense, methods, rows, examples, done, times)


def _answer_examples(
    setup: Setup,
    job: Job,
    prompt: RecordedPrompt,
    mask: torch.Tensor | None,
    dense: torch.Tensor | None,
    methods: Sequence[Method],
    rows: Sequence[int],
    examples: Sequence[PlannedExample],
    done: set[RecordKey],
    times: StepTimes | None,
) -> Iterator[Record]:
    """Answer examples whose prompts are these rows of the recorded prompt, with each method from its own cache.

    dense (rows,m,V): dense attention's logits after each forced token, where they are what methods are compared with.
    """
    caches = [prompt.cache(method) for method in methods]
    for joint in _decoded_together(caches, setup.counted):
        joint_methods = [cache.method for cache in joint]
        for batch in _chunks(list(zip(rows, examples, strict=True)), _batch_size(setup)):
            index, batch_examples = [row for row, _ in batch], [planned for _, planned in batch]
            missing = _missing(setup, job, joint_methods, batch_examples, done)
            if not missing:
                continue
            own_mask = None if mask is None else mask[index]
            if times is not None and not setup.counted:
                _take_times(setup, job, joint, index, prompt.logits[index], batch_examples, own_mask, times)
            copies = [copy_rows(cache, index) for cache in joint]
            own_dense = None if dense is None else dense[index]
            answers = _answer(setup, copies, prompt.logits[index], batch_examples, own_mask, own_dense)
            for method, method_answers in zip(joint_methods, answers, strict=True):
                for planned, answer in zip(batch_examples, method_answers, strict=True):
                    if record_key(setup, job, method, planned) in missing:
                        yield _make_record(setup, job, method, planned, answer)


def _take_times(
    setup: Setup,
    job: Job,
    caches: Sequence[Cache],
    rows: Sequence[int],
    logits: torch.Tensor,
    examples: Sequence[PlannedExample],
    mask: torch.Tensor | None,
    times: StepTimes,
) -> None:
    """Time those methods of the caches that have no time yet, each alone and on a copy of these rows of its cache."""
    questions = [planned.question for planned in examples]
    for cache in caches:
        at = job.task.spec, job.mode, repr(cache.method)
        if at not in times:
            ms = ms_per_token(setup.model, copy_rows(cache, rows), logits, questions, mask)
            if ms is not None:
                times[at] = ms


def _answer(
    setup: Setup,
    caches: Sequence[Cache],
    logits: torch.Tensor,
    examples: Sequence[PlannedExample],
    mask: torch.Tensor | None,
    dense: torch.Tensor | None,
) -> Sequence[Sequence[Answer | Divergence]]:
    """Answer the examples' questions with each cache; caches, logits, mask and dense have a row for each example.

    With `dense` the tokens of the questions are forced and the predictions after them compared. Where traffic is
    counted there are one cache and one row, since the counters are those of a whole batch.
    """
    answers: Sequence[Sequence[Answer | Divergence]]
    before = caches[0].elements, caches[0].bytes
    with ops.backend("ref") if setup.counted else contextlib.nullcontext():
        if dense is None:
            questions = [planned.question for planned in examples]
            answers = answer_questions(setup.model, setup.tokenizer, caches, logits, questions, mask)
        else:
            answers = force_tokens(setup.model, caches, _feeds(examples, dense.device), dense)
    if setup.counted:
        ((answer,),) = answers
        sliding = RowCosts(caches[0]).library_layers(0, answer.steps)
        elements, moved = caches[0].elements - before[0], caches[0].bytes - before[1]
        counted = {"elements": elements + sliding.elements, "bytes": moved + sliding.bytes}
        answers = [[answer._replace(cost=answer.cost._replace(**counted))]]
    return answers


def _batch_size(setup: Setup) -> int:
    return 1 if setup.counted else setup.batch


def _documents_at_once(setup: Setup, job: Job) -> int:
    """How many examples' prompts are read in one batch."""
    batch = _batch_size(setup)
    if not job.task.is_of_documents:
        return batch
    return documents_at_once(setup.model, batch, len(job.groups[0][0].question.feed))


def _feeds(examples: Sequence[PlannedExample], device: Any) -> torch.Tensor:
    """The tokens (B,m) that are forced after the prompts of documents, all of one number."""
    return torch.tensor([planned.question.feed for planned in examples], device=device)


def _missing(
    setup: Setup, job: Job, methods: Sequence[Method], examples: Sequence[PlannedExample], done: set[RecordKey]
) -> set[RecordKey]:
    """The keys of these methods' records of these examples that are not done."""
    return {record_key(setup, job, method, planned) for method in methods for planned in examples} - done


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


def _chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The items in their order, `size` at a time."""
    return (items[start : start + size] for start in range(0, len(items), size))


def _pad_left(prompts: list[list[int]], device: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token ids and mask, both (B,n); no mask where nothing is padded."""
    n = max(map(len, prompts))
    ids = torch.tensor([[0] * (n - len(prompt)) + prompt for prompt in prompts], device=device)
    if all(len(prompt) == n for prompt in prompts):
        return ids, None
    return ids, torch.tensor([[0] * (n - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)


def _make_record(
    setup: Setup, job: Job, method: Method, planned: PlannedExample, answer: Answer | Divergence
) -> Record:
    example = planned.example
    given: dict[str, Any]
    if isinstance(answer, Divergence):
        score = job.task.module.score(answer.kl, example)
        given = {"output": "", "new_tokens": 0, **answer.json()}
    else:
        score = job.task.module.score(answer.bits if example.given else answer.text, example)
        given = {"output": answer.text, "new_tokens": answer.tokens}
    return Record(
        key=record_key(setup, job, method, planned),
        source=planned.source,
        context=hashlib.sha256(json.dumps(example.context).encode()).hexdigest()[:16],
        score=score,
        at=list(example.at),
        prompt_tokens=len(planned.prompt),
        fed_tokens=len(planned.question.feed),
        steps=answer.steps,
        **answer.cost._asdict(),
        batch=_batch_size(setup),
        backend="ref" if setup.counted else ops.select_backend(setup.model.device.type)[0],
        versions=package_versions(),
        **given,
    )
