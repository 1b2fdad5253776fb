"""Attach a method to a transformers model, or give generate() a cache that decodes with one.

No modelling file is copied, and nothing is patched at import. The attention and mask functions of layer.py are
registered with transformers, the model's configuration names them, and one method of this model object is replaced:
the one in which generate() makes its cache. `detach` undoes both.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache as LibraryCache
from transformers.generation.configuration_utils import GenerationMode

from ..methods import parse
from ..methods.base import Method
from ..stores.base import Store, Workspace
from .compile import CompiledForward, compiled_forward, set_forward
from .layer import LIBRARY_ATTENTION, AttentionLayer, Layer, attention, mask
from .supported import model_layers

__all__ = ["Attached", "Cache", "attach", "check_length", "detach"]


class Cache(LibraryCache):
    """A key-value cache that decodes with `method`: give it to generate() or to forward as past_key_values.

    Layers of full attention use the method, sliding layers keep the library's own cache. Making a Cache sets the
    model up for it; `detach(model)` undoes that. A copy.deepcopy of a cache is independent of it.

    Raises ValueError if the model is not supported.
    """

    def __init__(self, model: PreTrainedModel, method: Method | str) -> None:
        self.method = parse(method)
        _install(model)
        workspace = Workspace()
        super().__init__(
            layers=[
                Layer(self.method, workspace) if layer.supported else layer.library_cache
                for layer in model_layers(model)
            ]
        )
        self.max_positions = _max_positions(model)
        self._updated: AttentionLayer | None = None  # the layer of the last update

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model with the new keys and values (B,H,n,D) of a layer; its attention call reads the result.

        Raises ValueError if the tokens do not fit the model's positions, RuntimeError if the attention function never
        received the block of the update before.
        """
        if self._updated is not None and self._updated.pending is not None:
            raise RuntimeError(
                "skimkv: a cached block never reached the attention function: the model was detached or interrupted, "
                "or changes its keys after caching them; make a new cache"
            )
        layer: Any = self.layers[layer_idx]
        if isinstance(layer, AttentionLayer):
            self._updated = layer
            if key_states.shape[2] > 1:
                _check_positions(layer.seen + key_states.shape[2], self.max_positions)
        return layer.update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]

    def _begin_generation(self, prefill_until: int | None, keep_recording: bool) -> None:
        """Prepare for a new call of generate(). prefill_until: as of Layer."""
        for layer in self.layers:
            if isinstance(layer, Layer):
                layer.prefill_until = prefill_until
            if not keep_recording and hasattr(layer, "record_past"):
                layer.record_past = False

    def reset(self) -> None:
        """Forget all tokens."""
        self._updated = None
        super().reset()  # type: ignore[no-untyped-call]

    @property
    def stores(self) -> list[Store]:
        """The stores of the layers that the method decodes, in the layers' order; none before the first block."""
        stores = (layer.store for layer in self.layers if isinstance(layer, Layer))
        return [store for store in stores if store is not None]

    @property
    def nbytes(self) -> int:
        """Bytes that the cached tokens occupy, on all layers."""
        return sum(layer.nbytes for layer in self._attention_layers) + self._library_bytes

    @property
    def allocated(self) -> int:
        """Bytes that are allocated on all layers, with room for growth."""
        return sum(layer.allocated for layer in self._attention_layers) + self._library_bytes

    @property
    def elements(self) -> int:
        """Scalars that the stores read and wrote so far, as the reference backend counts them."""
        return sum(store.elements for store in self.stores)

    @property
    def bytes(self) -> int:
        """Bytes that the stores read and wrote so far, as the reference backend counts them."""
        return sum(store.bytes for store in self.stores)

    @property
    def _attention_layers(self) -> list[AttentionLayer]:
        return [layer for layer in self.layers if isinstance(layer, AttentionLayer)]

    @property
    def _library_bytes(self) -> int:
        layers: list[Any] = [layer for layer in self.layers if not isinstance(layer, AttentionLayer)]
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers if layer.is_initialized)


@dataclass
class _Installation:
    """What was changed on a model, and what `detach` puts back. It is the model's attribute `_skimkv`."""

    library_attention: dict[str, str]  # the names of the attention functions before, by part of the configuration
    method: Method | None = None  # what generate() uses when it gets no cache


class Attached:
    """The result of `attach`. As a context manager it puts back what stood on the model before."""

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method,
        is_first: bool,
        before: tuple[Method | None, CompiledForward | None],
    ) -> None:
        self.model, self.method, self._is_first, self._before = model, method, is_first, before

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *exc: object) -> None:
        installation: _Installation | None = self.model.__dict__.get("_skimkv")
        if self._is_first:
            detach(self.model)
        elif installation is not None:
            installation.method = self._before[0]
            set_forward(self.model, self._before[1])


