// Dense attention over all positions of a unit, or a part of them, and the variant that accumulates scores.
#pragma once

namespace skimkv::SKIMKV_NS {

struct DenseScratch {
    float *q;       // query_floats
    float *s;       // [G][BLOCK], or [G][np + BLOCK] where weights are kept
    float *online;
    uint8_t *row;   // the new row's k and v where rows are coded
};
static DenseScratch take_dense(Arena &a, const skimkv_op *op, int64_t n) {
    const int G = op->cache->G, P = padded(op->cache->D);
    return {a.take<float>(query_floats(op->cache)), a.take<float>(G * ((op->score ? roundup(n, 256) : 0) + BLOCK)),
            a.take<float>(online_floats(G, P)), a.take<uint8_t>(op->cache->bits ? 2 * row_bytes(op->cache) : 0)};
}

// The new row of (b, h) as the cache will hold it, T being its type and R that of the cache's rows.
template <class T, class R>
static void new_row(const skimkv_op *op, int64_t b, int64_t h, const DenseScratch &x, const R **k, const R **v) {
    const T *k1 = (const T *)op->k_new + b * op->n_b + h * op->n_h, *v1 = (const T *)op->v_new + b * op->n_b + h * op->n_h;
    if constexpr (row_bits<R> != 0) {
        uint8_t *k2 = x.row, *v2 = x.row + row_bytes(op->cache);
        encode(k1, op->cache->D, row_bits<R>, k2), encode(v1, op->cache->D, row_bits<R>, v2);
        *k = (const R *)k2, *v = (const R *)v2;
    } else {
        *k = k1, *v = v1;
    }
}

// Pointers to rows from .. to-1 (at most BLOCK) and padding to a whole vector; position n is the new row.
template <class T, class R>
static void block_rows(const skimkv_op *op, int64_t b, int64_t h, int64_t from, int64_t to, const DenseScratch &x,
                       const R **k, const R **v) {
    const skimkv_cache *c = op->cache;
    int j = 0;
    each_run(c, from, min(to, held(op, b)), [&](const skimkv_chunk *chunk, int64_t first, int64_t last) {
        const R *kr = key_row<R>(chunk, b, h, first), *vr = value_row<R>(chunk, b, h, first);
        for (int64_t p = first; p < last; p++, kr += chunk->k_n, vr += chunk->v_n) k[j] = kr, v[j] = vr, j++;
    });
    if (to > held(op, b)) {
        new_row<T>(op, b, h, x, k + j, v + j);
        j++;
    }
    for (; j % W; j++) k[j] = k[j - 1], v[j] = v[j - 1];
}

// Attention over positions from .. to-1 into o.
template <class T, class R, int D_>
static void dense_part(const skimkv_op *op, int64_t b, int64_t h, int64_t from, int64_t to, const DenseScratch &x,
                       const Online &o) {
    const skimkv_cache *c = op->cache;
    const int G = c->G, P = padded(c->D);
    Unit u{};
    u.q = x.q;
    load_query(op, u, b, h);
    const R *rows[2][2][BLOCK + W];  // [this block or the next][k, v]
    reset(o, G, P);
    if (from < to) block_rows<T>(op, b, h, from, min(from + BLOCK, to), x, rows[0][0], rows[0][1]);
    for (int64_t p = from, i = 0; p < to; p += BLOCK, i ^= 1) {
        const int n = (int)min(BLOCK, to - p);
        const R **k = rows[i][0], **v = rows[i][1], **next = rows[i ^ 1][0];
        if (p + n < to) block_rows<T>(op, b, h, p + n, min(p + n + BLOCK, to), x, next, rows[i ^ 1][1]);
        key_dots<R, D_>(op, u, k, n, x.s, BLOCK, v);
        update<R, D_>(o, P, G, c->D, v, n, x.s, BLOCK, op_cap(op), p + 2 * BLOCK <= to ? next : nullptr);
    }
}

static void finish_dense(const skimkv_op *op, int64_t b, int64_t h, const Online &o) {
    const int P = padded(op->cache->D);
    for (int g = 0; g < op->cache->G; g++)
        for (int i = 0; i < P; i++) o.acc[g * P + i] /= o.l[g];
    store_result(op, b, h, o.acc, P);
}

// The slot of the new row of (b, h): the one it was given, or that of the lowest score outside the recent window.
static int64_t victim(const skimkv_op *op, int64_t b, int64_t h, float own) {
    if (op->slot[b] >= 0) return op->slot[b];
    const float *score = op->score + b * op->c_b + h * op->c_h;
    const int32_t *pos = op->pos + b * op->c_b + h * op->c_h;
    const int64_t n = op->cache->lengths[b], edge = op->now[b] - op->recent[b];
    int64_t at = -1;
    for (int64_t p = 0; p < n; p++) {
        if (pos[p] > edge || pos[p] < 0) continue;
        if (at < 0 || score[p] < score[at] || (score[p] != score[p] && score[at] == score[at])) at = p;
    }
    if (at < 0) at = 0;  // all are recent
    return op->recent[b] == 0 && own < score[at] ? -1 : at;
}

// The new row of (b, h) goes into its slot, or is dropped; `own` is its weight.
template <class T, class R> static void keep_row(const skimkv_op *op, int64_t b, int64_t h, const DenseScratch &x, float own) {
    const int64_t at = victim(op, b, h, own), n = row_bytes(op->cache);
    const R *k, *v;
    const skimkv_chunk *chunk = op->cache->chunks;
    if (at < 0) return;
    while (at >= chunk->start + chunk->cap) chunk++;
    new_row<T>(op, b, h, x, &k, &v);
    __builtin_memcpy((R *)key_row<R>(chunk, b, h, at), k, n);
    __builtin_memcpy((R *)value_row<R>(chunk, b, h, at), v, n);
    if (!op->score) return;
    op->score[b * op->c_b + h * op->c_h + at] = own;
    op->pos[b * op->c_b + h * op->c_h + at] = (int32_t)op->now[b];
}

// All positions with their softmax weights kept and, averaged over the group, added to op->score.
template <class T, class R, int D_>
static void dense_scored(const skimkv_op *op, int64_t b, int64_t h, const DenseScratch &x) {
    const skimkv_cache *c = op->cache;
    const int G = c->G, P = padded(c->D);
    const int64_t n = c->lengths[b] + 1, ld = roundup(n, BLOCK);
    Unit u{};
    u.q = x.q;
    load_query(op, u, b, h);
    const Online o = online_at(x.online, G);
    const R *k[BLOCK + W], *v[BLOCK + W];
    reset(o, G, P);
    for (int64_t p = 0; p < n; p += BLOCK) {
        const int m = (int)min(BLOCK, n - p);
        block_rows<T>(op, b, h, p, p + m, x, k, v);
        key_dots<R, D_>(op, u, k, m, x.s + p, ld);
    }
    for (int g = 0; g < G; g++) {
        float *s = x.s + g * ld, m = LOWEST, l = 0;
        vf top = splat(LOWEST), sum = splat(0.f);
        for (int64_t p = 0; p < n; p += W) put(s + p, softcapped(get(s + p), op_cap(op)));
        for (int64_t p = n; p < roundup(n, W); p++) s[p] = LOWEST;
        for (int64_t p = 0; p < n; p += W) top = vmax(top, get(s + p));
        m = hmax(top);
        for (int64_t p = 0; p < n; p += W) {
            vf e = vexp2(get(s + p) - splat(m));
            put(s + p, e);
            sum = sum + e;
        }
        l = hsum(sum);
        for (int64_t p = 0; p < n; p += W) put(s + p, get(s + p) / splat(l));
        o.l[g] = 1;
    }
    for (int64_t p = 0; p < n; p += BLOCK) {
        const int m = (int)min(BLOCK, n - p);
        block_rows<T>(op, b, h, p, p + m, x, k, v);
        add<R, D_>(o.acc, P, G, c->D, v, x.s + p, ld, m);
    }
    float *score = op->score + b * op->c_b + h * op->c_h;
    float w = 0;
    for (int64_t p = 0; p < n; p++) {
        w = 0;
        for (int g = 0; g < G; g++) w += x.s[g * ld + p];
        w /= (float)G;
        if (p + 1 < n) score[p] += w;
    }
    finish_dense(op, b, h, o);
    keep_row<T, R>(op, b, h, x, w);
}

}  // namespace skimkv::SKIMKV_NS
