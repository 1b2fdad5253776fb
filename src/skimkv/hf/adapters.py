"""Models of PEFT: the transformers model inside, and which adapters work with a cache of ours. PEFT is not imported."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

# Adapters of PEFT that put keys and values of their own before the text.
PREFIX_ADAPTERS = ("PREFIX_TUNING", "CARTRIDGE")


def transformers_model(model: Any) -> PreTrainedModel:
    """The transformers model that `model` is, or that a model of PEFT is made of.

    Raises ValueError if it is neither.
    """
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel | peft.PeftMixedModel):
        inner = model.base_model
        model = inner if isinstance(inner, PreTrainedModel) else inner.model
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"{type(model).__name__} is not a transformers model; if it wraps one, give that one")
    return model


def check_adapter(model: Any, attention_mask: Tensor | None = None, seen: int = 0) -> None:
    """Check that the active adapter leaves our cache of `seen` tokens and a prompt with this mask (B,n) as they are.

    Raises ValueError if `model` is of PEFT and would put a cache of its own in the place of ours, or virtual tokens
    before padding, or if it would count them as tokens of a text that goes on. Any other model passes.
    """
    config = getattr(model, "active_peft_config", None)
    if config is None or not config.is_prompt_learning or model._adapters_disabled:
        return
    name, kind = type(model).__name__, config.peft_type.value
    if kind in PREFIX_ADAPTERS:
        raise ValueError(
            f"{name} is not supported while its active adapter is of type {kind}: PEFT puts a cache of its own, which "
            "begins with learned keys and values, in the place of skimkv's"
        )
    if attention_mask is not None and not attention_mask.all():
        raise ValueError(
            f"{name} with an adapter of type {kind} puts its virtual tokens before the padding, which is not "
            "supported: give prompts of one length, or one at a time"
        )
    if seen:
        raise ValueError(
            f"{name} with an adapter of type {kind} counts its virtual tokens as tokens of the text, so that it would "
            f"leave out tokens of the prompt: give a new cache, this one holds {seen} tokens"
        )
