"""Compiled decoding: a step of one token as one graph, on a GPU replayed as a CUDA graph.

Each layer's attention is one opaque operation in it, which finds its layer by number: neither lengths nor caches are
part of the graph, so it is compiled once. What is no such step (a prompt, a draft that is verified, a call that asks
for hidden states or gradients) runs as without.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from .. import ops
from ..ops.gpu import device
from ..stores.base import Store
from ..stores.full import Full
from .cuda_graph import Replay, capture, footing
from .layer import Layer
from .supported import layers
from .weights import Packed

# What a call may give besides and still be a step: of one token, logits_to_keep keeps all.
TAKEN = {"input_ids", "past_key_values", "attention_mask", "position_ids", "use_cache", "return_dict", "logits_to_keep"}
TAKEN |= {"cache_position"}


class _Now(threading.local):
    """The layers of the step that this thread runs."""

    layers: Sequence[Layer] = ()


_now = _Now()


@torch.library.custom_op("skimkv::decode", mutates_args=())
def _decode(q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float, softcap: float | None) -> Tensor:
    """q (B,Hq,1,D) · k, v (B,H,1,D) -> (B,1,Hq,D)."""
    B, H, _, D = k.shape
    found = _now.layers[layer]
    assert found.store is not None
    token = q[:, :, 0].reshape(B, H, -1, D), k[:, :, 0], v[:, :, 0]
    y = found.method.decode(found.store, *token, scale=scale, softcap=softcap)
    found.seen += 1
    return y.reshape(B, 1, -1, D)


@_decode.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float, softcap: float | None) -> Tensor:
    return q.new_empty(q.shape[0], 1, q.shape[1], q.shape[3])


class _Place(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """What the graph sees of a layer: its number. `length`: tokens seen, as a tensor."""

    is_sliding = False

    def __init__(self, index: int, length: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.index, self.length, self.is_initialized = index, length, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        key_states._skimkv = self  # type: ignore[attr-defined]
        return key_states, value_states

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float, softcap: float | None) -> Tensor:
        out: Tensor = _decode(q, k, v, self.index, scale, softcap)
        return out

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        raise RuntimeError("skimkv: the model makes a mask of its own kind: it cannot be compiled")

    def get_seq_length(self) -> int:
        return self.length  # type: ignore[return-value]

    def get_max_length(self) -> int:
        return -1


class Compiled:
    """In the place of a model's forward. Raises ValueError if the model cannot be compiled."""

    def __init__(self, model: PreTrainedModel, backend: str) -> None:
        if not isinstance(model, PreTrainedModel):
            raise ValueError(f"{type(model).__name__} is not a transformers model")
        who, names = type(model).__name__, torch.compiler.list_backends(None)
        if backend not in names:
            raise ValueError(f"compile = {backend!r} must be True or one of {', '.join(names)}")
        known = layers(model)
        if not all(served for _, served in known):
            raise ValueError(f"{who} cannot be compiled: it has layers of sliding attention")
        if any(isinstance(part, Packed) for part in model.modules()):
            raise ValueError(f"{who} cannot be compiled: its weights are 8 bits wide")
        self.held: Any = model.__dict__.get("forward")  # what someone else put on the model
        if isinstance(self.held, Compiled):
            self.held = self.held.held
        self.__wrapped__: Callable[..., Any] = self.held or MethodType(type(model).forward, model)
        if not model.can_generate() or "position_ids" not in inspect.signature(self.__wrapped__).parameters:
            raise ValueError(f"{who} cannot be compiled: it takes no position_ids, or has no generate()")
        self.names, self.count, self.backend = [*inspect.signature(self.__wrapped__).parameters], len(known), backend
        self._build(model.device)

    def _build(self, place: torch.device) -> None:
        """The function that is compiled, with the tensors in it that every step shares."""
        self.length, whole = torch.zeros((), dtype=torch.int64, device=place), torch.zeros(1, 1, 1, 1, device=place)
        cache, inner = Cache(layers=[_Place(i, self.length) for i in range(self.count)]), self.__wrapped__

        def step(ids: Tensor, positions: Tensor) -> Tensor:
            # a mask of four dimensions is passed on as it is; the attention function does not look at it
            given = {"input_ids": ids, "attention_mask": whole, "position_ids": positions}
            logits: Tensor = inner(**given, past_key_values=cache, use_cache=True).logits
            return logits

        step.__code__ = step.__code__.replace()  # its own: dynamo counts compilations per code object
        self.step: Callable[[Tensor, Tensor], Tensor] = torch.compile(step, fullgraph=True, backend=self.backend)
        self.replay: Replay | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        twin = memo[id(self)] = copy.copy(self)
        twin.held, twin.__wrapped__ = copy.deepcopy((self.held, self.__wrapped__), memo)  # of the model's copy
        twin._build(self.length.device)
        return twin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        cache: Any = given.get("past_key_values")
        ids, positions = given.get("input_ids"), given.get("position_ids")
        if ids is None or ids.shape[1] != 1 or not _decodes(cache, given):
            return self.__wrapped__(*args, **kwargs)
        if ids.device != self.length.device:
            self._build(ids.device)
        seen = cache.layers[0].seen
        self.length.fill_(seen)
        if positions is None:
            positions = torch.full((1, 1), seen, device=ids.device)
        logits: Any = self._run(cache, ids, positions)
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)

    def _run(self, cache: Any, *inputs: Tensor) -> Tensor:
        """One token, replayed where that is possible: from the second step on with the same footing."""
        held = self.replay
        if held is None or not held.stands(cache, inputs):
            stores: list[Store] = [layer.store for layer in cache.layers]
            if not all(map(ops.graphable, stores)) or len({store.device for store in stores}) > 1:
                return self._plain(cache, inputs)
            for store in stores:
                device.prepare(store)
            if held is None or held.cache() is not cache or held.footing != footing(stores, inputs):
                logits = self._plain(cache, inputs)
                self.replay = Replay(cache, footing(stores, inputs))  # as it is now that all is compiled and made
                return logits
        if held.run is None:
            with torch.inference_mode(False):
                static = held.inputs = tuple(x.clone() for x in inputs)
            try:
                held.logits, held.run = capture(lambda: self._plain(cache, static))
            except BaseException:
                cache.layers[0].seen = -1  # the host counts a token that the device has not: of no use any more
                raise
            held.run()
        else:
            for mine, x in zip(held.inputs, inputs, strict=True):
                mine.copy_(x)
            held.run()
            held.follow(cache)
        assert held.logits is not None
        return held.logits.clone()

    def _plain(self, cache: Any, inputs: tuple[Tensor, ...]) -> Tensor:
        before, _now.layers = _now.layers, cache.layers
        # a slice of a growing text has other strides at every step, which would be compiled anew
        inputs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x) for x in inputs)
        try:
            return self.step(*inputs)
        finally:
            _now.layers = before


