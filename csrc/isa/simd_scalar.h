// The set for any machine: vectors of four floats in the compiler's vector extension, which needs no more than the
// architecture's baseline. simd_avx512.h describes the operations.
#pragma once
#ifndef SKIMKV_NS
#define SKIMKV_NS scalar
#endif

#include "element_types.h"

namespace skimkv::SKIMKV_NS {

constexpr int W = 4;
typedef float vf __attribute__((vector_size(16)));
typedef int vi __attribute__((vector_size(16)));

static inline float as_float(f16 x) {
    uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, rest = (uint32_t)(x.bits & 0x7fff) << 13;
    float f;
    if (rest >= 0x7c00u << 13) {  // infinity or NaN
        uint32_t u = sign | rest | 0x7f800000;
        __builtin_memcpy(&f, &u, 4);
        return f;
    }
    __builtin_memcpy(&f, &rest, 4);
    f *= 0x1p112f;  // corrects the exponent's bias, and makes subnormal numbers right as well
    return sign ? -f : f;
}
static inline f16 to_f16(float x) {
    uint32_t u;
    __builtin_memcpy(&u, &x, 4);
    uint32_t sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
    if (rest > 0x7f800000) return {(uint16_t)(sign | 0x7e00)};
    if (rest >= 0x477ff000) return {(uint16_t)(sign | 0x7c00)};
    if (rest < 0x38800000) {  // a subnormal float16: adding 0.5 aligns and rounds the mantissa
        float f;
        __builtin_memcpy(&f, &rest, 4);
        f += 0.5f;
        __builtin_memcpy(&rest, &f, 4);
        return {(uint16_t)(sign | (rest - 0x3f000000))};
    }
    rest += 0xfff + (rest >> 13 & 1) - (112u << 23);
    return {(uint16_t)(sign | rest >> 13)};
}

static inline vf splat(float x) { return vf{x, x, x, x}; }
static inline vf load(const float *p) {
    vf x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}
static inline vf load(const bf16 *p) { return (vf)(vi{p[0].bits, p[1].bits, p[2].bits, p[3].bits} << 16); }
static inline vf load(const f16 *p) { return vf{as_float(p[0]), as_float(p[1]), as_float(p[2]), as_float(p[3])}; }
static inline vf load(const uint8_t *p) { return vf{(float)p[0], (float)p[1], (float)p[2], (float)p[3]}; }
static inline void store(float *p, vf x) { __builtin_memcpy(p, &x, sizeof x); }

static inline vf vmax(vf a, vf b) { return a > b ? a : b; }
static inline vf vmin(vf a, vf b) { return a < b ? a : b; }
static inline vf fma(vf a, vf b, vf c) { return a * b + c; }
static inline float sum_lanes(vf x) { return (x[0] + x[2]) + (x[1] + x[3]); }
static inline float max_lanes(vf x) {
    float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
}
static inline unsigned at_least(vf a, vf b) {
    vi m = a >= b;
    return (m[0] & 1) | (m[1] & 2) | (m[2] & 4) | (m[3] & 8);
}
static inline void interleave(vf a, vf b, vf &first, vf &second) {
    first = vf{a[0], b[0], a[1], b[1]}, second = vf{a[2], b[2], a[3], b[3]};
}

static inline vf sums_of(const vf *x) { return vf{sum_lanes(x[0]), sum_lanes(x[1]), sum_lanes(x[2]), sum_lanes(x[3])}; }

using IntegerSum = vi;
static inline vi load_int16_pairs(const int8_t *p) {
    vi x;
    for (int i = 0; i < 4; i++) x[i] = (int)(((unsigned)p[2 * i] & 0xffff) | (unsigned)p[2 * i + 1] << 16);
    return x;
}
static inline vi repeat_pair(int32_t two) { return vi{two, two, two, two}; }
static inline IntegerSum multiply_add(IntegerSum s, vi a, vi b) {
    return s + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
}
static inline vf to_floats(IntegerSum s) { return __builtin_convertvector(s, vf); }

}  // namespace skimkv::SKIMKV_NS

#include "isa/simd_loops.h"
