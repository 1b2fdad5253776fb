// The scores of a prompt's keys for H2O (arXiv 2306.14048): the causal softmax weights that every key receives, summed
// over n queries, the last of m positions, and averaged over the group; skimkv_columns in skimkv.h.
//
// The attention matrix is not stored: the logits of a few queries stay in the cache until the sums of their
// exponentials are known, and are then added up by key.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kernels/scratch_arena.h"
#include "kernels/vector_math.h"
#include "skimkv.h"

namespace skimkv::SKIMKV_NS {

constexpr int TILE_KEYS = 2 * W;               // keys of a tile
constexpr int TILE_QUERIES = W == 16 ? 8 : 4;  // queries whose products with a tile fit the registers
constexpr int QUERY_BLOCK = 32;                // queries whose logits are stored at a time

// Scratch memory of one task.
struct KeyScoreScratch {
    float *keys;  // [tiles][D][TILE_KEYS]
    float *q;     // [QUERY_BLOCK/TILE_QUERIES][D][TILE_QUERIES], scaled
    float *s;     // [QUERY_BLOCK][tiles*TILE_KEYS] logits, then 2^(logit - maximum)
    float *sum;   // [tiles*TILE_KEYS]
    int64_t ld;
};
static KeyScoreScratch take_key_scores(Arena &a, const skimkv_columns *op) {
    const int64_t ld = round_up(op->m, TILE_KEYS);
    return {a.take<float>(ld * op->D), a.take<float>(QUERY_BLOCK * op->D), a.take<float>(QUERY_BLOCK * ld),
            a.take<float>(ld), ld};
}
static size_t key_scores_scratch_bytes(const skimkv_columns *op) {
    Arena a{nullptr};
    take_key_scores(a, op);
    return a.used;
}

// s[i*ld + x] = q_i . key_x for TILE_QUERIES queries and one tile of keys. Query i sees the keys before seen + i.
static inline void query_tile(const float *keys, const float *q, int D, float cap, float *s, int64_t ld, int64_t seen) {
    vf a[TILE_QUERIES][2] = {};
    for (int d = 0; d < D; d++) {
        const vf x0 = load(keys + d * TILE_KEYS), x1 = load(keys + d * TILE_KEYS + W);
#pragma GCC unroll 8
        for (int i = 0; i < TILE_QUERIES; i++) {
            const vf y = splat(q[d * TILE_QUERIES + i]);
            a[i][0] = fma(x0, y, a[i][0]), a[i][1] = fma(x1, y, a[i][1]);
        }
    }
    for (int i = 0; i < TILE_QUERIES; i++) {
        store(s + i * ld, apply_softcap(a[i][0], cap)), store(s + i * ld + W, apply_softcap(a[i][1], cap));
        for (int64_t x = max(seen + i, 0); x < TILE_KEYS; x++) s[i * ld + x] = LOWEST;
    }
}

// Makes 2^(logit - maximum) of one query's n logits, and returns their sum and the maximum.
static inline float exp_row(float *s, int64_t n, float *maximum) {
    vf top = splat(LOWEST), sum = splat(0.f);
    for (int64_t x = 0; x < n; x += W) top = vmax(top, load(s + x));
    *maximum = max_lanes(top);
    const vf shift = splat(*maximum);
    for (int64_t x = 0; x < n; x += W) {
        const vf e = exp2(load(s + x) - shift);
        store(s + x, e);
        sum = sum + e;
    }
    return sum_lanes(sum);
}

// Adds the weights of queries i .. i+n-1, at most QUERY_BLOCK, of head (h, g) to x.sum.
static void query_block(const skimkv_columns *op, const KeyScoreScratch &x, int64_t h, int64_t g, int64_t i, int n) {
    const int D = op->D, groups = (n + TILE_QUERIES - 1) / TILE_QUERIES;
    const int64_t first = op->m - op->n + i + 1, seen = first + n - 1, width = round_up(seen, TILE_KEYS);
    for (int j = 0; j < groups * TILE_QUERIES; j++) {
        float row[SKIMKV_MAX_HEAD] = {};
        if (j < n) to_float(op->dtype, op->q, h * op->q_h + g * op->q_g + (i + j) * op->q_n, row, D);
        float *to = x.q + j / TILE_QUERIES * D * TILE_QUERIES + j % TILE_QUERIES;
        for (int d = 0; d < D; d++) to[d * TILE_QUERIES] = row[d] * op->scale * LOG2E;
    }
    for (int64_t t = 0; t < width; t += TILE_KEYS)
        for (int j = 0; j < groups; j++)
            query_tile(x.keys + t * D, x.q + j * D * TILE_QUERIES, D, op->softcap * LOG2E,
                       x.s + j * TILE_QUERIES * x.ld + t, x.ld, first + j * TILE_QUERIES - t);
    float weight[QUERY_BLOCK];
    for (int j = 0; j < n; j++) {
        float maximum, sum = exp_row(x.s + j * x.ld, width, &maximum);
        sum += sink_weight(op->sinks, h * op->G + g, maximum);
        weight[j] = 1 / (sum * (float)op->G);
    }
    for (int64_t t = 0; t < width; t += W) {
        vf sum = load(x.sum + t);
        for (int j = 0; j < n; j++) sum = fma(load(x.s + j * x.ld + t), splat(weight[j]), sum);
        store(x.sum + t, sum);
    }
}

// One of H * parts tasks: every parts-th block of queries of one KV head.
static void key_scores(const skimkv_columns *op, void *work, int64_t task) {
    Arena a{(char *)work};
    const KeyScoreScratch x = take_key_scores(a, op);
    const int64_t h = task / op->parts, part = task % op->parts, blocks = (op->n + QUERY_BLOCK - 1) / QUERY_BLOCK;
    const int D = op->D;
    for (int64_t p = 0; p < x.ld; p++) {
        float row[SKIMKV_MAX_HEAD] = {}, *to = x.keys + p / TILE_KEYS * D * TILE_KEYS + p % TILE_KEYS;
        if (p < op->m) to_float(op->dtype, op->k, h * op->k_h + p * op->k_n, row, D);
        for (int d = 0; d < D; d++) to[d * TILE_KEYS] = row[d];
        x.sum[p] = 0;
    }
    for (int64_t block = part; block < op->G * blocks; block += op->parts) {
        const int64_t i = block % blocks * QUERY_BLOCK;
        query_block(op, x, h, block / blocks, i, (int)min(QUERY_BLOCK, op->n - i));
    }
    __builtin_memcpy(op->sum + task * op->m, x.sum, op->m * sizeof(float));
}

}  // namespace skimkv::SKIMKV_NS
