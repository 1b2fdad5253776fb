"""A decode step held by a CUDA graph: what it stands on, and what the host does between two replays."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.gpu import device
from ..stores.base import Store


def capture(step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """(what step() will have returned, a function that runs its kernels); the host's part of it has run now."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = step()
    return y, graph.replay


def footing(stores: list[Store], inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
    return (*(x.shape for x in inputs), *(device.footing(store) for store in stores))


class Replay:
    """A captured step of one cache. `footing`: the addresses and shapes it was captured with."""

    def __init__(self, cache: Any, standing: tuple[Any, ...]) -> None:
        self.cache: Callable[[], Any] = weakref.ref(cache)
        self.footing = standing
        self.inputs: tuple[Tensor, ...] = ()
        self.logits: Tensor | None = None
        self.run: Callable[[], None] | None = None
        self.left: list[tuple[Store, list[int], int]] = []  # how `follow` left each layer
        self.epoch = 0

    def stands(self, cache: Any, inputs: tuple[Tensor, ...]) -> bool:
        """Whether all that a replay needs was done by `follow`, and nothing has changed since."""
        return (
            self.cache() is cache
            and len(self.left) == len(cache.layers)
            and self.epoch == device.epoch()
            and all(x.shape == y.shape for x, y in zip(self.inputs, inputs, strict=True))
            and all(
                layer.store is store and store.lengths is lengths and layer.seen == seen
                for layer, (store, lengths, seen) in zip(cache.layers, self.left, strict=True)
            )
        )

    def follow(self, cache: Any) -> None:
        """What the host does after a replay and before the next, while the device is at work."""
        stores: list[Store] = [layer.store for layer in cache.layers]
        for layer, store in zip(cache.layers, stores, strict=True):
            device.advance(store)
            layer.seen += 1
            device.prepare(store)
        self.epoch, stays = device.epoch(), footing(stores, self.inputs) == self.footing
        self.left = [(layer.store, layer.store.lengths, layer.seen) for layer in cache.layers] if stays else []
