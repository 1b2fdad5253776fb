"""Matched budgets: the parameters with which a method reads a given share of what dense attention reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..methods import Dense
from ..methods.base import Method, Traffic
from ..stores.base import Store
from ..stores.clusters import Clusters

LEAST = 20  # tokens: fewer are no setting that anyone would use
SLACK = 1.05  # a method whose least useful setting reads this much over the share still counts as matched


def stores(cache: Any) -> list[Store]:
    """The stores of a cache's layers that a method serves, once something was read."""
    held = (getattr(layer, "store", None) for layer in cache.layers)
    return [store for store in held if store is not None and any(store.lengths)]


def traffic(method: Method, stores: Sequence[Store], step: int = 0) -> Traffic:
    """The closed form of one step over these layers: the next one, or the last one that was taken (step = 1)."""
    layers = []
    for store in stores:
        n, data = max(store.lengths) - step, {}
        if isinstance(store, Clusters):  # how many clusters the keys form is no function of n
            data["clusters"] = int(store.m.sum())
        layers.append(method.traffic(n, store.shape, store.dtype, **data))
    return Traffic(*(sum(getattr(x, name) for x in layers) for name in ("elements", "bytes", "paper")))


def at(method: type[Method], share: float, dense: Sequence[Store]) -> Method | None:
    """The method at the largest parameters whose bytes per step are at most that share of dense's.

    `dense`: the layers of a cache that Dense has prefilled; batch 1. The required fields decide what is solved:
    with r, k stays at 128 (the SparQ paper's) and r is solved; k and recent share the tokens 3 to 1; with delta,
    half of the bytes go to samples of values (s) and half to clusters, t = 2. None where the share is out of reach.
    """
    required = {f.name for f in dataclasses.fields(method) if f.default is dataclasses.MISSING}
    names = {f.name for f in dataclasses.fields(method)}
    build: Callable[..., Method] = method
    n, shape, dtype = max(dense[0].lengths), dense[0].shape, dense[0].dtype
    limit = traffic(Dense(), dense).bytes * share
    if not required:
        return method() if share >= 1 else None
    if "delta" in required:
        return _clustered(method, share, dense)

    def make(x: int) -> Method:
        if "r" in required:
            return build(r=x, k=min(128, n))
        if "recent" in names:
            return build(k=x - x // 4, recent=x // 4)
        return build(**dict.fromkeys(required, x))

    def fits(x: int, most: float) -> bool:
        return len(dense) * make(x).traffic(n, shape, dtype).bytes <= most

    low, high = (1, shape.D) if "r" in required else (min(LEAST, n), n)
    for most in (limit, limit * SLACK):
        if fits(low, most):
            return make(_last(low, high, lambda x: fits(x, most)))  # noqa: B023
    return None


def _last(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest x from low to high that fits, where low does and what does not fit stays so."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _clustered(method: type[Method], share: float, dense: Sequence[Store]) -> Method | None:
    """Clusters are counted on the keys themselves: the smallest delta, to two decimals, whose clusters fit."""
    store, t = dense[0], 2
    build: Callable[..., Any] = method
    n, D = max(store.lengths), store.shape.D
    s = max(1, int(n * share / 4))  # a sample is read and may be written, k and v: 4D of dense's 2nD
    keys = [k for layer in dense for k in layer.history(slice(0, 1))[0][0].float()]
    distance = [torch.cdist(k, k, compute_mode="donot_use_mm_for_euclid_dist") for k in keys]
    limit = traffic(Dense(), dense).bytes * share

    def fits(hundredths: int) -> bool:
        delta = (high - hundredths) / 100
        m = sum(_clusters(d <= delta) for d in distance)
        each = build(delta, t, s)
        whole = len(dense) * each.traffic(n, store.shape, store.dtype, clusters=0).bytes
        return bool(whole + m * ((1 + t) * D * store.dtype.itemsize + 4) <= limit)

    high = int(max(float(d.max()) for d in distance) * 100) + 1
    if not fits(0):
        return None
    found: Method = build((high - _last(0, high, fits)) / 100, t, s)
    return found


def _clusters(near: torch.Tensor) -> int:
    """How many clusters algorithm 1 of SubGen opens: a key founds one if no founder before it is near."""
    covered = torch.zeros(near.shape[0], dtype=torch.bool)
    count = 0
    while not bool(covered.all()):
        covered |= near[int(covered.int().argmin())]
        count += 1
    return count
