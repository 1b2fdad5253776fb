"""A model with our layers in the place of its own, and how long the linear layers of either take alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import LlamaForCausalLM

from ..hf.decode_step import layers_operation, replace_modules
from ..hf.matrix_modules import of_linear
from .machine import Call

PLAIN, OURS = "linear layers of transformers", "linear layers of ours"  # what is timed beside tokens


def with_our_layers(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A twin of a model that has our layers over the same tensors."""
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    twin = copy.deepcopy(model, shared)
    for name, part in list(twin.named_modules()):
        if type(part) is torch.nn.Linear:
            twin.set_submodule(name, of_linear(part))
    replace_modules(twin)
    return twin


def linear_calls(model: LlamaForCausalLM, twin: LlamaForCausalLM) -> dict[str, Call]:
    """Products of one token with all linear layers, by PLAIN and OURS.

    PLAIN: those of the model, one after the other. OURS: all layers of its twin but attention as one operation, and the
    product after them.
    """
    linear: list[Any] = [part for part in model.modules() if hasattr(part, "in_features")]
    plain = [partial(part, _ones(model, part.in_features)) for part in linear]
    x = _ones(twin, twin.lm_head.in_features)
    operation = layers_operation(twin.model, x)
    assert operation is not None
    angles = _ones(twin, operation.D)
    ours = [partial(operation, x, angles, angles, None), partial(twin.lm_head, x)]
    return {PLAIN: partial(_call_all, plain), OURS: partial(_call_all, ours)}


def _ones(model: LlamaForCausalLM, size: int) -> torch.Tensor:
    return torch.ones(1, 1, size, dtype=model.dtype)


def _call_all(calls: Sequence[Call]) -> None:
    with torch.inference_mode():
        for call in calls:
            call()
