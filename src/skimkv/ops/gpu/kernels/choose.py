"""Step 2 of SparQ's algorithm 1, after the logits of step 1: choose the positions with the largest weights.

Positions are chosen in groups of neighbours first, by the largest weight of each group: the k best positions lie in the
k groups whose largest weights are best. Programs share the tiles of a row and KV head, each to the k best groups of its
tiles; the program that arrives last cuts these to the k best of all, and their positions to the k best. Each cut is by
a threshold, and ties at a threshold go to the lower position.
Where one query head has the KV head to itself, its logits are ranked; else the sum of the softmaxes over the group.
Both are compared as integers that order as the floats do: `order_of`.
TopK (FlexGen's, Sheng et al. 2023) and LowRank (figure 7a of SparQ) choose in the same way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .shared import ALIGNMENT, constant, finite_maximum, is_last_program, sink_weight

BELOW_ALL = constant(-2147483647)  # the order of no float
ABSENT = constant(-2147483648)  # below what any threshold can be
HIGHEST = constant(0x7F800000)  # the order of +inf
MAGNITUDE = constant(0x7FFFFFFF)  # all bits of a float32 but its sign
HALF = constant(16)  # bits of a count of the numbers of a tile, at most
LOW_HALF = constant(65535)
HALVINGS = constant(12)  # of a distance of floats, at most: one far from all others needs many


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
def float_of(order):
    """Return the float that order_of orders so."""
    return tl.where(order < 0, order ^ MAGNITUDE, order).to(tl.float32, bitcast=True)


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
def threshold_of_tile(x, low, want, HALVE: tl.constexpr):
    """Find a number that `want` of x (TILE,) reach, or, of equal ones, the least of them that as many reach.

    low: a number that at least `want` of them reach. HALVE: halve the distance of the floats first, as logits are
    spread evenly; the integers of floats are spread as their logarithms.
    """
    high, turn = tl.max(x, 0), tl.full([], 0, tl.int32)
    while low < high:
        middle = middle_of(low, high)
        if HALVE:
            half = order_of(0.5 * float_of(low) + 0.5 * float_of(high))
            middle = tl.where((half > low) & (half <= high) & (turn < HALVINGS), half, middle)
        low, high = bisect(low, high, tl.sum((x >= middle).to(tl.int32), 0), middle, want)
        turn += 1
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
    low, high = tl.full([], HIGHEST, tl.int32), tl.full([], BELOW_ALL, tl.int32)
    for i in range(0, n, TILE):
        x = tl.load(weights + i + t, i + t < n, ABSENT)
        low = tl.minimum(low, tl.min(tl.where(x > BELOW_ALL, x, HIGHEST), 0))
        high = tl.maximum(high, tl.max(x, 0))
    while low < high:
        middle = middle_of(low, high)
        reached = count_reaching(weights, n, middle, TILE)
        low, high = bisect(low, high, reached, middle, want)
    return low


@triton.jit
def places(above, ties, room):
    """Return which numbers are taken, those above the threshold and the first `room` ties, and a place for each."""
    both = tl.cumsum(above.to(tl.int32) | (ties.to(tl.int32) << HALF), 0)  # two counts in one scan
    ties_before = both >> HALF
    taken = above | (ties & (ties_before <= room))
    return taken, (both & LOW_HALF) + tl.minimum(ties_before, room) - 1


@triton.jit
def take(x, inside, low, want, HALVE: tl.constexpr):
    """Return which `want` of x (T,) are the largest, of equal ones the first, and a place for each.

    inside: which numbers there are; the others are BELOW_ALL. low, HALVE: as of threshold_of_tile.
    """
    threshold = threshold_of_tile(x, low, want, HALVE)
    above = x > threshold
    return places(above, (x == threshold) & inside, want - tl.sum(above.to(tl.int32), 0))


@triton.jit
def ranks(query, scores, bh, p, SP: tl.constexpr, SINKS: tl.constexpr, ALONE: tl.constexpr):
    """Return numbers that order as the weights of positions p do, by the sum of s_hat over the group.

    ALONE: the group is one, and its logits order so. p: as a block, whose logits are loaded without a mask.
    """
    source = scores.logits + tl.multiple_of(bh * query.G * scores.width, ALIGNMENT) + p
    if ALONE:
        return tl.load(source)
    else:
        s_hat = tl.zeros(p.shape, tl.float32)
        for head in range(0, query.G):
            reference, total, _ = normaliser(query, scores, bh, tl.arange(0, 1) + head, SP, SINKS)
            logits = tl.load(source + tl.multiple_of(head * scores.width, ALIGNMENT))
            s_hat += tl.exp(logits - tl.sum(reference, 0)) * (1 / tl.sum(total, 0))
        return tl.where(s_hat == s_hat, s_hat, 0.0)


@triton.jit
def best_of_tile(
    query, scores, weights, groups, bh, i, n, most,
    SP: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, SINKS: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Find the groups of positions i .. i+TILE-1 below n with the `most` best weights; the first group begins at 0.

    The order of their best weights and their numbers are stored, (most,) each; where there are fewer, weights are
    BELOW_ALL.
    """
    t, u = tl.arange(0, TILE), tl.arange(0, TILE // GROUP)
    x = ranks(query, scores, bh, tl.multiple_of(i + t, ALIGNMENT), SP, SINKS, ALONE)
    if GROUP > 1:  # the largest number of a group is no NaN unless all are
        x = tl.max(tl.where(i + t < n, x, float("nan")).reshape(TILE // GROUP, GROUP), 1)
    inside = i + u * GROUP < n
    x = tl.where(inside, order_of(x), BELOW_ALL)
    want = tl.minimum(most, tl.cdiv(n - i, GROUP))
    taken, target = take(x, inside, tl.min(tl.where(inside, x, HIGHEST), 0), want, ALONE)
    tl.store(weights + target, x, taken)
    tl.store(groups + target, i // GROUP + u, taken)
    for j in range(tl.minimum(want, TILE), tl.minimum(most, TILE), TILE // GROUP):
        tl.store(weights + j + u, tl.full([TILE // GROUP], BELOW_ALL, tl.int32), j + u < most)


@triton.jit
def best_of_groups(
    query, scores, groups, count, bh, n, want, chosen,
    SP: tl.constexpr, CANDIDATES: tl.constexpr, GROUP: tl.constexpr, SINKS: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Store the `want` best positions below n of `count` groups in `chosen`."""
    u, j = tl.arange(0, CANDIDATES // GROUP), tl.arange(0, GROUP)
    group = tl.load(groups + u, u < count, 0)
    p = group[:, None] * GROUP + j[None, :]
    inside = (u < count)[:, None] & (p < n)
    x = tl.where(inside, order_of(ranks(query, scores, bh, p, SP, SINKS, ALONE)), BELOW_ALL)
    lowest = tl.min(tl.where(inside, x, HIGHEST).reshape(CANDIDATES), 0)
    of_groups = tl.min(tl.where(u < count, tl.max(x, 1), HIGHEST), 0)  # which as many positions reach
    low = tl.where(count >= want, of_groups, lowest)
    x, inside, p = x.reshape(CANDIDATES), inside.reshape(CANDIDATES), p.reshape(CANDIDATES)
    taken, target = take(x, inside, low, want, ALONE)
    tl.store(chosen + target, p, taken)


@triton.jit
def best_of_list(weights, positions, n, want, chosen, TILE: tl.constexpr, HALVE: tl.constexpr):
    """Store the positions of the `want` best of up to TILE candidates, or the numbers of their groups, in `chosen`."""
    t = tl.arange(0, TILE)
    x = tl.load(weights + t, t < n, BELOW_ALL)
    inside = x > BELOW_ALL
    taken, target = take(x, inside, tl.min(tl.where(inside, x, HIGHEST), 0), want, HALVE)
    tl.store(chosen + target, tl.load(positions + t, taken, 0), taken)


@triton.jit
def best_of_long_list(weights, positions, n, want, chosen, TILE: tl.constexpr):
    """Do the same for more than TILE candidates, which stay in memory."""
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
def choose_kernel(
    query, pages, scores, candidates,
    SP: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, LIST: tl.constexpr, IS_LONG: tl.constexpr,
    CANDIDATES: tl.constexpr, SINKS: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Choose candidates.k positions besides the candidates.local last ones and the current one.

    GROUP: neighbouring positions that are chosen together first. LIST: groups of several tiles that the last program
    takes at a time; where IS_LONG, there are more.
    CANDIDATES: the positions of candidates.k groups, padded. Grid (B*H, programs).
    """
    bh, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.load(pages.lengths + bh)
    free = n - tl.minimum(candidates.local + 1, n)  # positions 0 .. free-1 can be chosen
    want = tl.minimum(candidates.k, free)
    most = tl.minimum(candidates.k, TILE // GROUP)  # groups of a tile
    weights, groups = candidates.weights + bh * candidates.room, candidates.groups + bh * candidates.room
    chosen, listed = candidates.chosen + bh * candidates.k, candidates.listed + bh * candidates.k
    tiles = tl.cdiv(free, TILE)
    if want > 0:
        if (GROUP == 1) & (tiles == 1):
            groups = chosen
        for i in range(program, tiles, candidates.programs):
            to = i * most
            best_of_tile(
                query, scores, weights + to, groups + to, bh, i * TILE, free, most, SP, TILE, GROUP, SINKS, ALONE
            )
        if is_last_program(candidates.counter + bh, candidates.programs):
            count = tl.minimum(candidates.k, tl.cdiv(free, GROUP))
            if tiles > 1:
                best = chosen if GROUP == 1 else listed
                if IS_LONG:
                    best_of_long_list(weights, groups, tiles * most, count, best, LIST)
                else:
                    best_of_list(weights, groups, tiles * most, count, best, LIST, ALONE)
                groups = listed
                tl.debug_barrier()
            if GROUP > 1:
                best_of_groups(
                    query, scores, groups, count, bh, free, want, chosen, SP, CANDIDATES, GROUP, SINKS, ALONE
                )
