// NEON of arm64: vectors of four floats. simd_avx512.h describes the operations.
#pragma once
#ifndef SKIMKV_NS
#define SKIMKV_NS neon
#endif
#define SKIMKV_SIMD_NEON

#include <arm_neon.h>

#include "element_types.h"

namespace skimkv::SKIMKV_NS {

constexpr int W = 4;
using vf = float32x4_t;
using vi = int32x4_t;

static inline vf splat(float x) { return vdupq_n_f32(x); }
static inline vf load(const float *p) { return vld1q_f32(p); }
static inline vf load(const bf16 *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16)); }
static inline vf load(const f16 *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
static inline vf load(const uint8_t *p) {
    uint32_t four;
    __builtin_memcpy(&four, p, 4);
    uint16x8_t wide = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)));
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)));
}
static inline void store(float *p, vf x) { vst1q_f32(p, x); }

static inline vf vmax(vf a, vf b) { return vmaxq_f32(a, b); }
static inline vf vmin(vf a, vf b) { return vminq_f32(a, b); }
static inline vf fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
static inline float sum_lanes(vf x) { return vaddvq_f32(x); }
static inline float max_lanes(vf x) { return vmaxvq_f32(x); }
static inline unsigned at_least(vf a, vf b) {
    const int32_t bit[4] = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(vcgeq_f32(a, b), vreinterpretq_u32_s32(vld1q_s32(bit))));
}
static inline void interleave(vf a, vf b, vf &first, vf &second) {
    first = vzip1q_f32(a, b), second = vzip2q_f32(a, b);
}

static inline vf sums_of(const vf *x) { return vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3])); }

static inline float as_float(f16 x) {
    __fp16 h;
    __builtin_memcpy(&h, &x, 2);
    return h;
}
static inline f16 to_f16(float x) {
    __fp16 h = (__fp16)x;
    f16 y;
    __builtin_memcpy(&y, &h, 2);
    return y;
}

struct IntegerSum {
    int32x4_t low, high;
};
static inline vi load_int16_pairs(const int8_t *p) { return vreinterpretq_s32_s16(vmovl_s8(vld1_s8(p))); }
static inline vi repeat_pair(int32_t two) { return vdupq_n_s32(two); }
static inline IntegerSum multiply_add(IntegerSum s, vi a, vi b) {
    int16x8_t x = vreinterpretq_s16_s32(a), y = vreinterpretq_s16_s32(b);
    return {vmlal_s16(s.low, vget_low_s16(x), vget_low_s16(y)), vmlal_high_s16(s.high, x, y)};
}
static inline vf to_floats(IntegerSum s) { return vcvtq_f32_s32(vpaddq_s32(s.low, s.high)); }

}  // namespace skimkv::SKIMKV_NS

#include "isa/simd_loops.h"
