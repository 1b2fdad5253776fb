"""Which backend computes: ref (PyTorch, the methods' own algorithms), cpu (C++) or gpu (Triton).

The device of a store decides. `backend("ref")` forces one inside a `with`; the environment variable SKIMKV_BACKEND
forces one for the process. An unknown or unavailable backend raises; one that was asked for is never replaced.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from ..stores.base import Store
from ..stores.slots import Slots
from .step import Backend

BACKENDS = ("ref", "cpu", "gpu")
FORCED = ("forced by backend()", "SKIMKV_BACKEND")
forced_backend: ContextVar[str | None] = ContextVar("skimkv_backend", default=None)  # that `backend` set, or None
_forced_for_process = os.environ.get("SKIMKV_BACKEND")
_chosen: dict[tuple[str | None, torch.device], Backend | None] = {}


def named_backend(name: str) -> Backend:
    """The backend "cpu" or "gpu", whether it can run here or not. Raises ValueError for another name."""
    if name == "cpu":
        from .cpu.run import CpuBackend

        return CpuBackend()
    if name == "gpu":
        from .gpu.run import GpuBackend

        return GpuBackend()
    raise ValueError(f"unknown backend {name!r}; known: {', '.join(BACKENDS)}")


def _load(name: str) -> Backend | None:
    """A backend, None for the reference. Raises ValueError if it is unknown or cannot run here."""
    if name == "ref":
        return None
    found = named_backend(name)
    if reason := found.unavailable():
        raise ValueError(f"backend {name!r} is unavailable: {reason}")
    return found


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Force a backend inside a `with`: "ref", "cpu" or "gpu". Raises ValueError if it is unknown or unavailable."""
    _load(name)
    token = forced_backend.set(name)
    try:
        yield
    finally:
        forced_backend.reset(token)


def select_backend(device: str = "cpu") -> tuple[str, str]:
    """The name of the backend for stores on a kind of device ("cpu", "cuda"), and why it was chosen.

    Raises ValueError if one was asked for by name that is unknown or cannot run here.
    """
    for name, reason in ((forced_backend.get(), FORCED[0]), (_forced_for_process, FORCED[1])):
        if name:
            _load(name)
            return name, reason
    name = {"cpu": "cpu", "cuda": "gpu"}.get(device, "ref")
    try:
        _load(name)
    except ValueError as error:
        if name == "cpu" and os.environ.get("SKIMKV_ISA"):
            raise  # an instruction set that was asked for by name is not replaced
        return "ref", str(error)
    return name, f"native for {device} tensors" if name != "ref" else f"no kernels for {device} tensors"


def backend_for(device: torch.device, head_size: int = 0) -> Backend | None:
    """The backend for stores on this device with this head size D; None where the reference computes.

    Warns once where the reference computes only because the kernels cannot run, or do not take heads of this size. A
    backend or an instruction set that was asked for by name is returned all the same, and its kernels refuse the
    size. Raises ValueError if a backend was asked for by name that is unknown or cannot run here.
    """
    key = forced_backend.get(), device
    if key not in _chosen:
        name, reason = select_backend(device.type)
        if name == "ref" and reason not in FORCED:
            warnings.warn(f"skimkv decodes with its slow reference: {reason}", stacklevel=3)
        _chosen[key] = _load(name)
    kernels = _chosen[key]
    if kernels is not None and head_size > kernels.max_head_size and not _is_forced(kernels.name):
        _warn_of_head_size(kernels.name, head_size, kernels.max_head_size)
        return None
    return kernels


def _is_forced(name: str) -> bool:
    """Whether this backend, or its instruction set, was asked for by name."""
    by_instruction_set = name == "cpu" and bool(os.environ.get("SKIMKV_ISA"))
    return bool(forced_backend.get() or _forced_for_process) or by_instruction_set


@functools.cache
def _warn_of_head_size(name: str, head_size: int, largest: int) -> None:
    """Say once for each backend and head size that the reference computes."""
    warnings.warn(
        f"skimkv decodes heads of size {head_size} with its slow reference: the kernels of backend {name!r} take head "
        f"sizes up to {largest}",
        stacklevel=4,
    )


def graphable(store: Store) -> bool:
    """Whether a CUDA graph can hold a step of this store: all that its kernels need is on the device.

    Where keys are turned before a step, the host says how far, and slots that grow move to other memory: such steps are
    launched, and not replayed.
    """
    kernels = backend_for(store.device, store.shape.D)
    needs_host = isinstance(store, Slots) and (store.fixed_k is not None or store.grows)
    return store.device.type == "cuda" and kernels is not None and kernels.name == "gpu" and not needs_host
