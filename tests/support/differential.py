"""A random case by the kernels and by the reference in float64: they differ only where one of them is wrong.

Where a method chooses, a choice is right if nothing that was left out scores higher than what was taken, but for
rounding; the reference then makes the kernel's choice, and must give the kernel's result. What a step over all tokens
chose is learned from the step itself: with values that are one at a single position and zero elsewhere, it returns the
weight of that position, because no choice looks at values. What slots dropped is seen in them. Where a choice cannot be
learned (channels of queries, Skim's draws), both sides of every decision that rounding may turn are tried.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from skimkv import ops
from skimkv.methods import H2O, TOVA, Skim, SnapKV, SparQ, TopK, h2o, lowrank, skim, snapkv, sparq, topk, tova
from skimkv.methods.base import Method
from skimkv.methods.slots import ChoosingMethod
from skimkv.ops import Token, prefill
from skimkv.stores.base import Store
from skimkv.stores.full import BOTH, Full
from skimkv.stores.quantise import GROUP
from skimkv.stores.slots import Slots
from skimkv.testing import empty_store
from support.kernels import EPS, exact, held, on
from support.random_cases import Case, sequences

SUM, POWER = 4 * 2.0**-24, 2.0**-20  # errors of a sum of products by its size, and of a softmax weight by itself
# Smaller numbers may be zero: of a type, and of float32 in every product of a sum.
ZERO = 2.0**-126
LEAST = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24}
MOST_DECISIONS = 8  # of one head that are tried on both sides


def compare(case: Case) -> float:
    """Run a case. Raises AssertionError if the kernels do what the reference, with their choices, does not.

    Returns the share of the heads of all steps in which rounding may turn so many decisions that nothing was compared.
    """
    undecided = [0.0]
    method, x = case.method, sequences(case)
    store: Store = empty_store(method, case.shape, x.k.dtype)
    softmax, start = case.softmax(), 0
    with on(case.isa, case.threads), torch.no_grad():
        for i, (n, pads) in enumerate(case.blocks):
            block = x.tokens(start, start + n)
            with _told(f"block {i}"):
                _compare_block(method, store, block, pads, softmax)
            start += n
        for i in range(case.steps):
            q, k, v = x.q[..., start + i, :], x.k[:, :, start + i], x.v[:, :, start + i]
            with _told(f"step {i}"):
                if isinstance(store, Full):
                    undecided.append(_compare_read(method, store, q, k, v, softmax))
                else:
                    assert isinstance(store, Slots)
                    _compare_slots(method, store, q, k, v, softmax)
    return sum(undecided) / len(undecided)


@contextmanager
def _told(where: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{where}: {error}") from error


def agree(got: Tensor, want: Tensor, bound: Tensor, what: str) -> None:
    """Raise AssertionError unless numbers differ by no more than a bound, and are not numbers in the same places."""
    if not want.numel():
        return
    beyond = excess(got, want, bound)
    assert beyond.max() <= 0, f"{what} is off by {beyond.max():.3g} more than it may be, which is {bound.max():.3g}"


def excess(got: Tensor, want: Tensor, bound: Tensor) -> Tensor:
    """By how much numbers differ beyond a bound; infinity where only one of them is a number."""
    assert got.shape == want.shape
    is_wrong = got.isnan() != want.isnan()
    return ((got.double() - want).abs() - bound).nan_to_num(-math.inf).masked_fill(is_wrong, math.inf)


# --- a prompt


def _compare_block(method: Method, store: Any, block: Any, pads: list[int], softmax: dict[str, Any]) -> None:
    """A prompt's attention, and what the store keeps of it."""
    before = store.fork()
    y = method.prefill(store, block.q, block.k, block.v, pad=pads, **softmax)
    for b, pad in enumerate(pads):
        _compare_attention(before.fork(), b, y[b], block.rows([b]), pad, softmax)
    if isinstance(store, Full):
        before.append(block.k, block.v, pads)
        _same_tokens(store, before)
    elif isinstance(method, ChoosingMethod):
        twin = exact(before)
        with _choices_of_prompt(method, store, block.v.double(), pads) as errors:
            method.take(twin, *(t.double() for t in block), pad=pads, **softmax)
        _same_slots(store, twin, max(errors, default=0.0))
    else:
        with ops.backend("ref"):
            method.take(before, *block, pad=pads, **softmax)
        turned = store.fork()
        turned.move_fixed(), before.move_fixed()  # which a step does before it reads them
        _same_slots(turned, before, 0)


