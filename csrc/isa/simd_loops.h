// Vector operations as loops over lanes, for sets of four lanes without an instruction for them. simd_avx512.h
// describes the operations.
#pragma once
#include <stdint.h>

#include "isa/simd.h"

namespace skimkv::SKIMKV_NS {

template <class T> static inline vf load8(const T *p) { return load(p); }
template <class T> static inline void load_pair(const T *p, vf &a, vf &b) { a = load(p), b = load(p + W); }
template <class T> static inline void restore_order(const T *, vf &, vf &) {}

// The two parts of exp2: x - floor(x), and p * 2^floor(x), or 0 up to -126. Adding 1.5 * 2^23 + 127 rounds a float to
// an integer, whose low bits are then the exponent of 2^floor(x). NaN stays NaN, since p is multiplied.
constexpr float ROUNDS_TO_EXPONENT = 12582912 + 127;
static inline vf exponent(vf x) { return vmax(splat(-126.f), x) - splat(0.5f) + splat(ROUNDS_TO_EXPONENT); }
static inline vf fraction(vf x) { return vmax(splat(-126.f), x) - (exponent(x) - splat(ROUNDS_TO_EXPONENT)); }
static inline vf times_power(vf p, vf x) {
    return (vf)((vi)(p * (vf)((vi)exponent(x) << 23)) & ~(vi)(x < splat(-126.f)));
}

static inline vf load_first(const float *p, int64_t count) {
    vf x = {};
    for (int i = 0; i < W && i < count; i++) x[i] = p[i];
    return x;
}

static inline void transpose(vf *x) {
    for (int i = 0; i < W; i++)
        for (int j = 0; j < i; j++) {
            const float below = x[i][j];
            x[i][j] = x[j][i], x[j][i] = below;
        }
}

}  // namespace skimkv::SKIMKV_NS
