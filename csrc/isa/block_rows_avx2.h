// Products of GGUF blocks with rounded inputs, with AVX2: codes of 8 bits are multiplied with inputs of one byte, or of
// two, 128 * high + low, and pairs of products are added in 16 bits, which do not overflow. Signed codes are made
// positive, and the inputs get their signs, or codes of 4 bits are taken without sign, and -8 is an offset.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "isa/simd_avx2.h"
#include "kernels/block_codes.h"
#include "kernels/rounded_inputs.h"

namespace skimkv::SKIMKV_NS {

// Whether codes are taken as 4 bits without sign: the products of a block's two halves are then added in 16 bits too.
// Two blocks are decoded at once, to the first halves of both and to the second halves.
template <class Block> constexpr bool IN_PAIRS = false;
template <> constexpr bool IN_PAIRS<BlockQ4_0> = true;
template <> constexpr bool IN_PAIRS<BlockQ4_1> = true;

template <class Block>
constexpr InputOrder ORDER_OF_INPUTS = IN_PAIRS<Block> ? InputOrder::HALVES_OF_TWO : InputOrder::AS_THEY_ARE;

template <InputOrder ORDER, int>
static inline void store_inputs(const RoundedInputs &to, int64_t first, const int32_t *code, bool is_two_bytes) {
    const bool in_pairs = ORDER == InputOrder::HALVES_OF_TWO;
    for (int half = 0; half < 2; half++) {
        const int64_t at = in_pairs ? first / 64 * 64 + half * 32 + first % 64 / 2 : first + half * 16;
        const vi a = load_integers(code + half * 16), b = load_integers(code + half * 16 + W);
        const auto narrow = [](vi x, vi y) {  // to sixteen bytes
            const __m256i words = _mm256_packs_epi32((__m256i)x, (__m256i)y);
            const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
            return _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
        };
        const vi high_a = is_two_bytes ? (a + 64) >> 7 : a, high_b = is_two_bytes ? (b + 64) >> 7 : b;
        _mm_storeu_si128((__m128i *)(to.high + at), narrow(high_a, high_b));
        if (is_two_bytes) _mm_storeu_si128((__m128i *)(to.low + at), narrow(a - high_a * 128, b - high_b * 128));
    }
}

// Where the scale and the sums of a block's inputs stand. Of four blocks that are taken in pairs, the first of both
// pairs come before the second ones, as the sums of their products do.
template <InputOrder ORDER> static inline int64_t block_place(int64_t block) {
    if (ORDER != InputOrder::HALVES_OF_TWO) return block;
    return (block & ~3) | (block & 1) << 1 | (block >> 1 & 1);
}

// Four rows share what a row takes before and after its groups, which are few where a model is small.
constexpr int STREAMS_OF_ONE_TOKEN = 4;

// The scales of four blocks and their offsets, each twice, in the order of block_place.
static inline void scales_and_offsets(BlockQ4_0, const uint8_t *p, vf &scale, vf &offset) {
    __m128i four = _mm_cvtsi32_si128(bytes_at<uint16_t>(p));
    four = _mm_insert_epi16(four, bytes_at<uint16_t>(p + 2 * BlockQ4_0::ONE), 2);
    four = _mm_insert_epi16(four, bytes_at<uint16_t>(p + BlockQ4_0::ONE), 4);
    four = _mm_insert_epi16(four, bytes_at<uint16_t>(p + 3 * BlockQ4_0::ONE), 6);
    scale = _mm256_moveldup_ps(_mm256_cvtph_ps(four)), offset = scale * splat(-8.f);
}
static inline void scales_and_offsets(BlockQ4_1, const uint8_t *p, vf &scale, vf &offset) {
    const auto at = [&](int i) { return bytes_at<int32_t>(p + i * BlockQ4_1::ONE); };
    const vf both = _mm256_cvtph_ps(_mm_setr_epi32(at(0), at(2), at(1), at(3)));
    scale = _mm256_moveldup_ps(both), offset = _mm256_movehdup_ps(both);
}

// Adds the products of a group of four blocks in pairs, without those before FIRST.
template <bool TWO, int T, class Block, int FIRST>
__attribute__((always_inline)) static inline void add_pairs(const uint8_t *p, int64_t at, const RoundedInputs *x,
                                                            vf *sum) {
    const auto halves = [](const uint8_t *one, const uint8_t *other) {
        return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)one)),
                                       _mm_loadu_si128((const __m128i *)other), 1);
    };
    codes code[2][2];  // of two pairs
    for (int pair = FIRST; pair < 2; pair++) {
        const uint8_t *bytes = p + 2 * pair * Block::ONE + Block::CODES;
        const codes both = (codes)halves(bytes, bytes + Block::ONE);
        code[pair][0] = both & 15, code[pair][1] = moved(both, 4) & 15;
    }
    vf scale, offset;
    scales_and_offsets(Block(), p, scale, offset);
    const __m256i twice = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    for (int t = 0; t < T; t++) {
        const vf of_inputs = _mm256_permutevar_ps(_mm256_broadcast_ps((const __m128 *)(x[t].scale + at / 32)), twice);
        __m256i four[2] = {};  // sums of four products of a pair of blocks
        for (int pair = FIRST; pair < 2; pair++) {
            const auto products = [&](const int8_t *inputs, int factor) {
                const auto half = [&](int i) {
                    const __m256i *input = (const __m256i *)(inputs + at + pair * 64) + i;
                    return _mm256_maddubs_epi16((__m256i)code[pair][i], _mm256_loadu_si256(input));
                };
                return _mm256_madd_epi16(_mm256_add_epi16(half(0), half(1)), _mm256_set1_epi16((short)factor));
            };
            four[pair] = products(x[t].high, TWO ? 128 : 1);
            if (TWO) four[pair] = _mm256_add_epi32(four[pair], products(x[t].low, 1));
        }
        // Two sums of each block. Those of inputs of one byte fit into words: 8 * 15 * 127.
        const __m256i eight = TWO ? _mm256_hadd_epi32(four[0], four[1])
                                  : _mm256_madd_epi16(_mm256_packs_epi32(four[0], four[1]), _mm256_set1_epi16(1));
        sum[t] = fma(offset, load(x[t].sum + at / 16), sum[t]);
        sum[t] = fma(_mm256_cvtepi32_ps(eight), scale * of_inputs, sum[t]);
    }
}

