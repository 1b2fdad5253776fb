// One (row of the batch, KV head): its query, its scratch memory, and iteration over its chunks.
#pragma once

namespace skimkv::SKIMKV_NS {

// Scratch memory, carved in pieces of 64 bytes; with at = nullptr it only counts.
struct Arena {
    char *at;
    size_t used = 0;
    template <class T> T *take(int64_t n) {
        T *p = at ? (T *)(at + used) : nullptr;
        used += roundup(n * (int64_t)sizeof(T), 64);
        return p;
    }
};

struct Scores {          // step 1 of one unit, shared by the threads that split it
    float *s;            // [G][np] logits, or for grouped queries 2^(logit - shift of the tile)
    float *tile_m;       // [G][nt] shift of each tile of 256
    float *tile_l;       // [G][nt] sum of 2^(logit - shift) of the tiles up to this one, 0 but for the last of a part
    float *lane;         // [16*nt] maxima for `largest`
};

struct Unit {
    int64_t b, h, n, np, nt;
    float *q, *w, *full;  // scaled query [G][P]; weights of the r chosen channels [G][r]; masked query [G][P]
    bf16 *raw;            // the query as it came [G][raw_padded(D)], where key_dots can multiply that, or nullptr
    int32_t *channel;     // [r]
    int64_t r;
    int32_t *chosen;      // positions step 3 reads, ascending
    int64_t n_chosen;
    float *alpha;         // [G] approximate mass of the chosen
    float *m, *l;         // [G] the largest shift, and the sum of 2^(logit - m) over all positions
};

static inline int padded(int D) { return (int)roundup(D, 16); }
static inline int raw_padded(int D) { return (int)roundup(D, 32); }
// A query and, behind it, room for it as it came.
static inline int64_t query_floats(const skimkv_cache *c) { return c->G * (padded(c->D) + raw_padded(c->D) / 2); }
static inline bool appends(const skimkv_op *op) { return op->k_new && op->keep == SKIMKV_APPEND; }
// Tokens in row b of the cache during the step.
static inline int64_t held(const skimkv_op *op, int64_t b) { return op->cache->lengths[b] + appends(op); }
static inline int64_t longest(const skimkv_cache *c) {
    int64_t n = 0;
    for (int b = 0; b < c->B; b++) n = max(n, c->lengths[b]);
    return n;
}

static Scores take_scores(Arena &a, int64_t n, int G) {
    const int64_t np = roundup(n, 256), nt = np / 256;
    return {a.take<float>(G * np), a.take<float>(G * nt), a.take<float>(G * nt), a.take<float>(16 * nt)};
}
static Unit take_unit(Arena &a, const skimkv_op *op, int64_t n) {
    const skimkv_cache *c = op->cache;
    const int P = padded(c->D);
    const int64_t R = max(c->R, c->D), k = min(op->k, n) + 1;
    Unit u{};
    u.q = a.take<float>(query_floats(c)), u.w = a.take<float>(c->G * R), u.full = a.take<float>(c->G * P);
    u.channel = a.take<int32_t>(R), u.chosen = a.take<int32_t>(k + 16);
    u.alpha = a.take<float>(c->G), u.m = a.take<float>(c->G), u.l = a.take<float>(c->G);
    return u;
}

// f(chunk, from, to) for the runs of positions from .. to-1 that lie in one chunk.
template <class F> static inline void each_run(const skimkv_cache *c, int64_t from, int64_t to, F f) {
    for (int i = 0; i < c->n_chunks && from < to; i++) {
        const skimkv_chunk *chunk = c->chunks + i;
        int64_t stop = min(to, chunk->start + chunk->cap);
        if (from < stop) f(chunk, from, stop), from = stop;
    }
}

static inline int64_t row_bytes(const skimkv_cache *c) {
    return c->bits ? coded_bytes(c->D, c->bits) : c->D * (c->dtype == SKIMKV_F32 ? 4 : 2);
}
template <class T> static inline const T *key_row(const skimkv_chunk *c, int64_t b, int64_t h, int64_t p) {
    return (const T *)c->k + b * c->k_b + h * c->k_h + (p - c->start) * c->k_n;
}
template <class T> static inline const T *value_row(const skimkv_chunk *c, int64_t b, int64_t h, int64_t p) {
    return (const T *)c->v + b * c->v_b + h * c->v_h + (p - c->start) * c->v_n;
}

// Asks for the rows of positions from .. to-1 of a list (nullptr: the positions themselves): random rows are a matter
// of latency, so all are asked for before the first is used.
static void fetch_rows(const skimkv_op *op, const Unit &u, const int32_t *list, int64_t from, int64_t to) {
    const skimkv_cache *c = op->cache;
    const int size = c->bits ? 1 : c->dtype == SKIMKV_F32 ? 4 : 2;
    const int64_t bytes = row_bytes(c);
    const bool keys = op->method == SKIMKV_SPARQ || op->method == SKIMKV_LOWRANK;
    const skimkv_chunk *chunk = c->chunks;
    for (int64_t j = from; j < to; j++) {
        const int64_t p = list ? list[j] : j;
        while (p >= chunk->start + chunk->cap) chunk++;
        const char *k = (const char *)chunk->k + (u.b * chunk->k_b + u.h * chunk->k_h + (p - chunk->start) * chunk->k_n) * size;
        const char *v = (const char *)chunk->v + (u.b * chunk->v_b + u.h * chunk->v_h + (p - chunk->start) * chunk->v_n) * size;
        for (int64_t i = 0; i < bytes; i += 64) {
            if (keys) prefetch(k + i);
            prefetch(v + i);
        }
        if (c->bits) {  // of any alignment: the end may be in one more line
            if (keys) prefetch(k + bytes - 1);
            prefetch(v + bytes - 1);
        }
    }
}

// The soft cap in units of log 2, as logits are.
static inline float op_cap(const skimkv_op *op) { return op->softcap * LOG2E; }

template <class T> constexpr bool is_bf16 = false;
template <> constexpr bool is_bf16<bf16> = true;

// The query as it came, if query and keys are bfloat16, a key meets several queries and the CPU multiplies them so.
static void load_raw([[maybe_unused]] const skimkv_op *op, Unit &u) {
    u.raw = nullptr;
#ifdef SKIMKV_PAIRS
    const skimkv_cache *c = op->cache;
    const int D = c->D, P = raw_padded(D);
    if (c->G == 1 || c->bits || c->dtype != SKIMKV_BF16 || op->dtype != SKIMKV_BF16 || !bf16_products()) return;
    u.raw = (bf16 *)(u.q + c->G * padded(D));
    for (int g = 0; g < c->G; g++) {
        __builtin_memcpy(u.raw + g * P, (const bf16 *)op->q + u.b * op->q_b + u.h * op->q_h + g * op->q_g, D * 2);
        __builtin_memset(u.raw + g * P + D, 0, (P - D) * 2);
    }
#endif
}

// The query of a unit as floats, scaled, zero beyond D.
static void load_query(const skimkv_op *op, Unit &u, int64_t b, int64_t h) {
    const int D = op->cache->D, P = padded(D);
    u.b = b, u.h = h, u.n = held(op, b), u.np = roundup(u.n, 256), u.nt = u.np / 256;
    for (int g = 0; g < op->cache->G; g++) {
        float *q = u.q + g * P;
        to_float(op->dtype, op->q, b * op->q_b + h * op->q_h + g * op->q_g, q, D);
        for (int i = 0; i < D; i++) q[i] *= op->scale * LOG2E;
        for (int i = D; i < P; i++) q[i] = 0;
    }
    load_raw(op, u);
}

// s[g*ld + j] = q_g . row_j for n keys, as dots does it.
template <class R, int D_>
static void key_dots(const skimkv_op *op, const Unit &u, const R *const *rows, int n, float *s, int64_t ld, const R *const *next = nullptr) {
    const int G = op->cache->G, D = op->cache->D;
#ifdef SKIMKV_PAIRS
    if constexpr (is_bf16<R>)
        if (u.raw) return dots_bf16<D_>(u.raw, raw_padded(D), G, D, rows, n, op->scale * LOG2E, s, ld, next);
#endif
    dots<R, D_>(u.q, padded(D), G, D, rows, n, s, ld, next);
}

// i1, the r channels with the largest sum of |q| over the group, and their weights at the chosen temperature.
static void choose_channels(const skimkv_op *op, Unit &u) {
    const int D = op->cache->D, P = padded(D), G = op->cache->G, r = (int)op->r;
    float size[256], total[256] = {};
    for (int i = 0; i < D; i++) {
        size[i] = 0;
        for (int g = 0; g < G; g++) size[i] += u.q[g * P + i] < 0 ? -u.q[g * P + i] : u.q[g * P + i];
        total[i] = size[i];
    }
    for (int i = D; i < P; i++) total[i] = LOWEST;
    const float t = bound(total, D, r, 0);
    int above = 0, found = 0;
    for (int i = 0; i < D; i++) above += size[i] > t;
    int ties = r - above;
    for (int i = 0; i < D && found < r; i++)
        if (size[i] > t || (size[i] == t && ties-- > 0)) u.channel[found++] = i;
    for (int i = 0; found < r; i++) u.channel[found++] = i;  // a NaN query: any channels, the result is NaN
    u.r = r;
    for (int g = 0; g < G; g++) {
        const float *q = u.q + g * P;
        float held = 0, all = 0;
        for (int i = 0; i < D; i++) all += q[i] < 0 ? -q[i] : q[i];
        for (int i = 0; i < r; i++) held += q[u.channel[i]] < 0 ? -q[u.channel[i]] : q[u.channel[i]];
        float factor = 1;
        if (op->temperature == SKIMKV_SQRT_R) factor = __builtin_sqrtf((float)D / (float)r);
        else if (op->temperature == SKIMKV_COVERAGE && held > 0) factor = __builtin_sqrtf(all / held);
        for (int i = 0; i < P; i++) u.full[g * P + i] = 0;
        for (int i = 0; i < r; i++) {
            u.w[g * r + i] = q[u.channel[i]] * factor;
            u.full[g * P + u.channel[i]] = u.w[g * r + i];
        }
    }
}

// The query in the projected space of a low-rank index.
static void project(const skimkv_op *op, Unit &u) {
    const skimkv_cache *c = op->cache;
    const int R = c->R, P = padded(c->D);
    const float *projection = c->projection + u.h * c->D * R;
    u.r = R;
    for (int i = 0; i < R; i++) u.channel[i] = i;
    for (int64_t i = 0; i < (int64_t)c->G * R; i++) u.w[i] = 0;
    for (int d = 0; d < c->D; d++)
        for (int g = 0; g < c->G; g++)
            for (int i = 0; i < R; i++) u.w[g * R + i] += u.q[g * P + d] * projection[d * R + i];
}

// Rounds the result of a unit into y.
static void store_result(const skimkv_op *op, int64_t b, int64_t h, const float *y, int P) {
    for (int g = 0; g < op->cache->G; g++)
        from_float(op->dtype, y + g * P, op->y, b * op->y_b + h * op->y_h + g * op->y_g, op->cache->D);
}

}  // namespace skimkv::SKIMKV_NS
