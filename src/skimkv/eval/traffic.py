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
from ..methods.slots import SlotMethod
from ..stores.base import Shape, Store
from ..stores.slots import Slots

Observed = tuple[tuple[str, int], ...]  # what `Store.observed` gives of one row


def method_in(method: Method, store: Store, row: int) -> Method:
    """The method whose closed form tells a step of this row: a share of the prompt is tokens there (`as_in`)."""
    return method.as_in(store, row) if isinstance(method, SlotMethod) and isinstance(store, Slots) else method


def cached_tokens(store: Store, row: int, steps_ago: int) -> int:
    """How many cached tokens the traffic of a step of this row follows from: 0 steps ago is the next one.

    These are all that it has seen, unless a store with a budget has fewer than both: another prompt raised the budget,
    where that is a share, above what was left of the prompt before. The step that uses the budget up is taken for one
    after it, since the store does not note when that was.
    """
    n = store.lengths[row]
    if isinstance(store, Slots) and not store.grows and store.filled[row] < store.budget[row]:
        n = min(n, store.filled[row])
    return max(n - steps_ago, 0)


def step_traffic(method: Method, stores: Sequence[Store], steps_ago: int = 0) -> Traffic:
    """The traffic of one decode step of the whole batch over these layers' stores.

    Rows of different lengths are added one by one, so that what they share, as LowRank's projection, counts in each.
    steps_ago: 0 for the next step, 1 for the last one that was taken.
    """
    parts = []
    for store in stores:
        observed, shape = store.observed(), store.shape
        lengths = [cached_tokens(store, row, steps_ago) for row in range(shape.B)]
        if not steps_ago:  # what the last append wrote says nothing of the next one
            observed.pop("accepted_rows", None)
        are_alike = store.has_even_rows and (not isinstance(store, Slots) or len(set(store.budget)) == 1)
        if are_alike or "accepted_rows" in observed:  # which is known of the whole batch only
            own = method_in(method, store, 0)
            parts.append(own.traffic(max(lengths), shape, store.dtype, **observed))
            continue
        for row, n in enumerate(lengths):
            own, of_row = method_in(method, store, row), store.observed(row)
            parts.append(own.traffic(n, shape._replace(B=1), store.dtype, **of_row))
    return Traffic(*(sum(getattr(x, name) for x in parts) for name in ("elements", "bytes", "paper")))


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

    Rows of different lengths count as of step_traffic, in the library's layers too.
    steps_ago: as of step_traffic.
    """
    own = step_traffic(cache.method, cache.stores, steps_ago)
    sliding = []
    for layer in sliding_layers(cache):
        lengths = cache.stores[0].lengths if cache.stores else [steps_ago] * layer.shape.B
        for n in lengths:
            sliding.append(Dense().traffic(min(n - steps_ago, layer.rows), layer.shape._replace(B=1), layer.dtype))
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
        # where data do not matter: by the number of cached tokens and the budgets, which may be shares of prompts
        self._known: dict[tuple[int, ...], Cost] = {}

    def step(self, row: int, steps_later: int = 0) -> Cost:
        """The cost of the last step that was taken in this row, or of the one before which `steps_later` were taken."""
        n = self._stores[0].lengths[row] - 1 - steps_later if self._stores else 0
        cached = [cached_tokens(store, row, 1 + steps_later) for store in self._stores]
        known = n, *cached, *(store.budget[row] for store in self._stores if isinstance(store, Slots))
        if known in self._known:
            return self._known[known]
        layers: Counter[tuple[Method, int, Shape, torch.dtype, Observed]] = Counter()  # most layers are alike
        for store, m in zip(self._stores, cached, strict=True):
            observed = tuple(store.observed(row).items())
            layers[method_in(self._method, store, row), m, store.shape._replace(B=1), store.dtype, observed] += 1
        cost = Cost()
        for (method, *layer), times in layers.items():
            cost = cost.plus(_layer_cost(method, n, *layer), times)
        cost = cost.plus(self._library_cost(n))
        if not self._depends_on_data:
            self._known[known] = cost
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
            rows, layer = min(n, sliding.rows), (sliding.shape._replace(B=1), sliding.dtype, ())
            cost = cost.plus(_layer_cost(Dense(), rows, rows, *layer), times)
        return cost


@functools.lru_cache(4096)
def _layer_cost(method: Method, n: int, cached: int, shape: Shape, dtype: torch.dtype, observed: Observed) -> Cost:
    """The cost of a step after n tokens, of which the method's follows from `cached` tokens: see `cached_tokens`."""
    own, dense = method.traffic(cached, shape, dtype, **dict(observed)), Dense().traffic(n, shape, dtype)
    return Cost(own.elements, own.bytes, own.paper, dense.elements, dense.bytes)
