"""What an evaluation will do: tasks in tokens, in which modes, with which methods."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..hf.positions import counts_in_cache
from ..hf.rotary import key_rotations
from ..methods import Dense, SnapKV, SparQ, parse
from ..methods.base import Method
from . import budgets
from .answer import Question
from .forced import take_documents
from .generate import chat_text, common_start, encode
from .results import RecordKey
from .shared_prompt import layer_shapes, record_prompt
from .sweeps import MODES, SWEEPS
from .tasks import Example, Task

QUESTIONS = 4  # of a prompt, on which bytes are measured that depend on the data


class Setup(NamedTuple):
    """What all records of an evaluation share.

    counted: measure the traffic, on the reference backend and row by row, instead of predicting it. weights: the
    fingerprint of the model (hf/fingerprint.py). chat: context and question are a user's turn of a chat. reader: the
    model in another number format, which reads the prompts (shared_prompt.record_prompt).
    """

    model: Any
    tokenizer: Any
    name: str
    seed: int = 0
    batch: int = 1
    counted: bool = False
    weights: str = ""
    chat: bool = False
    reader: Any = None

    @property
    def positions(self) -> int | None:
        """The greatest number of tokens that the model has positions for; None if it has no bound."""
        return getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)

    def count_tokens(self, text: str) -> int:
        """How many tokens a text has as a prompt, with what the tokenizer or a chat puts around it."""
        return len(encode(self.tokenizer, text, self.chat))

    def encode_beginning(self, text: str, beginning: str) -> list[int]:
        """Token ids of the beginning of a prompt: of a chat, those before the rest of the turn.

        Raises ValueError if the chat template changes what it is given.
        """
        if not self.chat or beginning == text:
            return encode(self.tokenizer, beginning, self.chat)
        whole, part = chat_text(self.tokenizer, text), beginning.strip()
        if part not in whole:
            raise ValueError("--chat: the model's chat template changes the text that it is given")
        ids: list[int] = self.tokenizer(
            whole[: whole.index(part) + len(part)], add_special_tokens=False, verbose=False
        ).input_ids
        return ids


class PlannedExample(NamedTuple):
    """An example in tokens: the prompt is read at once, the question's tokens are fed after it.

    source: a digest of what an answer comes from: the weights, the tokens, and what counts as right.
    """

    example: Example
    prompt: list[int]
    question: Question
    source: str


class Job(NamedTuple):
    """One task in one mode, by some methods. The examples of a group share their prompt.

    left_out: how many examples are longer than the model's positions, or how many documents have too few tokens. long:
    those examples, for methods that count positions in their cache.
    """

    task: Task
    mode: str
    groups: list[list[PlannedExample]]
    methods: list[Method]
    left_out: int = 0
    long: list[list[PlannedExample]] = []  # noqa: RUF012 (a NamedTuple's default, which nobody changes)


class Plan(NamedTuple):
    """All jobs of an evaluation, and notes on what was left out of them."""

    jobs: list[Job]
    notes: list[str]

    def sources(self, setup: Setup) -> dict[RecordKey, str]:
        """The keys of all records that the plan asks for, and the source that each must have."""
        return {
            record_key(setup, job, method, planned): planned.source
            for job in self.jobs for group in job.groups for planned in group for method in job.methods
        }  # fmt: skip


def record_key(setup: Setup, job: Job, method: Method, planned: PlannedExample) -> RecordKey:
    """The key of the record of one method's answer to one example."""
    dtype = str(setup.model.dtype).removeprefix("torch.")
    job_key = setup.counted, job.task.spec, job.mode
    return RecordKey(setup.name, dtype, setup.seed, *job_key, repr(method), planned.example.id)


