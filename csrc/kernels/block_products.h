// Products y = x W^T + bias whose weights are the blocks of a GGUF file, row by row, as the file has them.
//
// A group of weights is decoded to codes of 8 bits and, for every part of 16 or 32 weights, a scale and an offset, so
// that a weight is scale * code + offset. Codes are multiplied with rounded inputs (kernels/block_inputs.h) in
// integers, exactly; offsets are multiplied with the sums of the inputs.
#pragma once
#include <stdint.h>

#include "kernel_table.h"
#include "kernels/block_inputs.h"
#include "kernels/block_types.h"
#include "kernels/vector_math.h"
#include "skimkv.h"

namespace skimkv::SKIMKV_NS {

constexpr int STREAMS = 2;  // rows that are multiplied at the same time, far from each other

static inline float float16_at(const uint8_t *p) {
    f16 x;
    __builtin_memcpy(&x, p, 2);
    return as_float(x);
}

static inline void decode(BlockQ4_0, const uint8_t *p, int8_t *code, float *scale, float *) {
    for (int b = 0; b < 4; b++, p += 18, code += 32) {
        for (int i = 0; i < 16; i++) code[i] = (int8_t)((p[2 + i] & 15) - 8);
        for (int i = 0; i < 16; i++) code[16 + i] = (int8_t)((p[2 + i] >> 4) - 8);
        scale[b] = float16_at(p);
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

#ifdef SKIMKV_SIMD_VNNI
#include "isa/block_rows_vnni.h"
#endif

namespace skimkv::SKIMKV_NS {

#ifndef SKIMKV_SIMD_VNNI
template <InputOrder> static inline void store_input(const RoundedInputs &to, int64_t i, int32_t code, bool) {
    to.code[i] = (int16_t)code;
}

// Multiplies a row with one token. Both kinds of inputs are 16-bit integers here.
template <bool, class Block>
static inline float multiply_one_row(Block, const uint8_t *w, int64_t in, const RoundedInputs &x) {
    constexpr int STEP = 2 * W;  // weights of one vector of pairs
    vf sum[2] = {splat(0.f), splat(0.f)};
    float offsets = 0;
    uint8_t last[Block::BYTES];
    for (int64_t at = 0; at < in; at += Block::SIZE, w += Block::BYTES) {
        alignas(64) int8_t code[Block::SIZE];
        alignas(64) float scale[Block::SIZE / Block::PART], offset[Block::SIZE / Block::PART];
        decode(Block(), whole_group<Block>(w, in - at, last), code, scale, offset);
        for (int i = 0; i < Block::SIZE; i += STEP) {
            const float of_input = x.scale[(at + i) / 32];
            vf factor = splat(scale[i / Block::PART] * of_input);
            if constexpr (STEP > Block::PART) {  // two parts in a vector
                float lane[W];
                for (int j = 0; j < W; j++) lane[j] = scale[(i + 2 * j) / Block::PART] * of_input;
                factor = load(lane);
            }
            vi pairs;
            __builtin_memcpy(&pairs, x.code + at + i, sizeof pairs);
            const vf products = to_floats(multiply_add(IntegerSum{}, load_int16_pairs(code + i), pairs));
            sum[i / STEP % 2] = fma(products, factor, sum[i / STEP % 2]);
        }
        if constexpr (Block::HAS_OFFSET)
            for (int i = 0; i < Block::SIZE / 32; i++)
                offsets += offset[i] * (x.sum[at / 16 + 2 * i] + x.sum[at / 16 + 2 * i + 1]);
    }
    return sum_lanes(sum[0] + sum[1]) + offsets;
}
template <bool TWO, int R, class Block>
static inline void multiply_row(Block, const uint8_t *w, int64_t row, int64_t in, const RoundedInputs &x, float *y) {
    for (int r = 0; r < R; r++) y[r] = multiply_one_row<TWO>(Block(), w + r * row, in, x);
}
#endif

// Rounds one token's inputs.
template <InputOrder ORDER, class T>
static void round_token(const T *x, int64_t in, int dtype, const RoundedInputs &to) {
    const float largest = (float)largest_input(dtype);
    for (int64_t b = 0; b < padded_inputs(in) / 32; b++) {
        float top = 0, bad = 0, v[32] = {};
        if (b * 32 < in)
            for (int i = 0; i < 32; i += W) store(v + i, load(x + b * 32 + i));
        for (int i = 0; i < 32; i++) {
            const float a = v[i] < 0 ? -v[i] : v[i];
            top = a > top ? a : top;
            bad += v[i] * 0;  // NaN if an input is infinite or NaN, and then the result is NaN
        }
        const float inverse = bad == 0 && top > 1e-30f ? largest / top : 0;
        to.scale[b] = bad == 0 ? top / largest : bad;
        for (int half = 0; half < 2; half++) {
            int32_t sum = 0;
            for (int i = half * 16; i < half * 16 + 16; i++) {
                // Adding 1.5 * 2^23 rounds; the low bits then hold the integer.
                const float y = (bad == 0 ? v[i] : 0) * inverse + 12582912.f;
                int32_t bits;
                __builtin_memcpy(&bits, &y, 4);
                store_input<ORDER>(to, b * 32 + i, (int16_t)bits, has_two_bytes(dtype));
                sum += (int16_t)bits;
            }
            to.sum[b * 2 + half] = (float)sum * to.scale[b];
        }
    }
}

template <InputOrder ORDER>
static void round_block_inputs(const skimkv_matrix &m, const Tokens &tokens, char *inputs, int64_t first,
                               int64_t last) {
    for (int64_t t = first; t < last; t++) {
        const RoundedInputs to = rounded_inputs_at(inputs + t * block_input_bytes(m.columns), m.columns);
        const int64_t at = t * m.columns;
        if (m.dtype == SKIMKV_F32) round_token<ORDER>((const float *)tokens.x + at, m.columns, m.dtype, to);
        else if (m.dtype == SKIMKV_BF16) round_token<ORDER>((const bf16 *)tokens.x + at, m.columns, m.dtype, to);
        else round_token<ORDER>((const f16 *)tokens.x + at, m.columns, m.dtype, to);
    }
}

// Multiplies R rows, `apart` rows from each other, with all inputs.
template <int R, class Block>
static inline void multiply_some_rows(const skimkv_matrix &m, const Tokens &tokens, const char *inputs, int64_t first,
                                      int64_t apart) {
    const int64_t row_bytes = m.columns * Block::BYTES / Block::SIZE;
    const uint8_t *w = (const uint8_t *)m.data + first * row_bytes;
    for (int64_t t = 0; t < tokens.n; t++) {
        const RoundedInputs x = rounded_inputs_at(inputs + t * block_input_bytes(m.columns), m.columns);
        float y[R];
        if (has_two_bytes(m.dtype)) multiply_row<true, R>(Block(), w, apart * row_bytes, m.columns, x, y);
        else multiply_row<false, R>(Block(), w, apart * row_bytes, m.columns, x, y);
        for (int r = 0; r < R; r++) {
            const int64_t row = first + r * apart, to = m.order ? m.order[row] : row;
            float bias = 0;
            if (m.bias) to_float(m.dtype, m.bias, to, &bias, 1);
            y[r] += bias, from_float(m.dtype, y + r, tokens.y, t * m.rows + to, 1);
        }
    }
}

// Multiplies the rows first .. last-1 with all inputs: several at a time, which reads several streams of memory.
template <class Block>
static void multiply_rows(const skimkv_matrix &m, const Tokens &tokens, const char *inputs, int64_t first,
                          int64_t last) {
    const int64_t apart = (last - first) / STREAMS;
    for (int64_t i = 0; i < apart; i++) multiply_some_rows<STREAMS, Block>(m, tokens, inputs, first + i, apart);
    for (int64_t row = first + apart * STREAMS; row < last; row++)
        multiply_some_rows<1, Block>(m, tokens, inputs, row, 0);
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
            for (int i = 0; i < Block::SIZE; i++)
                weight[i] = scale[i / Block::PART] * (float)code[i] + offset[i / Block::PART];
            from_float(m.dtype, weight, y, to * m.columns + at, (int)min(Block::SIZE, m.columns - at));
        }
    }
}

template <class Block> static constexpr MatrixKind block_kind(int32_t kind) {
    return {kind,
            Block::SIZE == 256 ? 256 : 32,
            1,
            1,
            256,
            block_input_bytes,
            round_block_inputs<Block::ORDER>,
            multiply_rows<Block>,
            expand_rows<Block>};
}

}  // namespace skimkv::SKIMKV_NS
