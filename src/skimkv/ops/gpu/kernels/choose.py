"""Steps 2 and 3 of SparQ's algorithm 1, after the logits of step 1: choose positions, attend, and give v_mean the rest.

Positions are chosen by a threshold, in tiles: programs cut the tiles in parallel, each to its own best, and the program
that arrives last cuts their candidates to the best of all and attends to them. Ties at a threshold go to the lower
position. Weights are compared by their bits, which for floats >= 0 order as integers; -1 is below all of them.
TopK (FlexGen's, Sheng et al. 2023) and LowRank (figure 7a of SparQ) choose in the same way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .shared import (
    ALIGNMENT,
    COLUMN_K,
    COLUMN_V,
    PAGE_TOKENS,
    apply_softcap,
    constant,
    finite_maximum,
    is_last_program,
    load_query,
    online_softmax,
    page_capacity,
    page_start,
    product,
    sink_weight,
)

BELOW_ALL = constant(-1)  # the bits of no weight
ABSENT = constant(-2)  # below what any threshold can be
ABOVE_ALL = constant(0x7F800001)  # above the bits of +inf


@triton.jit
def normaliser(query, scores, bh, g, SP: tl.constexpr, SINKS: tl.constexpr):
    """Return the maximum and the sum of exponentials of query heads g over the splits of step 1, as g is shaped.

    The sum includes the sink's part, which is returned too.
    """
    G = query.G
    split = tl.arange(0, SP)
    stats = scores.stats + ((bh * scores.splits + split[:, None]) * G + g[None, :]) * 2
    mask = (split < scores.splits)[:, None] & (g < G)[None, :]
    maxima = tl.load(stats, mask, float("-inf"))
    totals = tl.load(stats + 1, mask, 0.0)
    reference = finite_maximum(tl.max(maxima, 0))
    total = tl.sum(totals * tl.exp(maxima - reference[None, :]), 0)
    sink = tl.zeros_like(total)
    if SINKS:
        sink = sink_weight(query, bh, g, reference)
    return reference, total + sink, sink


@triton.jit
def bisect(low, high, reached, middle, want):
    """Take one step of the bisection for a threshold; where exactly `want` numbers reach it, the search ends."""
    low = tl.where(reached >= want, middle, low)
    high = tl.where(reached >= want, high, middle)
    return low, tl.where(reached == want, low + 1, high)


@triton.jit
def threshold_of_tile(x, want):
    """Find the largest number that at least `want` of x (TILE,) reach."""
    low, high = tl.full([], BELOW_ALL, tl.int32), tl.max(x, 0) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        low, high = bisect(low, high, tl.sum((x >= middle).to(tl.int32), 0), middle, want)
    return low


@triton.jit
def count_reaching(weights, n, threshold, TILE: tl.constexpr):
    """Count how many of n numbers in memory reach the threshold."""
    t = tl.arange(0, TILE)
    total = tl.full([], 0, tl.int32)
    for i in range(0, n, TILE):
        total += tl.sum((tl.load(weights + i + t, i + t < n, ABSENT) >= threshold).to(tl.int32), 0)
    return total


@triton.jit
def threshold_of_list(weights, n, want, TILE: tl.constexpr):
    """Find the largest number that at least `want` of n numbers in memory reach."""
    low, high = tl.full([], BELOW_ALL, tl.int32), tl.full([], ABOVE_ALL, tl.int32)
    while high - low > 1:
        middle = low + (high - low) // 2
        low, high = bisect(low, high, count_reaching(weights, n, middle, TILE), middle, want)
    return low


@triton.jit
def best_of_tile(
    query, scores, weights, positions, bh, i, n, k, SP: tl.constexpr, TILE: tl.constexpr, SINKS: tl.constexpr
):
    """Find the k best of positions i .. i+TILE-1 below n, by the sum of s_hat over the group.

    The bits of their weights and their positions are stored, (k,) each; where there are fewer, weights are BELOW_ALL.
    """
    t, first_head = tl.arange(0, TILE), tl.arange(0, 1)
    cached = i + t < n
    s_hat = tl.zeros([TILE], tl.float32)
    for head in range(0, query.G):
        reference, total, _ = normaliser(query, scores, bh, first_head + head, SP, SINKS)
        source = scores.logits + (bh * query.G + head) * scores.width + i + t
        logits = tl.load(tl.multiple_of(source, ALIGNMENT))  # not masked: the scratch memory goes on past the end
        s_hat += tl.exp(logits - reference) / total
    x = tl.where(s_hat == s_hat, s_hat, 0.0).to(tl.int32, bitcast=True)
    x = tl.where(cached, x, BELOW_ALL)
    want = tl.minimum(k, n - i)
    threshold = threshold_of_tile(x, want)
    ties = (x == threshold) & cached
    room = want - tl.sum((x > threshold).to(tl.int32), 0)
    taken = (x > threshold) | (ties & (tl.cumsum(ties.to(tl.int32), 0) <= room))
    target = tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(weights + target, x, taken)
    tl.store(positions + target, i + t, taken)
    for j in range(tl.minimum(want, TILE), tl.minimum(k, TILE), TILE):
        tl.store(weights + j + t, tl.full([TILE], BELOW_ALL, tl.int32), j + t < k)


@triton.jit
def best_of_list(weights, positions, n, want, chosen, TILE: tl.constexpr):
    """Store the positions of the `want` best of n candidates in memory in `chosen`."""
    threshold = threshold_of_list(weights, n, want, TILE)
    room = want - count_reaching(weights, n, threshold + 1, TILE)
    t = tl.arange(0, TILE)
    filled = tl.full([], 0, tl.int32)
    for i in range(0, n, TILE):
        x = tl.load(weights + i + t, i + t < n, ABSENT)
        ties = x == threshold
        taken = (x > threshold) | (ties & (tl.cumsum(ties.to(tl.int32), 0) <= room))
        target = filled + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(chosen + target, tl.load(positions + i + t, taken, 0), taken)
        room -= tl.sum((ties & taken).to(tl.int32), 0)
        filled += tl.sum(taken.to(tl.int32), 0)


@triton.jit
def attend_chosen(
    query, pages, scores, chosen, bh, n, recent, count,
    D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, SP: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr,
    DOT: tl.constexpr, RENORMALISE: tl.constexpr, MEAN: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Attend to `count` positions: the `recent` last ones, then the chosen ones.

    RENORMALISE: the softmax is taken anew over them, as in SparQ; else s_hat weighs their values, as in FlexGen.
    MEAN: y becomes alpha y + (1 - alpha) v_mean, alpha being the sum of s_hat over them and the sink.
    """
    G = query.G
    g, d, e = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, BLOCK)
    q = load_query(query.q, bh, G, D, GP, DP).to(DOT)
    reference, norm, sink = normaliser(query, scores, bh, g, SP, SINKS)
    maximum = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    alpha = tl.zeros([GP], tl.float32)
    if SINKS:
        alpha = sink / norm
    values = tl.zeros([GP, DP], tl.float32)
    for i in range(0, count, BLOCK):
        real = i + e < count
        is_recent = i + e < recent
        p = tl.load(chosen + (i + e - recent), real & (i + e >= recent), 0)
        p = tl.where(is_recent, n - 1 - (i + e), p)
        p = tl.where(real, p, 0)
        page = p // PAGE_TOKENS
        row = (bh * page_capacity(pages.table, page) + p % PAGE_TOKENS) * D
        mask = real[:, None] & (d < D)[None, :]
        source = (page_start(pages.table, page, COLUMN_V, TYPE) + row)[:, None] + d[None, :]
        v = tl.load(tl.multiple_of(source, (ALIGNMENT, ALIGNMENT)), mask, 0.0)
        inside = (g < G)[:, None] & real[None, :]
        source = scores.logits + (bh * G + g[:, None]) * scores.width + p[None, :]
        rough = tl.load(source, inside, float("-inf"))
        s_hat = tl.where(inside, tl.exp(rough - reference[:, None]) / norm[:, None], 0.0)
        alpha += tl.sum(s_hat, 1)
        if RENORMALISE:
            source = (page_start(pages.table, page, COLUMN_K, TYPE) + row)[:, None] + d[None, :]
            k = tl.load(tl.multiple_of(source, (ALIGNMENT, ALIGNMENT)), mask, 0.0)
            logits = tl.dot(q, tl.trans(k.to(DOT)), input_precision="tf32x3") * query.scale
            logits = tl.where(real[None, :], apply_softcap(logits, query.softcap, CAPPED), float("-inf"))
            maximum, total, values = online_softmax(logits, v, maximum, total, values, DOT)
        else:
            values += product(s_hat, v, DOT)
    if RENORMALISE:
        if SINKS:
            total += sink_weight(query, bh, g, maximum)
        values = values / total[:, None]
        if MEAN:
            alpha = tl.where(alpha > 1, 1.0, alpha)
            v_mean = tl.load(pages.v_mean + bh * D + d, d < D, 0.0)
            values = alpha[:, None] * values + (1 - alpha)[:, None] * v_mean[None, :]
        else:
            values = tl.where((alpha == alpha)[:, None], values, float("nan"))
    tl.store(query.y + (bh * G + g[:, None]) * D + d[None, :], values, (g < G)[:, None] & (d < D)[None, :])


