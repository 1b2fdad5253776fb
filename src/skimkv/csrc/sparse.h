// Steps 2 and 3: choose positions by their scores, read those rows, attend.
#pragma once

namespace skimkv::SKIMKV_NS {

constexpr int CHOSEN = 256;  // rows attended to at once: usually all

struct Choice {             // scratch of one thread
    float *sum, *lane;      // [np], [16*nt]: group sums of softmaxed scores and their lane maxima, if G > 1
    float *value;           // [np + 16]
    int32_t *at;            // [np + 16]
    float *factor;          // [G][nt]: turns a tile's exp into a softmax weight
    float *online;          // state of the attention
    float *s;               // [G][CHOSEN]
};
static Choice take_choice(Arena &a, const skimkv_op *op, int64_t n) {
    const int G = op->cache->G;
    const int64_t np = roundup(n, 256), nt = np / 256;
    return {a.take<float>(G > 1 ? np : 0), a.take<float>(G > 1 ? 16 * nt : 16), a.take<float>(np + 16),
            a.take<int32_t>(np + 16), a.take<float>(G * nt),
            a.take<float>(online_floats(G, padded(op->cache->D))), a.take<float>(G * CHOSEN)};
}

// Softmax weight of position p for query g, by the scores of step 1.
static inline float weight(const Unit &u, const Scores &z, const Choice &x, int G, int g, int64_t p) {
    if (G > 1) return z.s[g * u.np + p] * x.factor[g * u.nt + p / GROUP];
    return exp2f1(z.s[p] - u.m[0]) / u.l[0];
}

// Step 2: the current token, the `local` before it, and the largest of the rest, k besides the current.
static void choose(const skimkv_op *op, Unit &u, const Scores &z, const Choice &x) {
    const int G = op->cache->G;
    for (int g = 0; g < G; g++) {
        const float *tm = z.tile_m + g * u.nt, *tl = z.tile_l + g * u.nt;
        float m = LOWEST, l = 0;
        for (int64_t t = 0; t < u.nt; t++) m = tm[t] > m ? tm[t] : m;
        for (int64_t t = 0; t < u.nt; t++) l += tl[t] * exp2f1(tm[t] - m);
        u.m[g] = m, u.l[g] = l;
        if (G > 1)
            for (int64_t t = 0; t < u.nt; t++) x.factor[g * u.nt + t] = exp2f1(tm[t] - m) / l;
    }
    const int64_t local = op->method == SKIMKV_SPARQ ? min(op->local, u.n - 1) : 0;
    const int64_t free = u.n - 1 - local, k = max(min(op->k - local, free), 0);
    float *s = z.s, *lane = z.lane, hidden[GROUP];
    if (G > 1) {
        s = x.sum, lane = x.lane;
        for (int64_t t = 0; t < u.nt; t++) {
            vf top[16 / W];
            for (int i = 0; i < 16 / W; i++) top[i] = splat(LOWEST);
            for (int y = 0; y < GROUP; y += 16)
                for (int i = 0; i < 16 / W; i++) {
                    vf v = splat(0.f);
                    for (int g = 0; g < G; g++)
                        v = fma(get(z.s + g * u.np + t * GROUP + y + i * W), splat(x.factor[g * u.nt + t]), v);
                    put(s + t * GROUP + y + i * W, v);
                    top[i] = vmax(top[i], v);
                }
            for (int i = 0; i < 16 / W; i++) put(lane + 16 * t + i * W, top[i]);
        }
    }
    // candidates end inside a tile: hide the rest of it, and take its lanes' maxima anew
    const int64_t edge = free / GROUP * GROUP, stop = free > edge ? edge + GROUP : free;
    for (int64_t i = free; i < stop; i++) hidden[i - free] = s[i], s[i] = LOWEST;
    for (int i = 0; i < 16 && stop > free; i += W) {
        vf top = splat(LOWEST);
        for (int y = 0; y < GROUP; y += 16) top = vmax(top, get(s + edge + y + i));
        put(lane + edge / 16 + i, top);
    }
    u.n_chosen = largest(s, lane, free, k, u.chosen, x.value, x.at);
    for (int64_t i = free; i < stop; i++) s[i] = hidden[i - free];
    for (int64_t p = free; p < u.n; p++) u.chosen[u.n_chosen++] = (int32_t)p;
}

template <class T> static int64_t chosen_rows(const skimkv_cache *c, const Unit &u, int64_t from, const T **k, const T **v) {
    const int64_t n = min(CHOSEN, u.n_chosen - from);
    const skimkv_chunk *chunk = c->chunks;
    for (int64_t j = 0; j < n; j++) {
        const int64_t p = u.chosen[from + j];
        while (p >= chunk->start + chunk->cap) chunk++;
        k[j] = key_row<T>(chunk, u.b, u.h, p), v[j] = value_row<T>(chunk, u.b, u.h, p);
    }
    for (int64_t j = n; j < roundup(n, W); j++) k[j] = k[n - 1], v[j] = v[n - 1];
    return n;
}

// Step 3. SparQ: alpha y + (1 - alpha) mean. Top-k: the softmax weights of step 1 themselves.
template <class T, int D_> static void attend(const skimkv_op *op, Unit &u, const Scores &z, const Choice &x) {
    const skimkv_cache *c = op->cache;
    const int G = c->G, P = padded(c->D);
    const Online o = online_at(x.online, G);
    const bool exact = op->method == SKIMKV_TOPK || op->method == SKIMKV_ORACLE;
    const T *k[CHOSEN], *v[CHOSEN];
    reset(o, G, P);
    for (int64_t from = 0; from < u.n_chosen; from += CHOSEN) {
        const int n = (int)chosen_rows<T>(c, u, from, k, v);
        if (exact) {
            for (int g = 0; g < G; g++)
                for (int j = 0; j < n; j++) {
                    x.s[g * CHOSEN + j] = weight(u, z, x, G, g, u.chosen[from + j]);
                    o.l[g] += x.s[g * CHOSEN + j];
                }
            add<T, D_>(o.acc, P, G, c->D, v, x.s, CHOSEN, n);
        } else {
            key_dots<T, D_>(op, u, k, n, x.s, CHOSEN);
            update<T, D_>(o, P, G, c->D, v, n, x.s, CHOSEN, op_cap(op));
        }
    }
    for (int g = 0; g < G; g++) {
        const float alpha = op->use_mean ? u.alpha[g] : 1;
        float scale = alpha / (op->method == SKIMKV_TOPK ? 1 : o.l[g]);
        if (u.l[g] != u.l[g]) scale = u.l[g];  // a NaN logit anywhere makes the head NaN, as in dense attention
        const float *mean = op->use_mean ? c->mean + u.b * c->m_b + u.h * c->m_h : nullptr;
        for (int i = 0; i < c->D; i++)
            o.acc[g * P + i] = o.acc[g * P + i] * scale + (mean ? (1 - alpha) * mean[i] : 0);
    }
    store_result(op, u.b, u.h, o.acc, P);
}

// Step 1's mass on the chosen positions.
static void chosen_mass(const skimkv_op *op, Unit &u, const Scores &z, const Choice &x) {
    const int G = op->cache->G;
    for (int g = 0; g < G; g++) {
        float sum = 0;
        for (int64_t j = 0; j < u.n_chosen; j++) sum += weight(u, z, x, G, g, u.chosen[j]);
        u.alpha[g] = sum > 1 || u.n_chosen == u.n ? 1 : sum;
    }
}

}  // namespace skimkv::SKIMKV_NS
