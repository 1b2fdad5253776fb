"""What modules compute with besides their inputs: what stands for them is right while that stays the same."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import is_
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

_hooks_of_all = torch.nn.modules.module._global_forward_hooks
_hooks_before_all = torch.nn.modules.module._global_forward_pre_hooks
Read = tuple[Mapping[str, Any], str, Any]  # that this mapping holds this value by this name
CALLED = "forward", "__call__"  # what a call of a module enters


class Changes:
    """How often something was set in the modules of ours: `count` is another one after each time."""

    count = 0


class NotingDict(dict[str, Any]):
    """A dictionary of a module of ours, which counts what is set in it."""

    def __setitem__(self, name: str, value: Any) -> None:
        Changes.count += 1
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        Changes.count += 1
        super().__delitem__(name)


class NotesChanges(nn.Module):
    """A module of ours that counts what is set in it, so that nobody has to look at it in every step.

    Its tensors may be put elsewhere without its knowing: these are looked at.
    """

    def __init__(self) -> None:
        super().__init__()
        vars(self).update(_parameters=NotingDict(), _buffers=NotingDict())

    def __setattr__(self, name: str, value: Any) -> None:
        Changes.count += 1
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        Changes.count += 1
        super().__delattr__(name)


LIBRARIES = "torch", "transformers", "skimkv"


def is_of_libraries(one: object) -> bool:
    """Whether a class or a function is of PyTorch, transformers or skimkv.

    A trial with a few numbers says what such a module computes. One that somebody else wrote may do something else with
    others, or note its calls.
    """
    return one.__module__.partition(".")[0] in LIBRARIES


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether a hook wants to see one of the modules called."""
    if _hooks_of_all or _hooks_before_all:
        return True
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


class Watch:
    """All that some modules read: their tensors, parts, attributes and configuration, and the code of their classes.

    An attribute counts if the code of the module's class names it, in what a call of the module enters. It is looked at
    in every step, so everything that Python has to look up is kept here. caller: a module that calls these, and reads
    likewise; who wants to see it called does not matter.
    """

    def __init__(self, modules: Sequence[nn.Module], caller: nn.Module | None = None) -> None:
        self.modules = modules
        modules = [*modules, *([] if caller is None else [caller])]
        names = {kind: _names_and_functions(kind) for kind in map(type, modules)}
        by_class = [read for kind, of_kind in names.items() for read in _read_by_class(kind, *of_kind)]
        others = [module for module in modules if not isinstance(module, NotesChanges)]
        self._all, self._count = modules, Changes.count if len(others) < len(modules) else None
        self._modules, self._kinds = others, [type(module) for module in others]
        self._read = [*by_class, *(read for one in others for read in _read_by_module(one, names[type(one)][0]))]
        tensors = [
            (named, name, tensor)
            for module in modules
            for named in (module._parameters, module._buffers)
            for name, tensor in named.items()
        ]
        reads = [*self._read, *(read for read in tensors if type(read[0]) is not NotingDict)]
        self._in_classes = [read for read in reads if not isinstance(read[0], dict)]
        in_dicts = [read for read in reads if isinstance(read[0], dict)]
        self._dicts, self._names, self._values = zip(*in_dicts, strict=True)
        self._parts = [(module._modules, dict(module._modules)) for module in modules if module._modules]
        self._tensors = [tensor for *_, tensor in tensors if tensor is not None]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._are_contiguous = [tensor.is_contiguous() for tensor in self._tensors]
        self._hooks = [hooks for module in self.modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]

    def is_unchanged(self) -> bool:
        """Whether the modules read what they read before, and have their tensors where they were."""
        if self._count is not None and self._count != Changes.count:
            return False
        if not all(map(is_, map(dict.get, self._dicts, self._names), self._values)):
            return False
        for mapping, name, value in self._in_classes:
            if mapping.get(name) is not value:
                return False
        for now, before in self._parts:
            if now != before:
                return False
        if list(map(Tensor.is_contiguous, self._tensors)) != self._are_contiguous:  # one was transposed in place
            return False
        has_kinds = list(map(type, self._modules)) == self._kinds
        return has_kinds and list(map(Tensor.data_ptr, self._tensors)) == self._addresses

    def computes_as(self, other: Watch) -> bool:
        """Whether it is of the same modules as another one, and these read the same but for their tensors."""
        mine, theirs = self._read, other._read
        if self._all != other._all or self._kinds != other._kinds or len(mine) != len(theirs):
            return False
        return all(a[1] == b[1] and a[2] is b[2] for a, b in zip(mine, theirs, strict=True))

    def has_hooks(self) -> bool:
        """Whether a hook wants to see one of the modules called."""
        return any(self._hooks) or bool(_hooks_of_all or _hooks_before_all)


def _read_by_class(kind: type[nn.Module], names: set[str], functions: Sequence[FunctionType]) -> Iterator[Read]:
    """What the code of a class finds by name in the class, in its bases, and in its file."""
    bases = _bases(kind)
    for name in sorted({*CALLED, *(name for name in names if any(name in vars(base) for base in bases))}):
        for base in bases:
            yield vars(base), name, vars(base).get(name)
    for function in functions:
        for name in sorted(_names_in(function.__code__) & function.__globals__.keys()):
            yield function.__globals__, name, function.__globals__[name]


def _read_by_module(module: nn.Module, names: set[str]) -> Iterator[Read]:
    attributes = vars(module)
    for name in sorted({*names & attributes.keys() - {"_parameters"}, "forward"}):
        value = attributes.get(name)
        yield attributes, name, value
        if isinstance(value, PreTrainedConfig):
            for of_config in sorted(names & vars(value).keys()):
                yield vars(value), of_config, vars(value)[of_config]


def _names_and_functions(kind: type[nn.Module]) -> tuple[set[str], list[FunctionType]]:
    """All names in the functions that a call of a module of this class enters in its file, and these functions."""
    names, functions = {*CALLED}, _functions_of(kind, CALLED)
    for function in functions:  # grows
        new = _names_in(function.__code__)
        in_file = [value for name in new if isinstance(value := function.__globals__.get(name), FunctionType)]
        near = [one for value in in_file if (one := inspect.unwrap(value)).__globals__ is function.__globals__]
        functions += [one for one in [*near, *_functions_of(kind, new - names)] if one not in functions]
        names |= new
    return names, functions


def _functions_of(kind: type[nn.Module], names: Collection[str]) -> list[FunctionType]:
    """The functions that a class or one of its bases defines by these names."""
    found = [inspect.unwrap(vars(base)[name]) for base in _bases(kind) for name in names if name in vars(base)]
    return [one for one in found if isinstance(one, FunctionType)]


def _bases(kind: type[nn.Module]) -> Sequence[type]:
    """A class and its bases, before PyTorch's."""
    return kind.__mro__[: kind.__mro__.index(nn.Module)]


def _names_in(code: CodeType) -> set[str]:
    """All names in a function, and its strings that are names, as getattr() takes them."""
    parts = [part for part in code.co_consts if isinstance(part, CodeType)]
    strings = {part for part in code.co_consts if isinstance(part, str) and part.isidentifier()}
    return {*code.co_names, *strings}.union(*map(_names_in, parts))
