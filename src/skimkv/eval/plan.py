"""What an evaluation does: tasks in tokens, methods that fit the model, the papers' grids."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..methods import METHODS, Dense, parse
from ..methods.base import Method
from . import budgets
from . import shared_prompt as prompt
from .answer import Ask
from .generate import encode
from .tasks import Example, Task

MODES = ("blind", "aware")
SHARES = (1 / 2, 1 / 4, 1 / 8)
PAPER = (
    "Dense()",
    *(f"SparQ(r={r}, k=128)" for r in (8, 16, 32, 64)),
    *(f"{name}(k={k})" for name in ("H2O", "LMInfinite", "Strided", "Fixed") for k in (192, 256, 384, 512, 768)),
    *(f"SubGen(k={k - 64}, recent=64)" for k in (192, 256, 384, 512, 768)),
    *(f"TopK(k={k})" for k in (2, 8, 32, 128, 256)),
    *(f"LowRank(r={r}, k=128)" for r in (8, 16, 32, 64)),
)  # SparQ Attention, table G1; at the same budgets what it did not measure
_MEAN = "mean_value=True"
_CHANGES = (
    "mean_value=False", _MEAN, f"{_MEAN}, temperature='sqrt_d'", f"{_MEAN}, temperature='sqrt_r'", "local=0",
    "channels='int8'", "channels='int4'",
)  # fmt: skip
ABLATION = (
    "Dense()",
    *(f"TopK(k={k}, oracle=True)" for k in (16, 32, 64, 128, 256)),
    *(f"LowRank(r={r}, k=128)" for r in (8, 16, 32, 64)),
    *(f"SparQ(r={r}, k={k})" for k in (32, 64, 128, 256) for r in (8, 16, 32, 64)),
    *(f"SparQ(r={r}, k={k}, {change})" for r, k in ((8, 32), (16, 128)) for change in _CHANGES),
)  # SparQ Attention, fig. 7a, 7b and 7c; and its channels in 8 and 4 bits


class Item(NamedTuple):
    """An example in tokens: `prompt` is read at once, what is fed after it is in its Ask."""

    example: Example
    prompt: list[int]
    ask: Ask


class Job(NamedTuple):
    """One task in one mode; the items of a group share their prompt."""

    task: Task
    mode: str
    groups: list[list[Item]]
    methods: list[Method]
    left_out: int = 0  # examples longer than the model's positions


class Run(NamedTuple):
    """What all records of a run share. counted: measure the traffic, on the reference backend and row by row; weights:
    the model's fingerprint."""

    model: Any
    tokenizer: Any
    name: str
    seed: int = 0
    batch: int = 1
    counted: bool = False
    weights: str = ""

    @property
    def positions(self) -> int | None:
        return getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)

    def fits(self, item: Item) -> bool:
        n = len(item.prompt) + len(item.ask.feed) + item.ask.new
        return bool(item.prompt) and (self.positions is None or n <= self.positions)


def job(run: Run, task: Task, mode: str, methods: Sequence[Method], data: Path | None, limit: int) -> Job:
    """The first `limit` examples in tokens. Raises ValueError if none fits the model."""
    examples = list(islice(task.examples(data, run.seed), limit))
    texts = [task.module.prompt(example) for example in examples]
    if not any(question for _, question in texts) and all(example.given for example in examples):
        mode = "forced"  # there is no question to be aware of
    heads = [context + question if mode == "aware" else context for context, question in texts]
    groups, left_out = [], 0
    for head, members in groupby(range(len(examples)), key=lambda i: heads[i]):
        group = _group(run, head, [(examples[i], *texts[i]) for i in members])
        fitting = [item for item in group if run.fits(item)]
        left_out += len(group) - len(fitting)
        groups += [fitting] if fitting else []
    if not groups:
        hint = f"; its arguments are {task.sizes}" if task.sizes else ""
        raise ValueError(f"{task.spec}: no example fits the model's {run.positions} positions{hint}")
    return Job(task, mode, groups, list(methods), left_out)


def _group(run: Run, head: str, members: list[tuple[Example, str, str]]) -> list[Item]:
    """The tokens of the whole are split where they part from the head's, so that both modes see the same tokens."""

    def tokens(text: str) -> list[int]:
        return encode(run.tokenizer, text, chat=False)

    whole = [tokens(c + q + (e.answers[0] if e.given else "")) for e, c, q in members]
    dense = tokens(head)
    shared = min(_common(dense, ids) for ids in whole)
    items = []
    for (example, context, question), ids in zip(members, whole, strict=True):
        asked = _common(tokens(context + question), ids) if example.given else len(ids)
        new = 0 if example.given else example.new or len(tokens(example.answers[0]))
        ask = Ask(ids[shared:], len(ids) - max(asked, shared), new, example.stop, example.chars)
        items.append(Item(example, ids[:shared], ask))
    return items


def _common(a: list[int], b: list[int]) -> int:
    """How many tokens at the beginning are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@torch.inference_mode()
def matched(run: Run, first: Job) -> tuple[list[Method], list[str]]:
    """Every method at 1/2, 1/4, 1/8 of dense's bytes, solved on the prompt of median length; what cannot be had."""
    prompts = sorted((group[0].prompt for group in first.groups), key=len)
    ids = torch.tensor([prompts[len(prompts) // 2]], device=run.model.device)
    stores = budgets.stores(prompt.fill(run.model, prompt.read(run.model, ids)[0], Dense()))
    found, none = [parse("Dense()")], []
    for share in SHARES:
        for name, method in METHODS.items():
            fitting = None if method is Dense else budgets.at(method, share, stores)
            if fitting is None and method is not Dense:
                none.append(f"{name} cannot read as little as 1/{round(1 / share)} of dense on {first.task.spec}")
            elif fitting is not None and fitting not in found:
                found.append(fitting)
    return found, none


@torch.inference_mode()
def servable(run: Run, methods: Sequence[Method]) -> tuple[list[Method], list[str]]:
    """Those that fit the shape of the model's layers, and why others do not."""
    fitting, none, shapes = [], [], prompt.shapes(run.model)
    for method in dict.fromkeys(methods):
        try:
            for shape, dtype in shapes:
                method.store(shape, dtype)
            fitting.append(method)
        except ValueError as error:
            none.append(f"{method}: {error}")
    return fitting, none
