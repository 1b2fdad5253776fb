"""Which models, and which layers of them, a method can serve."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

# Families that take an attention function and do more than it sees; found by running every causal family there is.
OWN_ATTENTION = {"diffllama", "doge", "jetmoe"}


def layers(model: PreTrainedModel) -> list[tuple[Any, bool]]:
    """The library's cache layers of this model, and which of them a method serves.

    Raises ValueError, one line, for what would be answered wrongly.
    """
    config = model.config.get_text_config(decoder=True)
    who, parts = type(model).__name__, list[Any](model.modules())
    if model.config.is_encoder_decoder:
        raise ValueError(f"{who} cannot be served: it is an encoder-decoder")
    for part in parts:
        ours = isinstance(part, PreTrainedModel) and part.config.get_text_config(decoder=True) is config
        if ours and not (part._supports_attention_backend and part._can_set_attn_implementation()):
            raise ValueError(f"{who} cannot be served: it does not take another attention function")
    if config.model_type in OWN_ATTENTION:
        raise ValueError(f"{who} cannot be served: it changes keys, values or mask between cache and attention")
    if getattr(config, "kv_lora_rank", None) or getattr(config, "v_head_dim", None):
        raise ValueError(f"{who} cannot be served: its keys and values differ in size (multi-head latent attention)")
    try:
        own = DynamicCache(config=config).layers
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{who} cannot be served: layers of an unknown kind ({error})") from None
    if len(own) != config.num_hidden_layers:
        raise ValueError(f"{who} cannot be served: its layers share their keys and values")
    for layer in own:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ValueError(f"{who} cannot be served: it has layers of kind {type(layer).__name__}")
    served = [type(layer) is DynamicLayer for layer in own]
    for part in parts:
        index = getattr(part, "layer_idx", None)
        if not isinstance(index, int) or not served[index]:
            continue
        if getattr(part, "is_causal", True) is False:
            raise ValueError(f"{who} cannot be served: layer {index} is not causal")
        if any("sink" in name for name, _ in part.named_parameters()):
            raise ValueError(f"{who} cannot be served: layer {index} has attention sinks")
    return list(zip(own, served, strict=True))
