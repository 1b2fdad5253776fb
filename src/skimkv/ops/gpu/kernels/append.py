"""One token of every row into the pages of a Full store: K and V, the index of channels, and the mean of V.

The index is SparQ's (section 4), quantised by channel and group of tokens where the store says so: then the open group
stays in `tail` until a token fills it, and the kernel writes its codes as stores/full.py does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .shared import (
    CHANNEL_BLOCK,
    COLUMN_INDEX,
    COLUMN_K,
    COLUMN_SCALE,
    COLUMN_V,
    INT4_BITS,
    INT4_CODES,
    INT4_LANES,
    LAYOUT_COPY,
    LAYOUT_INT8,
    LAYOUT_ROWS,
    PAGE_TOKENS,
    constant,
    page_capacity,
    page_start,
)

APPENDED_CHANNELS = constant(128)  # of the current token that are written at a time: one by every thread
ROUND = constant(12582912.0)  # 1.5 * 2^23: a float32 below 2^22 plus it is rounded to an integer, half to even


@triton.jit
def quantise_group(pages, page, bh, channel, last, LAYOUT: tl.constexpr):
    """Write the codes of a full group, x ~ step * code + zero, for CHANNEL_BLOCK channels from `channel`.

    last (CHANNEL_BLOCK,): the group's last token, which the tail does not hold yet.
    """
    R = pages.R
    j, t = channel + tl.arange(0, CHANNEL_BLOCK), tl.arange(0, PAGE_TOKENS)
    real = (j < R)[:, None]
    in_tail = t < PAGE_TOKENS - 1
    tail = pages.tail + (bh * R + j[:, None]) * PAGE_TOKENS + t[None, :]
    x = tl.load(tail, real & in_tail[None, :], 0.0).to(tl.float32)
    x = tl.where(t[None, :] == PAGE_TOKENS - 1, last.to(tl.float32)[:, None], x)
    spoiled = tl.max((x != x).to(tl.int32), 1) > 0  # a NaN in the group: its scale says so
    high, zero = tl.max(x, 1), tl.min(x, 1)
    high, zero = tl.where(spoiled, float("nan"), high), tl.where(spoiled, float("nan"), zero)
    step = tl.div_rn(high - zero, tl.full([CHANNEL_BLOCK], 2**LAYOUT - 1, tl.float32))
    divisor = tl.where(step == 0, 1.0, step)
    ratio = tl.div_rn(x - zero[:, None], tl.broadcast_to(divisor[:, None], [CHANNEL_BLOCK, PAGE_TOKENS]))
    ratio = tl.where(ratio == ratio, ratio, 0.0)
    codes = ((ratio + ROUND) - ROUND).to(tl.int32)
    capacity = page_capacity(pages.table, page)
    row = bh * R + j
    if LAYOUT == LAYOUT_INT8:
        start = page_start(pages.table, page, COLUMN_INDEX, tl.uint8) + (row * capacity)[:, None]
        tl.store(start + t[None, :], codes.to(tl.uint8), real)
    else:
        blocks: tl.constexpr = PAGE_TOKENS // (INT4_CODES * INT4_LANES)
        shift = INT4_BITS * tl.arange(0, INT4_CODES)
        nibbles = codes.reshape(CHANNEL_BLOCK, blocks, INT4_CODES, INT4_LANES) << shift[None, None, :, None]
        dwords = tl.sum(nibbles, 2).reshape(CHANNEL_BLOCK, blocks * INT4_LANES)
        w = tl.arange(0, blocks * INT4_LANES)
        start = page_start(pages.table, page, COLUMN_INDEX, tl.int32) + (row * (capacity // INT4_CODES))[:, None]
        tl.store(start + w[None, :], dwords, real)
    groups = capacity // PAGE_TOKENS  # of the chunk: a channel has that many steps, then that many zeros
    start = page_start(pages.table, page, COLUMN_SCALE, tl.float32) + row * 2 * groups
    tl.store(start, step, j < R)
    tl.store(start + groups, zero, j < R)


@triton.jit
def append_kernel(
    token, x, x_batch, x_head, pages, H,
    D: tl.constexpr, DP: tl.constexpr, TYPE: tl.constexpr, LAYOUT: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """Write the token to position lengths[bh], and advance the length. x (B,H,R): what the index takes of its key.

    Grid (B*H,).
    """
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // H, bh % H
    n = tl.load(pages.lengths + bh)
    page, d = n // PAGE_TOKENS, tl.arange(0, DP)
    capacity = page_capacity(pages.table, page)
    row = (bh * capacity + n % PAGE_TOKENS) * D + d
    key = tl.load(token.k + b * token.k_batch + h * token.k_head + d, d < D)
    tl.store(page_start(pages.table, page, COLUMN_K, TYPE) + row, key, d < D)
    value = tl.load(token.v + b * token.v_batch + h * token.v_head + d, d < D)
    tl.store(page_start(pages.table, page, COLUMN_V, TYPE) + row, value, d < D)
    if MEAN:
        mean = tl.load(pages.v_mean + bh * D + d, d < D)
        mean += tl.div_rn(value.to(tl.float32) - mean, (n + 1 + d * 0).to(tl.float32))
        tl.store(pages.v_mean + bh * D + d, mean, d < D)
    if LAYOUT != LAYOUT_ROWS:
        R = pages.R
        row = x + b * x_batch + h * x_head
        if LAYOUT != LAYOUT_COPY:  # noqa: SIM102 - a constant of the compiler, then a number of the device
            if n % PAGE_TOKENS == PAGE_TOKENS - 1:
                for channel in range(0, R, CHANNEL_BLOCK):
                    j = channel + tl.arange(0, CHANNEL_BLOCK)
                    quantise_group(pages, page, bh, channel, tl.load(row + j, j < R, 0.0), LAYOUT)
        for first in range(0, R, APPENDED_CHANNELS):
            j = first + tl.arange(0, APPENDED_CHANNELS)
            new = tl.load(row + j, j < R, 0.0)
            if LAYOUT == LAYOUT_COPY:
                start = page_start(pages.table, page, COLUMN_INDEX, TYPE)
                tl.store(start + (bh * R + j) * capacity + n % PAGE_TOKENS, new, j < R)
            else:
                tl.store(pages.tail + (bh * R + j) * PAGE_TOKENS + n % PAGE_TOKENS, new, j < R)
    tl.debug_barrier()
    tl.store(pages.lengths + bh, n + 1)
