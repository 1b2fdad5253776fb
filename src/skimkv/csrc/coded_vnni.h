// Integer products of codes with AVX-512 VNNI: a dword holds one token's codes of four channels.
#pragma once

namespace skimkv::SKIMKV_NS {

// Dword e of lane l of t[j] is byte 16*l + 4*j + e of each of the four channels.
static inline void interleave(const uint8_t *const *p, const uint8_t *const *ahead, int64_t x, __m512i *t) {
    __m512i c[4];
    for (int i = 0; i < 4; i++) c[i] = _mm512_loadu_si512(p[i] + x), prefetch(ahead[i] + x);
    const __m512i a = _mm512_unpacklo_epi8(c[0], c[1]), b = _mm512_unpackhi_epi8(c[0], c[1]);
    const __m512i d = _mm512_unpacklo_epi8(c[2], c[3]), e = _mm512_unpackhi_epi8(c[2], c[3]);
    t[0] = _mm512_unpacklo_epi16(a, d), t[1] = _mm512_unpackhi_epi16(a, d);
    t[2] = _mm512_unpacklo_epi16(b, e), t[3] = _mm512_unpackhi_epi16(b, e);
}

static inline vf logit(__m512i sum, const Weights &w) { return fma(_mm512_cvtepi32_ps(sum), splat(w.step), splat(w.init)); }

// High and low products to sums, with those of the sets before; they stay in s until the last set.
template <bool FIRST, bool LAST> static inline __m512i total(__m512i high, __m512i low, float *s) {
    __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
    if (!FIRST) sum = _mm512_add_epi32(sum, _mm512_loadu_si512(s));
    if (!LAST) _mm512_storeu_si512(s, sum);
    return sum;
}

// 64 tokens of int8 codes.
template <bool FIRST, bool LAST> static inline void coded8(const uint8_t *const *p, const uint8_t *const *ahead, int64_t x, const Weights &w, float *s) {
    __m512i high[4] = {}, low[4] = {}, t[4];
#pragma GCC unroll 1  // unrolled, the compiler loads all channels first and spills the sums
    for (int c = 0; c < TOGETHER / 4; c++) {
        interleave(p + 4 * c, ahead + 4 * c, x, t);
        const __m512i h = _mm512_set1_epi32(w.high[c * w.ld]), l = _mm512_set1_epi32(w.low[c * w.ld]);
        for (int j = 0; j < 4; j++) {
            high[j] = _mm512_dpbusd_epi32(high[j], t[j], h);
            low[j] = _mm512_dpbusd_epi32(low[j], t[j], l);
        }
    }
    __m512i sum[4];
    for (int j = 0; j < 4; j++) sum[j] = total<FIRST, LAST>(high[j], low[j], s + 16 * j);
    if (!LAST) return;
    vf y[4];  // lane l of sum j: tokens 16*l + 4*j ..
    for (int j = 0; j < 4; j++) y[j] = logit(sum[j], w);
    const vf a = _mm512_shuffle_f32x4(y[0], y[1], 0x44), b = _mm512_shuffle_f32x4(y[0], y[1], 0xee);
    const vf c = _mm512_shuffle_f32x4(y[2], y[3], 0x44), d = _mm512_shuffle_f32x4(y[2], y[3], 0xee);
    put(s, _mm512_shuffle_f32x4(a, c, 0x88)), put(s + 16, _mm512_shuffle_f32x4(a, c, 0xdd));
    put(s + 32, _mm512_shuffle_f32x4(b, d, 0x88)), put(s + 48, _mm512_shuffle_f32x4(b, d, 0xdd));
}

// Element 4*l + j of the vector at s + 32*e is element e of lane l of in[j].
static inline void spread(const vf *in, float *s) {
    const vf a = _mm512_unpacklo_ps(in[0], in[1]), b = _mm512_unpackhi_ps(in[0], in[1]);
    const vf c = _mm512_unpacklo_ps(in[2], in[3]), d = _mm512_unpackhi_ps(in[2], in[3]);
    put(s, _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(c))));
    put(s + 32, _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(c))));
    put(s + 64, _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b), _mm512_castps_pd(d))));
    put(s + 96, _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b), _mm512_castps_pd(d))));
}

// 128 tokens of int4 codes. Whole bytes are multiplied as they are, high nibble and low, and the low ones again alone.
template <bool FIRST, bool LAST> static inline void coded4(const uint8_t *const *p, const uint8_t *const *ahead, int64_t x, const Weights &w, float *s) {
    __m512i high[8] = {}, low[8] = {}, t[4];
#pragma GCC unroll 1
    for (int c = 0; c < TOGETHER / 4; c++) {
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
    for (int j = 0; j < 8; j++) sum[j] = total<FIRST, LAST>(high[j], low[j], s + 16 * j);
    if (!LAST) return;
    vf even[4], odd[4];  // element e of lane l of sum j: tokens 32*e + 4*l + j of the low nibbles, 16 more of the high
    for (int j = 0; j < 4; j++) {
        even[j] = logit(sum[4 + j], w);
        odd[j] = logit(_mm512_srai_epi32(_mm512_sub_epi32(sum[j], sum[4 + j]), 4), w);
    }
    spread(even, s), spread(odd, s + 16);
}

template <bool FOUR, bool FIRST, bool LAST>
static inline void coded_group(const uint8_t *const *p, const uint8_t *const *ahead, int64_t at, const Weights &w, float *s) {
    if (FOUR)
        for (int i = 0; i < 2; i++) coded4<FIRST, LAST>(p, ahead, at / 2 + i * 64, w, s + i * 128);
    else
        for (int i = 0; i < 4; i++) coded8<FIRST, LAST>(p, ahead, at + i * 64, w, s + i * 64);
}

}  // namespace skimkv::SKIMKV_NS
