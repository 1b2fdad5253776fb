// Integer products of codes with NEON: 16-bit weights of one channel times codes of eight tokens, summed in 32 bits.
#pragma once

namespace skimkv::SKIMKV_NS {

// A tile's weights of one set of channels, their two bytes joined.
static inline void joined(const Weights &w, int16_t *word) {
    const int32_t high[2] = {w.high[0], w.high[w.ld]}, low[2] = {w.low[0], w.low[w.ld]};
    const int16x8_t top = vshll_n_s8(vld1_s8((const int8_t *)high), 8);
    vst1q_s16(word, vaddw_s8(top, vld1_s8((const int8_t *)low)));
}
static_assert(TOGETHER == 8, "two dwords of weights");

template <bool FIRST> static inline int32x4_t begun(const float *s) {
    return FIRST ? vdupq_n_s32(0) : vreinterpretq_s32_f32(vld1q_f32(s));
}
template <bool LAST> static inline void kept(int32x4_t sum, const Weights &w, float *s) {
    put(s, LAST ? fma(vcvtq_f32_s32(sum), splat(w.step), splat(w.init)) : vreinterpretq_f32_s32(sum));
}
static inline void add(int32x4_t *sum, uint16x8_t codes, int16_t weight) {
    const int16x8_t x = vreinterpretq_s16_u16(codes);
    sum[0] = vmlal_n_s16(sum[0], vget_low_s16(x), weight), sum[1] = vmlal_high_n_s16(sum[1], x, weight);
}

// 32 tokens of int8 codes.
template <bool FIRST, bool LAST>
static inline void coded8(const uint8_t *const *p, const uint8_t *const *ahead, int64_t x, const Weights &w, const int16_t *word, float *s) {
    int32x4_t sum[8];
    for (int i = 0; i < 8; i++) sum[i] = begun<FIRST>(s + 4 * i);
#pragma GCC unroll 8
    for (int c = 0; c < TOGETHER; c++) {
        const uint8x16_t a = vld1q_u8(p[c] + x), b = vld1q_u8(p[c] + x + 16);
        prefetch(ahead[c] + x);
        add(sum, vmovl_u8(vget_low_u8(a)), word[c]), add(sum + 2, vmovl_high_u8(a), word[c]);
        add(sum + 4, vmovl_u8(vget_low_u8(b)), word[c]), add(sum + 6, vmovl_high_u8(b), word[c]);
    }
    for (int i = 0; i < 8; i++) kept<LAST>(sum[i], w, s + 4 * i);
}

// 64 tokens of int4 codes: nibble n of dword d is token 16 * n + d, and nibbles 4 * HALF .. 4 * HALF + 3 are taken.
template <bool FIRST, bool LAST, int HALF>
static inline void coded4(const uint8_t *const *p, const uint8_t *const *ahead, int64_t x, const Weights &w, const int16_t *word, float *s) {
    const uint16x8_t nibble = vdupq_n_u16(15);
    int32x4_t sum[4][4];
    for (int n = 0; n < 4; n++)
        for (int i = 0; i < 4; i++) sum[n][i] = begun<FIRST>(s + 16 * n + 4 * i);
#pragma GCC unroll 8
    for (int c = 0; c < TOGETHER; c++) {
        if (HALF == 0) prefetch(ahead[c] + x);
        for (int i = 0; i < 2; i++) {  // eight dwords, of which one half each
            const uint16x8_t codes = vld2q_u16((const uint16_t *)(p[c] + x + 32 * i)).val[HALF];
            add(sum[0] + 2 * i, vandq_u16(codes, nibble), word[c]);
            add(sum[1] + 2 * i, vandq_u16(vshrq_n_u16(codes, 4), nibble), word[c]);
            add(sum[2] + 2 * i, vandq_u16(vshrq_n_u16(codes, 8), nibble), word[c]);
            add(sum[3] + 2 * i, vshrq_n_u16(codes, 12), word[c]);
        }
    }
    for (int n = 0; n < 4; n++)
        for (int i = 0; i < 4; i++) kept<LAST>(sum[n][i], w, s + 16 * n + 4 * i);
}

template <bool FOUR, bool FIRST, bool LAST>
static inline void coded_group(const uint8_t *const *p, const uint8_t *const *ahead, int64_t at, const Weights &w, float *s) {
    int16_t word[TOGETHER];
    joined(w, word);
    for (int i = 0; i < 2 && FOUR; i++) {
        coded4<FIRST, LAST, 0>(p, ahead, at / 2 + i * 64, w, word, s + i * 128);
        coded4<FIRST, LAST, 1>(p, ahead, at / 2 + i * 64, w, word, s + i * 128 + 64);
    }
    for (int i = 0; i < 8 && !FOUR; i++) coded8<FIRST, LAST>(p, ahead, at + i * 32, w, word, s + i * 32);
}

}  // namespace skimkv::SKIMKV_NS
