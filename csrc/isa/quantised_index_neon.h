// Integer sums of codes with NEON. Of 8 bits: the 16-bit weight of one channel times the codes of eight tokens, summed
// in 32 bits. Of 4 bits: the 8-bit weight, summed in 16 bits over the channels that are read at once.
#pragma once
#include <arm_neon.h>
#include <stdint.h>

#include "isa/simd_neon.h"
#include "kernels/channel_sums.h"
#include "kernels/quantised_index_weights.h"
#include "kernels/vector_math.h"

namespace skimkv::SKIMKV_NS {

// Joins the two bytes of the weights of CHANNELS_AT_ONCE channels of query g.
static inline void join_weight_bytes(const TileWeights &w, int g, int16_t *word) {
    const int64_t at = g * w.query_ld;
    const int32_t high[2] = {w.high[at], w.high[at + w.quad_ld]}, low[2] = {w.low[at], w.low[at + w.quad_ld]};
    const int16x8_t top = vshll_n_s8(vld1_s8((const int8_t *)high), 8);
    vst1q_s16(word, vaddw_s8(top, vld1_s8((const int8_t *)low)));
}
static_assert(CHANNELS_AT_ONCE == 8, "two 32-bit words of weights");

// The sums before the channels are added, and what is stored of them after that: logits if the channels were the LAST.
template <bool FIRST> static inline int32x4_t initial_sum(const float *s) {
    return FIRST ? vdupq_n_s32(0) : vreinterpretq_s32_f32(vld1q_f32(s));
}
template <bool LAST> static inline void store_sum(int32x4_t sum, const TileWeights &w, int g, float *s) {
    const vf step = splat(w.step[g * w.float_ld]), init = splat(w.init[g * w.float_ld]);
    store(s, LAST ? fma(vcvtq_f32_s32(sum), step, init) : vreinterpretq_f32_s32(sum));
}
// Adds the products of eight codes with a weight to eight sums.
static inline void multiply_add_codes(int32x4_t *sum, uint16x8_t codes, int16_t weight) {
    const int16x8_t x = vreinterpretq_s16_u16(codes);
    sum[0] = vmlal_n_s16(sum[0], vget_low_s16(x), weight), sum[1] = vmlal_high_n_s16(sum[1], x, weight);
}

// Adds 32 tokens of 8-bit codes for query g.
template <bool FIRST, bool LAST>
static inline void add_int8_tokens(const uint8_t *const *p, const uint8_t *const *ahead, int64_t x,
                                   const TileWeights &w, int g, const int16_t *word, float *s) {
    int32x4_t sum[8];
    for (int i = 0; i < 8; i++) sum[i] = initial_sum<FIRST>(s + 4 * i);
#pragma GCC unroll 8
    for (int c = 0; c < CHANNELS_AT_ONCE; c++) {
        const uint8x16_t a = vld1q_u8(p[c] + x), b = vld1q_u8(p[c] + x + 16);
        prefetch(ahead[c] + x);
        multiply_add_codes(sum, vmovl_u8(vget_low_u8(a)), word[c]);
        multiply_add_codes(sum + 2, vmovl_high_u8(a), word[c]);
        multiply_add_codes(sum + 4, vmovl_u8(vget_low_u8(b)), word[c]);
        multiply_add_codes(sum + 6, vmovl_high_u8(b), word[c]);
    }
    for (int i = 0; i < 8; i++) store_sum<LAST>(sum[i], w, g, s + 4 * i);
}

// Adds 128 tokens of 4-bit codes: those of bytes e, e+4, .. are the tokens 32*e .. 32*e+15, and in the high nibbles the
// next sixteen.
template <bool FIRST, bool LAST, int GB>
static inline void add_int4_tokens(const uint8_t *const *p, const uint8_t *const *ahead, int64_t x,
                                   const TileWeights &w, float *s, int64_t ld) {
    static_assert(CHANNELS_AT_ONCE * 15 * 127 <= INT16_MAX, "the sums fit into words");
    int8x16_t codes[CHANNELS_AT_ONCE][8];
    for (int c = 0; c < CHANNELS_AT_ONCE; c++) {
        const uint8x16x4_t bytes = vld4q_u8(p[c] + x);
        prefetch(ahead[c] + x);
        for (int e = 0; e < 4; e++) {
            codes[c][2 * e] = vreinterpretq_s8_u8(vandq_u8(bytes.val[e], vdupq_n_u8(15)));
            codes[c][2 * e + 1] = vreinterpretq_s8_u8(vshrq_n_u8(bytes.val[e], 4));
        }
    }
    for (int g = 0; g < GB; g++, s += ld) {
        int16x8_t sum[8][2] = {};
        for (int c = 0; c < CHANNELS_AT_ONCE; c++) {
            const int8x8_t weight = vdup_n_s8((int8_t)(w.low[g * w.query_ld + c / 4 * w.quad_ld] >> 8 * (c % 4)));
            for (int i = 0; i < 8; i++) {
                sum[i][0] = vmlal_s8(sum[i][0], vget_low_s8(codes[c][i]), weight);
                sum[i][1] = vmlal_s8(sum[i][1], vget_high_s8(codes[c][i]), weight);
            }
        }
        for (int i = 0; i < 8; i++)
            for (int j = 0; j < 2; j++) {
                float *to = s + 16 * i + 8 * j;
                store_sum<LAST>(vaddw_s16(initial_sum<FIRST>(to), vget_low_s16(sum[i][j])), w, g, to);
                store_sum<LAST>(vaddw_high_s16(initial_sum<FIRST>(to + 4), sum[i][j]), w, g, to + 4);
            }
    }
}

template <bool FOUR, bool FIRST, bool LAST, int GB>
static inline void add_quantised_group(const uint8_t *const *p, const uint8_t *const *ahead, int64_t at,
                                       const TileWeights &w, float *s, int64_t ld) {
    for (int i = 0; i < 2 && FOUR; i++) add_int4_tokens<FIRST, LAST, GB>(p, ahead, at / 2 + i * 64, w, s + i * 128, ld);
    for (int g = 0; g < GB && !FOUR; g++) {
        int16_t word[CHANNELS_AT_ONCE];
        join_weight_bytes(w, g, word);
        for (int i = 0; i < 8; i++)
            add_int8_tokens<FIRST, LAST>(p, ahead, at + i * 32, w, g, word, s + g * ld + i * 32);
    }
}

}  // namespace skimkv::SKIMKV_NS
