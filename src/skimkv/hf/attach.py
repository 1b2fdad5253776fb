"""The transformers seam: attach a method to a model, or give generate() a cache that follows one.

No modelling file is copied and nothing is patched at import. How a layer is served: attention.py.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache as _Cache
from transformers.generation.configuration_utils import GenerationMode

from ..methods import parse
from ..methods.base import Method
from ..stores.base import Store
from .compile import Compiled, compiled, use
from .layer import BASES, AttentionLayer, Layer, attention, mask
from .load import load
from .supported import layers

__all__ = ["Attached", "Cache", "attach", "check_length", "detach", "load"]


class Cache(_Cache):
    """A cache for `generate(past_key_values=...)` or forward: `method` on every layer of full attention, the
    library's own cache on sliding ones. Sets the seam up on the model; detach(model) takes it down.

    nbytes: what is held. allocated: with room for growth. elements, bytes: traffic that the reference backend counted.
    Raises ValueError if the model cannot be served.
    """

    def __init__(self, model: PreTrainedModel, method: Method | str) -> None:
        self.method = parse(method)
        _install(model)
        super().__init__(layers=[Layer(self.method) if served else own for own, served in layers(model)])
        self.positions = _positions(model)
        self._open: AttentionLayer | None = None

    @property
    def _ours(self) -> list[AttentionLayer]:
        return [layer for layer in self.layers if isinstance(layer, AttentionLayer)]

    @property
    def stores(self) -> list[Store]:
        """The stores of the layers that the method serves, in the layers' order; none before the first block."""
        stores = (layer.store for layer in self.layers if isinstance(layer, Layer))
        return [store for store in stores if store is not None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self._open is not None and self._open.pending is not None:
            raise RuntimeError(
                "skimkv: a cached block never reached the attention function: the model was detached or interrupted, "
                "or changes its keys after caching them; make a new cache"
            )
        layer: Any = self.layers[layer_idx]
        if isinstance(layer, AttentionLayer):
            self._open = layer
            if key_states.shape[2] > 1:
                _check_positions(layer.seen + key_states.shape[2], self.positions)
        return layer.update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]

    def _begin(self, prompt: int | None, keep_recording: bool) -> None:
        """A new generate(): positions before `prompt` are read even where later ones of a block are verified."""
        for layer in self.layers:
            if isinstance(layer, Layer):
                layer.prompt = prompt
            if not keep_recording and hasattr(layer, "record_past"):
                layer.record_past = False

    def reset(self) -> None:
        self._open = None
        super().reset()  # type: ignore[no-untyped-call]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self._ours) + self._library_bytes()

    @property
    def allocated(self) -> int:
        return sum(layer.allocated for layer in self._ours) + self._library_bytes()

    def _library_bytes(self) -> int:
        own: list[Any] = [layer for layer in self.layers if not isinstance(layer, AttentionLayer)]
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in own if layer.is_initialized)

    @property
    def elements(self) -> int:
        return sum(store.elements for store in self.stores)

    @property
    def bytes(self) -> int:
        return sum(store.bytes for store in self.stores)


@dataclass
class _Seam:
    before: dict[str, Any]  # the attention implementations that detach puts back
    method: Method | None = None  # what generate() uses when it gets no cache


class Attached:
    """What attach returns; as a context manager it puts back what stood before."""

    def __init__(
        self, model: PreTrainedModel, method: Method, fresh: bool, before: tuple[Method | None, Compiled | None]
    ) -> None:
        self.model, self.method, self._fresh, self._before = model, method, fresh, before

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *exc: object) -> None:
        seam: _Seam | None = self.model.__dict__.get("_skimkv")
        if self._fresh:
            detach(self.model)
        elif seam is not None:
            seam.method = self._before[0]
            use(self.model, self._before[1])


def attach(model: PreTrainedModel, method: Method | str, compile: bool | str = False) -> Attached:
    """From now on `model.generate()` decodes with `method` wherever it is given no cache.

    compile: steps of one token run as one graph of torch.compile (a string: through that backend of it), which a GPU
    replays as a CUDA graph. Raises ValueError if the model cannot be served, or compiled; warns if none of its layers
    has full attention.
    """
    method = parse(method)
    fresh = "_skimkv" not in getattr(model, "__dict__", ())
    steps = compiled(model, "inductor" if compile is True else compile) if compile else None  # refuses
    seam = _install(model)
    if not any(served for _, served in layers(model)):
        warnings.warn(f"{type(model).__name__} has no full-attention layer: {method} serves none", stacklevel=2)
    before, seam.method = (seam.method, use(model, steps)), method
    return Attached(model, method, fresh, before)


