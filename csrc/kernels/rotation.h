// Rotary position embeddings: channels d and d + D/2 of a head are a point in a plane, and are turned by an angle.
#pragma once
#include <stdint.h>

#include "kernels/vector_math.h"
#include "skimkv.h"

namespace skimkv::SKIMKV_NS {

// Rounds n numbers to type T.
template <class T> static void round_floats(float *x, int n) {
    T rounded[SKIMKV_MAX_HEAD];
    from_float(x, rounded, n), to_float(rounded, x, n);
}

// Products and sums are rounded to their type one by one, as PyTorch rounds them.
template <class T> static void rotate_heads(const T *cos, const T *sin, int64_t heads, int D, T *x) {
    float c[SKIMKV_MAX_HEAD], s[SKIMKV_MAX_HEAD], from[SKIMKV_MAX_HEAD], turned[SKIMKV_MAX_HEAD];
    const int half = D / 2;
    to_float(cos, c, D), to_float(sin, s, D);
    for (int64_t head = 0; head < heads; head++, x += D) {
        to_float(x, from, D);
        for (int i = 0; i < half; i++) turned[i] = -from[i + half] * s[i];
        for (int i = half; i < D; i++) turned[i] = from[i - half] * s[i];
        for (int i = 0; i < D; i++) from[i] *= c[i];
        round_floats<T>(from, D), round_floats<T>(turned, D);
        for (int i = 0; i < D; i++) from[i] += turned[i];
        from_float(from, x, D);
    }
}

// Turns the heads x [heads,D] of one token by the angles whose cosines and sines are given, both [D].
static void rotate(int dtype, const void *cos, const void *sin, int64_t heads, int D, void *x) {
    if (dtype == SKIMKV_F32) rotate_heads((const float *)cos, (const float *)sin, heads, D, (float *)x);
    else if (dtype == SKIMKV_BF16) rotate_heads((const bf16 *)cos, (const bf16 *)sin, heads, D, (bf16 *)x);
    else rotate_heads((const f16 *)cos, (const f16 *)sin, heads, D, (f16 *)x);
}

}  // namespace skimkv::SKIMKV_NS
