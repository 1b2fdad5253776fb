// Row-major K and V: dot products of queries with rows, weighted sums of rows, and online softmax attention over
// blocks of rows. Rows come as pointers, so a contiguous run, a gather and slots are one case.
#pragma once

namespace skimkv::SKIMKV_NS {

constexpr int BLOCK = 64;                    // rows a softmax update takes at once
constexpr int ACCS = W == 16 ? 16 : 8;       // vector registers the weighted sum may hold

// Rows to be asked for while others are worked on: with several queries a row, arithmetic takes so long that nothing
// else keeps the memory busy. Each group of queries asks for its share of the lines that begin in columns from .. to-1.
template <class T> struct Ahead {
    const T *const *rows = nullptr;
    int group = 0, groups = 1;
    inline void ask(int j, int from, int to) const {
        constexpr int LINE = 64 / (int)sizeof(T);
        if (rows)
            for (int line = (from + LINE - 1) / LINE; line * LINE < to; line++)
                if (line % groups == group) prefetch_far(rows[j] + line * LINE);
    }
};
// Groups of 4 and 2 queries: where a row meets a single one, the hardware's prefetch is fast enough.
static inline int groups(int G) { return G / 4 + (G % 4 >= 2); }

// s[g*ld + j] = q_g . row_j for one block of W rows. q is [GB][P], zero beyond D.
template <class T, int D_, int GB>
static inline void dots_block(const float *q, int P, int D, const T *const *rows, float *s, int64_t ld, const Ahead<T> &next) {
    vf part[GB][W];
    const int whole = (D_ ? D_ : D) / W * W;
    for (int j = 0; j < W; j++) {
        const T *x = rows[j];
        if (GB > 1) next.ask(j, 0, D_ ? D_ : D);
        vf a[GB] = {}, b[GB] = {};
        int i = 0;
        if constexpr (D_ / W >= 2) {
#pragma GCC unroll 16
            for (; i + 2 * W <= whole; i += 2 * W) {
                vf x0 = get(x + i), x1 = get(x + i + W);
                for (int g = 0; g < GB; g++) {
                    a[g] = fma(get(q + g * P + i), x0, a[g]);
                    b[g] = fma(get(q + g * P + i + W), x1, b[g]);
                }
            }
        }
        for (; i < whole; i += W)
            for (int g = 0; g < GB; g++) a[g] = fma(get(q + g * P + i), get(x + i), a[g]);
        if (W == 16 && (D_ ? D_ : D) % 16 >= 8) {
            for (int g = 0; g < GB; g++) b[g] = fma(get(q + g * P + i), get8(x + i), b[g]);
            i += 8;
        }
        if constexpr (D_ == 0)  // no vector holds the last few
            for (; i < D; i++)
                for (int g = 0; g < GB; g++) a[g][0] += q[g * P + i] * scalar(x[i]);
        for (int g = 0; g < GB; g++) part[g][j] = a[g] + b[g];
    }
    for (int g = 0; g < GB; g++) put(s + g * ld, rowsum(part[g]));
}

// s[g*ld + j] for j < n; writes up to the next multiple of W, and rows[] (and next's) must be readable that far.
template <class T, int D_>
static void dots(const float *q, int P, int G, int D, const T *const *rows, int n, float *s, int64_t ld, const T *const *next = nullptr) {
    if constexpr (row_bits<T> != 0) {
        float x[DECODED * 256];
        const float *own[DECODED];
        for (int j = 0; j < n; j += DECODED) {
            decode_rows(rows + j, (int)min(n - j, DECODED), D, x, own);
            dots<float, D_>(q, P, G, D, own, (int)min(n - j, DECODED), s + j, ld);
        }
        return;
    } else
    for (int j = 0; j < n; j += W) {
        Ahead<T> ahead{next ? next + j : next, 0, groups(G)};
        int g = 0;
        for (; g + 4 <= G; g += 4, ahead.group++) dots_block<T, D_, 4>(q + g * P, P, D, rows + j, s + g * ld + j, ld, ahead);
        if (g + 2 <= G) dots_block<T, D_, 2>(q + g * P, P, D, rows + j, s + g * ld + j, ld, ahead), g += 2;
        if (g < G) dots_block<T, D_, 1>(q + g * P, P, D, rows + j, s + g * ld + j, ld, ahead);
    }
}

// acc[g] += sum_j w[g*ld + j] row_j over NV vectors starting at column `at`, the accumulators in registers.
template <class T, int GB, int NV, bool HALF = false>
static inline void add_piece(float *acc, int P, const T *const *rows, int at, const float *w, int64_t ld, int n, const Ahead<T> &next) {
    vf a[GB][NV];
    for (int g = 0; g < GB; g++)
        for (int i = 0; i < NV; i++) a[g][i] = get(acc + g * P + at + i * W);
    for (int j = 0; j < n; j++) {
        const T *x = rows[j] + at;
        if (GB > 1) next.ask(j, at, at + (HALF ? 8 : NV * W));
#pragma GCC unroll 16
        for (int i = 0; i < NV; i++) {
            vf v = HALF ? get8(x + i * W) : get(x + i * W);
            for (int g = 0; g < GB; g++) a[g][i] = fma(splat(w[g * ld + j]), v, a[g][i]);
        }
    }
    for (int g = 0; g < GB; g++)
        for (int i = 0; i < NV; i++) put(acc + g * P + at + i * W, a[g][i]);
}

template <class T, int D_, int GB>
static inline void add_group(float *acc, int P, int D, const T *const *rows, const float *w, int64_t ld, int n, const Ahead<T> &next) {
    constexpr int NV = ACCS / GB < 8 ? ACCS / GB : 8;
    const int whole = (D_ ? D_ : D) / W * W;
    int at = 0;
    for (; at + NV * W <= whole; at += NV * W) add_piece<T, GB, NV>(acc, P, rows, at, w, ld, n, next);
    if constexpr (NV > 4)
        if (at + 4 * W <= whole) add_piece<T, GB, 4>(acc, P, rows, at, w, ld, n, next), at += 4 * W;
    if constexpr (NV > 2)
        if (at + 2 * W <= whole) add_piece<T, GB, 2>(acc, P, rows, at, w, ld, n, next), at += 2 * W;
    if (at + W <= whole) add_piece<T, GB, 1>(acc, P, rows, at, w, ld, n, next), at += W;
    if (W == 16 && (D_ ? D_ : D) % 16 >= 8) add_piece<T, GB, 1, true>(acc, P, rows, at, w, ld, n, next), at += 8;
    if constexpr (D_ == 0)
        for (; at < D; at++)
            for (int j = 0; j < n; j++)
                for (int g = 0; g < GB; g++) acc[g * P + at] += w[g * ld + j] * scalar(rows[j][at]);
}

// acc[g*P ..] += sum_j w[g*ld + j] row_j for j < n; `next` as above.
template <class T, int D_>
static void add(float *acc, int P, int G, int D, const T *const *rows, const float *w, int64_t ld, int n, const T *const *next = nullptr) {
    if constexpr (row_bits<T> != 0) {
        float x[DECODED * 256];
        const float *own[DECODED];
        for (int j = 0; j < n; j += DECODED) {
            decode_rows(rows + j, (int)min(n - j, DECODED), D, x, own);
            add<float, D_>(acc, P, G, D, own, w + j, ld, (int)min(n - j, DECODED));
        }
    } else {
        Ahead<T> ahead{next, 0, groups(G)};
        int g = 0;
        for (; g + 4 <= G; g += 4, ahead.group++) add_group<T, D_, 4>(acc + g * P, P, D, rows, w + g * ld, ld, n, ahead);
        if (g + 2 <= G) add_group<T, D_, 2>(acc + g * P, P, D, rows, w + g * ld, ld, n, ahead), g += 2;
        if (g < G) add_group<T, D_, 1>(acc + g * P, P, D, rows, w + g * ld, ld, n, ahead);
    }
}

// Softmax attention in progress: maximum, sum of exp, and the weighted sum of values of each query.
struct Online {
    float *m, *l, *acc;  // [G], [G], [G][P]
};
static inline int64_t online_floats(int G, int P) { return 2 * roundup(G, 16) + (int64_t)G * P; }
static inline Online online_at(float *at, int G) {
    return {at, at + roundup(G, 16), at + 2 * roundup(G, 16)};
}
static inline void reset(const Online &o, int G, int P) {
    for (int g = 0; g < G; g++) o.m[g] = LOWEST, o.l[g] = 0;
    for (int64_t i = 0; i < (int64_t)G * P; i++) o.acc[i] = 0;
}

// Take n rows whose dot products are in s[g*ld + j]; s becomes 2^(logit - maximum).
template <class T, int D_>
static void update(const Online &o, int P, int G, int D, const T *const *values, int n, float *s, int64_t ld, float cap, const T *const *next = nullptr) {
    for (int g = 0; g < G; g++) {
        float *x = s + g * ld;
        for (int j = n; j < roundup(n, W); j++) x[j] = LOWEST;
        vf top = splat(LOWEST);
        for (int j = 0; j < n; j += W) {
            vf y = softcapped(get(x + j), cap);
            put(x + j, y);
            top = vmax(top, y);
        }
        for (int j = n; j < roundup(n, W); j++) x[j] = LOWEST;
        float m = hmax(top);
        if (m > o.m[g]) {
            float shrink = exp2f1(o.m[g] - m);
            o.l[g] *= shrink, o.m[g] = m;
            for (int i = 0; i < P; i += W) put(o.acc + g * P + i, get(o.acc + g * P + i) * splat(shrink));
        }
        vf sum = splat(0.f), top1 = splat(o.m[g]);
        for (int j = 0; j < n; j += W) {
            vf e = vexp2(get(x + j) - top1);
            put(x + j, e);
            sum = sum + e;
        }
        o.l[g] += hsum(sum);
    }
    add<T, D_>(o.acc, P, G, D, values, s, ld, n, next);
}

// Merge a part's state into another's.
static inline void merge(const Online &to, const Online &from, int G, int P) {
    for (int g = 0; g < G; g++) {
        float m = to.m[g] > from.m[g] ? to.m[g] : from.m[g];
        float a = exp2f1(to.m[g] - m), b = exp2f1(from.m[g] - m);
        if (to.l[g] == 0) a = 0;
        if (from.l[g] == 0) b = 0;
        to.m[g] = m, to.l[g] = a * to.l[g] + b * from.l[g];
        for (int i = 0; i < P; i++) to.acc[g * P + i] = a * to.acc[g * P + i] + b * from.acc[g * P + i];
    }
}

}  // namespace skimkv::SKIMKV_NS