def attach(model: PreTrainedModel, method: Method | str, compile: bool | str = False) -> Attached:
    """From now on `model.generate()` decodes with `method` whenever it is called without a cache.

    compile: steps of one token run as one graph of torch.compile (a string: through that backend of it), which a GPU
    replays as a CUDA graph.

    Raises ValueError if the model is not supported or cannot be compiled, and warns if none of its layers has full
    attention: then the method has nothing to do.
    """
    method = parse(method)
    is_first = "_skimkv" not in getattr(model, "__dict__", ())
    forward = compiled_forward(model, "inductor" if compile is True else compile) if compile else None
    installation = _install(model)
    if not any(layer.supported for layer in model_layers(model)):
        warnings.warn(f"{type(model).__name__} has no full-attention layer: {method} changes nothing", stacklevel=2)
    before = installation.method, set_forward(model, forward)
    installation.method = method
    return Attached(model, method, is_first, before)


def detach(model: PreTrainedModel) -> None:
    """Put the model's own attention back. Does nothing if no method is attached."""
    installation: _Installation | None = model.__dict__.pop("_skimkv", None)
    if installation is not None:
        model.__dict__.pop("_prepare_cache_for_generation", None)
        set_forward(model, None)
        model.set_attn_implementation(installation.library_attention)


def check_length(model: PreTrainedModel, n_tokens: int) -> None:
    """Raises ValueError if a prompt of n_tokens does not fit the model's positions."""
    _check_positions(n_tokens, _max_positions(model))


def _max_positions(model: PreTrainedModel) -> int | None:
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def _check_positions(n_tokens: int, max_positions: int | None) -> None:
    if max_positions is not None and n_tokens > max_positions:
        raise ValueError(f"a prompt of {n_tokens} tokens does not fit the model's {max_positions} positions")


def _install(model: PreTrainedModel) -> _Installation:
    """Point the model's configuration at our functions, and replace the method of generate() that makes caches.

    Raises ValueError, and leaves the model as it was, if the model is not supported.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"{name} is not a transformers model")
    installation: _Installation | None = model.__dict__.get("_skimkv")
    if installation is not None:
        return installation
    model_layers(model)  # raises for a model that is not supported
    for ours, library_name in LIBRARY_ATTENTION.items():
        AttentionInterface.register(ours, partial(attention, library_name))
        AttentionMaskInterface.register(ours, partial(mask, library_name))
    config, text = model.config, model.config.get_text_config(decoder=True)
    before = {"": config._attn_implementation}
    for key in config.sub_configs:
        if implementation := getattr(getattr(config, key, None), "_attn_implementation", None):
            before[key] = implementation
    # sdpa would drop a cap on the logits, or sinks on sliding layers: those layers keep the eager attention
    sdpa = model._supports_sdpa and not getattr(text, "attn_logit_softcapping", None)
    ours = "skimkv" if sdpa and text._attn_implementation != "eager" else "skimkv_eager"
    after = {
        key: ours if config is text or getattr(config, key, None) is text else implementation
        for key, implementation in before.items()
    }
    model.set_attn_implementation(after)
    if text._attn_implementation != ours:
        model.set_attn_implementation(before)
        raise ValueError(f"{name} is not supported: its attention function cannot be exchanged")
    installation = model.__dict__["_skimkv"] = _Installation(before)
    if hasattr(model, "_prepare_cache_for_generation"):
        model.__dict__["_prepare_cache_for_generation"] = MethodType(_prepare_cache, model)
    return installation


def _prepare_cache(
    model: Any, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *args: Any, **kwargs: Any
) -> None:
    """In the place of the method in which generate() makes its cache: make ours where the caller gave none."""
    method: Method | None = model._skimkv.method
    is_ours = method is not None and model_kwargs.get("past_key_values") is None
    use_cache, implementation = generation_config.use_cache, generation_config.cache_implementation
    if is_ours and (use_cache is False or implementation not in (None, "dynamic")):
        raise ValueError(f"{method} is attached: no use_cache={use_cache}, cache_implementation={implementation!r}")
    type(model)._prepare_cache_for_generation(model, generation_config, model_kwargs, generation_mode, *args, **kwargs)
    if is_ours:
        assert method is not None
        model_kwargs["past_key_values"] = Cache(model, method)
        if generation_config.is_assistant:
            model_kwargs["past_key_values"].activate_past_recording()
    # generate() drops a mask of ones and leaves its length behind
    attention_mask = model_kwargs.get("attention_mask")
    prompt = getattr(generation_config, "_mask_length", None) if attention_mask is None else attention_mask.shape[1]
    if prompt is not None:
        check_length(model, prompt)
    if isinstance(cache := model_kwargs.get("past_key_values"), Cache):
        is_assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
        if is_assisted and (seen := cache.get_seq_length()):
            # transformers would feed the whole text again, after what the cache already holds of it
            raise ValueError(f"assisted decoding needs a new cache: this one holds {seen} tokens")
        # drafts are verified in blocks of several tokens, which must be decoded one by one
        cache._begin_generation(prompt if is_assisted else None, keep_recording=generation_config.is_assistant)
