// The rotation of rows of 4 bits by an orthonormal Hadamard matrix, which is its own inverse. It spreads a channel that
// is much larger than the others over all of its span, so that the span's few codes serve all channels alike (QuaRot,
// Ashkboos et al., arXiv 2404.00456).
//
// Products do not change: q.k is that of the rotated q and k. So a query is rotated once, and the weighted sum of
// rotated values is rotated back once. Sums have the order of src/skimkv/stores/quantise.py, and so the same rounding.
#pragma once
#include <stdint.h>

#include "kernels/vector_math.h"
#include "skimkv.h"

namespace skimkv::SKIMKV_NS {

// Rotates n numbers, a power of two: n/2 sums and n/2 differences of the two halves take turns, log2(n) times.
static inline void rotate_few(float *x, int n) {
    for (int i = 1; i < n; i *= 2) {
        float y[SKIMKV_ROW_SPAN];
        for (int j = 0; j < n / 2; j++) y[2 * j] = x[j] + x[n / 2 + j], y[2 * j + 1] = x[j] - x[n / 2 + j];
        __builtin_memcpy(x, y, n * sizeof(float));
    }
    const float scale = (float)(1 / __builtin_sqrt((double)n));
    for (int j = 0; j < n; j++) x[j] *= scale;
}

// The same of a whole span, in vectors.
static inline void rotate_span(float *x) {
    constexpr int N = SKIMKV_ROW_SPAN / W;
    vf v[N], y[N];
    for (int j = 0; j < N; j++) v[j] = load(x + j * W);
#pragma GCC unroll 6
    for (int i = 1; i < SKIMKV_ROW_SPAN; i *= 2) {
#pragma GCC unroll 8
        for (int j = 0; j < N / 2; j++) interleave(v[j] + v[N / 2 + j], v[j] - v[N / 2 + j], y[2 * j], y[2 * j + 1]);
#pragma GCC unroll 16
        for (int j = 0; j < N; j++) v[j] = y[j];
    }
    for (int j = 0; j < N; j++) store(x + j * W, v[j] * splat(0.125f));
    static_assert(SKIMKV_ROW_SPAN == 64, "the scale is one over its root");
}

// Rotates the D channels of a row, each span by itself; a shorter last span in blocks of the largest power of two that
// divides it. It is not inlined, so that its products are rounded before anything is added to them.
__attribute__((noinline)) static void rotate_row(float *x, int D) {
    for (; D >= SKIMKV_ROW_SPAN; D -= SKIMKV_ROW_SPAN, x += SKIMKV_ROW_SPAN) rotate_span(x);
    for (const int n = D & -D; D > 0; D -= n, x += n) rotate_few(x, n);
}

}  // namespace skimkv::SKIMKV_NS
