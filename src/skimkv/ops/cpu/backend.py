"""The C++ backend. Everything is checked here or in views.py, before a pointer is passed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, get_num_threads
from typing_extensions import Unpack

from ...stores.base import Store
from ...stores.clusters import Clusters
from ...stores.full import Full
from ...stores.slots import Slots
from ..blocks import check_sinks
from ..protocol import SoftmaxOptions, Token
from . import library
from .views import Arguments, CacheView, Settings, clusters_view_of, dtype_number, expect, tensor_form, view_of


def unavailable() -> str | None:
    """Why this backend cannot run here, or None if it can."""
    try:
        if library.isa() is None:
            name = os.environ.get("SKIMKV_ISA")
            return f"SKIMKV_ISA={name} is not available; this machine has {', '.join(library.isas())}"
    except ValueError as error:
        return str(error)
    return None


_SETTINGS = ("method", "r", "k", "local", "temperature", "use_mean")
_DENSE: Settings = (library.DENSE, 0, 0, 0, 0, 0)


class CpuKernels:
    """The operations of `ops.Kernels` in C++, for float32, bfloat16 and float16 and D up to 576."""

    name = "cpu"
    max_head_size = library.MAX_HEAD_SIZE

    def again(self, store: Store) -> RepeatedStep | None:
        """The last step of this store, which took a token, to be taken again; None where it cannot be.

        It cannot where PyTorch turns keys before every step.
        """
        if not isinstance(store, Full | Slots) or (isinstance(store, Slots) and store.fixed_k is not None):
            return None
        arguments = store.view.arguments
        if arguments is None or arguments.keep == library.OUTSIDE or not arguments.no_sinks:
            return None
        return RepeatedStep(store, store.view, arguments)

    def append(self, store: Store, k: Tensor, v: Tensor) -> None:
        """Append one token per row: k, v (B,H,D)."""
        k, v = _alike(k, v)
        _check_token(store, k, v)
        if isinstance(store, Clusters):
            self._append_to_clusters(store, k.contiguous(), v.contiguous())
            return
        assert isinstance(store, Full | Slots)
        if isinstance(store, Full) and store.pages is not None:  # no kernel writes the bounds of pages
            store.append_token(k, v)
            return
        if isinstance(store, Full):
            view = view_of(store, store.lengths, 1)
        else:
            store.reserve()
            view = view_of(store, store.filled)
        tokens = view.tokens
        if isinstance(store, Slots):
            view.slots[:] = [*store.next_slots()]
            tokens.at = ctypes.addressof(view.slots)
        tokens.k, tokens.v = k.data_ptr(), v.data_ptr()
        tokens.k_b, tokens.k_h, _ = k.stride()
        tokens.v_b, tokens.v_h, _ = v.stride()
        library.append(tokens)
        store.advance()

    def _append_to_clusters(self, store: Clusters, k: Tensor, v: Tensor) -> None:
        store.reserve()
        c = clusters_view_of(store).clusters
        c.q, c.k_new, c.v_new = None, k.data_ptr(), v.data_ptr()
        library.append_to_clusters(c)
        store.advance()

    def dense(self, store: Full, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Attention over all positions: q (B,H,G,D) -> (B,H,G,D)."""
        return _step_full(store, q, token, _DENSE, softmax)

    def sparq(
        self,
        store: Full,
        q: Tensor,
        token: Token | None,
        *,
        r: int,
        k: int,
        local: int,
        temperature: str,
        mean_value: bool,
        **softmax: Unpack[SoftmaxOptions],
    ) -> Tensor:
        """SparQ's algorithm 1: q (B,H,G,D) -> (B,H,G,D)."""
        number = library.TEMPERATURES.get(temperature)
        if number is None:
            raise ValueError(f"temperature = {temperature!r} must be one of {', '.join(library.TEMPERATURES)}")
        return _step_full(store, q, token, _settings(library.SPARQ, r, k, local, number, int(mean_value)), softmax)

    def top_k(
        self,
        store: Full,
        q: Tensor,
        token: Token | None,
        *,
        k: int,
        oracle: bool,
        **softmax: Unpack[SoftmaxOptions],
    ) -> Tensor:
        """Exact scores and the k best positions: q (B,H,G,D) -> (B,H,G,D)."""
        return _step_full(store, q, token, _settings(library.ORACLE if oracle else library.TOPK, k=k), softmax)

    def low_rank(
        self, store: Full, q: Tensor, token: Token | None, *, k: int, **softmax: Unpack[SoftmaxOptions]
    ) -> Tensor:
        """Scores in a projection of the keys and the k best positions: q (B,H,G,D) -> (B,H,G,D)."""
        return _step_full(store, q, token, _settings(library.LOWRANK, k=k), softmax)

    def skim(
        self, store: Full, q: Tensor, token: Token | None, *, r: int, k: int, **softmax: Unpack[SoftmaxOptions]
    ) -> Tensor:
        """Skim's scores, its two samples and its sums: q (B,H,G,D) -> (B,H,G,D)."""
        if not store.group_means:
            raise ValueError("Skim needs a store with the means of its groups, and this one has none")
        if store.rows_read is None:
            store.rows_read = torch.zeros(store.shape.B, 2, dtype=torch.int64)
        return _step_full(store, q, token, _settings(library.SKIM, r, k), softmax)

    def ring_slots(self, store: Slots, q: Tensor, token: Token, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Attention over the slots in use and the current token, which then takes its slot."""
        store.reserve()
        view = view_of(store, store.filled)
        view.slots[:] = [*store.next_slots()]
        return _step_slots(store, view, q, token, softmax)

    def scored_slots(
        self,
        store: Slots,
        q: Tensor,
        token: Token,
        *,
        recent: Sequence[int],
        **softmax: Unpack[SoftmaxOptions],
    ) -> Tensor:
        """The same, with scores; where a row's budget is full, the kernel chooses the slot."""
        if len(recent) != store.shape.B:
            raise ValueError(f"recent = {recent} must be {store.shape.B} numbers, one for each row of the batch")
        store.reserve()
        view = view_of(store, store.filled)
        view.slots[:] = [*store.free_slots()]
        view.now[:], view.recent[:] = [*store.lengths], [*recent]
        return _step_slots(store, view, q, token, softmax)

    def clusters(
        self, store: Clusters, q: Tensor, token: Token | None, *, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """SubGen's estimate z / tau: q (B,H,G,D) -> (B,H,G,D)."""
        check_sinks(sinks, store.shape.H, store.shape.G, store.device)
        sinks = None if sinks is None else sinks.contiguous()
        if token is not None:
            self.append(store, *token)
        q = q.contiguous()
        expect("q", q, tuple(store.shape), q.dtype)
        number = dtype_number("a query", q.dtype)
        c, y = clusters_view_of(store).clusters, torch.empty_like(q)
        c.q, c.y, c.q_dtype, c.scale = q.data_ptr(), y.data_ptr(), number, scale
        c.sinks = None if sinks is None else sinks.data_ptr()
        library.attend_clusters(c)
        return y


def _alike(k: Tensor, v: Tensor) -> Token:
    """The current token's k and v (B,H,D), with the same strides and contiguous rows."""
    if k.stride() != v.stride() or k.stride(-1) != 1:
        return Token(k.contiguous(), v.contiguous())
    return Token(k, v)


def _check_token(store: Store, k: Tensor, v: Tensor) -> None:
    B, H, _, D = store.shape
    expect("k", k, (B, H, D), store.dtype)
    expect("v", v, (B, H, D), store.dtype)


class RepeatedStep:
    """The last step of a store, to be taken again: see `ops.Again`.

    After a model has read its weights, nothing of this is in the processor's caches, and all that is touched costs: a
    call of a Python function, or of a class's `isinstance`, several microseconds each. So it does what `_step_full`,
    `ring_slots` and `scored_slots` do, in few functions, and what it needs lies together in its slots.

    places, shape: of the store, as `CacheView` has them. free: its item shows that no thread uses the store. budget: of
    a store of slots, whose budgets are another list once they were set anew; None: the store keeps every token. recent:
    what a method made of these budgets, for a store with scores. no_slots: -1 for every row, as `free_slots` gives
    where all budgets are used up. destinations: which of a step's numbers say where the token goes. spare: the outputs'
    list. run: skimkv_step_tensors, or None where PyTorch does not describe its tensors in C. contiguous: (dtype, scale)
    if q, k and v are contiguous and of one type, and nothing caps the logits; otherwise None.
    """

    __slots__ = (
        "address", "arguments", "budget", "contiguous", "counts_rows", "destinations", "dtype", "forms", "free",
        "in_use", "no_slots", "outputs", "places", "pool", "recent", "run", "scale", "shape", "softcap", "spare",
        "tensor_step", "view",
    )  # fmt: skip

    def __init__(self, store: Full | Slots, view: CacheView, arguments: Arguments) -> None:
        self.view, self.arguments, self.forms = view, arguments, arguments.forms
        self.shape, self.places = view.shape, view.places
        self.address, self.pool = view.address, view.pool
        self.outputs, self.spare = view.outputs, view.outputs.spare
        self.in_use = store.exclusive()
        self.free = self.in_use.free
        self.counts_rows = arguments.settings[0] == library.SKIM
        self.budget = store.budget if isinstance(store, Slots) else None
        self.recent, self.no_slots = list(view.recent), [-1] * store.shape.B
        tensors: Sequence[Any] = arguments.forms[:-2]
        self.scale, self.softcap = arguments.forms[-2:]
        q, k, v = (tensor_form(*tensors[i : i + 3]) for i in (0, 4, 8))
        self.dtype: torch.dtype = tensors[2]
        self.tensor_step = ctypes.addressof(view.tensor_step)
        place, rows = view.tensor_step.place, view.tensor_step.rows
        self.destinations = slice(place, place + rows)
        self.run: Any = library.step_tensors() if view.expect_forms(q, k, v) else None
        B, H, G, D = store.shape
        token = (B, H, D), (H * D, D, 1), self.dtype, True
        forms = (B, H, G, D), (H * G * D, G * D, D, 1), self.dtype, True, *token, *token, self.scale, None
        self.contiguous = (self.dtype, self.scale) if self.forms == forms else None

    def take(self, store: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Tensor | None:
        """Take the token k and v (B,H,D), and attend with q (B,H,G,D); None if anything has changed since."""
        if scale != self.scale or softcap != self.softcap:
            return None
        try:
            self.free.pop()
        except IndexError:
            self.in_use.refuse()
        try:
            numbers = self.next_numbers(store)
            if numbers is None:
                return None
            if self.counts_rows:
                self.view.forget_rows_read()
            y: Tensor = self.spare.pop() if self.spare else self.outputs.take(self.dtype)
            run = self.run or self._run_in_python
            status = run(self.tensor_step, numbers, q, k, v, y, get_num_threads())
            if status:
                self.spare.append(y)
                if status == library.OTHER_FORM:
                    return None
                raise ValueError(self.view.tensor_step.error.decode())
            store.advance()
            return y
        finally:
            self.free.append(True)

    def _run_in_python(self, _: int, numbers: list[int], q: Tensor, k: Tensor, v: Tensor, y: Tensor, n: int) -> int:
        """Do what skimkv_step_tensors does with n threads, where PyTorch does not describe its tensors in C."""
        forms = (
            q.shape, q.stride(), q.dtype, q.is_cpu, k.shape, k.stride(), k.dtype, k.is_cpu, v.shape, v.stride(),
            v.dtype, v.is_cpu,
        )  # fmt: skip
        if forms != self.forms[:-2] or max(numbers[self.destinations]) >= self.view.capacity:
            return library.OTHER_FORM
        self.view.numbers[: len(numbers)] = numbers  # type: ignore[assignment]
        addresses = q.data_ptr(), y.data_ptr(), k.data_ptr(), v.data_ptr()
        self.view.tensor_step.error = self.view.take_step(self.address, *addresses, n, self.pool)
        return library.TAKEN if self.view.tensor_step.error is None else library.REFUSED

    def prepare(self, store: Any) -> bool:
        """Set the lengths and places of the next token of a store in use; False if the store has changed.

        The token itself has the forms of the last one. Once a kernel has taken it, the store advances.
        """
        numbers = self.next_numbers(store)
        if numbers is None or max(numbers[self.destinations]) >= self.view.capacity:
            return False
        self.view.numbers[: len(numbers)] = numbers  # type: ignore[assignment]
        if self.counts_rows:
            self.view.forget_rows_read()
        return True

    def next_numbers(self, store: Any) -> list[int] | None:
        """The lengths and places of the next token, in the order of `CacheView.numbers`; None if the store has changed.

        A store that keeps every token needs its lengths only.
        """
        if self.view.arguments is not self.arguments or store.shape is not self.shape:
            return None
        if self.budget is None:
            chunks, index, mean, rows_read = self.places
            if (
                store.chunks is not chunks
                or store.index is not index
                or store.mean is not mean
                or store.rows_read is not rows_read
            ):
                return None
            lengths: list[int] = store.lengths
            return lengths
        keys, values, score, pos = self.places
        if (
            store.k is not keys
            or store.v is not values
            or store.score is not score
            or store.pos is not pos
            or store.budget is not self.budget
        ):
            return None
        filled = store.filled
        if score is None:
            slots = store.next_slots()
        elif filled == self.budget:
            slots = self.no_slots
        else:
            slots = store.free_slots()
        return [*filled, *slots, *store.lengths, *self.recent]


def _settings(method: int, r: int = 0, k: int = 0, local: int = 0, temperature: int = 0, use_mean: int = 0) -> Settings:
    """What a method tells its kernel: the fields of skimkv_op from `method` on."""
    return method, r, k, local, temperature, use_mean


def _step_full(store: Full, q: Tensor, token: Token | None, settings: Settings, softmax: SoftmaxOptions) -> Tensor:
    """One step of a method that keeps every token; the current token is appended first, in the same call."""
    if token is None:
        return _step(view_of(store, store.lengths), store, q, None, library.OUTSIDE, settings, softmax)
    y = _step(view_of(store, store.lengths, 1), store, q, token, library.APPEND, settings, softmax)
    store.advance()
    return y


def _step_slots(store: Slots, view: CacheView, q: Tensor, token: Token, softmax: SoftmaxOptions) -> Tensor:
    y = _step(view, store, q, token, library.SLOT, _DENSE, softmax)
    store.advance()
    return y


def _step(
    view: CacheView,
    store: Full | Slots,
    q: Tensor,
    token: Token | None,
    keep: int,
    settings: Settings,
    softmax: SoftmaxOptions,
) -> Tensor:
    """One operation: q (B,H,G,D) -> y (B,H,G,D) in q's dtype.

    Shapes and types are checked only if an argument differs from the last step's; addresses are checked at every step.
    """
    k, v = token or (q, q)
    if settings[0] == library.SKIM:
        view.forget_rows_read()
    scale, softcap, sinks = softmax["scale"], softmax.get("softcap"), softmax.get("sinks")
    forms = (
        q.shape, q.stride(), q.dtype, q.is_cpu, k.shape, k.stride(), k.dtype, k.is_cpu, v.shape, v.stride(), v.dtype,
        v.is_cpu, scale, softcap,
    )  # fmt: skip
    arguments = Arguments(settings, keep, token is None, sinks is None, forms)
    if arguments != view.arguments:
        view.arguments = None
        was_q, was_k, was_v = q, k, v
        if q.stride(-1) != 1:
            q = q.contiguous()
        if token is not None:
            token = _alike(k, v)
            k, v = token
        _fill_in(view.op, store, q, token, scale, softcap)
        view.op.keep, view.op.sinks = keep, None
        for name, value in zip(_SETTINGS, settings, strict=True):
            setattr(view.op, name, value)
        if q is was_q and (token is None or (k is was_k and v is was_v)):  # the next step needs no copies either
            view.arguments = arguments
    if sinks is not None:
        check_sinks(sinks, store.shape.H, store.shape.G, store.device)
        sinks = sinks.contiguous()  # a name for it, so that the memory lives as long as the step
        view.op.sinks = sinks.data_ptr()
    y = view.outputs.take(q.dtype)
    new = (None, None) if token is None else (k.data_ptr(), v.data_ptr())
    error = view.take_step(view.address, q.data_ptr(), y.data_ptr(), *new, get_num_threads(), view.pool)
    if error is not None:
        raise ValueError(error.decode())
    return y


def _fill_in(op: Any, store: Full | Slots, q: Tensor, token: Token | None, scale: float, softcap: float | None) -> None:
    """Check all that is passed, and fill in the operation apart from its addresses and its method's settings."""
    op.dtype = dtype_number("a query", q.dtype)
    expect("q", q, tuple(store.shape), q.dtype)
    if token is not None:
        _check_token(store, *token)
        op.n_b, op.n_h, _ = token.k.stride()
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap = {softcap} must be positive")
    _, H, G, D = store.shape
    op.q_b, op.q_h, op.q_g, _ = q.stride()
    op.y_b, op.y_h, op.y_g = H * G * D, G * D, D
    op.scale, op.softcap = scale, softcap or 0
