"""Attach a method to a transformers model, or give generate() a cache that decodes with one.

No modelling file is copied, and nothing is patched at import. The functions of attention_interface.py are registered
with transformers, the model's configuration names them, and three methods of this model object are replaced:
generate(), and those in which generate() makes its cache and its logits processors. `detach` undoes all. A model of
PEFT is served through the transformers model inside it.

What is attached is a state of the model, so it is for one user of the model at a time: a thread that would change the
method of another one is refused. A `Cache` has its own method and belongs to its request.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.cache_utils import Cache as LibraryCache
from transformers.generation.configuration_utils import GenerationMode

from .. import ops
from ..methods import parse
from ..methods.base import Method, check_whole
from ..ops import SoftmaxOptions
from ..stores.base import Store, Workspace
from ..stores.rotation import KeyRotation
from .adapters import check_adapter, transformers_model
from .attention_interface import LIBRARY_ATTENTION, attention, left_padding, mask
from .cache_step import CacheStep, takes_steps
from .compile import CompiledForward, compiled_forward, set_forward
from .layer import AttentionLayer, Layer
from .positions import Positions, check_length, counts_in_cache, positions_of
from .rotary import key_rotations
from .states import LayerWithStates, is_state_layer, refuse_crop, repeated_rows, select_rows, state_tensors
from .supported import ModelLayer, model_layers, needed_max_tokens, supported_layers

__all__ = ["Attached", "Cache", "attach", "check_length", "detach"]


class Cache(LibraryCache):
    """A key-value cache that decodes with `method`: give it to generate() or to forward as past_key_values.

    model: of transformers, or of PEFT. Layers of full attention use the method, and so do sliding layers whose window
    covers max_tokens tokens, which the cache then cannot exceed (None: as many as the model has positions). Other
    sliding layers, and layers of linear attention, state spaces and convolutions, keep the library's own cache; a
    warning then says, once for a model, how many layers the method decodes. Making a Cache sets the model up for it;
    `detach(model)` undoes that, and so does leaving the `with attach(...)` in which it was made. A copy.deepcopy of a
    cache is independent of it.

    generate() reads a prompt exactly, also in chunks (prefill_chunk_size): what the method drops is dropped after the
    last chunk. Where a prompt is fed by hand, in several calls of forward, each call counts as a prompt: the method
    drops tokens after every one.

    Raises ValueError if the model is not supported, or if the method can decode none of its layers.
    """

    def __init__(self, model: torch.nn.Module, method: Method | str, max_tokens: int | None = None) -> None:
        check_adapter(model)
        method, model = parse(method), transformers_model(model)
        if max_tokens is not None:
            check_whole("max_tokens", max_tokens, 1)
        supported_layers(model, max_tokens)  # these raise before anything is changed
        _rotations(model, method)
        with _lock:
            installation = _install(model)
            installation.lasts |= not installation.stack
        self._build(model, method, max_tokens)

    def _build(self, model: PreTrainedModel, method: Method, max_tokens: int | None) -> None:
        self.method, self.max_tokens = method, max_tokens
        workspace = Workspace()
        super().__init__(
            layers=[_make_layer(layer, self.method, workspace) for layer in supported_layers(model, max_tokens)]
        )
        for layer, rotation in zip(self.layers, _rotations(model, method), strict=False):
            if isinstance(layer, Layer):
                layer.rotation = rotation
        self.positions: Positions | None = positions_of(model)  # None: going past them is somebody else's care
        self._updated: AttentionLayer | None = None  # the layer of the last update
        self._checked = 0  # the number of tokens whose positions were checked last

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model with the new keys and values (B,H,n,D) of a layer; its attention call reads the result.

        Warns, once for a model, past its positions. Raises ValueError if the tokens do not fit the layer's window or a
        learned table of positions, RuntimeError if the
        attention function never received the block of the update before.
        """
        if self._updated is not None and self._updated.pending is not None:
            raise RuntimeError(
                "skimkv: a cached block never reached the attention function: the model was detached or interrupted, "
                "or changes its keys after caching them; make a new cache"
            )
        layer: Any = self.layers[layer_idx]
        if getattr(layer, "attends", False):  # isinstance() of an abstract class takes several microseconds
            self._updated = layer
            n = layer.seen + key_states.shape[2]
            if layer.window is not None and n > layer.window:
                raise ValueError(
                    f"{n} tokens exceed this cache: layer {layer_idx} sees only the last {layer.window}, and is "
                    "decoded as a layer of full attention"
                )
            in_chunks = getattr(layer, "prompt_end", None) is not None  # of a prompt that is kept whole
            self._check_positions(layer.seen, key_states.shape[2], in_chunks)
        return layer.update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]

    def _check_positions(self, seen: int, more: int, in_chunks: bool = False) -> None:
        if self.positions is not None and seen + more != self._checked:
            used = seen + more if in_chunks else self.method.positions_used(seen) + more - 1
            self.positions.check(seen + more, used)
            self._checked = seen + more

    def begin_step(
        self, attention_mask: Tensor | None, rows: int, dtype: torch.dtype, softmax: Sequence[SoftmaxOptions]
    ) -> CacheStep | None:
        """Begin a decode step of all layers at once, with one token of this type in each of so many rows.

        attention_mask: (rows,tokens), as a model's forward takes it. softmax: the options of every layer's attention.
        None where the mask is wrong, or the layers need more of it than counts of padding. Warns and raises ValueError
        as `update` does.
        """
        seen, updated = self.get_seq_length(), self._updated
        if not seen or (updated is not None and updated.pending is not None) or len(self.layers) != len(softmax):
            return None
        if attention_mask is not None and attention_mask.shape[0] != rows:
            return None
        pads, error = left_padding(attention_mask, seen + 1, rows)
        if error or max(pads) > seen or not takes_steps(self.layers, any(pads)):
            return None
        self._check_positions(seen, 1)
        return CacheStep(self, [(dtype, options) for options in softmax], pads)

    def _begin_generation(self, prefill_until: int | None, prompt_end: int | None, keep_recording: bool) -> None:
        """Prepare for a new call of generate(). prefill_until, prompt_end: as of Layer."""
        layers: list[Any] = self.layers
        for layer in layers:
            if isinstance(layer, Layer):
                layer.prefill_until, layer.prompt_end = prefill_until, prompt_end
            if not keep_recording and is_state_layer(layer) and layer.record_past:
                layer.crop(0)  # to what the next token needs
            if not keep_recording and hasattr(layer, "record_past"):
                layer.record_past = False

    def reset(self) -> None:
        """Forget all tokens."""
        self._updated = None
        super().reset()  # type: ignore[no-untyped-call]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens.

        Raises ValueError if a layer cannot do that, and then forgets nothing.
        """
        layers: list[Any] = self.layers
        if not all(layer.is_croppable and layer.record_past for layer in layers if is_state_layer(layer)):
            refuse_crop(tokens_to_remove)
        for layer in layers:
            if not is_state_layer(layer) or layer.record_past:
                layer.crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row of the batch becomes `repeats` rows."""
        layers: list[Any] = self.layers
        for layer in layers:
            if not is_state_layer(layer):
                layer.batch_repeat_interleave(repeats)
            else:
                layer.reorder_cache(repeated_rows(layer, repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows of the batch with these numbers, or where this tensor of booleans is true."""
        indices = torch.as_tensor(indices)
        rows = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        for layer in self.layers:
            select_rows(layer, rows)

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
        """Of the layers that the method does not decode, and of states."""
        layers: list[Any] = [layer for layer in self.layers if not isinstance(layer, AttentionLayer)]
        rows = [tensor for layer in layers for tensor in (_tensor(layer, "keys"), _tensor(layer, "values"))]
        states = [state for layer in self.layers for state in state_tensors(layer)]
        return sum(tensor.nbytes for tensor in [*rows, *states] if tensor is not None)


def _tensor(layer: Any, name: str) -> Tensor | None:
    tensor: Tensor | None = getattr(layer, name, None)
    return tensor


def _rotations(model: PreTrainedModel, method: Method) -> Sequence[KeyRotation | None]:
    """How the layers of the model turn their keys, for a method that turns them to positions in its cache; else none.

    Raises ValueError, in one line, if it is not known how.
    """
    return key_rotations(model) if counts_in_cache(method) else ()


def _make_layer(layer: ModelLayer, method: Method, workspace: Workspace) -> Any:
    """The layer of a cache for a layer of the model."""
    if not layer.supported:
        return layer.library_cache
    if layer.has_states:
        return LayerWithStates(layer.library_cache.number_of_states, method, workspace, layer.window)
    return Layer(method, workspace, layer.window)


_lock = threading.RLock()  # over what is attached to any model, and which generate() calls run
ADVICE = "attach is for one user of a model at a time: give each request its own skimkv.Cache(model, method)"


@dataclass(eq=False)
class _RunningGenerate:
    """A call of generate() that runs. attached: what gave it its method, None if the caller gave it a cache."""

    method: Method | None
    attached: Attached | None
    thread: int = field(default_factory=threading.get_ident)


class _Installation:
    """What was changed on a model, and what `detach` puts back. It is the model's attribute `_skimkv`.

    library_attention: the names of the attention functions before, by part of the configuration. stack: what is
    attached, the latest last. base: method and compiled forward where nothing is attached: those of the model that
    this one is a copy of. lasts: a Cache was made while nothing was attached, so the attention functions stay until
    `detach`.
    """

    def __init__(self, library_attention: dict[str, str], method: Method | None = None, lasts: bool = False) -> None:
        self.library_attention, self.lasts = library_attention, lasts
        self.base: tuple[Method | None, CompiledForward | None] = method, None
        self.stack: list[Attached] = []
        self.running: list[_RunningGenerate] = []

    def __deepcopy__(self, memo: object) -> _Installation:
        return _Installation(dict(self.library_attention), self.method, lasts=True)

    @property
    def method(self) -> Method | None:
        """What generate() uses when it gets no cache."""
        return self.stack[-1].method if self.stack else self.base[0]

    def refuse_other_threads(self, action: str) -> None:
        """Raise RuntimeError if another thread runs generate() on this model, or has a `with attach(...)` open."""
        own = threading.get_ident()
        if any(run.thread != own for run in self.running):
            raise RuntimeError(f"cannot {action} while generate() runs in another thread; {ADVICE}")
        if any(attached.thread not in (None, own) for attached in self.stack):
            raise RuntimeError(f"cannot {action} while another thread is inside `with attach(...)`; {ADVICE}")

    def clean_up(self, model: PreTrainedModel) -> None:
        """Point the model at what is attached now; if that is nothing, and nobody needs our functions, undo it all."""
        if self.stack or self.base[0] is not None or self.lasts or self.running:
            set_forward(model, self.stack[-1].forward if self.stack else self.base[1])
            _replace_generate(model, self)
        else:
            _uninstall(model)


class Attached:
    """The result of `attach`. As a context manager it puts back what stood on the model before."""

    def __init__(self, model: PreTrainedModel, method: Method, forward: CompiledForward | None) -> None:
        self.model, self.method, self.forward = model, method, forward
        self.thread: int | None = None  # the thread that is inside `with`

    def __enter__(self) -> Attached:
        """Raises RuntimeError if something else was attached since, or if another thread uses the model."""
        with _lock:
            installation: _Installation | None = self.model.__dict__.get("_skimkv")
            if installation is None or self not in installation.stack:
                raise RuntimeError(f"attach(model, {self.method}) was left or detached: call attach again")
            installation.refuse_other_threads(f"enter attach(model, {self.method})")
            if (latest := installation.stack[-1]) is not self:
                raise RuntimeError(
                    f"attach(model, {latest.method}) came after attach(model, {self.method}), the one entered; {ADVICE}"
                )
            self.thread = threading.get_ident()
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        """Raises RuntimeError, unless an exception is on its way, if another `with` inside this one is still open, or
        if a generate() that started inside still runs. It keeps its method.
        """
        with _lock:
            self.thread = None
            installation: _Installation | None = self.model.__dict__.get("_skimkv")
            if installation is None or self not in installation.stack:
                return  # detached
            index = installation.stack.index(self)
            inside = [other for other in installation.stack[index + 1 :] if other.thread is not None]
            runs = any(run.attached in (self, *installation.stack[index + 1 :]) for run in installation.running)
            installation.stack[index:] = inside
            installation.clean_up(self.model)
        if kind is None and inside:
            raise RuntimeError(
                f"attach(model, {self.method}) was left before attach(model, {inside[-1].method}) inside it; {ADVICE}"
            )
        if kind is None and runs:
            raise RuntimeError(
                f"attach(model, {self.method}) was left while a generate() that started inside runs; {ADVICE}"
            )


def attach(model: torch.nn.Module, method: Method | str, compile: bool | str = False) -> Attached:
    """Make `model.generate()` decode with `method` whenever it is called without a cache.

    model: of transformers, or of PEFT.

    This is for one user of the model at a time. Inside one `with attach(...)` another may be opened, which holds until
    it is left. Requests that run at the same time take a `Cache` each.

    compile: steps of one token run as one graph of torch.compile (a string: through that backend of it), which a GPU
    replays as a CUDA graph.

    Raises ValueError if the model is not supported or cannot be compiled, or if the method can decode none of its
    layers. Where all of them slide, generate() raises it if the prompt and the new tokens exceed their window. Raises
    RuntimeError if another thread runs generate() on this model or is inside `with attach(...)`.
    """
    check_adapter(model)
    method, model = parse(method), transformers_model(model)
    with _lock:
        if (installation := model.__dict__.get("_skimkv")) is not None:
            installation.refuse_other_threads(f"attach {method}")
        supported_layers(model, needed_max_tokens(model, 1))  # these raise before anything is changed
        _rotations(model, method)
        forward = compiled_forward(model, "inductor" if compile is True else compile) if compile else None
        installation = _install(model)
        before = set_forward(model, forward)
        if not installation.stack:
            installation.base = installation.base[0], before
        installation.stack.append(attached := Attached(model, method, forward))
        _replace_generate(model, installation)
    return attached


def detach(model: torch.nn.Module) -> None:
    """Put the model's own attention back. Does nothing if no method is attached.

    Raises ValueError if the model is not of transformers or PEFT, and RuntimeError if another thread runs generate() on
    it or is inside `with attach(...)`.
    """
    model = transformers_model(model)
    with _lock:
        if (installation := model.__dict__.get("_skimkv")) is not None:
            installation.refuse_other_threads("detach")
            _uninstall(model)


def _uninstall(model: PreTrainedModel) -> None:
    installation: _Installation = model.__dict__.pop("_skimkv")
    installation.stack.clear()
    model.__dict__.pop("_prepare_cache_for_generation", None)
    model.__dict__.pop("_get_logits_processor", None)
    ours = model.__dict__.pop("generate", None)
    if isinstance(ours, _Generate) and ours.replaced is not None:
        model.__dict__["generate"] = ours.replaced
    set_forward(model, None)
    hooks: Any = (model._forward_pre_hooks, model._forward_pre_hooks_with_kwargs)
    for key in [key for key, hook in hooks[0].items() if hook is _check_table]:
        for table in hooks:
            table.pop(key, None)
    model.set_attn_implementation(installation.library_attention)


def _check_table(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a forward of a model that looks positions up in a table: refuse those that are not in it.

    Raises ValueError, in one line, where the table would raise IndexError, and a GPU would stop for good.
    """
    cache, ids = kwargs.get("past_key_values"), kwargs.get("input_ids", args[0] if args else None)
    ids = kwargs.get("inputs_embeds") if ids is None else ids
    if not isinstance(cache, Cache) or ids is None:
        return
    n, positions, table = cache.get_seq_length() + ids.shape[1], kwargs.get("position_ids"), positions_of(model)
    if table.table is not None and n > table.table and positions is not None:
        n = int(positions.max()) + 1  # without the padding
    table.check(n)


def _install(model: PreTrainedModel) -> _Installation:
    """Point the model's configuration at our functions, and replace the method of generate() that makes caches.

    Raises ValueError, and leaves the model as it was, if the model is not supported.
    """
    name = type(model).__name__
    installation: _Installation | None = model.__dict__.get("_skimkv")
    if installation is not None:
        return installation
    model_layers(model)  # raises for a model that is not supported
    ops.select_backend(model.device.type)  # raises for a SKIMKV variable that names what is not there
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
    if positions_of(model).table is not None:
        model.register_forward_pre_hook(_check_table, with_kwargs=True)
    if hasattr(model, "_prepare_cache_for_generation"):
        model.__dict__["_prepare_cache_for_generation"] = MethodType(_prepare_cache, model)
        model.__dict__["_get_logits_processor"] = MethodType(_logits_processors, model)
        _replace_generate(model, installation)
    return installation


def _replace_generate(model: PreTrainedModel, installation: _Installation) -> None:
    if hasattr(model, "_prepare_cache_for_generation"):
        before = model.__dict__.get("generate")
        replaced = before.replaced if isinstance(before, _Generate) else before
        model.__dict__["generate"] = _Generate(model, installation.stack[-1] if installation.stack else None, replaced)


class _Generate:
    """In the place of a model's generate(): it notes that it runs, and with which method.

    attached: what was attached when this was looked up. `Thread(target=model.generate)` keeps it, and may begin when
    that was left: then it would decode with another method, and is refused.
    replaced: what somebody else had put in the place of the class's generate(), if anything.
    """

    def __init__(self, model: Any, attached: Attached | None, replaced: Any) -> None:
        self.model, self.attached, self.replaced = model, attached, replaced
        functools.update_wrapper(self, type(model).generate)
        self.__wrapped__ = replaced or MethodType(type(model).generate, model)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Generate:
        return _Generate(copy.deepcopy(self.model, memo), None, copy.deepcopy(self.replaced, memo))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        gets_cache = kwargs.get("past_key_values") is not None
        with _lock:
            installation: _Installation | None = self.model.__dict__.get("_skimkv")
            if self.attached is not None and (installation is None or self.attached not in installation.stack):
                raise RuntimeError(f"attach(model, {self.attached.method}) was left before generate() began; {ADVICE}")
            if installation is not None:
                attached = installation.stack[-1] if installation.stack and not gets_cache else None
                installation.running.append(run := _RunningGenerate(installation.method, attached))
        try:
            return self.__wrapped__(*args, **kwargs)
        finally:
            if installation is not None:
                with _lock:
                    installation.running.remove(run)
                    if not installation.stack and self.model.__dict__.get("_skimkv") is installation:
                        installation.clean_up(self.model)


def _prepare_cache(
    model: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> None:
    """In the place of the method in which generate() makes its cache: make ours where the caller gave none."""
    installation: _Installation = model._skimkv
    own = [run.method for run in installation.running if run.thread == threading.get_ident()]
    method = own[-1] if own else installation.method
    is_ours = method is not None and model_kwargs.get("past_key_values") is None
    use_cache, implementation = generation_config.use_cache, generation_config.cache_implementation
    if is_ours and (use_cache is False or implementation not in (None, "dynamic")):
        raise ValueError(f"{method} is attached: no use_cache={use_cache}, cache_implementation={implementation!r}")
    given = model_kwargs.get("past_key_values")
    if isinstance(given, Cache) and use_cache is False:
        raise ValueError("use_cache=False: generate() cannot decode with a skimkv.Cache and without a cache")
    if (is_ours or isinstance(given, Cache)) and generation_config.output_attentions:
        raise ValueError("output_attentions=True is not supported: a method computes no matrix of attention weights")
    user = getattr(model.prepare_inputs_for_generation, "__self__", model)  # PEFT's generate() puts its own there
    if (is_ours or isinstance(given, Cache)) and user is not model:
        seen = given.get_seq_length() if isinstance(given, Cache) else 0
        check_adapter(user, model_kwargs.get("attention_mask"), seen)
    type(model)._prepare_cache_for_generation(
        model, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    )
    if is_ours:
        assert method is not None
        made: Any = Cache.__new__(Cache)
        # a draft that is looked up in the prompt may reach beyond the text's greatest length
        longest = max_cache_length + (generation_config.prompt_lookup_num_tokens or 0)
        made._build(model, method, needed_max_tokens(model, longest))
        model_kwargs["past_key_values"] = made
        if generation_config.is_assistant:
            made.activate_past_recording()
    # generate() drops a mask of ones and leaves its length behind
    attention_mask = model_kwargs.get("attention_mask")
    prompt = getattr(generation_config, "_mask_length", None) if attention_mask is None else attention_mask.shape[1]
    if isinstance(cache := model_kwargs.get("past_key_values"), Cache):
        is_assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
        prefill_until, seen = None, cache.get_seq_length()
        if prompt is not None and 0 < prompt <= seen:
            raise ValueError(
                f"the cache holds {seen} tokens and the prompt has {prompt}: give the whole text, which begins with "
                "what the cache holds, or a new cache"
            )
        if is_assisted and seen:
            # transformers would feed the whole text again, after what the cache already holds of it
            raise ValueError(f"assisted decoding needs a new cache: this one holds {seen} tokens")
        if is_assisted:  # drafts are verified in blocks of several tokens, which must be decoded one by one
            prefill_until = prompt
        elif generation_config.is_assistant and not seen and prompt is not None:
            prefill_until = prompt - 1  # a draft of one token that is rejected takes the prompt's last one with it
        cache._begin_generation(
            prefill_until=prefill_until,
            prompt_end=None if generation_config.prefill_chunk_size is None else prompt,
            keep_recording=generation_config.is_assistant,
        )


def _logits_processors(model: Any, *args: Any, **kwargs: Any) -> Any:
    """In the place of the method in which generate() makes its logits processors.

    The one of classifier-free guidance decodes a second text, without the prompt: it gets a cache of its own.
    """
    processors = type(model)._get_logits_processor(model, *args, **kwargs)
    cache = (kwargs.get("model_kwargs") or {}).get("past_key_values")
    if not isinstance(cache, Cache):
        return processors
    for processor in processors:
        if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
            second: Any = Cache.__new__(Cache)
            second._build(model, cache.method, cache.max_tokens)
            processor.unconditional_context["past_key_values"] = second
    return processors
