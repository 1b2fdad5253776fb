"""Dense decode over pages, split over positions; and what all kernels share.

Pages are 256 tokens, rows of their table 8 numbers (device.py).
Letters as everywhere; GP, DP: G and D padded to what a tensor core takes; S splits of a row's pages; bh = b*H + h.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def entry(table, page, COLUMN: tl.constexpr, TYPE: tl.constexpr):
    """Where a page of row 0, KV head 0 begins."""
    return tl.load(table + page * 8 + COLUMN).to(tl.pointer_type(TYPE), bitcast=True)


@triton.jit
def capped(x, softcap, CAPPED: tl.constexpr):
    """softcap * tanh(x / softcap)."""
    if CAPPED:
        x = softcap * (1 - 2 / (tl.exp(2 * (x / softcap)) + 1))
    return x


@triton.jit
def product(a, b, DOT: tl.constexpr):
    """a @ b with float32 a in full: where b is half precision, a is split in two of that type."""
    b = b.to(DOT)
    high = a.to(DOT)
    y = tl.dot(high, b, input_precision="tf32x3")
    if tl.float32 != DOT:
        y += tl.dot((a - high.to(tl.float32)).to(DOT), b, input_precision="tf32x3")
    return y


@triton.jit
def query(q, bh, G, D, GP: tl.constexpr, DP: tl.constexpr):
    """(GP, DP), zero where padded; q (B,H,G,D) contiguous."""
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    return tl.load(q + (bh * G + g[:, None]) * D + d[None, :], (g < G)[:, None] & (d < D)[None, :], 0.0)


@triton.jit
def online(x, v, m, l, acc, DOT: tl.constexpr):
    """One block of the running softmax: x (GP, BN) logits, v (BN, DP) -> maximum, sum and weighted values."""
    top = tl.maximum(m, tl.max(x, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp(x - safe[:, None])
    shrink = tl.exp(m - safe)
    return top, l * shrink + tl.sum(p, 1), acc * shrink[:, None] + product(p, v, DOT)


@triton.jit
def last(counter, of):
    """True in the program that arrives last of `of`; what the others stored is then visible to it."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1)
    done = arrived == of - 1
    if done:
        tl.store(counter, 0)
    tl.debug_barrier()
    return done


@triton.jit
def leave(part, m, l, acc, bh, s, S, G, D, GP: tl.constexpr, DP: tl.constexpr):
    """Store a split's share: part (B*H, S, G, D + 2)."""
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    at = part + ((bh * S + s) * G + g) * (D + 2)
    tl.store(at[:, None] + d[None, :], acc, (g < G)[:, None] & (d < D)[None, :])
    tl.store(at + D, m, g < G)
    tl.store(at + D + 1, l, g < G)


@triton.jit
def merged(part, bh, g, S, G, D, SP: tl.constexpr, DP: tl.constexpr):
    """Query head g over all splits: maximum, sum and weighted values (DP,)."""
    s, d = tl.arange(0, SP), tl.arange(0, DP)
    at = part + ((bh * S + s) * G + g) * (D + 2)
    m = tl.load(at + D, s < S, float("-inf"))
    top = tl.max(m, 0)
    w = tl.exp(m - tl.where(top == float("-inf"), 0.0, top))
    l = tl.sum(w * tl.load(at + D + 1, s < S, 0.0), 0)
    acc = tl.load(at[:, None] + d[None, :], (s < S)[:, None] & (d < D)[None, :], 0.0)
    return top, l, tl.sum(w[:, None] * acc, 0)


@triton.jit
def dense_kernel(
    q, y, table, lengths, part, counter, scale, softcap, G, S,
    D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, SP: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    TYPE: tl.constexpr, DOT: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Grid (B*H, S): softmax(scale q K^T) V over the positions below lengths[bh]. Reads 2ND per KV head."""
    bh, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.load(lengths + bh)
    share = tl.cdiv(tl.cdiv(n, 256), S) * 256
    start, stop = s * share, tl.minimum(n, (s + 1) * share)
    t, d = tl.arange(0, BN), tl.arange(0, DP)
    x = query(q, bh, G, D, GP, DP).to(DOT)
    m = tl.full([GP], float("-inf"), tl.float32)
    l = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    for i in tl.range(start, stop, BN, num_stages=STAGES):
        page = i // 256
        cap = tl.load(table + page * 8 + 4)
        row = (bh * cap + i % 256) * D
        at = t[:, None] * D + d[None, :]
        mask = (i + t < n)[:, None] & (d < D)[None, :]
        k = tl.load(tl.multiple_of(entry(table, page, 0, TYPE) + row + at, (16, 16)), mask, 0.0)
        v = tl.load(tl.multiple_of(entry(table, page, 1, TYPE) + row + at, (16, 16)), mask, 0.0)
        logits = capped(tl.dot(x, tl.trans(k.to(DOT)), input_precision="tf32x3") * scale, softcap, CAPPED)
        m, l, acc = online(tl.where((i + t < n)[None, :], logits, float("-inf")), v, m, l, acc, DOT)
    g = tl.arange(0, GP)
    if S == 1:
        inside = (g < G)[:, None] & (d < D)[None, :]
        tl.store(y + (bh * G + g[:, None]) * D + d[None, :], acc / l[:, None], inside)
    else:
        leave(part, m, l, acc, bh, s, S, G, D, GP, DP)
        if last(counter + bh, S):
            for one in range(0, G):
                _, total, values = merged(part, bh, one, S, G, D, SP, DP)
                tl.store(y + (bh * G + one) * D + d, values / total, d < D)
