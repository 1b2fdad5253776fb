"""Which models, and which of their layers, a method can decode."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import (
    Cache as LibraryCache,
)
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

# Families whose attention layers change keys, values or mask where an attention function cannot see it.
HIDDEN_ATTENTION = {"diffllama", "doge", "jetmoe"}

CROSS_ATTENTION = ("encoder_attn", "crossattention", "cross_attn")  # what models call their attention to an encoder

# The library's kinds of layers of a cache that a model may have: those that attend, those that keep states besides
# or instead, and those without a cache.
KNOWN_CACHES = (
    DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer, LinearAttentionLayer,
    getattr(cache_utils, "DummyLayer", None),  # older versions have a LinearAttentionLayer that stays empty
)  # fmt: skip


class ModelLayer(NamedTuple):
    """One layer of a model: the cache that transformers would give it, and whether a method can decode it.

    window: how many tokens a sliding layer sees, the current one included; None: all, or it is no attention layer.
    is_chunked: whether a layer with a window sees the tokens of its own chunk of the text alone.
    """

    library_cache: Any
    supported: bool
    window: int | None = None
    is_chunked: bool = False

    @property
    def has_states(self) -> bool:
        """Whether the layer keeps states of linear attention, a state space or a convolution."""
        return isinstance(self.library_cache, LinearAttentionLayer)

    @property
    def slides(self) -> bool:
        """Whether the layer keeps the keys and values of a sliding window, and nothing else."""
        return type(self.library_cache) is DynamicSlidingWindowLayer and not self.is_chunked

    @property
    def attends(self) -> bool:
        """Whether the layer keeps keys and values."""
        return isinstance(self.library_cache, CacheLayerMixin)


def decoder_of(model: PreTrainedModel) -> torch.nn.Module:
    """The part of a model that has its layers, and is called with tokens, their positions and a cache."""
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    return decoder if isinstance(decoder, PreTrainedModel) else model.base_model  # some call their last layer so


def max_positions(model: PreTrainedModel) -> int | None:
    """How many positions the model was made for; None if its configuration does not say."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def model_layers(model: PreTrainedModel, max_tokens: int | None = None) -> list[ModelLayer]:
    """The layers of a model, in order, and which of them a method can decode.

    These are the layers of full attention, and the sliding ones that see all of max_tokens tokens (None: as many as the
    model has positions). A layer of linear attention, a state space or a convolution keeps the library's cache, and so
    does a layer that has no cache at all.

    Raises ValueError, in one line, if the model as a whole is not supported: its answers would be wrong.
    """
    config, name = model.config.get_text_config(decoder=True), type(model).__name__
    modules: dict[Any, str] = {module: path for path, module in model.named_modules()}
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is not supported: it is an encoder-decoder")
    for module in modules:
        is_decoder = isinstance(module, PreTrainedModel) and module.config is config
        if is_decoder and not module._can_set_attn_implementation():
            raise ValueError(f"{name} is not supported: it does not take another attention function")
    # In the model's order, not a set's, so that the same model always gets the same message.
    kinds: list[Any] = list(dict.fromkeys(type(module) for module in modules))
    for kind in kinds:
        if attends(kind) == "alone":
            raise ValueError(f"{name} is not supported: {kind.__name__} does not take another attention function")
        if own := own_cache(kind):
            raise ValueError(f"{name} is not supported: it takes no cache but a {own.__name__}")
        if attends(kind) == "with a bias":
            raise ValueError(f"{name} is not supported: {kind.__name__} adds a bias to its logits")
    if any(some for (some,) in _settings(config, "cross_attention_layers")):
        raise ValueError(f"{name} is not supported: some of its layers attend to an image")
    if config.model_type in HIDDEN_ATTENTION:
        raise ValueError(f"{name} is not supported: it changes keys, values or mask between cache and attention")
    if any(rank for (rank,) in _settings(config, "kv_lora_rank")):
        raise ValueError(
            f"{name} is not supported: it keeps one latent vector a token in the place of keys and values (multi-head "
            "latent attention)"
        )
    layers = _layers(model, max_tokens)
    if any(layer.supported for layer in layers) and not any(attends(kind) == "interface" for kind in kinds):
        raise ValueError(f"{name} is not supported: it does not take another attention function")
    if any(v is not None and v != k for v, k in _settings(config, "v_head_dim", "head_dim")):
        raise ValueError(f"{name} is not supported: its keys and values differ in size")
    # Each module's own parameters are listed only where one of them may be meant: that takes long.
    may_have_sinks = any("sink" in part for module, path in modules.items() for part in (path, *module._parameters))
    for module, path in modules.items():
        index = vars(module).get("layer_idx")
        if not isinstance(index, int) or index >= len(layers) or not layers[index].supported:
            continue  # assisted decoding with assistant_early_exit leaves the last layers out for a while
        if path.endswith(CROSS_ATTENTION):
            raise ValueError(f"{name} is not supported: layer {index} attends to an encoder as well")
        if getattr(module, "is_causal", True) is False:
            raise ValueError(f"{name} is not supported: layer {index} is not causal")
        if may_have_sinks and any(
            "sink" in parameter and parameter.rpartition(".")[2] != "sinks"
            for parameter, _ in module.named_parameters()
        ):
            raise ValueError(f"{name} is not supported: layer {index} has attention sinks of an unknown form")
    return layers