// Adds the products of a group part by part.
template <bool TWO, int T, class Block>
__attribute__((always_inline)) static inline void add_parts(const uint8_t *p, int64_t at, const RoundedInputs *x,
                                                            vf *sum) {
    constexpr int VECTORS = Block::SIZE / 32;
    codes code[VECTORS];
    alignas(32) float scale[16], offset[16], both[16];
    decode(Block(), p, code, scale, offset);
    const __m256i twice = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3),
                  last_twice = _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7);
    for (int t = 0; t < T; t++) {
        const float *of_inputs = x[t].scale + at / 32, *sums = x[t].sum + at / 16;
        if (Block::PART == 16) {
            const vf eight = load(of_inputs);
            store(both, load(scale) * _mm256_permutevar8x32_ps(eight, twice));
            store(both + 8, load(scale + 8) * _mm256_permutevar8x32_ps(eight, last_twice));
        } else if (VECTORS == 8) store(both, load(scale) * load(of_inputs));
        else _mm_store_ps(both, _mm_load_ps(scale) * _mm_loadu_ps(of_inputs));
        vf of_group[2] = {splat(0.f), splat(0.f)};  // two sums, so that fewer wait for each other
        for (int j = 0; j < VECTORS; j++) {
            const __m256i signs = (__m256i)code[j], positive = Block::BIAS ? _mm256_abs_epi8(signs) : signs;
            const auto products = [&](const int8_t *inputs, int factor) {
                const __m256i input = _mm256_loadu_si256((const __m256i *)(inputs + at + j * 32));
                const __m256i pairs =
                    _mm256_maddubs_epi16(positive, Block::BIAS ? _mm256_sign_epi8(input, signs) : input);
                return _mm256_madd_epi16(pairs, _mm256_set1_epi16((short)factor));
            };
            __m256i four = products(x[t].high, TWO ? 128 : 1);
            if (TWO) four = _mm256_add_epi32(four, products(x[t].low, 1));
            vf of_lanes = _mm256_broadcast_ss(both + (Block::PART == 16 ? 2 * j : j));
            if (Block::PART == 16) of_lanes = _mm256_blend_ps(of_lanes, _mm256_broadcast_ss(both + 2 * j + 1), 0xf0);
            of_group[j % 2] = fma(_mm256_cvtepi32_ps(four), of_lanes, of_group[j % 2]);
        }
        if (Block::HAS_OFFSET && Block::PART == 16)
            for (int j = 0; j < 2; j++) of_group[j] = fma(load(offset + 8 * j), load(sums + 8 * j), of_group[j]);
        if (Block::HAS_OFFSET && Block::PART == 32) {
            const vf of_parts = VECTORS == 8 ? load(offset) : _mm256_castps128_ps256(_mm_load_ps(offset));
            of_group[0] = fma(_mm256_permutevar8x32_ps(of_parts, twice), load(sums), of_group[0]);
            if (VECTORS == 8)
                of_group[1] = fma(_mm256_permutevar8x32_ps(of_parts, last_twice), load(sums + 8), of_group[1]);
        }
        sum[t] = sum[t] + (of_group[0] + of_group[1]);
    }
}

// Adds the products of a group, whose first column is `at`, with T tokens to sum[T]. Its first `zeros` inputs are 0.
template <bool TWO, int T, class Block>
__attribute__((always_inline)) static inline void add_group(const uint8_t *p, int64_t at, int64_t zeros,
                                                            const RoundedInputs *x, vf *sum) {
    if constexpr (IN_PAIRS<Block>) {
        if (zeros >= 64) return add_pairs<TWO, T, Block, 1>(p, at, x, sum);
        return add_pairs<TWO, T, Block, 0>(p, at, x, sum);
    } else add_parts<TWO, T, Block>(p, at, x, sum);
}

}  // namespace skimkv::SKIMKV_NS
