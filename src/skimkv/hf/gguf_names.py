"""Which parameter of a model each tensor of a GGUF file is, and what llama.cpp's converter did to its numbers.

Both are transformers' own tables. That library undoes a conversion on dequantised numbers; here the same code runs on
the numbers of rows, so that matrices stay in their blocks and only the order of their rows is known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor


class Conversions(Protocol):
    """Names, and the way back from llama.cpp's numbers to transformers'."""

    def parameter(self, tensor: str) -> str | None:
        """The parameter that a tensor of the file is; None if the model has none of that name."""

    def values(self, tensor: str, values: Tensor) -> Tensor:
        """The numbers of a tensor as the model has them."""

    def row_order(self, tensor: str, rows: int) -> Tensor | None:
        """Return the file's row for each row of the model's matrix, (rows,) int64; None if it is the same row."""

    def input_order(self, tensor: str) -> Tensor | None:
        """Return the model's input that each column of the file's matrix multiplies, (in,) int64; None: the same."""


def conversions_of(architecture: str, config: PretrainedConfig, parameters: Mapping[str, Any]) -> Conversions:
    """What transformers knows of this architecture's files. parameters: those of the model, by name."""
    if architecture in GGUF_ARCHS:
        return _Mapping(architecture, config)
    return _Processor(architecture, config, parameters)


class _Processor:
    """Architectures with a tensor processor, and names by the package gguf's table."""

    def __init__(self, architecture: str, config: Any, parameters: Mapping[str, Any]) -> None:
        architecture = "llama" if architecture == "mistral" else architecture  # llama.cpp knows no other name
        settings = {name: getattr(config, name, None) for name in _SIZES}
        processors: dict[str, Any] = TENSOR_PROCESSORS
        self._processor: Any = processors.get(architecture, TensorProcessor)(config=settings)
        number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
        self._parameters: dict[str, str] = {}
        for full in parameters:
            name, dot, suffix = self._processor.preprocess_name(full).rpartition(".")
            if suffix not in ("weight", "bias"):
                name, dot, suffix = full, "", ""
            short = names.get_name(name)
            if short is None:
                self._processor.perform_fallback_tensor_mapping(self._parameters, dot + suffix, "", full)
            else:
                self._parameters[f"{short}.{suffix or 'weight'}"] = full

    def parameter(self, tensor: str) -> str | None:
        """Return the parameter that a tensor is; None if there is none of that name."""
        return self._parameters.get(tensor)

    def values(self, tensor: str, values: Tensor) -> Tensor:
        """Return a tensor's numbers as the model has them."""
        return torch.from_numpy(np.ascontiguousarray(self._process(tensor, values.numpy())))

    def row_order(self, tensor: str, rows: int) -> Tensor | None:
        """Return where the model's rows lie in the file, as `Conversions.row_order` says."""
        order = self._process(tensor, np.arange(rows)[:, None])
        # a processor that transposes does so for modules that keep their matrices the other way round
        return _unless_same(torch.from_numpy(order.reshape(-1).copy()))

    def input_order(self, tensor: str) -> Tensor | None:
        """Return which inputs the file's columns multiply, as `Conversions.input_order` says."""
        return None

    def _process(self, tensor: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        kept: dict[str, Any] = {"tensors": {}}
        result = self._processor.process(values, tensor, tensor_key_mapping={}, parsed_parameters=kept)
        weights: np.ndarray[Any, Any] = result.weights
        return weights


_SIZES = ("num_attention_heads", "num_key_value_heads", "hidden_size", "n_head")


class _Mapping:
    """Architectures for which transformers has a list of renamings and conversions."""

    def __init__(self, architecture: str, config: PretrainedConfig) -> None:
        steps: list[Any] = GGUF_ARCHS[architecture](config)
        self._renamings = [step for step in steps if isinstance(step, WeightRenaming)]
        self._converters = [step for step in steps if isinstance(step, WeightConverter)]
        self._operations = {pattern: step.operations for step in self._converters for pattern in step.source_patterns}

    def parameter(self, tensor: str) -> str | None:
        """Return the parameter that a tensor is; None if there is none of that name."""
        return self._find(tensor)[0]

    def values(self, tensor: str, values: Tensor) -> Tensor:
        """Return a tensor's numbers as the model has them."""
        for operation in self._find(tensor)[1]:
            (values,) = operation.convert({tensor: values}, [tensor], [tensor]).values()
        return values

    def row_order(self, tensor: str, rows: int) -> Tensor | None:
        """Return where the model's rows lie in the file, as `Conversions.row_order` says."""
        order = torch.arange(rows)[:, None]
        for operation in self._find(tensor)[1]:
            if not hasattr(operation, "input_permutation"):
                (order,) = operation.convert({tensor: order}, [tensor], [tensor]).values()
        return _unless_same(order.flatten())

    def input_order(self, tensor: str) -> Tensor | None:
        """Return which inputs the file's columns multiply, as `Conversions.input_order` says."""
        for operation in self._find(tensor)[1]:
            if hasattr(operation, "input_permutation"):
                return _unless_same(operation.input_permutation)
        return None

    def _find(self, tensor: str) -> tuple[str, list[Any]]:
        name, pattern = rename_source_key(tensor, self._renamings, self._converters)
        return name, [] if pattern is None else self._operations[pattern]


def _unless_same(order: Tensor) -> Tensor | None:
    return None if torch.equal(order, torch.arange(len(order))) else order


EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)")
