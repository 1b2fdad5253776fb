"""Matched budgets: the parameters with which a method reads a given share of what dense attention reads."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ..methods import METHODS, Dense, load_announced_methods
from ..methods.base import Method
from ..methods.subgen import count_founders
from ..stores.base import Shape, Store
from ..stores.full import Full
from .answer import Question
from .shared_prompt import RecordedPrompt, copy_rows, forward
from .sweeps import SHARES
from .traffic import step_traffic

PAGE = 16  # tokens in a page, the Quest paper's; larger pages where the bounds of these would take the whole budget
LEAST_TOKENS = 20  # fewer are no setting that anyone would use
SLACK = 1.05  # a method whose least useful setting reads this much over the share still counts as matched
MEASURED_STEPS = 8  # after the prompt, over which the bytes of a method are averaged that depend on the data
MOST_SIXTEENTHS = 160  # of a power of two: with p the smallest share of the weights that is left out is 2**-10
GRID = 1.02  # the ratio of neighbouring settings that are tried where bytes are measured
# no kernels: for `eval`, not for a demo
SLOW_REFERENCES = ("SubGenStream", "TopP", "RaBitQ", "SANTA", "VAttention", "RocketKV")

MeanShare = Callable[[Method], float]  # the share of dense's bytes that a method's steps read on average


def matched_methods(
    dense: Sequence[Store],
    mean_share: MeanShare | None = None,
    shares: Sequence[float] = SHARES,
    without: Collection[str] = (),
) -> tuple[list[tuple[Method, float]], list[str]]:
    """Every method at these shares of dense's bytes, as (method, share), Dense first; and what has no such form.

    Methods that other packages announce are among them; one whose parameters mean something else than those of
    `at_share` has no such form.
    `dense`: the stores of a cache that Dense has prefilled, with one row. mean_share: as of `at_share`. without: the
    names of methods that are left out.
    """
    matched: list[tuple[Method, float]] = [(Dense(), 1.0)]
    left_out = []
    load_announced_methods()
    for share in shares:
        for name, method in METHODS.items():
            if method is Dense or name in without:
                continue
            try:
                fitting = at_share(method, share, dense, mean_share)
            except (TypeError, ValueError) as error:
                if method.__module__.startswith("skimkv."):
                    raise
                left_out.append(f"{name} at 1/{round(1 / share)} of dense: no parameters were found ({error})")
                continue
            if fitting is None:
                left_out.append(f"{name} cannot read as little as 1/{round(1 / share)} of dense")
            else:
                matched.append((fitting, share))
    return matched, left_out


def at_share(
    method: type[Method], share: float, dense: Sequence[Store], mean_share: MeanShare | None = None
) -> Method | None:
    """The method at the largest parameters with which a step reads at most that share of dense's bytes, on average.

    `dense`: the stores of a cache that Dense has prefilled, with one row. The bytes are those of the closed form. Where
    they depend on the data (Store.traffic_depends_on_data), the closed form without data is only a bound; then
    `mean_share` measures what steps really read on average (see `measured_share`), and None takes the bound.

    The required fields decide what is solved: with r, k is 128 (the SparQ paper's), or as many rows as half of the
    bytes if these are fewer, and r is solved; k and recent share the tokens 3 to 1; without a required field k is
    solved; with page, pages have 16 tokens, or the fewest with which their bounds take at most half of the bytes, and
    k is solved; with top, it is a quarter of k, which is solved; with p, 1 - p is solved, in sixteenths of a power of
    two, and so is epsilon, with k and base a quarter of the share each; with delta as a required field, half of the
    bytes go to samples of values (s) and half to clusters, t = 2, which are counted on the keys. None where the
    share is out of reach.
    """
    required = {f.name for f in dataclasses.fields(method) if f.default is dataclasses.MISSING}
    names = {f.name for f in dataclasses.fields(method)}
    build: Callable[..., Method] = method
    n, shape, dtype = max(dense[0].lengths), dense[0].shape, dense[0].dtype
    if not required and not {"k", "p", "epsilon"} & names:
        return method() if share >= 1 else None
    if "delta" in required:
        return _clustered(method, share, dense)

    page = max(PAGE, 2 ** math.ceil(math.log2(2 / share)))  # of dense's bytes, bounds are one part in `page`

    def make(x: int) -> Method:
        """The method with x for what is solved."""
        if "page" in required:
            return build(page=page, k=x - x % page)
        if "p" in names:
            return build(p=round(1 - 2 ** (-x / 16), 5))
        if "epsilon" in names:
            rows = max(2, min(64, int(n * share / 4)))
            return build(epsilon=float(f"{4 * 2 ** (-x / 16):.3g}"), k=rows, base=rows)
        if "top" in names:
            return build(k=x, top=max(4, x // 4))
        if "r" in required:
            return build(r=x, k=max(1, min(128, int(n * share / 2))))
        if "recent" in names:
            return build(k=x - x // 4, recent=x // 4)
        return build(**dict.fromkeys(required or {"k"}, x))

    low, high = (1, shape.D) if "r" in required else (min(LEAST_TOKENS, n), n)
    low = page if "page" in required else low
    low, high = (1, MOST_SIXTEENTHS) if {"p", "epsilon"} & names else (low, high)
    settings: Sequence[int] = range(low, high + 1)
    dense_bytes = step_traffic(Dense(), dense).bytes

    def closed_form(method: Method) -> float:
        """The share of dense's bytes that a step reads by the closed form."""
        return len(dense) * method.traffic(n, shape, dtype).bytes / dense_bytes

    share_of: MeanShare = closed_form
    if mean_share is not None and make(low).store(shape, dtype).traffic_depends_on_data:
        share_of = mean_share
        settings = settings if {"p", "epsilon"} & names else _grid(low, high)
    for most in (share, share * SLACK):
        if share_of(make(low)) <= most:
            return make(settings[_largest(len(settings) - 1, lambda i: share_of(make(settings[i])) <= most)])  # noqa: B023
    return None


def measured_share(prompt: RecordedPrompt, questions: Sequence[Question]) -> MeanShare:
    """Make the function that measures which share of dense's bytes the steps of a method read on average.

    The steps are those after the first row of the prompt: the tokens that each question feeds, and then the tokens that
    the model gives greedily, at most MEASURED_STEPS of them. Bytes are those of the layers that a method decodes.
    """
    steps = min(MEASURED_STEPS, *(len(question.feed) + question.new_tokens for question in questions))

    @functools.cache
    @torch.inference_mode()
    def mean_share(method: Method) -> float:
        """The share of dense's bytes that these steps read."""
        cache = copy_rows(prompt.cache(method), [0] * len(questions))
        logits, moved, of_dense = prompt.logits[:1].expand(len(questions), -1), 0, 0
        for step in range(steps):
            likeliest = logits.argmax(-1).tolist()
            ids = [q.feed[step] if step < len(q.feed) else next_ for q, next_ in zip(questions, likeliest, strict=True)]
            logits = forward(prompt.model, cache, torch.tensor(ids, device=logits.device)[:, None], None)[:, -1]
            moved += step_traffic(method, cache.stores, steps_ago=1).bytes
            dense = (Dense().traffic(max(s.lengths) - 1, s.shape, s.dtype) for s in cache.stores)
            of_dense += sum(traffic.bytes for traffic in dense)
        return moved / of_dense

    return mean_share


def _grid(low: int, high: int) -> list[int]:
    """Whole numbers from low to high, each about 2% above the one before it."""
    numbers = [low]
    while numbers[-1] < high:
        numbers.append(min(high, max(numbers[-1] + 1, int(numbers[-1] * GRID))))
    return numbers


def _largest(high: int, fits: Callable[[int], bool]) -> int:
    """The largest x from 0 to high that fits, where 0 does and above a misfit nothing fits."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _clustered(method: type[Method], share: float, dense: Sequence[Store]) -> Method | None:
    """The smallest delta, to two decimals, whose clusters fit; they are counted on the keys themselves."""
    t, n = 2, max(dense[0].lengths)
    build: Callable[..., Method] = method
    # a sample is a key and a value that are read: 2D of dense's 2nD, for half of the bytes
    s = max(1, int(n * share / 2))
    heads = [layer.history(slice(0, 1))[0][0].float() for layer in dense]  # (H,n,D) each
    limit = step_traffic(Dense(), dense).bytes * share
    finite = [k[k.isfinite().all(-1)] for layer in heads for k in layer]
    radius = max((float((k - k[:1]).norm(dim=-1).max()) for k in finite if len(k)), default=0.0)
    most_hundredths = int(200 * radius) + 1  # no two keys are farther apart

    def at_delta(hundredths_below: int) -> Any:
        """The method with a delta that is `hundredths_below` hundredths below the largest."""
        return build((most_hundredths - hundredths_below) / 100, t, s)

    def fits(hundredths_below: int) -> bool:
        """Whether the clusters of that delta fit."""
        clustered, total = at_delta(hundredths_below), 0
        for store, layer in zip(dense, heads, strict=True):
            clusters = sum(count_founders(k, clustered.delta) for k in layer)
            total += clustered.traffic(n, store.shape, store.dtype, clusters=clusters).bytes
            if total > limit:
                return False
        return True

    return at_delta(_largest(most_hundredths, fits)) if fits(0) else None


def keeps_all_tokens(method: Method) -> bool:
    """Whether a method keeps the rows of all tokens, and does not drop or summarise any."""
    return isinstance(method.store(Shape(1, 1, 1, 256), torch.float32), Full)
