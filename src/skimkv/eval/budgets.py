"""Matched budgets: the parameters with which a method reads a given share of what dense attention reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..methods import METHODS, Dense
from ..methods.base import Method
from ..stores.base import Store
from .sweeps import SHARES
from .traffic import step_traffic

LEAST_TOKENS = 20  # fewer are no setting that anyone would use
SLACK = 1.05  # a method whose least useful setting reads this much over the share still counts as matched


def matched_methods(dense: Sequence[Store]) -> tuple[list[tuple[Method, float]], list[str]]:
    """Every method at 1/2, 1/4 and 1/8 of dense's bytes, as (method, share), Dense first; and what has no such form.

    `dense`: the stores of a cache that Dense has prefilled, with one row.
    """
    matched: list[tuple[Method, float]] = [(Dense(), 1.0)]
    left_out = []
    for share in SHARES:
        for name, method in METHODS.items():
            if method is Dense:
                continue
            fitting = at_share(method, share, dense)
            if fitting is None:
                left_out.append(f"{name} cannot read as little as 1/{round(1 / share)} of dense")
            else:
                matched.append((fitting, share))
    return matched, left_out


def at_share(method: type[Method], share: float, dense: Sequence[Store]) -> Method | None:
    """The method at the largest parameters whose bytes per step are at most that share of dense's.

    `dense`: the stores of a cache that Dense has prefilled, with one row. The required fields decide what is solved:
    with r, k stays at 128 (the SparQ paper's) and r is solved; k and recent share the tokens 3 to 1; with delta,
    half of the bytes go to samples of values (s) and half to clusters, t = 2. None where the share is out of reach.
    """
    required = {f.name for f in dataclasses.fields(method) if f.default is dataclasses.MISSING}
    names = {f.name for f in dataclasses.fields(method)}
    build: Callable[..., Method] = method
    n, shape, dtype = max(dense[0].lengths), dense[0].shape, dense[0].dtype
    limit = step_traffic(Dense(), dense).bytes * share
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

    low, high = (1, shape.D) if "r" in required else (min(LEAST_TOKENS, n), n)
    for most in (limit, limit * SLACK):
        if fits(low, most):
            return make(_largest(low, high, lambda x: fits(x, most)))  # noqa: B023
    return None


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest x from low to high that fits, where low does and above a misfit nothing fits."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _clustered(method: type[Method], share: float, dense: Sequence[Store]) -> Method | None:
    """The smallest delta, to two decimals, whose clusters fit; they are counted on the keys themselves."""
    store, t = dense[0], 2
    build: Callable[..., Method] = method
    n, D = max(store.lengths), store.shape.D
    s = max(1, int(n * share / 4))  # a sample is read and may be written, k and v: 4D of dense's 2nD
    keys = [k for layer in dense for k in layer.history(slice(0, 1))[0][0].float()]
    distances = [torch.cdist(k, k, compute_mode="donot_use_mm_for_euclid_dist") for k in keys]
    limit = step_traffic(Dense(), dense).bytes * share

    def delta(hundredths_below: int) -> float:
        return (most_hundredths - hundredths_below) / 100

    def fits(hundredths_below: int) -> bool:
        clusters = sum(_count_clusters(d <= delta(hundredths_below)) for d in distances)
        clustered: Any = build(delta(hundredths_below), t, s)
        samples = len(dense) * clustered.traffic(n, store.shape, store.dtype, clusters=0).bytes
        return bool(samples + clusters * ((1 + t) * D * store.dtype.itemsize + 4) <= limit)

    most_hundredths = int(max(float(d.max()) for d in distances) * 100) + 1
    if not fits(0):
        return None
    return build(delta(_largest(0, most_hundredths, fits)), t, s)


def _count_clusters(near: torch.Tensor) -> int:
    """How many clusters algorithm 1 of SubGen opens: a key founds one if no founder before it is near.

    near (n,n) bool: whether two keys are within delta of each other.
    """
    covered = torch.zeros(near.shape[0], dtype=torch.bool)
    count = 0
    while not bool(covered.all()):
        covered |= near[int(covered.int().argmin())]
        count += 1
    return count