def detach(model: PreTrainedModel) -> None:
    """Put the model's own attention back. Does nothing where nothing is attached."""
    seam: _Seam | None = model.__dict__.pop("_skimkv", None)
    if seam is not None:
        model.__dict__.pop("_prepare_cache_for_generation", None)
        use(model, None)
        model.set_attn_implementation(seam.before)


def check_length(model: PreTrainedModel, n_tokens: int) -> None:
    """ValueError if a prompt of n_tokens does not fit the model's positions."""
    _check_positions(n_tokens, _positions(model))


def _positions(model: PreTrainedModel) -> int | None:
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def _check_positions(n: int, positions: int | None) -> None:
    if positions is not None and n > positions:
        raise ValueError(f"a prompt of {n} tokens does not fit the model's {positions} positions")


def _install(model: PreTrainedModel) -> _Seam:
    """Point the model's config at our attention function, and wrap the one method of generate() that makes caches."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"{type(model).__name__} is not a transformers model")
    seam: _Seam | None = model.__dict__.get("_skimkv")
    if seam is not None:
        return seam
    layers(model)  # refuses
    for name, base in BASES.items():
        AttentionInterface.register(name, partial(attention, base))
        AttentionMaskInterface.register(name, partial(mask, base))
    config, text = model.config, model.config.get_text_config(decoder=True)
    before = {"": config._attn_implementation}
    for key in config.sub_configs:
        if own := getattr(getattr(config, key, None), "_attn_implementation", None):
            before[key] = own
    # sdpa would drop a cap on the logits, or sinks on sliding layers: those layers keep the eager attention
    sdpa = model._supports_sdpa and not getattr(text, "attn_logit_softcapping", None)
    name = "skimkv" if sdpa and text._attn_implementation != "eager" else "skimkv_eager"
    model.set_attn_implementation(
        {key: name if config is text or getattr(config, key, None) is text else own for key, own in before.items()}
    )
    if text._attn_implementation != name:
        raise ValueError(f"{type(model).__name__} cannot be served: its attention function cannot be exchanged")
    seam = model.__dict__["_skimkv"] = _Seam(before)
    if hasattr(model, "_prepare_cache_for_generation"):
        model.__dict__["_prepare_cache_for_generation"] = MethodType(_prepare, model)
    return seam


def _prepare(
    model: Any, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *args: Any, **kwargs: Any
) -> None:
    """generate() makes its cache here: insert ours where the caller gave none."""
    seam: _Seam = model._skimkv
    insert = seam.method is not None and model_kwargs.get("past_key_values") is None
    wanted = generation_config.use_cache, generation_config.cache_implementation
    if insert and (wanted[0] is False or wanted[1] not in (None, "dynamic")):
        raise ValueError(f"{seam.method} is attached: no use_cache={wanted[0]}, cache_implementation={wanted[1]!r}")
    type(model)._prepare_cache_for_generation(model, generation_config, model_kwargs, generation_mode, *args, **kwargs)
    if insert:
        assert seam.method is not None
        model_kwargs["past_key_values"] = Cache(model, seam.method)
        if generation_config.is_assistant:
            model_kwargs["past_key_values"].activate_past_recording()
    # generate() drops a mask of ones and leaves its length behind
    given = model_kwargs.get("attention_mask")
    prompt = getattr(generation_config, "_mask_length", None) if given is None else given.shape[1]
    if prompt is not None:
        check_length(model, prompt)
    if isinstance(cache := model_kwargs.get("past_key_values"), Cache):
        assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
        if assisted and (held := cache.get_seq_length()):
            # transformers feeds the whole text again then, after what the cache already holds of it
            raise ValueError(f"assisted decoding needs a new cache: this one holds {held} tokens")
        cache._begin(prompt if assisted else None, keep_recording=generation_config.is_assistant)
