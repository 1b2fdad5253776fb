"""Several modules as one operation of the library, which is prepared once and runs as long as nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from .. import ops

Operation = TypeVar("Operation")
_hooks_of_all = torch.nn.modules.module._global_forward_hooks
_hooks_before_all = torch.nn.modules.module._global_forward_pre_hooks
MOST_TOKENS = 15  # more are a prompt, whose products are large enough to be called one by one


class JointOperation(Generic[Operation]):
    """Several layers as one operation, which is prepared once: while nothing changes, it only runs.

    prepare(x, layers): the operation for a few tokens of x's size and type, or None where the layers are called one by
    one. What a step looks at is kept here, as each attribute that Python looks up takes long after a model has read
    other weights.
    """

    def __init__(self, prepare: Callable[[Tensor, Sequence[nn.Module]], Operation | None]) -> None:
        self._prepare = prepare
        self._forget()

    def _forget(self) -> None:
        self._operation: Operation | None = None
        self._layers: Sequence[nn.Module] = ()
        self._inputs: tuple[Any, ...] = ()
        self._hooks: list[dict[int, Any]] = []
        self._attributes: list[dict[str, Any]] = []
        self._tensors: list[tuple[dict[str, Any], str, Tensor | None, int]] = []

    def operation(self, x: Tensor, layers: Sequence[nn.Module]) -> Operation | None:
        """The operation for x (...,in), or None. Layers with a hook, or a forward of their own, are called one by one.

        A gradient that is wanted, and a type that autocast chooses, are left to them, too.
        """
        size, numbers = x.shape[-1], x.numel()
        if not x.is_cpu or not numbers or numbers > MOST_TOKENS * size or torch.is_autocast_enabled("cpu"):
            return None
        wants_gradient = x.requires_grad and torch.is_grad_enabled()
        inputs = size, x.dtype, wants_gradient, ops.forced_backend.get()
        if inputs != self._inputs or layers != self._layers or not self._has_its_tensors():
            self._forget()
            if not wants_gradient:
                self._remember(inputs, layers)
                self._operation = self._prepare(x, layers)
        return None if self._is_seen() else self._operation

    def _remember(self, inputs: tuple[Any, ...], layers: Sequence[nn.Module]) -> None:
        self._inputs, self._layers = inputs, layers
        self._hooks = [hooks for layer in layers for hooks in (layer._forward_hooks, layer._forward_pre_hooks)]
        self._attributes = [layer.__dict__ for layer in layers]
        self._tensors = [
            (layer._parameters, name, tensor, 0 if tensor is None else tensor.data_ptr())
            for layer in layers
            for name, tensor in layer._parameters.items()
        ]

    def _has_its_tensors(self) -> bool:
        """Whether the layers have the tensors that they had, where they were."""
        for parameters, name, tensor, address in self._tensors:
            if parameters.get(name) is not tensor or (tensor is not None and tensor.data_ptr() != address):
                return False
        return True

    def _is_seen(self) -> bool:
        """Whether a hook, or a forward that took the place of a layer's, wants to see one of the layers called."""
        if any(self._hooks) or any("forward" in attributes for attributes in self._attributes):
            return True
        return bool(_hooks_of_all or _hooks_before_all)

    def __getstate__(self) -> dict[str, object]:
        """A copy is of other tensors: it is prepared anew."""
        return {"_prepare": self._prepare}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_prepare"])  # type: ignore[misc]
