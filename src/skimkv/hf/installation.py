"""What `attach` and `Cache` change on a model, and how it is undone.

No modelling file is copied, and nothing is patched at import. The functions of attention_interface.py are registered
with transformers, the model's configuration names them, a hook looks at every forward of its decoder, and three methods
of this model object are replaced: generate(), and those in which generate() makes its cache and its logits processors.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.cache_utils import Cache as LibraryCache

from .. import ops
from ..methods.base import Method
from .attention_interface import LIBRARY_ATTENTION, attention, mask
from .compile import CompiledForward, is_of_graph, set_forward
from .decode_step import replace_modules, restore_modules
from .positions import Positions, positions_of
from .supported import decoder_of, model_layers
from .token_loop import loop_for

lock = threading.RLock()  # over what is attached to any model, and which generate() calls run
FAST = "_skimkv_fast"  # the attribute of a model that was loaded to keep its own layers
ADVICE = "attach is for one user of a model at a time: give each request its own skimkv.Cache(model, method)"


class Installation:
    """What was changed on a model: its attribute `_skimkv`.

    library_attention: the names of the model's attention functions before, by part of the configuration. attached: what
    generate() decodes with when it gets no cache. lasts: a Cache was made while nothing was attached, so all this stays
    until `detach`. running: of each call of generate(), its thread, and what was attached unless it got a cache. fast:
    whether the model uses our layers while nothing is attached. replaced: the parts that have them now.
    """

    def __init__(self, library_attention: dict[str, str], positions: Positions) -> None:
        self.library_attention, self.positions = library_attention, positions
        self.attached: Attached | None = None
        self.lasts = self.fast = False
        self.replaced: list[nn.Module] = []
        self.running: list[tuple[int, Attached | None]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Installation:
        """A copy of the model decodes with the same method, until `detach`."""
        twin = Installation(dict(self.library_attention), self.positions)
        twin.attached, twin.lasts = copy.deepcopy(self.attached, memo), True
        twin.fast, twin.replaced = self.fast, copy.deepcopy(self.replaced, memo)
        return twin

    def __reduce__(self) -> Any:
        """Raise TypeError: what is changed on a model belongs to this process."""
        raise TypeError("a model that skimkv is attached to cannot be pickled: detach(model) first, and attach again")

    def all_attached(self) -> Iterator[Attached]:
        """What is attached, and what leaving it will put back, the latest first."""
        attached = self.attached
        while attached is not None:
            yield attached
            attached = attached.before

    def refuse_other_threads(self, action: str) -> None:
        """Raise RuntimeError if another thread runs generate() on this model, or has a `with attach(...)` open."""
        own = threading.get_ident()
        if any(thread != own for thread, _ in self.running):
            raise RuntimeError(f"cannot {action} while generate() runs in another thread; {ADVICE}")
        if any(attached.thread not in (None, own) for attached in self.all_attached()):
            raise RuntimeError(f"cannot {action} while another thread is inside `with attach(...)`; {ADVICE}")

    def update(self, model: PreTrainedModel) -> None:
        """Make the model decode with what is attached now; undo all if nobody needs our functions."""
        if self.attached is None and not self.lasts and not self.running:
            uninstall(model)
            return
        set_forward(model, self.attached.forward if self.attached else None)
        self.use_layers(model, self.attached.fast if self.attached else self.fast)
        if hasattr(model, "_prepare_cache_for_generation"):
            before = model.__dict__.get("generate")
            replaced = before.replaced if isinstance(before, _Generate) else before
            model.__dict__["generate"] = _Generate(model, self.attached, replaced)

    def begin_forward(self, cache: Any, tokens: Tensor | None, positions: Tensor | None) -> None:
        """Before a forward of the decoder with these tokens: tell a cache of ours their positions, or warn of others.

        tokens, positions: (B,n,...) and (B,n), as a model's forward takes them. Raises ValueError where the positions
        go past a table of the model.
        """
        begin_forward = getattr(cache, "begin_forward", None)
        if begin_forward is None:
            if self.attached is not None:
                self.attached.warn_of(cache)
        elif tokens is not None:
            begin_forward(positions, tokens.shape[1])
            self.positions.check_table(cache.get_seq_length() + tokens.shape[1], positions)

    def use_layers(self, model: PreTrainedModel, fast: bool) -> None:
        """Let the model compute with our layers on a CPU, or with its own but for those that `load` gave it."""
        if not fast:
            restore_modules(self.replaced)
            self.replaced = []
        elif not self.replaced and model.device.type == "cpu":
            self.replaced = replace_modules(model)


class Attached:
    """The result of `attach`. As a context manager it puts back what stood on the model before.

    make_cache: makes the cache of a call of generate(), to which begin_generation gives its layers. fast: whether the
    model computes with our layers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method,
        forward: CompiledForward | None,
        before: Attached | None,
        make_cache: Callable[[], Any],
        fast: bool,
    ) -> None:
        self.model, self.method, self.forward, self.fast = model, method, forward, fast
        self.before, self.make_cache = before, make_cache
        self.thread: int | None = None  # the thread that is inside `with`
        self.has_warned = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Attached:
        model, forward = copy.deepcopy((self.model, self.forward), memo)
        return Attached(model, self.method, forward, None, self.make_cache, self.fast)

    def __enter__(self) -> Attached:
        """Raises RuntimeError if this is not what is attached now, or if another thread uses the model."""
        with lock:
            installation: Installation | None = self.model.__dict__.get("_skimkv")
            if installation is None or installation.attached is not self:
                raise RuntimeError(
                    f"attach(model, {self.method}) was left or detached, or another attach(...) came after it; {ADVICE}"
                )
            installation.refuse_other_threads(f"enter attach(model, {self.method})")
            self.thread = threading.get_ident()
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        """Put back what stood on the model before, whatever was attached since.

        Raises RuntimeError, unless an exception is on its way, if another `with` inside this one is still open, or if a
        generate() that started inside still runs. It keeps its method.
        """
        with lock:
            self.thread = None
            installation: Installation | None = self.model.__dict__.get("_skimkv")
            attached = list(installation.all_attached()) if installation is not None else []
            if installation is None or self not in attached:
                return  # detached, or an outer one was left
            inside = attached[: attached.index(self)]
            still_open = [other for other in inside if other.thread is not None]
            runs = any(own in (self, *inside) for _, own in installation.running)
            installation.attached = self.before
            installation.update(self.model)
        if kind is None and still_open:
            raise RuntimeError(
                f"attach(model, {self.method}) was left before attach(model, {still_open[0].method}) inside it; "
                f"{ADVICE}"
            )
        if kind is None and runs:
            raise RuntimeError(
                f"attach(model, {self.method}) was left while a generate() that started inside runs; {ADVICE}"
            )

    def warn_of(self, cache: Any) -> None:
        """Warn, once, that a forward with this cache of the library, or with none, does not use the method."""
        if not self.has_warned:
            self.has_warned = True
            what = "no cache" if cache is None else f"a {type(cache).__name__}"
            warnings.warn(
                f"{self.method} is attached, but {type(self.model).__name__} was called with {what}: its own dense "
                "attention computes this. The method decodes in generate() without past_key_values, and where "
                "past_key_values is a skimkv.Cache(model, method)",
                stacklevel=2,
            )


