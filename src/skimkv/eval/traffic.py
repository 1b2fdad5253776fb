"""What decode steps of a whole model read and write, in closed form: `Method.traffic` summed over layers and steps.

Layers that keep the library's cache cost the same whatever the method: a sliding layer is dense attention over its
window, and a step reads every state of linear attention, a state space or a convolution and writes it anew.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..hf.cache import Cache
from ..hf.layer import AttentionLayer
from ..hf.sliding_layer import SlidingLayer
from ..hf.states import state_tensors
from ..methods import Dense
from ..methods.base import Method, Traffic
from ..stores.base import Shape, Store

Observed = tuple[tuple[str, int], ...]  # what `Store.observed` gives of one row


def step_traffic(method: Method, stores: Sequence[Store], steps_ago: int = 0) -> Traffic:
    """The traffic of one decode step of the whole batch over these layers' stores.

    steps_ago: 0 for the next step, 1 for the last one that was taken.
    """
    layers = []
    for store in stores:
        observed = store.observed()
        if not steps_ago:  # what the last append wrote says nothing of the next one
            observed.pop("accepted_rows", None)
        layers.append(method.traffic(max(store.lengths) - steps_ago, store.shape, store.dtype, **observed))
    return Traffic(*(sum(getattr(x, name) for x in layers) for name in ("elements", "bytes", "paper")))


class SlidingCost(NamedTuple):
    """What the traffic of a sliding layer follows from: its sizes, and how many cached tokens a step reads."""

    shape: Shape
    dtype: torch.dtype
    rows: int  # the window, without the current token


def sliding_layers(cache: Cache) -> list[SlidingCost]:
    """The sliding layers of a cache that the method does not decode."""
    layers: list[Any] = [layer for layer in cache.layers if not isinstance(layer, AttentionLayer)]
    sliding = []
    for layer in layers:
        if getattr(layer, "is_sliding", False) and layer.is_initialized:
            B, H, _, D = layer.kept if isinstance(layer, SlidingLayer) else layer.keys.shape
            sliding.append(SlidingCost(Shape(B, H, 1, D), layer.dtype, layer.sliding_window - 1))
    return sliding


def state_traffic(cache: Cache) -> Traffic:
    """What one decode step of the whole batch reads and writes of the states that layers keep."""
    states = [state for layer in cache.layers for state in state_tensors(layer)]
    elements = 2 * sum(state.numel() for state in states)
    return Traffic(elements, 2 * sum(state.nbytes for state in states), elements)


def cache_traffic(cache: Cache, steps_ago: int = 0) -> Traffic:
    """The traffic of one decode step of the whole batch over all layers, the library's own included.

    steps_ago: as of step_traffic.
    """
    own = step_traffic(cache.method, cache.stores, steps_ago)
    n = max((length for store in cache.stores for length in store.lengths), default=0) - steps_ago
    sliding = [Dense().traffic(min(n, layer.rows), layer.shape, layer.dtype) for layer in sliding_layers(cache)]
    parts = [own, *sliding, state_traffic(cache)]
    return Traffic(*(sum(getattr(x, name) for x in parts) for name in ("elements", "bytes", "paper")))


class Cost(NamedTuple):
    """What decode steps of one sequence read and write, in all layers.

    elements and bytes are the method's, paper_elements those of its paper's own formula; dense_elements and
    dense_bytes are what dense attention would have read and written in the same steps. Layers that keep the library's
    cache count in all of them.
    """

    elements: int = 0
    bytes: int = 0
    paper_elements: int = 0
    dense_elements: int = 0
    dense_bytes: int = 0

    def plus(self, other: Cost, times: int = 1) -> Cost:
        """The sum of both; the other counts `times` times."""
        return Cost(*(a + times * b for a, b in zip(self, other, strict=True)))


def depends_on_data(cache: Cache) -> bool:
    """Whether the traffic of a step depends on what the cached tokens are, and not only on how many there are."""
    return any(store.traffic_depends_on_data for store in cache.stores)


class RowCosts:
    """The costs of single decode steps of single rows of a cache's batch."""

    def __init__(self, cache: Cache) -> None:
        self._method, self._stores = cache.method, cache.stores
        self._sliding = Counter(sliding_layers(cache))
        states, B = state_traffic(cache), max((store.shape.B for store in cache.stores), default=1)
        elements, data = states.elements // B, states.bytes // B
        self._states = Cost(elements, data, elements, elements, data)
        self._depends_on_data = depends_on_data(cache)
        self._known: dict[int, Cost] = {}  # by the number of cached tokens, where nothing else matters

    def step(self, row: int, steps_later: int = 0) -> Cost:
        """The cost of the last step that was taken in this row, or of the one before which `steps_later` were taken."""
        n = self._stores[0].lengths[row] - 1 - steps_later if self._stores else 0
        if n in self._known:
            return self._known[n]
        layers: Counter[tuple[Shape, torch.dtype, Observed]] = Counter()  # most layers are alike
        for store in self._stores:
            observed = tuple(store.observed(row).items())
            layers[store.shape._replace(B=1), store.dtype, observed] += 1
        cost = Cost()
        for layer, times in layers.items():
            cost = cost.plus(_layer_cost(self._method, n, *layer), times)
        cost = cost.plus(self._library_cost(n))
        if not self._depends_on_data:
            self._known[n] = cost
        return cost

    def library_layers(self, row: int, steps: int) -> Cost:
        """What the library's layers cost in the last steps of this row: stores, which count, do not see it."""
        cost = Cost()
        for n in range(self._stores[0].lengths[row] - steps, self._stores[0].lengths[row]):
            cost = cost.plus(self._library_cost(n))
        return cost

    def _library_cost(self, n: int) -> Cost:
        cost = self._states
        for sliding, times in self._sliding.items():
            layer = sliding.shape._replace(B=1), sliding.dtype, ()
            cost = cost.plus(_layer_cost(Dense(), min(n, sliding.rows), *layer), times)
        return cost


@functools.lru_cache(4096)
def _layer_cost(method: Method, n: int, shape: Shape, dtype: torch.dtype, observed: Observed) -> Cost:
    own, dense = method.traffic(n, shape, dtype, **dict(observed)), Dense().traffic(n, shape, dtype)
    return Cost(own.elements, own.bytes, own.paper, dense.elements, dense.bytes)
