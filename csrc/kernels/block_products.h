// Products y = x W^T + bias whose weights are the blocks of a GGUF file, row by row, as the file has them.
//
// A group of weights is decoded to codes of 8 bits and, for every part of 16 or 32 weights, a scale and an offset, so
// that a weight is scale * code + offset. Codes are multiplied with rounded inputs (kernels/rounded_inputs.h) in
// integers, exactly; offsets are multiplied with the sums of the inputs.
#pragma once
#include <stdint.h>

#include "kernel_table.h"
#include "kernels/block_codes.h"
#include "kernels/rounded_inputs.h"
#include "kernels/vector_math.h"
#include "skimkv.h"

namespace skimkv::SKIMKV_NS {

constexpr int TILE_TOKENS = 4;  // for which a row is decoded once
constexpr int RESULTS = 256;    // rows whose results are kept until they are written together

constexpr int PREFETCH_AHEAD = 2048;  // bytes: decoding hides less of the memory's latency than plain loads do

}  // namespace skimkv::SKIMKV_NS

#include "kernels/many_token_products.h"
#ifdef SKIMKV_SIMD_VNNI
#include "isa/block_rows_vnni.h"
#elif defined(SKIMKV_SIMD_AVX2)
#include "isa/block_rows_avx2.h"
#endif

