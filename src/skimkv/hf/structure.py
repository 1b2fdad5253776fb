"""A model without its weights: its configuration is read, and its layers are made without memory for their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from .errors import as_value_error
from .load import check_counts, check_source


def empty_model(model: str) -> PreTrainedModel:
    """Make a model on PyTorch's device `meta`, where tensors have shapes and no contents.

    model: "builtin", a folder, a GGUF file, or a hub id. Raises ValueError, in one line, if its configuration cannot
    be read, or describes no causal model.
    """
    source = check_source(model)
    auto_config: Any = AutoConfig
    auto_model: Any = AutoModelForCausalLM
    if source.kind == "gguf":
        from .gguf_model import read_config

        with as_value_error(model):
            config = read_config(source.location)
    elif source.kind == "folder":
        check_counts(Path(source.location))
    with as_value_error(f"{model}: its configuration describes no causal model"), torch.device("meta"):
        if source.kind != "gguf":
            only_local = source.kind == "folder" or source.only_cached
            config = auto_config.from_pretrained(source.location, local_files_only=only_local)
        empty: PreTrainedModel = auto_model.from_config(config)
        return empty
