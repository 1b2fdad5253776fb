// Step 1 over int8 and int4 codes in integers, where the machine multiplies bytes: four channels' weights, multiplied by
// the group's scales, become 16-bit integers in one dword each of high and of low bytes, which are multiplied apart.
// Sums are exact; the weights' rounding, 2^-16 of the largest, is far below that of the codes.
#pragma once

namespace skimkv::SKIMKV_NS {

struct Narrow {            // weights of one span of tiles, scratch of one thread
    int32_t *high, *low;   // [G][quads][tiles]: a byte of each of four channels
    float *step, *init;    // [G][tiles]: logit = step * integer sum + init
    int64_t tiles;
};

struct Weights {  // of one tile, for one set of channels
    const int32_t *high, *low;  // [quads], `ld` apart
    int64_t ld;
    float step, init;
};

#if defined(__AVX512VNNI__) || defined(SKIMKV_NEON)
template <class E> constexpr bool in_integers = sizeof(E) == 1;
#elif defined(__AVX2__)
template <class E> constexpr bool in_integers = is_code4<E>;  // products of two bytes of 8 bits would not fit in 16
#else
template <class E> constexpr bool in_integers = false;
#endif

static Narrow take_narrow(Arena &a, const skimkv_op *op, int64_t n) {
    const skimkv_cache *c = op->cache;
    if (!(c->channels == SKIMKV_INT8 ? in_integers<uint8_t> : c->channels == SKIMKV_INT4 && in_integers<Code4>)) return {};
    const int64_t tiles = roundup(n, 16 * 256) / 256, quads = (roundup(max(op->r, c->R), TOGETHER)) / 4;
    return {a.take<int32_t>(c->G * quads * tiles), a.take<int32_t>(c->G * quads * tiles), a.take<float>(c->G * tiles),
            a.take<float>(c->G * tiles), tiles};
}

// W scales or zeros of one channel, of groups `stride` apart; from `have` on they are zero.
static inline vf get_scales(const float *p, int64_t stride, int64_t have) {
    if (stride == 1 && have >= W) return get(p);
    float own[W] = {};
    for (int i = 0; i < min(have, W); i++) own[i] = p[i * stride];
    return get(own);
}

// Weights of tiles t0 .. t1-1 of one chunk for every query, W tiles at a time.
static void narrow_weights(const skimkv_op *op, const Unit &u, const skimkv_chunk *chunk, const Narrow &to, int64_t t0, int64_t t1) {
    const int r = (int)u.r, sets = (r + TOGETHER - 1) / TOGETHER, quads = sets * TOGETHER / 4;
    const float *scale = chunk->scale + u.b * chunk->s_b + u.h * chunk->s_h + (t0 - chunk->start / GROUP) * chunk->s_g;
    const float nearest = 12582912.f;  // added, it rounds and leaves the integer in the low bits
    int bits;
    __builtin_memcpy(&bits, &nearest, 4);
    vf value[256];
    for (int c = r; c < quads * 4; c++) value[c] = splat(0.f);
    for (int g = 0; g < op->cache->G; g++)
        for (int64_t t = 0; t < t1 - t0; t += W) {
            vf top = splat(1e-30f), init = splat(0.f);
            for (int c = 0; c < r; c++) {
                const float *from = scale + t * chunk->s_g + u.channel[c] * chunk->s_r;
                const vf w = splat(u.w[g * r + c]);
                value[c] = w * get_scales(from, chunk->s_g, t1 - t0 - t);
                init = fma(w, get_scales(from + chunk->s_z, chunk->s_g, t1 - t0 - t), init);
                top = vmax(top, vmax(value[c], splat(0.f) - value[c]));
            }
            const vf inverse = splat(32639.f) / top;
            put(to.step + g * to.tiles + t, top * splat(1 / 32639.f));
            put(to.init + g * to.tiles + t, init);
            for (int quad = 0; quad < quads; quad++) {
                vi high = {}, low = {};
                for (int e = 3; e >= 0; e--) {
                    const vi q = (vi)fma(value[4 * quad + e], inverse, splat(nearest)) - bits;
                    high = (high << 8) | (((q + 128) >> 8) & 255);
                    low = (low << 8) | (q & 255);
                }
                put((float *)to.high + (g * quads + quad) * to.tiles + t, (vf)high);
                put((float *)to.low + (g * quads + quad) * to.tiles + t, (vf)low);
            }
        }
}

// One set of channels of 256 tokens, codes from byte or nibble `at` on, to logits or to what the next set adds to; what
// lies as far into `ahead` is fetched.
template <bool FOUR, bool FIRST, bool LAST>
static inline void coded_group(const uint8_t *const *p, const uint8_t *const *ahead, int64_t at, const Weights &w, float *s);

}  // namespace skimkv::SKIMKV_NS

#if defined(__AVX512VNNI__)
#include "coded_vnni.h"
#elif defined(__AVX2__)
#include "coded_avx2.h"
#elif defined(SKIMKV_NEON)
#include "coded_neon.h"
#endif

namespace skimkv::SKIMKV_NS {

// One tile, one set of channels, every query.
template <bool FOUR>
static inline void coded_tile(const skimkv_op *op, const Unit &u, const uint8_t *const *p, const uint8_t *const *ahead,
                              int64_t at, const Narrow &n, int64_t tile, int64_t c0, float *s) {
    const int64_t quads = roundup(u.r, TOGETHER) / 4;
    const bool first = c0 == 0, last = c0 + TOGETHER >= u.r;
    for (int g = 0; g < op->cache->G; g++, s += u.np) {
        const int64_t weights = (g * quads + c0 / 4) * n.tiles + tile, one = g * n.tiles + tile;
        const Weights w{n.high + weights, n.low + weights, n.tiles, n.step[one], n.init[one]};
        if (first && last) coded_group<FOUR, true, true>(p, ahead, at, w, s);
        else if (first) coded_group<FOUR, true, false>(p, ahead, at, w, s);
        else if (last) coded_group<FOUR, false, true>(p, ahead, at, w, s);
        else coded_group<FOUR, false, false>(p, ahead, at, w, s);
    }
}

}  // namespace skimkv::SKIMKV_NS
