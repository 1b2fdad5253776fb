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

// Scratch memory of one unit: the queries, and for every query one logit per sample and per pair of the reservoir.
static size_t cluster_scratch_bytes(const skimkv_clusters *c) {
    Arena a{nullptr};
    a.take<float>((int64_t)c->G * padded_head(c->D));
    a.take<float>(online_softmax_floats(c->G, padded_head(c->D)));
    a.take<float>(c->G * (largest_cluster_count(c) * c->t + c->s + 2 * BLOCK_ROWS));
    return a.used;
}

// s[g*ld + j] = q_g . x_j for n rows that follow each other.
template <class T>
static void dot_samples(const float *q, int P, int G, int D, const T *x, int64_t n, float *s, int64_t ld) {
    const T *rows[BLOCK_ROWS + W];
    for (int64_t from = 0; from < n; from += BLOCK_ROWS) {
        const int m = (int)min(BLOCK_ROWS, n - from);
        for (int j = 0; j < (int)round_up(m, W); j++) rows[j] = x + (from + (j < m ? j : m - 1)) * D;
        float block[BLOCK_ROWS];
        for (int g = 0; g < G; g++) {
            dot_rows<T, 0>(q + g * P, P, 1, D, rows, m, block, BLOCK_ROWS);
            for (int j = 0; j < m; j++) s[g * ld + from + j] = block[j];
        }
    }
}

// Estimates the attention of one unit.
template <class T> static void estimate_unit(const skimkv_clusters *c, char *work, int64_t unit) {
    const int D = c->D, P = padded_head(D), G = c->G, t = c->t;
    const int64_t m = c->m[unit], ld = m * t + c->s;
    Arena a{work};
    float *q = a.take<float>((int64_t)G * P);
    const OnlineSoftmax o = online_softmax_at(a.take<float>(online_softmax_floats(G, P)), G);
    float *s = a.take<float>(G * (ld + 2 * BLOCK_ROWS));
    for (int g = 0; g < G; g++) {
        to_float(c->q_dtype, c->q, (unit * G + g) * D, q + g * P, D);
        for (int i = 0; i < P; i++) q[g * P + i] = i < D ? q[g * P + i] * c->scale * LOG2E : 0;
    }
    reset_softmax(o, G, P);
    for (int i = 0; i < c->n_blocks && c->blocks[i].start < m; i++) {
        const skimkv_block *block = c->blocks + i;
        dot_samples<T>(q, P, G, D, (const T *)block->samples + unit * block->cap * t * D,
                       min(m - block->start, block->cap) * t, s + block->start * t, ld);
    }
    const T *k = (const T *)c->k + unit * c->s * D, *v = (const T *)c->v + unit * c->s * D;
    dot_samples<T>(q, P, G, D, k, c->s, s + m * t, ld);
    for (int64_t j = 0; j < c->s; j++) {  // a pair of weight zero, or none yet, must not be the maximum
        bool zero = true;
        for (int i = 0; i < D; i++) zero &= as_float(v[j * D + i]) == 0;
        for (int g = 0; zero && g < G; g++) s[g * ld + m * t + j] = LOWEST;
    }
    float weight[BLOCK_ROWS];
    const T *rows[BLOCK_ROWS];
    for (int g = 0; g < G; g++) {
        float top = LOWEST, *x = s + g * ld;
        bool nan = false;
        for (int64_t j = 0; j < ld; j++) nan |= x[j] != x[j], top = x[j] > top ? x[j] : top;
        double tau = 0;
        for (int i = 0; i < c->n_blocks && c->blocks[i].start < m; i++) {
            const skimkv_block *block = c->blocks + i;
            const int32_t *size = block->size + unit * block->cap;
            for (int64_t j = 0; j < min(m - block->start, block->cap); j++) {
                float sum = 0;
                for (int e = 0; e < t; e++) sum += exp2_scalar(x[(block->start + j) * t + e] - top);
                tau += (double)sum * size[j] / t;
            }
        }
        tau += sink_weight(c->sinks, unit % c->H * G + g, top);
        o.m[g] = top, o.l[g] = nan ? __builtin_nanf("") : (float)tau;
    }
    for (int64_t from = 0; from < c->s; from += BLOCK_ROWS) {
        const int n = (int)min(BLOCK_ROWS, c->s - from);
        for (int j = 0; j < n; j++) {
            rows[j] = v + (from + j) * D;
            double norm = 0;
            for (int i = 0; i < D; i++) norm += (double)as_float(rows[j][i]) * as_float(rows[j][i]);
            weight[j] = norm > 0 ? (float)(c->mu[unit] / (c->s * norm)) : 0;
        }
        for (int g = 0; g < G; g++) {
            float w[BLOCK_ROWS];
            for (int j = 0; j < n; j++) w[j] = weight[j] * exp2_scalar(s[g * ld + m * t + from + j] - o.m[g]);
            add_rows<T, 0>(o.acc + g * P, P, 1, D, rows, w, BLOCK_ROWS, n);
        }
    }
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
            vf sum = splat(0.f);
            int d = 0;
            for (; d + W <= D; d += W) {
                vf x = load(rep + d) - load(key + d);
                sum = fma(x, x, sum);
            }
            float rest = 0;
            for (; d < D; d++) rest += (as_float(rep[d]) - key[d]) * (as_float(rep[d]) - key[d]);
            const float distance = __builtin_sqrtf(sum_lanes(sum) + rest);
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

static void cluster_attention(const skimkv_clusters *c, void *work, int64_t unit) {
    if (c->dtype == SKIMKV_F32) estimate_unit<float>(c, (char *)work, unit);
    else if (c->dtype == SKIMKV_BF16) estimate_unit<bf16>(c, (char *)work, unit);
    else estimate_unit<f16>(c, (char *)work, unit);
}
static void cluster_append(const skimkv_clusters *c, int64_t unit) {
    if (c->dtype == SKIMKV_F32) append_to_clusters_of_unit<float>(c, unit);
    else if (c->dtype == SKIMKV_BF16) append_to_clusters_of_unit<bf16>(c, unit);
    else append_to_clusters_of_unit<f16>(c, unit);
}

}  // namespace skimkv::SKIMKV_NS
