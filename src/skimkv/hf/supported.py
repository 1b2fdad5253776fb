"""Which models, and which of their layers, a method can decode."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

# Families whose attention layers change keys, values or mask where an attention function cannot see it.
HIDDEN_ATTENTION = {"diffllama", "doge", "jetmoe"}


class ModelLayer(NamedTuple):
    """One attention layer of a model: the cache that transformers would give it, and whether a method can decode it."""

    library_cache: Any
    supported: bool


def model_layers(model: PreTrainedModel) -> list[ModelLayer]:
    """The attention layers of a model, in order. Layers of full attention are supported, sliding ones are not.

    Raises ValueError, in one line, if the model as a whole is not supported: its answers would be wrong.
    """
    config = model.config.get_text_config(decoder=True)
    name, modules = type(model).__name__, list[Any](model.modules())
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is not supported: it is an encoder-decoder")
    for module in modules:
        is_decoder = isinstance(module, PreTrainedModel) and module.config.get_text_config(decoder=True) is config
        if is_decoder and not (module._supports_attention_backend and module._can_set_attn_implementation()):
            raise ValueError(f"{name} is not supported: it does not take another attention function")
    if config.model_type in HIDDEN_ATTENTION:
        raise ValueError(f"{name} is not supported: it changes keys, values or mask between cache and attention")
    if getattr(config, "kv_lora_rank", None) or getattr(config, "v_head_dim", None):
        raise ValueError(f"{name} is not supported: its keys and values differ in size (multi-head latent attention)")
    try:
        caches = DynamicCache(config=config).layers
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{name} is not supported: it has layers of an unknown kind ({error})") from None
    if len(caches) != config.num_hidden_layers:
        raise ValueError(f"{name} is not supported: its layers share their keys and values")
    for cache in caches:
        if type(cache) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ValueError(f"{name} is not supported: it has layers of kind {type(cache).__name__}")
    layers = [ModelLayer(cache, type(cache) is DynamicLayer) for cache in caches]
    for module in modules:
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or not layers[index].supported:
            continue
        if getattr(module, "is_causal", True) is False:
            raise ValueError(f"{name} is not supported: layer {index} is not causal")
        if any("sink" in parameter for parameter, _ in module.named_parameters()):
            raise ValueError(f"{name} is not supported: layer {index} has attention sinks")
    return layers
