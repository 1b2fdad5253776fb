// Integer products of int4 codes with AVX2: a word holds one token's codes of two channels. A product of two bytes and
// its neighbour's are at most 2 * 15 * 128 in magnitude, so words hold the sums of four pairs of channels.
#pragma once

namespace skimkv::SKIMKV_NS {

static inline __m256 logit(__m256i sum, const Weights &w) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(w.step), _mm256_set1_ps(w.init));
}

// Eight sums of words, high and low products, with those of the sets before; they stay in s until the last set.
template <bool FIRST, bool LAST> static inline __m256i total(__m128i high, __m128i low, float *s) {
    __m256i sum = _mm256_add_epi32(_mm256_slli_epi32(_mm256_cvtepi16_epi32(high), 8), _mm256_cvtepi16_epi32(low));
    if (!FIRST) sum = _mm256_add_epi32(sum, _mm256_loadu_si256((const __m256i *)s));
    if (!LAST) _mm256_storeu_si256((__m256i *)s, sum);
    return sum;
}

// in[i] are sums of bytes 8*i .. 8*i+7, of tokens 32*(byte % 4) + byte / 4, for half of the bytes.
static inline void spread(const __m256 *in, float *s) {
    const __m256 a = _mm256_permute2f128_ps(in[0], in[2], 0x20), b = _mm256_permute2f128_ps(in[0], in[2], 0x31);
    const __m256 c = _mm256_permute2f128_ps(in[1], in[3], 0x20), d = _mm256_permute2f128_ps(in[1], in[3], 0x31);
    const __m256 x = _mm256_unpacklo_ps(a, b), y = _mm256_unpackhi_ps(a, b);
    const __m256 z = _mm256_unpacklo_ps(c, d), t = _mm256_unpackhi_ps(c, d);
    _mm256_storeu_ps(s, _mm256_shuffle_ps(x, z, 0x44)), _mm256_storeu_ps(s + 32, _mm256_shuffle_ps(x, z, 0xee));
    _mm256_storeu_ps(s + 64, _mm256_shuffle_ps(y, t, 0x44)), _mm256_storeu_ps(s + 96, _mm256_shuffle_ps(y, t, 0xee));
}

// 64 tokens of int4 codes, 32 bytes: s has place for the 128 of the block, which begins `half` of it before.
template <bool FIRST, bool LAST>
static inline void coded4(const uint8_t *const *p, const uint8_t *const *ahead, int64_t x, const Weights &w, float *block, int half) {
    const __m256i nibble = _mm256_set1_epi8(15);
    __m256i high[4] = {}, low[4] = {};  // bytes 0-7 and 16-23, then 8-15 and 24-31, of low nibbles; the same of high ones
#pragma GCC unroll 4
    for (int c = 0; c < TOGETHER; c += 2) {
        const __m256i a = _mm256_loadu_si256((const __m256i *)(p[c] + x)), b = _mm256_loadu_si256((const __m256i *)(p[c + 1] + x));
        prefetch(ahead[c] + x), prefetch(ahead[c + 1] + x);
        const __m256i both[2] = {_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b)};
        const __m256i h = _mm256_set1_epi16((int16_t)(w.high[c / 4 * w.ld] >> 8 * (c % 4)));
        const __m256i l = _mm256_set1_epi16((int16_t)(w.low[c / 4 * w.ld] >> 8 * (c % 4)));
        for (int i = 0; i < 4; i++) {
            const __m256i codes = _mm256_and_si256(i < 2 ? both[i] : _mm256_srli_epi16(both[i - 2], 4), nibble);
            high[i] = _mm256_add_epi16(high[i], _mm256_maddubs_epi16(codes, h));
            low[i] = _mm256_add_epi16(low[i], _mm256_maddubs_epi16(codes, l));
        }
    }
    __m256i sum[8];
    for (int i = 0; i < 4; i++) {
        const __m128i h0 = _mm256_castsi256_si128(high[i]), h1 = _mm256_extracti128_si256(high[i], 1);
        const __m128i l0 = _mm256_castsi256_si128(low[i]), l1 = _mm256_extracti128_si256(low[i], 1);
        const int at = i / 2 * 4 + i % 2;
        float *s = block + 8 * half + 32 * (i % 2) + 16 * (i / 2);  // where this half's logits will be
        sum[at] = total<FIRST, LAST>(h0, l0, s), sum[at + 2] = total<FIRST, LAST>(h1, l1, s + 64);
    }
    if (!LAST) return;
    __m256 y[8];
    for (int i = 0; i < 8; i++) y[i] = logit(sum[i], w);
    spread(y, block + 8 * half), spread(y + 4, block + 16 + 8 * half);
}

template <bool FOUR, bool FIRST, bool LAST>
static inline void coded_group(const uint8_t *const *p, const uint8_t *const *ahead, int64_t at, const Weights &w, float *s) {
    static_assert(FOUR, "eight bits do not fit");
    for (int i = 0; i < 4; i++) coded4<FIRST, LAST>(p, ahead, at / 2 + i * 32, w, s + i / 2 * 128, i % 2);
}

}  // namespace skimkv::SKIMKV_NS
