"""SubGen's algorithm 1 on the device: a token into the clusters and the reservoir, and the estimate z / tau.

A table with one row per 8 clusters says where they lie: addresses of representatives, samples and sizes of KV head 0,
and the clusters in their block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dense import entry, last, leave, merged, product, query


@triton.jit
def mix(h):
    """clusters._mix in 32 bits."""
    h = (h ^ (h >> 16)) * tl.full([], 0x85EBCA6B, tl.uint32)
    h = (h ^ (h >> 13)) * tl.full([], 0xC2B2AE35, tl.uint32)
    return h ^ (h >> 16)


@triton.jit
def stir(h, x):
    return mix(h * tl.full([], 0x9E3779B1, tl.uint32) + x.to(tl.uint32))


@triton.jit
def coins(seed, stream, token, head, slot):
    """clusters.coins: float64 in [0,1), a function of (seed, stream, token, head, slot)."""
    h = mix(tl.full([], 0, tl.uint32) + seed.to(tl.uint32))
    h = stir(stir(stir(h, tl.full([], stream, tl.int32)), token), head)
    return stir(h, slot).to(tl.float64) / 4294967296.0


@triton.jit
def stream_append_kernel(
    k, v, table, lengths, m, mu, keys, values, seed, delta, k_b, k_h, v_b, v_h, H, T, S,
    D: tl.constexpr, DP: tl.constexpr, TP: tl.constexpr, SB: tl.constexpr, BC: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Grid (B*H,): UpdateSoftmaxNormalizer and UpdateMatrixProduct for one token. T samples a cluster, S in M."""
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // H, (bh % H).to(tl.int32)
    d, c, j = tl.arange(0, DP), tl.arange(0, BC), tl.arange(0, TP)
    n, clusters = tl.load(lengths + bh), tl.load(m + bh).to(tl.int32)
    seed = tl.load(seed)
    key = tl.load(k + b * k_b + h * k_h + d, d < D, 0.0)
    value = tl.load(v + b * v_b + h * v_h + d, d < D, 0.0)
    best, nearest = tl.full([], float("inf"), tl.float32), tl.full([], 0, tl.int32)
    within = tl.full([], 0, tl.int32)
    for i in range(0, clusters, BC):
        mine = i + c
        real = mine < clusters
        unit = tl.where(real, mine // 8, 0)
        at = entry(table, unit, 0, TYPE) + (bh * tl.load(table + unit * 8 + 3) + mine % 8) * D
        at = tl.multiple_of(at[:, None] + d[None, :], (16, 16))
        rep = tl.load(at, real[:, None] & (d < D)[None, :], 0.0).to(tl.float32)
        apart = rep - key.to(tl.float32)[None, :]
        distance = tl.sqrt_rn(tl.sum(apart * apart, 1))
        within += tl.sum(((distance <= delta) & real).to(tl.int32), 0)
        distance = tl.where(real & (distance == distance), distance, float("inf"))
        here, where = tl.min(distance, 0), i + tl.argmin(distance, 0)
        nearest = tl.where(here < best, where, nearest)
        best = tl.minimum(here, best)
    founds = within == 0
    cluster = tl.where(founds, clusters, nearest)
    unit = cluster // 8
    row = bh * tl.load(table + unit * 8 + 3) + cluster % 8
    size = entry(table, unit, 2, tl.int32) + row
    members = tl.load(size) + 1
    tl.debug_barrier()
    tl.store(size, members)
    if founds:
        tl.store(entry(table, unit, 0, TYPE) + row * D + d, key, d < D)
        tl.store(m + bh, (clusters + 1).to(tl.int64))
    accepted = (coins(seed, 0, n, h, j) < 1.0 / members.to(tl.float64)) & (j < T)
    at = entry(table, unit, 1, TYPE) + (row * T + j[:, None]) * D + d[None, :]
    tl.store(at, tl.broadcast_to(key[None, :], [TP, DP]), accepted[:, None] & (d < D)[None, :])
    norm = tl.sum(value.to(tl.float64) * value.to(tl.float64), 0)
    total = tl.load(mu + bh) + norm
    share = tl.where(total > 0, norm / total, 0.0)
    tl.debug_barrier()
    tl.store(mu + bh, total)
    for i in range(0, S, SB):
        slot = i + tl.arange(0, SB)
        won = (coins(seed, 1, n, h, slot) < share) & (slot < S)
        to = (bh * S + slot[:, None]) * D + d[None, :]
        mask = won[:, None] & (d < D)[None, :]
        tl.store(keys + to, tl.broadcast_to(key[None, :], [SB, DP]), mask)
        tl.store(values + to, tl.broadcast_to(value[None, :], [SB, DP]), mask)
    tl.store(lengths + bh, n + 1)


@triton.jit
def raised(z, m):
    """New maximum, its finite form, and the factor for what was summed before."""
    top = tl.maximum(m, tl.max(z, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)
    return top, safe, tl.exp(m - safe)


@triton.jit
def stream_kernel(
    q, y, table, m, mu, keys, values, part, counter, scale, G, T, M, S,
    D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, SP: tl.constexpr, BN: tl.constexpr, TYPE: tl.constexpr,
    DOT: tl.constexpr, TINY: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Grid (B*H, S): QueryStreamAttn. Entries 0 .. clusters*T-1 are samples, the M after them the reservoir's."""
    bh, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    samples = tl.load(m + bh).to(tl.int32) * T
    share = tl.cdiv(tl.cdiv(samples + M, S), BN) * BN
    start, stop = s * share, tl.minimum(samples + M, (s + 1) * share)
    d, t = tl.arange(0, DP), tl.arange(0, BN)
    x = query(q, bh, G, D, GP, DP).to(DOT)
    top = tl.full([GP], float("-inf"), tl.float32)
    tau = tl.zeros([GP], tl.float32)
    z = tl.zeros([GP, DP], tl.float32)
    for i in range(start, tl.minimum(stop, samples), BN):
        real = i + t < tl.minimum(stop, samples)
        cluster = tl.where(real, (i + t) // T, 0)
        unit = cluster // 8
        row = bh * tl.load(table + unit * 8 + 3) + cluster % 8
        at = entry(table, unit, 1, TYPE) + (row * T + (i + t) % T) * D
        at = tl.multiple_of(at[:, None] + d[None, :], (16, 16))
        k = tl.load(at, real[:, None] & (d < D)[None, :], 0.0).to(DOT)
        size = tl.load(entry(table, unit, 2, tl.int32) + row, real, 0).to(tl.float32) / T
        logits = tl.dot(x, tl.trans(k), input_precision="tf32x3") * scale
        top, safe, shrink = raised(tl.where(real[None, :], logits, float("-inf")), top)
        p = tl.where(real[None, :], tl.exp(logits - safe[:, None]) * size[None, :], 0.0)
        tau = tau * shrink + tl.sum(p, 1)
        z = z * shrink[:, None]
    total = tl.load(mu + bh)
    for i in range(tl.maximum(start, samples), stop, BN):
        e = i + t - samples
        mask = (e < tl.minimum(stop - samples, M))[:, None] & (d < D)[None, :]
        at = (bh * M + e[:, None]) * D + d[None, :]
        k, v = tl.load(keys + at, mask, 0.0), tl.load(values + at, mask, 0.0)
        norm = tl.sum(v.to(tl.float64) * v.to(tl.float64), 1)
        weight = tl.where(norm != 0, total / (M * tl.where(norm != 0, norm, 1.0)), 0.0).to(tl.float32)
        logits = tl.dot(x, tl.trans(k.to(DOT)), input_precision="tf32x3") * scale
        top, safe, shrink = raised(tl.where((norm != 0)[None, :], logits, float("-inf")), top)
        p = tl.where((norm != 0)[None, :], tl.exp(logits - safe[:, None]) * weight[None, :], 0.0)
        tau = tau * shrink
        z = z * shrink[:, None] + product(p, v, DOT)
    leave(part, top, tau, z, bh, s, S, G, D, GP, DP)
    if last(counter + bh, S):
        for one in range(0, G):
            _, below, above = merged(part, bh, one, S, G, D, SP, DP)
            mean = above / tl.where(below < TINY, TINY, below)
            mean = tl.where(mean > LIMIT, LIMIT, tl.where(mean < -LIMIT, -LIMIT, mean))  # a NaN passes
            tl.store(y + (bh * G + one) * D + d, mean, d < D)