def plan_evaluation(
    setup: Setup,
    tasks: Sequence[Task],
    methods: Sequence[Method],
    sweep: str | None = None,
    mode: str = "blind",
    data: Path | None = None,
    limit: int = 20,
    on_task: Callable[[int, str], None] = lambda done, task: None,
) -> Plan:
    """Plan the first `limit` examples of every task, by a sweep's methods and those that were named.

    mode: one of sweeps.MODES, or "both". sweep: a name of sweeps.SWEEPS. on_task is called with the number of tasks
    that are planned and the spec of the next one. A method of a sweep that does not fit the model is left out. Raises
    ValueError if a method that was named does not fit, or if no example of a task does.
    """
    _, misfits = supported_methods(setup, methods)
    if misfits:
        raise ValueError(misfits[0])
    grid, misfits = supported_methods(setup, [parse(spec) for spec in SWEEPS[sweep]] if sweep else [])
    jobs: list[Job] = []
    notes = [f"Left out: {misfit}" for misfit in misfits]
    for done, task in enumerate(tasks):
        on_task(done, task.spec)
        for task_mode in MODES if mode == "both" else (mode,):
            job = plan_job(setup, task, task_mode, [*grid, *methods], data, limit)
            if any((job.task.spec, job.mode) == (other.task.spec, other.mode) for other in jobs):
                continue  # a task without questions has one mode
            if sweep == "matched" and job.groups:
                matched, missing = matched_to(setup, job)
                job = job._replace(methods=list(dict.fromkeys([*matched, *methods])))
                notes += [f"Left out: {note}" for note in missing]
            if job.left_out:
                reason = f"{job.left_out} examples are longer than the model's {setup.positions} positions"
                if task.is_of_documents:
                    reason = f"{job.left_out} documents have too few tokens"
                notes.append(f"Left out of {task.spec}, {job.mode}: {reason}")
            if job.groups:
                jobs.append(job)
            if streaming := [method for method in job.methods if job.long and counts_in_cache(method)]:
                jobs.append(Job(job.task, job.mode, job.long, streaming))
                notes.append(f"Of {task.spec}, {job.mode}, these answer longer examples too: {streaming}")
    return Plan(jobs, notes)


def plan_job(
    setup: Setup, task: Task, mode: str, methods: Sequence[Method], data: Path | None = None, limit: int = 20
) -> Job:
    """Plan the first `limit` examples of one task in one mode. Raises ValueError if none fits the model.

    Examples that are longer than the model's positions are left out, because no answer past them says anything about a
    method. Those that count positions in their cache answer them all the same.

    A task whose examples ask no question, and give the text to score, has one mode: "forced".
    """
    if task.is_of_documents:
        return _plan_documents(setup, task, methods, data, limit)
    examples = list(islice(task.examples(data, setup.seed, setup.count_tokens), limit))
    texts = [task.prompt(example) for example in examples]
    if not any(question for _, question in texts) and all(example.given for example in examples):
        mode = "forced"
    prompts = [context + question if mode == "aware" else context for context, question in texts]
    groups, long, left_out = [], [], 0
    for prompt, members in groupby(range(len(examples)), key=lambda i: prompts[i]):
        group = _in_tokens(setup, prompt, [(examples[i], *texts[i]) for i in members])
        fitting = [planned for planned in group if _fits(planned, setup.positions)]
        left_out += len(group) - len(fitting)
        if fitting:
            groups.append(fitting)
        if longer := [_cut_prompt(planned, setup.positions) for planned in group if planned not in fitting]:
            long.append(longer)
    if not groups and not (long and any(map(counts_in_cache, methods))):
        hint = f"; the default is {task.sizes}" if task.sizes else ""
        raise ValueError(f"{task.spec}: no example fits the model's {setup.positions} positions{hint}")
    return Job(task, mode, groups, list(methods), left_out, long)


def _plan_documents(setup: Setup, task: Task, methods: Sequence[Method], data: Path | None, limit: int) -> Job:
    """Plan the first `limit` documents of a task that have enough tokens. Raises ValueError if there is none."""
    examples = task.examples(data, setup.seed)
    first = next(examples)
    context, size = first.tokens[0], sum(first.tokens)
    if setup.positions is not None and size > setup.positions:
        raise ValueError(
            f"{task.spec}: context + reference = {size} tokens exceed the model's {setup.positions} positions; the "
            f"default is {task.sizes}"
        )
    taken = take_documents(setup.tokenizer, chain([first], examples), limit)
    if not taken.documents:
        raise ValueError(
            f"{task.spec}: no document of {data or 'the Hub'} has context + reference = {size} tokens, the longest has "
            f"{taken.longest}; the default is {task.sizes}"
        )
    groups = document_groups(taken.documents, context, setup.weights)
    return Job(task, "forced", groups, list(methods), taken.too_short)


def document_groups(
    documents: Sequence[tuple[Example, list[int]]], context: int, weights: str = ""
) -> list[list[PlannedExample]]:
    """Plan documents, given with their tokens, of which the first `context` are the prompt; a group is one document."""
    groups = []
    for example, ids in documents:
        source = hashlib.sha256(json.dumps((weights, ids[:context], ids[context:])).encode()).hexdigest()[:16]
        groups.append([PlannedExample(example, ids[:context], Question(ids[context:]), source)])
    return groups


