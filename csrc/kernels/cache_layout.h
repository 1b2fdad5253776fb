// Where the rows of a cache lie in memory, and how many of them a step sees.
#pragma once
#include <stdint.h>

#include "kernels/quantised_rows.h"
#include "kernels/vector_math.h"
#include "skimkv.h"

namespace skimkv::SKIMKV_NS {

constexpr int GROUP = SKIMKV_GROUP;  // tokens of a tile, and of a group of a quantised index

// Whether the step appends its new row to the cache before it attends to it.
static inline bool appends_new_row(const skimkv_op *op) { return op->k_new && op->keep == SKIMKV_APPEND; }

// Tokens in row b of the cache during the step.
static inline int64_t cached_tokens(const skimkv_op *op, int64_t b) {
    return op->cache->lengths[b] + appends_new_row(op);
}

// Whether the step appends a row that fills a group of a quantised index.
static inline bool fills_group(const skimkv_op *op) {
    bool fills = false;
    for (int b = 0; b < op->cache->B; b++) fills |= appends_new_row(op) && cached_tokens(op, b) % GROUP == 0;
    return fills;
}

// Tokens in the longest row of the batch.
static inline int64_t longest_row(const skimkv_cache *c) {
    int64_t n = 0;
    for (int b = 0; b < c->B; b++) n = max(n, c->lengths[b]);
    return n;
}

// Bytes of one row of K or of V.
static inline int64_t row_bytes(const skimkv_cache *c) {
    return c->bits ? quantised_row_bytes(c->D, c->bits) : c->D * (c->dtype == SKIMKV_F32 ? 4 : 2);
}

// The rows of K and of V at position p of a chunk. T is char where rows are quantised: strides are then in bytes.
template <class T> static inline const T *key_row(const skimkv_chunk *c, int64_t b, int64_t h, int64_t p) {
    return (const T *)c->k + b * c->k_b + h * c->k_h + (p - c->start) * c->k_n;
}
template <class T> static inline const T *value_row(const skimkv_chunk *c, int64_t b, int64_t h, int64_t p) {
    return (const T *)c->v + b * c->v_b + h * c->v_h + (p - c->start) * c->v_n;
}

// The means of group number `group` of a chunk.
template <class T> static inline T *group_means(const skimkv_chunk *c, int64_t b, int64_t h, int64_t group) {
    return (T *)c->means + b * c->e_b + h * c->e_h + group * c->e_g;
}

// Calls f(chunk, first, last) for every run of the positions from .. to-1 that lies in one chunk: first .. last-1.
template <class F> static inline void for_each_run(const skimkv_cache *c, int64_t from, int64_t to, F f) {
    for (int i = 0; i < c->n_chunks && from < to; i++) {
        const skimkv_chunk *chunk = c->chunks + i;
        int64_t stop = min(to, chunk->start + chunk->cap);
        if (from < stop) f(chunk, from, stop), from = stop;
    }
}

// The chunk that holds position p, found from an earlier chunk on.
static inline const skimkv_chunk *chunk_of(const skimkv_chunk *chunk, int64_t p) {
    while (p >= chunk->start + chunk->cap) chunk++;
    return chunk;
}

}  // namespace skimkv::SKIMKV_NS
