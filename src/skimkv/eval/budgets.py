"""Matched budgets: the parameters with which a method reads a given share of what dense attention reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..methods import METHODS, Dense
from ..methods.base import Method
from ..methods.subgen import founding_keys
from ..stores.base import Store
from .sweeps import SHARES
from .traffic import step_traffic

PAGE = 16  # tokens in a page, the Quest paper's; larger pages where the bounds of these would take the whole budget
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
    with r, k stays at 128 (the SparQ paper's) and r is solved; k and recent share the tokens 3 to 1; without a
    required field k is solved, by the most rows that a step is expected to read; with page, pages have
    16 tokens, or the fewest with which their bounds take at most half of the bytes, and k is solved; with delta, half
    of the bytes go to samples of values (s) and half to clusters, t = 2. None where the share is out of reach.
    """
    required = {f.name for f in dataclasses.fields(method) if f.default is dataclasses.MISSING}
    names = {f.name for f in dataclasses.fields(method)}
    build: Callable[..., Method] = method
    n, shape, dtype = max(dense[0].lengths), dense[0].shape, dense[0].dtype
    limit = step_traffic(Dense(), dense).bytes * share
    if not required and "k" not in names:
        return method() if share >= 1 else None
    if "delta" in required:
        return _clustered(method, share, dense)

    page = max(PAGE, 2 ** math.ceil(math.log2(2 / share)))  # of dense's bytes, bounds are one part in `page`

    def make(x: int) -> Method:
        if "page" in required:
            return build(page=page, k=x - x % page)
        if "r" in required:
            return build(r=x, k=min(128, n))
        if "recent" in names:
            return build(k=x - x // 4, recent=x // 4)
        return build(**dict.fromkeys(required or {"k"}, x))

    def fits(x: int, most: float) -> bool:
        return len(dense) * make(x).traffic(n, shape, dtype).bytes <= most

    low, high = (1, shape.D) if "r" in required else (min(LEAST_TOKENS, n), n)
    low = page if "page" in required else low
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
    t, n = 2, max(dense[0].lengths)
    build: Callable[..., Method] = method
    s = max(
        1, int(n * share / 2)
    )  # a sample is a key and a value that are read: 2D of dense's 2nD, for half of the bytes
    exact = "donot_use_mm_for_euclid_dist"
    heads = [[k.float() for k in layer.history(slice(0, 1))[0][0]] for layer in dense]
    distances = [[torch.cdist(k, k, compute_mode=exact) for k in layer] for layer in heads]
    limit = step_traffic(Dense(), dense).bytes * share
    largest = max(
        (float(d[d.isfinite()].max()) for layer in distances for d in layer if d.isfinite().any()), default=0.0
    )
    most_hundredths = int(largest * 100) + 1

    def at_delta(hundredths_below: int) -> Method:
        return build((most_hundredths - hundredths_below) / 100, t, s)

    def fits(hundredths_below: int) -> bool:
        clustered: Any = at_delta(hundredths_below)
        total = 0
        for store, layer in zip(dense, distances, strict=True):
            clusters = sum(int(founding_keys(d <= clustered.delta).sum()) for d in layer)
            total += clustered.traffic(n, store.shape, store.dtype, clusters=clusters).bytes
        return bool(total <= limit)

    return at_delta(_largest(0, most_hundredths, fits)) if fits(0) else None
