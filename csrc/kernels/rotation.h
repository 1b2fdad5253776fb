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

// One key of skimkv_turn.
template <class T>
static void turn_key(const skimkv_turn *op, const T *from, const float *cos, const float *sin, T *to) {
    const int pairs = op->pairs, next = op->interleaved ? 1 : pairs;
    float x[SKIMKV_MAX_HEAD], y[SKIMKV_MAX_HEAD];
    to_float(from, x, op->D);
    for (int i = 2 * pairs; i < op->D; i++) y[i] = x[i];
    for (int f = 0; f < pairs; f++) {
        const int i = op->interleaved ? 2 * f : f;
        const float a = x[i], b = x[i + next];
        y[i] = a * cos[f] - b * sin[f], y[i + next] = b * cos[f] + a * sin[f];
    }
    from_float(y, to, op->D);
}

template <class T> static void turn_row(const skimkv_turn *op, int64_t b) {
    const float *cos = op->cos + b * op->pairs, *sin = op->sin + b * op->pairs;
    for (int64_t h = 0; h < op->H; h++)
        for (int64_t i = 0; i < op->n; i++)
            turn_key(op, (const T *)op->source + b * op->f_b + h * op->f_h + i * op->f_n, cos, sin,
                     (T *)op->to + b * op->t_b + h * op->t_h + i * op->t_n);
}

static void turn_keys(const skimkv_turn *op, int64_t b) {
    if (op->dtype == SKIMKV_F32) turn_row<float>(op, b);
    else if (op->dtype == SKIMKV_BF16) turn_row<bf16>(op, b);
    else turn_row<f16>(op, b);
}

}  // namespace skimkv::SKIMKV_NS
