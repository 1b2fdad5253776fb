// Integer sums of codes with AVX-512 VNNI: a 32-bit word holds one token's codes of four channels.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "isa/simd_avx512.h"
#include "kernels/channel_sums.h"
#include "kernels/quantised_index_weights.h"
#include "kernels/vector_math.h"

namespace skimkv::SKIMKV_NS {

// Interleaves 64 bytes of four channels: word e of 128-bit lane l of t[j] holds byte 16*l + 4*j + e of each. In so
// large a file the compiler would not inline it, and then the vectors go through memory.
__attribute__((always_inline)) static inline void interleave(const uint8_t *const *p, const uint8_t *const *ahead,
                                                             int64_t x, __m512i *t) {
    __m512i c[4];
    for (int i = 0; i < 4; i++) c[i] = _mm512_loadu_si512(p[i] + x), prefetch(ahead[i] + x);
    const __m512i a = _mm512_unpacklo_epi8(c[0], c[1]), b = _mm512_unpackhi_epi8(c[0], c[1]);
    const __m512i d = _mm512_unpacklo_epi8(c[2], c[3]), e = _mm512_unpackhi_epi8(c[2], c[3]);
    t[0] = _mm512_unpacklo_epi16(a, d), t[1] = _mm512_unpackhi_epi16(a, d);
    t[2] = _mm512_unpacklo_epi16(b, e), t[3] = _mm512_unpackhi_epi16(b, e);
}

// The logits of sixteen integer sums of query g.
static inline vf logit(__m512i sum, const TileWeights &w, int g) {
    return fma(_mm512_cvtepi32_ps(sum), splat(w.step[g * w.float_ld]), splat(w.init[g * w.float_ld]));
}

// Adds 64 tokens of 8-bit codes.
template <bool FIRST, bool LAST, int GB>
static inline void add_int8_tokens(const uint8_t *const *p, const uint8_t *const *ahead, int64_t x,
                                   const TileWeights &w, float *s, int64_t ld) {
    constexpr int QUADS = CHANNELS_AT_ONCE / 4;
    __m512i t[QUADS][4];
    for (int i = 0; i < QUADS; i++) interleave(p + 4 * i, ahead + 4 * i, x, t[i]);
    for (int g = 0; g < GB; g++) {
        __m512i sum[4], high[QUADS], low[QUADS];
        for (int i = 0; i < QUADS; i++) {
            high[i] = _mm512_set1_epi32(w.high[g * w.query_ld + i * w.quad_ld]);
            low[i] = _mm512_set1_epi32(w.low[g * w.query_ld + i * w.quad_ld]);
        }
        for (int j = 0; j < 4; j++) {
            __m512i x = _mm512_setzero_si512(), y = x;
            if (!FIRST) y = _mm512_loadu_si512(s + g * ld + 16 * j);
            for (int i = 0; i < QUADS; i++) {
                x = _mm512_dpbusd_epi32(x, t[i][j], high[i]);
                y = _mm512_dpbusd_epi32(y, t[i][j], low[i]);
            }
            sum[j] = _mm512_add_epi32(_mm512_slli_epi32(x, 8), y);
        }
        for (int j = 0; j < 4 && !LAST; j++) _mm512_storeu_si512(s + g * ld + 16 * j, sum[j]);
        if (!LAST) continue;
        vf y[4];  // lane l of sum j belongs to the tokens 16*l + 4*j and following
        for (int j = 0; j < 4; j++) y[j] = logit(sum[j], w, g);
        const vf a = _mm512_shuffle_f32x4(y[0], y[1], 0x44), b = _mm512_shuffle_f32x4(y[0], y[1], 0xee);
        const vf c = _mm512_shuffle_f32x4(y[2], y[3], 0x44), d = _mm512_shuffle_f32x4(y[2], y[3], 0xee);
        float *to = s + g * ld;
        store(to, _mm512_shuffle_f32x4(a, c, 0x88)), store(to + 16, _mm512_shuffle_f32x4(a, c, 0xdd));
        store(to + 32, _mm512_shuffle_f32x4(b, d, 0x88)), store(to + 48, _mm512_shuffle_f32x4(b, d, 0xdd));
    }
}

// Stores logits: element e of 128-bit lane l of in[j] goes to s[32*e + 4*l + j].
static inline void store_in_token_order(const vf *in, float *s) {
    const vf a = _mm512_unpacklo_ps(in[0], in[1]), b = _mm512_unpackhi_ps(in[0], in[1]);
    const vf c = _mm512_unpacklo_ps(in[2], in[3]), d = _mm512_unpackhi_ps(in[2], in[3]);
    store(s, _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(c))));
    store(s + 32, _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(c))));
    store(s + 64, _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b), _mm512_castps_pd(d))));
    store(s + 96, _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b), _mm512_castps_pd(d))));
}

