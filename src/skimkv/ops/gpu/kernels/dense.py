"""Dense attention over pages, split over positions: equation 2 of SparQ (Ribar et al. 2023)."""

from __future__ import annotations

import triton
import triton.language as tl

from .shared import (
    ALIGNMENT,
    COLUMN_K,
    COLUMN_V,
    PAGE_TOKENS,
    apply_softcap,
    is_last_program,
    load_query,
    merge_parts,
    online_softmax,
    page_capacity,
    page_start,
    sink_weight,
    store_part,
    table_of,
)


@triton.jit
def dense_kernel(
    query, pages, splits,
    D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, SP: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    TYPE: tl.constexpr, DOT: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Compute y = softmax(scale q K^T) V over the positions below lengths[bh]; 2ND elements are read per KV head.

    Grid (B*H, splits).
    """
    bh, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    G = query.G
    n = tl.load(pages.lengths + bh)
    table, place = table_of(pages, bh)
    share = tl.cdiv(tl.cdiv(n, PAGE_TOKENS), splits.programs) * PAGE_TOKENS
    start, stop = split * share, tl.minimum(n, (split + 1) * share)
    t, d = tl.arange(0, BLOCK), tl.arange(0, DP)
    q = load_query(query.q, bh, G, D, GP, DP).to(DOT)
    maximum = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    values = tl.zeros([GP, DP], tl.float32)
    for i in tl.range(start, stop, BLOCK, num_stages=STAGES):
        page = i // PAGE_TOKENS
        row = (place * page_capacity(table, page) + i % PAGE_TOKENS) * D
        offset = t[:, None] * D + d[None, :]
        mask = (i + t < n)[:, None] & (d < D)[None, :]
        k_start = page_start(table, page, COLUMN_K, TYPE, pages.base) + row
        v_start = page_start(table, page, COLUMN_V, TYPE, pages.base) + row
        k = tl.load(tl.multiple_of(k_start + offset, (ALIGNMENT, ALIGNMENT)), mask, 0.0)
        v = tl.load(tl.multiple_of(v_start + offset, (ALIGNMENT, ALIGNMENT)), mask, 0.0)
        logits = tl.dot(q, tl.trans(k.to(DOT)), input_precision="tf32x3") * query.scale
        logits = apply_softcap(logits, query.softcap, CAPPED)
        logits = tl.where((i + t < n)[None, :], logits, float("-inf"))
        maximum, total, values = online_softmax(logits, v, maximum, total, values, DOT)
    if splits.programs == 1:
        g = tl.arange(0, GP)
        if SINKS:
            total += sink_weight(query, bh, g, maximum)
        mask = (g < G)[:, None] & (d < D)[None, :]
        tl.store(query.y + (bh * G + g[:, None]) * D + d[None, :], values / total[:, None], mask)
    else:
        store_part(splits, maximum, total, values, bh, split, G, D, GP, DP)
        if is_last_program(splits.counter + bh, splits.programs):
            for head in range(0, G):
                head_maximum, head_total, head_values = merge_parts(splits, bh, head, G, D, SP, DP)
                if SINKS:
                    head_total += sink_weight(query, bh, head, head_maximum)
                tl.store(query.y + (bh * G + head) * D + d, head_values / head_total, d < D)
