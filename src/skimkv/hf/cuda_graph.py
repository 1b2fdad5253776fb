"""A decode step held by a CUDA graph: what it depends on, and what the host does between two replays."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.gpu import device
from ..stores.base import Store


def capture(step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """Capture the kernels of step(). Returns the tensor that they will write, and a function that runs them.

    The host's part of the step runs now, the kernels do not.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = step()
    return y, graph.replay


def footing(stores: Sequence[Store], inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """What a captured step of these stores and inputs depends on: the inputs' shapes, and addresses and sizes."""
    return (*(x.shape for x in inputs), *device.footing(stores))


class Replay:
    """A captured step of one cache.

    footing: what the step was captured with. inputs: the tensors that it reads. run: None before it is captured;
    logits: the tensor that run() writes.
    """

    def __init__(self, cache: Any, footing: tuple[Any, ...]) -> None:
        self.cache: Callable[[], Any] = weakref.ref(cache)
        self.footing = footing
        self.inputs: tuple[Tensor, ...] = ()
        self.logits: Tensor | None = None
        self.run: Callable[[], None] | None = None
        self.layers: list[tuple[Store, list[int], int]] = []  # store, lengths, seen: as `follow` left each layer

    def stands(self, cache: Any, inputs: tuple[Tensor, ...]) -> bool:
        """Whether `follow` has done all that a replay needs, and nothing has changed since."""
        return (
            self.cache() is cache
            and len(self.layers) == len(cache.layers)
            and all(x.shape == y.shape for x, y in zip(self.inputs, inputs, strict=True))
            and all(
                layer.store is store and store.lengths is lengths and layer.seen == seen
                for layer, (store, lengths, seen) in zip(cache.layers, self.layers, strict=True)
            )
        )

    def follow(self, cache: Any) -> None:
        """Do what the host does after a replay and before the next one, while the device is at work."""
        stores: list[Store] = [layer.store for layer in cache.layers]
        for layer, store in zip(cache.layers, stores, strict=True):
            device.advance(store)
            layer.seen += 1
            device.prepare(store)
        stays = footing(stores, self.inputs) == self.footing
        self.layers = [(layer.store, layer.store.lengths, layer.seen) for layer in cache.layers] if stays else []
