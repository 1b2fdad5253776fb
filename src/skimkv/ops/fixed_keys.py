"""The keys that a store of slots never drops, turned to other positions: in C++ where the backend is cpu."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..stores.slots import Slots
from .backends import backend_for
from .cpu import fixed_keys as cpu


def move_fixed(stores: Sequence[Slots]) -> None:
    """Do what `Slots.move_fixed` does before a step, in several stores. Raises ValueError as it does."""
    native = list[Slots]()
    for store in stores:
        backend = backend_for(store.device, store.shape.D)
        if backend is None or backend.name != "cpu" or not cpu.takes(store) or _has_gradient(store):
            store.move_fixed()
        else:
            native.append(store)
    if native:  # else there may be no library
        cpu.move_fixed(native)


def _has_gradient(store: Slots) -> bool:
    """Whether a gradient would pass through the keys."""
    return torch.is_grad_enabled() and (
        store.k.requires_grad or bool(store.fixed_k is not None and store.fixed_k.requires_grad)
    )
