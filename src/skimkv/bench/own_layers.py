"""A model's twin for our methods, with our layers where it has others, and how long the linear layers take alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from ..hf.decode_step import layers_operation, replace_modules, step_forward
from ..hf.supported import decoder_of
from .machine import Call

Model = TypeVar("Model", bound=PreTrainedModel)
PLAIN, OURS = "linear layers of transformers", "linear layers of ours"  # what is timed beside tokens


def sharing_copy(model: Model) -> Model:
    """A copy of a model over the same tensors."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, shared)


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    """A twin of a model over the same tensors, with our layers where it has PyTorch's."""
    twin = sharing_copy(model)
    replace_modules(twin)
    return twin


def linear_calls(model: PreTrainedModel, twin: PreTrainedModel) -> dict[str, Call]:
    """Products of one token with all linear layers, by PLAIN and OURS.

    PLAIN: those of the model, one after the other. OURS: all layers of its twin but attention as one operation, and the
    product after them. Neither where no decode step of the twin takes its layers as one operation.
    """
    decoder: Any = decoder_of(twin)
    if step_forward(decoder) is None:
        return {}
    head: Any = twin.get_output_embeddings()  # type: ignore[no-untyped-call]
    x = _ones(twin, twin.config.get_text_config(decoder=True).hidden_size)
    operation = layers_operation(decoder, x)
    if operation is None:
        return {}
    parts = [*decoder_of(model).modules(), model.get_output_embeddings()]  # type: ignore[no-untyped-call]
    linear: list[Any] = [part for part in parts if hasattr(part, "in_features")]
    plain = [partial(part, _ones(model, part.in_features)) for part in linear]
    angles = torch.ones(operation.angles, 1, 1, operation.D, dtype=twin.dtype)
    ours = [partial(operation, x, angles, angles, None), partial(head, x)]
    return {PLAIN: partial(_call_all, plain), OURS: partial(_call_all, ours)}


def _ones(model: PreTrainedModel, size: int) -> torch.Tensor:
    return torch.ones(1, 1, size, dtype=model.dtype)


def _call_all(calls: Sequence[Call]) -> None:
    with torch.inference_mode():
        for call in calls:
            call()
