"""Tasks, one file each: what the model reads, what it is asked, and which answers are right.

A task is a module of three functions:
    examples(*, data, seed, ...) -> iterator of Example; how many are taken from it changes none of them
    prompt(example) -> (context, question); their concatenation is the prompt
    score(output, example) -> float; larger is better, or smaller where the module says LOWER; UNIT says of what
and, where scores go beyond 1, of a fourth:
    greatest_score(...) -> the greatest score that is possible, with the arguments of `examples`
A module whose examples are documents (Example.tokens) says DOCUMENTS; then `output` are the divergences from dense
attention.
The spec of a task is its name with the arguments of `examples`: `lines`, `lines(lines=200)`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ... import spec
from .base import Example

__all__ = ["TASKS", "Example", "Task", "parse"]

MADE_UP = ("record", "passkey", "lines")  # tasks whose examples need no data
TASKS = ("record", "passkey", "lines", "needle", "repetition", "bpc", "kl", "squad", "triviaqa", "summarise")


class Task(NamedTuple):
    """A task with the arguments of its examples; `spec` names both."""

    spec: str
    module: ModuleType
    arguments: dict[str, Any]

    def examples(self, data: Path | None, seed: int) -> Iterator[Example]:
        """The task's examples, from a folder or file of data, else from the Hub where the task needs any."""
        examples: Iterator[Example] = self.module.examples(data=data, seed=seed, **self.arguments)
        return examples

    @property
    def is_made_up(self) -> bool:
        """Whether its examples need no data."""
        return self.module.__name__.rpartition(".")[2] in MADE_UP

    @property
    def sizes(self) -> str:
        """The arguments that the task takes, with their defaults."""
        return ", ".join(f"{p.name}={p.default!r}" for p in _parameters(self.module))

    @property
    def unit(self) -> str:
        """What a score counts."""
        return getattr(self.module, "UNIT", "share right")

    @property
    def greatest(self) -> float:
        """The greatest score that is possible, 1 where the module has no `greatest_score`; the least is 0."""
        greatest_score = getattr(self.module, "greatest_score", None)
        return 1.0 if greatest_score is None else float(greatest_score(**self.arguments))

    @property
    def is_of_documents(self) -> bool:
        """Whether its examples are documents, whose distributions are compared with dense attention's."""
        return getattr(self.module, "DOCUMENTS", False)

    @property
    def lower(self) -> bool:
        """Whether a smaller score is the better one."""
        return getattr(self.module, "LOWER", False)


def _parameters(module: ModuleType) -> list[inspect.Parameter]:
    """The arguments of a task's examples that its spec can give."""
    parameters = inspect.signature(module.examples).parameters.values()
    return [p for p in parameters if p.name not in ("data", "seed")]


def parse(text: str) -> Task:
    """Make a task from its spec. Raises ValueError, in one line, that names what is wrong with it."""
    call = spec.parse_call(text, "task", "lines(lines=100)")
    if call.name not in TASKS:
        raise ValueError(f"unknown task {call.name!r}{spec.suggest(call.name, TASKS)}")
    module = importlib.import_module(f".{call.name}", __name__)
    known = [
        spec.Parameter(p.name, keyword_only=True, takes_text="str" in str(p.annotation)) for p in _parameters(module)
    ]
    arguments = spec.bind(call, known)
    shown = ", ".join(f"{p.name}={arguments[p.name]!r}" for p in known if p.name in arguments)
    return Task(f"{call.name}({shown})" if shown else call.name, module, arguments)
