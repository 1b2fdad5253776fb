// Products of GGUF blocks with rounded inputs, with AVX2: codes of 8 bits are multiplied with inputs of one byte, or of
// two, 128 * high + low, and pairs of products are added in 16 bits, which do not overflow: signed codes are made
// positive, and the inputs get their signs.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "isa/simd_avx2.h"
#include "kernels/block_codes.h"
#include "kernels/rounded_inputs.h"

namespace skimkv::SKIMKV_NS {

template <InputOrder, int>
static inline void store_inputs(const RoundedInputs &to, int64_t at, const int32_t *code, bool is_two_bytes) {
    for (int i = 0; i < 32; i++) {
        const int32_t high = is_two_bytes ? (code[i] + 64) >> 7 : code[i];
        to.high[at + i] = (int8_t)high, to.low[at + i] = (int8_t)(code[i] - high * 128);
    }
}

constexpr int PREFETCH_AHEAD = 2048;  // bytes: decoding hides less of the memory's latency than plain loads do

// Adds the products of a group, whose first column is `at`, with T tokens to sum[T].
template <bool TWO, int T, class Block>
__attribute__((always_inline)) static inline void add_group(const uint8_t *p, int64_t at, const RoundedInputs *x,
                                                            vf *sum) {
    constexpr int VECTORS = Block::SIZE / 32;
    codes code[VECTORS];
    alignas(32) float scale[16], offset[16], both[16];
    for (int i = 0; i < Block::BYTES; i += 64) prefetch(p + PREFETCH_AHEAD + i);
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

}  // namespace skimkv::SKIMKV_NS
