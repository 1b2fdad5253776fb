// One unit of attention, which is a row of the batch and a KV head with its G query heads: its query, its scratch
// memory, and the steps that all methods share.
#pragma once
#include <stdint.h>

#include "kernel_table.h"
#include "kernels/cache_layout.h"
#include "kernels/hash.h"
#include "kernels/quantised_row_products.h"
#include "kernels/quantised_rows.h"
#include "kernels/row_attention.h"
#include "kernels/scratch_arena.h"
#include "kernels/vector_math.h"
#include "skimkv.h"
#ifdef SKIMKV_BF16_PRODUCTS
#include "isa/row_dots_bf16.h"
#endif

namespace skimkv::SKIMKV_NS {

// Approximate scores of one unit, which the threads that split the unit share.
struct Scores {
    float *s;            // [tiles][G][256] logits; if G > 1, 2^(logit - shift of the tile)
    float *tile_shift;   // [G][tiles] shift of every tile of 256 positions
    float *tile_sum;     // [G][tiles] sum of 2^(logit - shift) of a section's tiles, at its last one; 0 at the others
    float *lane_max;     // [16*tiles] maxima of s, as select_largest needs them
    uint64_t *drawable;  // for Skim [4*tiles]: a bit for every position, set where its key may be drawn
};

struct Unit {
    int64_t b, h;            // row of the batch and KV head
    int64_t n, tiles;        // tokens, and tiles of 256 tokens; of Quest, while pages are scored, pages
    float *q;                // [G][P] the query, scaled and zero beyond D; P is padded_head(D)
    bf16 *bf16_query;        // [G][padded_bf16(D)] the query as it came, or nullptr if its products are not taken
    PreparedQuery prepared;  // the query as the products with quantised rows need it
    int32_t *channel;        // [r + 2] chosen channels; the last two are scratch memory
    int64_t r;               // how many they are
    float *channel_weight;   // [G][r] what a channel of K is multiplied with
    float *masked_query;     // [G][P] the same for a whole row of K: zero where a channel was not chosen
                             // Quest: [G][padded_head(2D)] the query for the bounds of a page
    int32_t *chosen;         // the positions that are attended to, ascending
    int64_t chosen_count;
    float *alpha;       // [G] approximate softmax mass of the chosen positions
    float *m, *l;       // [G] the largest shift, and the sum of 2^(logit - m) over all positions
    uint32_t key_word;  // for Skim: the word of position p is the hash of key_word + p
};

// Skim's two streams of random numbers. That of a position is the hash of a unit's word and the position.
enum { KEY_STREAM, VALUE_STREAM };
static inline uint32_t word_of_unit(const Unit &u, uint32_t stream) {
    return add_word(add_word(mix_bits(stream), (uint32_t)u.n), (uint32_t)u.h) * GOLDEN;
}

// Floats of a query row: D rounded up. The bfloat16 copy of a query is rounded up further, to whole vectors.
static inline int padded_head(int D) { return (int)round_up(D, 16); }
static inline int padded_bf16(int D) { return (int)round_up(D, 32); }

// Floats of a unit's query and, behind it, of its bfloat16 copy, or of what quantised rows need: its rotated copy, if
// they are rotated, and what is prepared.
static inline int64_t query_floats(const skimkv_cache *c) {
    const int64_t query = c->G * padded_head(c->D);
    if (!c->bits) return query + c->G * padded_bf16(c->D) / 2;
    return query + (is_rotated(c->bits) ? query : 0) + prepared_floats(c->G, c->D, c->bits);
}

// Memory for the scores of n positions.
static Scores take_scores(Arena &a, const skimkv_op *op, int64_t n) {
    const int64_t padded_n = round_up(n, 256), tiles = padded_n / 256, G = op->cache->G;
    const bool draws = op->method == SKIMKV_SKIM;
    return {a.take<float>(G * padded_n), a.take<float>(G * tiles), a.take<float>(G * tiles), a.take<float>(16 * tiles),
            a.take<uint64_t>(draws ? 4 * tiles : 0)};
}

// Memory for a unit of n positions.
static Unit take_unit(Arena &a, const skimkv_op *op, int64_t n) {
    const skimkv_cache *c = op->cache;
    const int P = padded_head(c->D);
    const bool has_pages = op->method == SKIMKV_QUEST;
    const int64_t R = max(c->R, c->D), k = has_pages                   ? (min(op->k, n / c->page) + 1) * c->page
                                           : op->method == SKIMKV_SKIM ? n + 1
                                                                       : min(op->k, n) + 1;
    Unit u{};
    u.q = a.take<float>(query_floats(c)), u.channel_weight = a.take<float>(c->G * R);
    u.masked_query = a.take<float>(c->G * (has_pages ? padded_head(2 * c->D) : P));
    u.channel = a.take<int32_t>(R + 2), u.chosen = a.take<int32_t>(k + 16);
    u.alpha = a.take<float>(c->G), u.m = a.take<float>(c->G), u.l = a.take<float>(c->G);
    return u;
}

// Prefetches the rows of K, of V or of both at positions list[from] .. list[to-1], or from .. to-1 without a list. Rows
// at random places cost latency rather than bandwidth, so all are prefetched before the first is used.
static void prefetch_rows(const skimkv_op *op, const Unit &u, const int32_t *list, int64_t from, int64_t to, bool keys,
                          bool values) {
    const skimkv_cache *c = op->cache;
    const int size = c->bits ? 1 : c->dtype == SKIMKV_F32 ? 4 : 2;
    const int64_t bytes = row_bytes(c);
    const skimkv_chunk *chunk = c->chunks;
    for (int64_t j = from; j < to; j++) {
        const int64_t p = list ? list[j] : j;
        chunk = chunk_of(chunk, p);
        const int64_t at = p - chunk->start;
        const char *k = (const char *)chunk->k + (u.b * chunk->k_b + u.h * chunk->k_h + at * chunk->k_n) * size;
        const char *v = (const char *)chunk->v + (u.b * chunk->v_b + u.h * chunk->v_h + at * chunk->v_n) * size;
        for (int64_t i = 0; i < bytes; i += 64) {
            if (keys) prefetch(k + i);
            if (values) prefetch(v + i);
        }
        if (c->bits) {  // a quantised row has any alignment, so its end may lie in one more cache line
            if (keys) prefetch(k + bytes - 1);
            if (values) prefetch(v + bytes - 1);
        }
    }
}

// The soft cap in units of log 2, as logits are.
static inline float softcap_log2(const skimkv_op *op) { return op->softcap * LOG2E; }

// Copies the query as it came, if its products can be taken in bfloat16: if query and keys are bfloat16, the CPU
// multiplies them, and a key meets four queries or more: with fewer, memory is the bound.
static void load_bf16_query([[maybe_unused]] const skimkv_op *op, Unit &u) {
    u.bf16_query = nullptr;
#ifdef SKIMKV_BF16_PRODUCTS
    const skimkv_cache *c = op->cache;
    const int D = c->D, P = padded_bf16(D);
    if (c->G < 4 || c->bits || c->dtype != SKIMKV_BF16 || op->dtype != SKIMKV_BF16 || !multiplies_bf16()) return;
    u.bf16_query = (bf16 *)(u.q + c->G * padded_head(D));
    for (int g = 0; g < c->G; g++) {
        const bf16 *q = (const bf16 *)op->q + u.b * op->q_b + u.h * op->q_h + g * op->q_g;
        __builtin_memcpy(u.bf16_query + g * P, q, D * 2);
        __builtin_memset(u.bf16_query + g * P + D, 0, (P - D) * 2);
    }
#endif
}

// Prepares the query for the products with quantised rows.
static void prepare_query_of_rows(const skimkv_cache *c, Unit &u) {
    const int P = padded_head(c->D);
    float *q = u.q, *memory = u.q + c->G * P;
    if (is_rotated(c->bits)) {
        q = memory, memory += c->G * P;
        __builtin_memcpy(q, u.q, c->G * P * sizeof(float));
        for (int g = 0; g < c->G; g++) rotate_row(q + g * P, c->D);
    }
    u.prepared = prepare_query(q, P, c->G, c->D, c->bits, memory);
}

// Makes u the unit of row b and KV head h, and loads its query.
static void load_query(const skimkv_op *op, Unit &u, int64_t b, int64_t h) {
    const int D = op->cache->D, P = padded_head(D);
    u.b = b, u.h = h, u.n = cached_tokens(op, b), u.tiles = round_up(u.n, GROUP) / GROUP;
    for (int g = 0; g < op->cache->G; g++) {
        float *q = u.q + g * P;
        to_float(op->dtype, op->q, b * op->q_b + h * op->q_h + g * op->q_g, q, D);
        for (int i = 0; i < D; i++) q[i] *= op->scale * LOG2E;
        for (int i = D; i < P; i++) q[i] = 0;
    }
    if (op->cache->bits) prepare_query_of_rows(op->cache, u);
    load_bf16_query(op, u);
}

template <class T> constexpr bool is_bf16 = false;
template <> constexpr bool is_bf16<bf16> = true;

// s[g*ld + j] = q_g . row_j for n keys, with the arguments of dot_rows.
template <class R, int D_>
static void dot_query_with_keys(const skimkv_op *op, const Unit &u, const R *const *rows, int n, float *s, int64_t ld,
                                const R *const *next = nullptr) {
    const int G = op->cache->G, D = op->cache->D;
#ifdef SKIMKV_BF16_PRODUCTS
    if constexpr (is_bf16<R>)
        if (u.bf16_query)
            return dot_rows_bf16<D_>(u.bf16_query, padded_bf16(D), G, D, rows, n, op->scale * LOG2E, s, ld, next);
#endif
    if constexpr (row_bits<R> != 0) dot_quantised_rows<row_bits<R>, D_>(u.prepared, G, D, rows, n, s, ld, next);
    else dot_rows<R, D_>(u.q, padded_head(D), G, D, rows, n, s, ld, next);
}

// The mean of V of row b and KV head h, rotated as the values are: in the cache, or in `memory`.
static const float *mean_of_values(const skimkv_cache *c, int64_t b, int64_t h, float (&memory)[SKIMKV_MAX_HEAD]) {
    const float *mean = c->mean + b * c->m_b + h * c->m_h;
    if (!is_rotated(c->bits)) return mean;
    __builtin_memcpy(memory, mean, c->D * sizeof(float));
    rotate_row(memory, c->D);
    return memory;
}

// Rounds the result of a unit, y [G][P], into the operation's y; where values are rotated, y is rotated back first.
static void store_result(const skimkv_op *op, int64_t b, int64_t h, float *y, int P) {
    for (int g = 0; g < op->cache->G; g++, y += P) {
        if (is_rotated(op->cache->bits)) rotate_row(y, op->cache->D);
        from_float(op->dtype, y, op->y, b * op->y_b + h * op->y_h + g * op->y_g, op->cache->D);
    }
}

}  // namespace skimkv::SKIMKV_NS
