// Attention over rows of K and V: dot products of G queries with rows, weighted sums of rows, and the online softmax
// (Milakov and Gimelshein, arXiv 1805.02867) that joins them block by block.
//
// Rows are given as pointers, so that a contiguous run, a selection and a set of slots are the same case. Queries are
// [G][P] floats, zero beyond D; logits are s[g*ld + j]. D_ is D where the compiler knows it, else 0.
#pragma once
#include <stdint.h>

#include "kernels/next_rows.h"
#include "kernels/quantised_row_products.h"
#include "kernels/quantised_rows.h"
#include "kernels/vector_math.h"

namespace skimkv::SKIMKV_NS {

constexpr int BLOCK_ROWS = 64;                  // rows of one update of the softmax
constexpr int ACCUMULATORS = W == 16 ? 16 : 8;  // vector registers for the weighted sum

// s[g*ld + j] = q_g . row_j for GB queries and W rows.
template <class T, int D_, int GB>
static inline void dot_block(const float *q, int P, int D, const T *const *rows, float *s, int64_t ld, NextRows &next) {
    vf part[GB][W];
    const int whole = (D_ ? D_ : D) / W * W;
    for (int j = 0; j < W; j++) {
        const T *x = rows[j];
        next.prefetch_share();
        vf a[GB] = {}, b[GB] = {};
        int i = 0;
        if constexpr (D_ / W >= 2) {
#pragma GCC unroll 16
            for (; i + 2 * W <= whole; i += 2 * W) {
                vf x0 = load(x + i), x1 = load(x + i + W);
                for (int g = 0; g < GB; g++) {
                    a[g] = fma(load(q + g * P + i), x0, a[g]);
                    b[g] = fma(load(q + g * P + i + W), x1, b[g]);
                }
            }
        }
        for (; i < whole; i += W)
            for (int g = 0; g < GB; g++) a[g] = fma(load(q + g * P + i), load(x + i), a[g]);
        if (W == 16 && (D_ ? D_ : D) % 16 >= 8) {
            for (int g = 0; g < GB; g++) b[g] = fma(load(q + g * P + i), load8(x + i), b[g]);
            i += 8;
        }
        if constexpr (D_ == 0)  // the last channels do not fill a vector
            for (; i < D; i++)
                for (int g = 0; g < GB; g++) a[g][0] += q[g * P + i] * as_float(x[i]);
        for (int g = 0; g < GB; g++) part[g][j] = a[g] + b[g];
    }
    for (int g = 0; g < GB; g++) store(s + g * ld, sums_of(part[g]));
}

// |row - x|^2; x is rotated as the row is.
template <int D_, class R> static inline float squared_distance(const R *row, const float *x, int D) {
    if constexpr (row_bits<R> != 0) {
        float values[SKIMKV_MAX_HEAD];
        dequantise_row(row, D, values);
        return squared_distance<D_>(values, x, D);
    } else {
        vf sum = splat(0.f);
        int i = 0;
        for (; i + W <= (D_ ? D_ : D); i += W) {
            const vf d = load(row + i) - load(x + i);
            sum = fma(d, d, sum);
        }
        float rest = 0;
        for (; i < D; i++) rest += (as_float(row[i]) - x[i]) * (as_float(row[i]) - x[i]);
        return sum_lanes(sum) + rest;
    }
}

// The blocks of four, two and one that dot_rows makes of G queries.
static inline int blocks_of_queries(int G) { return G / 4 + G % 4 / 2 + G % 2; }

// s[g*ld + j] = q_g . row_j for G queries and n rows. It writes s up to the next multiple of W, and the pointers in
// `rows` must be valid that far. `next` are n rows to be prefetched.
template <class T, int D_>
static void dot_rows(const float *q, int P, int G, int D, const T *const *rows, int n, float *s, int64_t ld,
                     const T *const *next = nullptr) {
    if constexpr (row_bits<T> != 0) {
        float memory[4 * PREPARED_QUERY_FLOATS];
        for (int g = 0; g < G; g += 4) {
            const int count = (int)min(G - g, 4);
            const PreparedQuery prepared = prepare_query(q + g * P, P, count, D, row_bits<T>, memory);
            dot_quantised_rows<row_bits<T>, D_>(prepared, count, D, rows, n, s + g * ld, ld, g ? nullptr : next);
        }
    } else {
        NextRows ahead(next, n, (D_ ? D_ : D) * (int64_t)sizeof(T), n * blocks_of_queries(G));
        for (int j = 0; j < n; j += W) {
            int g = 0;
            for (; g + 4 <= G; g += 4) dot_block<T, D_, 4>(q + g * P, P, D, rows + j, s + g * ld + j, ld, ahead);
            if (g + 2 <= G) dot_block<T, D_, 2>(q + g * P, P, D, rows + j, s + g * ld + j, ld, ahead), g += 2;
            if (g < G) dot_block<T, D_, 1>(q + g * P, P, D, rows + j, s + g * ld + j, ld, ahead);
        }
    }
}

// Vectors of channels whose sums for GB queries are in registers, and how often a row of D channels is read for them,
// at least.
template <int GB> constexpr int vectors_at_once = ACCUMULATORS / GB < 8 ? ACCUMULATORS / GB : 8;
template <int GB> static inline int passes_of_row(int D) { return (int)max(1, D / (vectors_at_once<GB> * W)); }

// acc_g += sum_j w[g*ld + j] row_j for GB queries, n rows and NV vectors of channels from `at` on. The sums are in
// registers. HALF: the one vector has 8 channels only.
template <class T, int GB, int NV, bool HALF = false>
static inline void add_row_channels(float *acc, int P, const T *const *rows, int at, const float *w, int64_t ld, int n,
                                    NextRows &next) {
    vf a[GB][NV];
    for (int g = 0; g < GB; g++)
        for (int i = 0; i < NV; i++) a[g][i] = load(acc + g * P + at + i * W);
    for (int j = 0; j < n; j++) {
        const T *x = rows[j] + at;
        next.prefetch_share();
#pragma GCC unroll 16
        for (int i = 0; i < NV; i++) {
            vf v = HALF ? load8(x + i * W) : load(x + i * W);
            for (int g = 0; g < GB; g++) a[g][i] = fma(splat(w[g * ld + j]), v, a[g][i]);
        }
    }
    for (int g = 0; g < GB; g++)
        for (int i = 0; i < NV; i++) store(acc + g * P + at + i * W, a[g][i]);
}

// The same for all channels.
template <class T, int D_, int GB>
static inline void add_rows_of_queries(float *acc, int P, int D, const T *const *rows, const float *w, int64_t ld,
                                       int n, NextRows &next) {
    constexpr int NV = vectors_at_once<GB>;
    const int whole = (D_ ? D_ : D) / W * W;
    int at = 0;
    for (; at + NV * W <= whole; at += NV * W) add_row_channels<T, GB, NV>(acc, P, rows, at, w, ld, n, next);
    if constexpr (NV > 4)
        if (at + 4 * W <= whole) add_row_channels<T, GB, 4>(acc, P, rows, at, w, ld, n, next), at += 4 * W;
    if constexpr (NV > 2)
        if (at + 2 * W <= whole) add_row_channels<T, GB, 2>(acc, P, rows, at, w, ld, n, next), at += 2 * W;
    if (at + W <= whole) add_row_channels<T, GB, 1>(acc, P, rows, at, w, ld, n, next), at += W;
    if (W == 16 && (D_ ? D_ : D) % 16 >= 8) add_row_channels<T, GB, 1, true>(acc, P, rows, at, w, ld, n, next), at += 8;
    if constexpr (D_ == 0)
        for (; at < D; at++)
            for (int j = 0; j < n; j++)
                for (int g = 0; g < GB; g++) acc[g * P + at] += w[g * ld + j] * as_float(rows[j][at]);
}

// How many queries a row is added for at once: four if there are registers for all of its channels, else two, because
// rows that are read whole, one after the other, come from memory faster than parts of rows. The next two read them
// again, from the L1 cache. A block of rows of floats does not fit there, so it is read once, in parts.
template <class T, int D_> constexpr int queries_at_once = sizeof(T) == 4 || (D_ && 4 * D_ <= ACCUMULATORS * W) ? 4 : 2;

// acc_g += sum_j w[g*ld + j] row_j for G queries and n rows; acc is [G][P]. `next` are rows to be prefetched.
template <class T, int D_>
static void add_rows(float *acc, int P, int G, int D, const T *const *rows, const float *w, int64_t ld, int n,
                     const T *const *next = nullptr) {
    if constexpr (row_bits<T> != 0) {
        add_quantised_rows<row_bits<T>, D_>(acc, P, G, D, rows, w, ld, n, next);
    } else {
        constexpr int MOST = queries_at_once<T, D_>;
        const int size = D_ ? D_ : D, passes = G / MOST * passes_of_row<MOST>(size) +
                                               G % MOST / 2 * passes_of_row<2>(size) + G % 2 * passes_of_row<1>(size);
        NextRows ahead(next, n, size * (int64_t)sizeof(T), n * passes);
        int g = 0;
        for (; g + MOST <= G; g += MOST)
            add_rows_of_queries<T, D_, MOST>(acc + g * P, P, D, rows, w + g * ld, ld, n, ahead);
        if (MOST > 2 && g + 2 <= G)
            add_rows_of_queries<T, D_, 2>(acc + g * P, P, D, rows, w + g * ld, ld, n, ahead), g += 2;
        if (g < G) add_rows_of_queries<T, D_, 1>(acc + g * P, P, D, rows, w + g * ld, ld, n, ahead);
    }
}

// The state of an online softmax: the maximum of the logits, the sum of 2^(logit - maximum), and the sum of values with
// these weights, of every query.
struct OnlineSoftmax {
    float *m, *l, *acc;  // [G], [G], [G][P]
};
// The floats that a state occupies, the state at that memory, and the state before the first row.
static inline int64_t online_softmax_floats(int G, int P) { return 2 * round_up(G, 16) + (int64_t)G * P; }
static inline OnlineSoftmax online_softmax_at(float *at, int G) {
    return {at, at + round_up(G, 16), at + 2 * round_up(G, 16)};
}
static inline void reset_softmax(const OnlineSoftmax &o, int G, int P) {
    for (int g = 0; g < G; g++) o.m[g] = LOWEST, o.l[g] = 0;
    for (int64_t i = 0; i < (int64_t)G * P; i++) o.acc[i] = 0;
}

// Adds n rows of V to the state, of whose keys the dot products are in s[g*ld + j]; s becomes 2^(logit - maximum).
template <class T, int D_>
static void update_softmax(const OnlineSoftmax &o, int P, int G, int D, const T *const *values, int n, float *s,
                           int64_t ld, float cap, const T *const *next = nullptr) {
    for (int g = 0; g < G; g++) {
        float *x = s + g * ld;
        for (int j = n; j < round_up(n, W); j++) x[j] = LOWEST;
        vf top = splat(LOWEST);
        for (int j = 0; j < n; j += W) {
            vf y = apply_softcap(load(x + j), cap);
            store(x + j, y);
            top = vmax(top, y);
        }
        for (int j = n; j < round_up(n, W); j++) x[j] = LOWEST;
        float m = max_lanes(top);
        if (m > o.m[g]) {
            float shrink = exp2_scalar(o.m[g] - m);
            o.l[g] *= shrink, o.m[g] = m;
            for (int i = 0; i < P; i += W) store(o.acc + g * P + i, load(o.acc + g * P + i) * splat(shrink));
        }
        vf sum = splat(0.f), top1 = splat(o.m[g]);
        for (int j = 0; j < n; j += W) {
            vf e = exp2(load(x + j) - top1);
            store(x + j, e);
            sum = sum + e;
        }
        o.l[g] += sum_lanes(sum);
    }
    add_rows<T, D_>(o.acc, P, G, D, values, s, ld, n, next);
}

// Adds the state of one part of the positions to that of another.
static inline void merge_softmax(const OnlineSoftmax &to, const OnlineSoftmax &from, int G, int P) {
    for (int g = 0; g < G; g++) {
        float m = to.m[g] > from.m[g] ? to.m[g] : from.m[g];
        float a = exp2_scalar(to.m[g] - m), b = exp2_scalar(from.m[g] - m);
        if (to.l[g] == 0) a = 0;
        if (from.l[g] == 0) b = 0;
        to.m[g] = m, to.l[g] = a * to.l[g] + b * from.l[g];
        float *x = to.acc + g * P, *y = from.acc + g * P;
        for (int i = 0; i < P; i += W) store(x + i, splat(a) * load(x + i) + splat(b) * load(y + i));
    }
}

}  // namespace skimkv::SKIMKV_NS
