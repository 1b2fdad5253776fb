"""The Triton backend: signatures of ref.py. Everything is checked here, before a kernel is launched."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...stores.base import Store
from ...stores.clusters import Clusters
from ...stores.codes import GROUP
from ...stores.full import Full
from ...stores.slots import Slots
from . import device, launch
from .launch import LAUNCH, block, dot, pad, splits, types, units

try:
    from .kernels.append import append_kernel
    from .kernels.dense import dense_kernel
    from .kernels.select import choose_kernel
    from .kernels.slots import slots_kernel
    from .kernels.sparq import scores_kernel
    from .kernels.stream import stream_append_kernel, stream_kernel
except ImportError:  # launch.missing says why
    pass

Token = tuple[Tensor, Tensor]  # the current k and v, (B,H,D)
TEMPERATURES = {"coverage": 0, "sqrt_d": 1, "sqrt_r": 2}
LAYOUTS = {"none": 0, "copy": 16, "int8": 8, "int4": 4}


def unavailable() -> str | None:
    """Why this backend cannot run, or None."""
    if launch.missing is None and not torch.cuda.is_available() and not launch.interpreted():
        return "PyTorch sees no CUDA device; TRITON_INTERPRET=1 runs the kernels on the CPU, slowly"
    return launch.missing


def _check(store: Store, q: Tensor, softcap: float | None = None) -> None:
    launch.check(store, q=(q, tuple(store.shape)))
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap = {softcap} must be positive")


def _token(store: Store, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The current token's k and v (B,H,D), each row contiguous."""
    B, H, _, D = store.shape
    launch.check(store, k=(k, (B, H, D)), v=(v, (B, H, D)))
    return (k if k.stride(-1) == 1 else k.contiguous()), (v if v.stride(-1) == 1 else v.contiguous())


def append(store: Store, k: Tensor, v: Tensor) -> None:
    """See ref.append."""
    k, v = _token(store, k, v)
    if isinstance(store, Clusters):
        _into_clusters(store, k, v)
        return
    if isinstance(store, Slots):
        store.append(k[:, :, None], v[:, :, None])
        return
    assert isinstance(store, Full)
    B, H, _, D = store.shape
    store._reserve(max(store.lengths) + 1)
    view, x = device.pages(store), k
    if store.projection is not None:
        x = (k.to(store.projection.dtype)[:, :, None] @ store.projection)[:, :, 0].to(k.dtype)
    tail, mean = (view.lengths if t is None else t for t in (store.tail, store.v_mean))
    append_kernel[B * H,](
        k, v, x, view.table, view.lengths, tail, mean, *k.stride()[:2], *v.stride()[:2], *x.stride()[:2], H, store.R,
        D=D, DP=pad(D), RB=16, TYPE=types()[store.dtype], LAYOUT=LAYOUTS[store.channels],
        MEAN=store.v_mean is not None, num_warps=4,
    )  # fmt: skip
    device.advance(store)


def _into_clusters(store: Clusters, k: Tensor, v: Tensor) -> None:
    (B, H, _, D), view = store.shape, device.units(store, more=True)
    stream_append_kernel[B * H,](
        k, v, view.table, view.lengths, store.m, store.mu, store.k, store.v, view.seed, store.delta,
        *k.stride()[:2], *v.stride()[:2], H, store.t, store.s,
        D=D, DP=pad(D), TP=pad(store.t, 1), SB=16, BC=32, TYPE=types()[store.dtype], num_warps=4,
    )  # fmt: skip
    device.advance(store)


def _first(store: Full | Clusters, token: Token | None) -> None:
    if token is not None:
        append(store, *token)


