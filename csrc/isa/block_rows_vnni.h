// Products of GGUF blocks with rounded inputs, with AVX-512 VNNI: codes of 8 bits, unsigned, are multiplied with inputs
// of two bytes, 128 * high + low. The inputs stand in the order in which the codes leave a block, so that no code
// moves.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "isa/simd_avx512.h"
#include "kernels/block_inputs.h"
#include "kernels/block_types.h"
#include "kernels/vector_math.h"

namespace skimkv::SKIMKV_NS {

// Where the input i of a token stands.
template <InputOrder ORDER> static inline int64_t place_of_input(int64_t i) {
    const int64_t group = i / 128 * 128, part = i / 32 % 4, rest = i % 32;
    if (ORDER == InputOrder::HALVES_OF_64)  // parts 0 and 2 are low nibbles of 64 bytes, 1 and 3 high ones
        return group + (part % 2 * 2 + part / 2) * 32 + rest;
    if (ORDER == InputOrder::HALVES_OF_32)  // first halves of four blocks are low nibbles, second halves high ones
        return group + rest / 16 * 64 + part * 16 + rest % 16;
    return i;
}

template <InputOrder ORDER>
static inline void store_input(const RoundedInputs &to, int64_t i, int32_t code, bool is_two_bytes) {
    const int64_t at = place_of_input<ORDER>(i);
    const int32_t high = is_two_bytes ? (code + 64) >> 7 : code;
    to.high[at] = (int8_t)high, to.low[at] = (int8_t)(code - 128 * high);
}

static inline __m512i add_products(__m512i sum, __m512i code, const int8_t *input) {
    return _mm512_dpbusd_epi32(sum, code, _mm512_loadu_si512(input));
}

static inline __m512 float16_splat(const uint8_t *p) {
    uint16_t bits;
    __builtin_memcpy(&bits, p, 2);
    return _mm512_cvtph_ps(_mm256_set1_epi16((short)bits));
}

// The products of 64 codes with inputs of one byte, or of two.
template <bool TWO> static inline __m512 products_of(__m512i code, const int8_t *high, const int8_t *low) {
    __m512i sum = add_products(_mm512_setzero_si512(), code, high);
    if (TWO) sum = add_products(_mm512_slli_epi32(sum, 7), code, low);
    return _mm512_cvtepi32_ps(sum);
}

static inline __m512i nibbles(__m512i x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
static inline __m512i high_nibbles(__m512i x) { return nibbles(_mm512_srli_epi16(x, 4)); }
// Every lane index i from 0 to 15 divided by 2, and by 4.
static inline __m512i halves() { return _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7); }
static inline __m512i quarters() { return _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3); }

// A group of weights: codes in the order of place_of_input, the scale of every lane of their products, and for every
// sixteen weights, in their own order, the minimum: what is taken from scale * code.
struct DecodedGroup {
    __m512i code[4];
    __m512 scale[4], minimum;
};

// The scales and offsets of Q4_K and Q5_K: 6-bit scales and minima of eight parts, in 12 bytes.
static inline void decode_scales(const uint8_t *p, const float *input_scale, DecodedGroup &to) {
    const __m128i packed = _mm_loadu_si128((const __m128i *)(p + 4));  // words a, b, c: see decode_six_bits
    const __m128i low = _mm_and_si128(_mm_srlv_epi32(_mm_shuffle_epi32(packed, 0x98), _mm_setr_epi32(0, 0, 0, 4)),
                                      _mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f));  // a, c, b, c
    const __m128i top = _mm_and_si128(_mm_srli_epi32(_mm_shuffle_epi32(packed, 0x50), 2),
                                      _mm_setr_epi32(0, 0x30303030, 0, 0x30303030));  // a, a, b, b
    const __m512i codes = _mm512_cvtepu8_epi32(_mm_or_si128(low, top));               // 8 scales, 8 minima
    int32_t two;
    __builtin_memcpy(&two, p, 4);
    const __m256i eight = _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3,
                                           2, 3, 2, 3, 2, 3);
    const __m512 of_codes = _mm512_cvtph_ps(_mm256_shuffle_epi8(_mm256_set1_epi32(two), eight));
    const __m512 both = _mm512_cvtepi32_ps(codes) * of_codes;
    const __m512 scale = both * _mm512_castps256_ps512(_mm256_loadu_ps(input_scale));
    const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(2), 1);
    for (int i = 0; i < 4; i++)  // the parts 0 and 2, 1 and 3, 4 and 6, 5 and 7
        to.scale[i] = _mm512_permutexvar_ps(_mm512_add_epi32(second, _mm512_set1_epi32(i / 2 * 4 + i % 2)), scale);
    to.minimum = _mm512_permutexvar_ps(_mm512_add_epi32(halves(), _mm512_set1_epi32(8)), both);
}

static inline void decode_group(BlockQ4_K, const uint8_t *p, const float *input_scale, DecodedGroup &to) {
    decode_scales(p, input_scale, to);
    for (int i = 0; i < 2; i++) {
        const __m512i two = _mm512_loadu_si512(p + 16 + i * 64);
        to.code[2 * i] = nibbles(two), to.code[2 * i + 1] = high_nibbles(two);
    }
}

