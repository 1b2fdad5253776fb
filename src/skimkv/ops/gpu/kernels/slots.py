"""One step over slots in one launch: attend to them and to the current token, and put the token into a slot.

Scored slots are H2O's (algorithm 1 of Zhang et al. 2023): weights are added to the scores, and the token takes the slot
of the lowest score. Other slots are rings: LM-Infinite (Han et al. 2023), sparse attention, SubGen's k-centre form.
Slots are split over programs; the program that arrives last merges their parts and does what follows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .shared import (
    apply_softcap,
    constant,
    is_last_program,
    load_query,
    merge_parts,
    online_softmax,
    sink_weight,
    store_part,
)

NO_POSITION = constant(0x7FFFFFFF)  # beyond the position of any token


@triton.jit
def find_victim(slots, bh, now, recent, TILE: tl.constexpr):
    """Find the lowest score outside the recent window, and its slot; of equal scores that of the oldest token."""
    t, first = tl.arange(0, TILE), bh * slots.C
    lowest, victim = tl.full([], float("inf"), tl.float32), tl.full([], 0, tl.int32)
    oldest = tl.full([], NO_POSITION, tl.int32)
    for i in range(0, slots.C, TILE):
        inside = i + t < slots.C
        pos = tl.load(slots.pos + first + i + t, inside, -1)
        score = tl.load(slots.score + first + i + t, inside, float("inf"))
        protected = (pos > now - recent) | (pos < 0)
        score = tl.where(protected, float("inf"), score)
        tile_lowest = tl.min(score, 0)
        pos = tl.where(protected | (score > tile_lowest), NO_POSITION, pos)
        tile_oldest = tl.min(pos, 0)
        replaces = (tile_lowest < lowest) | ((tile_lowest == lowest) & (tile_oldest < oldest))
        victim = tl.where(replaces, i + tl.argmin(pos, 0), victim)
        oldest = tl.where(replaces, tile_oldest, oldest)
        lowest = tl.minimum(tile_lowest, lowest)
    return lowest, victim


@triton.jit
def add_scores(slots, bh, head, G, filled, reference, total, TILE: tl.constexpr):
    """Add the weights of one query head to the scores of the slots in use: algorithm 1, F_score over the group."""
    c = tl.arange(0, TILE)
    for i in range(0, filled, TILE):
        target = slots.score + bh * slots.C + i + c
        logits = tl.load(slots.logits + (bh * G + head) * slots.width + i + c, i + c < filled, float("-inf"))
        score = tl.load(target, i + c < filled, 0.0)
        tl.store(target, score + tl.exp(logits - reference) / total / G, i + c < filled)


@triton.jit
def slots_kernel(
    query, slots, token, splits,
    D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, SP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, DOT: tl.constexpr, SCORED: tl.constexpr, ORDERED: tl.constexpr, GROWS: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Attend to the slots and put the token into one; 2CD elements are read per KV head.

    Scores take the mean of the weights over the group.

    SCORED: the slot is a free one or the victim's. ORDERED: slots.order says it. GROWS: it is a new one.
    Else the slots are a ring.
    Grid (B*H, splits).
    """
    bh, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    G, C = query.G, slots.C
    b, h = bh // slots.H, bh % slots.H
    n, filled = tl.load(slots.lengths + bh), tl.load(slots.filled + bh)
    share = tl.cdiv(tl.cdiv(filled, splits.programs), BLOCK) * BLOCK
    start, stop = split * share, tl.minimum(filled, (split + 1) * share)
    g, d, t = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, BLOCK)
    q = load_query(query.q, bh, G, D, GP, DP).to(DOT)
    maximum = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    values = tl.zeros([GP, DP], tl.float32)
    for i in tl.range(start, stop, BLOCK, num_stages=STAGES):
        offset = (bh * C + i) * D + t[:, None] * D + d[None, :]
        mask = (i + t < filled)[:, None] & (d < D)[None, :]
        k = tl.load(slots.k + offset, mask, 0.0)
        v = tl.load(slots.v + offset, mask, 0.0)
        logits = tl.dot(q, tl.trans(k.to(DOT)), input_precision="tf32x3") * query.scale
        logits = apply_softcap(logits, query.softcap, CAPPED)
        if SCORED:
            target = slots.logits + (bh * G + g[:, None]) * slots.width + (i + t)[None, :]
            tl.store(target, logits, (g < G)[:, None])
        logits = tl.where((i + t < filled)[None, :], logits, float("-inf"))
        maximum, total, values = online_softmax(logits, v, maximum, total, values, DOT)
    store_part(splits, maximum, total, values, bh, split, G, D, GP, DP)
    if is_last_program(splits.counter + bh, splits.programs):
        key = tl.load(token.k + b * token.k_batch + h * token.k_head + d, d < D, 0.0)
        value = tl.load(token.v + b * token.v_batch + h * token.v_head + d, d < D, 0.0)
        weight = tl.full([], 0.0, tl.float32)  # of the current token, the mean over the group
        for head in range(0, G):
            head_maximum, head_total, head_values = merge_parts(splits, bh, head, G, D, SP, DP)
            head_query = tl.load(query.q + (bh * G + head) * D + d, d < D, 0.0).to(tl.float32)
            logit = tl.sum(head_query * key.to(tl.float32), 0) * query.scale
            logit = apply_softcap(logit, query.softcap, CAPPED)
            reference = tl.maximum(head_maximum, logit)
            reference = tl.where(reference == float("-inf"), 0.0, reference)
            old, new = tl.exp(head_maximum - reference), tl.exp(logit - reference)
            head_total = head_total * old + new
            if SINKS:
                head_total += sink_weight(query, bh, head, reference)
            y = (head_values * old + new * value.to(tl.float32)) / head_total
            tl.store(query.y + (bh * G + head) * D + d, y, d < D)
            weight += new / head_total / G
            if SCORED:
                add_scores(slots, bh, head, G, filled, reference, head_total, TILE)
                tl.debug_barrier()
        slot, dropped = n, False
        if SCORED:
            if filled < tl.load(slots.limits + b):
                slot = filled
                filled += 1
            else:
                recent = tl.load(slots.limits + slots.B + b)
                lowest, slot = find_victim(slots, bh, n, recent, TILE)
                dropped = (recent == 0) & (weight < lowest)  # alg. 1 drops one of S and i, here perhaps i itself
        elif GROWS:
            slot = filled
            filled += 1
        else:
            if ORDERED:
                slot = tl.load(slots.order + n)
            elif n >= C:
                slot = slots.fixed + (n - slots.fixed) % (C - slots.fixed)
            filled = tl.minimum(n + 1, C)
        target = (bh * C + slot) * D + d
        if not dropped:
            tl.store(slots.k + target, key, d < D)
            tl.store(slots.v + target, value, d < D)
            if SCORED:
                tl.store(slots.score + bh * C + slot, weight)
                tl.store(slots.pos + bh * C + slot, n)
        tl.store(slots.lengths + bh, n + 1)
        tl.store(slots.filled + bh, filled)
