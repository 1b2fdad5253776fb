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
#include "kernels/stage_clock.h"
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

// All bits of a lane are set if the position with this hash is drawn: with a probability of 1 or more it is.
static inline vi is_drawn(vw hash, vf probability) {
    const vf below_one = vmin(probability, splat(0x1.fffffep-1f));
    const vi threshold = __builtin_convertvector(below_one * splat(0x1p31f), vi);
    return ((vi)(hash >> 1) < threshold) | (vi)(probability >= splat(1.f));
}

// Sets the bits of the positions that are drawn: `share` times their softmax weights are the probabilities.
static void mark_drawn(const Unit &u, const float *weight, float share, uint64_t *drawn) {
    uint32_t lanes[W];
    for (int i = 0; i < W; i++) lanes[i] = u.key_word + (uint32_t)i;
    vw position;
    __builtin_memcpy(&position, lanes, sizeof position);
    for (int64_t word = 0; word < u.tiles * (GROUP / 64); word++) {
        uint64_t bits = 0;
        for (int x = 0; x < 64; x += W, position += (uint32_t)W)
            bits |= (uint64_t)lanes_of(is_drawn(mix_bits(position), load(weight + word * 64 + x) * splat(share))) << x;
        drawn[word] = bits;
    }
}

// Counts the rows of K, or of V, that are read, the current token's not included.
static void count_rows(const skimkv_op *op, const Unit &u, int of_values) {
    __atomic_add_fetch(op->rows_read + 2 * u.b + of_values, u.chosen_count - 1, __ATOMIC_RELAXED);
}