static inline void decode_group(BlockQ5_K, const uint8_t *p, const float *input_scale, DecodedGroup &to) {
    decode_scales(p, input_scale, to);
    const __m512i top = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(p + 16)));
    const auto add_bit = [&](__m512i code, int i) {  // 16 where bit i is set, or bit i+2 in the last 32 bytes
        const __m512i bits = _mm512_inserti64x4(_mm512_set1_epi8((char)(1 << i)), _mm256_set1_epi8((char)(4 << i)), 1);
        return _mm512_mask_add_epi8(code, _mm512_test_epi8_mask(top, bits), code, _mm512_set1_epi8(16));
    };
    for (int i = 0; i < 2; i++) {
        const __m512i two = _mm512_loadu_si512(p + 48 + i * 64);
        to.code[2 * i] = add_bit(nibbles(two), 4 * i), to.code[2 * i + 1] = add_bit(high_nibbles(two), 4 * i + 1);
    }
}

static inline void decode_group(BlockQ6_K, const uint8_t *p, const float *input_scale, DecodedGroup &to) {
    const __m512i shift = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(2), 1);
    const __m512i top_bits = _mm512_set1_epi8(0x30);
    const __m512 plain =
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p + 192)))) * float16_splat(p + 208);
    const __m512 of_inputs = _mm512_zextps256_ps512(_mm256_loadu_ps(input_scale));
    const __m512 scale = plain * _mm512_permutexvar_ps(halves(), of_inputs);
    for (int i = 0; i < 2; i++) {
        const __m512i low = _mm512_loadu_si512(p + i * 64);
        const __m512i tops = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(p + 128 + i * 32)));
        const __m512i top = _mm512_srlv_epi16(tops, shift);
        to.code[2 * i] = _mm512_or_si512(nibbles(low), _mm512_and_si512(_mm512_slli_epi16(top, 4), top_bits));
        to.code[2 * i + 1] = _mm512_or_si512(high_nibbles(low), _mm512_and_si512(top, top_bits));
    }
    for (int i = 0; i < 4; i++)
        to.scale[i] = _mm512_permutexvar_ps(_mm512_add_epi32(quarters(), _mm512_set1_epi32(4 * i)), scale);
    to.minimum = plain * _mm512_set1_ps(32.f);
}

// Multiplies R rows of a K type, `row` bytes apart, with one token.
template <bool TWO, int R, class Block>
static inline void multiply_row(Block, const uint8_t *w, int64_t row, int64_t in, const RoundedInputs &x, float *y) {
    __m512 sum[R][2], minima[R];
    for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = minima[r] = splat(0.f);
    for (int64_t at = 0; at < in; at += 256, w += Block::BYTES)
        for (int r = 0; r < R; r++) {
            DecodedGroup group;
            decode_group(Block(), w + r * row, x.scale + at / 32, group);
            for (int i = 0; i < 4; i++)
                sum[r][i % 2] = fma(products_of<TWO>(group.code[i], x.high + at + i * 64, x.low + at + i * 64),
                                    group.scale[i], sum[r][i % 2]);
            minima[r] = fma(group.minimum, load(x.sum + at / 16), minima[r]);
        }
    for (int r = 0; r < R; r++) y[r] = sum_lanes(sum[r][0] + sum[r][1] - minima[r]);
}

// The same for Q4_0, four blocks at a time; a last group of fewer blocks is filled with zeros.
template <bool TWO, int R>
static inline void multiply_row(BlockQ4_0, const uint8_t *w, int64_t row, int64_t in, const RoundedInputs &x,
                                float *y) {
    __m512 sum[R];
    for (int r = 0; r < R; r++) sum[r] = splat(0.f);
    uint8_t last[BlockQ4_0::BYTES];
    for (int64_t at = 0; at < in; at += BlockQ4_0::SIZE, w += BlockQ4_0::BYTES)
        for (int r = 0; r < R; r++) {
            const uint8_t *p = whole_group<BlockQ4_0>(w + r * row, in - at, last);
            uint16_t scales[4];
            for (int i = 0; i < 4; i++) __builtin_memcpy(scales + i, p + i * 18, 2);
            const __m512 plain = _mm512_zextps128_ps512(_mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)scales)));
            const __m512 scale = plain * _mm512_zextps128_ps512(_mm_loadu_ps(x.scale + at / 32));
            const auto codes = [&](int i) { return _mm_loadu_si128((const __m128i *)(p + i * 18 + 2)); };
            const __m256i first = _mm256_inserti128_si256(_mm256_castsi128_si256(codes(0)), codes(1), 1);
            const __m256i second = _mm256_inserti128_si256(_mm256_castsi128_si256(codes(2)), codes(3), 1);
            const __m512i two = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
            const __m512i a = nibbles(two), b = high_nibbles(two);
            __m512i products = add_products(add_products(_mm512_setzero_si512(), a, x.high + at), b, x.high + at + 64);
            if (TWO) {
                products = add_products(_mm512_slli_epi32(products, 7), a, x.low + at);
                products = add_products(products, b, x.low + at + 64);
            }
            sum[r] = fma(to_floats((vi)products), _mm512_permutexvar_ps(quarters(), scale), sum[r]);
            const __m512 offset = _mm512_permutexvar_ps(halves(), plain) * splat(-8.f);
            sum[r] = fma(offset, _mm512_maskz_loadu_ps(0xff, x.sum + at / 16), sum[r]);
        }
    for (int r = 0; r < R; r++) y[r] = sum_lanes(sum[r]);
}

}  // namespace skimkv::SKIMKV_NS
