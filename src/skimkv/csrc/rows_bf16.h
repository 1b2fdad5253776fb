// Dot products of bfloat16 queries as they came with bfloat16 rows, two elements a lane in one instruction, where the
// CPU has it. It is for several queries a row: with one, memory is the bound.
#pragma once

namespace skimkv::SKIMKV_NS {

// s[g*ld + j] = scale * (q_g . row_j) for one block of W rows. q is [GB][P], P a multiple of 32, zero beyond D.
template <int D_, int GB>
__attribute__((target("avx512bf16"))) static void dots_block_bf16(const bf16 *q, int P, int D, const bf16 *const *rows,
                                                                  float scale, float *s, int64_t ld, const Ahead<bf16> &next) {
    vf part[GB][W];
    const int n = D_ ? D_ : D, whole = n / 32 * 32;
    for (int j = 0; j < W; j++) {
        const bf16 *x = rows[j];
        if (GB > 1) next.ask(j, 0, n);
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
    for (int g = 0; g < GB; g++) put(s + g * ld, rowsum(part[g]) * splat(scale));
}

// s[g*ld + j] for j < n, with dots' paddings.
template <int D_>
static void dots_bf16(const bf16 *q, int P, int G, int D, const bf16 *const *rows, int n, float scale, float *s, int64_t ld,
                      const bf16 *const *next) {
    for (int j = 0; j < n; j += W) {
        Ahead<bf16> ahead{next ? next + j : next, 0, groups(G)};
        int g = 0;
        for (; g + 4 <= G; g += 4, ahead.group++) dots_block_bf16<D_, 4>(q + g * P, P, D, rows + j, scale, s + g * ld + j, ld, ahead);
        if (g + 2 <= G) dots_block_bf16<D_, 2>(q + g * P, P, D, rows + j, scale, s + g * ld + j, ld, ahead), g += 2;
        if (g < G) dots_block_bf16<D_, 1>(q + g * P, P, D, rows + j, scale, s + g * ld + j, ld, ahead);
    }
}

}  // namespace skimkv::SKIMKV_NS
