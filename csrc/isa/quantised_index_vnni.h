// Integer sums of codes with AVX-512 VNNI: a 32-bit word holds one token's codes of four channels.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "isa/simd_avx512.h"
#include "kernels/channel_sums.h"
#include "kernels/quantised_index_weights.h"
#include "kernels/vector_math.h"

namespace skimkv::SKIMKV_NS {

// Interleaves 64 bytes of four channels: word e of 128-bit lane l of t[j] holds byte 16*l + 4*j + e of each.
static inline void interleave(const uint8_t *const *p, const uint8_t *const *ahead, int64_t x, __m512i *t) {
    __m512i c[4];
    for (int i = 0; i < 4; i++) c[i] = _mm512_loadu_si512(p[i] + x), prefetch(ahead[i] + x);
    const __m512i a = _mm512_unpacklo_epi8(c[0], c[1]), b = _mm512_unpackhi_epi8(c[0], c[1]);
    const __m512i d = _mm512_unpacklo_epi8(c[2], c[3]), e = _mm512_unpackhi_epi8(c[2], c[3]);
    t[0] = _mm512_unpacklo_epi16(a, d), t[1] = _mm512_unpackhi_epi16(a, d);
    t[2] = _mm512_unpacklo_epi16(b, e), t[3] = _mm512_unpackhi_epi16(b, e);
}

// The logits of sixteen integer sums.
static inline vf logit(__m512i sum, const TileWeights &w) {
    return fma(_mm512_cvtepi32_ps(sum), splat(w.step), splat(w.init));
}

// Joins sums of products with high bytes and with low bytes, and adds what s holds of earlier channels. Until the LAST
// channels the sums are kept in s.
template <bool FIRST, bool LAST> static inline __m512i combine_bytes(__m512i high, __m512i low, float *s) {
    __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
    if (!FIRST) sum = _mm512_add_epi32(sum, _mm512_loadu_si512(s));
    if (!LAST) _mm512_storeu_si512(s, sum);
    return sum;
}

// Adds 64 tokens of 8-bit codes.
template <bool FIRST, bool LAST>
static inline void add_int8_tokens(const uint8_t *const *p, const uint8_t *const *ahead, int64_t x,
                                   const TileWeights &w, float *s) {
    __m512i high[4] = {}, low[4] = {}, t[4];
#pragma GCC unroll 1  // unrolled, the compiler would load all channels first and spill the sums
    for (int c = 0; c < CHANNELS_AT_ONCE / 4; c++) {
        interleave(p + 4 * c, ahead + 4 * c, x, t);
        const __m512i h = _mm512_set1_epi32(w.high[c * w.ld]), l = _mm512_set1_epi32(w.low[c * w.ld]);
        for (int j = 0; j < 4; j++) {
            high[j] = _mm512_dpbusd_epi32(high[j], t[j], h);
            low[j] = _mm512_dpbusd_epi32(low[j], t[j], l);
        }
    }
    __m512i sum[4];
    for (int j = 0; j < 4; j++) sum[j] = combine_bytes<FIRST, LAST>(high[j], low[j], s + 16 * j);
    if (!LAST) return;
    vf y[4];  // lane l of sum j belongs to the tokens 16*l + 4*j and following
    for (int j = 0; j < 4; j++) y[j] = logit(sum[j], w);
    const vf a = _mm512_shuffle_f32x4(y[0], y[1], 0x44), b = _mm512_shuffle_f32x4(y[0], y[1], 0xee);
    const vf c = _mm512_shuffle_f32x4(y[2], y[3], 0x44), d = _mm512_shuffle_f32x4(y[2], y[3], 0xee);
    store(s, _mm512_shuffle_f32x4(a, c, 0x88)), store(s + 16, _mm512_shuffle_f32x4(a, c, 0xdd));
    store(s + 32, _mm512_shuffle_f32x4(b, d, 0x88)), store(s + 48, _mm512_shuffle_f32x4(b, d, 0xdd));
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
template <bool FIRST, bool LAST>
static inline void add_int4_tokens(const uint8_t *const *p, const uint8_t *const *ahead, int64_t x,
                                   const TileWeights &w, float *s) {
    __m512i high[8] = {}, low[8] = {}, t[4];
#pragma GCC unroll 1
    for (int c = 0; c < CHANNELS_AT_ONCE / 4; c++) {
        interleave(p + 4 * c, ahead + 4 * c, x, t);
        const __m512i h = _mm512_set1_epi32(w.high[c * w.ld]), l = _mm512_set1_epi32(w.low[c * w.ld]);
        for (int j = 0; j < 4; j++) {
            const __m512i nibble = _mm512_and_si512(t[j], _mm512_set1_epi8(15));
            high[j] = _mm512_dpbusd_epi32(high[j], t[j], h);
            low[j] = _mm512_dpbusd_epi32(low[j], t[j], l);
            high[4 + j] = _mm512_dpbusd_epi32(high[4 + j], nibble, h);
            low[4 + j] = _mm512_dpbusd_epi32(low[4 + j], nibble, l);
        }
    }
    __m512i sum[8];
    for (int j = 0; j < 8; j++) sum[j] = combine_bytes<FIRST, LAST>(high[j], low[j], s + 16 * j);
    if (!LAST) return;
    vf even[4], odd[4];  // element e of lane l of sum j: token 32*e + 4*l + j, and 16 more for high nibbles
    for (int j = 0; j < 4; j++) {
        even[j] = logit(sum[4 + j], w);
        odd[j] = logit(_mm512_srai_epi32(_mm512_sub_epi32(sum[j], sum[4 + j]), 4), w);
    }
    store_in_token_order(even, s), store_in_token_order(odd, s + 16);
}

template <bool FOUR, bool FIRST, bool LAST>
static inline void add_quantised_group(const uint8_t *const *p, const uint8_t *const *ahead, int64_t at,
                                       const TileWeights &w, float *s) {
    if (FOUR)
        for (int i = 0; i < 2; i++) add_int4_tokens<FIRST, LAST>(p, ahead, at / 2 + i * 64, w, s + i * 128);
    else
        for (int i = 0; i < 4; i++) add_int8_tokens<FIRST, LAST>(p, ahead, at + i * 64, w, s + i * 64);
}

}  // namespace skimkv::SKIMKV_NS
