// What each key received from a block of queries: sums over queries of softmax weights (H2O's score of a prompt).
// A product of matrices whose result is never written out: the logits of a few queries stay in the cache until their
// sums of exp are known, then they are added up by column.
#pragma once

namespace skimkv::SKIMKV_NS {

constexpr int KEYS = 2 * W;                  // keys of a tile
constexpr int QUERIES = W == 16 ? 8 : 4;     // queries whose products with a tile are in registers
constexpr int QUERY_BLOCK = 32;              // queries whose logits are held

struct Columns {     // scratch of one task
    float *keys;     // [tiles][D][KEYS]
    float *q;        // [QUERY_BLOCK/QUERIES][D][QUERIES], scaled
    float *s;        // [QUERY_BLOCK][tiles*KEYS] logits, then 2^(logit - maximum)
    float *sum;      // [tiles*KEYS]
    int64_t ld;
};
static Columns take_columns(Arena &a, const skimkv_columns *op) {
    const int64_t ld = roundup(op->m, KEYS);
    return {a.take<float>(ld * op->D), a.take<float>(QUERY_BLOCK * op->D), a.take<float>(QUERY_BLOCK * ld),
            a.take<float>(ld), ld};
}
static size_t columns_work(const skimkv_columns *op) {
    Arena a{nullptr};
    take_columns(a, op);
    return a.used;
}

// s[i*ld + x] = q_i . key_x for QUERIES queries and one tile; keys from `seen` + i on are hidden from query i.
static inline void query_tile(const float *keys, const float *q, int D, float cap, float *s, int64_t ld, int64_t seen) {
    vf a[QUERIES][2] = {};
    for (int d = 0; d < D; d++) {
        const vf x0 = get(keys + d * KEYS), x1 = get(keys + d * KEYS + W);
#pragma GCC unroll 8
        for (int i = 0; i < QUERIES; i++) {
            const vf y = splat(q[d * QUERIES + i]);
            a[i][0] = fma(x0, y, a[i][0]), a[i][1] = fma(x1, y, a[i][1]);
        }
    }
    for (int i = 0; i < QUERIES; i++) {
        put(s + i * ld, softcapped(a[i][0], cap)), put(s + i * ld + W, softcapped(a[i][1], cap));
        for (int64_t x = max(seen + i, 0); x < KEYS; x++) s[i * ld + x] = LOWEST;
    }
}

// One query's logits become 2^(logit - maximum); the sum of them.
static inline float exp_row(float *s, int64_t n) {
    vf top = splat(LOWEST), sum = splat(0.f);
    for (int64_t x = 0; x < n; x += W) top = vmax(top, get(s + x));
    const vf shift = splat(hmax(top));
    for (int64_t x = 0; x < n; x += W) {
        const vf e = vexp2(get(s + x) - shift);
        put(s + x, e);
        sum = sum + e;
    }
    return hsum(sum);
}

// Queries i .. i+n-1 (at most QUERY_BLOCK) of group g, the last of which sees `seen` keys.
static void query_block(const skimkv_columns *op, const Columns &x, int64_t h, int64_t g, int64_t i, int n) {
    const int D = op->D, groups = (n + QUERIES - 1) / QUERIES;
    const int64_t first = op->m - op->n + i + 1, seen = first + n - 1, width = roundup(seen, KEYS);
    for (int j = 0; j < groups * QUERIES; j++) {
        float row[256] = {};
        if (j < n) to_float(op->dtype, op->q, h * op->q_h + g * op->q_g + (i + j) * op->q_n, row, D);
        float *to = x.q + j / QUERIES * D * QUERIES + j % QUERIES;
        for (int d = 0; d < D; d++) to[d * QUERIES] = row[d] * op->scale * LOG2E;
    }
    for (int64_t t = 0; t < width; t += KEYS)
        for (int j = 0; j < groups; j++)
            query_tile(x.keys + t * D, x.q + j * D * QUERIES, D, op->softcap * LOG2E, x.s + j * QUERIES * x.ld + t, x.ld,
                       first + j * QUERIES - t);
    float weight[QUERY_BLOCK];
    for (int j = 0; j < n; j++) weight[j] = 1 / (exp_row(x.s + j * x.ld, width) * (float)op->G);
    for (int64_t t = 0; t < width; t += W) {
        vf sum = get(x.sum + t);
        for (int j = 0; j < n; j++) sum = fma(get(x.s + j * x.ld + t), splat(weight[j]), sum);
        put(x.sum + t, sum);
    }
}

// Task t of H * parts: every parts-th block of queries of one head.
static void columns(const skimkv_columns *op, void *work, int64_t task) {
    Arena a{(char *)work};
    const Columns x = take_columns(a, op);
    const int64_t h = task / op->parts, part = task % op->parts, blocks = (op->n + QUERY_BLOCK - 1) / QUERY_BLOCK;
    const int D = op->D;
    for (int64_t p = 0; p < x.ld; p++) {
        float row[256] = {}, *to = x.keys + p / KEYS * D * KEYS + p % KEYS;
        if (p < op->m) to_float(op->dtype, op->k, h * op->k_h + p * op->k_n, row, D);
        for (int d = 0; d < D; d++) to[d * KEYS] = row[d];
        x.sum[p] = 0;
    }
    for (int64_t block = part; block < op->G * blocks; block += op->parts) {
        const int64_t i = block % blocks * QUERY_BLOCK;
        query_block(op, x, h, block / blocks, i, (int)min(QUERY_BLOCK, op->n - i));
    }
    __builtin_memcpy(op->sum + task * op->m, x.sum, op->m * sizeof(float));
}

}  // namespace skimkv::SKIMKV_NS
