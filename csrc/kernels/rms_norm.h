// Root-mean-square normalisation, as models have it between their layers: y = w * x / sqrt(mean(x^2) + eps) of every
// token. The mean and the division are of 32 bits; the quotient is rounded to the tokens' type before the product,
// unless the factor is 1 + w.
#pragma once
#include <stdint.h>

#include "kernel_table.h"
#include "kernels/vector_math.h"
#include "skimkv.h"

namespace skimkv::SKIMKV_NS {

template <class T> static float sum_of_squares(const T *x, int64_t size) {
    constexpr int CHAINS = 4;  // a single sum would wait for itself
    vf sums[CHAINS] = {};
    int64_t i = 0;
    for (; i + CHAINS * W <= size; i += CHAINS * W)
        for (int c = 0; c < CHAINS; c++) {
            const vf value = load(x + i + c * W);
            sums[c] = fma(value, value, sums[c]);
        }
    float sum = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < size; i++) sum += as_float(x[i]) * as_float(x[i]);
    return sum;
}

template <class T> static void normalise(const T *x, const T *w, int64_t size, float eps, bool adds_one, T *y) {
    constexpr int PART = 64;
    const float factor = 1 / __builtin_sqrtf(sum_of_squares(x, size) / (float)size + eps);
    for (int64_t at = 0; at < size; at += PART) {
        const int n = (int)min(PART, size - at);
        float value[PART], weight[PART];
        T rounded[PART];
        to_float(x + at, value, n), to_float(w + at, weight, n);
        for (int i = 0; i < n; i++) value[i] *= factor;
        if (!adds_one) from_float(value, rounded, n), to_float(rounded, value, n);
        for (int i = 0; i < n; i++) value[i] *= adds_one ? 1 + weight[i] : weight[i];
        from_float(value, y + at, n);
    }
}

template <class T>
static void normalise_tokens(const skimkv_rms_norm *op, const Tokens &tokens, int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++)
        normalise((const T *)tokens.x + t * op->size, (const T *)op->w, op->size, op->eps, op->adds_one,
                  (T *)tokens.y + t * op->size);
}

// Normalises the tokens first .. last-1.
static void rms_norm(const skimkv_rms_norm *op, const Tokens &tokens, int64_t first, int64_t last) {
    if (op->dtype == SKIMKV_F32) normalise_tokens<float>(op, tokens, first, last);
    else if (op->dtype == SKIMKV_BF16) normalise_tokens<bf16>(op, tokens, first, last);
    else normalise_tokens<f16>(op, tokens, first, last);
}

}  // namespace skimkv::SKIMKV_NS