def _compare_attention(before: Any, b: int, y: Tensor, row: Any, pad: int, softmax: dict[str, Any]) -> None:
    """Causal attention of a row's block after what the store held before: y (H,G,n,D), zero at padding."""
    q, k, v = (t[0, ..., pad:, :].double() for t in row)
    assert not y[..., :pad, :].any()
    n = q.shape[2]
    if not n:
        return
    if before.lengths[b]:
        past = before.history(slice(b, b + 1))
        k, v = (torch.cat([old[0].double(), new], 1) for old, new in zip(past, (k, v), strict=True))
    logits = q @ k[:, None].transpose(-1, -2) * softmax["scale"]
    size = logits.abs().amax((1, 2, 3), keepdim=True)
    logits = ops.blocks.apply_softcap(logits, softmax["softcap"])
    future = torch.arange(k.shape[1]) > k.shape[1] - n + torch.arange(n)[:, None]
    sinks = softmax.get("sinks")
    weights = ops.blocks.softmax_with_sinks(
        logits.masked_fill(future, -torch.inf), None if sinks is None else sinks[..., None]
    )
    want, magnitude = weights @ v[:, None], weights @ v[:, None].abs()
    is_ours = prefill._attends_in_library(*(t.to(row.k.dtype) for t in (row.q, row.k, row.v)), sinks)
    # bfloat16's weights are rounded; PyTorch rounds 16-bit weights and, under a cap or with sinks, logits too
    rounding = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 0.0 if is_ours else 2.0**-11}[row.k.dtype]
    if not is_ours and (softmax["softcap"] is not None or sinks is not None):
        rounding = rounding * (2 + 4 * size.clamp(max=softmax["softcap"] or math.inf))
    bound = (_weight_error(q, k[:, None], softmax, False)[..., None] + 2 * rounding) * magnitude
    dtype = row.q.dtype
    bound = bound + 2 * EPS[dtype] * want.abs() + 1e-7 * v.abs().max() + k.shape[1] * LEAST[dtype]
    agree(y[..., pad:, :], want, bound, "a prompt")


def _same_tokens(store: Full, plain: Full) -> None:
    """A store that keeps everything holds what the reference appends; a projection of keys is rounded."""
    if store.projection is None:
        held(store, plain)
    else:
        assert store.lengths == plain.lengths
        every = torch.arange(store.R).expand(*store.shape[:2], -1)
        valid = store.valid()[:, :, None]
        a, b = (s.read_channels(every).double().masked_fill(~valid, 0) for s in (store, plain))
        size = store.uncounted("k").double().abs().sum(-1)[:, :, None]
        rows = 2 * EPS[store.dtype] * size if store.row_format.bits else 0  # decoded, in the type of the cache
        agree(a, b, 2 * EPS[store.dtype] * b.abs() + SUM * size + rows, "the projection of keys")
        for name in BOTH:
            assert torch.equal(store.uncounted(name), plain.uncounted(name)), f"the rows of {name}"
    if store.group_means:
        every = torch.arange(store.R).expand(*store.shape[:2], -1)
        for name, of in (("channels", lambda s: s.read_channels(every)), ("means", Full.read_group_means)):
            a, b = of(store), of(plain)
            limit = 2 * EPS[store.dtype] * b.abs().max() if store.row_format.bits is None else b.abs().max() / 5
            agree(a, b.double(), limit + 1e-6, f"{name} of the index")


def _same_slots(store: Slots, twin: Slots, error: Tensor | float) -> None:
    """The same tokens are in the same slots, with scores that differ by `error`, relative to each."""
    assert (store.lengths, store.filled, store.budget) == (twin.lengths, twin.filled, twin.budget)
    for b, n in enumerate(store.filled):
        for name in ("k", "v", "fixed_k"):
            ours, theirs = getattr(store, name), getattr(twin, name)
            if ours is not None:
                at = slice(0, min(n, store.fixed)) if name == "fixed_k" else slice(0, n)
                form = store.row_format
                a, e = (form.decode(t[b, :, at], torch.float64) for t in (ours, theirs))
                assert torch.equal(a, e), f"row {b} holds other numbers in {name}"
        if store.score is not None and store.pos is not None:
            assert torch.equal(store.pos[b, :, :n], twin.pos[b, :, :n]), f"positions of row {b}"
            want = twin.score[b, :, :n].double()
            agree(store.score[b, :, :n], want, error * want + 1e-6, f"scores of row {b}")


