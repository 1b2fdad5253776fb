"""Step 3 of SparQ's algorithm 1: attend to the chosen positions, and give v_mean the rest of the weight.

TopK (FlexGen's, Sheng et al. 2023) and LowRank (figure 7a of SparQ) attend in the same way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import launch
from .choose import normaliser
from .shared import (
    ALIGNMENT,
    COLUMN_K,
    COLUMN_V,
    PAGE_TOKENS,
    apply_softcap,
    constant,
    finite_maximum,
    load_query,
    online_softmax,
    page_capacity,
    page_start,
    product,
    sink_weight,
    table_of,
)

MASS_BLOCK = constant(launch.MASS_BLOCK)


@triton.jit
def chosen_position(chosen, i, n, recent, count):
    """Return the i-th of `count` positions, the `recent` last ones and then the chosen ones; 0 beyond them."""
    p = tl.load(chosen + (i - recent), (i >= recent) & (i < count), 0)
    p = tl.where(i < recent, n - 1 - i, p)
    return tl.where(i < count, p, 0)


@triton.jit
def chosen_mass(query, scores, chosen, bh, n, recent, count, GP: tl.constexpr, SP: tl.constexpr, SINKS: tl.constexpr):
    """Return alpha of every query head (GP,): the sum of s_hat over `count` positions and the sink."""
    g, e = tl.arange(0, GP), tl.arange(0, MASS_BLOCK)
    alpha = tl.zeros([GP], tl.float32)
    for head in range(0, query.G):
        reference, total, mass = normaliser(query, scores, bh, tl.arange(0, 1) + head, SP, SINKS)
        for i in range(0, count, MASS_BLOCK):
            p = chosen_position(chosen, i + e, n, recent, count)
            rough = tl.load(scores.logits + (bh * query.G + head) * scores.width + p, i + e < count, float("-inf"))
            mass += tl.sum(tl.exp(rough - reference), 0)
        alpha = tl.where(g == head, mass / total, alpha)
    return alpha


@triton.jit
def load_rows(pages, table, place, p, mask, D, DP: tl.constexpr, COLUMN: tl.constexpr, TYPE: tl.constexpr):
    """Load the rows of K or V at positions p: (BLOCK,DP), zero where masked."""
    page, d = p // PAGE_TOKENS, tl.arange(0, DP)
    row = (place * page_capacity(table, page) + p % PAGE_TOKENS) * D
    source = (page_start(table, page, COLUMN, TYPE, pages.base) + row)[:, None] + d[None, :]
    return tl.load(tl.multiple_of(source, (ALIGNMENT, ALIGNMENT)), mask, 0.0)


@triton.jit
def attend_as_group(
    query, pages, scores, chosen, bh, n, recent, count,
    D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, SP: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    TYPE: tl.constexpr, DOT: tl.constexpr, RENORMALISE: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Return the values of `count` positions for all query heads (GP,DP), on matrix units."""
    g, d, e = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, BLOCK)
    table, place = table_of(pages, bh)
    if RENORMALISE:
        q = load_query(query.q, bh, query.G, D, GP, DP).to(DOT)
    else:
        reference, norm, _ = normaliser(query, scores, bh, g, SP, SINKS)
    maximum = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    values = tl.zeros([GP, DP], tl.float32)
    for i in tl.range(0, count, BLOCK, num_stages=STAGES):
        real = i + e < count
        p = chosen_position(chosen, i + e, n, recent, count)
        mask = real[:, None] & (d < D)[None, :]
        v = load_rows(pages, table, place, p, mask, D, DP, COLUMN_V, TYPE)
        if RENORMALISE:
            k = load_rows(pages, table, place, p, mask, D, DP, COLUMN_K, TYPE)
            logits = tl.dot(q, tl.trans(k.to(DOT)), input_precision="tf32x3") * query.scale
            logits = tl.where(real[None, :], apply_softcap(logits, query.softcap, CAPPED), float("-inf"))
            maximum, total, values = online_softmax(logits, v, maximum, total, values, DOT)
        else:
            inside = (g < query.G)[:, None] & real[None, :]
            source = scores.logits + (bh * query.G + g[:, None]) * scores.width + p[None, :]
            rough = tl.load(source, inside, float("-inf"))
            s_hat = tl.where(inside, tl.exp(rough - reference[:, None]) / norm[:, None], 0.0)
            values += product(s_hat, v, DOT)
    if RENORMALISE:
        if SINKS:
            total += sink_weight(query, bh, g, maximum)
        values = values / total[:, None]
    return values