def _layers(model: PreTrainedModel, max_tokens: int | None) -> list[ModelLayer]:
    """What `model_layers` returns, by the configuration alone.

    Raises ValueError if that has layers of an unknown kind, or layers that share a cache.
    """
    config, name = model.config.get_text_config(decoder=True), type(model).__name__
    try:
        # a draft that leaves early has fewer layers than the configuration has kinds
        caches: list[Any] = DynamicCache(config=config).layers[: config.num_hidden_layers]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{name} is not supported: it has layers of an unknown kind ({error})") from None
    if len(caches) != config.num_hidden_layers or "reuse" in (getattr(config, "kv_sharing_modes", None) or ()):
        raise ValueError(f"{name} is not supported: its layers share their keys and values")
    for cache in caches:
        if type(cache) not in KNOWN_CACHES:
            raise ValueError(f"{name} is not supported: it has layers of kind {type(cache).__name__}")
    longest = max_positions(model) if max_tokens is None else max_tokens
    layers = [_layer(cache, longest) for cache in caches]
    if any(size for (size,) in _settings(config, "attention_chunk_size")):  # the same cache as sliding, another mask
        chunked = [layer.window is not None for layer in layers]
        layers = [
            layer._replace(supported=layer.supported and not is_chunked, is_chunked=is_chunked)
            for layer, is_chunked in zip(layers, chunked, strict=True)
        ]
    return layers


def _settings(config: Any, *names: str) -> list[list[Any]]:
    """The values that settings have, in one layer after another if layers differ in them; None where one has none."""
    try:
        return [[getattr(config, name, None) for name in names]]
    except RuntimeError:  # what the library raises if layers differ
        return [[getattr(layer, name, None) for name in names] for layer in config.per_layer_config]


@functools.cache
def attends(kind: type[Any]) -> str | None:
    """How the modules of a class attend; None: not at all.

    "interface": through the attention interface. "with a bias": so, with a bias of positions that is added to the
    logits. "alone": without it. transformers itself looks for the interface in a model's file, not in every class.
    """
    try:
        source = inspect.getsource(kind.forward)
    except (AttributeError, OSError, TypeError):
        return None
    if "get_interface(" in source:
        return "with a bias" if re.search(r"\bposition_bias=", source) else "interface"
    return "alone" if re.search(r"\.update\([^)]*layer_idx", source) else None


@functools.cache
def own_cache(kind: type[Any]) -> type[Any] | None:
    """The kind of cache that a model's file defines for its class alone; None if it takes those of the library."""
    if not issubclass(kind, PreTrainedModel) or kind.__module__ not in sys.modules:
        return None
    defined = vars(sys.modules[kind.__module__]).values()
    caches = (part for part in defined if isinstance(part, type) and issubclass(part, LibraryCache))
    return next((cache for cache in caches if cache.__module__ == kind.__module__), None)


def _layer(cache: Any, longest: int | None) -> ModelLayer:
    if isinstance(cache, DynamicSlidingWindowLayer):
        return ModelLayer(cache, longest is not None and longest <= cache.sliding_window, cache.sliding_window)
    return ModelLayer(cache, isinstance(cache, DynamicLayer))


def describe_layers(layers: Sequence[ModelLayer]) -> str:
    """Say in one line how many of a model's layers a method decodes, and what the others are."""
    decoded, total = sum(layer.supported for layer in layers), len(layers)
    if decoded == total:
        return f"the method decodes all {total} layers"
    what = other_layers(layers)
    if windows := sorted({layer.window for layer in layers if layer.window is not None and not layer.supported}):
        what[0] = f"see only the last {' or '.join(map(str, windows))} tokens"
    if not decoded:
        return f"the method decodes none of {total} layers; they {' or '.join(what)} and keep the library's cache"
    return (
        f"the method decodes {decoded} of {total} layers; the others {' or '.join(what)} and keep the library's cache"
    )


def other_layers(layers: Sequence[ModelLayer]) -> list[str]:
    """What the layers are that a method does not decode, as the ends of a sentence about them."""
    others = [layer for layer in layers if not layer.supported]
    kinds = {
        "see only the last tokens": any(layer.attends for layer in others),
        "are linear attention, a state space or a convolution": any(
            layer.has_states and not layer.attends for layer in others
        ),
        "look at no other token": any(not layer.attends and not layer.has_states for layer in others),
    }
    return [kind for kind, some in kinds.items() if some]


def supported_layers(model: PreTrainedModel, max_tokens: int | None = None) -> list[ModelLayer]:
    """The result of `model_layers`; warns, once for each model, if a method can decode only some of its layers.

    Raises ValueError if the model is not supported, or if a method can decode none of its layers.
    """
    layers, name = model_layers(model, max_tokens), type(model).__name__
    supported = sum(layer.supported for layer in layers)
    if not supported:
        window = max((layer.window for layer in layers if layer.window is not None), default=0)
        what = f"{name} has no layer of full attention that a method could decode"
        if not window:
            raise ValueError(what)
        raise ValueError(
            f"{what}: its {len(layers)} layers see only the last {window} tokens, which is enough for "
            f"skimkv.Cache(model, method, max_tokens={window})"
        )
    if supported < len(layers) and model not in _warned:
        _warned.add(model)
        warnings.warn(f"{name}: {describe_layers(layers)}", stacklevel=3)
    return layers


def needed_max_tokens(model: PreTrainedModel, n_tokens: int) -> int | None:
    """What a cache for n_tokens is made with: n_tokens if its method could decode no layer otherwise, else None.

    In a model that mixes layers of full and of sliding attention the method then decodes the same layers at any length.
    """
    try:
        layers = _layers(model, None)
    except ValueError:  # `model_layers` refuses the model, and may have a better reason
        return n_tokens
    return None if any(layer.supported for layer in layers) else n_tokens


_warned: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()  # models whose layers `supported_layers` has told about