def _weight_error(q: Tensor, keys: Tensor, softmax: dict[str, Any], is_quantised: bool) -> Tensor:
    """What rounding does to the softmax weights of a query at most, relative to each.

    q (...,n,D) · keys (...,m,D), zero where there is none -> (...,n). Of quantised rows, queries have 22 bits.
    """
    q, keys = q.double().abs() * abs(softmax["scale"]), keys.double().abs()
    error = POWER + 2 * SUM * (q @ keys.transpose(-1, -2)).amax(-1) + 2.0**-20 * (softmax["softcap"] or 0)
    if is_quantised:
        error = error + 2.0**-21 * q.amax(-1) * q.shape[-1] * keys.amax((-1, -2))[..., None]
    return error


@contextmanager
def _choices_of_prompt(method: ChoosingMethod, store: Slots, v: Tensor, pads: list[int]) -> Iterator[list[float]]:
    """Let `take` choose what `store` holds of its prompt, and hold the choice against what the method ranks by.

    Yields a list that gets the error of a score in each row of the batch.
    """
    errors, candidates = list[float](), list[Tensor]()
    choose = type(method).choose

    def note(self: Any, twin: Slots, b: int, q: Tensor, keys: Tensor, *rest: Any, **softmax: Any) -> Any:
        error = _weight_error(q, keys[:, None], softmax, False).max()
        if twin.row_format.bits:  # the keys are decoded to the type of the cache
            logit = abs(softmax["scale"]) * (q.abs() @ keys[:, None].abs().transpose(-1, -2)).max()
            error += 2 * EPS[store.dtype] * logit
        errors.append(float(error))
        values = torch.cat([twin.stored(b)[1], twin.row_format.encode(v[b, :, pads[b] :])], 1)
        rows = torch.cat([keys, twin.row_format.decode(values, torch.float64)], -1)  # (H,m,2D)
        kept = [store.row_format.decode(t[b, :, : store.filled[b]], torch.float64) for t in (store.k, store.v)]
        candidates[:] = [_places(theirs, ours) for theirs, ours in zip(rows, torch.cat(kept, -1), strict=True)]
        return choose(self, twin, b, q, keys, *rest, **softmax)

    def best(rank: Tensor, pos: Tensor, n: int) -> Tensor:
        index = torch.stack([places[:n] for places in candidates[: len(rank)]])
        assert not n or index.max() < rank.shape[1], "the choice is not among the candidates"
        admissible(rank, index, errors[-1])
        return index

    module = {H2O: h2o, SnapKV: snapkv, TOVA: tova}[type(method)]
    with mock.patch.object(type(method), "choose", note), mock.patch.object(module, "best", best):
        yield errors


def _places(rows: Tensor, kept: Tensor) -> Tensor:
    """Where rows that were kept (c,D) are among all rows (m,D), in order: (c,)."""
    places, at = [], 0
    of_row: dict[bytes, list[int]] = {}
    for i, row in enumerate(rows.numpy()):
        of_row.setdefault(row.tobytes(), []).append(i)
    for row in kept.numpy():
        at = next((i for i in of_row.get(row.tobytes(), []) if i >= at), -1)
        assert at >= 0, "a kept token is none of the prompt's, or not in its place"
        places.append(at)
        at += 1
    return torch.tensor(places, dtype=torch.int64)


def admissible(score: Tensor, index: Tensor, error: Tensor | float) -> None:
    """Raise AssertionError if what was left of scores (...,n) is higher than what was taken, index (...,m).

    error: of each score, relative to it; scores of almost nothing are equal.
    """
    taken = torch.zeros_like(score, dtype=torch.bool).scatter(-1, index, True)
    low = (score + 2.0**-100).log()
    least = (low + error).masked_fill(~taken, math.inf).amin(-1)
    most = (low - error).masked_fill(taken, -math.inf).amax(-1)
    assert (least >= most).all(), f"what was left scores {(most - least).max():.3g} more than what was chosen"


# --- a step over slots


