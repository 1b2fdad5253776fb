"""Attach a method to a transformers model, so that generate() decodes with it.

What is attached is a state of the model, so it is for one user of the model at a time: a thread that would change the
method of another one is refused. A `Cache` has its own method and belongs to its request. A model of PEFT is attached
to through the transformers model inside it.
"""

from __future__ import annotations

from functools import partial

import torch

from ..methods import parse
from ..methods.base import Method
from .adapters import check_adapter, transformers_model
from .cache import Cache, check_method
from .compile import compiled_forward
from .installation import Attached, install, lock, uninstall, wants_fast
from .supported import needed_max_tokens

__all__ = ["Attached", "attach", "detach"]


def attach(
    model: torch.nn.Module, method: Method | str, compile: bool | str = False, fast: bool | None = None
) -> Attached:
    """Make `model.generate()` decode with `method` whenever it is called without a cache.

    model: of transformers, or of PEFT. A call of the model itself, without a skimkv.Cache, still computes dense
    attention, and warns once that it does.

    This is for one user of the model at a time. Inside one `with attach(...)` another may be opened, which holds until
    it is left. Requests that run at the same time take a `Cache` each.

    compile: if True, a step of one token runs as one graph of torch.compile, which a GPU replays as a CUDA graph. A
    string is the name of the backend that torch.compile uses.
    fast: if True, the model computes on a CPU with skimkv's linear layers, normalisations and decode steps until
    `detach`. They read the model's own weights in place and are faster, but add numbers in another order. A compiled
    model keeps its own layers. None, the default, means True, unless the model comes from `load(..., fast=False)`.

    Raises ValueError if the model is not supported or cannot be compiled, or if the method can decode none of its
    layers. Where all of them slide, generate() raises it if the prompt and the new tokens exceed their window. Raises
    RuntimeError if another thread runs generate() on this model or is inside `with attach(...)`.
    """
    check_adapter(model)
    method, model = parse(method), transformers_model(model)
    with lock:
        if (installation := model.__dict__.get("_skimkv")) is not None:
            installation.refuse_other_threads(f"attach {method}")
        check_method(model, method, needed_max_tokens(model, 1))  # raises before anything is changed
        forward = compiled_forward(model, "inductor" if compile is True else compile) if compile else None
        installation = install(model)
        make_cache = partial(Cache.without_layers, method)
        is_fast = wants_fast(model, fast) and not compile
        attached = Attached(model, method, forward, installation.attached, make_cache, is_fast)
        installation.attached = attached
        installation.update(model)
    return attached


def detach(model: torch.nn.Module) -> None:
    """Put the model's own attention back. Does nothing if no method is attached.

    Raises ValueError if the model is not of transformers or PEFT, and RuntimeError if another thread runs generate() on
    it or is inside `with attach(...)`.
    """
    model = transformers_model(model)
    with lock:
        if (installation := model.__dict__.get("_skimkv")) is not None:
            installation.refuse_other_threads("detach")
            uninstall(model)
