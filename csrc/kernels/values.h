// What stands between the products of a layer, value by value: the middle of a gated feed-forward layer, which is
// activation(gate) * up with activation(x) = x / (1 + e^-z), and residual sums.
#pragma once
#include <stdint.h>

#include "kernels/vector_math.h"

namespace skimkv::SKIMKV_NS {

constexpr float GELU_FACTOR = 1.5957691216f, GELU_CUBE = .0713548163f;  // sqrt(8/pi), and .044715 times that

// Values are rounded to their type after the activation and after the product, as PyTorch rounds them.
template <class T> static void gate_values(bool is_gelu, T *gate, const T *up, int64_t count) {
    constexpr int PART = 64;
    for (int64_t at = 0; at < count; at += PART) {
        const int n = (int)min(PART, count - at);
        float value[PART] = {}, factor[PART] = {};
        T rounded[PART];
        to_float(gate + at, value, n), to_float(up + at, factor, n);
        for (int i = 0; i < n; i += W) {
            const vf x = load(value + i);
            const vf z = is_gelu ? x * fma(x * splat(GELU_CUBE), x, splat(GELU_FACTOR)) : x;
            const vf power = vmin(splat(126.f), vmax(splat(-126.f), z * splat(-LOG2E)));
            store(value + i, x / (splat(1.f) + exp2(power)));
        }
        from_float(value, rounded, n), to_float(rounded, value, n);
        for (int i = 0; i < n; i++) value[i] *= factor[i];
        from_float(value, gate + at, n);
    }
}

// Writes activation(gate) * up to `gate`.
static void gate(int dtype, int activation, void *gate, const void *up, int64_t count) {
    const bool is_gelu = activation == SKIMKV_GELU_TANH;
    if (dtype == SKIMKV_F32) gate_values(is_gelu, (float *)gate, (const float *)up, count);
    else if (dtype == SKIMKV_BF16) gate_values(is_gelu, (bf16 *)gate, (const bf16 *)up, count);
    else gate_values(is_gelu, (f16 *)gate, (const f16 *)up, count);
}

template <class T> static void add_values(T *to, const T *from, int64_t count) {
    constexpr int PART = 64;
    for (int64_t at = 0; at < count; at += PART) {
        const int n = (int)min(PART, count - at);
        float sum[PART], more[PART];
        to_float(to + at, sum, n), to_float(from + at, more, n);
        for (int i = 0; i < n; i++) sum[i] += more[i];
        from_float(sum, to + at, n);
    }
}

// Adds `from` to `to`.
static void add(int dtype, void *to, const void *from, int64_t count) {
    if (dtype == SKIMKV_F32) add_values((float *)to, (const float *)from, count);
    else if (dtype == SKIMKV_BF16) add_values((bf16 *)to, (const bf16 *)from, count);
    else add_values((f16 *)to, (const f16 *)from, count);
}

}  // namespace skimkv::SKIMKV_NS
