"""Compiled decoding: a step of one token runs as one graph, which a GPU replays as a CUDA graph.

Each layer's attention is one opaque operation of that graph, which finds its layer by number: neither lengths nor
caches are part of the graph, so it is compiled once for all methods and caches. A call that is no such step (a prompt,
a draft that is verified, a call that asks for hidden states or gradients) runs without the graph.
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
from ..ops import SoftmaxOptions, matrices
from ..ops.gpu import device
from ..stores.base import Store
from ..stores.full import Full
from .cuda_graph import Replay, capture, footing
from .errors import first_sentence
from .layer import MARK, Layer
from .matrix_modules import MatrixModule
from .positions import GivenPositions
from .supported import model_layers

# The arguments of a call that is a step; logits_to_keep changes nothing where there is one token.
STEP_ARGUMENTS = {
    "input_ids", "past_key_values", "attention_mask", "position_ids", "use_cache", "return_dict", "logits_to_keep",
    "cache_position",
}  # fmt: skip


class _Running(threading.local):
    """The layers of the step that this thread runs."""

    layers: Sequence[Layer] = ()


_running = _Running()


@torch.library.custom_op("skimkv::decode", mutates_args=())
def _decode(
    q: Tensor, k: Tensor, v: Tensor, index: int, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Decode one token in the layer of this number: q (B,H*G,1,D) · k, v (B,H,1,D) -> (B,1,H*G,D)."""
    B, H, _, D = k.shape
    layer = _running.layers[index]
    assert layer.store is not None
    layer.place(1, None)
    token = q[:, :, 0].reshape(B, H, -1, D), k[:, :, 0], v[:, :, 0]
    y = layer.method.decode(layer.store, *token, scale=scale, softcap=softcap, sinks=sinks)
    layer.seen += 1
    return y.reshape(B, 1, -1, D)


@_decode.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, index: int, scale: float, softcap: float | None, sinks: Tensor | None) -> Tensor:
    return q.new_empty(q.shape[0], 1, q.shape[1], q.shape[3])


class _GraphLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """What the graph contains of a layer: its number. `length`: tokens seen, as a tensor."""

    is_sliding = False

    def __init__(self, index: int, length: Tensor, window: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.index, self.length, self.window, self.is_initialized = index, length, window, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the layer holds no tensors of its own."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Mark the keys as this layer's and pass both on: (B,H,1,D) each."""
        setattr(key_states, MARK, self)
        return key_states, value_states

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, softmax: SoftmaxOptions) -> Tensor:
        """Attend by the operation that leaves the graph: q (B,Q,1,D) -> (B,1,Q,D)."""
        scale, softcap, sinks = softmax["scale"], softmax.get("softcap"), softmax.get("sinks")
        out: Tensor = _decode(q, k, v, self.index, scale, softcap, sinks)
        return out

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Refuse to be compiled with a mask. Raises RuntimeError."""
        raise RuntimeError("skimkv: the model makes a mask of its own kind, which cannot be compiled")

    def get_seq_length(self) -> int:
        """The tokens seen, as a tensor, so that the graph is not compiled anew for each number."""
        return self.length  # type: ignore[return-value]

    def get_max_length(self) -> int:
        """No length is the greatest: -1."""
        return -1


def is_of_graph(cache: Any) -> bool:
    """Whether this is the cache that stands in a CompiledForward's graph."""
    return cache is not None and len(cache.layers) > 0 and type(cache.layers[0]) is _GraphLayer