def dense(store: Full, q: Tensor, scale: float, softcap: float | None, token: Token | None = None) -> Tensor:
    """See ref.dense."""
    _check(store, q, softcap)
    _first(store, token)
    (B, H, G, D), view, options = store.shape, device.pages(store), dict(LAUNCH["dense"])
    S = splits(store, view.room // GROUP, options.pop("fill"))
    options["BN"] = block(options["BN"], pad(D) * store.dtype.itemsize)
    part = device.scratch(store.device, "part", B * H * S * G * (D + 2))
    counter = device.scratch(store.device, "counter", B * H, torch.int32)
    y = torch.empty(B, H, G, D, dtype=q.dtype, device=q.device)
    dense_kernel[B * H, S](
        q.contiguous(), y, view.table, view.lengths, part, counter, scale, softcap or 0.0, G, S,
        D=D, GP=pad(G), DP=pad(D), SP=pad(S, 2), TYPE=types()[store.dtype], DOT=dot(store, q),
        CAPPED=softcap is not None, **options,
    )  # fmt: skip
    return y


def _choose(
    store: Full, q: Tensor, scale: float, softcap: float | None, r: int, k: int, local: int, *, kind: int = 0,
    layout: int, token: Token | None, mean: bool = False, flex: bool = False, rough: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Steps 1 to 3; r = 0: every channel scores. `rough` (B,H,G,R): what scores instead of q."""
    _check(store, q, softcap)
    _first(store, token)
    (B, H, G, D), view = store.shape, device.pages(store)
    q = q.contiguous()
    step1, R, place = (q if rough is None else rough.contiguous()), store.R, store.device
    width, K = view.room, min(k - local, view.room)
    fused = rough is None and LAUNCH["fused"]["heads"] * units(place) <= B * H
    options = dict(LAUNCH["fused" if fused else "choose"])
    first = dict(LAUNCH["coded" if store.bits else "scores"])
    tiles = -(-width // options["TILE"])
    S, T = splits(store, width // GROUP, first.pop("fill")), splits(store, tiles, options.pop("fill", 1))
    if fused:
        S = T = 1
        options.pop("heads")
    room = tiles * min(K, options["TILE"])
    logits = device.scratch(place, "logits", B * H * G * width + options["TILE"])
    stats = device.scratch(place, "stats", B * H * S * G * 2)
    bits, at = (device.scratch(place, name, B * H * room, torch.int32) for name in ("bits", "at"))
    chosen = device.scratch(place, "chosen", B * H * K, torch.int32)
    counter = device.scratch(place, "counter", B * H, torch.int32)
    y = torch.empty(B, H, G, D, dtype=q.dtype, device=place)
    tail = logits if store.tail is None else store.tail.contiguous()
    D1, RP, size = step1.shape[-1], pad(r or R), store.dtype.itemsize
    BN = (options if fused else first)["BN"]
    BN = block(BN, 4 * RP * size, 128 if layout == 4 else 32) if layout else block(BN, 4 * pad(D) * size)
    one = {"LAYOUT": layout, "KIND": kind, "RP": RP, "GP": pad(G), "TYPE": types()[store.dtype]}
    one["CAPPED"] = softcap is not None
    if not fused:
        first["BN"] = BN
        scores_kernel[B * H, S](
            step1, view.table, view.lengths, tail, logits, stats, scale, softcap or 0.0, S, r, R, G, width,
            D=D1, DP=pad(D1), DOT=dot(store, step1), **one, **first,
        )  # fmt: skip
    options |= {"BN": BN if fused else 16, "BK": block(options["BK"], pad(D) * size)}
    options.setdefault("STAGES", 1)
    choose_kernel[B * H, T](
        q, y, view.table, view.lengths, tail, logits, stats, bits, at, chosen,
        stats if store.v_mean is None else store.v_mean, counter, scale, softcap or 0.0, S, T, r, R, G, width, K, local,
        room, D=D, DP=pad(D), SP=pad(S, 2), DOT=dot(store, q), FLEX=flex, MEAN=mean, FUSED=fused, **one, **options,
    )  # fmt: skip
    return y


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
    kind = TEMPERATURES.get(temperature)
    if kind is None:
        raise ValueError(f"temperature = {temperature!r} must be one of {', '.join(TEMPERATURES)}")
    if not 1 <= r <= store.R or not 0 <= local <= k:
        raise ValueError(f"r = {r} must be from 1 to {store.R}, and local = {local} from 0 to k = {k}")
    layout = LAYOUTS[store.channels]
    return _choose(store, q, scale, softcap, r, k, local, kind=kind, layout=layout, token=token, mean=mean)


def topk(
    store: Full, q: Tensor, scale: float, softcap: float | None, k: int, oracle: bool, token: Token | None = None
) -> Tensor:
    """See ref.topk."""
    return _choose(store, q, scale, softcap, 0, k, 0, layout=0, token=token, flex=not oracle)


def lowrank(store: Full, q: Tensor, scale: float, softcap: float | None, k: int, token: Token | None = None) -> Tensor:
    """See ref.lowrank."""
    assert store.projection is not None
    rough = q.float() @ store.projection
    return _choose(store, q, scale, softcap, 0, k, 0, layout=16, token=token, rough=rough)


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
    _check(store, q, softcap)
    k, v = _token(store, k, v)
    if store.score is not None and (recent is None or len(recent) != store.shape.B):
        raise ValueError(f"recent = {recent} must be {store.shape.B} numbers where slots are scored")
    store.reserve(store.capacity)
    (B, H, G, D), C, options = store.shape, store.capacity, dict(LAUNCH["slots"])
    view, place = device.held(store, [*(recent or [0] * B)]), store.device
    S = splits(store, -(-C // options["BN"]), options.pop("fill"))
    options["BN"] = block(options["BN"], pad(D) * store.dtype.itemsize)
    width = -(-C // options["BN"]) * options["BN"]
    scored = store.score is not None
    logits = device.scratch(place, "logits", B * H * G * width if scored else 1)
    part = device.scratch(place, "part", B * H * S * G * (D + 2))
    counter = device.scratch(place, "counter", B * H, torch.int32)
    score, pos = (view.lengths if t is None else t for t in (store.score, store.pos))
    order = view.lengths if store.order is None else view.order
    y = torch.empty(B, H, G, D, dtype=q.dtype, device=place)
    slots_kernel[B * H, S](
        q.contiguous(), y, store.k, store.v, score, pos, k, v, view.lengths, view.filled, view.limits, order, logits,
        part, counter, scale, softcap or 0.0, *k.stride()[:2], *v.stride()[:2], B, H, G, S, C, width, store.fixed,
        D=D, GP=pad(G), DP=pad(D), SP=pad(S, 2), DOT=dot(store, q), SCORED=scored, ORDERED=store.order is not None,
        CAPPED=softcap is not None, **options,
    )  # fmt: skip
    device.advance(store)
    return y


def stream(store: Clusters, q: Tensor, scale: float, token: Token | None = None) -> Tensor:
    """See ref.stream."""
    _check(store, q)
    _first(store, token)
    (B, H, G, D), view, options = store.shape, device.units(store), dict(LAUNCH["stream"])
    room = view.table.numel() // device.COLUMNS * 8 * store.t + store.s
    options["BN"] = block(options["BN"], pad(D) * store.dtype.itemsize)
    S = splits(store, -(-room // options["BN"]), options.pop("fill"))
    part = device.scratch(store.device, "part", B * H * S * G * (D + 2))
    counter = device.scratch(store.device, "counter", B * H, torch.int32)
    y = torch.empty(B, H, G, D, dtype=q.dtype, device=q.device)
    stream_kernel[B * H, S](
        q.contiguous(), y, view.table, store.m, store.mu, store.k, store.v, part, counter, scale, G, store.t, store.s,
        S, D=D, GP=pad(G), DP=pad(D), SP=pad(S, 2), TYPE=types()[store.dtype], DOT=dot(store, q),
        TINY=torch.finfo(torch.float32).tiny, LIMIT=min(2.0**63, torch.finfo(q.dtype).max), **options,
    )  # fmt: skip
    return y
