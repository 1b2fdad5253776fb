// The weights of GGUF blocks as codes of 8 bits and, for every part of 16 or 32 weights, a scale and an offset: a
// weight is scale * code + offset. Codes are signed where Block::BIAS is not 0.
#pragma once
#include <stdint.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "kernels/block_types.h"
#include "kernels/vector_math.h"

namespace skimkv::SKIMKV_NS {

typedef uint8_t codes __attribute__((vector_size(32)));  // of 32 weights
typedef uint16_t code_pairs __attribute__((vector_size(32)));
typedef uint64_t code_words __attribute__((vector_size(32)));

template <class T> static inline T bytes_at(const uint8_t *p) {
    T x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}
static inline float float16_at(const uint8_t *p) { return as_float(bytes_at<f16>(p)); }

// Four float16 numbers that are `apart` bytes from each other, and eight bytes as numbers: (byte - less) * factor.
#ifdef __AVX2__
static inline void four_float16(const uint8_t *p, int apart, float *to) {
    const auto at = [&](int i) { return (uint64_t)bytes_at<uint16_t>(p + i * apart) << 16 * i; };
    _mm_storeu_ps(to, _mm_cvtph_ps(_mm_cvtsi64_si128((int64_t)(at(0) | at(1) | at(2) | at(3)))));
}
static inline void eight_scales(uint64_t eight, int less, float factor, float *to) {
    const __m256i code = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)eight));
    _mm256_storeu_ps(to, _mm256_cvtepi32_ps(_mm256_sub_epi32(code, _mm256_set1_epi32(less))) * _mm256_set1_ps(factor));
}
#else
static inline void four_float16(const uint8_t *p, int apart, float *to) {
    for (int i = 0; i < 4; i++) to[i] = float16_at(p + i * apart);
}
static inline void eight_scales(uint64_t eight, int less, float factor, float *to) {
    for (int i = 0; i < 8; i++) to[i] = factor * (float)((int)(eight >> 8 * i & 255) - less);
}
#endif

// Sixteen bytes twice; 255 for every bit of four bytes that is set, else 0; and what codes of 4 bits stand for.
#ifdef __AVX2__
static inline codes load_twice(const uint8_t *p) {
    return (codes)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
}
static inline codes spread_bits(const uint8_t *p) {
    const __m256i byte_of_bit = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2,
                                                 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i bit = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(bytes_at<int32_t>(p)), byte_of_bit);
    return (codes)_mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
}
static inline codes look_up(const int8_t *values, codes four) {
    return (codes)_mm256_shuffle_epi8((__m256i)load_twice((const uint8_t *)values), (__m256i)four);
}
#else
static inline codes load_twice(const uint8_t *p) {
    const uint64_t low = bytes_at<uint64_t>(p), high = bytes_at<uint64_t>(p + 8);
    return (codes)code_words{low, high, low, high};
}
static inline codes spread_bits(const uint8_t *p) {
    const auto eight = [&](int i) { return p[i] * 0x0101010101010101u; };
    const code_words bit = {0x8040201008040201u, 0x8040201008040201u, 0x8040201008040201u, 0x8040201008040201u};
    return (codes)(((codes)(code_words{eight(0), eight(1), eight(2), eight(3)} & bit)) != 0);
}
static inline codes look_up(const int8_t *values, codes four) {
    codes found;
#ifdef SKIMKV_SIMD_NEON
    for (int i = 0; i < 32; i += 16) {
        const uint8x16_t x = vqtbl1q_u8(vld1q_u8((const uint8_t *)values), vld1q_u8((const uint8_t *)&four + i));
        vst1q_u8((uint8_t *)&found + i, x);
    }
#else
    for (int i = 0; i < 32; i++) found[i] = (uint8_t)values[four[i]];
#endif
    return found;
}
#endif

// The bits of codes, moved to the right, or to the left. What comes from the byte beside must be masked.
static inline codes moved(codes x, int bits) {
    return (codes)(bits < 0 ? (code_pairs)x << -bits : (code_pairs)x >> bits);
}

