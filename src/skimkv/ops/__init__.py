"""The operations behind the methods, by backend: ref (PyTorch, the oracle), cpu (C++), gpu (Triton).

`backend("ref")` forces one inside a `with`; the environment variable SKIMKV_BACKEND forces one for the
process. An unknown or unavailable backend raises: nothing ever falls back in silence.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..stores.base import Store
from . import key_scores as _columns
from .linear import fast, reference
from .prefill import causal

BACKENDS = ("ref", "cpu", "gpu")
FORCED = ("forced by backend()", "SKIMKV_BACKEND")
_forced: ContextVar[str | None] = ContextVar("skimkv_backend", default=None)
_process = os.environ.get("SKIMKV_BACKEND")


def _load(name: str) -> ModuleType:
    """The backend's module; ValueError if it is unknown or its `unavailable()` gives a reason."""
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; known: {', '.join(BACKENDS)}")
    try:
        module = importlib.import_module({"ref": ".ref", "cpu": ".cpu.backend", "gpu": ".gpu.backend"}[name], __name__)
    except ImportError as error:
        raise ValueError(f"backend {name!r} is not in this installation ({error})") from error
    reason = module.unavailable()
    if reason:
        raise ValueError(f"backend {name!r} is unavailable: {reason}")
    return module


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Force a backend inside a `with`. Raises ValueError if it is unknown or unavailable."""
    _load(name)
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def chosen(device: str = "cpu") -> tuple[str, str]:
    """(name, why) of the backend for stores on this device. Raises ValueError if one was asked for that cannot run."""
    for name, why in (
        (_forced.get(), FORCED[0]),
        (_process, FORCED[1]),
    ):
        if name:
            _load(name)
            return name, why
    name = {"cpu": "cpu", "cuda": "gpu"}.get(device, "ref")
    try:
        _load(name)
    except ValueError as error:
        if name == "cpu" and os.environ.get("SKIMKV_ISA"):
            raise  # what was asked for by name is not replaced
        return "ref", str(error)
    return name, f"native for {device} tensors" if name != "ref" else f"no kernels for {device} tensors"


_modules: dict[tuple[str | None, str], ModuleType] = {}


def _module(store: Store | Tensor) -> ModuleType:
    key = _forced.get(), store.device.type
    module = _modules.get(key)
    if module is None:
        name, why = chosen(store.device.type)
        if name == "ref" and why not in FORCED:
            warnings.warn(f"skimkv decodes with its slow reference: {why}", stacklevel=3)
        module = _modules[key] = _load(name)
    return module


def _dispatch(name: str) -> Callable[..., Any]:
    def op(store: Store, *args: Any) -> Any:
        return getattr(_module(store), name)(store, *args)

    op.__name__ = name
    return op


append: Callable[..., None] = _dispatch("append")
dense: Callable[..., Tensor] = _dispatch("dense")
sparq: Callable[..., Tensor] = _dispatch("sparq")
topk: Callable[..., Tensor] = _dispatch("topk")
lowrank: Callable[..., Tensor] = _dispatch("lowrank")
slots: Callable[..., Tensor] = _dispatch("slots")
stream: Callable[..., Tensor] = _dispatch("stream")


def graphable(store: Store) -> bool:
    """Whether a CUDA graph can hold a step of this store: all that its kernels need is on the device."""
    return store.device.type == "cuda" and _module(store).__name__.endswith("gpu.backend")


def linear8(x: Tensor, packed: Tensor, out: int, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias with 8-bit weights: in C++ where the backend is cpu, else through dequantised tiles (linear.py)."""
    product = fast if _module(x).__name__.endswith("cpu.backend") else reference
    return product(x, packed, out, bias)


def columns(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """What each key of a prompt received, in C++ where the backend is cpu (columns.py)."""
    native = _module(q).__name__.endswith("cpu.backend") and k.dtype != torch.float64
    return (_columns.fast if native else _columns.reference)(q, k, scale, softcap)


__all__ = [
    "append", "backend", "causal", "chosen", "columns", "dense", "graphable", "linear8", "lowrank", "slots", "sparq",
    "stream", "topk",
]  # fmt: skip
