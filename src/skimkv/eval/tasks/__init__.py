"""Tasks, one file each: what the model reads, what it is asked, and which answers are right.

A task is a module of three functions:
    examples(*, data, seed, ...) -> iterator of Example; how many are taken from it changes none of them
    prompt(example) -> (context, question); their concatenation is the prompt
    score(output, example) -> float; larger is better, or smaller where the module says LOWER; UNIT says of what
The spec of a task is its name with the arguments of `examples`: `lines`, `lines(lines=200)`.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from .base import Example

__all__ = ["TASKS", "Example", "Task", "parse"]

TASKS = ("record", "passkey", "lines", "needle", "repetition", "bpc", "squad", "triviaqa", "summarise")


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
    def sizes(self) -> str:
        """The arguments that the task takes, with their defaults."""
        return ", ".join(f"{p.name}={p.default!r}" for p in _parameters(self.module))

    @property
    def unit(self) -> str:
        """What a score counts."""
        return getattr(self.module, "UNIT", "share right")

    @property
    def lower(self) -> bool:
        """Whether a smaller score is the better one."""
        return getattr(self.module, "LOWER", False)


def _parameters(module: ModuleType) -> list[inspect.Parameter]:
    """The arguments of a task's examples that its spec can give."""
    parameters = inspect.signature(module.examples).parameters.values()
    return [p for p in parameters if p.name not in ("data", "seed")]


def parse(spec: str) -> Task:
    """Make a task from its spec. Raises ValueError, in one line, that names what is wrong with it."""
    name, arguments = _parse_call(spec)
    if name not in TASKS:
        close = difflib.get_close_matches(name, TASKS, 1, 0.5)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(TASKS)}"
        raise ValueError(f"unknown task {name!r}; {hint}")
    module = importlib.import_module(f".{name}", __name__)
    known = [p.name for p in _parameters(module)]
    for argument in arguments:
        if argument not in known:
            raise ValueError(f"{name} has no argument {argument!r}; it has {', '.join(known) or 'none'}")
    shown = ", ".join(f"{key}={arguments[key]!r}" for key in known if key in arguments)
    return Task(f"{name}({shown})" if shown else name, module, arguments)


def _parse_call(spec: str) -> tuple[str, dict[str, Any]]:
    """Split "name(argument=literal, ...)" into the name and the arguments."""
    try:
        node = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        raise ValueError(f"{spec!r} is no task; write for example lines or lines(lines=100)") from None
    call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
    if not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(f"{spec!r} is no task; write for example lines or lines(lines=100)")
    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
        try:
            arguments[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except ValueError:
            value = ast.unparse(keyword.value)
            raise ValueError(f"{call.func.id}: {keyword.arg} = {value} is not a literal") from None
    return call.func.id, arguments
