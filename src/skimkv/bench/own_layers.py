"""Our layers in the place of a model's own, and how long the linear layers of either take alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import LlamaForCausalLM

from ..hf.decode_modules import decode_modules
from ..hf.decode_step import StepForward, replace_forward, restore_forward, step_forward
from ..hf.matrix_modules import of_linear
from ..hf.norms import norms_of
from .machine import Call

PLAIN, OURS = "linear layers of transformers", "linear layers of ours"  # what is timed beside tokens


class OwnLayers:
    """The modules of a model in whose place ours can stand: its own, and ours with the same weights."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        linear = {n: part for n, part in model.named_modules() if hasattr(part, "in_features")}
        self.model = model
        self.ours: dict[str, Any] = decode_modules(model) | norms_of(model)
        self.plain: dict[str, Any] = {name: model.get_submodule(name) for name in self.ours} | linear
        self.ours |= {name: of_linear(part) if type(part) is torch.nn.Linear else part for name, part in linear.items()}

    def use(self, layers: Mapping[str, torch.nn.Module]) -> None:
        """Let the model have these layers, `plain` or `ours`, and with ours the forward that runs them at once."""
        for name, layer in layers.items():
            self.model.set_submodule(name, layer)
        if layers is self.ours:
            replace_forward(self.model)
        else:
            restore_forward(self.model)

    def calls(self) -> dict[str, Call]:
        """Products of one token with all linear layers, one after the other, by PLAIN and OURS."""
        return {PLAIN: partial(_call_all, self._products()), OURS: partial(_call_all, self._operations())}

    def _products(self) -> list[Call]:
        linear = [part for part in self.plain.values() if hasattr(part, "in_features")]
        return [partial(part, self._ones(part.in_features)) for part in linear]

    def _operations(self) -> list[Call]:
        """All layers but attention as one operation, and the product after them."""
        self.use(self.ours)
        forward = step_forward(self.model.model)
        assert forward is not None
        x = self._ones(self.model.lm_head.in_features)
        angles = self._ones(self.model.model.layers[0].self_attn.head_dim)
        return [partial(_call_operation, forward, x, angles), partial(self.model.lm_head, x)]

    def _ones(self, size: int) -> torch.Tensor:
        return torch.ones(1, 1, size, dtype=self.model.dtype)


def _call_operation(forward: StepForward, x: torch.Tensor, angles: torch.Tensor) -> None:
    operation = forward.operation(x)
    assert operation is not None
    operation(x, angles, angles, None)


def _call_all(calls: Sequence[Call]) -> None:
    with torch.inference_mode():
        for call in calls:
            call()
