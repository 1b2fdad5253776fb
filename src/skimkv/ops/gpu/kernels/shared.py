"""What the kernels share: the layout of tables, the query, the running softmax, and how programs share a row.

Letters are those of the stores: B batch, H KV heads, G query heads per KV head, D head size, R channels of an index.
GP, DP, RP, SP: G, D, the channels that score, and the programs of a row, padded to powers of two. bh = b*H + h.
Arguments that belong together come in the named tuples of launch.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import launch, tables


def constant(value):
    """Make a number that kernels take from their module. The interpreter computes with Python's own numbers."""
    return value if launch.interpreted() else tl.constexpr(value)


PAGE_TOKENS = constant(tables.PAGE_TOKENS)
TABLE_COLUMNS = constant(tables.TABLE_COLUMNS)
COLUMN_K = constant(tables.COLUMN_K)
COLUMN_V = constant(tables.COLUMN_V)
COLUMN_INDEX = constant(tables.COLUMN_INDEX)
COLUMN_SCALE = constant(tables.COLUMN_SCALE)
COLUMN_CAPACITY = constant(tables.COLUMN_CAPACITY)

LAYOUT_ROWS = constant(launch.LAYOUTS["none"])  # channels are read in rows of K
LAYOUT_COPY = constant(launch.LAYOUTS["copy"])  # in the channel-major copy, in the cache's type
LAYOUT_INT8 = constant(launch.LAYOUTS["int8"])  # in the quantised index, and its open group in full precision
LAYOUT_INT4 = constant(launch.LAYOUTS["int4"])

CHANNEL_BLOCK = constant(16)  # channels at a time, where a kernel walks over them
ALIGNMENT = constant(16)  # elements: D and the tokens of a page are multiples of it, so loads are wide
INT4_LANES = constant(16)  # of a block of INT4_BLOCK codes: token j is in dword j % 16 ...
INT4_CODES = constant(tables.INT4_BLOCK // 16)  # ... and in nibble j // 16 of it
INT4_BITS = constant(launch.LAYOUTS["int4"])  # of a code
INT4_MASK = constant(15)


@triton.jit
def table_of(pages, bh):
    """Return the table that has the pages of a row and KV head, and the head's place in these pages.

    A store has one table, because its chunks hold all rows; in an engine's blocks every row has a table of its own.
    """
    table, head = pages.table, bh
    if pages.heads is not None:
        table += bh // pages.heads * pages.table_row
        head = bh % pages.heads
    return table, head


@triton.jit
def page_start(table, page, COLUMN: tl.constexpr, TYPE: tl.constexpr, base=None):
    """Return where a page begins in head 0, as a pointer to TYPE. base: what the addresses count from, if they do."""
    address = tl.load(table + page * TABLE_COLUMNS + COLUMN)
    if base is not None:
        address += base
    return address.to(tl.pointer_type(TYPE), bitcast=True)


@triton.jit
def page_capacity(table, page):
    """Return the tokens in the chunk of a page: the distance between its KV heads."""
    return tl.load(table + page * TABLE_COLUMNS + COLUMN_CAPACITY)


@triton.jit
def apply_softcap(logits, softcap, CAPPED: tl.constexpr):
    """Return softcap * tanh(logits / softcap), or the logits where they are not capped.

    1 - 2 / (exp(2y) + 1) cancels near zero; up to 1/4 five terms of the series have a relative error of 1e-8.
    """
    if CAPPED:
        y = logits / softcap
        square = y * y
        series = (62 / 2835 * square - 17 / 315) * square + 2 / 15
        small = logits + logits * square * (series * square - 1 / 3)
        logits = tl.where(square < 1 / 16, small, softcap * (1 - 2 / (tl.exp(2 * y) + 1)))
    return logits


@triton.jit
def in_two(x, DOT: tl.constexpr):
    """Return two numbers of the type DOT whose sum is x, in float32; where DOT is float32, the second is zero."""
    high = x.to(DOT)
    return high, (x - high.to(tl.float32)).to(DOT)


@triton.jit
def product(a, b, DOT: tl.constexpr):
    """Multiply a, in float32, by b. Where b is half precision, a becomes a sum of two such numbers, not rounded."""
    b = b.to(DOT)
    high, low = in_two(a, DOT)
    y = tl.dot(high, b, input_precision="tf32x3")
    if tl.float32 != DOT:
        y += tl.dot(low, b, input_precision="tf32x3")
    return y


@triton.jit
def load_query(q, bh, G, D, GP: tl.constexpr, DP: tl.constexpr):
    """Load the queries of a KV head: q (B,H,G,D) contiguous -> (GP,DP), zero where padded."""
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    return tl.load(q + (bh * G + g[:, None]) * D + d[None, :], (g < G)[:, None] & (d < D)[None, :], 0.0)


@triton.jit
def finite_maximum(maximum):
    """Replace -inf, the maximum of no logits, by 0, so that a difference to it is no NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def sink_weight(query, bh, g, maximum):
    """Return what the sinks of query heads g add to the sum of exp(logit - maximum), as maximum is shaped.

    A sink far above the maximum leaves the positions no weight; exp(80) does so too, and is finite.
    """
    sink = tl.load(query.sinks + bh % query.H * query.G + g, g < query.G, float("-inf"))
    difference = sink - finite_maximum(maximum)
    return tl.exp(tl.where(difference > 80, 80.0, difference))


@triton.jit
def online_softmax(logits, v, maximum, total, values, DOT: tl.constexpr):
    """Take one block into the running softmax: logits (GP,BLOCK), v (BLOCK,DP).

    Returns the new maximum (GP,), the sum of exponentials (GP,), and the values weighted by them (GP,DP).
    """
    new_maximum = tl.maximum(maximum, tl.max(logits, 1))
    reference = finite_maximum(new_maximum)
    weights = tl.exp(logits - reference[:, None])
    shrink = tl.exp(maximum - reference)
    return new_maximum, total * shrink + tl.sum(weights, 1), values * shrink[:, None] + product(weights, v, DOT)


@triton.jit
def is_last_program(counter, programs):
    """Return True in the program that arrives last of all; what the others have stored is then visible to it."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1)
    is_last = arrived == programs - 1
    if is_last:
        tl.store(counter, 0)
    tl.debug_barrier()
    return is_last


@triton.jit
def store_part(splits, maximum, total, values, bh, split, G, D, GP: tl.constexpr, DP: tl.constexpr):
    """Store the running softmax of one split: parts (B*H, splits, G, D+2)."""
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    part = splits.parts + ((bh * splits.programs + split) * G + g) * (D + 2)
    tl.store(part[:, None] + d[None, :], values, (g < G)[:, None] & (d < D)[None, :])
    tl.store(part + D, maximum, g < G)
    tl.store(part + D + 1, total, g < G)


@triton.jit
def merge_parts(splits, bh, g, G, D, SP: tl.constexpr, DP: tl.constexpr):
    """Merge the running softmax of query head g over all splits: maximum, sum, and weighted values (DP,)."""
    split, d = tl.arange(0, SP), tl.arange(0, DP)
    part = splits.parts + ((bh * splits.programs + split) * G + g) * (D + 2)
    maxima = tl.load(part + D, split < splits.programs, float("-inf"))
    maximum = tl.max(maxima, 0)
    weights = tl.exp(maxima - finite_maximum(maximum))
    total = tl.sum(weights * tl.load(part + D + 1, split < splits.programs, 0.0), 0)
    values = tl.load(part[:, None] + d[None, :], (split < splits.programs)[:, None] & (d < D)[None, :], 0.0)
    return maximum, total, tl.sum(weights[:, None] * values, 0)
