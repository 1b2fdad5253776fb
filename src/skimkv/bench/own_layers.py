"""Our layers in the place of a model's own, and how long the linear layers of either take alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import LlamaForCausalLM

from ..hf.decode_step import layers_operation, replace_modules, restore_modules
from ..hf.matrix_modules import of_linear
from .machine import Call

PLAIN, OURS = "linear layers of transformers", "linear layers of ours"  # what is timed beside tokens


class OwnLayers:
    """The linear layers of a model, its own, and ours with the same weights."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        self.plain: dict[str, Any] = {n: part for n, part in model.named_modules() if hasattr(part, "in_features")}
        self.ours: dict[str, Any] = {
            name: of_linear(part) if type(part) is torch.nn.Linear else part for name, part in self.plain.items()
        }

    def use(self, layers: Mapping[str, torch.nn.Module]) -> None:
        """Let the model have these layers, `plain` or `ours`, and with ours the functions that join several modules."""
        for name, layer in layers.items():
            self.model.set_submodule(name, layer)
        if layers is self.ours:
            replace_modules(self.model)
        else:
            restore_modules(self.model)

    def calls(self) -> dict[str, Call]:
        """Products of one token with all linear layers, one after the other, by PLAIN and OURS."""
        return {PLAIN: partial(_call_all, self._products()), OURS: partial(_call_all, self._operations())}

    def _products(self) -> list[Call]:
        return [partial(part, self._ones(part.in_features)) for part in self.plain.values()]

    def _operations(self) -> list[Call]:
        """All layers but attention as one operation, and the product after them."""
        self.use(self.ours)
        x = self._ones(self.model.lm_head.in_features)
        operation = layers_operation(self.model.model, x)
        assert operation is not None
        angles = self._ones(operation.D)
        return [partial(operation, x, angles, angles, None), partial(self.model.lm_head, x)]

    def _ones(self, size: int) -> torch.Tensor:
        return torch.ones(1, 1, size, dtype=self.model.dtype)


def _call_all(calls: Sequence[Call]) -> None:
    with torch.inference_mode():
        for call in calls:
            call()