// The codes of sixteen bytes: the low halves of all, then the high ones.
static inline codes nibbles_of_sixteen(const uint8_t *p) {
    return (codes)((code_words)load_twice(p) >> code_words{0, 0, 4, 4}) & 15;
}

// What is special in one of four blocks: what its codes of 4 bits become, and the scales of all four.
static inline codes codes_of(BlockQ4_0, const uint8_t *, codes four) { return four - 8; }
static inline codes codes_of(BlockQ4_1, const uint8_t *, codes four) { return four; }
static inline codes codes_of(BlockQ5_0, const uint8_t *p, codes four) {
    return (four | (spread_bits(p + 2) & 16)) - 16;
}
static inline codes codes_of(BlockQ5_1, const uint8_t *p, codes four) { return four | (spread_bits(p + 4) & 16); }
static inline codes codes_of(BlockIQ4_NL, const uint8_t *, codes four) { return look_up(IQ4_VALUES, four); }
static inline codes codes_of(BlockMXFP4, const uint8_t *, codes four) { return look_up(MXFP4_VALUES, four); }

template <class Block> static inline void scales_of(Block, const uint8_t *p, float *scale) {
    four_float16(p, Block::ONE, scale);
}
static inline void scales_of(BlockMXFP4, const uint8_t *p, float *scale) {  // half of 2^(e-127): values are doubled
    typedef uint32_t four __attribute__((vector_size(16)));
    constexpr int ONE = BlockMXFP4::ONE;
    const four e = {p[0], p[ONE], p[2 * ONE], p[3 * ONE]}, is_tiny = (four)(e < 2);
    const four bits = (is_tiny & (0x200000u << (e & 1))) | (~is_tiny & ((e - 1) << 23));
    __builtin_memcpy(scale, &bits, sizeof bits);
}

// Decodes Block::SIZE weights. Every type has a decode().
template <class Block, int = Block::ONE>
static inline void decode(Block, const uint8_t *p, codes *code, float *scale, float *offset) {
    scales_of(Block(), p, scale);
    if (Block::HAS_OFFSET) four_float16(p + 2, Block::ONE, offset);
    for (int b = 0; b < 4; b++, p += Block::ONE) code[b] = codes_of(Block(), p, nibbles_of_sixteen(p + Block::CODES));
}

static inline void decode(BlockQ8_0, const uint8_t *p, codes *code, float *scale, float *) {
    four_float16(p, BlockQ8_0::ONE, scale);
    for (int b = 0; b < 4; b++) code[b] = bytes_at<codes>(p + b * BlockQ8_0::ONE + 2);
}

constexpr uint64_t TWO_BITS = 0x0303030303030303u, FOUR_BITS = 0x0f0f0f0f0f0f0f0fu;  // of every byte

static inline void decode(BlockIQ4_XS, const uint8_t *p, codes *code, float *scale, float *) {
    uint64_t low = bytes_at<uint32_t>(p + 4), high = bytes_at<uint16_t>(p + 2);  // spread over eight bytes
    low = (low | low << 16) & 0x0000ffff0000ffffu, high = (high | high << 24) & 0x000000ff000000ffu;
    low = (low | low << 8) & 0x00ff00ff00ff00ffu, high = (high | high << 12) & 0x000f000f000f000fu;
    low = (low | low << 4) & FOUR_BITS, high = (high | high << 6) & TWO_BITS;
    eight_scales(low | high << 4, 32, float16_at(p), scale);
    for (int b = 0; b < 8; b++) code[b] = look_up(IQ4_VALUES, nibbles_of_sixteen(p + 8 + b * 16));
}

static inline void decode(BlockQ2_K, const uint8_t *p, codes *code, float *scale, float *offset) {
    const float d = float16_at(p + 80), least = float16_at(p + 82);
    for (int half = 0; half < 2; half++) {
        const uint64_t both = bytes_at<uint64_t>(p + half * 8);
        eight_scales(both & FOUR_BITS, 0, d, scale + half * 8);
        eight_scales(both >> 4 & FOUR_BITS, 0, -least, offset + half * 8);
        const codes two = bytes_at<codes>(p + 16 + half * 32);
        for (int i = 0; i < 4; i++) code[half * 4 + i] = moved(two, 2 * i) & 3;
    }
}

