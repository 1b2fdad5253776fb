// What the products of a prompt's attention have in common on all instruction sets: a tile of sums, and the softmax
// that is updated block by block.
#pragma once
#include <stdint.h>

#include "kernels/vector_math.h"

namespace skimkv::SKIMKV_NS {

// What becomes of a tile's sums: they are multiplied by their lanes' factors and stored, or then added to what is
// there; or what is there is multiplied by these factors, and the sums are added.
enum PromptUse { STORE_SCALED, ADD_SCALED, ADD_TO_SCALED };

// C = A B, where B [depth][lanes] has a query in each lane, and A is broadcast word by word: its element of row r at
// depth i is a[r*a_row + i*a_step].
struct PromptProduct {
    int64_t a_row, a_step, depth;
    const float *b, *factor;
    PromptUse use;
};

static inline void use_prompt_sum(const PromptProduct &x, vf sum, int v, float *c) {
    const vf factor = load(x.factor + v * W);
    if (x.use == STORE_SCALED) store(c, sum * factor);
    else store(c, x.use == ADD_SCALED ? fma(sum, factor, load(c)) : fma(load(c), factor, sum));
}

// R rows of a product for C vectors of queries.
template <int R, int C> static void multiply_prompt_tile(const PromptProduct &x, const float *a, float *c) {
    vf sum[R][C];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < C; v++) sum[r][v] = splat(0.f);
    for (int64_t i = 0; i < x.depth; i++) {
        vf b[C];
        for (int v = 0; v < C; v++) b[v] = load(x.b + (i * C + v) * W);
        for (int r = 0; r < R; r++) {
            const vf word = splat(a[r * x.a_row + i * x.a_step]);
            for (int v = 0; v < C; v++) sum[r][v] = fma(word, b[v], sum[r][v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < C; v++) use_prompt_sum(x, sum[r][v], v, c + (r * C + v) * W);
}

// Makes 2^(logit - maximum) of a block's logits s [keys][C*W] in place, with the maximum over this and all earlier
// blocks; factor [C*W] is what earlier results are multiplied by. `keys` is even. store_two(at, i, a, b) stores weights
// of two keys, which are vector i of such pairs; the logits of the first were at `at`.
template <int C, class StoreTwo>
static inline __attribute__((always_inline)) void weigh_keys_into(const StoreTwo &store_two, float *s, int64_t keys,
                                                                  float *maximum, float *sum, float *factor) {
    vf top[C], total[C];  // the maximum skips a NaN, whose weight is NaN
    for (int v = 0; v < C; v++) top[v] = load(maximum + v * W);
    for (int64_t j = 0; j < keys; j++)
        for (int v = 0; v < C; v++) top[v] = vmax(load(s + (j * C + v) * W), top[v]);
    for (int v = 0; v < C; v++) {
        const vf change = exp2(load(maximum + v * W) - top[v]);
        store(factor + v * W, change), store(maximum + v * W, top[v]);
        total[v] = load(sum + v * W) * change;
    }
    for (int64_t j = 0; j < keys; j += 2)
        for (int v = 0; v < C; v++) {
            float *at = s + (j * C + v) * W;
            const vf a = exp2(load(at) - top[v]), b = exp2(load(at + C * W) - top[v]);
            total[v] = total[v] + (a + b);
            store_two(at, j / 2 * C + v, a, b);
        }
    for (int v = 0; v < C; v++) store(sum + v * W, total[v]);
}

template <int C> struct FloatRows {
    inline void operator()(float *at, int64_t, vf a, vf b) const { store(at, a), store(at + C * W, b); }
};
template <int C> static void weigh_keys(float *s, int64_t keys, float *maximum, float *sum, float *factor) {
    weigh_keys_into<C>(FloatRows<C>{}, s, keys, maximum, sum, factor);
}

}  // namespace skimkv::SKIMKV_NS