// Adds 128 tokens of 4-bit codes. Whole bytes, 16 * high nibble + low nibble, are multiplied as they are, and then the
// low nibbles alone: the difference is 16 times the product of the high nibbles.
template <bool FIRST, bool LAST, int GB>
static inline void add_int4_tokens(const uint8_t *const *p, const uint8_t *const *ahead, int64_t x,
                                   const TileWeights &w, float *s, int64_t ld) {
    constexpr int QUADS = CHANNELS_AT_ONCE / 4;
    __m512i t[QUADS][4];
    for (int i = 0; i < QUADS; i++) interleave(p + 4 * i, ahead + 4 * i, x, t[i]);
    for (int g = 0; g < GB; g++) {
        __m512i whole[4], low[4];
        for (int j = 0; j < 4; j++) {
            whole[j] = FIRST ? _mm512_setzero_si512() : _mm512_loadu_si512(s + g * ld + 16 * j);
            low[j] = FIRST ? _mm512_setzero_si512() : _mm512_loadu_si512(s + g * ld + 64 + 16 * j);
        }
        for (int i = 0; i < QUADS; i++) {
            const __m512i weight = _mm512_set1_epi32(w.low[g * w.query_ld + i * w.quad_ld]);
            for (int j = 0; j < 4; j++) {
                whole[j] = _mm512_dpbusd_epi32(whole[j], t[i][j], weight);
                low[j] = _mm512_dpbusd_epi32(low[j], _mm512_and_si512(t[i][j], _mm512_set1_epi8(15)), weight);
            }
        }
        for (int j = 0; j < 4 && !LAST; j++) {
            _mm512_storeu_si512(s + g * ld + 16 * j, whole[j]);
            _mm512_storeu_si512(s + g * ld + 64 + 16 * j, low[j]);
        }
        if (!LAST) continue;
        vf even[4], odd[4];  // element e of lane l of sum j: token 32*e + 4*l + j, and 16 more for high nibbles
        for (int j = 0; j < 4; j++) {
            even[j] = logit(low[j], w, g);
            odd[j] = logit(_mm512_srai_epi32(_mm512_sub_epi32(whole[j], low[j]), 4), w, g);
        }
        store_in_token_order(even, s + g * ld), store_in_token_order(odd, s + g * ld + 16);
    }
}

template <bool FOUR, bool FIRST, bool LAST, int GB>
static inline void add_quantised_group(const uint8_t *const *p, const uint8_t *const *ahead, int64_t at,
                                       const TileWeights &w, float *s, int64_t ld) {
    if (FOUR)
        for (int i = 0; i < 2; i++) add_int4_tokens<FIRST, LAST, GB>(p, ahead, at / 2 + i * 64, w, s + i * 128, ld);
    else
        for (int i = 0; i < 4; i++) add_int8_tokens<FIRST, LAST, GB>(p, ahead, at + i * 64, w, s + i * 64, ld);
}

}  // namespace skimkv::SKIMKV_NS
