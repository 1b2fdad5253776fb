// Dense attention over all positions of a unit or a part of them, y = softmax(q K^T) V, and the variant of heavy
// hitters that keeps the softmax weights: H2O (Zhang et al., arXiv 2306.14048, algorithm 1) adds them to the scores of
// its slots and overwrites the slot with the lowest score.
#pragma once
#include <stdint.h>

#include "kernels/cache_layout.h"
#include "kernels/quantised_rows.h"
#include "kernels/row_attention.h"
#include "kernels/scratch_arena.h"
#include "kernels/unit.h"
#include "kernels/vector_math.h"
#include "skimkv.h"

namespace skimkv::SKIMKV_NS {

// Rows of a block of a dense step, and the most of them. Quantised rows are so short that more of them stay in the L1
// cache, and what is done once a block, such as rounding the weights, costs them a tenth of the time.
constexpr int MOST_BLOCK_ROWS = 2 * BLOCK_ROWS;
template <class R> constexpr int rows_of_block = row_bits<R> ? MOST_BLOCK_ROWS : BLOCK_ROWS;
// Positions are attended to in sections, whose states of the softmax are joined in their order, so that a result
// depends neither on the threads nor on the batch's other rows. A section has a power of two of positions: at least
// 512, and so many that n positions are at most MOST_SECTIONS, because the start of each costs a quarter of a
// microsecond.
constexpr int64_t MOST_SECTIONS = 16;
static inline int64_t section_length(int64_t n) {
    int64_t length = 512;
    while (length * MOST_SECTIONS < n) length *= 2;
    return length;
}
static inline int64_t sections_of(int64_t n) { return (n + section_length(n) - 1) / section_length(n); }

// Whether a step attends to all rows, and whether it then needs their softmax weights.
static inline bool is_dense(const skimkv_op *op) { return op->method == SKIMKV_DENSE || op->method == SKIMKV_TOVA; }
static inline bool keeps_weights(const skimkv_op *op) { return op->score || op->method == SKIMKV_TOVA; }

// Scratch memory of one thread.
struct DenseScratch {
    float *q;       // query_floats
    float *s;       // [G][MOST_BLOCK_ROWS], or [G][padded_n + MOST_BLOCK_ROWS] where weights are kept
    float *online;  // the state of the softmax
    uint8_t *row;   // k and v of the new row, where rows are quantised
};
static DenseScratch take_dense(Arena &a, const skimkv_op *op, int64_t n) {
    const int G = op->cache->G, P = padded_head(op->cache->D);
    DenseScratch x{};
    x.q = a.take<float>(query_floats(op->cache));
    x.s = a.take<float>(G * ((keeps_weights(op) ? round_up(n, 256) : 0) + MOST_BLOCK_ROWS));
    x.online = a.take<float>(online_softmax_floats(G, P));
    x.row = a.take<uint8_t>(op->cache->bits ? 2 * row_bytes(op->cache) : 0);
    return x;
}

// Points k and v to the new row of unit (b, h) as the cache will hold it. T is the type of the new row, and R the type
// of the cache's rows.
template <class T, class R>
static void new_row_as_cached(const skimkv_op *op, int64_t b, int64_t h, const DenseScratch &x, const R **k,
                              const R **v) {
    const int64_t at = b * op->n_b + h * op->n_h;
    const T *k_new = (const T *)op->k_new + at, *v_new = (const T *)op->v_new + at;
    if constexpr (row_bits<R> != 0) {
        uint8_t *k_row = x.row, *v_row = x.row + row_bytes(op->cache);
        quantise_row(k_new, op->cache->D, row_bits<R>, k_row), quantise_row(v_new, op->cache->D, row_bits<R>, v_row);
        *k = (const R *)k_row, *v = (const R *)v_row;
    } else {
        *k = k_new, *v = v_new;
    }
}

// Points k and v to the rows from .. to-1, at most MOST_BLOCK_ROWS. The position after the last cached one is the new
// row. Up to the next multiple of W the pointers repeat the last row.
template <class T, class R>
static void gather_block(const skimkv_op *op, int64_t b, int64_t h, int64_t from, int64_t to, const DenseScratch &x,
                         const R **k, const R **v) {
    const skimkv_cache *c = op->cache;
    int j = 0;
    for_each_run(c, from, min(to, cached_tokens(op, b)), [&](const skimkv_chunk *chunk, int64_t first, int64_t last) {
        const R *kr = key_row<R>(chunk, b, h, first), *vr = value_row<R>(chunk, b, h, first);
        for (int64_t p = first; p < last; p++, kr += chunk->k_n, vr += chunk->v_n) k[j] = kr, v[j] = vr, j++;
    });
    if (to > cached_tokens(op, b)) {
        new_row_as_cached<T>(op, b, h, x, k + j, v + j);
        j++;
    }
    for (; j % W; j++) k[j] = k[j - 1], v[j] = v[j - 1];
}

// Attends to the positions from .. to-1 of a unit, sections of `length` positions; states [sections][ld] get theirs.
template <class T, class R, int D_>
static void dense_positions(const skimkv_op *op, int64_t b, int64_t h, int64_t from, int64_t to, const DenseScratch &x,
                            int64_t length, float *states, int64_t ld) {
    const skimkv_cache *c = op->cache;
    const int G = c->G, P = padded_head(c->D);
    Unit u{};
    u.q = x.q;
    load_query(op, u, b, h);
    constexpr int ROWS = rows_of_block<R>;
    static_assert(512 % ROWS == 0);
    const R *rows[2][2][ROWS + W];                           // [this block or the next][k, v]
    const OnlineSoftmax o = online_softmax_at(x.online, G);  // which stays in the L1 cache
    if (from < to) gather_block<T>(op, b, h, from, min(from + ROWS, to), x, rows[0][0], rows[0][1]);
    for (int64_t p = from, i = 0; p < to; p += ROWS, i ^= 1) {
        const int n = (int)min(ROWS, to - p);
        const R **k = rows[i][0], **v = rows[i][1], **next = rows[i ^ 1][0];
        if ((p & (length - 1)) == 0) reset_softmax(o, G, P);
        if (p + n < to) gather_block<T>(op, b, h, p + n, min(p + n + ROWS, to), x, next, rows[i ^ 1][1]);
        dot_query_with_keys<R, D_>(op, u, k, n, x.s, ROWS, v);
        update_softmax<R, D_>(o, P, G, c->D, v, n, x.s, ROWS, softcap_log2(op), p + 2 * ROWS <= to ? next : nullptr);
        if (((p + n) & (length - 1)) == 0 || p + n == to)
            __builtin_memcpy(states + p / length * ld, x.online, online_softmax_floats(G, P) * sizeof(float));
    }
}

// Divides by the sum of the weights, which the sink joins, and stores the result.
static void finish_dense(const skimkv_op *op, int64_t b, int64_t h, const OnlineSoftmax &o) {
    const int G = op->cache->G, P = padded_head(op->cache->D);
    for (int g = 0; g < G; g++) {
        const float sum = o.l[g] + sink_weight(op->sinks, h * G + g, o.m[g]);
        for (int i = 0; i < P; i++) o.acc[g * P + i] /= sum;
    }
    store_result(op, b, h, o.acc, P);
}

// The lowest score of the tokens with a position from 0 to `edge`: NaN if one of them is NaN, infinity without any.
static float lowest_score(const float *score, const int32_t *pos, int64_t n, int64_t edge) {
    const float infinity = __builtin_inff();
    const vi all_of_infinity = (vi)splat(infinity);
    const int last = (int)edge;
    vf lowest = splat(infinity);
    bool has_nan = false;
    for (int64_t p = 0; p < n; p += W) {
        int32_t places[W];
        for (int64_t i = 0; i < W; i++) places[i] = p + i < n ? pos[p + i] : -1;
        vi at;
        __builtin_memcpy(&at, places, sizeof at);
        const vi hidden = (at < 0) | (at > last);
        const vi bits =
            ((vi)(p + W <= n ? load(score + p) : load_first(score + p, n - p)) & ~hidden) | (all_of_infinity & hidden);
        const vf x = (vf)bits;
        has_nan |= any_nan(x);
        lowest = vmin(lowest, x);
    }
    return has_nan ? __builtin_nanf("") : -max_lanes(splat(0.f) - lowest);
}

// The slot that the new row of unit (b, h) overwrites: the one that the caller named, or the one with the lowest score
// outside the recent window, of equal ones the oldest; a NaN is lower than any number. -1: the new row itself is
// dropped, because its weight is lowest.
static int64_t slot_to_overwrite(const skimkv_op *op, int64_t b, int64_t h, float new_weight) {
    if (op->slot[b] >= 0) return op->slot[b];
    const float *score = op->score + b * op->c_b + h * op->c_h;
    const int32_t *pos = op->pos + b * op->c_b + h * op->c_h;
    const int64_t n = op->cache->lengths[b], edge = max(op->now[b] - op->recent[b], -1);
    const float lowest = lowest_score(score, pos, n, edge);
    int64_t at = -1;
    for (int64_t p = 0; p < n; p++) {
        if (lowest == lowest ? score[p] != lowest : score[p] == score[p]) continue;
        if (pos[p] > edge || pos[p] < 0 || (at >= 0 && pos[p] > pos[at])) continue;
        at = p;
    }
    if (at < 0) at = 0;  // all slots are recent
    return op->recent[b] == 0 && new_weight < score[at] ? -1 : at;
}

// Writes the new row of unit (b, h) to slot `at`.
template <class T, class R>
static void write_slot(const skimkv_op *op, int64_t b, int64_t h, const DenseScratch &x, int64_t at) {
    const int64_t n = row_bytes(op->cache);
    const R *k, *v;
    const skimkv_chunk *chunk = chunk_of(op->cache->chunks, at);
    new_row_as_cached<T>(op, b, h, x, &k, &v);
    __builtin_memcpy((R *)key_row<R>(chunk, b, h, at), k, n);
    __builtin_memcpy((R *)value_row<R>(chunk, b, h, at), v, n);
}

// TOVA (Oren et al., arXiv 2401.06104, section 3.2): puts the new rows of all KV heads of row b into one slot, or drops
// them. weights [H][ld] are the mean weights of the heads' groups, of the new row last; they are overwritten. A weight
// that is NaN counts as zero; of equal weights the first slot is taken.
template <class T, class R>
static void put_into_common_slot(const skimkv_op *op, int64_t b, const DenseScratch &x, float *weights, int64_t ld) {
    const int64_t H = op->cache->H, n = op->cache->lengths[b];
    int64_t at = op->slot[b];
    if (at < 0) {
        for (int64_t h = 0; h < H; h++)
            for (int64_t p = 0; p <= n; p++) {
                const float w = weights[h * ld + p];
                weights[p] = (h ? weights[p] : 0) + (w == w ? w : 0);
            }
        at = 0;
        for (int64_t p = 1; p < n; p++) at = weights[p] < weights[at] ? p : at;
        if (weights[n] < weights[at]) return;
    }
    for (int64_t h = 0; h < H; h++) write_slot<T, R>(op, b, h, x, at);
}

// Puts the new row of unit (b, h), whose weight is `weight`, into its slot, or drops it.
template <class T, class R>
static void put_into_slot(const skimkv_op *op, int64_t b, int64_t h, const DenseScratch &x, float weight) {
    const int64_t at = slot_to_overwrite(op, b, h, weight);
    if (at < 0) return;
    write_slot<T, R>(op, b, h, x, at);
    if (!op->score) return;
    op->score[b * op->c_b + h * op->c_h + at] = weight;
    op->pos[b * op->c_b + h * op->c_h + at] = (int32_t)op->now[b];
}

// Attends to all positions, and keeps the mean of their softmax weights over the group: adds it to op->score, or
// without scores writes it to `weights`.
template <class T, class R, int D_>
static void dense_with_weights(const skimkv_op *op, int64_t b, int64_t h, const DenseScratch &x, float *weights) {
    const skimkv_cache *c = op->cache;
    const int G = c->G, P = padded_head(c->D);
    const int64_t n = c->lengths[b] + 1, ld = round_up(n, BLOCK_ROWS);
    Unit u{};
    u.q = x.q;
    load_query(op, u, b, h);
    const OnlineSoftmax o = online_softmax_at(x.online, G);
    const R *rows[2][2][BLOCK_ROWS + W];  // [this block or the next][k, v]
    // Calls f(p, m, k, v, next) for every block, m positions from p on; `next` are the next whole block's k and v.
    const auto for_each_block = [&](auto f) {
        gather_block<T>(op, b, h, 0, min(BLOCK_ROWS, n), x, rows[0][0], rows[0][1]);
        for (int64_t p = 0, i = 0; p < n; p += BLOCK_ROWS, i ^= 1) {
            const int64_t end = min(p + 2 * BLOCK_ROWS, n);
            if (p + BLOCK_ROWS < n) gather_block<T>(op, b, h, p + BLOCK_ROWS, end, x, rows[i ^ 1][0], rows[i ^ 1][1]);
            f(p, (int)min(BLOCK_ROWS, n - p), rows[i][0], rows[i][1],
              end == p + 2 * BLOCK_ROWS ? rows[i ^ 1] : nullptr);
        }
    };
    reset_softmax(o, G, P);
    // What follows the products with keys is prefetched with them.
    float *score = op->score ? op->score + b * op->c_b + h * op->c_h : nullptr;
    const int32_t *pos = op->score ? op->pos + b * op->c_b + h * op->c_h : nullptr;
    const R *first_values[BLOCK_ROWS];
    for_each_block([&](int64_t p, int m, const R **k, const R **v, auto next) {
        for (int j = 0; j < m && p == 0; j++) first_values[j] = v[j];
        for (int64_t i = p; score && i < p + m; i += 16) prefetch_to_write(score + i), prefetch(pos + i);
        const R *const *ahead = next ? next[0] : m == BLOCK_ROWS ? first_values : nullptr;
        dot_query_with_keys<R, D_>(op, u, k, m, x.s + p, ld, ahead);
    });
    for (int g = 0; g < G; g++) {
        float *s = x.s + g * ld, m = LOWEST, l = 0;
        vf top = splat(LOWEST), sum = splat(0.f);
        for (int64_t p = 0; p < n; p += W) store(s + p, apply_softcap(load(s + p), softcap_log2(op)));
        for (int64_t p = n; p < round_up(n, W); p++) s[p] = LOWEST;
        for (int64_t p = 0; p < n; p += W) top = vmax(top, load(s + p));
        m = max_lanes(top);
        for (int64_t p = 0; p < n; p += W) {
            vf e = exp2(load(s + p) - splat(m));
            store(s + p, e);
            sum = sum + e;
        }
        l = sum_lanes(sum) + sink_weight(op->sinks, h * G + g, m);
        for (int64_t p = 0; p < n; p += W) store(s + p, load(s + p) / splat(l));
    }
    for_each_block([&](int64_t p, int m, const R **, const R **v, auto next) {
        add_rows<R, D_>(o.acc, P, G, c->D, v, x.s + p, ld, m, next ? next[1] : nullptr);
    });
    for (int64_t p = 0; p < n; p += W) {  // the mean of the weights takes the place of the first query's
        vf sum = splat(0.f);
        for (int g = 0; g < G; g++) sum = sum + load(x.s + g * ld + p);
        store(x.s + p, sum / splat((float)G));
    }
    store_result(op, b, h, o.acc, P);
    if (!score) {
        __builtin_memcpy(weights, x.s, n * sizeof(float));
        return;
    }
    for (int64_t p = 0; p + 1 < n; p++) score[p] += x.s[p];
    put_into_slot<T, R>(op, b, h, x, x.s[n - 1]);
}

}  // namespace skimkv::SKIMKV_NS
