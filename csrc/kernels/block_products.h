// Products y = x W^T + bias whose weights are the blocks of a GGUF file, row by row, as the file has them.
//
// A group of weights is decoded to codes of 8 bits and, for every part of 16 or 32 weights, a scale and an offset, so
// that a weight is scale * code + offset. Codes are multiplied with rounded inputs (kernels/rounded_inputs.h) in
// integers, exactly; offsets are multiplied with the sums of the inputs.
#pragma once
#include <stdint.h>

#include "kernel_table.h"
#include "kernels/block_types.h"
#include "kernels/rounded_inputs.h"
#include "kernels/vector_math.h"
#include "skimkv.h"

namespace skimkv::SKIMKV_NS {

constexpr int TILE_TOKENS = 4;  // for which a row is decoded once

static inline float float16_at(const uint8_t *p) {
    f16 x;
    __builtin_memcpy(&x, p, 2);
    return as_float(x);
}

// What is special in one of four blocks: its scale, its offset, and what its codes of 4 bits become.
static inline float scale_of(BlockMXFP4, const uint8_t *p) {  // half of 2^(e-127), as the values are doubled
    const uint32_t bits = *p < 2 ? 0x200000u << *p : (uint32_t)(*p - 1) << 23;
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}
template <class Block> static inline float scale_of(Block, const uint8_t *p) { return float16_at(p); }

// Sixteen bytes, and what sixteen codes of 4 bits, the first of them at `i`, become.
typedef uint8_t bytes __attribute__((vector_size(16)));
static inline bytes fifth_bits(const uint8_t *p, int i) {
    constexpr bytes ONE_OF_EIGHT = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint64_t two[2] = {p[i / 8] * 0x0101010101010101u, p[i / 8 + 1] * 0x0101010101010101u};
    bytes bits;
    __builtin_memcpy(&bits, two, 16);
    return (bytes)((bits & ONE_OF_EIGHT) != 0) & 16;
}
static inline bytes look_up(const int8_t *values, bytes four) {
    bytes code;
    for (int i = 0; i < 16; i++) code[i] = (uint8_t)values[four[i]];
    return code;
}
static inline bytes codes_of(BlockQ4_0, const uint8_t *, int, bytes four) { return four - 8; }
static inline bytes codes_of(BlockQ4_1, const uint8_t *, int, bytes four) { return four; }
static inline bytes codes_of(BlockQ5_0, const uint8_t *p, int i, bytes four) {
    return (four | fifth_bits(p + 2, i)) - 16;
}
static inline bytes codes_of(BlockQ5_1, const uint8_t *p, int i, bytes four) { return four | fifth_bits(p + 4, i); }
static inline bytes codes_of(BlockIQ4_NL, const uint8_t *, int, bytes four) { return look_up(IQ4_VALUES, four); }
static inline bytes codes_of(BlockMXFP4, const uint8_t *, int, bytes four) { return look_up(MXFP4_VALUES, four); }

template <class Block, int = Block::ONE>
static inline void decode(Block, const uint8_t *p, int8_t *code, float *scale, float *offset) {
    for (int b = 0; b < 4; b++, p += Block::ONE, code += 32) {
        bytes two;
        __builtin_memcpy(&two, p + Block::CODES, 16);
        const bytes low = codes_of(Block(), p, 0, two & 15), high = codes_of(Block(), p, 16, two >> 4);
        __builtin_memcpy(code, &low, 16);
        __builtin_memcpy(code + 16, &high, 16);
        scale[b] = scale_of(Block(), p);
        if (Block::HAS_OFFSET) offset[b] = float16_at(p + 2);
    }
}

static inline void decode(BlockQ8_0, const uint8_t *p, int8_t *code, float *scale, float *) {
    for (int b = 0; b < 4; b++, p += BlockQ8_0::ONE, code += 32)
        __builtin_memcpy(code, p + 2, 32), scale[b] = float16_at(p);
}

static inline void decode(BlockIQ4_XS, const uint8_t *p, int8_t *code, float *scale, float *) {
    const float d = float16_at(p);
    const int high = p[2] | p[3] << 8;
    for (int b = 0; b < 8; b++, code += 32) {
        const uint8_t *two = p + 8 + b * 16;
        for (int i = 0; i < 16; i++) code[i] = IQ4_VALUES[two[i] & 15], code[16 + i] = IQ4_VALUES[two[i] >> 4];
        scale[b] = d * (float)(((p[4 + b / 2] >> b % 2 * 4 & 15) | (high >> 2 * b & 3) << 4) - 32);
    }
}

static inline void decode(BlockQ2_K, const uint8_t *p, int8_t *code, float *scale, float *offset) {
    for (int i = 0; i < 256; i++) code[i] = (int8_t)(p[16 + i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3);
    const float d = float16_at(p + 80), least = float16_at(p + 82);
    for (int i = 0; i < 16; i++) scale[i] = d * (float)(p[i] & 15), offset[i] = -least * (float)(p[i] >> 4);
}

static inline void decode(BlockQ3_K, const uint8_t *p, int8_t *code, float *scale, float *) {
    for (int i = 0; i < 256; i++) {
        const int two = p[32 + i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3, third = p[i % 32] >> i / 32 & 1;
        code[i] = (int8_t)((two | third << 2) - 4);
    }
    const float d = float16_at(p + 108);
    for (int i = 0; i < 16; i++) {
        const int low = p[96 + i % 8] >> i / 8 * 4 & 15, high = p[104 + i % 4] >> i / 4 * 2 & 3;
        scale[i] = d * (float)((low | high << 4) - 32);
    }
}

// The 6-bit scales and minima of eight parts in 12 bytes: of the first four, the low 6 bits of a byte each; of the
// others, 4 bits in the last four bytes and 2 at the top of the first eight.
static inline void decode_six_bits(const uint8_t *p, float *scale, float *offset) {
    const float d = float16_at(p), least = float16_at(p + 2);
    p += 4;
    for (int i = 0; i < 4; i++) {
        scale[i] = d * (float)(p[i] & 63), offset[i] = -least * (float)(p[4 + i] & 63);
        scale[4 + i] = d * (float)((p[8 + i] & 15) | p[i] >> 6 << 4);
        offset[4 + i] = -least * (float)(p[8 + i] >> 4 | p[4 + i] >> 6 << 4);
    }
}

static inline void decode(BlockQ4_K, const uint8_t *p, int8_t *code, float *scale, float *offset) {
    decode_six_bits(p, scale, offset);
    for (int part = 0; part < 4; part++)
        for (int i = 0; i < 32; i++) {
            const uint8_t two = p[16 + part * 32 + i];
            code[part * 64 + i] = (int8_t)(two & 15), code[part * 64 + 32 + i] = (int8_t)(two >> 4);
        }
}

static inline void decode(BlockQ5_K, const uint8_t *p, int8_t *code, float *scale, float *offset) {
    decode_six_bits(p, scale, offset);
    const uint8_t *top = p + 16, *low = p + 48;
    for (int part = 0; part < 4; part++)
        for (int i = 0; i < 32; i++) {
            const uint8_t two = low[part * 32 + i], bits = (uint8_t)(top[i] >> 2 * part);
            code[part * 64 + i] = (int8_t)((two & 15) | (bits & 1) << 4);
            code[part * 64 + 32 + i] = (int8_t)(two >> 4 | (bits & 2) << 3);
        }
}

static inline void decode(BlockQ6_K, const uint8_t *p, int8_t *code, float *scale, float *) {
    for (int half = 0; half < 2; half++) {
        const uint8_t *low = p + half * 64, *top = p + 128 + half * 32;
        int8_t *to = code + half * 128;
        for (int i = 0; i < 32; i++) {
            const uint8_t a = low[i], b = low[32 + i], c = top[i];
            to[i] = (int8_t)(((a & 15) | (c & 3) << 4) - 32);
            to[32 + i] = (int8_t)(((b & 15) | (c & 12) << 2) - 32);
            to[64 + i] = (int8_t)((a >> 4 | (c & 48)) - 32);
            to[96 + i] = (int8_t)((b >> 4 | (c & 192) >> 2) - 32);
        }
    }
    const float d = float16_at(p + 208);
    for (int i = 0; i < 16; i++) scale[i] = d * (float)(int8_t)p[192 + i];
}

}  // namespace skimkv::SKIMKV_NS

#include "kernels/many_token_products.h"
#ifdef SKIMKV_SIMD_VNNI
#include "isa/block_rows_vnni.h"
#endif

namespace skimkv::SKIMKV_NS {

#ifndef SKIMKV_SIMD_VNNI
template <InputOrder, int>
static inline void store_inputs(const RoundedInputs &to, int64_t at, const int32_t *code, bool) {
    for (int i = 0; i < 32; i++) to.code[at + i] = (int16_t)code[i];
}

// Adds the products of a group, whose first column is `at`, with T tokens to sum[T]. Both kinds of inputs are 16-bit
// integers here.
template <bool, int T, class Block>
__attribute__((always_inline)) static inline void add_group(const uint8_t *p, int64_t at, const RoundedInputs *x,
                                                            vf *sum) {
    constexpr int PART = Block::PART, STEP = 2 * W;     // weights of a scale, and of a vector of pairs
    constexpr int WEIGHTS = STEP > PART ? STEP : PART;  // whose products are added as integers
    alignas(64) int8_t code[Block::SIZE];
    alignas(64) float scale[Block::SIZE / PART], offset[Block::SIZE / PART];
    decode(Block(), p, code, scale, offset);
    for (int i = 0; i < Block::SIZE; i += WEIGHTS) {
        vi codes[WEIGHTS / STEP];
        for (int j = 0; j < WEIGHTS / STEP; j++) codes[j] = load_int16_pairs(code + i + j * STEP);
        vf of_weights = splat(scale[i / PART]);
        if constexpr (STEP > PART) {  // two parts in a vector
            float lane[W];
            for (int j = 0; j < W; j++) lane[j] = scale[(i + 2 * j) / PART];
            of_weights = load(lane);
        }
        for (int t = 0; t < T; t++) {
            IntegerSum products{};
            for (int j = 0; j < WEIGHTS / STEP; j++)
                products = multiply_add(products, codes[j], load_integers(x[t].code + at + i + j * STEP));
            sum[t] = fma(to_floats(products), of_weights * splat(x[t].scale[(at + i) / 32]), sum[t]);
        }
    }
    for (int part = 0; part < Block::SIZE / PART && Block::HAS_OFFSET; part++) {
        const vf of_lane = splat(offset[part] * (1.f / W));  // W lanes that are summed: exact, for W is a power of two
        for (int t = 0; t < T; t++) {
            const float *inputs = x[t].sum + at / 16 + part * (PART / 16);
            sum[t] = fma(of_lane, splat(PART == 16 ? inputs[0] : inputs[0] + inputs[1]), sum[t]);
        }
    }
}
#endif

// Multiplies R rows, `row` bytes apart, with T tokens: y [R,T]. Each group is decoded once. A last group of fewer
// blocks is filled with zeros.
template <bool TWO, int R, int T, class Block>
static void multiply_tile(const uint8_t *w, int64_t row, int64_t in, const char *inputs, float *y) {
    RoundedInputs x[T];
    for (int t = 0; t < T; t++) x[t] = rounded_inputs_at(inputs + t * block_token_bytes(in), in);
    vf sum[R][T];
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) sum[r][t] = splat(0.f);
    int64_t at = 0;
    for (; at + Block::SIZE <= in; at += Block::SIZE, w += Block::BYTES)
        for (int r = 0; r < R; r++) add_group<TWO, T, Block>(w + r * row, at, x, sum[r]);
    uint8_t last[Block::BYTES];
    for (int r = 0; r < R && at < in; r++)
        add_group<TWO, T, Block>(whole_group<Block>(w + r * row, in - at, last), at, x, sum[r]);
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) y[r * T + t] = sum_lanes(sum[r][t]);
}

// Rounds one token's inputs, to be multiplied with codes of a bias.
template <InputOrder ORDER, int BIAS, class T>
static void round_token(const T *x, int64_t in, int dtype, const RoundedInputs &to) {
    for (int64_t at = 0; at < padded_inputs(in); at += 32) {
        int32_t code[32] = {}, sum[2] = {};
        const float scale = at < in ? round_inputs(x + at, (float)largest_input(dtype), code) : 0;
        for (int i = 0; i < 16; i++) sum[0] += code[i], sum[1] += code[16 + i];
        store_inputs<ORDER, BIAS>(to, at, code, has_two_bytes(dtype));
        to.scale[at / 32] = scale, to.sum[at / 16] = (float)sum[0] * scale, to.sum[at / 16 + 1] = (float)sum[1] * scale;
    }
}

template <InputOrder ORDER, int BIAS>
static void round_block_inputs(const skimkv_matrix &m, const Tokens &tokens, char *inputs, int64_t first,
                               int64_t last) {
    for (int64_t t = first; t < last; t++) {
        const RoundedInputs to = rounded_inputs_at(inputs + t * block_token_bytes(m.columns), m.columns);
        const int64_t at = t * m.columns;
        if (m.dtype == SKIMKV_F32) round_token<ORDER, BIAS>((const float *)tokens.x + at, m.columns, m.dtype, to);
        else if (m.dtype == SKIMKV_BF16) round_token<ORDER, BIAS>((const bf16 *)tokens.x + at, m.columns, m.dtype, to);
        else round_token<ORDER, BIAS>((const f16 *)tokens.x + at, m.columns, m.dtype, to);
    }
}

// Multiplies the rows `first` and, unless `apart` is 0, first + apart with the tokens from `from` on, at most T of
// them. Returns how many these are.
template <int T, class Block>
static int multiply_two_rows(const skimkv_matrix &m, const Tokens &tokens, const char *inputs, int64_t first,
                             int64_t apart, int64_t from) {
    if constexpr (T > 1)
        if (tokens.n - from < T) return multiply_two_rows<T / 2, Block>(m, tokens, inputs, first, apart, from);
    const int64_t row_bytes = m.columns * Block::BYTES / Block::SIZE;
    const uint8_t *w = (const uint8_t *)m.data + first * row_bytes;
    const char *x = inputs + from * block_token_bytes(m.columns);
    float y[2 * T];
    if (has_two_bytes(m.dtype)) multiply_tile<true, 2, T, Block>(w, apart * row_bytes, m.columns, x, y);
    else multiply_tile<false, 2, T, Block>(w, apart * row_bytes, m.columns, x, y);
    for (int r = 0; r < (apart ? 2 : 1); r++) {
        const int64_t row = first + r * apart, to = m.order ? m.order[row] : row;
        float bias = 0;
        if (m.bias) to_float(m.dtype, m.bias, to, &bias, 1);
        for (int t = 0; t < T; t++) {
            const float value = y[r * T + t] + bias;
            from_float(m.dtype, &value, tokens.y, (from + t) * m.rows + to, 1);
        }
    }
    return T;
}

// Multiplies the rows first .. last-1 with all inputs: two at a time, which reads two streams of memory.
template <class Block>
static void multiply_rows(const skimkv_matrix &m, const Tokens &tokens, const char *inputs, int64_t first,
                          int64_t last) {
    const int64_t apart = (last - first) / 2;
    const auto multiply = [&](int64_t row, int64_t other) {
        for (int64_t t = 0; t < tokens.n;) t += multiply_two_rows<TILE_TOKENS, Block>(m, tokens, inputs, row, other, t);
    };
    for (int64_t row = first; row < first + apart; row++) multiply(row, apart);
    if ((last - first) % 2) multiply(last - 1, 0);
}

// Writes the weights of the rows first .. last-1 to y.
template <class Block> static void expand_rows(const skimkv_matrix &m, void *y, int64_t first, int64_t last) {
    uint8_t copy[Block::BYTES];
    for (int64_t row = first; row < last; row++) {
        const uint8_t *w = (const uint8_t *)m.data + row * (m.columns * Block::BYTES / Block::SIZE);
        const int64_t to = m.order ? m.order[row] : row;
        for (int64_t at = 0; at < m.columns; at += Block::SIZE, w += Block::BYTES) {
            int8_t code[Block::SIZE];
            float scale[Block::SIZE / Block::PART], offset[Block::SIZE / Block::PART] = {}, weight[Block::SIZE];
            decode(Block(), whole_group<Block>(w, m.columns - at, copy), code, scale, offset);
            for (int i = 0; i < Block::SIZE; i += W) {
                const int part = i / Block::PART;
                store(weight + i, fma(load(code + i), splat(scale[part]), splat(offset[part])));
            }
            const int64_t place = to * m.columns + at;
            if (m.columns - at >= Block::SIZE) from_float(m.dtype, weight, y, place, Block::SIZE);
            else from_float(m.dtype, weight, y, place, (int)(m.columns - at));
        }
    }
}

static int64_t block_input_bytes(int64_t columns, int64_t n) { return n * block_token_bytes(columns); }

template <class Block> static constexpr MatrixKind block_kind(int32_t kind) {
    constexpr ProductForm few = {1, 256, block_input_bytes, round_block_inputs<Block::ORDER, Block::BIAS>,
                                 multiply_rows<Block>};
    constexpr ProductForm many = {LANE_ROWS, MOST_LANE_TOKENS, lane_input_bytes, round_lane_inputs,
                                  multiply_many_tokens<Block>};
    return {kind, Block::SIZE == 256 ? 256 : 32, 1, 1, few, many, MANY_TOKENS, expand_rows<Block>};
}

}  // namespace skimkv::SKIMKV_NS
