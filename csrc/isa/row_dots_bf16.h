// Dot products of bfloat16 queries with bfloat16 rows by AVX512_BF16, whose instruction multiplies two elements per
// lane. It is used where a row meets several queries; with one query, memory is the bound.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "element_types.h"
#include "isa/simd_avx512.h"
#include "kernels/row_attention.h"
#include "kernels/vector_math.h"

namespace skimkv::SKIMKV_NS {

// s[g*ld + j] = scale * (q_g . row_j) for GB queries and W rows. q is [GB][P], P a multiple of 32, zero beyond D.
template <int D_, int GB>
__attribute__((target("avx512bf16"))) static void dot_block_bf16(const bf16 *q, int P, int D, const bf16 *const *rows,
                                                                 float scale, float *s, int64_t ld,
                                                                 const NextRows<bf16> &next) {
    vf part[GB][W];
    const int n = D_ ? D_ : D, whole = n / 32 * 32;
    for (int j = 0; j < W; j++) {
        const bf16 *x = rows[j];
        if (GB > 1) next.prefetch_line(j, 0, n);
        vf a[GB] = {};
        int i = 0;
#pragma GCC unroll 8
        for (; i < whole; i += 32) {
            const __m512bh y = (__m512bh)_mm512_loadu_si512(x + i);
            for (int g = 0; g < GB; g++) a[g] = _mm512_dpbf16_ps(a[g], y, (__m512bh)_mm512_loadu_si512(q + g * P + i));
        }
        if (i < n) {
            const __m512bh y = (__m512bh)_mm512_maskz_loadu_epi16((1u << (n - i)) - 1, x + i);
            for (int g = 0; g < GB; g++) a[g] = _mm512_dpbf16_ps(a[g], y, (__m512bh)_mm512_loadu_si512(q + g * P + i));
        }
        for (int g = 0; g < GB; g++) part[g][j] = a[g];
    }
    for (int g = 0; g < GB; g++) store(s + g * ld, sums_of(part[g]) * splat(scale));
}

// s[g*ld + j] = scale * (q_g . row_j) for G queries and n rows, with the padding of dot_rows.
template <int D_>
static void dot_rows_bf16(const bf16 *q, int P, int G, int D, const bf16 *const *rows, int n, float scale, float *s,
                          int64_t ld, const bf16 *const *next) {
    for (int j = 0; j < n; j += W) {
        NextRows<bf16> ahead{next ? next + j : next, 0, query_groups(G)};
        int g = 0;
        for (; g + 4 <= G; g += 4, ahead.group++)
            dot_block_bf16<D_, 4>(q + g * P, P, D, rows + j, scale, s + g * ld + j, ld, ahead);
        if (g + 2 <= G) dot_block_bf16<D_, 2>(q + g * P, P, D, rows + j, scale, s + g * ld + j, ld, ahead), g += 2;
        if (g < G) dot_block_bf16<D_, 1>(q + g * P, P, D, rows + j, scale, s + g * ld + j, ld, ahead);
    }
}

}  // namespace skimkv::SKIMKV_NS
