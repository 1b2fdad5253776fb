"""One token per row into the pages: k and v, the index, the open group and its codes, v_mean; lengths advance."""

from __future__ import annotations

import triton
import triton.language as tl

from .dense import entry


@triton.jit
def encode(tail, table, page, bh, R, new, mine, RB: tl.constexpr, BITS: tl.constexpr):
    """Codes of a full group for RB channels from `mine`: x ~ step * code + zero, full.quantise's rounding.

    new (RB,): the group's last token, which the tail does not hold yet.
    """
    j, t = mine + tl.arange(0, RB), tl.arange(0, 256)
    real = (j < R)[:, None]
    x = tl.load(tail + (bh * R + j[:, None]) * 256 + t[None, :], real & (t < 255)[None, :], 0.0).to(tl.float32)
    x = tl.where(t[None, :] == 255, new.to(tl.float32)[:, None], x)
    spoiled = tl.max((x != x).to(tl.int32), 1) > 0  # a NaN in the group: its scale says so
    high, zero = tl.max(x, 1), tl.min(x, 1)
    high, zero = tl.where(spoiled, float("nan"), high), tl.where(spoiled, float("nan"), zero)
    step = tl.div_rn(high - zero, tl.full([RB], 2**BITS - 1, tl.float32))
    divisor = tl.where(step == 0, 1.0, step)
    ratio = tl.div_rn(x - zero[:, None], tl.broadcast_to(divisor[:, None], [RB, 256]))
    ratio = tl.where(ratio == ratio, ratio, 0.0)
    codes = ((ratio + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2^23: rounds half to even
    cap = tl.load(table + page * 8 + 4)
    row = bh * R + j
    if BITS == 8:
        at = entry(table, page, 2, tl.uint8) + (row * cap)[:, None] + t[None, :]
        tl.store(at, codes.to(tl.uint8), real)
    else:
        dwords = tl.sum(codes.reshape(RB, 2, 8, 16) << (4 * tl.arange(0, 8))[None, None, :, None], 2)
        w = tl.arange(0, 32)
        at = entry(table, page, 2, tl.int32) + (row * (cap // 8))[:, None] + w[None, :]
        tl.store(at, dwords.reshape(RB, 32), real)
    at = entry(table, page, 3, tl.float32) + row * 2 * (cap // 256)
    tl.store(at, step, j < R)
    tl.store(at + cap // 256, zero, j < R)


@triton.jit
def append_kernel(
    k, v, x, table, lengths, tail, mean, k_b, k_h, v_b, v_h, x_b, x_h, H, R,
    D: tl.constexpr, DP: tl.constexpr, RB: tl.constexpr, TYPE: tl.constexpr, LAYOUT: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """Grid (B*H,): k, v (B,H,D) and x (B,H,R), what the index takes, at position lengths[bh]."""
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // H, bh % H
    n = tl.load(lengths + bh)
    page, d = n // 256, tl.arange(0, DP)
    cap = tl.load(table + page * 8 + 4)
    at = (bh * cap + n % 256) * D + d
    tl.store(entry(table, page, 0, TYPE) + at, tl.load(k + b * k_b + h * k_h + d, d < D), d < D)
    value = tl.load(v + b * v_b + h * v_h + d, d < D)
    tl.store(entry(table, page, 1, TYPE) + at, value, d < D)
    if MEAN:
        held = tl.load(mean + bh * D + d, d < D)
        held += tl.div_rn(value.to(tl.float32) - held, (n + 1 + d * 0).to(tl.float32))
        tl.store(mean + bh * D + d, held, d < D)
    if LAYOUT != 0:
        for mine in range(0, R, RB):
            j = mine + tl.arange(0, RB)
            new = tl.load(x + b * x_b + h * x_h + j, j < R, 0.0)
            if LAYOUT == 16:
                tl.store(entry(table, page, 2, TYPE) + (bh * R + j) * cap + n % 256, new, j < R)
            else:
                if n % 256 == 255:
                    encode(tail, table, page, bh, R, new, mine, RB, LAYOUT)
                tl.store(tail + (bh * R + j) * 256 + n % 256, new, j < R)
    tl.debug_barrier()
    tl.store(lengths + bh, n + 1)