def wants_fast(model: PreTrainedModel, fast: bool | None) -> bool:
    """Whether a model shall compute with our layers: as somebody says, else as `load` was told, else yes."""
    return bool(model.__dict__.get(FAST, True)) if fast is None else fast


def install(model: PreTrainedModel) -> Installation:
    """Make the changes to a model, unless they are made.

    Raises ValueError, and leaves the model as it was, if the model is not supported.
    """
    name = type(model).__name__
    installation: Installation | None = model.__dict__.get("_skimkv")
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
        raise ValueError(f"{name} is not supported: its attention function cannot be replaced")
    installation = model.__dict__["_skimkv"] = Installation(before, positions_of(model))
    decoder = decoder_of(model)
    parameters = [*inspect.signature(type(decoder).forward).parameters][1:]
    decoder.register_forward_pre_hook(partial(_before_forward, installation, parameters), with_kwargs=True)
    if hasattr(model, "_prepare_cache_for_generation"):
        model.__dict__["_prepare_cache_for_generation"] = MethodType(_prepare_cache, model)
        model.__dict__["_get_logits_processor"] = MethodType(_logits_processors, model)
    return installation


def uninstall(model: PreTrainedModel) -> None:
    """Undo all changes."""
    installation: Installation = model.__dict__.pop("_skimkv")
    installation.attached = None
    installation.use_layers(model, fast=False)
    model.__dict__.pop("_prepare_cache_for_generation", None)
    model.__dict__.pop("_get_logits_processor", None)
    ours = model.__dict__.pop("generate", None)
    if isinstance(ours, _Generate) and ours.replaced is not None:
        model.__dict__["generate"] = ours.replaced
    set_forward(model, None)
    decoder = decoder_of(model)
    hooks: Any = decoder._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if getattr(hook, "func", None) is _before_forward]:
        for table in (hooks, decoder._forward_pre_hooks_with_kwargs):
            table.pop(key, None)
    model.set_attn_implementation(installation.library_attention)


