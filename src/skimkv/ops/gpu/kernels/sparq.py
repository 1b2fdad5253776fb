"""SparQ step 1 over pages: the r channels, the temperature, and the logits with their running maximum and sum.

Tokens of the last page past the end are read too and dropped after the product: a mask along a run would break it up.
Where the scores are read: LAYOUT 0, whole rows of K (channels="none", and exact scores); 16 the channel-major copy in
the cache's type; 8 and 4 the codes, with the open group from the tail.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dense import capped, entry, product, query


@triton.jit
def magnitude(q, bh, at, G, D, GP: tl.constexpr):
    """Sum over the group of |q| in the channels `at`; a NaN counts as the largest."""
    g = tl.arange(0, GP)
    x = tl.load(q + (bh * G + g[:, None]) * D + at[None, :], (g < G)[:, None] & (at < D)[None, :], 0.0)
    x = tl.sum(tl.abs(x.to(tl.float32)), 0)
    return tl.where(x == x, x, float("inf"))


@triton.jit
def channels(q, bh, r, G, D, GP: tl.constexpr, DP: tl.constexpr):
    """i1 as a mask (DP,): the r largest, ties to the lower channel. SparQ sec. 4."""
    d = tl.arange(0, DP)
    mine = magnitude(q, bh, d, G, D, GP)
    rank = tl.zeros([DP], tl.int32)
    for start in range(0, D, 16):
        other = start + tl.arange(0, 16)
        theirs = magnitude(q, bh, other, G, D, GP)
        ahead = (theirs[None, :] > mine[:, None]) | ((theirs[None, :] == mine[:, None]) & (other[None, :] < d[:, None]))
        rank += tl.sum(ahead.to(tl.int32), 1)
    return (rank < r) & (d < D)


@triton.jit
def sharpness(x, chosen, scale, r, D, KIND: tl.constexpr):
    """1/tau per query head (GP,): 0 coverage (eq. 9), 1 sqrt_d, 2 sqrt_r. x (GP, DP), chosen (DP,) the mask of i1."""
    every = tl.sum(tl.abs(x), 1)
    if KIND == 0:
        part = tl.sum(tl.where(chosen[None, :], tl.abs(x), 0.0), 1)
        coverage = tl.where(every > 0, part / every, 1.0)
        return scale / tl.sqrt(tl.where((part > 0) | (part != part), coverage, 1.0))
    if KIND == 1:
        return every * 0 + scale
    return every * 0 + scale * tl.sqrt(tl.full([1], D, tl.float32) / r)


@triton.jit
def keep(logits, out, i, n, m, l, softcap, bh, G, width, GP: tl.constexpr, BN: tl.constexpr, CAPPED: tl.constexpr):
    """Store the logits of positions i .. i+BN-1, and carry their maximum and sum."""
    g, t = tl.arange(0, GP), tl.arange(0, BN)
    logits = capped(logits, softcap, CAPPED)
    held = i + t < n
    at = out + (bh * G + g[:, None]) * width + (i + t)[None, :]
    tl.store(tl.multiple_of(at, (16, 16)), logits, (g < G)[:, None])
    logits = tl.where(held[None, :], logits, float("-inf"))
    top = tl.maximum(m, tl.max(logits, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)
    return top, l * tl.exp(m - safe) + tl.sum(tl.exp(logits - safe[:, None]), 1)


@triton.jit
def scores(
    q, table, lengths, tail, out, stats, scale, softcap, bh, s, S, r, R, G, width,
    D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, RP: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    TYPE: tl.constexpr, DOT: tl.constexpr, LAYOUT: tl.constexpr, KIND: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Split s of S: logits (B*H, G, width) float32, and stats (B*H, S, G, 2), their maximum and sum.

    r = 0: all D channels of q, unchanged (exact scores, and projected queries).
    """
    n = tl.load(lengths + bh)
    share = tl.cdiv(tl.cdiv(n, 256), S) * 256
    start, stop = s * share, tl.minimum(n, (s + 1) * share)
    g, d, t, j = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, BN), tl.arange(0, RP)
    x = query(q, bh, G, D, GP, DP).to(tl.float32)
    chosen = d < D
    sharp = tl.sum(x, 1) * 0 + scale
    if r > 0:
        chosen = channels(q, bh, r, G, D, GP, DP)
        sharp = sharpness(x, chosen, scale, r, D, KIND)
    m = tl.full([GP], float("-inf"), tl.float32)
    l = tl.zeros([GP], tl.float32)
    if LAYOUT == 0:
        part = tl.where(chosen[None, :], x, 0.0).to(DOT)
        for i in tl.range(start, stop, BN, num_stages=STAGES):
            row = (bh * tl.load(table + i // 256 * 8 + 4) + i % 256) * D
            at = entry(table, i // 256, 0, TYPE) + row + t[:, None] * D + d[None, :]
            k = tl.load(tl.multiple_of(at, (16, 16)), (i + t < n)[:, None] & (d < D)[None, :], 0.0)
            k = tl.where(chosen[None, :], k, 0.0).to(DOT)
            logits = tl.dot(part, tl.trans(k), input_precision="tf32x3") * sharp[:, None]
            m, l = keep(logits, out, i, n, m, l, softcap, bh, G, width, GP, BN, CAPPED)
    else:
        order = tl.cumsum(chosen.to(tl.int32), 0) - 1
        i1 = tl.sum(tl.where(chosen[None, :] & (order[None, :] == j[:, None]), d[None, :], 0), 1)  # (RP,) ascending
        real = j < tl.sum(chosen.to(tl.int32), 0)
        part = tl.load(q + (bh * G + g[:, None]) * D + i1[None, :], (g < G)[:, None] & real[None, :], 0.0)
        closed = n if LAYOUT == 16 else n // 256 * 256
        for i in tl.range(start, tl.minimum(stop, closed), BN, num_stages=STAGES):
            cap = tl.load(table + i // 256 * 8 + 4)
            row = bh * R + i1[:, None]
            if LAYOUT == 16:
                at = entry(table, i // 256, 2, TYPE) + row * cap + (i % 256 + t[None, :])
                codes = tl.load(tl.multiple_of(at, (16, 16)), real[:, None], 0.0)
                logits = tl.dot(part.to(DOT), codes.to(DOT), input_precision="tf32x3")
            else:
                if LAYOUT == 8:
                    at = entry(table, i // 256, 2, tl.uint8) + row * cap + (i % 256 + t[None, :])
                    codes = tl.load(tl.multiple_of(at, (16, 16)), real[:, None], 0).to(tl.int32)
                else:
                    w = tl.arange(0, BN // 8)  # dword 16*block + token%16 of the tile
                    at = entry(table, i // 256, 2, tl.int32) + row * (cap // 8) + (i % 256 // 8 + w[None, :])
                    packed = tl.load(tl.multiple_of(at, (16, 16)), real[:, None], 0)
                    packed = packed.reshape(RP, BN // 128, 1, 16)
                    nibble = 4 * tl.arange(0, 8)[None, None, :, None]
                    codes = ((packed >> nibble) & 15).reshape(RP, BN)
                at = entry(table, i // 256, 3, tl.float32) + (bh * R + i1) * 2 * (cap // 256)
                step = tl.load(at, real, 0.0)
                zero = tl.load(at + cap // 256, real, 0.0)
                logits = product(part.to(tl.float32) * step[None, :], codes.to(tl.float32), DOT)
                logits += tl.sum(part.to(tl.float32) * zero[None, :], 1)[:, None]
            m, l = keep(logits * sharp[:, None], out, i, n, m, l, softcap, bh, G, width, GP, BN, CAPPED)
        if LAYOUT != 16 and stop > closed:
            for i in range(tl.maximum(closed, start), stop, BN):
                at = tail + (bh * R + i1[:, None]) * 256 + (i % 256 + t[None, :])
                k = tl.load(tl.multiple_of(at, (16, 16)), real[:, None], 0.0)
                logits = tl.dot(part.to(DOT), k.to(DOT), input_precision="tf32x3") * sharp[:, None]
                m, l = keep(logits, out, i, n, m, l, softcap, bh, G, width, GP, BN, CAPPED)
    at = stats + ((bh * S + s) * G + g) * 2
    tl.store(at, m, g < G)
    tl.store(at + 1, l, g < G)


@triton.jit
def scores_kernel(
    q, table, lengths, tail, out, stats, scale, softcap, S, r, R, G, width,
    D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, RP: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    TYPE: tl.constexpr, DOT: tl.constexpr, LAYOUT: tl.constexpr, KIND: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Grid (B*H, S)."""
    bh, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scores(
        q, table, lengths, tail, out, stats, scale, softcap, bh, s, S, r, R, G, width,
        D, GP, DP, RP, BN, STAGES, TYPE, DOT, LAYOUT, KIND, CAPPED,
    )  # fmt: skip
