"""Step 1 of SparQ's algorithm 1 on matrix units: the r largest channels of |q|, and approximate logits from them.

Small groups of query heads do without matrix units: see channels.py.

Kept of the logits: all of them, and for each split their maximum and the sum of their exponentials. With r = 0 all
channels score, at the method's own scale: exact scores for TopK, and projected queries for LowRank.
Tokens of the last page past the end are read too, and dropped after the product: a mask along a run would break it up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import TEMPERATURES
from .shared import (
    ALIGNMENT,
    CHANNEL_BLOCK,
    COLUMN_INDEX,
    COLUMN_K,
    COLUMN_SCALE,
    INT4_BITS,
    INT4_CODES,
    INT4_LANES,
    INT4_MASK,
    LAYOUT_COPY,
    LAYOUT_INT8,
    LAYOUT_ROWS,
    PAGE_TOKENS,
    apply_softcap,
    constant,
    finite_maximum,
    in_two,
    load_query,
    page_capacity,
    page_start,
    table_of,
)

# How the logits of r channels are scaled: 1/tau.
TEMPERATURE_COVERAGE = constant(TEMPERATURES["coverage"])  # tau = sqrt(D |q[i1]|_1 / |q|_1), equation 9
TEMPERATURE_SQRT_D = constant(TEMPERATURES["sqrt_d"])
TEMPERATURE_SQRT_R = constant(TEMPERATURES["sqrt_r"])


@triton.jit
def channel_weight(q, bh, channel, G, D, GP: tl.constexpr):
    """Sum |q| over the group in these channels; a NaN counts as the largest."""
    g = tl.arange(0, GP)
    mask = (g < G)[:, None] & (channel < D)[None, :]
    x = tl.load(q + (bh * G + g[:, None]) * D + channel[None, :], mask, 0.0)
    weight = tl.sum(tl.abs(x.to(tl.float32)), 0)
    return tl.where(weight == weight, weight, float("inf"))


@triton.jit
def top_channels(q, bh, r, G, D, GP: tl.constexpr, DP: tl.constexpr):
    """Choose i1 of algorithm 1, grouped as in section 4, as a mask (DP,): the r largest channels, ties to the lower."""
    d = tl.arange(0, DP)
    weight = channel_weight(q, bh, d, G, D, GP)
    rank = tl.zeros([DP], tl.int32)
    for start in range(0, D, CHANNEL_BLOCK):
        other = start + tl.arange(0, CHANNEL_BLOCK)
        other_weight = channel_weight(q, bh, other, G, D, GP)
        ahead = other_weight[None, :] > weight[:, None]
        ahead |= (other_weight[None, :] == weight[:, None]) & (other[None, :] < d[:, None])
        rank += tl.sum(ahead.to(tl.int32), 1)
    return (rank < r) & (d < D)


@triton.jit
def inverse_temperature(q, chosen, scale, r, D, TEMPERATURE: tl.constexpr):
    """Return 1/tau for each query head (GP,), scale being 1/sqrt(D). q (GP,DP), chosen (DP,) the mask of i1."""
    whole = tl.sum(tl.abs(q), 1)
    if TEMPERATURE == TEMPERATURE_COVERAGE:
        part = tl.sum(tl.where(chosen[None, :], tl.abs(q), 0.0), 1)
        coverage = tl.where(whole > 0, part / whole, 1.0)
        return scale / tl.sqrt(tl.where((part > 0) | (part != part), coverage, 1.0))
    if TEMPERATURE == TEMPERATURE_SQRT_D:
        return whole * 0 + scale
    return whole * 0 + scale * tl.sqrt(tl.full([1], D, tl.float32) / r)


@triton.jit
def store_logits(
    logits, query, scores, i, n, maximum, total, bh, GP: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr
):
    """Store the logits (BLOCK,GP) of positions i .. i+BLOCK-1, and carry their maximum and sum (GP,)."""
    g, t = tl.arange(0, GP), tl.arange(0, BLOCK)
    logits = apply_softcap(logits, query.softcap, CAPPED)
    target = scores.logits + (bh * query.G + g[None, :]) * scores.width + (i + t)[:, None]
    tl.store(tl.multiple_of(target, (ALIGNMENT, ALIGNMENT)), logits, (g < query.G)[None, :])
    logits = tl.where((i + t < n)[:, None], logits, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(logits, 0))
    reference = finite_maximum(new_maximum)
    return new_maximum, total * tl.exp(maximum - reference) + tl.sum(tl.exp(logits - reference[None, :]), 0)


@triton.jit
def load_codes(
    table, page, base, offset, row, capacity, real, RP: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr
):
    """Load the codes of BLOCK tokens from `offset` in the page on, of channels `row` (RP,1): (RP,BLOCK) int32."""
    if LAYOUT == LAYOUT_INT8:
        t = tl.arange(0, BLOCK)
        source = page_start(table, page, COLUMN_INDEX, tl.uint8, base) + row * capacity + (offset + t[None, :])
        return tl.load(tl.multiple_of(source, (ALIGNMENT, ALIGNMENT)), real[:, None], 0).to(tl.int32)
    w = tl.arange(0, BLOCK // INT4_CODES)
    source = page_start(table, page, COLUMN_INDEX, tl.int32, base) + row * (capacity // INT4_CODES)
    source += offset // INT4_CODES + w[None, :]
    dwords = tl.load(tl.multiple_of(source, (ALIGNMENT, ALIGNMENT)), real[:, None], 0)
    dwords = dwords.reshape(RP, BLOCK // (INT4_CODES * INT4_LANES), 1, INT4_LANES)
    shift = INT4_BITS * tl.arange(0, INT4_CODES)[None, None, :, None]
    return ((dwords >> shift) & INT4_MASK).reshape(RP, BLOCK)


@triton.jit
def scores_kernel(
    query, pages, scores,
    D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, RP: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    TYPE: tl.constexpr, DOT: tl.constexpr, LAYOUT: tl.constexpr, TEMPERATURE: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Store the logits of one split of the positions, their maximum and the sum of their exponentials, in `scores`.

    Grid (B*H, splits).
    """
    bh, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    G, R, r = query.G, pages.R, scores.r
    n = tl.load(pages.lengths + bh)
    table, place = table_of(pages, bh)
    share = tl.cdiv(tl.cdiv(n, PAGE_TOKENS), scores.splits) * PAGE_TOKENS
    start, stop = split * share, tl.minimum(n, (split + 1) * share)
    g, d, t, j = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, BLOCK), tl.arange(0, RP)
    q = load_query(query.q, bh, G, D, GP, DP).to(tl.float32)
    chosen = d < D
    scale = tl.sum(q, 1) * 0 + query.scale
    if r > 0:
        chosen = top_channels(query.q, bh, r, G, D, GP, DP)
        scale = inverse_temperature(q, chosen, query.scale, r, D, TEMPERATURE)
    maximum = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    if LAYOUT == LAYOUT_ROWS:
        part = tl.where(chosen[None, :], q, 0.0).to(DOT)
        for i in tl.range(start, stop, BLOCK, num_stages=STAGES):
            page = i // PAGE_TOKENS
            row = (place * page_capacity(table, page) + i % PAGE_TOKENS) * D
            source = page_start(table, page, COLUMN_K, TYPE, pages.base) + row + t[:, None] * D + d[None, :]
            mask = (i + t < n)[:, None] & (d < D)[None, :]
            k = tl.load(tl.multiple_of(source, (ALIGNMENT, ALIGNMENT)), mask, 0.0)
            k = tl.where(chosen[None, :], k, 0.0).to(DOT)
            logits = tl.dot(k, tl.trans(part), input_precision="tf32x3") * scale[None, :]
            maximum, total = store_logits(logits, query, scores, i, n, maximum, total, bh, GP, BLOCK, CAPPED)
    else:
        order = tl.cumsum(chosen.to(tl.int32), 0) - 1
        i1 = tl.sum(tl.where(chosen[None, :] & (order[None, :] == j[:, None]), d[None, :], 0), 1)  # (RP,) ascending
        real = j < tl.sum(chosen.to(tl.int32), 0)
        mask = (g < G)[:, None] & real[None, :]
        part = tl.trans(tl.load(query.q + (bh * G + g[:, None]) * D + i1[None, :], mask, 0.0))  # (RP,GP)
        closed = n if LAYOUT == LAYOUT_COPY else n // PAGE_TOKENS * PAGE_TOKENS
        for i in tl.range(start, tl.minimum(stop, closed), BLOCK, num_stages=STAGES):
            page = i // PAGE_TOKENS
            capacity = page_capacity(table, page)
            row = place * R + i1[:, None]
            if LAYOUT == LAYOUT_COPY:
                source = page_start(table, page, COLUMN_INDEX, TYPE, pages.base) + (place * R + i1[None, :]) * capacity
                source += i % PAGE_TOKENS + t[:, None]
                k = tl.load(tl.multiple_of(source, (ALIGNMENT, ALIGNMENT)), real[None, :], 0.0)
                logits = tl.dot(k.to(DOT), part.to(DOT), input_precision="tf32x3")
            else:
                codes = load_codes(table, page, pages.base, i % PAGE_TOKENS, row, capacity, real, RP, BLOCK, LAYOUT)
                groups = capacity // PAGE_TOKENS
                source = page_start(table, page, COLUMN_SCALE, tl.float32, pages.base) + (place * R + i1) * 2 * groups
                step = tl.load(source, real, 0.0)
                zero = tl.load(source + groups, real, 0.0)
                codes = tl.trans(codes).to(DOT)
                high, low = in_two(part.to(tl.float32) * step[:, None], DOT)
                logits = tl.dot(codes, high, input_precision="tf32x3")
                if tl.float32 != DOT:
                    logits += tl.dot(codes, low, input_precision="tf32x3")
                logits += tl.sum(part.to(tl.float32) * zero[:, None], 0)[None, :]
            logits = logits * scale[None, :]
            maximum, total = store_logits(logits, query, scores, i, n, maximum, total, bh, GP, BLOCK, CAPPED)
        if LAYOUT != LAYOUT_COPY and stop > closed:
            for i in range(tl.maximum(closed, start), stop, BLOCK):
                source = pages.tail + (bh * R + i1[:, None]) * PAGE_TOKENS + (i % PAGE_TOKENS + t[None, :])
                k = tl.load(tl.multiple_of(source, (ALIGNMENT, ALIGNMENT)), real[:, None], 0.0)
                logits = tl.dot(tl.trans(k.to(DOT)), part.to(DOT), input_precision="tf32x3") * scale[None, :]
                maximum, total = store_logits(logits, query, scores, i, n, maximum, total, bh, GP, BLOCK, CAPPED)
    stats = scores.stats + ((bh * scores.splits + split) * G + g) * 2
    tl.store(stats, maximum, g < G)
    tl.store(stats + 1, total, g < G)
