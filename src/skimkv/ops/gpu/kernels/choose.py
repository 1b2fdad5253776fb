"""Steps 2 and 3 of SparQ's algorithm 1, after the logits of step 1: choose positions, attend, and give v_mean the rest.

Positions are chosen by a threshold, in tiles: programs cut the tiles in parallel, each to its own best, and the program
that arrives last cuts their candidates to the best of all and attends to them. Ties at a threshold go to the lower
position. Where one query head has the KV head to itself, its logits are ranked; else the sum of the softmaxes over the
group. Both are compared as integers that order as the floats do: `order_of`.
TopK (FlexGen's, Sheng et al. 2023) and LowRank (figure 7a of SparQ) choose in the same way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import launch
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
    table_of,
)

BELOW_ALL = constant(-2147483647)  # the order of no float
ABSENT = constant(-2147483648)  # below what any threshold can be
HIGHEST = constant(0x7F800000)  # the order of +inf
MAGNITUDE = constant(0x7FFFFFFF)  # all bits of a float32 but its sign
HALF = constant(16)  # bits of a count of the numbers of a tile, at most
LOW_HALF = constant(65535)
BINS = constant(256)
BIN_BITS = constant(8)
FLOAT_BIAS = constant(127)
FLOAT_BITS = constant(23)  # of a float32 below its exponent
MASS_BLOCK = constant(launch.MASS_BLOCK)


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
def order_of(x):
    """Return integers that order as these floats do; a NaN comes after all others."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, tl.where(bits < 0, bits ^ MAGNITUDE, bits), BELOW_ALL + 1)


@triton.jit
def shift_to_bins(low, high):
    """Return by how many bits a distance from low, up to high, is shifted to become the number of a bin."""
    distance = high.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)
    exponent = (distance.to(tl.float32).to(tl.int32, bitcast=True) >> FLOAT_BITS) - FLOAT_BIAS
    return tl.maximum(exponent - (BIN_BITS - 1), 0)


@triton.jit
def count_by_bins(x, low, high, shift):
    """Count the numbers from low to high, by their distance from low: (BINS,)."""
    inside = (x >= low) & (x <= high)
    distance = x.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)
    bins = tl.where(inside, (distance >> shift).to(tl.int32), 0)
    return tl.histogram(bins, BINS, inside)


@triton.jit
def narrow(counts, low, high, shift, want):
    """Narrow low .. high, in which the want-th largest number lies, to its bin.

    Returns the new low and high, and how many numbers of the bin are wanted. Where that is all of them, high is low: as
    a threshold it serves as well as the least of them.
    """
    bins = tl.arange(0, BINS)
    reaching = tl.cumsum(counts, 0, reverse=True)
    chosen = tl.max(tl.where(reaching >= want, bins, 0), 0)
    want -= tl.sum(tl.where(bins > chosen, counts, 0), 0)
    is_whole = tl.sum(tl.where(bins == chosen, counts, 0), 0) == want
    first = chosen.to(tl.uint32) << shift
    distance = high.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)
    last = tl.minimum(distance, first + ((tl.full([], 1, tl.uint32) << shift) - 1))
    start = low.to(tl.uint32, bitcast=True)
    new_low, new_high = (start + first).to(tl.int32, bitcast=True), (start + last).to(tl.int32, bitcast=True)
    return new_low, tl.where(is_whole, new_low, new_high), want


@triton.jit
def middle_of(low, high):
    """Return the number between low and high, which is above low where high is."""
    return (low >> 1) + (high >> 1) + ((low | high) & 1)


@triton.jit
def bisect(low, high, reached, middle, want):
    """Take one step of the bisection of low .. high for a threshold; where `want` numbers reach it, the search ends."""
    low = tl.where(reached >= want, middle, low)
    high = tl.where(reached > want, high, tl.where(reached == want, middle, middle - 1))
    return low, high


@triton.jit
def threshold_of_tile(x, want):
    """Find a number that `want` of x (TILE,) reach, or, of equal ones, the least of them that as many reach."""
    low, high, left = tl.min(x, 0), tl.max(x, 0), want
    for _ in range(2):
        shift = shift_to_bins(low, high)
        low, high, left = narrow(count_by_bins(x, low, high, shift), low, high, shift, left)
    while low < high:
        middle = middle_of(low, high)
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
    """Find such a number for n numbers in memory."""
    t = tl.arange(0, TILE)
    low, high, left = tl.full([], BELOW_ALL, tl.int32), tl.full([], HIGHEST, tl.int32), want
    for _ in range(2):
        shift = shift_to_bins(low, high)
        counts = tl.zeros([BINS], tl.int32)
        for i in range(0, n, TILE):
            counts += count_by_bins(tl.load(weights + i + t, i + t < n, ABSENT), low, high, shift)
        low, high, left = narrow(counts, low, high, shift, left)
    while low < high:
        middle = middle_of(low, high)
        low, high = bisect(low, high, count_reaching(weights, n, middle, TILE), middle, want)
    return low


@triton.jit
def places(above, ties, room):
    """Return which numbers are taken, those above the threshold and the first `room` ties, and a place for each."""
    both = tl.cumsum(above.to(tl.int32) | (ties.to(tl.int32) << HALF), 0)  # two counts in one scan
    ties_before = both >> HALF
    taken = above | (ties & (ties_before <= room))
    return taken, (both & LOW_HALF) + tl.minimum(ties_before, room) - 1


