"""SparQ step 2 over the logits of step 1: choose by threshold, gather, attend, and give the rest to v_mean.

Tiles of the positions are cut in parallel, each to its own best; the program that arrives last cuts their
candidates to the best of all and attends to them. Ties at a threshold go to the lower position. Weights are
compared by their bits, which for floats >= 0 order as integers; -1 is below all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dense import capped, entry, last, online, product, query
from .sparq import scores


@triton.jit
def normaliser(stats, bh, g, S, G, SP: tl.constexpr):
    """Maximum and sum of query heads g over the splits of step 1."""
    s = tl.arange(0, SP)
    at = stats + ((bh * S + s[:, None]) * G + g[None, :]) * 2
    mask = (s < S)[:, None] & (g < G)[None, :]
    m = tl.load(at, mask, float("-inf"))
    l = tl.load(at + 1, mask, 0.0)
    top = tl.max(m, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    return safe, tl.sum(l * tl.exp(m - safe[None, :]), 0)


@triton.jit
def halve(low, high, reached, middle, want):
    """One step of the bisection; exactly `want` ends it."""
    low = tl.where(reached >= want, middle, low)
    high = tl.where(reached >= want, high, middle)
    return low, tl.where(reached == want, low + 1, high)


@triton.jit
def cut_tile(x, want):
    """The largest number that at least `want` of x reach."""
    low, high = tl.full([], -1, tl.int32), tl.max(x, 0) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        low, high = halve(low, high, tl.sum((x >= middle).to(tl.int32), 0), middle, want)
    return low


@triton.jit
def count(bits, n, cut, TILE: tl.constexpr):
    """How many of the n numbers at `bits` reach `cut`."""
    t = tl.arange(0, TILE)
    total = tl.full([], 0, tl.int32)
    for i in range(0, n, TILE):
        total += tl.sum((tl.load(bits + i + t, i + t < n, -2) >= cut).to(tl.int32), 0)
    return total


@triton.jit
def cut_list(bits, n, want, TILE: tl.constexpr):
    """The same of n numbers in memory."""
    low, high = tl.full([], -1, tl.int32), tl.full([], 0x7F800001, tl.int32)
    while high - low > 1:
        middle = low + (high - low) // 2
        low, high = halve(low, high, count(bits, n, middle, TILE), middle, want)
    return low


@triton.jit
def best_of_tile(logits, stats, bits, at, bh, i, n, K, S, G, width, SP: tl.constexpr, TILE: tl.constexpr):
    """Positions i .. i+TILE-1 below n: the K best by the sum of s_hat over the group, to bits and at (K,), padded."""
    t, g = tl.arange(0, TILE), tl.arange(0, 1)
    held = i + t < n
    s_hat = tl.zeros([TILE], tl.float32)
    for one in range(0, G):
        safe, total = normaliser(stats, bh, g + one, S, G, SP)
        x = tl.load(tl.multiple_of(logits + (bh * G + one) * width + i + t, 16))  # scratch: there is more past the end
        s_hat += tl.exp(x - safe) / total
    x = tl.where(s_hat == s_hat, s_hat, 0.0).to(tl.int32, bitcast=True)
    x = tl.where(held, x, -1)
    want = tl.minimum(K, n - i)
    cut = cut_tile(x, want)
    ties = (x == cut) & held
    room = want - tl.sum((x > cut).to(tl.int32), 0)
    take = (x > cut) | (ties & (tl.cumsum(ties.to(tl.int32), 0) <= room))
    slot = tl.cumsum(take.to(tl.int32), 0) - 1
    tl.store(bits + slot, x, take)
    tl.store(at + slot, i + t, take)
    for j in range(tl.minimum(want, TILE), tl.minimum(K, TILE), TILE):
        tl.store(bits + j + t, tl.full([TILE], -1, tl.int32), j + t < K)


@triton.jit
def best_of_list(bits, at, n, want, out, TILE: tl.constexpr):
    """Of n candidates with their positions, the `want` best: their positions."""
    cut = cut_list(bits, n, want, TILE)
    room = want - count(bits, n, cut + 1, TILE)
    t = tl.arange(0, TILE)
    filled = tl.full([], 0, tl.int32)
    for i in range(0, n, TILE):
        x = tl.load(bits + i + t, i + t < n, -2)
        ties = x == cut
        take = (x > cut) | (ties & (tl.cumsum(ties.to(tl.int32), 0) <= room))
        slot = filled + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(out + slot, tl.load(at + i + t, take, 0), take)
        room -= tl.sum((ties & take).to(tl.int32), 0)
        filled += tl.sum(take.to(tl.int32), 0)


@triton.jit
def attend_chosen(
    q, y, table, chosen, logits, stats, mean, scale, softcap, bh, n, recent, total, S, G, width,
    D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, SP: tl.constexpr, BK: tl.constexpr, TYPE: tl.constexpr,
    DOT: tl.constexpr, FLEX: tl.constexpr, MEAN: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """SparQ steps 2 and 3 over the `recent` last positions and the chosen; FLEX: s_hat weighs, without a softmax."""
    g, d, e = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, BK)
    x = query(q, bh, G, D, GP, DP).to(DOT)
    safe, norm = normaliser(stats, bh, g, S, G, SP)
    m = tl.full([GP], float("-inf"), tl.float32)
    l = tl.zeros([GP], tl.float32)
    alpha = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    for i in range(0, total, BK):
        real = i + e < total
        late = i + e < recent
        p = tl.load(chosen + (i + e - recent), real & (i + e >= recent), 0)
        p = tl.where(late, n - 1 - (i + e), p)
        p = tl.where(real, p, 0)
        row = (bh * tl.load(table + p // 256 * 8 + 4) + p % 256) * D
        mask = real[:, None] & (d < D)[None, :]
        at = (entry(table, p // 256, 1, TYPE) + row)[:, None] + d[None, :]
        v = tl.load(tl.multiple_of(at, (16, 16)), mask, 0.0)
        inside = (g < G)[:, None] & real[None, :]
        rough = tl.load(logits + (bh * G + g[:, None]) * width + p[None, :], inside, float("-inf"))
        s_hat = tl.where(inside, tl.exp(rough - safe[:, None]) / norm[:, None], 0.0)
        alpha += tl.sum(s_hat, 1)
        if FLEX:
            acc += product(s_hat, v, DOT)
        else:
            at = (entry(table, p // 256, 0, TYPE) + row)[:, None] + d[None, :]
            k = tl.load(tl.multiple_of(at, (16, 16)), mask, 0.0)
            exact = capped(tl.dot(x, tl.trans(k.to(DOT)), input_precision="tf32x3") * scale, softcap, CAPPED)
            m, l, acc = online(tl.where(real[None, :], exact, float("-inf")), v, m, l, acc, DOT)
    if not FLEX:
        acc = acc / l[:, None]
        if MEAN:
            alpha = tl.where(alpha > 1, 1.0, alpha)
            v_mean = tl.load(mean + bh * D + d, d < D, 0.0)
            acc = alpha[:, None] * acc + (1 - alpha)[:, None] * v_mean[None, :]
        else:
            acc = tl.where((alpha == alpha)[:, None], acc, float("nan"))
    tl.store(y + (bh * G + g[:, None]) * D + d[None, :], acc, (g < G)[:, None] & (d < D)[None, :])


@triton.jit
def choose_kernel(
    q, y, table, lengths, tail, logits, stats, bits, at, chosen, mean, counter, scale, softcap, S, T, r, R, G, width, K,
    local, room,
    D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, SP: tl.constexpr, TILE: tl.constexpr, BK: tl.constexpr,
    TYPE: tl.constexpr, DOT: tl.constexpr, FLEX: tl.constexpr, MEAN: tl.constexpr, CAPPED: tl.constexpr,
    FUSED: tl.constexpr, RP: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, LAYOUT: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Grid (B*H, T). K: how many are chosen besides the `local` last and the current. `room`: candidates per head.

    FUSED: step 1 too, by the same program (S = T = 1): a launch less where the heads alone fill the card.
    """
    bh, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if FUSED:
        scores(
            q, table, lengths, tail, logits, stats, scale, softcap, bh, 0, 1, r, R, G, width,
            D, GP, DP, RP, BN, STAGES, TYPE, DOT, LAYOUT, KIND, CAPPED,
        )  # fmt: skip
        tl.debug_barrier()
    n = tl.load(lengths + bh)
    recent = tl.minimum(local + 1, n)
    free = n - recent  # candidates are positions 0 .. free-1
    want = tl.minimum(K, free)
    each = tl.minimum(K, TILE)
    bits, at = bits + bh * room, at + bh * room
    tiles = tl.cdiv(free, TILE)
    if want > 0:
        for i in range(tile, tiles, T):
            best_of_tile(logits, stats, bits + i * each, at + i * each, bh, i * TILE, free, each, S, G, width, SP, TILE)
    if last(counter + bh, T):
        source = at
        if want > 0 and tiles > 1:
            best_of_list(bits, at, tiles * each, want, chosen + bh * K, TILE)
            source = chosen + bh * K
            tl.debug_barrier()
        attend_chosen(
            q, y, table, source, logits, stats, mean, scale, softcap, bh, n, recent, recent + want, S, G, width,
            D, GP, DP, SP, BK, TYPE, DOT, FLEX, MEAN, CAPPED,
        )  # fmt: skip
