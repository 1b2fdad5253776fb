"""Tokens of a batch into the blocks of an engine, each to the slot that the engine gives it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def append_slots_kernel(
    token, slots, blocks, H, capacity, D: tl.constexpr, DP: tl.constexpr, COPY: tl.constexpr
):  # fmt: skip
    """Write K and V of a token to its slot, and with COPY its key to the channel-major copy too.

    slots (tokens,) int64: block * capacity + place in the block; a token with a negative one is left out.
    Grid (tokens, H).
    """
    i, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + i)
    if slot >= 0:
        d = tl.arange(0, DP)
        start, place = slot // capacity * blocks.distance, slot % capacity
        key = tl.load(token.k + i * token.k_batch + h * token.k_head + d, d < D)
        value = tl.load(token.v + i * token.v_batch + h * token.v_head + d, d < D)
        row = start + (h * capacity + place) * D + d
        tl.store(blocks.k + row, key, d < D)
        tl.store(blocks.v + row, value, d < D)
        if COPY:
            tl.store(blocks.channels + start + (h * D + d) * capacity + place, key, d < D)