@triton.jit
def best_of_tile(
    query, scores, weights, positions, bh, i, n, k,
    SP: tl.constexpr, TILE: tl.constexpr, SINKS: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Find the k best of positions i .. i+TILE-1 below n, by the sum of s_hat over the group. ALONE: the group is one.

    The order of their weights and their positions are stored, (k,) each; where there are fewer, weights are BELOW_ALL.
    """
    t = tl.arange(0, TILE)
    cached = i + t < n
    source = scores.logits + bh * query.G * scores.width + i + t  # not masked: the scratch memory goes on past the end
    if ALONE:
        x = order_of(tl.load(tl.multiple_of(source, ALIGNMENT)))
    else:
        s_hat = tl.zeros([TILE], tl.float32)
        for head in range(0, query.G):
            reference, total, _ = normaliser(query, scores, bh, tl.arange(0, 1) + head, SP, SINKS)
            logits = tl.load(tl.multiple_of(source + head * scores.width, ALIGNMENT))
            s_hat += tl.exp(logits - reference) * (1 / total)
        x = order_of(tl.where(s_hat == s_hat, s_hat, 0.0))
    x = tl.where(cached, x, BELOW_ALL)
    want = tl.minimum(k, n - i)
    threshold = threshold_of_tile(x, want)
    ties = (x == threshold) & cached
    above = x > threshold
    room = want - tl.sum(above.to(tl.int32), 0)
    taken, target = places(above, ties, room)
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
        taken, target = places(x > threshold, ties, room)
        target += filled
        tl.store(chosen + target, tl.load(positions + i + t, taken, 0), taken)
        room -= tl.sum((ties & taken).to(tl.int32), 0)
        filled += tl.sum(taken.to(tl.int32), 0)


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
def attend_chosen(
    query, pages, scores, chosen, bh, n, recent, count,
    D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, SP: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    TYPE: tl.constexpr, DOT: tl.constexpr, RENORMALISE: tl.constexpr, MEAN: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Attend to `count` positions: the `recent` last ones, then the chosen ones.

    RENORMALISE: the softmax is taken anew over them, as in SparQ; else s_hat weighs their values, as in FlexGen.
    MEAN: y becomes alpha y + (1 - alpha) v_mean, alpha being the sum of s_hat over them and the sink.
    """
    G = query.G
    g, d, e = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, BLOCK)
    table, place = table_of(pages, bh)
    if RENORMALISE:
        q = load_query(query.q, bh, G, D, GP, DP).to(DOT)
        alpha = chosen_mass(query, scores, chosen, bh, n, recent, count, GP, SP, SINKS)
    else:
        reference, norm, _ = normaliser(query, scores, bh, g, SP, SINKS)
    maximum = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    values = tl.zeros([GP, DP], tl.float32)
    for i in tl.range(0, count, BLOCK, num_stages=STAGES):
        real = i + e < count
        p = chosen_position(chosen, i + e, n, recent, count)
        page = p // PAGE_TOKENS
        row = (place * page_capacity(table, page) + p % PAGE_TOKENS) * D
        mask = real[:, None] & (d < D)[None, :]
        source = (page_start(table, page, COLUMN_V, TYPE, pages.base) + row)[:, None] + d[None, :]
        v = tl.load(tl.multiple_of(source, (ALIGNMENT, ALIGNMENT)), mask, 0.0)
        if RENORMALISE:
            source = (page_start(table, page, COLUMN_K, TYPE, pages.base) + row)[:, None] + d[None, :]
            k = tl.load(tl.multiple_of(source, (ALIGNMENT, ALIGNMENT)), mask, 0.0)
            logits = tl.dot(q, tl.trans(k.to(DOT)), input_precision="tf32x3") * query.scale
            logits = tl.where(real[None, :], apply_softcap(logits, query.softcap, CAPPED), float("-inf"))
            maximum, total, values = online_softmax(logits, v, maximum, total, values, DOT)
        else:
            inside = (g < G)[:, None] & real[None, :]
            source = scores.logits + (bh * G + g[:, None]) * scores.width + p[None, :]
            rough = tl.load(source, inside, float("-inf"))
            s_hat = tl.where(inside, tl.exp(rough - reference[:, None]) / norm[:, None], 0.0)
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
    CHOSEN_BLOCK: tl.constexpr, STAGES: tl.constexpr, TYPE: tl.constexpr, DOT: tl.constexpr, RENORMALISE: tl.constexpr,
    MEAN: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, ALONE: tl.constexpr,
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
            best_of_tile(query, scores, weights + to, positions + to, bh, i * TILE, free, most, SP, TILE, SINKS, ALONE)
    if is_last_program(candidates.counter + bh, candidates.programs):
        chosen = positions
        if want > 0 and tiles > 1:
            chosen = candidates.chosen + bh * candidates.k
            best_of_list(weights, positions, tiles * most, want, chosen, TILE)
            tl.debug_barrier()
        attend_chosen(
            query, pages, scores, chosen, bh, n, recent, recent + want,
            D, GP, DP, SP, CHOSEN_BLOCK, STAGES, TYPE, DOT, RENORMALISE, MEAN, CAPPED, SINKS,
        )  # fmt: skip