static inline void decode(BlockQ3_K, const uint8_t *p, codes *code, float *scale, float *) {
    const float d = float16_at(p + 108);
    const uint64_t low = bytes_at<uint64_t>(p + 96), high = bytes_at<uint32_t>(p + 104), highs = high | high << 30;
    eight_scales((low & FOUR_BITS) | (highs & TWO_BITS) << 4, 32, d, scale);
    eight_scales((low >> 4 & FOUR_BITS) | (highs >> 4 & TWO_BITS) << 4, 32, d, scale + 8);
    const codes third = bytes_at<codes>(p);
    for (int half = 0; half < 2; half++) {
        const codes two = bytes_at<codes>(p + 32 + half * 32);
        for (int i = 0; i < 4; i++)
            code[half * 4 + i] = ((moved(two, 2 * i) & 3) | (moved(third, half * 4 + i - 2) & 4)) - 4;
    }
}

// The 6-bit scales and minima of eight parts in 12 bytes: of the first four, the low 6 bits of a byte each; of the
// others, 4 bits in the last four bytes and 2 at the top of the first eight.
static inline void decode_six_bits(const uint8_t *p, float *scale, float *offset) {
    const uint32_t a = bytes_at<uint32_t>(p + 4), b = bytes_at<uint32_t>(p + 8), c = bytes_at<uint32_t>(p + 12);
    const auto eight = [](uint32_t first, uint32_t rest) {
        return (first & 0x3f3f3f3fu) | (uint64_t)((rest & 0x0f0f0f0fu) | (first >> 2 & 0x30303030u)) << 32;
    };
    eight_scales(eight(a, c), 0, float16_at(p), scale), eight_scales(eight(b, c >> 4), 0, -float16_at(p + 2), offset);
}

static inline void decode(BlockQ4_K, const uint8_t *p, codes *code, float *scale, float *offset) {
    decode_six_bits(p, scale, offset);
    for (int part = 0; part < 4; part++) {
        const codes two = bytes_at<codes>(p + 16 + part * 32);
        code[2 * part] = two & 15, code[2 * part + 1] = moved(two, 4) & 15;
    }
}

static inline void decode(BlockQ5_K, const uint8_t *p, codes *code, float *scale, float *offset) {
    decode_six_bits(p, scale, offset);
    const codes fifth = bytes_at<codes>(p + 16);
    for (int part = 0; part < 4; part++) {
        const codes two = bytes_at<codes>(p + 48 + part * 32);
        code[2 * part] = (two & 15) | (moved(fifth, 2 * part - 4) & 16);
        code[2 * part + 1] = (moved(two, 4) & 15) | (moved(fifth, 2 * part - 3) & 16);
    }
}

static inline void decode(BlockQ6_K, const uint8_t *p, codes *code, float *scale, float *) {
    for (int half = 0; half < 2; half++) {
        const uint64_t eight = bytes_at<uint64_t>(p + 192 + half * 8) ^ 0x8080808080808080u;
        eight_scales(eight, 128, float16_at(p + 208), scale + half * 8);
        const codes a = bytes_at<codes>(p + half * 64), b = bytes_at<codes>(p + half * 64 + 32);
        const codes top = bytes_at<codes>(p + 128 + half * 32);
        codes *to = code + half * 4;
        to[0] = ((a & 15) | (moved(top, -4) & 48)) - 32, to[1] = ((b & 15) | (moved(top, -2) & 48)) - 32;
        to[2] = ((moved(a, 4) & 15) | (top & 48)) - 32, to[3] = ((moved(b, 4) & 15) | (moved(top, 2) & 48)) - 32;
    }
}

}  // namespace skimkv::SKIMKV_NS
