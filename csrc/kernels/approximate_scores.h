// Step 1 of the sparse methods: an approximate logit for every position, and the sums and maxima that softmax and top-k
// need of every tile of 256 positions.
//
// SparQ (Ribar et al., arXiv 2312.04985, algorithm 1, step 1): s = softmax(q[i1] K[:, i1]^T / temperature), where i1
// are the r largest channels of |q|. The low-rank baseline (the same paper, figure 7a) uses q and K in a projected
// space of R channels. Top-k and its oracle (appendix G and figure 7a) use the exact logits.
#pragma once
#include <stdint.h>

#include "kernels/cache_layout.h"
#include "kernels/channel_sums.h"
#include "kernels/hash.h"
#include "kernels/quantised_index.h"
#include "kernels/quantised_index_weights.h"
#include "kernels/row_attention.h"
#include "kernels/scratch_arena.h"
#include "kernels/selection.h"
#include "kernels/unit.h"
#include "kernels/vector_math.h"
#include "skimkv.h"

namespace skimkv::SKIMKV_NS {

// Chooses the r channels of the largest size. Sizes are from 0 on; `size` has room for D rounded up to 64.
static void choose_largest_channels(float *size, int D, int r, Unit &u) {
    const int64_t padded = round_up(D, 64);
    for (int64_t i = D; i < padded; i++) size[i] = LOWEST;
    const float bound = kth_largest_bound(size, D, r, 0);
    u.r = r;
    if (count_at_least(size, padded, bound) == r) {
        int64_t count = 0;
        for (int64_t i = 0; i < padded; i += 64) {
            uint64_t bits = 0;
            for (int x = 0; x < 64; x += W) bits |= (uint64_t)at_least(load(size + i + x), splat(bound)) << x;
            count += places_of_bits(bits, i, u.channel + count);
        }
        return;
    }
    int above = 0, count = 0;
    for (int i = 0; i < D; i++) above += size[i] > bound;
    int ties = r - above;
    for (int i = 0; i < D && count < r; i++)
        if (size[i] > bound || (size[i] == bound && ties-- > 0)) u.channel[count++] = i;
    for (int i = 0; count < r; i++) u.channel[count++] = i;  // for a NaN query any channels: the result is NaN
}

// The sums of |q| over the group, of every channel.
static void sum_query_sizes(const skimkv_op *op, const Unit &u, float *size) {
    const int D = op->cache->D, P = padded_head(D);
    for (int i = 0; i < D; i++) size[i] = 0;
    for (int g = 0; g < op->cache->G; g++)
        for (int i = 0; i < D; i++) size[i] += u.q[g * P + i] < 0 ? -u.q[g * P + i] : u.q[g * P + i];
}

// The sum of |x[i]|.
static float sum_of_sizes(const float *x, int n) {
    vf sum = splat(0.f);
    int i = 0;
    for (; i + W <= n; i += W) sum = sum + vmax(load(x + i), splat(0.f) - load(x + i));
    float rest = sum_lanes(sum);
    for (; i < n; i++) rest += x[i] < 0 ? -x[i] : x[i];
    return rest;
}

// Chooses i1 of SparQ's step 1, the r channels with the largest sum of |q| over the G queries, and weights them by q
// times a factor for the temperature: COVERAGE is sqrt(|q|_1 / |q[i1]|_1), the paper's.
static void choose_channels(const skimkv_op *op, Unit &u) {
    const int D = op->cache->D, P = padded_head(D), G = op->cache->G, r = (int)op->r;
    float size[SKIMKV_MAX_HEAD];
    sum_query_sizes(op, u, size);
    choose_largest_channels(size, D, r, u);
    for (int g = 0; g < G; g++) {
        const float *q = u.q + g * P;
        float *weight = u.channel_weight + g * r;
        for (int i = 0; i < r; i++) weight[i] = q[u.channel[i]];
        const float norm = sum_of_sizes(q, D), chosen_norm = sum_of_sizes(weight, r);
        float factor = 1;
        if (op->temperature == SKIMKV_SQRT_R) factor = __builtin_sqrtf((float)D / (float)r);
        else if (op->temperature == SKIMKV_COVERAGE && chosen_norm > 0) factor = __builtin_sqrtf(norm / chosen_norm);
        for (int i = 0; i < r; i++) weight[i] *= factor;
        if (op->cache->channels != SKIMKV_NONE) continue;  // only whole rows need the masked query
        float *masked = u.masked_query + g * P;
        for (int i = 0; i < P; i++) masked[i] = 0;
        for (int i = 0; i < r; i++) masked[u.channel[i]] = weight[i];
        if (is_rotated(op->cache->bits)) rotate_row(masked, D);
    }
}

// The same for Skim: the largest of these sums times the step of the last full group's codes, which grows with the
// range of the keys. masked_query is q in the other channels, whose keys are estimated by the means of their group.
static void choose_skim_channels(const skimkv_op *op, Unit &u) {
    const skimkv_cache *c = op->cache;
    const int D = c->D, P = padded_head(D), r = (int)op->r;
    const int64_t full = u.n / GROUP;
    float size[SKIMKV_MAX_HEAD];
    sum_query_sizes(op, u, size);
    if (full) {
        const skimkv_chunk *chunk = chunk_of(c->chunks, (full - 1) * GROUP);
        const float *step =
            chunk->scale + u.b * chunk->s_b + u.h * chunk->s_h + (full - 1 - chunk->start / GROUP) * chunk->s_g;
        for (int i = 0; i < D; i++) size[i] *= step[i * chunk->s_r];
    }
    choose_largest_channels(size, D, r, u);
    u.key_word = word_of_unit(u, KEY_STREAM);
    for (int64_t i = 0; i < (int64_t)c->G * P; i++) u.masked_query[i] = u.q[i];
    for (int g = 0; g < c->G; g++)
        for (int i = 0; i < r; i++) {
            u.channel_weight[g * r + i] = u.q[g * P + u.channel[i]];
            u.masked_query[g * P + u.channel[i]] = 0;
        }
}

// Projects the query into the space of a low-rank index, whose R channels are all chosen.
static void project_query(const skimkv_op *op, Unit &u) {
    const skimkv_cache *c = op->cache;
    const int R = c->R, P = padded_head(c->D);
    const float *projection = c->projection + u.h * c->D * R;
    u.r = R;
    for (int i = 0; i < R; i++) u.channel[i] = i;
    for (int64_t i = 0; i < (int64_t)c->G * R; i++) u.channel_weight[i] = 0;
    for (int d = 0; d < c->D; d++)
        for (int g = 0; g < c->G; g++)
            for (int i = 0; i < R; i++) u.channel_weight[g * R + i] += u.q[g * P + d] * projection[d * R + i];
}

// Tiles of a span: eight channels are read through a span before the next eight. Longer runs are faster, as long as the
// scores of a span stay in the L2 cache.
constexpr int SPAN_TILES = 256;

// Skim takes so many tiles of a span through all channels before the next ones. On an Intel a few are fastest: their
// scores stay in the L1 cache, and the tiles of one block are finished between reads of the next one, so that memory
// does not wait for that arithmetic. An AMD loses more by reading short runs of many channels than it gains by that, so
// a block is as long as its scores stay in the L2 cache.
constexpr int64_t SHORT_BLOCK_TILES = 4;
static inline int64_t skim_block_tiles(int G) {
    return is_intel_processor() ? SHORT_BLOCK_TILES : max(SPAN_TILES / G, SHORT_BLOCK_TILES);
}

// Spans of so few tiles, as a block of a serving engine has, prefetch a whole tile ahead at least: then their last tile
// prefetches what follows the span. A longer one gains nothing by that.
constexpr int SHORT_SPAN_TILES = 16;

// Sections of a unit that has so many positions to score. Each has a sum of weights of its own, so that scores depend
// neither on the threads nor on the batch's other rows. A row has about 16 in all, which more than 16 threads do not
// share evenly; four times as many would take Skim's steps a tenth longer on two.
static inline int64_t scored_sections(const skimkv_cache *c, int64_t n) {
    return max(1, min((16 + c->H - 1) / c->H, n / 1024));
}

// The first tile of section i of n positions.
static inline int64_t first_tile(int64_t n, int64_t sections, int64_t i) {
    return (n * i + sections * GROUP - 1) / (sections * GROUP);
}
// The tile after the section that begins with tile t.
static inline int64_t end_of_section(int64_t n, int64_t sections, int64_t t) {
    return first_tile(n, sections, t * GROUP * sections / n + 1);
}

// Sums of 2^(logit - shift) over the tiles of a section, for every query. The shift is the maximum of the first tile,
// and changes only if a later tile exceeds it by more than SHIFT_LIMIT: so no tile waits for its own maximum.
struct ExpSums {
    float *shift;  // [G]
    float *sum;    // [G][16]
    int64_t *end;  // the tile after the section
};
constexpr float SHIFT_LIMIT = 64;
static ExpSums take_exp_sums(Arena &a, int G) { return {a.take<float>(G), a.take<float>(16 * G), a.take<int64_t>(1)}; }

// Finishes tile t, whose logits are in z.s, for query g: applies the soft cap, hides positions from u.n on, and takes
// the lane maxima and the sums. Tiles come in order, and a section begins or ends with some. SINGLE: there is one
// query, and its logits are kept. DRAWS: Skim, for a single query, marks the positions that it may draw, whose random
// numbers are `hashes`.
//
// A key is drawn if its hash, up to 2^31, is below k 2^31 times its softmax weight. The sum over all positions is not
// known yet, but that of the tiles so far is no larger: so a few more positions are marked than are drawn.
template <bool SINGLE, bool DRAWS>
static inline void finish_query(const skimkv_op *op, const Unit &u, const Scores &z, const ExpSums &sums, int64_t t,
                                bool begins, bool ends, int g, const float *hashes) {
    float *s = z.s + (t * op->cache->G + g) * GROUP, *l = sums.sum + 16 * g;
    const float cap = softcap_log2(op);
    const int64_t valid = u.n - t * GROUP;
    vf top[16 / W];
    for (int i = 0; i < 16 / W; i++) top[i] = splat(LOWEST);
    if (cap != 0)
        for (int x = 0; x < GROUP; x += W) store(s + x, apply_softcap(load(s + x), cap));
    for (int64_t x = max(valid, 0); x < GROUP; x++) s[x] = LOWEST;
    if (begins) {
        for (int x = 0; x < GROUP; x += W) top[0] = vmax(top[0], load(s + x));
        sums.shift[g] = max_lanes(top[0]), top[0] = splat(LOWEST);
        for (int i = 0; i < 16; i++) l[i] = 0;
    }
    for (int x = 0; x < GROUP; x += 16)
        for (int i = 0; i < 16 / W; i++) top[i] = vmax(top[i], load(s + x + i * W));
    unsigned exceeds_limit = 0;
    for (int i = 0; i < 16 / W; i++) exceeds_limit |= at_least(top[i], splat(sums.shift[g] + SHIFT_LIMIT));
    if (exceeds_limit) {
        float m = LOWEST;
        for (int i = 0; i < 16 / W; i++) m = max_lanes(top[i]) > m ? max_lanes(top[i]) : m;
        for (int i = 0; i < 16; i++) l[i] *= exp2_scalar(sums.shift[g] - m);
        sums.shift[g] = m;
    }
    const vf shift = splat(sums.shift[g]);
    vf sum[16 / W];
    float kept[DRAWS ? GROUP : 1], *power = SINGLE ? kept : s;
    for (int i = 0; i < 16 / W; i++) sum[i] = load(l + i * W);
#pragma GCC unroll 4
    for (int x = 0; x < GROUP; x += 16)
        for (int i = 0; i < 16 / W; i++) {
            vf e = exp2(load(s + x + i * W) - shift);
            if (!SINGLE || DRAWS) store(power + x + i * W, e);
            sum[i] = sum[i] + e;
        }
    for (int i = 0; i < 16 / W; i++) {
        store(l + i * W, sum[i]);
        if (SINGLE) store(z.lane_max + 16 * t + i * W, top[i]);
    }
    z.tile_shift[g * u.tiles + t] = sums.shift[g], z.tile_sum[g * u.tiles + t] = 0;
    if (ends)
        for (int i = 0; i < 16; i++) z.tile_sum[g * u.tiles + t] += l[i];
    if (!DRAWS) return;
    for (int i = 1; i < 16 / W; i++) sum[0] = sum[0] + sum[i];
    const vf factor = splat((float)op->k * 0x1.001p31f / sum_lanes(sum[0]));  // with room for errors of rounding
    for (int word = 0; word < GROUP / 64; word++) {
        uint64_t bits = 0;
        for (int x = 0; x < 64; x += W)
            bits |= (uint64_t)at_least(load(power + word * 64 + x) * factor, load(hashes + word * 64 + x)) << x;
        z.drawable[t * 4 + word] = bits;
    }
}

// The same for every query. The sums of a section are stored with its last tile.
static void finish_tile(const skimkv_op *op, const Unit &u, const Scores &z, const ExpSums &sums, int64_t t) {
    const int G = op->cache->G;
    const bool begins = t == *sums.end;
    if (begins) *sums.end = end_of_section(u.n, scored_sections(op->cache, u.n), t);
    const bool ends = t + 1 == *sums.end;
    if (op->method == SKIMKV_SKIM && G == 1) {
        float hashes[GROUP];
        hashes_as_floats(u.key_word + (uint32_t)(t * GROUP), hashes, GROUP);
        return finish_query<true, true>(op, u, z, sums, t, begins, ends, 0, hashes);
    }
    if (G == 1) return finish_query<true, false>(op, u, z, sums, t, begins, ends, 0, nullptr);
    for (int g = 0; g < G; g++) finish_query<false, false>(op, u, z, sums, t, begins, ends, g, nullptr);
}

// Rows that are scored one after the other are prefetched so many ahead. With 16 KB they come 15% faster than with 2 or
// 128 KB.
constexpr int SCORED_AHEAD = 32;

// Scores tiles t0 .. t1-1 from rows of K, with the queries q [G][P]: those of the unit, or its masked ones.
template <class T, int D_>
static void score_rows(const skimkv_op *op, const Unit &u, const float *q, const Scores &z, const ExpSums &sums,
                       int64_t t0, int64_t t1) {
    const skimkv_cache *c = op->cache;
    const int P = padded_head(c->D);
    const T *rows[GROUP + SCORED_AHEAD];  // of a tile, and the first ones of the next
    for (int64_t t = t0; t < t1; t++) {
        const int n = (int)min(GROUP, u.n - t * GROUP), stop = t + 1 < t1 ? GROUP + SCORED_AHEAD : n;
        int count = 0;
        for_each_run(c, t * GROUP, min(t * GROUP + stop, u.n),
                     [&](const skimkv_chunk *chunk, int64_t from, int64_t end) {
                         for (int64_t p = from; p < end; p++) rows[count++] = key_row<T>(chunk, u.b, u.h, p);
                     });
        for (; count < n + SCORED_AHEAD; count++) rows[count] = rows[count - 1];
        float *s = z.s + t * c->G * GROUP;
        if (q == u.q) dot_query_with_keys<T, D_>(op, u, rows, n, s, GROUP, rows + SCORED_AHEAD);
        else dot_rows<T, D_>(q, P, c->G, c->D, rows, n, s, GROUP, rows + SCORED_AHEAD);
        finish_tile(op, u, z, sums, t);
    }
}

// Quest (Tang et al., arXiv 2406.10774, section 3): makes u a unit of the pages before the current token's, and the
// query for their bounds: what of it multiplies the smallest keys, and then what multiplies the largest.
static void prepare_pages(const skimkv_op *op, Unit &u) {
    const int D = op->cache->D, P = padded_head(D), P2 = padded_head(2 * D);
    for (int g = 0; g < op->cache->G; g++) {
        const float *q = u.q + g * P;
        float *to = u.masked_query + g * P2;
        for (int i = 0; i < D; i++) {
            to[i] = q[i] > 0 ? 0 : q[i], to[D + i] = q[i] < 0 ? 0 : q[i];
        }
        for (int i = 2 * D; i < P2; i++) to[i] = 0;
    }
    u.n = (u.n - 1) / op->cache->page, u.tiles = round_up(u.n, GROUP) / GROUP;
}

// Scores tiles t0 .. t1-1 of pages: the largest logit that a key between a page's bounds may have.
template <class T, int D_>
static void score_pages(const skimkv_op *op, const Unit &u, const Scores &z, const ExpSums &sums, int64_t t0,
                        int64_t t1) {
    skimkv_cache pages = *op->cache;
    skimkv_op of_pages = *op;
    pages.D *= 2, pages.chunks = pages.pages, pages.n_chunks = pages.n_pages, of_pages.cache = &pages;
    score_rows<T, 2 * D_>(&of_pages, u, u.masked_query, z, sums, t0, t1);
}

// Adds the unit's channels c0 .. c0+nc-1 to the scores of tile t of a chunk, in floats. p are these channels of the
// index, of type E; the same places of `ahead` are prefetched.
template <class E>
static void score_tile(const skimkv_op *op, const Unit &u, const skimkv_chunk *chunk, const E *const *p,
                       const E *const *ahead, int64_t c0, int nc, const Scores &z, int64_t t) {
    const int G = op->cache->G;
    const int64_t at = t * GROUP - chunk->start;
    float *s = z.s + t * G * GROUP;
    if constexpr (sizeof(E) == 1) {
        const float *scale = chunk->scale + u.b * chunk->s_b + u.h * chunk->s_h + at / GROUP * chunk->s_g;
        float w[4 * CHANNELS_AT_ONCE], init[4], step[CHANNELS_AT_ONCE], zero[CHANNELS_AT_ONCE];
        for (int i = 0; i < nc; i++) {
            step[i] = scale[u.channel[c0 + i] * chunk->s_r];
            zero[i] = scale[u.channel[c0 + i] * chunk->s_r + chunk->s_z];
        }
        for (int g0 = 0; g0 < G; g0 += 4) {
            const int gn = (int)min(G - g0, 4);
            for (int g = 0; g < gn; g++) {
                const float *weight = u.channel_weight + (g0 + g) * u.r + c0;
                init[g] = 0;
                for (int i = 0; i < nc; i++)
                    w[g * CHANNELS_AT_ONCE + i] = weight[i] * step[i], init[g] += weight[i] * zero[i];
            }
            add_channels_of_queries<E>(p, ahead, at, GROUP, nc, w, CHANNELS_AT_ONCE, gn, c0 == 0, init, s + g0 * GROUP,
                                       GROUP);
        }
    } else {
        const float no_init[4] = {};
        E copy[CHANNELS_AT_ONCE * GROUP];
        const E *copies[CHANNELS_AT_ONCE];
        const bool whole = at + GROUP <= chunk->cap;
        const int n = (int)min(GROUP, u.n - t * GROUP);
        for (int i = 0; i < nc && !whole; i++) {  // the chunk ends inside the tile
            copies[i] = copy + i * GROUP;
            __builtin_memcpy(copy + i * GROUP, p[i] + at, (chunk->cap - at) * sizeof(E));
            __builtin_memset(copy + i * GROUP + chunk->cap - at, 0, (GROUP - chunk->cap + at) * sizeof(E));
        }
        for (int g = 0; g < G; g += 4)
            add_channels_of_queries<E>(whole ? p : copies, whole ? ahead : copies, whole ? at : 0, n, nc,
                                       u.channel_weight + g * u.r + c0, u.r, (int)min(G - g, 4), c0 == 0, no_init,
                                       s + g * GROUP, GROUP);
    }
}

// Adds the unit's channels c0 .. c0+nc-1 to the scores of the tiles t .. end-1 of a chunk. p are these channels of the
// index, of type E; the same places of `ahead` are prefetched. t0 is the first tile of the span.
template <class E>
static void score_tiles(const skimkv_op *op, const Unit &u, const skimkv_chunk *chunk, const E *const *p,
                        const E *const *ahead, int64_t c0, int nc, const Scores &z,
                        [[maybe_unused]] const ByteWeights &weights, int64_t t, int64_t end,
                        [[maybe_unused]] int64_t t0) {
    if constexpr (sums_in_integers<E>)
        add_quantised_channels<is_int4<E>>(op, u, (const uint8_t *const *)p, (const uint8_t *const *)ahead,
                                           t * GROUP - chunk->start, weights, t - t0, end - t, c0,
                                           z.s + t * op->cache->G * GROUP);
    else
        for (; t < end; t++) score_tile<E>(op, u, chunk, p, ahead, c0, nc, z, t);
}

// Scores a span, the tiles t0 .. t1-1 of one chunk, a few channels after the other. next: the chunk of tile t1, where
// the next span begins, or NULL.
template <class E>
static void score_span(const skimkv_op *op, const Unit &u, const skimkv_chunk *chunk, const Scores &z,
                       const ByteWeights &weights, const ExpSums &sums, int64_t t0, int64_t t1,
                       const skimkv_chunk *next) {
    const E *index = (const E *)chunk->index + u.b * chunk->x_b + u.h * chunk->x_h;
    if (sizeof(E) == 1)  // prefetch the first codes while the weights are made
        for (int c = 0; c < 2 * CHANNELS_AT_ONCE && c < u.r; c++) {
            const E *from = index + u.channel[c] * chunk->x_r + (t0 * GROUP - chunk->start) / (is_int4<E> ? 2 : 1);
            for (int i = 0; i < 4; i++) prefetch((const char *)from + 64 * i);
        }
    if constexpr (sums_in_integers<E>) make_byte_weights<is_int4<E>>(op, u, chunk, weights, t0, t1);
    const int64_t tile = is_int4<E> ? GROUP / 2 : GROUP, sets = (u.r + CHANNELS_AT_ONCE - 1) / CHANNELS_AT_ONCE;
    const int64_t usual = (sums_in_integers<E> ? 4 : 1) * AHEAD_BYTES / (int)sizeof(E);
    const int64_t block = op->method == SKIMKV_SKIM ? skim_block_tiles(op->cache->G) : t1 - t0;
    int64_t finished = t0;
    for (int64_t a = t0; a < t1; a += block) {
        // At the end of a run, the beginning of the next channels' runs is prefetched, after the last channels that of
        // the next block's or the next span's: a short run is over before the processor has noticed that memory is
        // read in order.
        const int64_t b = min(a + block, t1), run = (b - a) * tile;
        const int64_t distance = min(run, t1 - t0 > SHORT_SPAN_TILES || usual > tile ? usual : tile);
        const int64_t turn = b - distance / tile, here = (b - chunk->start / GROUP) * tile;
        const E *there =
            !next ? nullptr
                  : (const E *)next->index + u.b * next->x_b + u.h * next->x_h + (t1 - next->start / GROUP) * tile;
        for (int64_t set = 0; set < sets; set++) {
            const int64_t c0 = set * CHANNELS_AT_ONCE;
            const int nc = (int)min(CHANNELS_AT_ONCE, u.r - c0);
            const bool last = set + 1 == sets;
            const E *p[CHANNELS_AT_ONCE], *ahead[CHANNELS_AT_ONCE], *ahead_in_next[CHANNELS_AT_ONCE];
            for (int i = 0; i < CHANNELS_AT_ONCE; i++) {
                const int64_t following = last ? i : c0 + CHANNELS_AT_ONCE + i;
                const E *const channel = index + u.channel[following < u.r ? following : 0] * chunk->x_r;
                p[i] = index + u.channel[c0 + (i < nc ? i : 0)] * chunk->x_r;
                ahead[i] = p[i] + distance;
                if (following >= u.r) ahead_in_next[i] = p[i];
                else if (!last) ahead_in_next[i] = channel + distance - run;
                else if (b < t1) ahead_in_next[i] = channel + distance;
                else ahead_in_next[i] = there ? there + u.channel[i] * next->x_r - here + distance : p[i];
            }
            const bool lags = block < t1 - t0;
            for (int64_t t = a, end; t < b; t = end) {
                end = last && !lags ? t + 1 : t < turn ? turn : b;
                score_tiles<E>(op, u, chunk, p, t < turn ? ahead : ahead_in_next, c0, nc, z, weights, t, end, t0);
                if (last && !lags) finish_tile(op, u, z, sums, finished++);
            }
            // Of a span in blocks, the tiles of the block before are finished, evenly spread.
            for (const int64_t stop = a - block + block * (set + 1) / sets; finished < stop; finished++)
                finish_tile(op, u, z, sums, finished);
        }
    }
    for (; finished < t1; finished++) finish_tile(op, u, z, sums, finished);
}

// Scores the groups t0 .. t1-1 of one chunk by their means, in the channels that are not read: into weights.init.
template <class T>
static void score_group_means(const skimkv_op *op, const Unit &u, const skimkv_chunk *chunk, const ByteWeights &weights,
                              int64_t t0, int64_t t1) {
    const int G = op->cache->G, D = op->cache->D;
    const T *rows[SPAN_TILES];
    int n = 0;
    for (int64_t t = t0; t < t1; t++) rows[n++] = group_means<T>(chunk, u.b, u.h, t - chunk->start / GROUP);
    for (int i = n; i % W; i++) rows[i] = rows[n - 1];
    dot_rows<T, 0>(u.masked_query, padded_head(D), G, D, rows, n, weights.init, weights.tiles);
}

// The last, incomplete group of Skim's index as a chunk of its own, with the scale and the means of the group before
// it.
template <class T> static skimkv_chunk open_group(const skimkv_cache *c, int64_t start) {
    const skimkv_chunk *here = chunk_of(c->chunks, start), *before = chunk_of(c->chunks, start - 1);
    const int64_t group = start / GROUP - 1 - before->start / GROUP;
    skimkv_chunk open = *before;
    open.start = start, open.cap = GROUP;
    open.index = (const char *)here->index + (start - here->start) / 2;
    open.x_b = here->x_b, open.x_h = here->x_h, open.x_r = here->x_r;
    open.scale = before->scale + group * before->s_g;
    open.means = (const T *)before->means + group * before->e_g;
    return open;
}

// Scores tiles t0 .. t1-1 from the channel-major index.
template <class T>
static void score_channels(const skimkv_op *op, const Unit &u, const Scores &z, const ByteWeights &weights,
                           const ExpSums &sums, int64_t t0, int64_t t1) {
    const skimkv_cache *c = op->cache;
    const bool quantised = c->channels >= SKIMKV_INT8;
    const int64_t stop = quantised ? u.n / GROUP * GROUP : u.n;
    for_each_run(c, t0 * GROUP, min(t1 * GROUP, stop), [&](const skimkv_chunk *chunk, int64_t from, int64_t to) {
        for (int64_t a = from / GROUP, last = (to + GROUP - 1) / GROUP; a < last; a += SPAN_TILES) {
            const int64_t b = min(a + SPAN_TILES, last);
            const skimkv_chunk *next = b < last ? chunk : to < min(t1 * GROUP, stop) ? chunk + 1 : nullptr;
            if (op->method == SKIMKV_SKIM) score_group_means<T>(op, u, chunk, weights, a, b);
            if (c->channels == SKIMKV_COPY) score_span<T>(op, u, chunk, z, weights, sums, a, b, next);
            else if (c->channels == SKIMKV_INT8) score_span<uint8_t>(op, u, chunk, z, weights, sums, a, b, next);
            else score_span<Int4>(op, u, chunk, z, weights, sums, a, b, next);
        }
    });
    if (!quantised || stop == u.n || t1 * GROUP <= stop) return;
    if (op->method == SKIMKV_SKIM && stop > 0) {
        const skimkv_chunk coded = open_group<T>(c, stop);
        score_group_means<T>(op, u, &coded, weights, stop / GROUP, stop / GROUP + 1);
        return score_span<Int4>(op, u, &coded, z, weights, sums, stop / GROUP, stop / GROUP + 1, nullptr);
    }
    skimkv_chunk open{};  // the last, incomplete group of a quantised index is not quantised yet
    open.start = stop, open.cap = GROUP, open.index = c->tail;
    open.x_b = c->t_b, open.x_h = c->t_h, open.x_r = c->t_r;
    score_span<T>(op, u, &open, z, weights, sums, stop / GROUP, stop / GROUP + 1, nullptr);
}

}  // namespace skimkv::SKIMKV_NS
