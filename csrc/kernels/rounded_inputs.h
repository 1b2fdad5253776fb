// The inputs of products with quantised weights as integers, with a scale for every 32 of them. For GGUF blocks there
// are also the sums of every 16.
//
// Beside blocks, inputs of bfloat16 of a few tokens have 8 bits, as llama.cpp rounds them, with more scales; others
// have 15 bits, or 16 (kernels/many_token_products.h).
#pragma once
#include <stdint.h>

#include "isa/simd.h"
#include "kernels/vector_math.h"
#include "skimkv.h"

namespace skimkv::SKIMKV_NS {

// Rounds 32 inputs to integers of at most `largest`, and returns their scale; sums, if it is not NULL, becomes the sums
// of the first sixteen integers and of the others. The scale is NaN if an input is infinite or NaN, and then the result
// is NaN.
template <class T> static inline float round_inputs(const T *x, float largest, int32_t *code, float *sums = nullptr) {
    constexpr int VECTORS = 32 / W;
    vf v[VECTORS], top = splat(0.f), bad = splat(0.f), sum[2] = {splat(0.f), splat(0.f)};
    for (int i = 0; i < VECTORS; i++) {
        v[i] = load(x + i * W);
        top = vmax(top, vmax(v[i], splat(0.f) - v[i])), bad = bad + v[i] * splat(0.f);
    }
    const float maximum = max_lanes(top), is_bad = sum_lanes(bad);
    const float inverse = is_bad == 0 && maximum > 1e-30f ? largest / maximum : 0;
    const vf rounds = splat(12582912.f);  // adding 1.5 * 2^23 rounds; the low bits are then the integer
    for (int i = 0; i < VECTORS; i++) {
        const vf y = v[i] * splat(inverse) + rounds;
        const vi integers = (vi)y - (vi)rounds;
        __builtin_memcpy(code + i * W, &integers, sizeof integers);
        sum[i / (VECTORS / 2)] = sum[i / (VECTORS / 2)] + (y - rounds);
    }
    for (int i = 0; i < 2 && sums; i++) sums[i] = sum_lanes(sum[i]);
    return is_bad == 0 ? maximum / largest : is_bad;
}

// Whether inputs have two bytes: such an integer is 128 * high + low with two signed bytes, so it is at most 16256.
static inline bool has_two_bytes(int dtype) { return dtype != SKIMKV_BF16; }
static inline int largest_input(int dtype) { return has_two_bytes(dtype) ? 16256 : 127; }
constexpr int INPUT_GROUP = 256;  // inputs are padded with zeros to a multiple of this

// One token's rounded inputs. A set of instructions has them either as 16-bit integers, or as two bytes each, and then
// with what `correction` takes from the sums of products with unsigned codes, for every four products. `sum` has the
// sums of every sixteen inputs, or in the order HALVES_OF_32 of every 32, each after their scale.
struct RoundedInputs {
    int16_t *code;
    int8_t *high, *low;
    float *scale, *sum;
    int32_t *correction;
};

static inline int64_t padded_inputs(int64_t in) { return (in + INPUT_GROUP - 1) / INPUT_GROUP * INPUT_GROUP; }

static int64_t block_token_bytes(int64_t in) {
    return (padded_inputs(in) * 3 + padded_inputs(in) / 32 * 12 + 63) / 64 * 64;
}

// Where the inputs of one token are, in block_token_bytes of memory.
static inline RoundedInputs rounded_inputs_at(const char *inputs, int64_t in) {
    char *memory = (char *)inputs;
    const int64_t n = padded_inputs(in);
    float *scale = (float *)(memory + 3 * n);
    return {(int16_t *)memory, (int8_t *)memory,           (int8_t *)memory + n, scale,
            scale + n / 32,    (int32_t *)(memory + 2 * n)};
}

}  // namespace skimkv::SKIMKV_NS
