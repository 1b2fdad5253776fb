// Dot products of bfloat16 queries with bfloat16 rows by AVX512_BF16, whose instruction multiplies two elements per
// lane. It is used where a row meets four queries or more; with fewer, memory is the bound.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "element_types.h"
#include "isa/simd_avx512.h"
#include "kernels/row_attention.h"
#include "kernels/vector_math.h"

namespace skimkv::SKIMKV_NS {

// The dot products of GB queries with a row, 16 sums each. q is [GB][P], P a multiple of 32, zero beyond D.
template <int D_, int GB>
__attribute__((target("avx512bf16"))) static inline void dot_row_bf16(const bf16 *q, int P, int D, const bf16 *row,
                                                                      vf *sum) {
    const int n = D_ ? D_ : D, whole = n / 32 * 32;
    for (int g = 0; g < GB; g++) sum[g] = splat(0.f);
    int i = 0;
#pragma GCC unroll 8
    for (; i < whole; i += 32) {
        const __m512bh y = (__m512bh)_mm512_loadu_si512(row + i);
        for (int g = 0; g < GB; g++) sum[g] = _mm512_dpbf16_ps(sum[g], y, (__m512bh)_mm512_loadu_si512(q + g * P + i));
    }
    if (i < n) {
        const __m512bh y = (__m512bh)_mm512_maskz_loadu_epi16((1u << (n - i)) - 1, row + i);
        for (int g = 0; g < GB; g++) sum[g] = _mm512_dpbf16_ps(sum[g], y, (__m512bh)_mm512_loadu_si512(q + g * P + i));
    }
}

// s[g*ld + j] = scale * (q_g . row_j) for GB queries and W rows.
template <int D_, int GB>
__attribute__((target("avx512bf16"))) static void dot_block_bf16(const bf16 *q, int P, int D, const bf16 *const *rows,
                                                                 float scale, float *s, int64_t ld, NextRows &next) {
    vf part[GB][W], sum[GB];
    for (int j = 0; j < W; j++) {
        next.prefetch_share();
        dot_row_bf16<D_, GB>(q, P, D, rows[j], sum);
        for (int g = 0; g < GB; g++) part[g][j] = sum[g];
    }
    for (int g = 0; g < GB; g++) store(s + g * ld, sums_of(part[g]) * splat(scale));
}

// The same for four queries, whose sums are joined row by row: they stay in registers.
template <int D_>
__attribute__((target("avx512bf16"))) static void dot_block_of_four_bf16(const bf16 *q, int P, int D,
                                                                         const bf16 *const *rows, float scale, float *s,
                                                                         int64_t ld, NextRows &next) {
    const auto pairs = [](vf a, vf b) { return _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b); };
    const auto fours = [](vf a, vf b) {
        const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
        return _mm512_castpd_ps(_mm512_unpacklo_pd(x, y)) + _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
    };
    const auto quarters = [](vf a, vf b) {
        return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
    };
    vf dots[4];  // lane 4*j + g is the product of row j of four with query g
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        vf row[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            vf sum[4];
            next.prefetch_share();
            dot_row_bf16<D_, 4>(q, P, D, rows[4 * i + j], sum);
            row[j] = fours(pairs(sum[0], sum[1]), pairs(sum[2], sum[3]));
        }
        dots[i] = quarters(quarters(row[0], row[1]), quarters(row[2], row[3])) * splat(scale);
    }
    const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const __m512i third = first + (__m512i)(vi{} + 2);
    const vf a = _mm512_permutex2var_ps(dots[0], first, dots[1]), b = _mm512_permutex2var_ps(dots[2], first, dots[3]);
    const vf c = _mm512_permutex2var_ps(dots[0], third, dots[1]), d = _mm512_permutex2var_ps(dots[2], third, dots[3]);
    store(s, _mm512_shuffle_f32x4(a, b, 0x44)), store(s + ld, _mm512_shuffle_f32x4(a, b, 0xee));
    store(s + 2 * ld, _mm512_shuffle_f32x4(c, d, 0x44)), store(s + 3 * ld, _mm512_shuffle_f32x4(c, d, 0xee));
}

// s[g*ld + j] = scale * (q_g . row_j) for G queries and n rows, with the padding of dot_rows.
template <int D_>
static void dot_rows_bf16(const bf16 *q, int P, int G, int D, const bf16 *const *rows, int n, float scale, float *s,
                          int64_t ld, const bf16 *const *next) {
    NextRows ahead(next, n, (D_ ? D_ : D) * 2, n * blocks_of_queries(G));
    for (int j = 0; j < n; j += W) {
        int g = 0;
        for (; g + 4 <= G; g += 4)
            dot_block_of_four_bf16<D_>(q + g * P, P, D, rows + j, scale, s + g * ld + j, ld, ahead);
        if (g + 2 <= G) dot_block_bf16<D_, 2>(q + g * P, P, D, rows + j, scale, s + g * ld + j, ld, ahead), g += 2;
        if (g < G) dot_block_bf16<D_, 1>(q + g * P, P, D, rows + j, scale, s + g * ld + j, ld, ahead);
    }
}

}  // namespace skimkv::SKIMKV_NS