def _before_forward(
    installation: Installation, parameters: list[str], decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Before a forward of the decoder: tell a cache of ours the tokens' positions, or warn that none is used.

    Raises ValueError where the tokens' positions go past a table of the model.
    """
    arguments = {**dict(zip(parameters, args, strict=False)), **kwargs}
    cache = next((value for value in arguments.values() if isinstance(value, LibraryCache)), None)
    ids = arguments.get("input_ids")
    begun = cache, arguments.get("inputs_embeds") if ids is None else ids, arguments.get("position_ids")
    if not torch.compiler.is_compiling():
        installation.begin_forward(*begun)
    elif not is_of_graph(cache):  # for those CompiledForward has done it
        torch.compiler.disable(installation.begin_forward)(*begun)


class _Generate:
    """In the place of a model's generate(): it notes that it runs, and gives it its cache.

    attached: what was attached when this was looked up. `Thread(target=model.generate)` keeps it, and may begin when
    that was left: then it would decode with another method, and is refused.
    replaced: what somebody else had put in the place of the class's generate(), if anything.
    """

    def __init__(self, model: Any, attached: Attached | None, replaced: Any) -> None:
        self.model, self.attached, self.replaced = model, attached, replaced
        functools.update_wrapper(self, type(model).generate)
        self.__wrapped__ = replaced or MethodType(type(model).generate, model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with lock:
            installation: Installation | None = self.model.__dict__.get("_skimkv")
            if self.attached is not None and (installation is None or self.attached not in installation.all_attached()):
                raise RuntimeError(f"attach(model, {self.attached.method}) was left before generate() began; {ADVICE}")
            gets_cache = kwargs.get("past_key_values") is not None
            attached = None if gets_cache or installation is None else installation.attached
            run = threading.get_ident(), attached
            if installation is not None:
                installation.running.append(run)
        try:
            if attached is not None:
                kwargs["past_key_values"] = attached.make_cache()
            is_ours = self.replaced is None and hasattr(kwargs.get("past_key_values"), "begin_generation")
            if is_ours and len(args) < 2 and (loop := loop_for(self.model, kwargs)) is not None:
                kwargs["custom_generate"] = loop
            return self.__wrapped__(*args, **kwargs)
        finally:
            with lock:
                if installation is not None:
                    installation.running.remove(run)
                    if installation.attached is None and self.model.__dict__.get("_skimkv") is installation:
                        installation.update(self.model)


def _prepare_cache(
    model: Any, config: Any, model_kwargs: dict[str, Any], mode: Any, batch_size: int, longest: int
) -> None:
    """In the place of the method in which generate() makes its cache, which is for texts of `longest` tokens."""
    installation: Installation = model._skimkv
    cache: Any = model_kwargs.get("past_key_values")
    if cache is None and installation.attached is not None:  # the class's generate() was called, and not the model's
        cache = model_kwargs["past_key_values"] = installation.attached.make_cache()
    begin_generation = getattr(cache, "begin_generation", None)
    is_given = begin_generation is None or bool(cache.layers)
    if begin_generation is not None:
        begin_generation(model, config, model_kwargs, mode, longest)
    if is_given:  # which the library notes
        type(model)._prepare_cache_for_generation(model, config, model_kwargs, mode, batch_size, longest)


def _logits_processors(model: Any, *args: Any, **kwargs: Any) -> Any:
    """In the place of the method in which generate() makes its logits processors.

    The one of classifier-free guidance decodes a second text, without the prompt: it gets a cache of its own.
    """
    processors = type(model)._get_logits_processor(model, *args, **kwargs)
    empty_twin: Any = getattr((kwargs.get("model_kwargs") or {}).get("past_key_values"), "empty_twin", None)
    for processor in processors if empty_twin is not None else ():
        if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
            processor.unconditional_context["past_key_values"] = empty_twin(model)
    return processors


def install_for_cache(model: PreTrainedModel, fast: bool | None) -> None:
    """Make the changes to a model that a Cache needs, which stay until `detach`. fast: as of `Cache`."""
    with lock:
        installation = install(model)
        if installation.attached is None:
            installation.lasts, installation.fast = True, wants_fast(model, fast)
            installation.update(model)