def _compare_slots(method: Method, store: Slots, q: Tensor, k: Tensor, v: Tensor, softmax: dict[str, Any]) -> None:
    """A step, and the slots after it: the reference drops what the kernel dropped, if that was allowed.

    Slots without a token are NaN, or hold rows whose ends are.
    """
    for b, n in enumerate(store.filled):
        store.k[b, :, n:] = store.v[b, :, n:] = 255 if store.row_format.bits else torch.nan
    before, now = store.fork(), list(store.lengths)
    method.prepare([before], Token(k, v))  # it turns keys, and rounds them
    twin = exact(before)
    y = method.decode(store, q, k, v, **softmax)
    rows = zip(twin.read_rows(), (k, v), strict=True)
    keys, values = (torch.cat([kept, new[:, :, None].double()], 2) for kept, new in rows)
    error = _weight_error(q, keys, softmax, bool(store.row_format.bits))  # (B,H,G)
    worst = float(error.max())

    def victims(given: Slots, weights: Tensor, recent: Any, rank: Any, protect: Any) -> tuple[Tensor, Tensor | None]:
        slot, keep = torch.empty(weights.shape[:2], dtype=torch.int64), torch.zeros(weights.shape[:2]).bool()
        for b, n in enumerate(given.filled):
            at = store.pos[b] == now[b]
            slot[b], keep[b] = at.int().argmax(-1), ~at.any(-1)
            if n < given.budget[b]:
                assert (slot[b] == n).all() and not keep[b].any(), "a free slot is taken"
                continue
            pos, score = given.pos[b, :, :n], given.score[b, :, :n]
            is_protected = protect(recent[b], pos, weights[b, :, :n], now[b] + 1)
            score = rank(score, pos, now[b] + 1).masked_fill(is_protected, math.inf)
            lowest = score.amin(-1)
            dropped = torch.where(keep[b], weights[b, :, -1], score.gather(-1, slot[b][:, None])[:, 0])
            allowed = lowest if recent[b] else torch.minimum(lowest, weights[b, :, -1])
            assert recent[b] == 0 or not keep[b].any(), "the current token was dropped"
            assert (dropped <= allowed * (1 + 4 * worst) + 1e-30).all(), "a token of a higher score was dropped"
        return slot, keep if keep.any() else None

    with mock.patch.object(h2o, "victims", victims):
        want = method.step(twin, q.double(), Token(k.double(), v.double()), **softmax)
    bound = error[..., None] * values.abs().amax((-1, -2))[..., None, None] + 2 * EPS[q.dtype] * want.abs()
    agree(y, want, bound + LEAST[q.dtype] + values.shape[-2] * ZERO, "the result")
    _same_slots(store, twin, worst)


# --- a step over all tokens


def _compare_read(method: Method, store: Full, q: Tensor, k: Tensor, v: Tensor, softmax: dict[str, Any]) -> float:
    """A step that may choose among all tokens, and the store after it. Returns the share of undecided heads."""
    before = store.fork()
    y = method.decode(store, q, k, v, **softmax)
    before.append_token(k, v)
    _same_tokens(store, before)
    twin, reference = exact(store), _Reference(method, store, q, softmax)
    wrong = torch.full(y.shape[:2], math.inf, dtype=torch.float64)
    decisions, is_open = 0, torch.zeros(y.shape[:2], dtype=torch.bool)
    for variant in range(2**MOST_DECISIONS):
        want, bound = reference.step(copy.copy(twin), variant)
        is_open |= reference.turned > MOST_DECISIONS
        decisions = max(decisions, int(reference.turned.masked_fill(is_open, 0).max()))
        wrong = torch.minimum(wrong, excess(y, want, bound).amax((-1, -2))).masked_fill(is_open, -1)
        if wrong.max() <= 0 or variant + 1 >= 2**decisions:
            break
    assert wrong.max() <= 0, f"the result is off by {wrong.max():.3g} more than it may be"
    if isinstance(method, Skim) and not reference.turned.any():
        assert torch.equal(store.rows_read, reference.rows_read), "other rows were read"
    return is_open.double().mean().item()


