// SubGen (Zandieh et al., arXiv 2402.06082, algorithm 1): attention from clusters of keys and a reservoir of values.
//
// The estimate of a query is z / tau: tau sums exp(q.k) over the t samples of each of m clusters, weighted by size / t,
// and z sums exp(q.k) v over the s pairs of the reservoir, weighted by mu / (s |v|^2). A new token joins the nearest
// cluster whose representative lies within delta or founds one, and replaces samples and pairs of the reservoir at
// random.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kernels/hash.h"
#include "kernels/next_rows.h"
#include "kernels/row_attention.h"
#include "kernels/scratch_arena.h"
#include "kernels/unit.h"
#include "kernels/vector_math.h"
#include "skimkv.h"

namespace skimkv::SKIMKV_NS {

// The largest number of clusters of any unit.
static int64_t largest_cluster_count(const skimkv_clusters *c) {
    int64_t m = 0;
    for (int64_t i = 0; i < (int64_t)c->B * c->H; i++) m = max(m, c->m[i]);
    return m;
}

// The logits of one query: of every sample, of every pair of the reservoir, and room for what dot_rows writes beyond.
static inline int64_t logits_of_query(const skimkv_clusters *c, int64_t clusters) {
    return round_up(clusters * c->t + c->s, W) + W;
}

// Scratch memory of one unit.
struct ClusterScratch {
    float *q;       // [G][padded_head(D)]
    float *online;  // the state of an online softmax
    float *s;       // [G][logits_of_query] logits, then 2^(logit - maximum)
    float *weight;  // [logits_of_query] of every sample and pair
};
static ClusterScratch take_cluster_scratch(Arena &a, const skimkv_clusters *c, int64_t clusters) {
    const int P = padded_head(c->D);
    const int64_t ld = logits_of_query(c, clusters);
    return {a.take<float>((int64_t)c->G * P), a.take<float>(online_softmax_floats(c->G, P)), a.take<float>(c->G * ld),
            a.take<float>(ld)};
}
static size_t cluster_scratch_bytes(const skimkv_clusters *c) {
    Arena a{nullptr};
    take_cluster_scratch(a, c, largest_cluster_count(c));
    return a.used;
}

// Calls f(from, m, rows, next) for every block of n rows of D elements that follow each other: m rows from `from` on.
// `next` are the rows of the next whole block, or nullptr.
template <class T, class F> static void for_each_block_of_rows(const T *x, int64_t n, int D, const F &f) {
    const T *rows[2][BLOCK_ROWS];
    const auto point = [&](int64_t from, const T **to) {
        const int m = (int)min(BLOCK_ROWS, n - from);
        for (int j = 0; j < (int)round_up(m, W); j++) to[j] = x + (from + (j < m ? j : m - 1)) * D;
    };
    if (n > 0) point(0, rows[0]);
    for (int64_t from = 0, i = 0; from < n; from += BLOCK_ROWS, i ^= 1) {
        if (from + BLOCK_ROWS < n) point(from + BLOCK_ROWS, rows[i ^ 1]);
        f(from, (int)min(BLOCK_ROWS, n - from), rows[i], from + 2 * BLOCK_ROWS <= n ? rows[i ^ 1] : nullptr);
    }
}

// s[g*ld + j] = q_g . x_j for n rows that follow each other.
template <class T, int D_>
static void dot_samples(const float *q, int P, int G, int D, const T *x, int64_t n, float *s, int64_t ld) {
    for_each_block_of_rows(x, n, D, [&](int64_t from, int m, const T *const *rows, const T *const *next) {
        dot_rows<T, D_>(q, P, G, D, rows, m, s + from, ld, next);
    });
}

// |v|^2, and 0 only if v is zero.
template <class T> static double squared_norm(const T *v, int D) {
    vf squares = splat(0.f);
    int d = 0;
    for (; d + W <= D; d += W) squares = fma(load(v + d), load(v + d), squares);
    float norm = sum_lanes(squares);
    for (; d < D; d++) norm += as_float(v[d]) * as_float(v[d]);
    if (norm > 1e-30f && norm < 1e30f) return norm;
    double sum = 0;  // the sum of the squares is zero, too small or too large for a float, or NaN
    for (d = 0; d < D; d++) sum += (double)as_float(v[d]) * as_float(v[d]);
    return sum;
}

// Makes powers of two of n logits, relative to their maximum, which it returns: NaN if one of them is NaN. What lies
// between them and the next multiple of W is padding, and is overwritten.
static float take_powers(float *x, int64_t n) {
    for (int64_t j = n; j < round_up(n, W); j++) x[j] = LOWEST;
    vf top = splat(LOWEST);
    bool has_nan = false;
    for (int64_t j = 0; j < n; j += W) {
        const vf y = load(x + j);
        has_nan |= any_nan(y);
        top = vmax(top, y);
    }
    const float most = max_lanes(top);
    for (int64_t j = 0; j < n; j += W) store(x + j, exp2(load(x + j) - splat(most)));
    return has_nan ? __builtin_nanf("") : most;
}

// Estimates the attention of one unit.
template <class T, int D_> static void estimate_unit(const skimkv_clusters *c, char *work, int64_t unit) {
    const int D = D_ ? D_ : c->D, P = padded_head(D), G = c->G, t = c->t;
    const int64_t m = c->m[unit], samples = m * t, ld = logits_of_query(c, m);
    Arena a{work};
    const ClusterScratch x = take_cluster_scratch(a, c, m);
    const OnlineSoftmax o = online_softmax_at(x.online, G);
    for (int g = 0; g < G; g++) {
        float *q = x.q + g * P;
        to_float(c->q_dtype, c->q, (unit * G + g) * D, q, D);
        for (int i = 0; i < P; i++) q[i] = i < D ? q[i] * c->scale * LOG2E : 0;
    }
    reset_softmax(o, G, P);
    for (int i = 0; i < c->n_blocks && c->blocks[i].start < m; i++) {
        const skimkv_block *block = c->blocks + i;
        const int64_t count = min(m - block->start, block->cap);
        const int32_t *size = block->size + unit * block->cap;
        dot_samples<T, D_>(x.q, P, G, D, (const T *)block->samples + unit * block->cap * t * D, count * t,
                           x.s + block->start * t, ld);
        for (int64_t j = 0; j < count; j++)
            for (int e = 0; e < t; e++) x.weight[(block->start + j) * t + e] = (float)size[j] / (float)t;
    }
    const T *k = (const T *)c->k + unit * c->s * D, *v = (const T *)c->v + unit * c->s * D;
    dot_samples<T, D_>(x.q, P, G, D, k, c->s, x.s + samples, ld);
    for_each_block_of_rows(v, c->s, D, [&](int64_t from, int n, const T *const *rows, const T *const *next) {
        NextRows ahead(next, n, D * (int64_t)sizeof(T), n);
        for (int j = 0; j < n; j++) {
            ahead.prefetch_share();
            const double norm = squared_norm(rows[j], D);
            x.weight[samples + from + j] = norm > 0 ? (float)(c->mu[unit] / (c->s * norm)) : 0;
            for (int g = 0; norm == 0 && g < G; g++)  // a pair of weight zero, or none yet, must not be the maximum
                x.s[g * ld + samples + from + j] = LOWEST;
        }
    });
    for (int g = 0; g < G; g++) {
        float *s = x.s + g * ld;
        const float top = take_powers(s, samples + c->s);
        vf sum = splat(0.f);
        int64_t j = 0;
        for (; j + W <= samples; j += W) sum = fma(load(s + j), load(x.weight + j), sum);
        float tau = sum_lanes(sum) + sink_weight(c->sinks, unit % c->H * G + g, top);
        for (; j < samples; j++) tau += s[j] * x.weight[j];
        o.l[g] = top == top ? tau : top;
        for (j = samples; j < samples + c->s; j++) s[j] *= x.weight[j];
    }
    for_each_block_of_rows(v, c->s, D, [&](int64_t from, int n, const T *const *rows, const T *const *) {
        add_rows<T, D_>(o.acc, P, G, D, rows, x.s + samples + from, ld, n);
    });
    const float limit = c->q_dtype == SKIMKV_F16 ? 65504.f : 0x1p63f;  // a NaN stays NaN
    for (int g = 0; g < G; g++) {
        const float tau = o.l[g] < __FLT_MIN__ ? __FLT_MIN__ : o.l[g];
        for (int i = 0; i < D; i++) {
            const float y = o.acc[g * P + i] / tau;
            o.acc[g * P + i] = y > limit ? limit : y < -limit ? -limit : y;
        }
        from_float(c->q_dtype, o.acc + g * P, c->y, (unit * G + g) * D, D);
    }
}

// Uniform from 0 to 1.
static inline double uniform(uint32_t seed, uint32_t stream, uint32_t token, uint32_t head, uint32_t slot) {
    uint32_t h = mix_bits(seed);
    const uint32_t part[4] = {stream, token, head, slot};
    for (uint32_t x : part) h = add_word(h, x);
    return h / 4294967296.0;
}

// Appends the new token to the clusters and the reservoir of one unit.
template <class T> static void append_to_clusters_of_unit(const skimkv_clusters *c, int64_t unit) {
    const int D = c->D, t = c->t;
    const uint32_t token = (uint32_t)c->lengths[unit / c->H], head = (uint32_t)(unit % c->H);
    const T *k = (const T *)c->k_new + unit * D, *v = (const T *)c->v_new + unit * D;
    float key[SKIMKV_MAX_HEAD], value[SKIMKV_MAX_HEAD];
    to_float(k, key, D), to_float(v, value, D);
    const skimkv_block *home = nullptr;  // the block of the nearest cluster within delta
    int64_t at = 0, m = c->m[unit];
    float best = 0;
    for (int i = 0; i < c->n_blocks; i++) {
        const skimkv_block *block = c->blocks + i;
        for (int64_t j = 0; j < min(m - block->start, block->cap); j++) {
            const T *rep = (const T *)block->rep + (unit * block->cap + j) * D;
            const float distance = __builtin_sqrtf(squared_distance(rep, key, D));
            if (distance <= c->delta && (!home || distance < best)) home = block, at = j, best = distance;
        }
    }
    const bool is_new_cluster = !home;
    if (is_new_cluster) {
        for (home = c->blocks; m >= home->start + home->cap;) home++;
        at = m - home->start;
        c->m[unit] = m + 1;
        __builtin_memcpy((T *)home->rep + (unit * home->cap + at) * D, k, D * sizeof(T));
    }
    int32_t *size = home->size + unit * home->cap + at;
    *size = is_new_cluster ? 1 : *size + 1;
    for (int j = 0; j < t; j++)
        if (uniform(c->seed, 0, token, head, (uint32_t)j) < 1.0 / *size)
            __builtin_memcpy((T *)home->samples + ((unit * home->cap + at) * t + j) * D, k, D * sizeof(T));
    double norm = 0;
    for (int d = 0; d < D; d++) norm += (double)value[d] * value[d];
    const double mu = c->mu[unit] += norm;
    for (int j = 0; j < c->s; j++)
        if (uniform(c->seed, 1, token, head, (uint32_t)j) < (mu > 0 ? norm / mu : 0)) {
            __builtin_memcpy((T *)c->k + (unit * c->s + j) * D, k, D * sizeof(T));
            __builtin_memcpy((T *)c->v + (unit * c->s + j) * D, v, D * sizeof(T));
        }
}

// Compiles the estimate for the head sizes of common models, and for any other.
template <class T> static void estimate_head_size(const skimkv_clusters *c, void *work, int64_t unit) {
    if (c->D == 64) estimate_unit<T, 64>(c, (char *)work, unit);
    else if (c->D == 128) estimate_unit<T, 128>(c, (char *)work, unit);
    else estimate_unit<T, 0>(c, (char *)work, unit);
}
static void cluster_attention(const skimkv_clusters *c, void *work, int64_t unit) {
    if (c->dtype == SKIMKV_F32) estimate_head_size<float>(c, work, unit);
    else if (c->dtype == SKIMKV_BF16) estimate_head_size<bf16>(c, work, unit);
    else estimate_head_size<f16>(c, work, unit);
}
static void cluster_append(const skimkv_clusters *c, int64_t unit) {
    if (c->dtype == SKIMKV_F32) append_to_clusters_of_unit<float>(c, unit);
    else if (c->dtype == SKIMKV_BF16) append_to_clusters_of_unit<bf16>(c, unit);
    else append_to_clusters_of_unit<f16>(c, unit);
}

}  // namespace skimkv::SKIMKV_NS
