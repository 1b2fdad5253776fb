"""Tasks, one file each: what the model reads, what it is asked, and which answers are right.

A task is a module of two functions:
    examples(*, data, seed, ...) -> iterator of Example; how many are taken from it changes none of them. Where sizes
        are in tokens it has an argument `count_tokens`, a function that tells how many tokens a text has.
    score(output, example) -> float; larger is better, or smaller where the module says LOWER; UNIT says of what, and
        GREATEST which one is the greatest that is possible; else it is 1
and, where they are needed, of two more:
    prompt(example) -> (context, question), of which the prompt is made; else it is the example's own
    greatest_score(...) -> GREATEST with the arguments of `examples`, where it depends on these
A module whose examples are documents (Example.tokens) says DOCUMENTS; then `output` are the divergences from dense
attention.
The spec of a task is its name with the arguments of `examples`: `lines`, `lines(lines=200)`. A suite is several tasks
under one name, which takes the arguments of each: `ruler(length=8192)`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ... import spec
from . import ruler
from .base import Example

__all__ = ["SUITES", "TASKS", "Example", "Suite", "Task", "parse", "parse_suite"]

# Tasks whose examples need no data.
MADE_UP = ("record", "passkey", "lines", "conversation", *ruler.WITHOUT_DATA)
TASKS = (
    "record", "passkey", "lines", "conversation", "needle", "repetition", "bpc", "kl", "squad", "triviaqa", "summarise",
    *ruler.RECIPES,
)  # fmt: skip
SUITES = {ruler.SUITE: tuple(ruler.RECIPES)}


class Task(NamedTuple):
    """A task with the arguments of its examples; `spec` names both.

    recipe: further arguments, which the name of the task stands for.
    """

    spec: str
    module: ModuleType
    arguments: dict[str, Any]
    recipe: dict[str, Any] = {}  # noqa: RUF012 (a NamedTuple's default, which nobody changes)

    def examples(
        self, data: Path | None, seed: int, count_tokens: Callable[[str], int] | None = None
    ) -> Iterator[Example]:
        """The task's examples, from a folder or file of data, else from the Hub where the task needs any.

        count_tokens: how many tokens a text has, for tasks whose sizes are in tokens. Without it four characters count
        as a token, which is enough to find mistakes in arguments and data.
        """
        options = {**self.recipe, **self.arguments}
        if "count_tokens" in inspect.signature(self.module.examples).parameters:
            options["count_tokens"] = count_tokens or (lambda text: len(text) // 4)
        examples: Iterator[Example] = self.module.examples(data=data, seed=seed, **options)
        return examples

    def prompt(self, example: Example) -> tuple[str, str]:
        """The context and the question of an example; their concatenation is the prompt."""
        made: tuple[str, str] = getattr(self.module, "prompt", lambda own: (own.context, own.question))(example)
        return made

    @property
    def is_made_up(self) -> bool:
        """Whether its examples need no data."""
        return self.spec.partition("(")[0] in MADE_UP

    @property
    def sizes(self) -> str:
        """The arguments that the task takes, with their defaults."""
        return ", ".join(f"{p.name}={p.default!r}" for p in _parameters(self.spec.partition("(")[0], self.module))

    @property
    def unit(self) -> str:
        """What a score counts."""
        return getattr(self.module, "UNIT", "share right")

    @property
    def greatest(self) -> float:
        """The greatest score that is possible; the least is 0."""
        if hasattr(self.module, "greatest_score"):
            return float(self.module.greatest_score(**self.arguments))
        return getattr(self.module, "GREATEST", 1.0)

    @property
    def is_of_documents(self) -> bool:
        """Whether its examples are documents, whose distributions are compared with dense attention's."""
        return getattr(self.module, "DOCUMENTS", False)

    @property
    def lower(self) -> bool:
        """Whether a smaller score is the better one."""
        return getattr(self.module, "LOWER", False)


class Suite(NamedTuple):
    """Several tasks under one name, whose scores are averaged; `spec` names it with the arguments of each task."""

    spec: str
    tasks: list[Task]


def _parameters(name: str, module: ModuleType) -> list[inspect.Parameter]:
    """The arguments of a task's examples that its spec can give; a recipe fixes all but the length."""
    parameters = inspect.signature(module.examples).parameters.values()
    fixed = {"data", "seed", "count_tokens"}
    if name in ruler.RECIPES:
        return [p for p in parameters if p.name == "length"]
    return [p for p in parameters if p.name not in fixed]


def parse(text: str) -> Task:
    """Make a task from its spec. Raises ValueError, in one line, that names what is wrong with it."""
    call = spec.parse_call(text, "task", "lines(lines=100)")
    if call.name in SUITES:
        raise ValueError(f"{call.name} is a suite of {len(SUITES[call.name])} tasks; here one task is needed")
    if call.name not in TASKS:
        raise ValueError(f"unknown task {call.name!r}{spec.suggest(call.name, (*TASKS, *SUITES))}")
    name, recipe = ruler.RECIPES.get(call.name, (call.name, {}))
    module = importlib.import_module(f".{name}", __name__)
    known = [
        spec.Parameter(p.name, keyword_only=True, takes_text="str" in str(p.annotation))
        for p in _parameters(call.name, module)
    ]
    arguments = spec.bind(call, known)
    shown = ", ".join(f"{p.name}={arguments[p.name]!r}" for p in known if p.name in arguments)
    return Task(f"{call.name}({shown})" if shown else call.name, module, arguments, recipe)


def parse_suite(text: str) -> Suite | None:
    """Make a suite from its spec, as in `ruler(length=8192, leave_out=('qa_2',))`; None if it does not name one.

    leave_out: the names of tasks that are not run. Raises ValueError, in one line, that names what is wrong with it.
    """
    call = spec.parse_call(text, "task", "lines(lines=100)")
    if call.name not in SUITES:
        return None
    names = SUITES[call.name]
    known = [
        spec.Parameter("length", keyword_only=True),
        spec.Parameter("leave_out", keyword_only=True, takes_text=True),
    ]
    arguments = spec.bind(call, known)
    left_out = arguments.pop("leave_out", ())
    left_out = (left_out,) if isinstance(left_out, str) else left_out
    if not isinstance(left_out, (tuple, list)) or any(name not in names for name in left_out):
        raise ValueError(f"{call.name}: leave_out = {left_out!r} must be names of its tasks: {', '.join(names)}")
    kept = [name for name in names if name not in left_out]
    if not kept:
        raise ValueError(f"{call.name}: leave_out = {left_out!r} leaves no task")
    given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    tasks = [parse(f"{name}({given})" if given else name) for name in kept]
    shown = ", ".join(filter(None, (given, f"leave_out={tuple(left_out)!r}" if left_out else "")))
    return Suite(f"{call.name}({shown})" if shown else call.name, tasks)
