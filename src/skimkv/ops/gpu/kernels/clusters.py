"""SubGen's algorithm 1 (Zandieh et al. 2024) on the device: a token into clusters and reservoir, and z / tau.

The clusters lie in pages of PAGE_CLUSTERS, which a table finds: addresses of representatives, samples and sizes.
Random numbers are those of stores/clusters.py: a function of (seed, stream, token, head, slot).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .shared import (
    ALIGNMENT,
    COLUMN_REPRESENTATIVES,
    COLUMN_SAMPLES,
    COLUMN_SIZES,
    PAGE_CLUSTERS,
    constant,
    finite_maximum,
    is_last_program,
    load_query,
    merge_parts,
    page_capacity,
    page_start,
    product,
    sink_weight,
    store_part,
)

SLOT_BLOCK = constant(16)  # slots of the reservoir that a program writes at a time
CLUSTER_BLOCK = constant(32)  # representatives that it compares with the key at a time
SAMPLES_STREAM = constant(0)  # of random numbers: for the samples of clusters
RESERVOIR_STREAM = constant(1)
HASH_STEP = constant(0x9E3779B1)
HASH_FIRST = constant(0x85EBCA6B)
HASH_SECOND = constant(0xC2B2AE35)
WORD_RANGE = constant(4294967296.0)  # 2^32


@triton.jit
def mix(h):
    """Apply the finaliser of a 32-bit hash."""
    h = (h ^ (h >> 16)) * tl.full([], HASH_FIRST, tl.uint32)
    h = (h ^ (h >> 13)) * tl.full([], HASH_SECOND, tl.uint32)
    return h ^ (h >> 16)


@triton.jit
def hash_next(h, x):
    """Hash one more number x after those that h is the hash of."""
    return mix(h * tl.full([], HASH_STEP, tl.uint32) + x.to(tl.uint32))


@triton.jit
def coins(seed, stream: tl.constexpr, token, head, slot):
    """Return a random number for each slot, float64, uniform in [0,1)."""
    h = mix(tl.full([], 0, tl.uint32) + seed.to(tl.uint32))
    h = hash_next(hash_next(hash_next(h, tl.full([], stream, tl.int32)), token), head)
    return hash_next(h, slot).to(tl.float64) / WORD_RANGE


@triton.jit
def find_cluster(clusters, key, count, delta, bh, D: tl.constexpr, DP: tl.constexpr, TYPE: tl.constexpr):
    """Find the cluster of a key among `count`: the nearest representative's, or a new one if none is within delta.

    Returns its number, and whether it is new.
    """
    c, d = tl.arange(0, CLUSTER_BLOCK), tl.arange(0, DP)
    least, nearest = tl.full([], float("inf"), tl.float32), tl.full([], 0, tl.int32)
    within = tl.full([], 0, tl.int32)
    for i in range(0, count, CLUSTER_BLOCK):
        cluster = i + c
        real = cluster < count
        page = tl.where(real, cluster // PAGE_CLUSTERS, 0)
        row = bh * page_capacity(clusters.table, page) + cluster % PAGE_CLUSTERS
        source = page_start(clusters.table, page, COLUMN_REPRESENTATIVES, TYPE) + row * D
        source = tl.multiple_of(source[:, None] + d[None, :], (ALIGNMENT, ALIGNMENT))
        representative = tl.load(source, real[:, None] & (d < D)[None, :], 0.0).to(tl.float32)
        difference = representative - key.to(tl.float32)[None, :]
        distance = tl.sqrt_rn(tl.sum(difference * difference, 1))
        within += tl.sum(((distance <= delta) & real).to(tl.int32), 0)
        distance = tl.where(real & (distance == distance), distance, float("inf"))
        block_least, block_nearest = tl.min(distance, 0), i + tl.argmin(distance, 0)
        nearest = tl.where(block_least < least, block_nearest, nearest)
        least = tl.minimum(block_least, least)
    is_new = within == 0
    return tl.where(is_new, count, nearest), is_new


@triton.jit
def clusters_append_kernel(
    token, clusters, seed, delta, H,
    D: tl.constexpr, DP: tl.constexpr, TP: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Run UpdateSoftmaxNormalizer and UpdateMatrixProduct of algorithm 1 for one token of every row. Grid (B*H,)."""
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // H, (bh % H).to(tl.int32)
    T, S = clusters.t, clusters.s
    d, j = tl.arange(0, DP), tl.arange(0, TP)
    n, count = tl.load(clusters.lengths + bh), tl.load(clusters.m + bh).to(tl.int32)
    seed = tl.load(seed)
    key = tl.load(token.k + b * token.k_batch + h * token.k_head + d, d < D, 0.0)
    value = tl.load(token.v + b * token.v_batch + h * token.v_head + d, d < D, 0.0)
    cluster, is_new = find_cluster(clusters, key, count, delta, bh, D, DP, TYPE)
    page = cluster // PAGE_CLUSTERS
    row = bh * page_capacity(clusters.table, page) + cluster % PAGE_CLUSTERS
    size = page_start(clusters.table, page, COLUMN_SIZES, tl.int32) + row
    members = tl.load(size) + 1
    tl.debug_barrier()
    tl.store(size, members)
    if is_new:
        tl.store(page_start(clusters.table, page, COLUMN_REPRESENTATIVES, TYPE) + row * D + d, key, d < D)
        tl.store(clusters.m + bh, (count + 1).to(tl.int64))
    accepted = (coins(seed, SAMPLES_STREAM, n, h, j) < 1.0 / members.to(tl.float64)) & (j < T)
    target = page_start(clusters.table, page, COLUMN_SAMPLES, TYPE) + (row * T + j[:, None]) * D + d[None, :]
    tl.store(target, tl.broadcast_to(key[None, :], [TP, DP]), accepted[:, None] & (d < D)[None, :])
    norm = tl.sum(value.to(tl.float64) * value.to(tl.float64), 0)
    mu = tl.load(clusters.mu + bh) + norm
    probability = tl.where(mu > 0, norm / mu, 0.0)
    tl.debug_barrier()
    tl.store(clusters.mu + bh, mu)
    for i in range(0, S, SLOT_BLOCK):
        slot = i + tl.arange(0, SLOT_BLOCK)
        replaced = (coins(seed, RESERVOIR_STREAM, n, h, slot) < probability) & (slot < S)
        offset = (bh * S + slot[:, None]) * D + d[None, :]
        mask = replaced[:, None] & (d < D)[None, :]
        tl.store(clusters.k + offset, tl.broadcast_to(key[None, :], [SLOT_BLOCK, DP]), mask)
        tl.store(clusters.v + offset, tl.broadcast_to(value[None, :], [SLOT_BLOCK, DP]), mask)
    tl.store(clusters.lengths + bh, n + 1)