// Makes u.chosen the rows of K that are read, ascending, and x.probability theirs: 1 for the first tokens, the last
// ones and the k largest scores of the others; k times the softmax weight for the rest, of a group's queries the
// largest.
template <bool GROUPED>
static void draw_keys(const skimkv_op *op, Unit &u, const Scores &z, const SelectionScratch &s, const SkimScratch &x) {
    const int64_t first = min(u.n, SKIMKV_SKIM_FIRST), end = max(first, u.n - 1 - SKIMKV_SKIM_LAST);
    join_tiles(op, u, z, s);
    if (GROUPED) join_queries<true>(op, u, z, s);
    float *score = GROUPED ? s.sum : z.s;
    const int64_t best = select_candidates(score, GROUPED ? s.lane_max : z.lane_max, first, end, op->k, x.best, s);
    // A score is a weight or, of a single query, a logit.
    const float share = GROUPED ? (float)op->k : (float)op->k / u.l[0];
    // First all that may be drawn are listed, which for a group are those that are; then those that are, with their
    // probabilities; and last they are merged with the best. Random branches, which cannot be predicted, are avoided.
    int32_t *at = s.at;
    float *probability = s.value;
    int64_t listed = 0, drawn = 0, count = 0;
    if (GROUPED) mark_drawn(u, score, share, z.drawable);
    for (int64_t word = 0; word < u.tiles * (GROUP / 64) && best < end - first; word++)
        listed += places_of_bits(z.drawable[word], word * 64, at + listed);
    for (int64_t j = 0; j < listed; j++) probability[j] = score[at[j]];
    for (int i = 0; i < W; i++) at[listed + i] = -1, probability[listed + i] = 0;
    for (int64_t j = 0; j < listed; j += W) {
        const vf y = load(probability + j), p = (GROUPED ? y : exp2(y - splat(u.m[0]))) * splat(share);
        const vi place = load_integers(at + j), allowed = (place >= (int32_t)first) & (place < (int32_t)end);
        const unsigned lanes = lanes_of(is_drawn(mix_bits((vw)place + u.key_word), p) & allowed);
        pack_lanes(place, lanes, at + drawn), pack_lanes(vmin(p, splat(1.f)), lanes, probability + drawn);
        drawn += __builtin_popcount(lanes);
    }
    for (int64_t p = 0; p < first; p++) u.chosen[count] = (int32_t)p, x.probability[count++] = 1;
    at[drawn] = x.best[best] = INT32_MAX;
    for (int64_t i = 0, j = 0; i < drawn || j < best; count++) {
        const int32_t a = at[i], b = x.best[j];
        u.chosen[count] = a < b ? a : b, x.probability[count] = a < b ? probability[i] : 1;
        i += a <= b, j += b <= a;
    }
    for (int64_t p = end; p < u.n; p++) u.chosen[count] = (int32_t)p, x.probability[count++] = 1;
    u.chosen_count = count;
    count_rows(op, u, 0);
}
static void draw_keys(const skimkv_op *op, Unit &u, const Scores &z, const SelectionScratch &s, const SkimScratch &x) {
    if (op->cache->G == 1) draw_keys<false>(op, u, z, s, x);
    else draw_keys<true>(op, u, z, s, x);
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
// draws, and weights are divided by that of the second.
static void draw_values(const skimkv_op *op, Unit &u, const SkimScratch &x) {
    const int G = op->cache->G;
    const int64_t n = u.chosen_count;
    const uint32_t unit_word = word_of_unit(u, VALUE_STREAM);
    for (int g = 0; g < G; g++) {
        vf top = splat(0.f);
        for (int64_t j = 0; j < n; j += W) top = vmax(top, load(x.weight + g * x.ld + j));
        x.most[g] = max_lanes(top);
    }
    // Those that are drawn take the places of the others before them.
    const float share = (float)(2 * op->k), least = u.n <= op->k ? 1 : 0;
    int64_t count = 0;
    for (int64_t j = 0; j < n; j += W) {
        vf largest = splat(0.f);
        const vi place = load_integers(u.chosen + j);
        vi certain = place == (int32_t)(u.n - 1);
        for (int g = 0; g < G; g++) {
            const vf w = load(x.weight + g * x.ld + j);
            largest = vmax(w, largest), certain |= (w == splat(x.most[g])) & (w > splat(0.f));
        }
        const vf p = vmax(largest * splat(share), splat(least)), inverse = splat(1.f) / vmin(p, splat(1.f));
        const vf factor = (vf)(((vi)inverse & ~certain) | ((vi)splat(1.f) & certain));
        const unsigned rest = n - j < W ? (1u << (n - j)) - 1 : (1u << W) - 1;
        const unsigned lanes = lanes_of(certain | is_drawn(mix_bits((vw)place + unit_word), p)) & rest;
        pack_lanes(load(x.probability + j) / factor, lanes, x.probability + count);
        for (int g = 0; g < G; g++)
            pack_lanes(load(x.weight + g * x.ld + j) * factor, lanes, x.weight + g * x.ld + count);
        pack_lanes(place, lanes, u.chosen + count), count += __builtin_popcount(lanes);
    }
    u.chosen_count = count;
    count_rows(op, u, 1);
}

// Reads the values at u.chosen, and shrinks what was drawn at random towards the mean value as far as it is noise: see
// `shrink` in skim.py.
template <class R, int D_>
static void attend_drawn(const skimkv_op *op, const Unit &u, const SelectionScratch &s, const SkimScratch &x) {
    const skimkv_cache *c = op->cache;
    const int G = c->G, D = c->D, P = padded_head(D);
    float memory[SKIMKV_MAX_HEAD];
    const float *mean = mean_of_values(c, u.b, u.h, memory);
    for (int g = 0; g < G; g++) x.drawn[g] = x.variance[g] = 0;
    for (int64_t i = 0; i < (int64_t)G * P; i++) x.certain[i] = x.uncertain[i] = 0;
    const skimkv_chunk *chunk = c->chunks;
    for (int64_t from = 0; from < u.chosen_count; from += ROWS_PER_UPDATE) {
        // Rows that were sure to be read, and then those that were drawn. Which is which cannot be predicted, so no
        // branch depends on it.
        const int64_t to = min(from + ROWS_PER_UPDATE, u.chosen_count);
        const R *rows[2][ROWS_PER_UPDATE];
        int32_t at[2][ROWS_PER_UPDATE];
        int count[2] = {};
        for (int64_t j = from; j < to; j++) {
            chunk = chunk_of(chunk, u.chosen[j]);
            const int random = x.probability[j] < 1, i = count[random]++;
            rows[random][i] = value_row<R>(chunk, u.b, u.h, u.chosen[j]), at[random][i] = (int32_t)j;
        }
        for (int random = 0; random < 2; random++) {
            const int n = count[random];
            if (n == 0) continue;
            float spread[ROWS_PER_UPDATE];
            for (int i = 0; i < n; i++)
                spread[i] = random ? (1 - x.probability[at[1][i]]) * squared_distance<D_>(rows[1][i], mean, D) : 0;
            for (int i = n; i % W; i++) rows[random][i] = rows[random][n - 1], spread[i] = 0;
            for (int g = 0; g < G; g++) {
                float *w = s.s + g * ROWS_PER_UPDATE;
                for (int i = 0; i < n; i++) w[i] = x.weight[g * x.ld + at[random][i]];
                for (int i = n; i % W; i++) w[i] = 0;
                vf sum = splat(0.f), variance = splat(0.f);
                for (int i = 0; i < n; i += W)
                    sum = sum + load(w + i), variance = fma(load(w + i) * load(w + i), load(spread + i), variance);
                x.total[g] += sum_lanes(sum), x.variance[g] += sum_lanes(variance);
                if (random) x.drawn[g] += sum_lanes(sum);
            }
            add_rows<R, D_>(random ? x.uncertain : x.certain, P, G, D, rows[random], s.s, ROWS_PER_UPDATE, n);
        }
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
static void skim_unit(const skimkv_op *op, Unit &u, const Scores &z, const SelectionScratch &s, const SkimScratch &x,
                      StageClock &clock) {
    draw_keys(op, u, z, s, x);
    clock.mark(SKIMKV_STAGE_CHOOSE);
    prefetch_rows(op, u, u.chosen, 0, u.chosen_count, true, false);
    clock.mark(SKIMKV_STAGE_FETCH);
    weigh_keys<R, D_>(op, u, x);
    clock.mark(SKIMKV_STAGE_ATTEND);
    draw_values(op, u, x);
    clock.mark(SKIMKV_STAGE_CHOOSE);
    prefetch_rows(op, u, u.chosen, 0, u.chosen_count, false, true);
    clock.mark(SKIMKV_STAGE_FETCH);
    attend_drawn<R, D_>(op, u, s, x);
    clock.mark(SKIMKV_STAGE_ATTEND);
}

}  // namespace skimkv::SKIMKV_NS
