// Skim (src/skimkv/methods/skim.py): of the rows of K those that look best by the index and a random sample of the
// others, and of V a random sample of these rows.
//
// Whether a row is drawn is decided by a hash of its position, the number of tokens and the head, so that a replay
// draws the same rows. A row that was drawn with probability pi counts 1/pi times.
#pragma once
#include <stdint.h>

#include "kernels/cache_layout.h"
#include "kernels/hash.h"
#include "kernels/row_attention.h"
#include "kernels/scratch_arena.h"
#include "kernels/sparse_attention.h"
#include "kernels/unit.h"
#include "kernels/vector_math.h"
#include "skimkv.h"

namespace skimkv::SKIMKV_NS {

// Scratch memory of one thread, for the rows at u.chosen.
struct SkimScratch {
    int32_t *best;       // [k+16] the positions with the largest scores
    float *probability;  // [ld] with which a row was drawn
    float *weight;       // [G][ld] softmax weights of the rows
    int64_t ld;
    float *certain, *uncertain;  // [G][P] weighted sums of the values that were sure to be read, and of the others
    float *most;                 // [G] the largest weight
    float *total, *drawn;  // [G] sums of the weights of all values and the sink, and of values not sure to be read
    float *variance;       // [G] of the sum of the latter
};
static SkimScratch take_skim(Arena &a, const skimkv_op *op, int64_t n) {
    const int64_t G = op->cache->G, P = padded_head(op->cache->D), ld = round_up(n, 16) + 16;
    SkimScratch x{};
    x.best = a.take<int32_t>(min(op->k, n) + 16), x.probability = a.take<float>(ld);
    x.weight = a.take<float>(G * ld), x.ld = ld;
    x.certain = a.take<float>(G * P), x.uncertain = a.take<float>(G * P);
    x.most = a.take<float>(G), x.total = a.take<float>(G), x.drawn = a.take<float>(G), x.variance = a.take<float>(G);
    return x;
}

// The two streams of random numbers. The word of a position is the hash of a unit's word and the position.
enum { KEY_STREAM, VALUE_STREAM };
static inline uint32_t word_of_unit(const Unit &u, uint32_t stream) {
    return add_word(add_word(mix_bits(stream), (uint32_t)u.n), (uint32_t)u.h) * GOLDEN;
}

// Whether a position is drawn whose word is the hash of `word`: with a probability of 1 or more it is.
static inline bool is_drawn(uint32_t word, float probability) {
    return probability >= 1 || mix_bits(word) >> 1 < (uint32_t)(probability * 0x1p31f);
}

// An upper bound of log2(x), x > 0, at most 0.09 too large: that of its mantissa m from 1 to 2 is below m - 1 + 0.0861.
static inline float log2_bound(float x) {
    int32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return (float)bits * 0x1p-23f - 126.91f;
}

// Which of W positions may be drawn: all that are, and few others. Cheaper than the exact test, which would take a
// power of two for every logit of a single query. `word` is as in is_drawn, and a score is a logit plus `shift`, or
// `shift` times a probability (GROUPED).
template <bool GROUPED> static inline unsigned may_be_drawn(vw word, vf score, float shift) {
    const vf value = __builtin_convertvector((vi)(mix_bits(word) >> 1), vf);
    if (GROUPED) return at_least(score * splat(shift), value);
    // The bits of a float are a lower bound of its logarithm.
    return at_least(score + splat(shift), __builtin_convertvector((vi)value, vf) * splat(0x1p-23f));
}

// Makes u.chosen the rows of K that are read, ascending, and x.probability theirs: 1 for the first tokens, the last
// ones and the k largest scores of the others; k times the softmax weight for the rest.
template <bool GROUPED>
static void draw_keys(const skimkv_op *op, Unit &u, const Scores &z, const SelectionScratch &s, const SkimScratch &x) {
    const int64_t first = min(u.n, SKIMKV_SKIM_FIRST), end = max(first, u.n - 1 - SKIMKV_SKIM_LAST);
    join_tiles(op, u, z, s);
    if (GROUPED) join_queries<true>(op, u, z, s);
    float *score = GROUPED ? s.sum : z.s;
    const int64_t best = select_candidates(score, GROUPED ? s.lane_max : z.lane_max, first, end, op->k, x.best, s);
    // A score is a weight or, of a single query, a logit.
    const float share = GROUPED ? (float)op->k : (float)op->k / u.l[0];
    const float shift = GROUPED ? share * 0x1.00001p31f : log2_bound(share) - u.m[0] + 127 + 31;
    const uint32_t unit_word = word_of_unit(u, KEY_STREAM);
    uint32_t lane_words[W];
    for (int i = 0; i < W; i++) lane_words[i] = unit_word + (uint32_t)i;
    vw word;
    __builtin_memcpy(&word, lane_words, sizeof word);
    int64_t count = 0, next = 0;
    const auto add = [&](int64_t p, float probability) {
        u.chosen[count] = (int32_t)p, x.probability[count++] = probability;
    };
    for (int64_t p = 0; p < first; p++) add(p, 1);
    for (int64_t p = first / W * W; p < end && best < end - first; p += W) {
        unsigned lanes = may_be_drawn<GROUPED>(word + (uint32_t)p, load(score + p), shift);
        for (; lanes; lanes &= lanes - 1) {
            const int64_t at = p + __builtin_ctz(lanes);
            if (at < first || at >= end) continue;
            while (next < best && x.best[next] < at) add(x.best[next++], 1);
            if (next < best && x.best[next] == at) continue;
            const float probability = share * (GROUPED ? score[at] : exp2_scalar(score[at] - u.m[0]));
            if (is_drawn(unit_word + (uint32_t)at, probability)) add(at, probability < 1 ? probability : 1);
        }
    }
    while (next < best) add(x.best[next++], 1);
    for (int64_t p = end; p < u.n; p++) add(p, 1);
    u.chosen_count = count;
}

// Makes x.weight the softmax weights of the rows of K at u.chosen, each counted as often as it stands for others, and
// x.total the weight of the sink.
template <class R, int D_> static void weigh_keys(const skimkv_op *op, const Unit &u, const SkimScratch &x) {
    const int G = op->cache->G, n = (int)u.chosen_count;
    const R *k[ROWS_PER_UPDATE], *v[ROWS_PER_UPDATE];
    for (int64_t from = 0; from < n; from += ROWS_PER_UPDATE) {
        const int rows = (int)gather_selected_rows<R>(op->cache, u, from, k, v);
        dot_query_with_keys<R, D_>(op, u, k, rows, x.weight + from, x.ld);
    }
    for (int64_t j = n; j % W; j++) x.probability[j] = 1;
    for (int g = 0; g < G; g++) {
        float *w = x.weight + g * x.ld;
        vf top = splat(LOWEST), sum = splat(0.f);
        for (int64_t j = 0; j < n; j += W) store(w + j, apply_softcap(load(w + j), softcap_log2(op)));
        for (int64_t j = n; j % W; j++) w[j] = LOWEST;
        for (int64_t j = 0; j < n; j += W) top = vmax(top, load(w + j));
        top = splat(max_lanes(top));
        for (int64_t j = 0; j < n; j += W) {
            const vf e = exp2(load(w + j) - top) / load(x.probability + j);
            store(w + j, e);
            sum = sum + e;
        }
        const float sink = sink_weight(op->sinks, u.h * G + g, max_lanes(top)), all = sum_lanes(sum) + sink;
        x.total[g] = sink / all;
        const vf scale = splat(1 / all);
        for (int64_t j = 0; j < n; j += W) store(w + j, load(w + j) * scale);
    }
}

// Keeps the rows at u.chosen whose values are read: the current token, the row with the largest weight of each query,
// and the others with probability 2k times the largest weight of a group's query. x.probability becomes that of both
// draws, and weights are divided by that of the second. Values are prefetched as they are chosen.
static void draw_values(const skimkv_op *op, Unit &u, const SkimScratch &x) {
    const int G = op->cache->G;
    const int64_t n = u.chosen_count;
    const uint32_t unit_word = word_of_unit(u, VALUE_STREAM);
    for (int g = 0; g < G; g++) {
        vf top = splat(0.f);
        for (int64_t j = 0; j < n; j += W) top = vmax(top, load(x.weight + g * x.ld + j));
        x.most[g] = max_lanes(top);
    }
    int64_t count = 0;
    for (int64_t j = 0; j < n; j++) {
        const int32_t p = u.chosen[j];
        bool certain = p == u.n - 1 || u.n <= op->k;
        float largest = 0, divided = 1;
        for (int g = 0; g < G; g++) {
            const float w = x.weight[g * x.ld + j];
            largest = w > largest ? w : largest;
            certain |= w == x.most[g];
        }
        const float probability = (float)(2 * op->k) * largest;
        if (!certain && probability < 1) {
            if (!is_drawn(unit_word + (uint32_t)p, probability)) continue;
            divided = 1 / probability;
        }
        u.chosen[count] = p, x.probability[count] = x.probability[j] / divided;
        for (int g = 0; g < G; g++) x.weight[g * x.ld + count] = x.weight[g * x.ld + j] * divided;
        count++;
        prefetch_rows(op, u, u.chosen, count - 1, count, false, true);
    }
    u.chosen_count = count;
}

// The squared distance of a row from `mean`.
template <class R> static inline float squared_distance(const R *row, const float *mean, int D) {
    if constexpr (row_bits<R> != 0) {
        float x[SKIMKV_MAX_HEAD];
        dequantise_row(row, D, x);
        return squared_distance(x, mean, D);
    } else {
        vf sum = splat(0.f);
        int i = 0;
        for (; i + W <= D; i += W) {
            const vf d = load(row + i) - load(mean + i);
            sum = fma(d, d, sum);
        }
        float rest = 0;
        for (; i < D; i++) rest += (as_float(row[i]) - mean[i]) * (as_float(row[i]) - mean[i]);
        return sum_lanes(sum) + rest;
    }
}

// Reads the values at u.chosen, and shrinks what was drawn at random towards the mean value as far as it is noise: see
// `shrink` in skim.py.
template <class R, int D_>
static void attend_drawn(const skimkv_op *op, const Unit &u, const SelectionScratch &s, const SkimScratch &x) {
    const skimkv_cache *c = op->cache;
    const int G = c->G, D = c->D, P = padded_head(D);
    const float *mean = c->mean + u.b * c->m_b + u.h * c->m_h;
    for (int g = 0; g < G; g++) x.drawn[g] = x.variance[g] = 0;
    for (int64_t i = 0; i < (int64_t)G * P; i++) x.certain[i] = x.uncertain[i] = 0;
    for (int random = 0; random < 2; random++) {
        const R *v[ROWS_PER_UPDATE];
        int rows = 0;
        const skimkv_chunk *chunk = c->chunks;
        const auto flush = [&] {
            for (int j = rows; j % W; j++) v[j] = v[rows - 1];
            add_rows<R, D_>(random ? x.uncertain : x.certain, P, G, D, v, s.s, ROWS_PER_UPDATE, rows);
            rows = 0;
        };
        for (int64_t j = 0; j < u.chosen_count; j++) {
            const float probability = x.probability[j];
            if ((probability < 1) != random) continue;
            chunk = chunk_of(chunk, u.chosen[j]);
            const R *row = v[rows] = value_row<R>(chunk, u.b, u.h, u.chosen[j]);
            const float spread = random ? (1 - probability) * squared_distance(row, mean, D) : 0;
            for (int g = 0; g < G; g++) {
                const float w = s.s[g * ROWS_PER_UPDATE + rows] = x.weight[g * x.ld + j];
                x.total[g] += w, x.drawn[g] += random ? w : 0, x.variance[g] += w * w * spread;
            }
            if (++rows == ROWS_PER_UPDATE) flush();
        }
        if (rows) flush();
    }
    for (int g = 0; g < G; g++) {
        float *y = x.certain + g * P, *deviation = x.uncertain + g * P, norm = 0;
        const float scale = 1 / x.total[g];
        for (int i = 0; i < D; i++) {
            y[i] = (y[i] + deviation[i]) * scale;
            deviation[i] = (deviation[i] - x.drawn[g] * mean[i]) * scale;
            norm += deviation[i] * deviation[i];
        }
        const float noise = x.variance[g] * scale * scale, lost = noise < norm ? noise / norm : noise > 0 ? 1 : 0;
        for (int i = 0; i < D; i++) {
            y[i] -= lost * deviation[i];
            if (u.l[g] != u.l[g]) y[i] = u.l[g];  // a NaN logit makes the result NaN, as in dense attention
        }
    }
    store_result(op, u.b, u.h, x.certain, P);
}

// All of a unit's step after its scores.
template <class R, int D_>
static void skim_unit(const skimkv_op *op, Unit &u, const Scores &z, const SelectionScratch &s, const SkimScratch &x) {
    const auto count_rows = [&](int of_values) {
        __atomic_add_fetch(op->rows_read + 2 * u.b + of_values, u.chosen_count - 1, __ATOMIC_RELAXED);
    };
    if (op->cache->G == 1) draw_keys<false>(op, u, z, s, x);
    else draw_keys<true>(op, u, z, s, x);
    prefetch_rows(op, u, u.chosen, 0, u.chosen_count, true, false);
    count_rows(0);
    weigh_keys<R, D_>(op, u, x);
    draw_values(op, u, x);
    count_rows(1);
    attend_drawn<R, D_>(op, u, s, x);
}

}  // namespace skimkv::SKIMKV_NS
