"""Caches of random keys and values: as long as a benchmark wants them, without a prompt through a model."""

from __future__ import annotations

import torch
from torch import Tensor

from ..methods.base import Method
from ..stores.base import Shape, Store
from ..stores.full import Full
from ..stores.rotation import KeyRotation
from ..stores.slots import Slots

BLOCK = 4096  # tokens that are put into a store at once
SCORED_BLOCK = 512  # the same where every token of a block scores all before it


def random_store(
    shape: Shape, dtype: torch.dtype, tokens: int, more: int = 1, seed: int = 0, device: torch.device | str = "cpu"
) -> Full:
    """Return a store of `tokens` standard normal keys and values, with room for `more` in the same piece of memory."""
    store, draw = Full(shape, dtype, device), torch.Generator(device).manual_seed(seed)
    store.reserve(tokens + more)
    B, H, _, D = shape
    for start in range(0, tokens, BLOCK):
        size = B, H, min(BLOCK, tokens - start), D
        k, v = (torch.empty(size, dtype=dtype, device=device).normal_(generator=draw) for _ in "kv")
        store.append(k, v)
    return store


def keys_values(store: Full) -> tuple[Tensor, Tensor]:
    """Return all keys and values of a store whose rows have one length: (B,H,N,D) each, without a copy."""
    return store.history(slice(0, store.shape.B))


def empty_store(method: Method, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Store:
    """Return an empty store of the method. Where it turns keys to other positions, it turns them as Llama does."""
    store: Store = method.store(shape, dtype, device)
    if isinstance(store, Slots):
        store.rotation = KeyRotation.llama(shape.D)
    return store


def filled_store(method: Method, base: Full, more: int = 1) -> Store:
    """Return the method's store after the tokens of `base`, with room for `more`; K and V are shared where they can be.

    Other stores take the tokens in blocks, as a prompt that is read in pieces. Where queries choose which tokens stay,
    they are random: which tokens it keeps does not matter to a clock.
    """
    store = empty_store(method, base.shape, base.dtype, base.device)
    n = max(base.lengths)
    if isinstance(store, Full) and method.kv is None:
        store.adopt(base, n)
        return store
    if isinstance(store, Full):
        store.reserve(n + more)
    if isinstance(store, Slots) and store.budget_of is not None:  # the blocks are one prompt
        store.set_budget([store.budget_of(n)] * base.shape.B)
        store.budget_of = None
    # the fixed slots of SubGen may hold any keys: it need not choose its centres
    chosen = isinstance(store, Slots) and type(method).take is not Method.take and not store.fixed
    size, (k, v) = SCORED_BLOCK if chosen else BLOCK, keys_values(base)
    for start in range(0, n, size):
        keys, values = (x[:, :, start : start + size] for x in (k, v))
        if chosen:
            B, H, G, D = base.shape
            q = torch.randn(B, H, G, keys.shape[2], D, device=k.device).to(k.dtype)
            method.take(store, q, keys, values, scale=D**-0.5)
        else:
            store.append(keys, values)
    return store
