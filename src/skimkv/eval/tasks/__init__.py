"""Tasks, one file each: what is read, what is asked, what counts as right.

A task is a module of three functions:
    examples(*, data, seed, ...) -> iterator of Example; how many are taken from it changes none of them
    prompt(example) -> (context, question); their concatenation is the prompt
    score(output, example) -> float; better is larger, or smaller where the module says LOWER; of what it is, UNIT
Its spec is its name with the arguments of `examples`: `lines`, `lines(lines=200)`.
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


class Example(NamedTuple):
    """One question on one context, in raw form: prompt() makes the texts.

    The output is cut at `stop` (after some text), at `chars` characters and at `new` tokens, whichever is first;
    new = 0 is as many tokens as the first answer has. `given`: the first answer is not generated but fed, and
    score() gets its bits instead of an output. `at`: where it stands in a figure.
    """

    id: str
    context: str
    question: str
    answers: tuple[str, ...]
    new: int = 32
    stop: str = ""
    chars: int = 0
    given: bool = False
    at: tuple[float, ...] = ()


TASKS = ("record", "passkey", "lines", "needle", "repetition", "bpc", "squad", "triviaqa", "summarise")


class Task(NamedTuple):
    spec: str
    module: ModuleType
    arguments: dict[str, Any]

    def examples(self, data: Path | None, seed: int) -> Iterator[Example]:
        found: Iterator[Example] = self.module.examples(data=data, seed=seed, **self.arguments)
        return found

    @property
    def sizes(self) -> str:
        """What its examples can be told, with defaults."""
        own = [p for p in _parameters(self.module) if p.name not in ("data", "seed")]
        return ", ".join(f"{p.name}={p.default!r}" for p in own)

    @property
    def unit(self) -> str:
        return getattr(self.module, "UNIT", "share right")

    @property
    def lower(self) -> bool:
        return getattr(self.module, "LOWER", False)


def _parameters(module: ModuleType) -> list[inspect.Parameter]:
    return list(inspect.signature(module.examples).parameters.values())


def parse(spec: str) -> Task:
    """A task from its spec; literals only. Raises ValueError, one line, that names what is unknown."""
    try:
        node = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        raise ValueError(f"{spec!r} is no task; write for example lines or lines(lines=100)") from None
    call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
    if not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(f"{spec!r} is no task; write for example lines or lines(lines=100)")
    name = call.func.id
    if name not in TASKS:
        close = difflib.get_close_matches(name, TASKS, 1, 0.5)
        raise ValueError(
            f"unknown task {name!r}; " + (f"did you mean {close[0]}?" if close else f"known: {', '.join(TASKS)}")
        )
    module = importlib.import_module(f".{name}", __name__)
    known = [p.name for p in _parameters(module) if p.name not in ("data", "seed")]
    arguments: dict[str, Any] = {}
    for item in call.keywords:
        if item.arg not in known:
            raise ValueError(f"{name} has no argument {item.arg!r}; it has {', '.join(known) or 'none'}")
        try:
            arguments[item.arg] = ast.literal_eval(item.value)
        except ValueError:
            raise ValueError(f"{name}: {item.arg} = {ast.unparse(item.value)} is not a literal") from None
    shown = ", ".join(f"{key}={arguments[key]!r}" for key in known if key in arguments)
    return Task(f"{name}({shown})" if shown else name, module, arguments)


def whole(name: str, value: Any, low: int) -> None:
    """ValueError unless value is a whole number of at least low."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} = {value!r} must be a whole number of at least {low}")