def _decodes(cache: Any, given: dict[str, Any]) -> bool:
    """True for one more token after what a cache of ours holds, where nothing but logits is asked for."""
    if not isinstance(cache, Cache) or torch.is_grad_enabled():
        return False
    extra = {name for name, value in given.items() if value is not None and value is not False} - TAKEN
    if extra or given.get("return_dict") is False:
        return False
    held: list[Any] = cache.layers
    for layer in held:
        if not isinstance(layer, Layer) or layer.store is None or layer.prompt is not None:
            return False
        if layer.pending is not None or layer.seen != held[0].seen:
            return False
        if layer.record_past and not isinstance(layer.store, Full):
            return False
    mask = given.get("attention_mask")
    return mask is None or bool(mask.ndim == 2 and mask.shape[1] == held[0].seen + 1)


def compiled(model: Any, backend: str) -> Compiled:
    """The model's own, made once: what was compiled serves every method and cache. Raises ValueError as Compiled."""
    kept = getattr(model, "__dict__", {}).get("_skimkv_compiled", {})
    found: Compiled | None = kept.get(backend)
    on = model.__dict__.get("forward") if found else None
    if found is None or (on.held if isinstance(on, Compiled) else on) is not found.held:
        found = Compiled(model, backend)
        model.__dict__["_skimkv_compiled"] = {**kept, backend: found}
    return found


def use(model: Any, compiled: Compiled | None) -> Compiled | None:
    """Run the model's steps through this, or for None as without; returns what they ran through before."""
    before = model.__dict__.get("forward")
    if isinstance(before, Compiled):
        model.__dict__.pop("forward")
        if before.held is not None:
            model.__dict__["forward"] = before.held
    if compiled is not None:
        model.__dict__["forward"] = compiled
    return before if isinstance(before, Compiled) else None
