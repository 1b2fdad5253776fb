// Integer sums of codes of 4 bits with AVX2: a 16-bit word holds one token's codes of two channels. The two products of
// a word add up to 2 * 15 * 127 at most, so that a word holds the sum of the four pairs of eight channels.
#pragma once
#include <immintrin.h>
#include <stdint.h>

// AVX-512 without VNNI uses these functions too.
#ifndef SKIMKV_NS
#include "isa/simd_avx2.h"
#endif
#include "kernels/channel_sums.h"
#include "kernels/quantised_index_weights.h"
#include "kernels/vector_math.h"

namespace skimkv::SKIMKV_NS {

// The logits of eight integer sums of query g.
static inline __m256 logit(__m256i sum, const TileWeights &w, int g) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(w.step[g * w.float_ld]),
                           _mm256_set1_ps(w.init[g * w.float_ld]));
}

// Widens eight sums, and adds what s holds of earlier channels. Until the LAST channels the sums are kept in s.
template <bool FIRST, bool LAST> static inline __m256i widen_sums(__m128i words, float *s) {
    __m256i sum = _mm256_cvtepi16_epi32(words);
    if (!FIRST) sum = _mm256_add_epi32(sum, _mm256_loadu_si256((const __m256i *)s));
    if (!LAST) _mm256_storeu_si256((__m256i *)s, sum);
    return sum;
}

// Stores the logits of half a block: in[i] belongs to the bytes 8*i .. 8*i+7 of the codes, and byte b to token
// 32*(b % 4) + b/4.
static inline void store_in_token_order(const __m256 *in, float *s) {
    const __m256 a = _mm256_permute2f128_ps(in[0], in[2], 0x20), b = _mm256_permute2f128_ps(in[0], in[2], 0x31);
    const __m256 c = _mm256_permute2f128_ps(in[1], in[3], 0x20), d = _mm256_permute2f128_ps(in[1], in[3], 0x31);
    const __m256 x = _mm256_unpacklo_ps(a, b), y = _mm256_unpackhi_ps(a, b);
    const __m256 z = _mm256_unpacklo_ps(c, d), t = _mm256_unpackhi_ps(c, d);
    _mm256_storeu_ps(s, _mm256_shuffle_ps(x, z, 0x44)), _mm256_storeu_ps(s + 32, _mm256_shuffle_ps(x, z, 0xee));
    _mm256_storeu_ps(s + 64, _mm256_shuffle_ps(y, t, 0x44)), _mm256_storeu_ps(s + 96, _mm256_shuffle_ps(y, t, 0xee));
}

// Adds 64 tokens, the first or the second `half` (32 bytes) of a block of 128 tokens, whose sums are in `block`.
template <bool FIRST, bool LAST, int GB>
static inline void add_int4_tokens(const uint8_t *const *p, const uint8_t *const *ahead, int64_t x,
                                   const TileWeights &w, float *block, int64_t ld, int half) {
    constexpr int PAIRS = CHANNELS_AT_ONCE / 2;
    static_assert(PAIRS * 2 * 15 * 127 <= INT16_MAX, "the sums fit into words");
    const __m256i nibble = _mm256_set1_epi8(15);
    // Bytes 0-7 and 16-23, and bytes 8-15 and 24-31, of the low nibbles; then the same of the high nibbles.
    __m256i codes[PAIRS][4];
    for (int c = 0; c < PAIRS; c++) {
        const __m256i a = _mm256_loadu_si256((const __m256i *)(p[2 * c] + x));
        const __m256i b = _mm256_loadu_si256((const __m256i *)(p[2 * c + 1] + x));
        prefetch(ahead[2 * c] + x), prefetch(ahead[2 * c + 1] + x);
        const __m256i both[2] = {_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b)};
        for (int i = 0; i < 4; i++)
            codes[c][i] = _mm256_and_si256(i < 2 ? both[i] : _mm256_srli_epi16(both[i - 2], 4), nibble);
    }
    for (int g = 0; g < GB; g++, block += ld) {
        __m256i words[4] = {}, sum[8];
        for (int c = 0; c < PAIRS; c++) {
            const int32_t quad = w.low[g * w.query_ld + c / 2 * w.quad_ld];
            const __m256i weights = _mm256_set1_epi16((int16_t)(quad >> 16 * (c % 2)));
            for (int i = 0; i < 4; i++)
                words[i] = _mm256_add_epi16(words[i], _mm256_maddubs_epi16(codes[c][i], weights));
        }
        for (int i = 0; i < 4; i++) {
            const int at = i / 2 * 4 + i % 2;
            float *s = block + 8 * half + 32 * (i % 2) + 16 * (i / 2);  // where the logits of this half will be
            sum[at] = widen_sums<FIRST, LAST>(_mm256_castsi256_si128(words[i]), s);
            sum[at + 2] = widen_sums<FIRST, LAST>(_mm256_extracti128_si256(words[i], 1), s + 64);
        }
        if (!LAST) continue;
        __m256 y[8];
        for (int i = 0; i < 8; i++) y[i] = logit(sum[i], w, g);
        store_in_token_order(y, block + 8 * half), store_in_token_order(y + 4, block + 16 + 8 * half);
    }
}

template <bool FOUR, bool FIRST, bool LAST, int GB>
static inline void add_quantised_group(const uint8_t *const *p, const uint8_t *const *ahead, int64_t at,
                                       const TileWeights &w, float *s, int64_t ld) {
    static_assert(FOUR, "sums of 8-bit codes do not fit into words");
    for (int i = 0; i < 4; i++)
        add_int4_tokens<FIRST, LAST, GB>(p, ahead, at / 2 + i * 32, w, s + i / 2 * 128, ld, i % 2);
}

}  // namespace skimkv::SKIMKV_NS
