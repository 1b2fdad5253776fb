"""Which models, and which of their layers, a method can decode."""

from __future__ import annotations

import warnings
import weakref
from typing import Any, NamedTuple

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

# Families whose attention layers change keys, values or mask where an attention function cannot see it.
HIDDEN_ATTENTION = {"diffllama", "doge", "jetmoe"}


class ModelLayer(NamedTuple):
    """One attention layer of a model: the cache that transformers would give it, and whether a method can decode it.

    window: how many tokens a sliding layer sees, the current one included; None: all.
    """

    library_cache: Any
    supported: bool
    window: int | None = None


def max_positions(model: PreTrainedModel) -> int | None:
    """How many positions the model was made for; None if its configuration does not say."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def model_layers(model: PreTrainedModel, max_tokens: int | None = None) -> list[ModelLayer]:
    """The attention layers of a model, in order, and which of them a method can decode.

    These are the layers of full attention, and the sliding ones that see all of max_tokens tokens (None: as many as the
    model has positions).

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
    longest = max_positions(model) if max_tokens is None else max_tokens
    layers = [_layer(cache, longest) for cache in caches]
    if getattr(config, "attention_chunk_size", None) is not None:  # the library's cache is the same, the mask is not
        layers = [layer._replace(supported=layer.window is None) for layer in layers]
    for module in modules:
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or index >= len(layers) or not layers[index].supported:
            continue  # assisted decoding with assistant_early_exit leaves the last layers out for a while
        if getattr(module, "is_causal", True) is False:
            raise ValueError(f"{name} is not supported: layer {index} is not causal")
        if any("sink" in parameter for parameter, _ in module.named_parameters()):
            if layers[index].window is not None:
                layers[index] = layers[index]._replace(supported=False)
                continue
            raise ValueError(f"{name} is not supported: layer {index} has attention sinks")
    return layers


def _layer(cache: Any, longest: int | None) -> ModelLayer:
    if type(cache) is DynamicLayer:
        return ModelLayer(cache, True)
    return ModelLayer(cache, longest is not None and longest <= cache.sliding_window, cache.sliding_window)


def supported_layers(model: PreTrainedModel, max_tokens: int | None = None) -> list[ModelLayer]:
    """The result of `model_layers`; warns, once for each model, if a method can decode only some of its layers.

    Raises ValueError if the model is not supported, or if a method can decode none of its layers.
    """
    layers, name = model_layers(model, max_tokens), type(model).__name__
    supported = sum(layer.supported for layer in layers)
    window = max((layer.window for layer in layers if layer.window is not None), default=0)
    if not supported:
        raise ValueError(
            f"{name} has no layer of full attention that a method could decode: its {len(layers)} layers see only the "
            f"last {window} tokens, which is enough for skimkv.Cache(model, method, max_tokens={window})"
        )
    if supported < len(layers) and model not in _warned:
        _warned.add(model)
        warnings.warn(
            f"{name}: the method decodes {supported} of {len(layers)} layers; the others see only the last {window} "
            "tokens and keep the library's cache",
            stacklevel=3,
        )
    return layers


def needed_max_tokens(model: PreTrainedModel, n_tokens: int) -> int | None:
    """What a cache for n_tokens is made with: n_tokens if its method could decode no layer otherwise, else None.

    In a model that mixes layers of full and of sliding attention the method then decodes the same layers at any length.
    """
    return None if any(layer.supported for layer in model_layers(model)) else n_tokens


_warned: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()  # models whose layers `supported_layers` has told about