namespace skimkv::SKIMKV_NS {

#if !defined(SKIMKV_SIMD_AVX2)
constexpr int STREAMS_OF_ONE_TOKEN = 2;
template <InputOrder> static inline int64_t block_place(int64_t block) { return block; }
#endif
#if !defined(SKIMKV_SIMD_VNNI) && !defined(SKIMKV_SIMD_AVX2)
template <class> constexpr InputOrder ORDER_OF_INPUTS = InputOrder::AS_THEY_ARE;

template <InputOrder, int>
static inline void store_inputs(const RoundedInputs &to, int64_t at, const int32_t *code, bool) {
    for (int i = 0; i < 32; i++) to.code[at + i] = (int16_t)code[i];
}

// Adds the products of a group, whose first column is `at`, with T tokens to sum[T]. Both kinds of inputs are 16-bit
// integers here.
template <bool, int T, class Block>
__attribute__((always_inline)) static inline void add_group(const uint8_t *p, int64_t at, int64_t,
                                                            const RoundedInputs *x, vf *sum) {
    constexpr int PART = Block::PART, STEP = 2 * W;     // weights of a scale, and of a vector of pairs
    constexpr int WEIGHTS = STEP > PART ? STEP : PART;  // whose products are added as integers
    codes decoded[Block::SIZE / 32];
    const int8_t *code = (const int8_t *)decoded;
    float scale[Block::SIZE / PART], offset[Block::SIZE / PART];
    decode(Block(), p, decoded, scale, offset);
    for (int i = 0; i < Block::SIZE; i += WEIGHTS) {
        vi pairs[WEIGHTS / STEP];
        for (int j = 0; j < WEIGHTS / STEP; j++) pairs[j] = load_int16_pairs(code + i + j * STEP);
        vf of_weights = splat(scale[i / PART]);
        if constexpr (STEP > PART) {  // two parts in a vector
            float lane[W];
            for (int j = 0; j < W; j++) lane[j] = scale[(i + 2 * j) / PART];
            of_weights = load(lane);
        }
        for (int t = 0; t < T; t++) {
            IntegerSum products{};
            for (int j = 0; j < WEIGHTS / STEP; j++)
                products = multiply_add(products, pairs[j], load_integers(x[t].code + at + i + j * STEP));
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

// Where the inputs of fewer than four blocks, the last ones of a row, begin in their group.
static inline bool has_whole_group(int64_t in) { return in >= FOUR_BLOCKS; }
static inline int64_t first_of_rest(int64_t in) {
    return has_whole_group(in) && in % FOUR_BLOCKS ? FOUR_BLOCKS - in % FOUR_BLOCKS : 0;
}

// Multiplies R rows with T tokens: y [R,T]. Each group is decoded once. A last group of fewer blocks begins in the one
// before, whose inputs are zeros there, or is filled with zeros where it is the only one.
template <bool TWO, int R, int T, class Block>
static void multiply_tile(const uint8_t *const (&rows)[R], int64_t in, const char *inputs, float *y) {
    RoundedInputs x[T];
    for (int t = 0; t < T; t++) x[t] = rounded_inputs_at(inputs + t * block_token_bytes(in), in);
    vf sum[R][T];
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) sum[r][t] = splat(0.f);
    const auto add = [&](int r, const uint8_t *p, int64_t at, int64_t zeros) {
        for (int i = 0; i < Block::BYTES; i += 64) prefetch(p + PREFETCH_AHEAD + i);
        add_group<TWO, T, Block>(p, at, zeros, x, sum[r]);
    };
    int64_t at = 0, byte = 0;
    for (; at + Block::SIZE <= in; at += Block::SIZE, byte += Block::BYTES)
        for (int r = 0; r < R; r++) add(r, rows[r] + byte, at, 0);
    if (at < in && has_whole_group(in)) {
        const int64_t zeros = first_of_rest(in), before = zeros * Block::BYTES / Block::SIZE;
        for (int r = 0; r < R; r++) add(r, rows[r] + byte - before, at, zeros);
    } else if (at < in) {
        uint8_t copy[Block::BYTES];
        for (int r = 0; r < R; r++) add(r, whole_group<Block>(rows[r] + byte, in - at, copy), at, 0);
    }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) y[r * T + t] = sum_lanes(sum[r][t]);
}

// Rounds one token's inputs, to be multiplied with codes of a bias. Those after the last whole group stand at the end
// of theirs, after zeros.
template <InputOrder ORDER, int BIAS, class T>
static void round_token(const T *x, int64_t in, int dtype, const RoundedInputs &to) {
    const int64_t whole = in / FOUR_BLOCKS * FOUR_BLOCKS;
    for (int64_t at = 0; at < padded_inputs(in); at += 32) {
        int32_t code[32] = {};
        float sum[2] = {};
        const int64_t column = at < whole ? at : at - first_of_rest(in);
        const bool has_inputs = column < in && (at < whole || column >= whole);
        const float scale = has_inputs ? round_inputs(x + column, (float)largest_input(dtype), code, sum) : 0;
        store_inputs<ORDER, BIAS>(to, at, code, has_two_bytes(dtype));
        const int64_t place = block_place<ORDER>(at / 32);
        to.scale[place] = scale;
        if (ORDER == InputOrder::HALVES_OF_32)
            to.sum[2 * place] = scale, to.sum[2 * place + 1] = (sum[0] + sum[1]) * scale;
        else
            for (int i = 0; i < 2; i++) to.sum[2 * place + i] = sum[i] * scale;
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

// Writes the results of `n` rows from `first` on for one token, with their bias.
static void store_results(const skimkv_matrix &m, int64_t first, int n, int64_t token, float *result, void *y) {
    if (m.bias && !m.order) {
        float bias[RESULTS];
        to_float(m.dtype, m.bias, first, bias, n);
        for (int i = 0; i < n; i++) result[i] += bias[i];
    }
    if (!m.order) return from_float(m.dtype, result, y, token * m.rows + first, n);
    for (int i = 0; i < n; i++) {
        const int64_t to = m.order[first + i];
        float bias = 0;
        if (m.bias) to_float(m.dtype, m.bias, to, &bias, 1);
        result[i] += bias;
        from_float(m.dtype, result + i, y, token * m.rows + to, 1);
    }
}

// Multiplies n rows from `first` on, at most RESULTS, with the tokens from `from` on, at most T: R rows at a time,
// which are R streams of memory. Returns how many tokens these are.
template <int R, int T, class Block>
static int multiply_streams(const skimkv_matrix &m, const Tokens &tokens, const char *inputs, int64_t first, int n,
                            int64_t from) {
    if constexpr (T > 1)
        if (tokens.n - from < T) return multiply_streams<R, T / 2, Block>(m, tokens, inputs, first, n, from);
    const int64_t row_bytes = m.columns * Block::BYTES / Block::SIZE;
    const char *x = inputs + from * block_token_bytes(m.columns);
    const int apart = (n + R - 1) / R;
    float result[T][RESULTS];
    for (int i = 0; i < apart; i++) {
        const uint8_t *w[R];
        for (int r = 0; r < R; r++)  // of the last rows some are multiplied twice
            w[r] = (const uint8_t *)m.data + (first + min(i + r * apart, n - 1)) * row_bytes;
        float y[R * T];
        if (has_two_bytes(m.dtype)) multiply_tile<true, R, T, Block>(w, m.columns, x, y);
        else multiply_tile<false, R, T, Block>(w, m.columns, x, y);
        for (int r = 0; r < R; r++)
            for (int t = 0; t < T; t++) result[t][min(i + r * apart, n - 1)] = y[r * T + t];
    }
    for (int t = 0; t < T; t++) store_results(m, first, n, from + t, result[t], tokens.y);
    return T;
}

// Multiplies the rows first .. last-1 with all tokens.
template <class Block>
static void multiply_rows(const skimkv_matrix &m, const Tokens &tokens, const char *inputs, int64_t first,
                          int64_t last) {
    for (; first < last; first += RESULTS) {
        const int n = (int)min(last - first, RESULTS);
        if (tokens.n == 1) {
            multiply_streams<STREAMS_OF_ONE_TOKEN, 1, Block>(m, tokens, inputs, first, n, 0);
            continue;
        }
        for (int64_t t = 0; t < tokens.n;) t += multiply_streams<2, TILE_TOKENS, Block>(m, tokens, inputs, first, n, t);
    }
}

// Writes the weights of the rows first .. last-1 to y.
template <class Block> static void expand_rows(const skimkv_matrix &m, void *y, int64_t first, int64_t last) {
    uint8_t copy[Block::BYTES];
    for (int64_t row = first; row < last; row++) {
        const uint8_t *w = (const uint8_t *)m.data + row * (m.columns * Block::BYTES / Block::SIZE);
        const int64_t to = m.order ? m.order[row] : row;
        for (int64_t at = 0; at < m.columns; at += Block::SIZE, w += Block::BYTES) {
            codes decoded[Block::SIZE / 32];
            const int8_t *code = (const int8_t *)decoded;
            float scale[Block::SIZE / Block::PART], offset[Block::SIZE / Block::PART] = {}, weight[Block::SIZE];
            decode(Block(), whole_group<Block>(w, m.columns - at, copy), decoded, scale, offset);
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
    constexpr ProductForm few = {1, 256, block_input_bytes, round_block_inputs<ORDER_OF_INPUTS<Block>, Block::BIAS>,
                                 multiply_rows<Block>};
    constexpr ProductForm many = {LANE_ROWS, MOST_LANE_TOKENS, lane_input_bytes, round_lane_inputs,
                                  multiply_many_tokens<Block>};
    return {kind, Block::SIZE == 256 ? 256 : 32, 1, 1, few, many, MANY_TOKENS, expand_rows<Block>};
}

}  // namespace skimkv::SKIMKV_NS