@triton.jit
def raise_maximum(logits, maximum):
    """Return the new maximum (GP,) after logits (GP,BLOCK), its finite form, and the factor for the sums so far."""
    new_maximum = tl.maximum(maximum, tl.max(logits, 1))
    reference = finite_maximum(new_maximum)
    return new_maximum, reference, tl.exp(maximum - reference)


@triton.jit
def clusters_kernel(
    query, clusters, splits,
    D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, SP: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr,
    DOT: tl.constexpr, TINY: tl.constexpr, LIMIT: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Run QueryStreamAttn of algorithm 1: y = z / tau, which stops at +-LIMIT; a tau below TINY counts as TINY.

    Entries 0 .. m*t-1 are the samples of clusters, the s after them those of the reservoir. Grid (B*H, splits).
    """
    bh, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    G, T, S = query.G, clusters.t, clusters.s
    samples = tl.load(clusters.m + bh).to(tl.int32) * T
    share = tl.cdiv(tl.cdiv(samples + S, splits.programs), BLOCK) * BLOCK
    start, stop = split * share, tl.minimum(samples + S, (split + 1) * share)
    d, t = tl.arange(0, DP), tl.arange(0, BLOCK)
    q = load_query(query.q, bh, G, D, GP, DP).to(DOT)
    maximum = tl.full([GP], float("-inf"), tl.float32)
    tau = tl.zeros([GP], tl.float32)
    z = tl.zeros([GP, DP], tl.float32)
    for i in range(start, tl.minimum(stop, samples), BLOCK):
        real = i + t < tl.minimum(stop, samples)
        cluster = tl.where(real, (i + t) // T, 0)
        page = cluster // PAGE_CLUSTERS
        row = bh * page_capacity(clusters.table, page) + cluster % PAGE_CLUSTERS
        source = page_start(clusters.table, page, COLUMN_SAMPLES, TYPE) + (row * T + (i + t) % T) * D
        source = tl.multiple_of(source[:, None] + d[None, :], (ALIGNMENT, ALIGNMENT))
        k = tl.load(source, real[:, None] & (d < D)[None, :], 0.0).to(DOT)
        size = tl.load(page_start(clusters.table, page, COLUMN_SIZES, tl.int32) + row, real, 0).to(tl.float32) / T
        logits = tl.dot(q, tl.trans(k), input_precision="tf32x3") * query.scale
        logits = tl.where(real[None, :], logits, float("-inf"))
        maximum, reference, shrink = raise_maximum(logits, maximum)
        weights = tl.where(real[None, :], tl.exp(logits - reference[:, None]) * size[None, :], 0.0)
        tau = tau * shrink + tl.sum(weights, 1)
        z = z * shrink[:, None]
    mu = tl.load(clusters.mu + bh)
    for i in range(tl.maximum(start, samples), stop, BLOCK):
        entry = i + t - samples
        mask = (entry < tl.minimum(stop - samples, S))[:, None] & (d < D)[None, :]
        offset = (bh * S + entry[:, None]) * D + d[None, :]
        k, v = tl.load(clusters.k + offset, mask, 0.0), tl.load(clusters.v + offset, mask, 0.0)
        norm = tl.sum(v.to(tl.float64) * v.to(tl.float64), 1)
        factor = tl.where(norm != 0, mu / (S * tl.where(norm != 0, norm, 1.0)), 0.0).to(tl.float32)
        logits = tl.dot(q, tl.trans(k.to(DOT)), input_precision="tf32x3") * query.scale
        logits = tl.where((norm != 0)[None, :], logits, float("-inf"))
        maximum, reference, shrink = raise_maximum(logits, maximum)
        weights = tl.where((norm != 0)[None, :], tl.exp(logits - reference[:, None]) * factor[None, :], 0.0)
        tau = tau * shrink
        z = z * shrink[:, None] + product(weights, v, DOT)
    store_part(splits, maximum, tau, z, bh, split, G, D, GP, DP)
    if is_last_program(splits.counter + bh, splits.programs):
        for head in range(0, G):
            head_maximum, head_tau, head_z = merge_parts(splits, bh, head, G, D, SP, DP)
            if SINKS:
                head_tau += sink_weight(query, bh, head, head_maximum)
            y = head_z / tl.where(head_tau < TINY, TINY, head_tau)
            y = tl.where(y > LIMIT, LIMIT, tl.where(y < -LIMIT, -LIMIT, y))  # a NaN passes
            tl.store(query.y + (bh * G + head) * D + d, y, d < D)
