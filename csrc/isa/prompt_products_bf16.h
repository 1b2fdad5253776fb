// Products of a prompt's attention by AVX512_BF16, whose instruction multiplies and adds pairs of bfloat16. A word is
// such a pair.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "isa/simd_avx512.h"
#include "kernels/prompt_softmax.h"
#include "kernels/vector_math.h"

namespace skimkv::SKIMKV_NS {

// As multiply_prompt_tile, with words that are pairs.
template <int R, int C>
__attribute__((target("avx512bf16"))) static void multiply_prompt_tile_bf16(const PromptProduct &x, const float *a,
                                                                            float *c) {
    vf sum[R][C];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < C; v++) sum[r][v] = splat(0.f);
    for (int64_t i = 0; i < x.depth; i++) {
        __m512bh b[C];
        for (int v = 0; v < C; v++) b[v] = (__m512bh)load(x.b + (i * C + v) * W);
        for (int r = 0; r < R; r++) {
            const __m512bh pair = (__m512bh)splat(a[r * x.a_row + i * x.a_step]);
            for (int v = 0; v < C; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], pair, b[v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < C; v++) use_prompt_sum(x, sum[r][v], v, c + (r * C + v) * W);
}

// Two keys' weights become one row of pairs. KEEPS: they are stored as floats too, in place.
template <int C, bool KEEPS> struct RoundedPairs {
    float *pairs;
    __attribute__((target("avx512bf16"))) inline void operator()(float *at, int64_t i, vf first, vf second) const {
        const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                               6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(second, first);
        _mm512_storeu_si512(pairs + i * W, _mm512_permutexvar_epi16(order, halves));
        if constexpr (KEEPS) FloatRows<C>{}(at, i, first, second);
    }
};

// As weigh_keys, with weights rounded to pairs. `pairs` may be s, where these take the logits' place.
template <int C, bool KEEPS>
__attribute__((target("avx512bf16"))) static void weigh_keys_bf16(float *s, float *pairs, int64_t keys, float *maximum,
                                                                  float *sum, float *factor) {
    weigh_keys_into<C>(RoundedPairs<C, KEEPS>{pairs}, s, keys, maximum, sum, factor);
}

}  // namespace skimkv::SKIMKV_NS