@triton.jit
def attend_alone(
    query, pages, scores, chosen, bh, n, recent, count,
    D: tl.constexpr, DP: tl.constexpr, SP: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, TYPE: tl.constexpr,
    RENORMALISE: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Return the values of `count` positions for the only query head (1,DP), without matrix units."""
    d, e, one = tl.arange(0, DP), tl.arange(0, BLOCK), tl.arange(0, 1)
    table, place = table_of(pages, bh)
    if RENORMALISE:
        q = tl.load(query.q + bh * D + d, d < D, 0.0).to(tl.float32)
    else:
        reference, norm, _ = normaliser(query, scores, bh, one, SP, SINKS)
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    values = tl.zeros([BLOCK, DP], tl.float32)  # every thread adds up its own rows: they are summed in the end
    for i in tl.range(0, count, BLOCK, num_stages=STAGES):
        real = i + e < count
        p = chosen_position(chosen, i + e, n, recent, count)
        mask = real[:, None] & (d < D)[None, :]
        v = load_rows(pages, table, place, p, mask, D, DP, COLUMN_V, TYPE).to(tl.float32)
        if RENORMALISE:
            k = load_rows(pages, table, place, p, mask, D, DP, COLUMN_K, TYPE).to(tl.float32)
            logits = tl.sum(k * q[None, :], 1) * query.scale
            logits = tl.where(real, apply_softcap(logits, query.softcap, CAPPED), float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(logits, 0))
            reference = finite_maximum(new_maximum)
            weights, shrink = tl.exp(logits - reference), tl.exp(maximum - reference)
            maximum, total = new_maximum, total * shrink + tl.sum(weights, 0)
            values = values * shrink[:, None] + weights[:, None] * v
        else:
            rough = tl.load(scores.logits + bh * scores.width + p, real, float("-inf"))
            values += (tl.exp(rough - reference) / norm)[:, None] * v
    y = tl.sum(values, 0)[None, :]
    if RENORMALISE:
        if SINKS:
            total += sink_weight(query, bh, one, maximum)
        y = y / total[:, None]
    return y


@triton.jit
def attend_kernel(
    query, pages, scores, candidates,
    D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, SP: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    TYPE: tl.constexpr, DOT: tl.constexpr, RENORMALISE: tl.constexpr, MEAN: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Attend to the candidates.local last positions, the current one, and those that were chosen.

    RENORMALISE: the softmax is taken anew over them, as in SparQ; else s_hat weighs their values, as in FlexGen.
    MEAN: y becomes alpha y + (1 - alpha) v_mean, alpha being the sum of s_hat over them and the sink.
    GP: the query heads of a KV head, padded to what matrix units take; 1: there is one, and they are not used.
    Grid (B*H,).
    """
    bh, G = tl.program_id(0).to(tl.int64), query.G
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    n = tl.load(pages.lengths + bh)
    recent = tl.minimum(candidates.local + 1, n)
    count = recent + tl.minimum(candidates.k, n - recent)
    chosen = candidates.chosen + bh * candidates.k
    if GP == 1:
        values = attend_alone(
            query, pages, scores, chosen, bh, n, recent, count,
            D, DP, SP, BLOCK, STAGES, TYPE, RENORMALISE, CAPPED, SINKS,
        )  # fmt: skip
    else:
        values = attend_as_group(
            query, pages, scores, chosen, bh, n, recent, count,
            D, GP, DP, SP, BLOCK, STAGES, TYPE, DOT, RENORMALISE, CAPPED, SINKS,
        )  # fmt: skip
    if RENORMALISE:
        alpha = chosen_mass(query, scores, chosen, bh, n, recent, count, GP, SP, SINKS)
        if MEAN:
            alpha = tl.where(alpha > 1, 1.0, alpha)
            v_mean = tl.load(pages.v_mean + bh * D + d, d < D, 0.0)
            values = alpha[:, None] * values + (1 - alpha)[:, None] * v_mean[None, :]
        else:
            values = tl.where((alpha == alpha)[:, None], values, float("nan"))
    tl.store(query.y + (bh * G + g[:, None]) * D + d[None, :], values, (g < G)[:, None] & (d < D)[None, :])
