"""The C++ backend: signatures of ref.py. Everything is checked here or in views.py, before a pointer is passed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from ...stores.base import Store
from ...stores.clusters import Clusters
from ...stores.full import Full
from ...stores.slots import Slots
from . import library as native
from . import views
from .views import code, expect

Token = tuple[Tensor, Tensor]  # the current k and v, (B,H,D)


def unavailable() -> str | None:
    """Why this backend cannot run, or None."""
    try:
        if native.isa() is None:
            name = os.environ.get("SKIMKV_ISA")
            return f"SKIMKV_ISA={name} is not available; this machine has {', '.join(native.isas())}"
    except ValueError as error:
        return str(error)
    return None


def _token(store: Store, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The current token's k and v (B,H,D), with the same strides."""
    B, H, _, D = store.shape
    k, v = _same(k, v)
    expect("k", k, (B, H, D), store.dtype)
    expect("v", v, (B, H, D), store.dtype)
    return k, v


def append(store: Store, k: Tensor, v: Tensor) -> None:
    """See ref.append."""
    k, v = _token(store, k, v)
    if isinstance(store, Clusters):
        # a block is added only when a cluster may need it
        store._reserve(int(store.m.max()) + 1)
        c = views.clusters(store).clusters
        k, v = k.contiguous(), v.contiguous()
        c.q, c.k_new, c.v_new = None, k.data_ptr(), v.data_ptr()
        native.run("skimkv_stream_append", "skimkv_check_clusters", c)
        store.lengths = [n + 1 for n in store.lengths]
        return
    assert isinstance(store, Full | Slots)
    tokens = _tokens(store)
    tokens.k, tokens.v = k.data_ptr(), v.data_ptr()
    tokens.k_b, tokens.k_h, _ = k.stride()
    tokens.v_b, tokens.v_h, _ = v.stride()
    native.run("skimkv_append", "skimkv_check_append", tokens)
    store.lengths = [n + 1 for n in store.lengths]


def _tokens(store: Full | Slots) -> native.CTokens:
    """Room for one token per row, and where it goes."""
    if isinstance(store, Full):
        store._reserve(max(store.lengths) + 1)
        return views.cache(store, store.lengths).tokens
    store.reserve(store.capacity)
    view = views.cache(store, store.filled)
    view.at[:] = [store.ring_slot(n) for n in store.lengths]
    view.tokens.at = ctypes.addressof(view.at)
    store.filled = [min(n + 1, store.capacity) for n in store.lengths]
    return view.tokens


def _step(
    view: views.Cache,
    store: Full | Slots,
    q: Tensor,
    token: Token | None,
    keep: int,
    scale: float,
    softcap: float | None,
    method: int,
    rest: tuple[tuple[str, int], ...] = (),
) -> Tensor:
    """One operation: q (B,H,G,D) -> y (B,H,G,D) in q's dtype. Checks run when a form is seen that the last step
    did not have; addresses are checked at every step."""
    k, v = token or (q, q)
    form = (
        (q.shape, q.stride(), q.dtype, q.is_cpu, k.shape, k.stride(), k.dtype, k.is_cpu),
        (v.shape, v.stride(), v.dtype, v.is_cpu, token is None, keep, scale, softcap, method, rest),
    )
    y = torch.empty(view.shape, dtype=q.dtype)
    if form != view.form:
        view.form = None
        _set(view.op, store, q, y, token, keep, scale, softcap, method)
        for name, value in rest:
            setattr(view.op, name, value)
        view.form = form
    if token is None:
        native.step(view.reference, q.data_ptr(), y.data_ptr(), None, None)
    else:
        native.step(view.reference, q.data_ptr(), y.data_ptr(), k.data_ptr(), v.data_ptr())
    return y


def _set(
    op: native.COp,
    store: Full | Slots,
    q: Tensor,
    y: Tensor,
    token: Token | None,
    keep: int,
    scale: float,
    softcap: float | None,
    method: int,
) -> None:
    """Check all that is passed and fill in the operation, its addresses apart."""
    B, H, _, D = store.shape
    op.dtype = code("a query", q.dtype)
    expect("q", q, tuple(store.shape), q.dtype)
    if token is not None:
        expect("k", token[0], (B, H, D), store.dtype)
        expect("v", token[1], (B, H, D), store.dtype)
        op.n_b, op.n_h, _ = token[0].stride()
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap = {softcap} must be positive")
    op.q_b, op.q_h, op.q_g, _ = q.stride()
    op.y_b, op.y_h, op.y_g, _ = y.stride()
    op.method, op.keep, op.scale, op.softcap, op.use_mean = method, keep, scale, softcap or 0, 0