def _fits(planned: PlannedExample, positions: int | None) -> bool:
    n = len(planned.prompt) + len(planned.question.feed) + planned.question.new_tokens
    return bool(planned.prompt) and (positions is None or n <= positions)


def _cut_prompt(planned: PlannedExample, positions: int | None) -> PlannedExample:
    """The same example with a prompt that fits the model's positions; the rest of it is decoded before the question."""
    read, decoded = planned.prompt[:positions], planned.prompt[positions:] if positions is not None else []
    return planned._replace(prompt=read, question=planned.question._replace(feed=[*decoded, *planned.question.feed]))


def _in_tokens(setup: Setup, prompt: str, members: list[tuple[Example, str, str]]) -> list[PlannedExample]:
    """Tokenize examples that share a prompt; members: (example, context, question).

    Context, question and a given answer are tokenized as one text, and split where it parts from the prompt's own
    tokens: both modes then feed the same tokens to the model. A text that is only scored is no turn of a chat.
    """
    example, context, question = members[0]
    setup = setup._replace(chat=setup.chat and not example.given)

    def tokens(text: str) -> list[int]:
        """Return the tokens of a text."""
        return encode(setup.tokenizer, text, setup.chat)

    whole = [tokens(context + question + (e.answers[0] if e.given else "")) for e, context, question in members]
    prompt_tokens = setup.encode_beginning(context + question, prompt)
    shared = min(common_start(prompt_tokens, ids) for ids in whole)
    group = []
    for (example, context, question), ids in zip(members, whole, strict=True):
        if example.given:
            unscored, new_tokens = max(common_start(tokens(context + question), ids), shared), 0
        else:
            unscored, new_tokens = len(ids), example.new or len(encode(setup.tokenizer, example.answers[0], chat=False))
        end = example.stop, example.chars, example.enough, example.answers if example.enough else ()
        asked = Question(ids[shared:], len(ids) - unscored, new_tokens, *end)
        source = hashlib.sha256(json.dumps((setup.weights, ids[:shared], asked.feed, example.answers)).encode())
        group.append(PlannedExample(example, ids[:shared], asked, source.hexdigest()[:16]))
    return group


@torch.inference_mode()
def matched_to(setup: Setup, job: Job) -> tuple[list[Method], list[str]]:
    """Every method at 1/2, 1/4 and 1/8 of dense's bytes, solved on the job's prompt of median length.

    Methods whose bytes depend on the data are solved on the first questions about that prompt. Where queries share KV
    heads, SparQ does not use the mean value by default; there its form that does stands beside it, at the same r and k.
    Beside SnapKV stands its form with a wider pool: numbers that are tokenized digit by digit lose their ends with 5.
    Returns the methods, Dense first, and notes on those that cannot read so little.
    """
    group = sorted(job.groups, key=lambda group: len(group[0].prompt))[len(job.groups) // 2]
    ids = torch.tensor([group[0].prompt], device=setup.model.device)
    prompt = record_prompt(setup.model, ids, new_tokens=budgets.MEASURED_STEPS)
    dense = prompt.cache(Dense())
    mean_share = budgets.measured_share(prompt, [planned.question for planned in group[:QUESTIONS]])
    matched, left_out = budgets.matched_methods(dense.stores, mean_share)
    methods, grouped = list[Method](), dense.stores[0].shape.G > 1
    for method in dict.fromkeys(method for method, _ in matched):
        methods.append(method)
        if grouped and isinstance(method, SparQ):
            methods.append(dataclasses.replace(method, mean_value=True))
        if isinstance(method, SnapKV):
            methods.append(dataclasses.replace(method, pool=13))
    supported, misfits = supported_methods(setup, methods)
    return supported, [*(f"{note} on {job.task.spec}" for note in left_out), *misfits]


@torch.inference_mode()
def supported_methods(setup: Setup, methods: Sequence[Method]) -> tuple[list[Method], list[str]]:
    """Those methods that fit the shapes of the model's layers, and why the others do not."""
    supported, misfits, shapes = [], [], layer_shapes(setup.model)
    for method in dict.fromkeys(methods):
        try:
            for shape, dtype in shapes:
                method.store(shape, dtype)
            if counts_in_cache(method):
                key_rotations(setup.model)
            supported.append(method)
        except ValueError as error:
            misfits.append(f"{method}: {error}")
    return supported, misfits
