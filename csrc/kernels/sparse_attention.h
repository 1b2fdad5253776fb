// Steps 2 and 3 of the sparse methods: selects positions by their approximate scores, reads these rows, and attends to
// them.
//
// SparQ (Ribar et al., arXiv 2312.04985, algorithm 1): i2 are the `local` last positions and the largest scores of the
// rest, summed over the group (section 4); alpha is their share of the scores, and y = alpha softmax(q K[i2]^T) V[i2] +
// (1 - alpha) mean(V). Top-k (appendix G) takes the softmax weights of all positions and drops those that were not
// selected; the oracle (figure 7a) takes the softmax over the selected ones, whose maximum may be far below that of all
// positions, because the queries of a group select together.
#pragma once
#include <stdint.h>

#include "kernels/cache_layout.h"
#include "kernels/row_attention.h"
#include "kernels/scratch_arena.h"
#include "kernels/selection.h"
#include "kernels/unit.h"
#include "kernels/vector_math.h"
#include "skimkv.h"

namespace skimkv::SKIMKV_NS {

constexpr int ROWS_PER_UPDATE = 256;  // rows of one update of the softmax: usually all

// In a cache of at most NEAR_TOKENS tokens, and where pages of rows are selected, rows are prefetched ROWS_AHEAD before
// their turn, while others are worked on. Single rows of larger caches take longer to come, and it is faster to
// prefetch all of them before the first is used.
constexpr int ROWS_AHEAD = 32;
constexpr int64_t NEAR_TOKENS = 8192;
// Exact scores have read the keys already.
static inline bool reads_keys(const skimkv_op *op) {
    return op->method == SKIMKV_SPARQ || op->method == SKIMKV_LOWRANK || op->method == SKIMKV_QUEST;
}
// Of these rows, not the keys of exact scores, and a quantised row may begin and end inside a cache line.
static inline bool prefetches_in_turn(const skimkv_op *op, const Unit &u) {
    return reads_keys(op) && (u.n <= NEAR_TOKENS || op->method == SKIMKV_QUEST) && !op->cache->bits;
}

// Scratch memory of one thread.
struct SelectionScratch {
    float *sum;       // [padded_n] softmax weights summed over the group, if G > 1
    float *lane_max;  // [16*tiles] their maxima, as select_largest needs them
    float *value;     // [padded_n + 16]
    int32_t *at;      // [padded_n + 16]
    float *factor;    // [G][tiles]: makes softmax weights of a tile's 2^(logit - shift)
    float *online;    // the state of the online softmax
    float *s;         // [G][ROWS_PER_UPDATE]
};
static SelectionScratch take_selection(Arena &a, const skimkv_op *op, int64_t n) {
    const int G = op->cache->G;
    const int64_t padded_n = round_up(n, 256), tiles = padded_n / 256;
    SelectionScratch x{};
    x.sum = a.take<float>(G > 1 ? padded_n : 0), x.lane_max = a.take<float>(G > 1 ? 16 * tiles : 16);
    x.value = a.take<float>(padded_n + 16), x.at = a.take<int32_t>(padded_n + 16);
    x.factor = a.take<float>(G * tiles);
    x.online = a.take<float>(online_softmax_floats(G, padded_head(op->cache->D)));
    x.s = a.take<float>(G * ROWS_PER_UPDATE);
    return x;
}

// The softmax weight of position p for query g, by the scores of step 1; of a single query its logit.
static inline float weight_or_logit(const Unit &u, const Scores &z, const SelectionScratch &x, int G, int g,
                                    int64_t p) {
    const int64_t t = p / GROUP;
    return G > 1 ? z.s[(t * G + g) * GROUP + p % GROUP] * x.factor[g * u.tiles + t] : z.s[p];
}
// The softmax weight in either case.
static inline float softmax_weight(const Unit &u, const Scores &z, const SelectionScratch &x, int G, int g, int64_t p) {
    const float weight = weight_or_logit(u, z, x, G, g, p);
    return G > 1 ? weight : exp2_scalar(weight - u.m[0]) / u.l[0];
}

// Joins the sums of all tiles: u.m and u.l, and the factors that make softmax weights of the scores of several queries.
static void join_tiles(const skimkv_op *op, const Unit &u, const Scores &z, const SelectionScratch &x) {
    const int G = op->cache->G;
    for (int g = 0; g < G; g++) {
        const float *shift = z.tile_shift + g * u.tiles, *sum = z.tile_sum + g * u.tiles;
        float m = LOWEST, l = 0;
        for (int64_t t = 0; t < u.tiles; t++) m = shift[t] > m ? shift[t] : m;
        for (int64_t t = 0; t < u.tiles; t++)
            if (sum[t] != 0) l += sum[t] * exp2_scalar(shift[t] - m);
        l += sink_weight(op->sinks, u.h * G + g, m);
        u.m[g] = m, u.l[g] = l;
        float *factor = x.factor + g * u.tiles;
        for (int64_t t = 0; t < u.tiles && G > 1; t++)  // most tiles have the shift of the one before
            factor[t] = t && shift[t] == shift[t - 1] ? factor[t - 1] : exp2_scalar(shift[t] - m) / l;
    }
}

// Sums the softmax weights of a group's queries into x.sum, or takes their LARGEST, and the maxima of the lanes.
template <bool LARGEST>
static void join_queries(const skimkv_op *op, const Unit &u, const Scores &z, const SelectionScratch &x) {
    const int G = op->cache->G;
    constexpr int VECTORS = 64 / W;
    for (int64_t t = 0; t < u.tiles; t++) {
        vf top[16 / W];
        for (int i = 0; i < 16 / W; i++) top[i] = splat(LOWEST);
        for (int y = 0; y < GROUP; y += 64) {
            vf v[VECTORS] = {};
            for (int g = 0; g < G; g++) {
                const float *s = z.s + (t * G + g) * GROUP + y;
                const vf factor = splat(x.factor[g * u.tiles + t]);
                for (int i = 0; i < VECTORS; i++)
                    v[i] = LARGEST ? vmax(load(s + i * W) * factor, v[i]) : fma(load(s + i * W), factor, v[i]);
            }
            for (int i = 0; i < VECTORS; i++) {
                store(x.sum + t * GROUP + y + i * W, v[i]);
                top[i % (16 / W)] = vmax(top[i % (16 / W)], v[i]);
            }
        }
        for (int i = 0; i < 16 / W; i++) store(x.lane_max + 16 * t + i * W, top[i]);
    }
}

// Hides the positions from .. to-1 of a tile, keeps their scores in `hidden`, and takes the maxima of its lanes again.
static void hide_positions(float *s, float *lane_max, int64_t from, int64_t to, float *hidden) {
    const int64_t tile = from / GROUP * GROUP;
    for (int64_t i = from; i < to; i++) hidden[i - from] = s[i], s[i] = LOWEST;
    for (int i = 0; i < 16 && from < to; i += W) {
        vf top = splat(LOWEST);
        for (int y = 0; y < GROUP; y += 16) top = vmax(top, load(s + tile + y + i));
        store(lane_max + tile / 16 + i, top);
    }
}

// Writes the k largest scores' positions to `out`, of those from `first` to end-1, and returns how many there are. Both
// ends are in any tile; the scores are the same afterwards, the maxima of the lanes are not.
static int64_t select_candidates(float *s, float *lane_max, int64_t first, int64_t end, int64_t k, int32_t *out,
                                 const SelectionScratch &x) {
    float before[GROUP], after[GROUP];
    const int64_t edge = end / GROUP * GROUP, stop = end > edge ? edge + GROUP : end;
    if (k >= end - first) {
        for (int64_t p = first; p < end; p++) out[p - first] = (int32_t)p;
        return max(end - first, 0);
    }
    hide_positions(s, lane_max, end, stop, after), hide_positions(s, lane_max, 0, first, before);
    const int64_t count = select_largest(s, lane_max, end, k, out, x.value, x.at);
    for (int64_t i = end; i < stop; i++) s[i] = after[i - end];
    for (int64_t i = 0; i < first; i++) s[i] = before[i];
    return count;
}

// Step 2: selects the current token, the `local` positions before it, and the largest scores of the rest: k positions
// besides the current one.
static void select_positions(const skimkv_op *op, Unit &u, const Scores &z, const SelectionScratch &x) {
    const int G = op->cache->G;
    join_tiles(op, u, z, x);
    const int64_t local = op->method == SKIMKV_SPARQ ? min(op->local, u.n - 1) : 0;
    const int64_t free = u.n - 1 - local, k = max(min(op->k - local, free), 0);
    if (G > 1) join_queries<false>(op, u, z, x);
    u.chosen_count = select_candidates(G > 1 ? x.sum : z.s, G > 1 ? x.lane_max : z.lane_max, 0, free, k, u.chosen, x);
    for (int64_t p = free; p < u.n; p++) u.chosen[u.chosen_count++] = (int32_t)p;
}

// Quest's stage 2: selects the pages with the largest bounds, and makes u a unit of tokens again: those of these pages,
// and of the current token's.
static void select_pages(const skimkv_op *op, Unit &u, const Scores &z, const SelectionScratch &x) {
    const bool grouped = op->cache->G > 1;
    const int64_t pages = u.n, page = op->cache->page;
    join_tiles(op, u, z, x);
    if (grouped) join_queries<false>(op, u, z, x);
    const int64_t count =
        select_candidates(grouped ? x.sum : z.s, grouped ? x.lane_max : z.lane_max, 0, pages, op->k, u.chosen, x);
    for (int64_t i = count - 1; i >= 0; i--) {  // in place: what a page becomes is not before it
        const int32_t first = (int32_t)(u.chosen[i] * page);
        for (int64_t j = 0; j < page; j++) u.chosen[i * page + j] = first + (int32_t)j;
    }
    u.chosen_count = count * page, u.n = cached_tokens(op, u.b);
    for (int64_t p = pages * page; p < u.n; p++) u.chosen[u.chosen_count++] = (int32_t)p;
}

// Points k and v to the rows at u.chosen[from] and following, at most ROWS_PER_UPDATE, and returns how many they are.
// Up to the next multiple of W the pointers repeat the last row.
template <class T>
static int64_t gather_selected_rows(const skimkv_cache *c, const Unit &u, int64_t from, const T **k, const T **v) {
    const int64_t n = min(ROWS_PER_UPDATE, u.chosen_count - from);
    const skimkv_chunk *chunk = c->chunks;
    for (int64_t j = 0; j < n; j++) {
        const int64_t p = u.chosen[from + j];
        chunk = chunk_of(chunk, p);
        k[j] = key_row<T>(chunk, u.b, u.h, p), v[j] = value_row<T>(chunk, u.b, u.h, p);
    }
    for (int64_t j = n; j < round_up(n, W); j++) k[j] = k[n - 1], v[j] = v[n - 1];
    return n;
}

// Step 3: attends to the selected rows.
template <class T, int D_>
static void attend_selected(const skimkv_op *op, Unit &u, const Scores &z, const SelectionScratch &x) {
    const skimkv_cache *c = op->cache;
    const int G = c->G, P = padded_head(c->D);
    const OnlineSoftmax o = online_softmax_at(x.online, G);
    const bool keeps_weights = op->method == SKIMKV_TOPK;
    const bool in_turn = prefetches_in_turn(op, u);
    const T *rows[2 * ROWS_PER_UPDATE + ROWS_AHEAD];  // of K, and then of V: the order in which they are used
    reset_softmax(o, G, P);
    for (int64_t from = 0; from < u.chosen_count; from += ROWS_PER_UPDATE) {
        const int n = (int)min(ROWS_PER_UPDATE, u.chosen_count - from);
        const T **k = rows, **v = rows + round_up(n, W);
        gather_selected_rows<T>(c, u, from, k, v);
        for (int j = n; j < n + ROWS_AHEAD; j++) v[j] = v[n - 1];
        if (in_turn && from) prefetch_rows(op, u, u.chosen, from, from + min(n, ROWS_AHEAD), true, false);
        if (keeps_weights) {
            for (int g = 0; g < G; g++)
                for (int j = 0; j < n; j++) {
                    x.s[g * ROWS_PER_UPDATE + j] = softmax_weight(u, z, x, G, g, u.chosen[from + j]);
                    o.l[g] += x.s[g * ROWS_PER_UPDATE + j];
                }
            add_rows<T, D_>(o.acc, P, G, c->D, v, x.s, ROWS_PER_UPDATE, n);
        } else {
            dot_query_with_keys<T, D_>(op, u, k, n, x.s, ROWS_PER_UPDATE, in_turn ? k + ROWS_AHEAD : nullptr);
            update_softmax<T, D_>(o, P, G, c->D, v, n, x.s, ROWS_PER_UPDATE, softcap_log2(op),
                                  in_turn ? v + ROWS_AHEAD : nullptr);
        }
    }
    float memory[SKIMKV_MAX_HEAD];
    const float *mean = op->use_mean ? mean_of_values(c, u.b, u.h, memory) : nullptr;
    for (int g = 0; g < G; g++) {
        const float alpha = op->use_mean ? u.alpha[g] : 1;
        float scale = alpha / (keeps_weights ? 1 : o.l[g] + sink_weight(op->sinks, u.h * G + g, o.m[g]));
        // A NaN logit at any position makes the result NaN, as in dense attention.
        if (u.l[g] != u.l[g]) scale = u.l[g];
        for (int i = 0; i < c->D; i++) o.acc[g * P + i] = o.acc[g * P + i] * scale + (mean ? (1 - alpha) * mean[i] : 0);
    }
    store_result(op, u.b, u.h, o.acc, P);
}

// Sums the scores' softmax mass on the selected positions and on the sink, whose value is zero: SparQ's alpha.
static void sum_selected_mass(const skimkv_op *op, Unit &u, const Scores &z, const SelectionScratch &x) {
    const int G = op->cache->G;
    const int64_t n = u.chosen_count;
    float *weight = x.value;
    for (int64_t j = n; j < round_up(n, W); j++) weight[j] = G > 1 ? 0 : LOWEST;
    for (int g = 0; g < G; g++) {
        for (int64_t j = 0; j < n; j++) weight[j] = weight_or_logit(u, z, x, G, g, u.chosen[j]);
        vf total = splat(0.f);
        for (int64_t j = 0; j < n; j += W)
            total = total + (G > 1 ? load(weight + j) : exp2(load(weight + j) - splat(u.m[0])));
        const float mass = G > 1 ? sum_lanes(total) : sum_lanes(total) / u.l[0];
        const float sum = sink_weight(op->sinks, u.h * G + g, u.m[g]) / u.l[g] + mass;
        u.alpha[g] = sum > 1 || n == u.n ? 1 : sum;
    }
}

}  // namespace skimkv::SKIMKV_NS