def _weights_of_positions(method: Method, store: Full, q: Tensor, softmax: dict[str, Any]) -> Tensor:
    """The weight that a step by the kernel gives each position, which is zero where it was not chosen: (B,H,N)."""
    D, N = store.shape.D, max(store.lengths)
    probe = store.fork()
    if probe.mean is not None:
        probe.mean.value.zero_()
    size = 2.0**15 if q.dtype == torch.float16 or store.row_format.bits or store.dtype == torch.float16 else 2.0**60
    weights = torch.zeros(*store.shape[:3], N, dtype=torch.float64)
    at_once = 1 if store.row_format.bits == 4 else D  # rotated values of several positions do not cancel exactly
    eye = probe.row_format.encode(size * torch.eye(D, dtype=store.dtype))
    nothing = probe.row_format.encode(torch.zeros(D, dtype=store.dtype))
    for chunk in probe.chunks:
        chunk.v[:] = nothing
    for start in range(0, N, at_once):
        for p in range(start, min(N, start + at_once)):
            chunk = next(c for c in probe.chunks if c.start <= p < c.start + c.cap)
            chunk.v[:, :, p - chunk.start] = eye[p - start]
        y = method.attend(probe, q, None, **softmax)[..., : min(at_once, N - start)].double()
        for p in range(start, min(N, start + at_once)):
            chunk = next(c for c in probe.chunks if c.start <= p < c.start + c.cap)
            chunk.v[:, :, p - chunk.start] = nothing
        weights[..., start : start + at_once] = y.nan_to_num(0) / size
    weights = weights.amax(2)
    if isinstance(method, Skim):  # what the mean value adds is the same everywhere
        weights = weights - weights.masked_fill(~store.valid(), math.inf).amin(-1, keepdim=True)
    least = 2.0**-20 if store.row_format.bits else 0.0
    return weights.masked_fill(weights <= least * weights.amax(-1, keepdim=True), 0)


