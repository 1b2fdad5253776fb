"""One dense prompt for every method: the model reads it once, and each method takes what it keeps from it.

Sound because prefill is dense for all methods: `Method.prefill` is causal attention, then `Method.take`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..hf.attach import Cache
from ..hf.layer import Layer
from ..methods.base import Method
from ..stores.base import Shape, Store
from ..stores.full import Full
from . import budgets


class Block(Store):
    """The prompt of one layer as the model made it: q (B,H,G,n,D), k, v (B,H,n,D), left padded by pad."""

    q: Tensor
    k: Tensor
    v: Tensor
    given: dict[str, Any]


@dataclass(frozen=True, repr=False)
class Reading(Method):
    """Keeps the block of a prompt; what it cost is three tensors a layer. It cannot decode."""

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Block:
        return Block(shape, dtype, device)

    def prefill(
        self,
        store: Store,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        pad: Sequence[int] | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        assert isinstance(store, Block) and not any(store.lengths)
        store.q, store.k, store.v, store.given = q, k, v, {"scale": scale, "pad": pad, "softcap": softcap}
        y = ops.causal(store, q, k, v, **store.given)
        store.lengths = [k.shape[2] - p for p in pad or [0] * store.shape.B]
        return y


def read(model: Any, ids: Tensor, mask: Tensor | None = None) -> tuple[Cache, Tensor]:
    """Run the prompt: ids (B,n), mask (B,n) where rows are padded on the left -> (what was read, logits (B,V))."""
    cache = Cache(model, Reading())
    options: dict[str, Any] = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    logits: Tensor = forward(model, cache, ids, mask, **options)
    return cache, logits[:, -1].float()


def blocks(cache: Cache) -> list[tuple[int, Block]]:
    """Return (layer number, its prompt) for every layer with full attention, from a cache that `read` filled."""
    layers = enumerate(cache.layers)
    return [(i, layer.store) for i, layer in layers if isinstance(layer, Layer) and isinstance(layer.store, Block)]


def forward(model: Any, cache: Cache, ids: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """Logits (B,n,V). mask (B, positions seen and these), None where nothing is padded."""
    if mask is not None:  # else a model counts the padding; rows that are done may be past the last position
        most = None if cache.positions is None else cache.positions - 1
        places = (mask.cumsum(1) - 1).clamp(0, most)[:, -ids.shape[1] :]
        options |= {"attention_mask": mask, "position_ids": places}
    logits: Tensor = model(ids, past_key_values=cache, use_cache=True, **options).logits
    return logits


def fill(model: Any, held: Cache, method: Method) -> Cache:
    """The cache that `method` would have after that prompt. The model does not run; later blocks are decoded."""
    cache = Cache(model, method)
    for i, layer in enumerate(held.layers):
        if not isinstance(layer, Layer):
            cache.layers[i] = copy.deepcopy(layer)
            continue
        block, own = layer.store, cache.layers[i]
        assert isinstance(block, Block) and isinstance(own, Layer)
        own.store = method.store(block.shape, block.dtype, block.device)
        method.take(own.store, block.q, block.k, block.v, **block.given)
        own.seen, own.is_initialized, own.prompt = layer.seen, True, 0
    return cache


def fork(cache: Cache, rows: Sequence[int]) -> Cache:
    """These rows of the batch, in this order, independent of the cache; a row may come more than once."""
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    index = torch.tensor(rows)
    for layer in twin.layers:
        own: Any = layer
        if isinstance(layer, Layer) and isinstance(layer.store, Full):
            layer.store = layer.store.share(rows)
            continue
        if isinstance(layer, Layer):
            layer.store = copy.copy(layer.store)
        own.batch_select_indices(index)  # makes new tensors and leaves the old
    return twin


class Parts(Store):
    """Stores side by side: the first rows of the batch are those of the first, and so on."""

    def __init__(self, stores: Sequence[Store]) -> None:
        rows = sum(store.shape.B for store in stores)
        super().__init__(stores[0].shape._replace(B=rows), stores[0].dtype, stores[0].device)
        self.stores = list(stores)
        self.lengths = [n for store in stores for n in store.lengths]


@dataclass(frozen=True, repr=False)
class Beside(Method):
    """Several methods that decode in one batch, each its own rows: the model's weights are read once for all."""

    methods: tuple[Method, ...]

    def decode(
        self, store: Store, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None
    ) -> Tensor:
        assert isinstance(store, Parts)
        parts, y = [part.shape.B for part in store.stores], []
        for method, part, *token in zip(
            self.methods, store.stores, q.split(parts), k.split(parts), v.split(parts), strict=True
        ):
            y.append(method.decode(part, *token, scale=scale, softcap=softcap))
        store.lengths = [n + 1 for n in store.lengths]
        return torch.cat(y)


def beside(caches: Sequence[Cache]) -> Cache:
    """One cache of the rows of all, in order, each decoded by its own method; all have read the same prompt."""
    if len(caches) == 1:
        return caches[0]
    joint = copy.copy(caches[0])
    joint.method, joint.layers = Beside(tuple(cache.method for cache in caches)), []
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        own: Any = copy.copy(layers[0])
        if isinstance(own, Layer):
            own.method, own.store = joint.method, Parts([layer.store for layer in layers])
        else:
            own.batch_select_indices(torch.arange(own.keys.shape[0]).repeat(len(caches)))
        joint.layers.append(own)
    return joint


def owners(cache: Cache, n: int) -> list[tuple[Method, list[Store], int]]:
    """Whose each of the n rows of the batch is: its method, the stores of its layers, and the row in them."""
    method, stores = cache.method, budgets.stores(cache)
    if not isinstance(method, Beside):
        return [(method, stores, b) for b in range(n)]
    parts = [store.stores for store in stores if isinstance(store, Parts)]
    rows, each = n // len(method.methods), [[own[i] for own in parts] for i in range(len(method.methods))]
    return [(own, each[i], b) for i, own in enumerate(method.methods) for b in range(rows)]


def shapes(model: Any) -> set[tuple[Shape, torch.dtype]]:
    """Of the layers that a method serves, found by reading one token."""
    cache, _ = read(model, torch.zeros(1, 1, dtype=torch.int64, device=model.device))
    stores = (layer.store for layer in cache.layers if isinstance(layer, Layer))
    return {(store.shape, store.dtype) for store in stores if store is not None}
