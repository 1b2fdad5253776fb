"""One step over slots in one launch: attend to them and the current token, update the scores, replace a victim.

H2O (scored), LM-Infinite and SubGen's k-centre form (rings). Slots are split; the program that arrives last merges.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dense import capped, last, leave, merged, online, query


@triton.jit
def victim(score, pos, base, C, now, recent, TILE: tl.constexpr):
    """The lowest score outside the recent window and its slot; of equals the first."""
    t = tl.arange(0, TILE)
    lowest, slot = tl.full([], float("inf"), tl.float32), tl.full([], 0, tl.int32)
    for i in range(0, C, TILE):
        inside = i + t < C
        p = tl.load(pos + base + i + t, inside, -1)
        x = tl.load(score + base + i + t, inside, float("inf"))
        x = tl.where((p > now - recent) | (p < 0), float("inf"), x)
        here, at = tl.min(x, 0), i + tl.argmin(x, 0)
        slot = tl.where(here < lowest, at, slot)
        lowest = tl.minimum(here, lowest)
    return lowest, slot


@triton.jit
def slots_kernel(
    q, y, k, v, score, pos, k_new, v_new, lengths, filled, limits, order, logits, part, counter, scale, softcap,
    k_b, k_h, v_b, v_h, B, H, G, S, C, width, fixed,
    D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, SP: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, DOT: tl.constexpr, SCORED: tl.constexpr, ORDERED: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Grid (B*H, S). Reads 2CD; scores (B,H,C) take the mean over the group of the weights."""
    bh, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = bh // H, bh % H
    n, held = tl.load(lengths + bh), tl.load(filled + bh)
    share = tl.cdiv(tl.cdiv(held, S), BN) * BN
    start, stop = s * share, tl.minimum(held, (s + 1) * share)
    g, d, t = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, BN)
    x = query(q, bh, G, D, GP, DP).to(DOT)
    m = tl.full([GP], float("-inf"), tl.float32)
    l = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    for i in tl.range(start, stop, BN, num_stages=STAGES):
        at = (bh * C + i) * D + t[:, None] * D + d[None, :]
        mask = (i + t < held)[:, None] & (d < D)[None, :]
        keys = tl.load(k + at, mask, 0.0)
        values = tl.load(v + at, mask, 0.0)
        z = capped(tl.dot(x, tl.trans(keys.to(DOT)), input_precision="tf32x3") * scale, softcap, CAPPED)
        if SCORED:
            tl.store(logits + (bh * G + g[:, None]) * width + (i + t)[None, :], z, (g < G)[:, None])
        m, l, acc = online(tl.where((i + t < held)[None, :], z, float("-inf")), values, m, l, acc, DOT)
    leave(part, m, l, acc, bh, s, S, G, D, GP, DP)
    if last(counter + bh, S):
        key = tl.load(k_new + b * k_b + h * k_h + d, d < D, 0.0)
        value = tl.load(v_new + b * v_b + h * v_h + d, d < D, 0.0)
        c = tl.arange(0, TILE)
        mine = tl.full([], 0.0, tl.float32)
        for one in range(0, G):
            top, total, values = merged(part, bh, one, S, G, D, SP, DP)
            ask = tl.load(q + (bh * G + one) * D + d, d < D, 0.0).to(tl.float32)
            z = capped(tl.sum(ask * key.to(tl.float32), 0) * scale, softcap, CAPPED)
            higher = tl.maximum(top, z)
            higher = tl.where(higher == float("-inf"), 0.0, higher)
            old, new = tl.exp(top - higher), tl.exp(z - higher)
            total = total * old + new
            tl.store(y + (bh * G + one) * D + d, (values * old + new * value.to(tl.float32)) / total, d < D)
            mine += new / total / G
            if SCORED:
                for i in range(0, held, TILE):
                    at = score + bh * C + i + c
                    w = tl.load(logits + (bh * G + one) * width + i + c, i + c < held, float("-inf"))
                    sums = tl.load(at, i + c < held, 0.0)
                    tl.store(at, sums + tl.exp(w - higher) / total / G, i + c < held)
                tl.debug_barrier()
        slot, lost = n, False
        if SCORED:
            if held < tl.load(limits + b):
                slot = held
                held += 1
            else:
                recent = tl.load(limits + B + b)
                lowest, slot = victim(score, pos, bh * C, C, n, recent, TILE)
                lost = (recent == 0) & (mine < lowest)  # alg. 1 drops one of S and i, here perhaps i itself
        else:
            if ORDERED:
                slot = tl.load(order + n)
            elif n >= C:
                slot = fixed + (n - fixed) % (C - fixed)
            held = tl.minimum(n + 1, C)
        to = (bh * C + slot) * D + d
        if not lost:
            tl.store(k + to, key, d < D)
            tl.store(v + to, value, d < D)
            if SCORED:
                tl.store(score + bh * C + slot, mine)
                tl.store(pos + bh * C + slot, n)
        tl.store(lengths + bh, n + 1)
        tl.store(filled + bh, held)