class _Reference:
    """A method's own step in float64 with the choices of a kernel, and how much rounding may change its result.

    chosen: (B,H,N) the positions whose values the kernel read, as far as their weights are not negligible.
    turned: (B,H) how many decisions of a head rounding may turn; bit i of a variant turns the i-th.
    """

    def __init__(self, method: Method, store: Full, q: Tensor, softmax: dict[str, Any]) -> None:
        self.method, self.q, self.softmax = method, q, softmax
        self.chosen = _weights_of_positions(method, store, q, softmax) > 0
        self.turned, self.rows_read = torch.empty(0), torch.empty(0)

    def step(self, twin: Full, variant: int) -> tuple[Tensor, Tensor]:
        """The result and its bound, (B,H,G,D) each; infinite where the kernel's choice was not allowed."""
        self.variant, self.turned = variant, torch.zeros(self.q.shape[:2], dtype=torch.int64)
        self.is_wrong = torch.zeros(self.q.shape[:2], dtype=torch.bool)
        self.twin, self.is_mass_more = twin, False
        with ExitStack() as stack:
            for module in (sparq, topk, lowrank):
                stack.enter_context(mock.patch.object(module, "choose_positions", self._choose))
            for module, name, function in (
                (sparq, "top_channels", self._top_channels), (skim, "top_channels", self._top_channels),
                (skim, "draw", self._draw), (skim, "key_probability", self._key_probability),
                (skim, "value_probability", self._value_probability), (sparq, "covered_mass", self._covered_mass),
            ):  # fmt: skip
                stack.enter_context(mock.patch.object(module, name, function))
            want = self.method.step(twin, self.q.double(), None, **self.softmax)
            turned, self.turned, self.is_mass_more = self.turned, torch.zeros_like(self.turned), True
            bound = self._bound(want)
            if isinstance(self.method, SparQ):
                bound = bound + (self.method.step(twin, self.q.double(), None, **self.softmax) - want).abs()
            self.turned = turned
        if twin.rows_read is not None:
            self.rows_read = twin.rows_read
        return want, bound.masked_fill(self.is_wrong[..., None, None], -math.inf)

    def _largest(self, name: str) -> Tensor:
        return self.twin.uncounted(name).abs().amax((-1, -2))[..., None, None]  # (B,H,1,1)

    def _bound(self, want: Tensor) -> Tensor:
        """By how much a result may differ from one with the same choices."""
        keys, is_quantised = self.twin.uncounted("k"), bool(self.twin.row_format.bits)
        error = _weight_error(self.q, keys, self.softmax, is_quantised)[..., None]
        if isinstance(self.method, Skim):
            error = 32 * error  # the parts that are drawn and shrunk are quotients of such sums
        least = LEAST[self.q.dtype] + keys.shape[2] * ZERO
        return error * self._largest("v") + 2 * EPS[self.q.dtype] * want.abs() + least

    def _score_error(self) -> Tensor:
        """Of a softmax weight by the scores that choose, relative to it, at most: (B,H,1)."""
        q, twin, scale = self.q.double(), self.twin, abs(self.softmax["scale"])
        if isinstance(self.method, TopK):
            error = _weight_error(q, twin.uncounted("k"), self.softmax, bool(twin.row_format.bits))
            return 2 * error.amax(-1, keepdim=True)
        rounding: Tensor | float = 0.0
        if isinstance(self.method, SparQ):
            index = self.channels
            factor = sparq.inverse_temperature(q, index, self.softmax["scale"], self.method.temperature).abs()
            w = sparq.take(q, index).abs() * factor  # (B,H,G,r)
            rounding = self._index_rounding(w, index)
            if twin.row_format.bits and twin.index is None:
                rounding = 2.0**-21 * w.amax(-1) * q.shape[-1] * self._largest("k")[..., 0]
        else:
            assert twin.projection is not None
            w = scale * (q.abs() @ twin.projection.double().abs())
            index = torch.arange(twin.R).expand(*q.shape[:2], -1)
        size = (w * self._largest_channels(index)[:, :, None]).sum(-1)
        error = POWER + 2 * SUM * size + 2.0**-20 * (self.softmax["softcap"] or 0) + rounding
        return 2 * error.amax(-1, keepdim=True)  # of the weight, and of the sum of all by which it is divided

    def _largest_channels(self, index: Tensor) -> Tensor:
        """The largest size of each of these channels of the index: (B,H,r)."""
        return self.twin.read_channels(index).masked_fill(~self.twin.valid()[:, :, None], 0).abs().amax(-1)

    def _index_rounding(self, w: Tensor, index: Tensor) -> Tensor | float:
        """What the rounding of weights w (B,H,G,r) to integers does to a logit of a quantised index: (B,H,G)."""
        twin = self.twin
        scales = [c.scale for c in twin.chunks if c.scale is not None]
        if not scales:
            return 0.0
        closed = max(twin.lengths) // GROUP
        steps = torch.cat(scales, 2)[:, :, :closed, 0]  # (B,H,groups,R)
        if not closed:
            return 0.0
        steps = steps.nan_to_num(0).gather(-1, index[:, :, None].expand(-1, -1, closed, -1)).amax(2)  # (B,H,r)
        r, largest = w.shape[-1], (w * steps[:, :, None]).amax(-1)
        return largest * r * (7.5 / 254 if twin.bits == 4 else 255 / (2 * min(32639, 2**31 // (255 * r))))

    def _choose(self, score: Tensor, lengths: list[int], k: int, local: int) -> tuple[Tensor, Tensor]:
        """The kernel's choice, if it is one that these scores (B,H,N) allow."""
        last = torch.tensor(lengths)[:, None, None] - 1
        position = torch.arange(score.shape[-1])
        error = self._score_error()
        always = ((position >= last - local) & (position <= last)).expand_as(score)
        beyond = (position > last).expand_as(score)
        score = score.nan_to_num(0).clamp(min=0)
        rank = (score + 2.0**-100).log() - 1e6 * ~self.chosen - 1e9 * beyond + 1e9 * always
        index = rank.topk(min(k + 1, score.shape[-1]), -1).indices
        taken = torch.zeros_like(beyond).scatter(-1, index, True) & ~beyond
        self.is_wrong |= (self.chosen & ~taken).any(-1)  # more than k
        free = score.masked_fill(always | beyond, -1)
        low = (free.clamp(min=0) + 2.0**-100).log()
        least = (low + error).masked_fill(~taken | (free < 0), math.inf).amin(-1)
        most = (low - error).masked_fill(taken | (free < 0), -math.inf).amax(-1)
        self.is_wrong |= ~(least >= most)
        self.score_error = error
        return index, index <= last

    def _covered_mass(self, s_hat: Tensor, index: Tensor, valid: Tensor, sinks: Tensor | None = None) -> Tensor:
        """SparQ's alpha, and by how much it may differ: a share of weights that each have an error."""
        alpha = COVERED_MASS(s_hat, index, valid, sinks)
        error = alpha * (1 - alpha) * torch.expm1(2 * self.score_error[..., None]) + 2.0**-22
        return alpha + error if self.is_mass_more else alpha

    def _ambiguous(self, is_close: Tensor) -> Tensor:
        """Which of these decisions (B,H,n) the variant turns, of those that are close."""
        number = self.turned[..., None] + is_close.cumsum(-1) - 1
        self.turned = self.turned + is_close.sum(-1)
        return is_close & ((self.variant >> number.clamp(0, 62)) & 1).bool()

    def _top_channels(self, q: Tensor, r: int) -> Tensor:
        """The r largest channels: of equal ones the first, of others that rounding may exchange the variant decides.

        It decides of equal ones too for Skim, whose cases "exact in 8 bits" have sums that only float64 tells apart.
        """
        size = q.abs().sum(2)
        order = size.sort(-1, descending=True).values
        if r < size.shape[-1]:
            taken, left = order[..., r - 1, None], order[..., r, None]
            near = ((size - taken).abs() <= 2.0**-20 * taken) | ((size - left).abs() <= 2.0**-20 * taken)
            near &= (taken - left <= 2.0**-20 * taken) & ((taken > left) | isinstance(self.method, Skim))
            size = size * torch.where(self._ambiguous(near), 1 + 2.0**-17, 1.0)
        self.channels = size.argsort(dim=-1, descending=True, stable=True)[..., :r].sort(-1).values
        return self.channels

    def _key_probability(self, score: Tensor, lengths: Tensor, each_k: Tensor) -> Tensor:
        """Skim's probability of a key: of equal scores the kernel takes the first, of others the variant decides.

        each_k (B,H,1) is the same everywhere, because no kernel has an error to keep to.
        """
        k = int(each_k.max())
        position = torch.arange(score.shape[-1])
        score = score * (1 + 1e-9 * (1 - position.double() / score.shape[-1]))
        certain = (position < skim.SINKS) | (position >= lengths - 1 - skim.LOCAL) | (position >= lengths)
        free = score.nan_to_num(0).masked_fill(certain, -1)
        order = free.sort(-1, descending=True).values
        if k < score.shape[-1]:
            taken, left = order[..., k - 1, None], order[..., k, None]
            near = ((free - taken).abs() <= 1e-4 * taken) | ((free - left).abs() <= 1e-4 * taken)
            gap = taken - left
            near &= (gap > 1e-9 * taken) & (gap <= 1e-4 * taken) & (left >= 0) & (k * taken < 1)
            score = score * torch.where(self._ambiguous(near), 1 + 1e-3, 1.0)
        return KEY_PROBABILITY(score, lengths, k)

    def _value_probability(self, weights: Tensor, rows: Tensor, lengths: Tensor, k: Tensor) -> Tensor:
        """Skim's probability of a value; where several rows have most of a query's weight, by the variant."""
        probability = VALUE_PROBABILITY(weights, rows, lengths, k)
        most = weights.amax(-1, keepdim=True)
        near = ((weights >= (1 - 1e-4) * most) & (most > 0)).any(2)
        near &= (2 * k * weights.amax(2) < 1) & (rows != lengths - 1) & (lengths > k)
        others = near & (near.sum(-1, keepdim=True) > 1)
        is_turned = self._ambiguous(others)
        by_weight = (2 * k * weights.amax(2)).clamp(max=1)
        return torch.where(is_turned, torch.where(probability == 1, by_weight, 1), probability)

    def _draw(self, probability: Tensor, position: Tensor, lengths: Tensor, stream: int) -> Tensor:
        """Skim's draw; where the probability is as near to the hash as rounding is, by the variant."""
        drawn = DRAW(probability, position, lengths, stream)
        head = torch.arange(probability.shape[1])[:, None]
        share = (skim.hash_words(stream, lengths, head, position) >> 1).double() / 2.0**31
        near = ((probability - share).abs() <= 1e-4 * probability) & (probability < 1 + 1e-4)
        return drawn ^ self._ambiguous(near)


# As they are outside of comparisons.
COVERED_MASS, KEY_PROBABILITY, DRAW = sparq.covered_mass, skim.key_probability, skim.draw
VALUE_PROBABILITY = skim.value_probability
