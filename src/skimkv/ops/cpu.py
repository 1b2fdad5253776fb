"""The C++ backend: signatures of ref.py. Everything is checked here or in views.py, before a pointer is passed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from ..clusters import Clusters
from ..full import Full
from ..store import Slots, Store
from . import native, views
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
    if k.stride() != v.stride() or k.stride(-1) != 1:
        k, v = k.contiguous(), v.contiguous()
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
    view: views.Cache, store: Full | Slots, q: Tensor, token: Token | None, scale: float, softcap: float | None
) -> Tensor:
    """Run the view's operation, whose method and parameters are set: q (B,H,G,D) -> y (B,H,G,D) in q's dtype."""
    if q.stride(-1) != 1:
        q = q.contiguous()
    dtype = code("a query", q.dtype)
    expect("q", q, tuple(store.shape), q.dtype)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap = {softcap} must be positive")
    op, y = view.op, torch.empty(tuple(store.shape), dtype=q.dtype)
    if token is None:
        op.k_new = op.v_new = None
    else:
        op.k_new, op.v_new = token[0].data_ptr(), token[1].data_ptr()
        op.n_b, op.n_h, _ = token[0].stride()
    op.q, op.y, op.dtype = q.data_ptr(), y.data_ptr(), dtype
    op.q_b, op.q_h, op.q_g, _ = q.stride()
    op.y_b, op.y_h, op.y_g, _ = y.stride()
    op.scale, op.softcap = scale, softcap or 0
    native.run("skimkv_run", "skimkv_check", op)
    return y


def _full(
    store: Full, q: Tensor, token: Token | None, method: int, scale: float, softcap: float | None, **rest: int
) -> Tensor:
    """One step of a method that keeps every token; the current one is appended first, in the same call."""
    if token is not None:
        token = _token(store, *token)
        store._reserve(max(store.lengths) + 1)
    view = views.cache(store, store.lengths)
    op = view.op
    op.method, op.keep, op.use_mean = method, native.OUTSIDE if token is None else native.APPEND, 0
    for name, value in rest.items():
        setattr(op, name, value)
    y = _step(view, store, q, token, scale, softcap)
    if token is not None:
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
    rest = {"r": r, "k": k, "local": local, "temperature": kind, "use_mean": int(mean)}
    return _full(store, q, token, native.SPARQ, scale, softcap, **rest)


def topk(
    store: Full, q: Tensor, scale: float, softcap: float | None, k: int, oracle: bool, token: Token | None = None
) -> Tensor:
    """See ref.topk."""
    return _full(store, q, token, native.ORACLE if oracle else native.TOPK, scale, softcap, k=k)


def lowrank(store: Full, q: Tensor, scale: float, softcap: float | None, k: int, token: Token | None = None) -> Tensor:
    """See ref.lowrank."""
    return _full(store, q, token, native.LOWRANK, scale, softcap, k=k)


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
    token = _token(store, k, v)
    store.reserve(store.capacity)
    view, lengths, filled = views.cache(store, store.filled), store.lengths, store.filled
    if store.score is None:
        view.at[:] = [store.ring_slot(n) for n in lengths]
    else:
        if recent is None or len(recent) != len(lengths):
            raise ValueError(f"recent = {recent} must be {len(lengths)} numbers where slots are scored")
        view.at[:] = [c if c < budget else -1 for c, budget in zip(filled, store.budget, strict=True)]
        view.now[:], view.recent[:] = [*lengths], [*recent]
    view.op.method, view.op.keep, view.op.use_mean = native.DENSE, native.SLOT, 0
    y = _step(view, store, q, token, scale, softcap)
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
