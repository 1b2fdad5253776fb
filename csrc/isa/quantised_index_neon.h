// Integer sums of codes with NEON: the 16-bit weight of one channel times the codes of eight tokens, summed in 32 bits.
#pragma once
#include <arm_neon.h>
#include <stdint.h>

#include "isa/simd_neon.h"
#include "kernels/channel_sums.h"
#include "kernels/quantised_index_weights.h"
#include "kernels/vector_math.h"

namespace skimkv::SKIMKV_NS {

// Joins the two bytes of the weights of CHANNELS_AT_ONCE channels.
static inline void join_weight_bytes(const TileWeights &w, int16_t *word) {
    const int32_t high[2] = {w.high[0], w.high[w.ld]}, low[2] = {w.low[0], w.low[w.ld]};
    const int16x8_t top = vshll_n_s8(vld1_s8((const int8_t *)high), 8);
    vst1q_s16(word, vaddw_s8(top, vld1_s8((const int8_t *)low)));
}
static_assert(CHANNELS_AT_ONCE == 8, "two 32-bit words of weights");

// The sums before the channels are added, and what is stored of them after that: logits if the channels were the LAST.
template <bool FIRST> static inline int32x4_t initial_sum(const float *s) {
    return FIRST ? vdupq_n_s32(0) : vreinterpretq_s32_f32(vld1q_f32(s));
}
template <bool LAST> static inline void store_sum(int32x4_t sum, const TileWeights &w, float *s) {
    store(s, LAST ? fma(vcvtq_f32_s32(sum), splat(w.step), splat(w.init)) : vreinterpretq_f32_s32(sum));
}
// Adds the products of eight codes with a weight to eight sums.
static inline void multiply_add_codes(int32x4_t *sum, uint16x8_t codes, int16_t weight) {
    const int16x8_t x = vreinterpretq_s16_u16(codes);
    sum[0] = vmlal_n_s16(sum[0], vget_low_s16(x), weight), sum[1] = vmlal_high_n_s16(sum[1], x, weight);
}

// Adds 32 tokens of 8-bit codes.
template <bool FIRST, bool LAST>
static inline void add_int8_tokens(const uint8_t *const *p, const uint8_t *const *ahead, int64_t x,
                                   const TileWeights &w, const int16_t *word, float *s) {
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
    for (int i = 0; i < 8; i++) store_sum<LAST>(sum[i], w, s + 4 * i);
}

// Adds 64 tokens of 4-bit codes: nibble n of 32-bit word d is token 16*n + d. Of a block of 128 tokens this takes the
// nibbles 4*HALF .. 4*HALF+3.
template <bool FIRST, bool LAST, int HALF>
static inline void add_int4_tokens(const uint8_t *const *p, const uint8_t *const *ahead, int64_t x,
                                   const TileWeights &w, const int16_t *word, float *s) {
    const uint16x8_t nibble = vdupq_n_u16(15);
    int32x4_t sum[4][4];
    for (int n = 0; n < 4; n++)
        for (int i = 0; i < 4; i++) sum[n][i] = initial_sum<FIRST>(s + 16 * n + 4 * i);
#pragma GCC unroll 8
    for (int c = 0; c < CHANNELS_AT_ONCE; c++) {
        if (HALF == 0) prefetch(ahead[c] + x);
        for (int i = 0; i < 2; i++) {  // eight words, of which one half each
            const uint16x8_t codes = vld2q_u16((const uint16_t *)(p[c] + x + 32 * i)).val[HALF];
            multiply_add_codes(sum[0] + 2 * i, vandq_u16(codes, nibble), word[c]);
            multiply_add_codes(sum[1] + 2 * i, vandq_u16(vshrq_n_u16(codes, 4), nibble), word[c]);
            multiply_add_codes(sum[2] + 2 * i, vandq_u16(vshrq_n_u16(codes, 8), nibble), word[c]);
            multiply_add_codes(sum[3] + 2 * i, vshrq_n_u16(codes, 12), word[c]);
        }
    }
    for (int n = 0; n < 4; n++)
        for (int i = 0; i < 4; i++) store_sum<LAST>(sum[n][i], w, s + 16 * n + 4 * i);
}

template <bool FOUR, bool FIRST, bool LAST>
static inline void add_quantised_group(const uint8_t *const *p, const uint8_t *const *ahead, int64_t at,
                                       const TileWeights &w, float *s) {
    int16_t word[CHANNELS_AT_ONCE];
    join_weight_bytes(w, word);
    for (int i = 0; i < 2 && FOUR; i++) {
        add_int4_tokens<FIRST, LAST, 0>(p, ahead, at / 2 + i * 64, w, word, s + i * 128);
        add_int4_tokens<FIRST, LAST, 1>(p, ahead, at / 2 + i * 64, w, word, s + i * 128 + 64);
    }
    for (int i = 0; i < 8 && !FOUR; i++) add_int8_tokens<FIRST, LAST>(p, ahead, at + i * 32, w, word, s + i * 32);
}

}  // namespace skimkv::SKIMKV_NS
