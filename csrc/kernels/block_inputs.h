// The inputs of a product with GGUF blocks as integers, with a scale for every 32, and the sums of every 16.
//
// Inputs of bfloat16 have 8 bits, as llama.cpp rounds them, with more scales; other inputs have 15 bits.
#pragma once
#include <stdint.h>

#include "skimkv.h"

namespace skimkv {

// Whether inputs have two bytes: such an integer is 128 * high + low with two signed bytes, so it is at most 16256.
static inline bool has_two_bytes(int dtype) { return dtype != SKIMKV_BF16; }
static inline int largest_input(int dtype) { return has_two_bytes(dtype) ? 16256 : 127; }
constexpr int INPUT_GROUP = 256;  // inputs are padded with zeros to a multiple of this

// One token's rounded inputs. A set of instructions has them either as 16-bit integers, or as two bytes each.
struct RoundedInputs {
    int16_t *code;
    int8_t *high, *low;
    float *scale, *sum;
};

static inline int64_t padded_inputs(int64_t in) { return (in + INPUT_GROUP - 1) / INPUT_GROUP * INPUT_GROUP; }

static inline int64_t block_input_bytes(int64_t in) {
    return (padded_inputs(in) * 2 + padded_inputs(in) / 32 * 12 + 63) / 64 * 64;
}

// Where the inputs of one token are, in block_input_bytes of memory.
static inline RoundedInputs rounded_inputs_at(const char *inputs, int64_t in) {
    char *memory = (char *)inputs;
    const int64_t n = padded_inputs(in);
    float *scale = (float *)(memory + 2 * n);
    return {(int16_t *)memory, (int8_t *)memory, (int8_t *)memory + n, scale, scale + n / 32};
}

}  // namespace skimkv
