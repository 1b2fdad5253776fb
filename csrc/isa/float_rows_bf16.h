// Products of bfloat16 weights with bfloat16 inputs by AVX512_BF16, whose instruction multiplies and adds two elements
// per lane.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "element_types.h"
#include "isa/simd_avx512.h"
#include "kernels/vector_math.h"

namespace skimkv::SKIMKV_NS {

// Multiplies R rows, `apart` weights from each other, with N tokens: the lanes of to[R*N] are the parts of a product,
// which do not depend on R and N. `in` is a multiple of 32. What is `ahead` bytes after a weight is prefetched.
template <int R, int N>
__attribute__((target("avx512bf16"))) static void multiply_rows_bf16(const bf16 *w, int64_t apart, int64_t in,
                                                                     int64_t ahead, const bf16 *x, vf *to) {
    vf sum[R][N];
    for (int r = 0; r < R; r++)
        for (int t = 0; t < N; t++) sum[r][t] = splat(0.f);
    for (int64_t at = 0; at < in; at += 32) {
        __m512bh a[R];
        for (int r = 0; r < R; r++) {
            prefetch((const char *)(w + r * apart + at) + ahead);
            a[r] = (__m512bh)_mm512_loadu_si512(w + r * apart + at);
        }
        for (int t = 0; t < N; t++) {
            const __m512bh p = (__m512bh)_mm512_loadu_si512(x + t * in + at);
            for (int r = 0; r < R; r++) sum[r][t] = _mm512_dpbf16_ps(sum[r][t], a[r], p);
        }
    }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < N; t++) to[r * N + t] = sum[r][t];
}

}  // namespace skimkv::SKIMKV_NS