@triton.jit
def choose_kernel(
    query, pages, scores, candidates,
    D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, SP: tl.constexpr, TILE: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr, TYPE: tl.constexpr, DOT: tl.constexpr, RENORMALISE: tl.constexpr, MEAN: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Choose candidates.k positions besides the candidates.local last ones and the current one, and attend to all.

    Grid (B*H, programs).
    """
    bh, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.load(pages.lengths + bh)
    recent = tl.minimum(candidates.local + 1, n)
    free = n - recent  # positions 0 .. free-1 can be chosen
    want = tl.minimum(candidates.k, free)
    most = tl.minimum(candidates.k, TILE)  # candidates of a tile
    weights, positions = candidates.weights + bh * candidates.room, candidates.positions + bh * candidates.room
    tiles = tl.cdiv(free, TILE)
    if want > 0:
        for i in range(program, tiles, candidates.programs):
            to = i * most
            best_of_tile(query, scores, weights + to, positions + to, bh, i * TILE, free, most, SP, TILE, SINKS)
    if is_last_program(candidates.counter + bh, candidates.programs):
        chosen = positions
        if want > 0 and tiles > 1:
            chosen = candidates.chosen + bh * candidates.k
            best_of_list(weights, positions, tiles * most, want, chosen, TILE)
            tl.debug_barrier()
        attend_chosen(
            query, pages, scores, chosen, bh, n, recent, recent + want,
            D, GP, DP, SP, CHOSEN_BLOCK, TYPE, DOT, RENORMALISE, MEAN, CAPPED, SINKS,
        )  # fmt: skip
