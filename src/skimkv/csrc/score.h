// Step 1: a logit for every position of a unit, and what softmax and top-k need of each tile of 256.
#pragma once

namespace skimkv::SKIMKV_NS {

// Tiles a set of channels runs through before the next. The longer a run the better, as long as the sums of a span
// stay in the L2 cache.
constexpr int SPAN = 256;

// Sums of 2^(logit - shift) over the tiles of one unit or part, for each query. The shift is the maximum of the first
// tile, and follows only if a later one exceeds it by far: nothing then waits for a tile's own maximum.
struct Sums {
    float *shift;  // [G]
    float *sum;    // [G][16]
};
constexpr float FAR = 64;
static Sums take_sums(Arena &a, int G) { return {a.take<float>(G), a.take<float>(16 * G)}; }

// Logits of tile t are in s: cap them, hide positions from n on, keep lane maxima and the sum of exp.
template <bool SINGLE>
static inline void finish_query(const Unit &u, const Scores &z, const Sums &sums, int64_t t, int64_t t0, int64_t t1, int g, float cap) {
    float *s = z.s + g * u.np + t * GROUP, *l = sums.sum + 16 * g;
    const int64_t valid = u.n - t * GROUP;
    vf top[16 / W];
    for (int i = 0; i < 16 / W; i++) top[i] = splat(LOWEST);
    if (cap != 0)
        for (int x = 0; x < GROUP; x += W) put(s + x, softcapped(get(s + x), cap));
    for (int64_t x = max(valid, 0); x < GROUP; x++) s[x] = LOWEST;
    if (t == t0) {
        for (int x = 0; x < GROUP; x += W) top[0] = vmax(top[0], get(s + x));
        sums.shift[g] = hmax(top[0]), top[0] = splat(LOWEST);
        for (int i = 0; i < 16; i++) l[i] = 0;
    }
    for (int x = 0; x < GROUP; x += 16)
        for (int i = 0; i < 16 / W; i++) top[i] = vmax(top[i], get(s + x + i * W));
    unsigned far = 0;
    for (int i = 0; i < 16 / W; i++) far |= ge(top[i], splat(sums.shift[g] + FAR));
    if (far) {
        float m = LOWEST;
        for (int i = 0; i < 16 / W; i++) m = hmax(top[i]) > m ? hmax(top[i]) : m;
        for (int i = 0; i < 16; i++) l[i] *= exp2f1(sums.shift[g] - m);
        sums.shift[g] = m;
    }
    const vf shift = splat(sums.shift[g]);
    vf sum[16 / W];
    for (int i = 0; i < 16 / W; i++) sum[i] = get(l + i * W);
#pragma GCC unroll 4
    for (int x = 0; x < GROUP; x += 16)
        for (int i = 0; i < 16 / W; i++) {
            vf e = vexp2(get(s + x + i * W) - shift);
            if (!SINGLE) put(s + x + i * W, e);
            sum[i] = sum[i] + e;
        }
    for (int i = 0; i < 16 / W; i++) {
        put(l + i * W, sum[i]);
        if (SINGLE) put(z.lane + 16 * t + i * W, top[i]);
    }
    z.tile_m[g * u.nt + t] = sums.shift[g], z.tile_l[g * u.nt + t] = 0;
    if (t + 1 == t1)
        for (int i = 0; i < 16; i++) z.tile_l[g * u.nt + t] += l[i];
}

// Tile t of t0 .. t1-1, which come in order; the sums of all are left with the last.
static void finish_tile(const skimkv_op *op, const Unit &u, const Scores &z, const Sums &sums, int64_t t, int64_t t0, int64_t t1) {
    const int G = op->cache->G;
    if (G == 1) return finish_query<true>(u, z, sums, t, t0, t1, 0, op_cap(op));
    for (int g = 0; g < G; g++) finish_query<false>(u, z, sums, t, t0, t1, g, op_cap(op));
}

// Tiles t0 .. t1-1 from row-major keys with the queries q [G][P]: those of u or others.
template <class T, int D_>
static void score_rows(const skimkv_op *op, const Unit &u, const float *q, const Scores &z, const Sums &sums,
                       int64_t t0, int64_t t1) {
    const skimkv_cache *c = op->cache;
    const int P = padded(c->D);
    const T *rows[GROUP];
    for (int64_t t = t0; t < t1; t++) {
        int have = 0;
        each_run(c, t * GROUP, min(t * GROUP + GROUP, u.n), [&](const skimkv_chunk *chunk, int64_t from, int64_t to) {
            for (int64_t p = from; p < to; p++) rows[have++] = key_row<T>(chunk, u.b, u.h, p);
        });
        const int n = have;
        while (have % W) rows[have] = rows[have - 1], have++;
        if (q == u.q) key_dots<T, D_>(op, u, rows, n, z.s + t * GROUP, u.np);
        else dots<T, D_>(q, P, c->G, c->D, rows, n, z.s + t * GROUP, u.np);
        finish_tile(op, u, z, sums, t, t0, t1);
    }
}

// Tile t of a chunk, channels c0 .. c0+nc-1 of the unit's, whose rows of the index (of type E) start at p.
template <class E>
static void score_tile(const skimkv_op *op, const Unit &u, const skimkv_chunk *chunk, const E *const *p,
                       const E *const *ahead, int64_t c0, int nc, const Scores &z, [[maybe_unused]] const Narrow &narrow, int64_t t, [[maybe_unused]] int64_t t0) {
    const int G = op->cache->G;
    const int64_t at = t * GROUP - chunk->start;
    float *s = z.s + t * GROUP;
    if constexpr (in_integers<E>) {
        coded_tile<is_code4<E>>(op, u, (const uint8_t *const *)p, (const uint8_t *const *)ahead, at, narrow, t - t0, c0, s);
    } else if constexpr (sizeof(E) == 1) {
        const float *scale = chunk->scale + u.b * chunk->s_b + u.h * chunk->s_h + at / GROUP * chunk->s_g;
        float w[4 * TOGETHER], init[4], step[TOGETHER], zero[TOGETHER];
        for (int i = 0; i < nc; i++) {
            step[i] = scale[u.channel[c0 + i] * chunk->s_r];
            zero[i] = scale[u.channel[c0 + i] * chunk->s_r + chunk->s_z];
        }
        for (int g0 = 0; g0 < G; g0 += 4) {
            const int gn = (int)min(G - g0, 4);
            for (int g = 0; g < gn; g++) {
                const float *own = u.w + (g0 + g) * u.r + c0;
                init[g] = 0;
                for (int i = 0; i < nc; i++) w[g * TOGETHER + i] = own[i] * step[i], init[g] += own[i] * zero[i];
            }
            stream_heads<E>(p, ahead, is_code4<E> ? at / 2 : at, GROUP, nc, w, TOGETHER, gn, c0 == 0, init, s + g0 * u.np, u.np);
        }
    } else {
        const float none[4] = {};
        E copy[TOGETHER * GROUP];
        const E *own[TOGETHER];
        const bool whole = at + GROUP <= chunk->cap;
        const int n = (int)min(GROUP, u.n - t * GROUP);
        for (int i = 0; i < nc && !whole; i++) {  // the last tile of a chunk that ends inside it
            own[i] = copy + i * GROUP;
            __builtin_memcpy(copy + i * GROUP, p[i] + at, (chunk->cap - at) * sizeof(E));
            __builtin_memset(copy + i * GROUP + chunk->cap - at, 0, (GROUP - chunk->cap + at) * sizeof(E));
        }
        for (int g = 0; g < G; g += 4)
            stream_heads<E>(whole ? p : own, whole ? ahead : own, whole ? at : 0, n, nc, u.w + g * u.r + c0, u.r, (int)min(G - g, 4), c0 == 0,
                            none, s + g * u.np, u.np);
    }
}

// Tiles t0 .. t1-1 of one chunk, a set of channels after the other; begin .. end-1 are all that this thread takes.
template <class E>
static void score_span(const skimkv_op *op, const Unit &u, const skimkv_chunk *chunk, const Scores &z,
                       const Narrow &narrow, const Sums &sums, int64_t t0, int64_t t1, int64_t begin, int64_t end) {
    const E *index = (const E *)chunk->index + u.b * chunk->x_b + u.h * chunk->x_h;
    if (sizeof(E) == 1)  // while the weights are made, the first codes come
        for (int c = 0; c < 2 * TOGETHER && c < u.r; c++) {
            const E *from = index + u.channel[c] * chunk->x_r + (t0 * GROUP - chunk->start) / (is_code4<E> ? 2 : 1);
            for (int i = 0; i < 4; i++) prefetch((const char *)from + 64 * i);
        }
    if constexpr (in_integers<E>) narrow_weights(op, u, chunk, narrow, t0, t1);
    // what is fetched ahead at the end of a run is the beginning of the next set's
    const int64_t tile = is_code4<E> ? GROUP / 2 : GROUP, run = (t1 - t0) * tile, far = min(run, (in_integers<E> ? 4 : 1) * AHEAD / (int)sizeof(E));
    for (int64_t c0 = 0; c0 < u.r; c0 += TOGETHER) {
        const int nc = (int)min(TOGETHER, u.r - c0);
        const E *p[TOGETHER], *ahead[TOGETHER], *over[TOGETHER];
        for (int i = 0; i < TOGETHER; i++) {
            const int64_t next = c0 + TOGETHER + i;
            p[i] = index + u.channel[c0 + (i < nc ? i : 0)] * chunk->x_r;
            ahead[i] = p[i] + far;
            over[i] = next < u.r ? index + u.channel[next] * chunk->x_r + far - run : p[i];
        }
        for (int64_t t = t0; t < t1; t++) {
            score_tile<E>(op, u, chunk, p, (t - t0) * tile + far < run ? ahead : over, c0, nc, z, narrow, t, t0);
            if (c0 + TOGETHER >= u.r) finish_tile(op, u, z, sums, t, begin, end);
        }
    }
}

// Tiles t0 .. t1-1 from the channel-major index.
template <class T>
static void score_channels(const skimkv_op *op, const Unit &u, const Scores &z, const Narrow &narrow, const Sums &sums,
                           int64_t t0, int64_t t1) {
    const skimkv_cache *c = op->cache;
    const bool coded = c->channels >= SKIMKV_INT8;
    const int64_t stop = coded ? u.n / GROUP * GROUP : u.n;
    each_run(c, t0 * GROUP, min(t1 * GROUP, stop), [&](const skimkv_chunk *chunk, int64_t from, int64_t to) {
        for (int64_t a = from / GROUP, last = (to + GROUP - 1) / GROUP; a < last; a += SPAN) {
            const int64_t b = min(a + SPAN, last);
            if (c->channels == SKIMKV_COPY) score_span<T>(op, u, chunk, z, narrow, sums, a, b, t0, t1);
            else if (c->channels == SKIMKV_INT8) score_span<uint8_t>(op, u, chunk, z, narrow, sums, a, b, t0, t1);
            else score_span<Code4>(op, u, chunk, z, narrow, sums, a, b, t0, t1);
        }
    });
    if (!coded || stop == u.n || t1 * GROUP <= stop) return;
    skimkv_chunk open{};  // the open group of a quantised index is in full precision
    open.start = stop, open.cap = GROUP, open.index = c->tail;
    open.x_b = c->t_b, open.x_h = c->t_h, open.x_r = c->t_r;
    score_span<T>(op, u, &open, z, narrow, sums, stop / GROUP, stop / GROUP + 1, t0, t1);
}

}  // namespace skimkv::SKIMKV_NS