class CompiledForward:
    """Takes the place of a model's forward and runs steps of one token through the compiled graph.

    Raises ValueError if the model cannot be compiled.
    """

    def __init__(self, model: PreTrainedModel, backend: str) -> None:
        name = type(model).__name__
        if not isinstance(model, PreTrainedModel):
            raise ValueError(f"{name} is not a transformers model")
        backends = torch.compiler.list_backends(None)
        if backend not in backends:
            raise ValueError(f"compile = {backend!r} must be True or one of {', '.join(backends)}")
        layers = model_layers(model)
        if not all(layer.attends and not layer.has_states for layer in layers):
            raise ValueError(f"{name} cannot be compiled: not all of its layers are attention and nothing else")
        if not all(layer.supported for layer in layers):
            raise ValueError(f"{name} cannot be compiled: it has layers of sliding attention")
        if any(isinstance(part, MatrixModule) and part.kind != matrices.FLOATS for part in model.modules()):
            raise ValueError(f"{name} cannot be compiled: its weights are quantised")
        # what somebody else has put in the place of the class's forward, if anything
        self.replaced: Any = model.__dict__.get("forward")
        if isinstance(self.replaced, CompiledForward):
            self.replaced = self.replaced.replaced
        self.__wrapped__: Callable[..., Any] = self.replaced or MethodType(type(model).forward, model)
        self.parameters = [*inspect.signature(self.__wrapped__).parameters]
        if not model.can_generate() or "position_ids" not in self.parameters:
            raise ValueError(f"{name} cannot be compiled: it takes no position_ids, or has no generate()")
        self.windows, self.backend = [layer.window for layer in layers], backend
        self._build(model.device)

    def _build(self, device: torch.device) -> None:
        """Make the function that is compiled, and the tensors that all its steps share."""
        self.length = torch.zeros((), dtype=torch.int64, device=device)
        layers: list[Any] = [_GraphLayer(i, self.length, window) for i, window in enumerate(self.windows)]
        cache, inner = Cache(layers=layers), self.__wrapped__
        mask = torch.zeros(1, 1, 1, 1, device=device)  # one of four dimensions is passed on as it is, and not read

        def step(ids: Tensor, positions: Tensor) -> Tensor:
            """Return the logits of one step."""
            inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
            logits: Tensor = inner(**inputs, past_key_values=cache, use_cache=True).logits
            return logits

        step.__code__ = step.__code__.replace()  # its own: dynamo counts compilations per code object
        self.step: Callable[[Tensor, Tensor], Tensor] = torch.compile(step, fullgraph=True, backend=self.backend)
        self.replay: Replay | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledForward:
        twin = memo[id(self)] = copy.copy(self)
        twin.replaced, twin.__wrapped__ = copy.deepcopy((self.replaced, self.__wrapped__), memo)  # the copied model's
        twin._build(self.length.device)
        return twin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take a decode step by what was compiled, and everything else by the model's own forward."""
        arguments = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        cache: Any = arguments.get("past_key_values")
        ids, positions = arguments.get("input_ids"), arguments.get("position_ids")
        if ids is None or ids.shape[1] != 1 or torch.is_autocast_enabled(ids.device.type):
            return self.__wrapped__(*args, **kwargs)
        if not _is_step(cache, arguments):
            return self.__wrapped__(*args, **kwargs)
        if ids.device != self.length.device:
            self._build(ids.device)
        seen = cache.layers[0].seen
        cache.check_positions(seen, 1)
        if cache.positions is not None:
            cache.positions.check_table(seen + 1, positions)
        self.length.fill_(seen)
        if positions is None:
            positions = torch.full((1, 1), seen, device=ids.device)
        given = GivenPositions(positions, seen, 1)
        for layer in cache.layers:
            layer.given = given
        logits: Any = self._run(cache, ids, positions)
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)

    def _run(self, cache: Any, *inputs: Tensor) -> Tensor:
        """Run one token: as a replay where a captured graph still fits, else kernel by kernel."""
        replay = self.replay
        if replay is None or not replay.stands(cache, inputs):
            stores: list[Store] = [layer.store for layer in cache.layers]
            on_device = all(map(ops.graphable, stores)) and cache.method.has_kernel("gpu")  # a reference asks the host
            if not on_device or len({store.device for store in stores}) > 1:
                return self._plain(cache, inputs)
            for store in stores:
                device.prepare(store)
            if replay is None or replay.cache() is not cache or replay.footing != footing(stores, inputs):
                logits = self._plain(cache, inputs)
                # the next step can be captured: everything is compiled and allocated now
                self.replay = Replay(cache, footing(stores, inputs))
                return logits
        if replay.run is None:
            with torch.inference_mode(False):
                static = replay.inputs = tuple(x.clone() for x in inputs)
            try:
                replay.logits, replay.run = capture(lambda: self._plain(cache, static))
            except BaseException:
                # the host has counted a token that the device never decoded: the next forward must refuse this cache
                cache.layers[0].seen = -1
                raise
            replay.run()
        else:
            for static_input, x in zip(replay.inputs, inputs, strict=True):
                static_input.copy_(x)
            replay.run()
            replay.follow(cache)
        assert replay.logits is not None
        return replay.logits.clone()

    def _plain(self, cache: Any, inputs: tuple[Tensor, ...]) -> Tensor:
        before, _running.layers = _running.layers, cache.layers
        # a slice of a growing text has other strides at every step, which would be compiled anew
        inputs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x) for x in inputs)
        try:
            return self.step(*inputs)
        except Exception as error:
            from torch._dynamo.exc import TorchDynamoException  # too slow to be imported before it is needed

            if not isinstance(error, TorchDynamoException):
                raise
            reason = first_sentence(getattr(error, "inner_exception", error))
            raise ValueError(f"torch.compile with backend {self.backend!r} failed: {reason}") from error
        finally:
            _running.layers = before


def _is_step(cache: Any, arguments: dict[str, Any]) -> bool:
    """Whether a call with these arguments adds one token to a cache of ours and asks for nothing but logits."""
    if not isinstance(cache, Cache) or torch.is_grad_enabled():
        return False
    extra = {name for name, value in arguments.items() if value is not None and value is not False} - STEP_ARGUMENTS
    if extra or arguments.get("return_dict") is False:
        return False
    layers: list[Any] = cache.layers
    for layer in layers:
        if not isinstance(layer, Layer) or layer.store is None or layer.prefill_until is not None:
            return False
        if layer.pending is not None or layer.seen != layers[0].seen:
            return False
        if layer.prompt is not None or (layer.window is not None and layer.seen >= layer.window):
            return False
        if layer.record_past and not isinstance(layer.store, Full):
            return False
    mask = arguments.get("attention_mask")
    return mask is None or bool(mask.ndim == 2 and mask.shape[1] == layers[0].seen + 1)


def compiled_forward(model: Any, backend: str) -> CompiledForward:
    """The compiled forward of a model, made once: it is used for every method and cache.

    Raises ValueError if the model cannot be compiled.
    """
    by_backend = getattr(model, "__dict__", {}).get("_skimkv_compiled", {})
    forward: CompiledForward | None = by_backend.get(backend)
    current = model.__dict__.get("forward") if forward else None
    if isinstance(current, CompiledForward):
        current = current.replaced
    if forward is None or current is not forward.replaced:
        forward = CompiledForward(model, backend)
        model.__dict__["_skimkv_compiled"] = {**by_backend, backend: forward}
    return forward


def set_forward(model: Any, forward: CompiledForward | None) -> CompiledForward | None:
    """Run the model's steps through this compiled forward (None: through none), and return the one before."""
    before = model.__dict__.get("forward")
    if isinstance(before, CompiledForward):
        model.__dict__.pop("forward")
        if before.replaced is not None:
            model.__dict__["forward"] = before.replaced
    if forward is not None:
        model.__dict__["forward"] = forward
    return before if isinstance(before, CompiledForward) else None