def _same(k: Tensor, v: Tensor) -> Token:
    """The current token's k and v (B,H,D), with the same strides."""
    if k.stride() != v.stride() or k.stride(-1) != 1:
        return k.contiguous(), v.contiguous()
    return k, v


def _full(
    store: Full,
    q: Tensor,
    token: Token | None,
    method: int,
    scale: float,
    softcap: float | None,
    *rest: tuple[str, int],
) -> Tensor:
    """One step of a method that keeps every token; the current one is appended first, in the same call."""
    if q.stride(-1) != 1:
        q = q.contiguous()
    if token is None:
        return _step(views.cache(store, store.lengths), store, q, None, native.OUTSIDE, scale, softcap, method, rest)
    token = _same(*token)
    store._reserve(max(store.lengths) + 1)
    y = _step(views.cache(store, store.lengths), store, q, token, native.APPEND, scale, softcap, method, rest)
    store.lengths = [n + 1 for n in store.lengths]
    return y


def dense(store: Full, q: Tensor, scale: float, softcap: float | None, token: Token | None = None) -> Tensor:
    """See ref.dense."""
    return _full(store, q, token, native.DENSE, scale, softcap)


def sparq(
    store: Full,
    q: Tensor,
    scale: float,
    softcap: float | None,
    r: int,
    k: int,
    local: int,
    temperature: str,
    mean: bool,
    token: Token | None = None,
) -> Tensor:
    """See ref.sparq."""
    kind = native.TEMPERATURES.get(temperature)
    if kind is None:
        raise ValueError(f"temperature = {temperature!r} must be one of {', '.join(native.TEMPERATURES)}")
    rest = (("r", r), ("k", k), ("local", local), ("temperature", kind), ("use_mean", int(mean)))
    return _full(store, q, token, native.SPARQ, scale, softcap, *rest)


def topk(
    store: Full, q: Tensor, scale: float, softcap: float | None, k: int, oracle: bool, token: Token | None = None
) -> Tensor:
    """See ref.topk."""
    return _full(store, q, token, native.ORACLE if oracle else native.TOPK, scale, softcap, ("k", k))


def lowrank(store: Full, q: Tensor, scale: float, softcap: float | None, k: int, token: Token | None = None) -> Tensor:
    """See ref.lowrank."""
    return _full(store, q, token, native.LOWRANK, scale, softcap, ("k", k))


def slots(
    store: Slots,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None,
    recent: Sequence[int] | None = None,
) -> Tensor:
    """See ref.slots."""
    if q.stride(-1) != 1:
        q = q.contiguous()
    store.reserve(store.capacity)
    view, lengths, filled = views.cache(store, store.filled), store.lengths, store.filled
    if store.score is None:
        view.at[:] = [store.ring_slot(n) for n in lengths]
    else:
        if recent is None or len(recent) != len(lengths):
            raise ValueError(f"recent = {recent} must be {len(lengths)} numbers where slots are scored")
        view.at[:] = [c if c < budget else -1 for c, budget in zip(filled, store.budget, strict=True)]
        view.now[:], view.recent[:] = [*lengths], [*recent]
    y = _step(view, store, q, _same(k, v), native.SLOT, scale, softcap, native.DENSE)
    store.filled = [min(c + 1, budget) for c, budget in zip(filled, store.budget, strict=True)]
    store.lengths = [n + 1 for n in lengths]
    return y


def stream(store: Clusters, q: Tensor, scale: float, token: Token | None = None) -> Tensor:
    """See ref.stream."""
    if token is not None:
        append(store, *token)
    q = q.contiguous()
    dtype = code("a query", q.dtype)
    expect("q", q, tuple(store.shape), q.dtype)
    c, y = views.clusters(store).clusters, torch.empty_like(q)
    c.q, c.y, c.q_dtype, c.scale = q.data_ptr(), y.data_ptr(), dtype, scale
    native.run("skimkv_stream", "skimkv_check_clusters", c)
    return y
