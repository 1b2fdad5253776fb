"""The method that moves the fewest bytes within a bound, for one model and text: `skimkv tune`.

The text is cut into pieces: a dense prompt, read once for all methods, then tokens that are forced, so that the method
decodes each (forced.py). The bound is on the mean of KL(dense ‖ method) after them, or on the increase of the loss, the
mean of -log p of those tokens, over dense attention's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import torch

from ..methods import METHODS, Dense
from ..methods.base import Method
from ..stores.base import Shape
from .budgets import PAGE
from .plan import Job, Plan, Setup, document_groups, supported_methods
from .results import Results, Tail, summary
from .run import KeptPrompts, run_evaluation
from .shared_prompt import record_prompt
from .statistics import cluster_bootstrap, standard_error
from .tasks import Example
from .tasks import parse as parse_task

SEARCHED = ("Skim", "SparQ")  # methods that are searched unless others are named
RANKS = (2, 4, 8, 16, 32, 64, 128)  # values of r that are tried
COUNTS = tuple(size for power in range(3, 14) for size in (2**power, 3 * 2 ** (power - 1)))  # of k: 8, 12, 16, 24, ...


class Trial(NamedTuple):
    """A method beside dense attention on all pieces.

    value: what the target bounds, the mean KL in nats a token or the increase of the loss as a share; stderr, low and
    high are its standard error and its 95% interval over pieces. share: its part of the bytes that dense moves.
    """

    method: Method
    value: float
    stderr: float | None
    low: float | None
    high: float | None
    bytes: int
    share: float
    tail: Tail

    def json(self, is_kl: bool) -> dict[str, Any]:
        """The trial for --json, its method as a spec."""
        ends = {"low": self.low, "high": self.high}
        own: dict[str, Any] = {"increase": self.value, "stderr": self.stderr, **ends}
        if is_kl:
            tail = {"kl_p99": self.tail.kl_p99, "kl_max": self.tail.kl_max, "agreement": self.tail.agreement}
            own = {"kl_mean": self.value, **ends, **tail}
        return {"method": repr(self.method), **own, "bytes": self.bytes, "share": self.share}


@dataclass
class Pieces:
    """Pieces of a text on which methods are tried, all of one length; the records are kept in a results file.

    context: how many tokens of a piece are its prompt. name: tells the records of these pieces from others. is_kl: the
    target bounds the mean KL, and not the increase of the loss.
    """

    setup: Setup
    results: Results
    pieces: Sequence[list[int]]
    context: int
    name: str
    is_kl: bool
    _prompts: KeptPrompts = field(default_factory=dict)
    _step_bytes: dict[Method, int | None] = field(default_factory=dict)

    def trial(self, method: Method) -> Trial:
        """The method beside dense attention. Pieces whose records the file holds are not run again."""
        own, dense = self.records(method), self.records(Dense())
        (row,) = summary(own)
        value, error, ends = row.mean, row.stderr, (row.low, row.high)
        if not self.is_kl:
            of_dense = self.loss()
            increases = [(a["loss"] - b["loss"]) / of_dense for a, b in zip(own, dense, strict=True)]
            value, error = fmean(increases), standard_error(increases)
            ends = cluster_bootstrap(increases, range(len(increases)), -math.inf, math.inf)
        assert row.bytes_per_token is not None and row.share is not None and row.tail is not None
        return Trial(method, value, error, *ends, row.bytes_per_token, row.share, row.tail)

    def loss(self) -> float:
        """The loss of dense attention, in nats a token."""
        return fmean(record["loss"] for record in self.records(Dense()))

    def records(self, method: Method) -> list[dict[str, Any]]:
        """The method's record of every piece. Those that the file lacks are made."""
        task = parse_task(f"kl(context={self.context}, reference={len(self.pieces[0]) - self.context})")
        examples = [(Example(str(i), f"{self.name} {i}", "", ()), piece) for i, piece in enumerate(self.pieces)]
        job = Job(task, self.name, document_groups(examples, self.context, self.setup.weights), [method])
        return run_evaluation(self.setup, Plan([job], []), self.results, prompts=self._prompts)

    def step_bytes(self, method: Method) -> int | None:
        """The bytes that a step moves in the layers that a method serves, for one sequence, on average over a piece.

        They are the closed form, and equal what a trial measures in these layers. None: they depend on the data, so
        that the closed form without data is no more than a bound, and only a trial tells them.
        """
        if method not in self._step_bytes:
            self._step_bytes[method] = self._closed_form(method)
        return self._step_bytes[method]

    def _closed_form(self, method: Method) -> int | None:
        if any(method.store(shape, dtype).traffic_depends_on_data for shape, dtype in self._layers):
            return None
        lengths = range(self.context, len(self.pieces[0]))
        total = 0
        for (shape, dtype), layers in self._layers.items():
            total += layers * sum(method.traffic(n, shape, dtype).bytes for n in lengths)
        return round(total / len(lengths))

    @functools.cached_property
    @torch.inference_mode()
    def _layers(self) -> Counter[tuple[Shape, torch.dtype]]:
        """How many layers that a method serves have each shape and number format."""
        ids = torch.zeros(1, 1, dtype=torch.int64, device=self.setup.model.device)
        layers = record_prompt(self.setup.model, ids, new_tokens=len(self.pieces[0]) - 1).recorded.values()
        return Counter((layer.shape, layer.k.dtype) for layer in layers)

    def lines(self, names: Sequence[str], channels: Sequence[str]) -> list[list[Method]]:
        """The settings that are tried of methods of these names: each line has one r, or none, and its k grow.

        Skim has its default r, a quarter of the head size, and an eighth.

        channels: how SparQ stores its channels. Settings that are not possible, do not fit the model, or are known to
        move as many bytes as dense attention, are left out.
        """
        limit, lines = self.step_bytes(Dense()), list[list[Method]]()
        assert limit is not None

        def moves_less(method: Method) -> bool:
            """Whether the method may move fewer bytes than dense attention."""
            known = self.step_bytes(method)
            return known is None or known < limit

        for name in names:
            method: Callable[..., Method] = METHODS[name]
            required = {f.name for f in dataclasses.fields(METHODS[name]) if f.default is dataclasses.MISSING}
            variants: list[dict[str, Any]] = [{"r": r} for r in RANKS] if "r" in required else [{}]
            if name == "Skim":  # in long texts the index is most of what it reads
                variants += [{"r": D // 8} for D in sorted({shape.D for shape, _ in self._layers}) if D >= 8]
            if name == "SparQ":
                variants = [{**variant, "channels": way} for way in channels for variant in variants]
            for variant in variants:
                sizes: list[dict[str, Any]] = [{"k": k} for k in COUNTS if k < self.context]
                if "recent" in required:
                    sizes = [{"k": size["k"] - size["k"] // 4, "recent": size["k"] // 4} for size in sizes]
                if "page" in required:
                    sizes = [{"page": PAGE, "k": size["k"]} for size in sizes if size["k"] % PAGE == 0]
                line, _ = supported_methods(self.setup, _possible(method, [{**variant, **size} for size in sizes]))
                lines.append(list(filter(moves_less, line)))
        return lines


def _possible(method: Callable[..., Method], settings: Sequence[Mapping[str, Any]]) -> list[Method]:
    """The methods with those of the settings that it takes: LMInfinite's k must be more than what it keeps anyway."""
    methods: list[Method] = []
    for setting in settings:
        with contextlib.suppress(ValueError):
            methods.append(method(**setting))
    return methods


def search(
    lines: Sequence[Sequence[Method]],
    known_bytes: Callable[[Method], int | None],
    attempt: Callable[[Method], tuple[int, bool]],
    limit: int,
) -> Method | None:
    """The method of all lines that moves the fewest bytes within the bound, and fewer than `limit`; None without one.

    known_bytes: what a method moves, as a trial will measure it; None where only a trial tells. attempt: try a method;
    gives the bytes that were measured, and whether it is within the bound.

    Along a line the bytes rise and what is bounded falls. Of each line, methods that are known to move no fewer bytes
    than the best so far are left out. Of the others the dearest is tried first: if that is beyond the bound, so is the
    rest of the line. Else the line is bisected. A line whose bytes are not known is bisected from the start, for its
    first method that is within the bound or moves no fewer bytes than the best.
    """
    best: Method | None = None
    fewest = limit
    for line in lines:
        known = [known_bytes(method) for method in line]
        cheaper = [method for method, moved in zip(line, known, strict=True) if moved is None or moved < fewest]
        low, high = -1, len(cheaper)  # beyond the bound; within it, or with no fewer bytes than the best
        middle = (low + high) // 2 if None in known else high - 1
        while high - low > 1:
            moved, is_within = attempt(cheaper[middle])
            if is_within and moved < fewest:
                best, fewest = cheaper[middle], moved
            low, high = (low, middle) if is_within or moved >= fewest else (middle, high)
            middle = (low + high) // 2
    return best


def tune(
    pieces: Pieces,
    names: Sequence[str],
    channels: Sequence[str],
    target: float,
    on_trial: Callable[[Method, Trial | None], None] = lambda method, trial: None,
) -> tuple[Trial | None, list[Trial]]:
    """Find the method that moves the fewest bytes within the target: (the chosen one or None, all that were tried).

    names: of the methods that are searched. target: the greatest mean KL in nats, or the greatest increase of the loss
    (0.01 for 1%). on_trial is called before each trial, and after it with what it found. The order of the names and of
    the channels changes nothing. A method that moves as many bytes as dense attention is never chosen. Raises
    ValueError if the target is below what rounding does to dense attention itself.
    """
    lines = pieces.lines(names, channels)  # before the first trial: a mistake in them takes no time
    trials: dict[Method, Trial] = {}

    def trial(method: Method) -> Trial:
        """Try the method, once."""
        if method not in trials:
            on_trial(method, None)
            trials[method] = pieces.trial(method)
            on_trial(method, trials[method])
        return trials[method]

    dense = trial(Dense())
    floor = dense.value
    if target < floor:
        name = str(pieces.setup.model.dtype).removeprefix("torch.")
        other = ", or --dtype float32" if pieces.setup.model.dtype.itemsize < 4 else ""
        raise ValueError(
            f"the target {target:g} is below {floor:.2g}, which is what rounding in {name} does to dense attention "
            f"itself: give a larger target{other}"
        )
    del trials[Dense()]
    library_bytes = dense.bytes - (pieces.step_bytes(Dense()) or 0)  # of layers that no method serves

    def known_bytes(method: Method) -> int | None:
        """What a trial of the method will measure; None if only the trial tells."""
        known = pieces.step_bytes(method)
        return None if known is None else known + library_bytes

    def attempt(method: Method) -> tuple[int, bool]:
        """Try the method: its bytes, and whether it is within the target."""
        tried = trial(method)
        return tried.bytes, tried.value <= target

    def place(line: Sequence[Method]) -> tuple[int, str]:
        """What lines are sorted by: first those whose bytes only trials tell, then the others, the cheapest first."""
        return known_bytes(line[0]) or 0, repr(line[0])

    chosen = search(sorted(filter(None, lines), key=place), known_bytes, attempt, dense.bytes)
    return None if chosen is None else trials[chosen], list(trials.values())
