"""Step 1 of SparQ's algorithm 1 where few query heads share a KV head: one warp scores a page at a time.

One query fills a sixteenth of a product on matrix units. So here every thread multiplies the 16 bytes of a channel that
it loads and adds up in registers: the loop over pages has no barrier, and many programs of one warp hide each other's
loads. `choose_channels_kernel` says before, once for each KV head, which channels score and what they are weighed by.

A code becomes a float32 without a conversion: its bits are put under the exponent of 2^23, and 2^23 is subtracted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .shared import (
    ALIGNMENT,
    COLUMN_INDEX,
    COLUMN_SCALE,
    INT4_CODES,
    INT4_LANES,
    INT4_MASK,
    LAYOUT_COPY,
    LAYOUT_INT8,
    PAGE_TOKENS,
    apply_softcap,
    constant,
    finite_maximum,
    page_capacity,
    page_start,
    table_of,
)
from .sparq import inverse_temperature

TWO_23 = constant(8388608.0)  # from here on to 2^24, the last bit of a float32 is worth one
BITS_OF_TWO_23 = constant(0x4B000000)
LOAD_INT8 = constant(2)  # channels of a page in one load of 16 bytes by every thread of a warp
LOAD_INT4 = constant(4)
SHORT_NIBBLES = constant(4)  # of a dword, that lie below the exponent of a float32


@triton.jit
def largest(weight, r, inside):
    """Return a mask of the r largest numbers of `weight`, which are not negative; of equal ones the first."""
    bits = tl.where(inside, weight.to(tl.int32, bitcast=True), -1)
    threshold = tl.full([], 0, tl.int32)
    for place in tl.static_range(31):
        higher = threshold | (1 << (30 - place))
        threshold = tl.where(tl.sum((bits >= higher).to(tl.int32), 0) >= r, higher, threshold)
    ties = bits == threshold
    room = r - tl.sum((bits > threshold).to(tl.int32), 0)
    return (bits > threshold) | (ties & (tl.cumsum(ties.to(tl.int32), 0) <= room))


@triton.jit
def choose_channels_kernel(
    query, scores,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHANNELS: tl.constexpr, TEMPERATURE: tl.constexpr,
):  # fmt: skip
    """Choose the channels that score, grouped as in section 4, and weigh each by q and the inverse temperature.

    Where scores.r is 0, all D channels of q score, at the query's scale. Grid (B*H,).
    """
    bh = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DP)
    chosen = d < D
    if scores.r > 0:
        weight = tl.zeros([DP], tl.float32)
        for g in tl.static_range(G):
            weight += tl.abs(tl.load(query.q + (bh * G + g) * D + d, d < D, 0.0).to(tl.float32))
        chosen = largest(tl.where(weight == weight, weight, float("inf")), scores.r, d < D)
    order = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(scores.channels + bh * CHANNELS + order, d, chosen)
    for g in tl.static_range(G):
        q = tl.load(query.q + (bh * G + g) * D + d, d < D, 0.0).to(tl.float32)
        scaled = q * query.scale
        if scores.r > 0:
            scaled = q * tl.sum(inverse_temperature(q[None, :], chosen, query.scale, scores.r, D, TEMPERATURE), 0)
        tl.store(scores.weights + (bh * G + g) * CHANNELS + order, scaled, chosen)


@triton.jit
def score_copied(start, stride, scores, bh, G: tl.constexpr, CHANNELS: tl.constexpr):
    """Return the logits of a page, from channels in the cache's own type: for each query head ((PAGE_TOKENS,),).

    start: where channel 0 of the KV head has the page's first token. stride: elements from a channel to the next.
    """
    t = tl.arange(0, PAGE_TOKENS)
    sums = (tl.zeros([PAGE_TOKENS], tl.float32),) * G
    for j in tl.static_range(CHANNELS):
        channel = tl.load(scores.channels + bh * CHANNELS + j)
        k = tl.load(tl.multiple_of(start + channel * stride + t, ALIGNMENT)).to(tl.float32)
        more = ()
        for g in tl.static_range(G):
            more += (sums[g] + k * tl.load(scores.weights + (bh * G + g) * CHANNELS + j),)
        sums = more
    logits = ()
    for g in tl.static_range(G):
        logits += ((sums[g],),)
    return logits


@triton.jit
def add_zeros(scale, groups, scores, bh, g, G: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr):
    """Return what the zeros of the channels add to every logit of a page. scale, groups: as in score_int8."""
    j = tl.arange(0, PADDED)
    channel = tl.load(scores.channels + bh * CHANNELS + j, j < CHANNELS, 0)
    zero = tl.load(scale + channel * (2 * groups) + groups, j < CHANNELS, 0.0)
    return tl.sum(tl.load(scores.weights + (bh * G + g) * CHANNELS + j, j < CHANNELS, 0.0) * zero, 0)


@triton.jit
def score_int8(start, scale, groups, scores, bh, G: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr):
    """Return the logits of a page, from codes of 8 bits: for each query head two of (LOAD_INT8, 16, 4).

    start, scale: where channel 0 of the KV head has the page's codes, and its step. groups: pages of the chunk.
    The tokens of the numbers are those of `tokens_of_int8`. Half a warp loads a channel and the other half the next
    one; in the end each half keeps 8 of the 16 tokens that a thread has added up.
    """
    t, row = tl.arange(0, PAGE_TOKENS), tl.arange(0, LOAD_INT8)
    sums = (tl.zeros([LOAD_INT8, PAGE_TOKENS], tl.float32),) * G
    for first in tl.static_range(0, CHANNELS, LOAD_INT8):
        j = first + row
        real = j < CHANNELS
        channel = tl.load(scores.channels + bh * CHANNELS + j, real, 0)
        step = tl.load(scale + channel * (2 * groups), real, 0.0)
        source = start + (channel * (groups * PAGE_TOKENS))[:, None] + t[None, :]
        codes = tl.load(tl.multiple_of(source, (ALIGNMENT, ALIGNMENT)), real[:, None], 0).to(tl.uint32)
        k = (codes | BITS_OF_TWO_23).to(tl.float32, bitcast=True) - TWO_23
        more = ()
        for g in tl.static_range(G):
            weight = tl.load(scores.weights + (bh * G + g) * CHANNELS + j, real, 0.0) * step
            more += (sums[g] + k * weight[:, None],)
        sums = more
    is_first = (row == 0)[:, None, None]
    logits = ()
    for g in tl.static_range(G):
        zeros = add_zeros(scale, groups, scores, bh, g, G, CHANNELS, PADDED)
        x, y = tl.split(sums[g].reshape(LOAD_INT8, 16, 2, 2, 4).permute(0, 1, 4, 2, 3))
        x0, x1 = tl.split(x)
        y0, y1 = tl.split(y)
        x = tl.where(is_first, tl.sum(x0, 0, keep_dims=True), tl.sum(x1, 0, keep_dims=True)) + zeros
        y = tl.where(is_first, tl.sum(y0, 0, keep_dims=True), tl.sum(y1, 0, keep_dims=True)) + zeros
        logits += ((x, y),)
    return logits


@triton.jit
def tokens_of_int8():
    """Return which tokens of a page the numbers of score_int8 belong to."""
    row, run, i = tl.arange(0, LOAD_INT8), tl.arange(0, 16), tl.arange(0, 4)
    t = 8 * row[:, None, None] + 16 * run[None, :, None] + i[None, None, :]
    return t, t + 4


@triton.jit
def score_int4(start, scale, groups, scores, bh, G: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr):
    """Return the logits of a page, from codes of 4 bits: for each query head two of (LOAD_INT4, dwords).

    Arguments as in score_int8; the tokens are those of `tokens_of_int4`. A code stays at its place in its half of a
    dword, and counts a power of 16 times until all channels are added up.
    """
    w, row = tl.arange(0, PAGE_TOKENS // INT4_CODES), tl.arange(0, LOAD_INT4)
    sums = (tl.zeros([LOAD_INT4, PAGE_TOKENS // INT4_CODES], tl.float32),) * (G * INT4_CODES)
    for first in tl.static_range(0, CHANNELS, LOAD_INT4):
        j = first + row
        real = j < CHANNELS
        channel = tl.load(scores.channels + bh * CHANNELS + j, real, 0)
        step = tl.load(scale + channel * (2 * groups), real, 0.0)
        source = start + (channel * (groups * PAGE_TOKENS // INT4_CODES))[:, None] + w[None, :]
        dwords = tl.load(tl.multiple_of(source, (ALIGNMENT, ALIGNMENT)), real[:, None], 0).to(tl.uint32, bitcast=True)
        halves = (dwords, dwords >> 16)
        numbers = ()
        for c in tl.static_range(INT4_CODES):
            code = halves[c // SHORT_NIBBLES] & (INT4_MASK << (4 * (c % SHORT_NIBBLES)))
            numbers += ((code | BITS_OF_TWO_23).to(tl.float32, bitcast=True) - TWO_23,)
        more = ()
        for g in tl.static_range(G):
            weight = tl.load(scores.weights + (bh * G + g) * CHANNELS + j, real, 0.0) * step
            for c in tl.static_range(INT4_CODES):
                more += (sums[g * INT4_CODES + c] + numbers[c] * weight[:, None],)
        sums = more
    logits = ()
    for g in tl.static_range(G):
        zeros = add_zeros(scale, groups, scores, bh, g, G, CHANNELS, PADDED)
        both = ()
        for i in tl.static_range(2):
            x = tl.zeros([LOAD_INT4, PAGE_TOKENS // INT4_CODES], tl.float32)
            for kept in tl.static_range(LOAD_INT4):  # each quarter of a warp keeps two codes of a dword
                total = tl.sum(sums[g * INT4_CODES + 2 * kept + i], 0, keep_dims=True)
                total *= 1.0 / (1 << (4 * ((2 * kept + i) % SHORT_NIBBLES)))
                x = tl.where((row == kept)[:, None], total, x)
            both += (x + zeros,)
        logits += (both,)
    return logits


@triton.jit
def tokens_of_int4():
    """Return which tokens of a page the numbers of score_int4 belong to."""
    row, w = tl.arange(0, LOAD_INT4)[:, None], tl.arange(0, PAGE_TOKENS // INT4_CODES)[None, :]
    t = w // INT4_LANES * (INT4_LANES * INT4_CODES) + 2 * INT4_LANES * row + w % INT4_LANES
    return t, t + INT4_LANES


@triton.jit
def take_logits(logits, tokens, maximum, total, target, left, softcap, CAPPED: tl.constexpr):
    """Store the logits of a page at `target`, and carry their maximum and the sum of their exponentials.

    logits: tensors, and `tokens` which tokens of the page they are of; the first `left` of these exist.
    """
    kept = ()
    for part in tl.static_range(len(tokens)):
        x = apply_softcap(logits[part], softcap, CAPPED)
        tl.store(tl.multiple_of(target + tokens[part], (ALIGNMENT,) * len(x.shape)), x)
        kept += (tl.where(tokens[part] < left, x, float("-inf")),)
    peaks = kept[0]
    for part in tl.static_range(1, len(tokens)):
        peaks = tl.maximum(peaks, kept[part])
    highest = tl.maximum(maximum, tl.max(peaks))
    reference = finite_maximum(highest)
    weights = tl.exp(kept[0] - reference)
    for part in tl.static_range(1, len(tokens)):
        weights += tl.exp(kept[part] - reference)
    return highest, total * tl.exp(maximum - reference) + tl.sum(weights)


@triton.jit
def take_page(logits, tokens, maxima, totals, query, scores, bh, page, n, G: tl.constexpr, CAPPED: tl.constexpr):
    """Take the logits of a page of all query heads, n being the tokens of the row: see take_logits."""
    new_maxima, new_totals = (), ()
    for g in tl.static_range(G):
        target = scores.logits + (bh * G + g) * scores.width + page * PAGE_TOKENS
        left = n - page * PAGE_TOKENS
        maximum, total = take_logits(logits[g], tokens, maxima[g], totals[g], target, left, query.softcap, CAPPED)
        new_maxima += (maximum,)
        new_totals += (total,)
    return new_maxima, new_totals


@triton.jit
def score_page(
    page, pages, table, place, scores, bh,
    G: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr, TYPE: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Return the logits of a closed page for each query head, and which tokens of the page they are of.

    table, place: as table_of returns them.
    """
    capacity = page_capacity(table, page).to(tl.int32)
    first = place * pages.R
    if LAYOUT == LAYOUT_COPY:
        start = page_start(table, page, COLUMN_INDEX, TYPE, pages.base) + first * capacity
        return score_copied(start, capacity, scores, bh, G, CHANNELS), (tl.arange(0, PAGE_TOKENS),)
    else:
        groups = capacity // PAGE_TOKENS
        scale = page_start(table, page, COLUMN_SCALE, tl.float32, pages.base) + first * 2 * groups
        if LAYOUT == LAYOUT_INT8:
            start = page_start(table, page, COLUMN_INDEX, tl.uint8, pages.base) + first * capacity
            return score_int8(start, scale, groups, scores, bh, G, CHANNELS, PADDED), tokens_of_int8()
        else:
            start = page_start(table, page, COLUMN_INDEX, tl.int32, pages.base) + first * (capacity // INT4_CODES)
            return score_int4(start, scale, groups, scores, bh, G, CHANNELS, PADDED), tokens_of_int4()


@triton.jit
def channel_scores_kernel(
    query, pages, scores,
    G: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr, TYPE: tl.constexpr, LAYOUT: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Store the logits of one split of the pages, their maximum and the sum of their exponentials, in `scores`.

    Grid (B*H, splits), of one warp.
    """
    bh, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.load(pages.lengths + bh)
    table, place = table_of(pages, bh)
    every = tl.cdiv(n, PAGE_TOKENS)
    share = tl.cdiv(every, scores.splits)
    first, last = split * share, tl.minimum(every, (split + 1) * share)
    closed = last if LAYOUT == LAYOUT_COPY else tl.minimum(last, n // PAGE_TOKENS)
    maxima = (tl.full([], float("-inf"), tl.float32),) * G
    totals = (tl.full([], 0.0, tl.float32),) * G
    for page in range(first, closed):
        logits, tokens = score_page(page, pages, table, place, scores, bh, G, CHANNELS, PADDED, TYPE, LAYOUT)
        maxima, totals = take_page(logits, tokens, maxima, totals, query, scores, bh, page, n, G, CAPPED)
    if (last > closed) & (first <= closed):  # the open group of a quantised index
        tokens = (tl.arange(0, PAGE_TOKENS),)
        logits = score_copied(pages.tail + bh * pages.R * PAGE_TOKENS, PAGE_TOKENS, scores, bh, G, CHANNELS)
        maxima, totals = take_page(logits, tokens, maxima, totals, query, scores, bh, closed, n, G, CAPPED)
    for g in tl.static_range(G):
        stats = scores.stats + ((bh * scores.splits + split) * G + g) * 2
        tl.store(stats, maxima[g])
        tl.store(stats + 1, totals[g])
