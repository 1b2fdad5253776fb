"""Tasks by methods: the dense prompt is read once, every method answers from its own copy of what it keeps.

Question-blind: the context is the prompt, and the question comes after it, token by token through the method, so
that no method could choose for it in advance. Question-aware: the question belongs to the dense prompt.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

import torch

from .. import __version__, ops
from ..hf.attach import Cache
from ..methods.base import Method
from . import shared_prompt as prompt
from .answer import Said, answer, uneven
from .plan import Item, Job, Run

# What a record is found by again: a run that was interrupted does not repeat it.
KEY = ("model", "dtype", "seed", "counted", "task", "mode", "method", "id")
Key = tuple[Any, ...]
TOGETHER = 6  # methods whose caches of one prompt are held at once, and which decode in one batch


def key(run: Run, job: Job, method: Method, item: Item) -> Key:
    dtype = str(run.model.dtype).removeprefix("torch.")
    return run.name, dtype, run.seed, run.counted, job.task.spec, job.mode, repr(method), item.example.id


def key_of(record: dict[str, Any]) -> Key:
    return tuple(record.get(name) for name in KEY)


def fingerprint(model: torch.nn.Module) -> str:
    """Of the weights: their names and shapes, and up to 64 numbers of each."""
    made = hashlib.sha256()
    for name, x in model.state_dict().items():
        some = x.detach().flatten()[:: max(1, -(-x.numel() // 64))].double().cpu()
        made.update(f"{name} {tuple(x.shape)} {some.tolist()}".encode())
    return made.hexdigest()[:16]


def source(run: Run, item: Item) -> str:
    """Of what an answer comes from: the weights, the tokens, and what counts as right."""
    parts = run.weights, item.prompt, item.ask.feed, item.example.answers
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def wanted(run: Run, jobs: Sequence[Job]) -> dict[Key, str]:
    """The keys of all records of these jobs, and what each must have come from."""
    return {
        key(run, job, method, item): made
        for job in jobs for group in job.groups for item in group for made in [source(run, item)]
        for method in job.methods
    }  # fmt: skip


@torch.inference_mode()
def records(run: Run, job: Job, done: set[Key]) -> Iterator[dict[str, Any]]:
    """The records that are not done yet. Batches do not depend on what is, so neither does a result."""
    batch = 1 if run.counted else run.batch

    def missing(methods: Sequence[Method], items: Sequence[Item]) -> list[list[bool]]:
        return [[key(run, job, method, item) not in done for item in items] for method in methods]

    for groups in _batches(job.groups, batch):
        items = [(row, item) for row, group in enumerate(groups) for item in group]
        every = [item for _, item in items]
        if not any(map(any, missing(job.methods, every))):
            continue
        ids, mask = _padded([group[0].prompt for group in groups], run.model.device)
        held, logits = prompt.read(run.model, ids, mask)
        for first in range(0, len(job.methods), TOGETHER):
            some = job.methods[first : first + TOGETHER]
            if not any(map(any, missing(some, every))):
                continue
            for caches in _teams([prompt.fill(run.model, held, method) for method in some], run.counted):
                methods = [cache.method for cache in caches]
                for start in range(0, len(items), batch):
                    rows, part = zip(*items[start : start + batch], strict=True)
                    fresh = missing(methods, part)
                    if not any(map(any, fresh)):
                        continue
                    own = None if mask is None else mask[list(rows)]
                    said = _answer(run, [prompt.fork(cache, rows) for cache in caches], logits[list(rows)], part, own)
                    for method, answers, new in zip(methods, said, fresh, strict=True):
                        for item, each, wanted in zip(part, answers, new, strict=True):
                            if wanted:
                                yield _record(run, job, method, item, each)


def _teams(caches: list[Cache], counted: bool) -> list[list[Cache]]:
    """Which caches decode in one batch: all, but for those that must be alone to be counted."""
    alone = [cache for cache in caches if counted or uneven(cache)]
    shared = [cache for cache in caches if cache not in alone]
    return [*([shared] if shared else []), *([cache] for cache in alone)]


def _batches(groups: list[list[Item]], batch: int) -> Iterator[list[list[Item]]]:
    """Groups whose items fill one batch together; one group at least."""
    held: list[list[Item]] = []
    for group in groups:
        if held and sum(map(len, held)) + len(group) > batch:
            yield held
            held = []
        held.append(group)
    yield held


def _padded(prompts: list[list[int]], device: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Left padded, with a mask only where there is padding."""
    most = max(map(len, prompts))
    ids = torch.tensor([[0] * (most - len(p)) + p for p in prompts], device=device)
    if all(len(p) == most for p in prompts):
        return ids, None
    return ids, torch.tensor([[0] * (most - len(p)) + [1] * len(p) for p in prompts], device=device)


def _answer(
    run: Run, caches: list[Cache], logits: torch.Tensor, items: Sequence[Item], mask: torch.Tensor | None
) -> list[list[Said]]:
    """What each cache's method says to the items; caches, logits and mask have a row for each of them."""
    before = caches[0].elements, caches[0].bytes
    asks, n = [item.ask for item in items], len(caches)
    own = None if mask is None else mask.repeat(n, 1)
    with ops.backend("ref") if run.counted else contextlib.nullcontext():
        said = answer(run.model, run.tokenizer, prompt.beside(caches), logits.repeat(n, 1), asks * n, own)
    if run.counted:  # the counters are of the whole batch, which is one row
        cache = caches[0]
        said = [said[0]._replace(elements=cache.elements - before[0], bytes=cache.bytes - before[1])]
    return [said[i : i + len(asks)] for i in range(0, len(said), len(asks))]


@functools.cache
def _versions() -> dict[str, str]:
    return {"skimkv": __version__, **{name: version(name) for name in ("torch", "transformers")}}


def _record(run: Run, job: Job, method: Method, item: Item, said: Said) -> dict[str, Any]:
    """Nothing in it depends on time: the same run makes the same records again."""
    example = item.example
    return {
        **dict(zip(KEY, key(run, job, method, item), strict=True)),
        "source": source(run, item),
        "score": job.task.module.score(said.bits if example.given else said.text, example),
        "output": said.text,
        "at": list(example.at),
        "prompt_tokens": len(item.prompt),
        "fed_tokens": len(item.ask.feed),
        "new_tokens": said.tokens,
        "steps": said.steps,
        "elements": said.elements,
        "bytes": said.bytes,
        "paper_elements": said.paper,
        "dense_elements": said.dense_elements,
        "dense_bytes": said.dense_bytes,
        "batch": 1 if run.counted else run.batch,
        "backend": "ref" if run.counted else ops.chosen(run.model.device.type)[0],
        "versions": _versions(),
    }
