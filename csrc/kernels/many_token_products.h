// Products y = x W^T + bias of many tokens, such as a prompt has, with the blocks of a GGUF file.
//
// Each lane of a vector is a token. Some rows of W are decoded to integers, and pairs of a row's codes are repeated in
// all lanes and multiplied with the tokens' pairs of inputs: so a row is decoded once for all tokens, and no lanes are
// summed. Inputs are rounded to 16 bits with one scale for every 32, of any type: what a prompt loses all later tokens
// see.
#pragma once
#include <stdint.h>

#include "kernel_table.h"
#include "kernels/block_codes.h"
#include "kernels/rounded_inputs.h"
#include "kernels/vector_math.h"
#include "skimkv.h"

namespace skimkv::SKIMKV_NS {

constexpr int64_t MANY_TOKENS = 16;            // from which on products have this form
constexpr int64_t LANE_GROUP = 16;             // memory is for a multiple of so many tokens
constexpr int MOST_LANE_TOKENS = 256;          // whose sums are kept until all columns are multiplied
constexpr int LANE_ROWS = 16;                  // rows that are decoded at once
constexpr int LANE_COLUMNS = 256;              // and columns
constexpr int ROWS_AT_ONCE = W == 16 ? 8 : 4;  // whose sums fit the registers, for two vectors of tokens

// Bytes of the inputs of one token: codes, a scale for every 32 of them, and a sum for every 16.
static int64_t lane_token_bytes(int64_t in) { return in * 2 + in / 32 * 12; }
static int64_t lane_input_bytes(int64_t in, int64_t n) {
    return (n + LANE_GROUP - 1) / LANE_GROUP * LANE_GROUP * lane_token_bytes(in);
}

// The inputs of W tokens: pairs of codes [in/2][W], scales [in/32][W], and sums of codes [in/16][W].
struct TokenLanes {
    int32_t *pairs;
    float *scale;
    int32_t *sum;
};
static inline TokenLanes token_lanes(const char *inputs, int64_t in, int64_t group) {
    char *memory = (char *)inputs + group * W * lane_token_bytes(in);
    float *scale = (float *)(memory + W * in * 2);
    return {(int32_t *)memory, scale, (int32_t *)(scale + W * (in / 32))};
}

// Rounds a token's inputs into its lane; zeros where x is nullptr.
template <class T> static void round_into_lane(const T *x, int64_t in, const TokenLanes &to, int lane) {
    for (int64_t b = 0; b < in / 32; b++) {
        int32_t code[32] = {};
        to.scale[b * W + lane] = x ? round_inputs(x + b * 32, 32767, code) : 0;
        int16_t narrow[32];
        for (int i = 0; i < 32; i++) narrow[i] = (int16_t)code[i];
        for (int i = 0; i < 16; i++) __builtin_memcpy(to.pairs + (b * 16 + i) * W + lane, narrow + i * 2, 4);
        for (int half = 0; half < 2; half++) {
            int32_t sum = 0;
            for (int i = 0; i < 16; i++) sum += code[half * 16 + i];
            to.sum[(2 * b + half) * W + lane] = sum;
        }
    }
}

// Rounds the tokens first .. last-1, and after the last one of all fills its vector.
template <class T>
static void round_tokens_into_lanes(int64_t in, const Tokens &tokens, char *inputs, int64_t first, int64_t last) {
    const int64_t end = last < tokens.n ? last : (last + W - 1) / W * W;
    for (int64_t t = first; t < end; t++)
        round_into_lane(t < last ? (const T *)tokens.x + t * in : nullptr, in, token_lanes(inputs, in, t / W),
                        (int)(t % W));
}
static void round_lane_inputs(const skimkv_matrix &m, const Tokens &tokens, char *inputs, int64_t first, int64_t last) {
    if (m.dtype == SKIMKV_F32) round_tokens_into_lanes<float>(m.columns, tokens, inputs, first, last);
    else if (m.dtype == SKIMKV_F16) round_tokens_into_lanes<f16>(m.columns, tokens, inputs, first, last);
    else round_tokens_into_lanes<bf16>(m.columns, tokens, inputs, first, last);
}

// Some columns of rows as they are decoded, with a scale and an offset for every part of 16 or 32 columns: a weight is
// scale * code + offset.
struct DecodedRows {
    alignas(64) int8_t code[LANE_ROWS][LANE_COLUMNS];
    float scale[LANE_ROWS][LANE_COLUMNS / 16], offset[LANE_ROWS][LANE_COLUMNS / 16];
};

// What multiplies them: their codes in 16 bits, and sums [vector of tokens][row][W] of all columns so far.
struct LaneProducts {
    DecodedRows rows;
    alignas(64) int16_t code[LANE_ROWS][LANE_COLUMNS];
    float sum[MOST_LANE_TOKENS / W][LANE_ROWS][W];
};

// Widens the decoded codes.
static inline void widen_codes(LaneProducts &p, int rows) {
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < LANE_COLUMNS; i++) p.code[r][i] = p.rows.code[r][i];
}

// Multiplies the rows row .. row+R-1 with V vectors of tokens from number g on, in `parts` parts of PART columns from
// column `at` on.
template <int PART, int R, int V>
static inline void multiply_lanes(LaneProducts &p, int row, const TokenLanes *x, int64_t g, int64_t at, int parts,
                                  bool has_offset) {
    for (int part = 0; part < parts; part++) {
        const int64_t from = at + part * PART;
        IntegerSum products[R][V] = {};
        vi sums[V];
        for (int v = 0; v < V; v++) {
            sums[v] = load_integers(x[v].sum + from / 16 * W);
            if (PART == 32) sums[v] = sums[v] + load_integers(x[v].sum + (from / 16 + 1) * W);
        }
#pragma GCC unroll 8
        for (int i = 0; i < PART / 2; i++) {
            vi inputs[V];
            for (int v = 0; v < V; v++) inputs[v] = load_integers(x[v].pairs + (from / 2 + i) * W);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                int32_t pair;
                __builtin_memcpy(&pair, p.code[row + r] + part * PART + i * 2, 4);
                for (int v = 0; v < V; v++) products[r][v] = multiply_add(products[r][v], repeat_pair(pair), inputs[v]);
            }
        }
        for (int v = 0; v < V; v++) {
            const vf scale = load(x[v].scale + from / 32 * W), inputs = __builtin_convertvector(sums[v], vf) * scale;
            for (int r = 0; r < R; r++) {
                float *to = p.sum[g + v][row + r];
                vf all = fma(to_floats(products[r][v]), scale * splat(p.rows.scale[row + r][part]), load(to));
                if (has_offset) all = fma(inputs, splat(p.rows.offset[row + r][part]), all);
                store(to, all);
            }
        }
    }
}

// The same for all rows that were decoded, and all tokens.
template <int PART>
static void multiply_decoded_rows(LaneProducts &p, int rows, const char *inputs, int64_t in, int64_t groups, int64_t at,
                                  bool has_offset) {
    const int parts = (int)min(in - at, LANE_COLUMNS) / PART;
    for (int64_t g = 0; g < groups; g += 2) {
        const TokenLanes x[2] = {token_lanes(inputs, in, g), token_lanes(inputs, in, g + 1)};
        int row = 0;
        for (; row + ROWS_AT_ONCE <= rows && g + 1 < groups; row += ROWS_AT_ONCE)
            multiply_lanes<PART, ROWS_AT_ONCE, 2>(p, row, x, g, at, parts, has_offset);
        for (; row + ROWS_AT_ONCE <= rows; row += ROWS_AT_ONCE)
            multiply_lanes<PART, ROWS_AT_ONCE, 1>(p, row, x, g, at, parts, has_offset);
        for (; row < rows; row++)
            for (int v = 0; v < (g + 1 < groups ? 2 : 1); v++)
                multiply_lanes<PART, 1, 1>(p, row, x + v, g + v, at, parts, has_offset);
    }
}

// Stores the sums of rows for all tokens, after it has added their bias.
static void store_lanes(const skimkv_matrix &m, const Tokens &tokens, int64_t first, int rows,
                        float (*sum)[LANE_ROWS][W]) {
    float bias[LANE_ROWS] = {};
    for (int i = 0; i < rows && m.bias; i++)
        to_float(m.dtype, m.bias, m.order ? m.order[first + i] : first + i, bias + i, 1);
    for (int64_t t = 0; t < tokens.n; t += W)
        for (int row = 0; row < rows; row += W) {
            vf x[W];
            for (int i = 0; i < W; i++) x[i] = load(sum[t / W][row + i]) + splat(bias[row + i]);
            transpose(x);
            const int count = rows - row < W ? rows - row : W;
            for (int64_t i = 0; i < W && t + i < tokens.n; i++) {
                float y[W];
                store(y, x[i]);
                const int64_t to = (t + i) * m.rows;
                if (!m.order) from_float(m.dtype, y, tokens.y, to + first + row, count);
                for (int j = 0; j < count && m.order; j++)
                    from_float(m.dtype, y + j, tokens.y, to + m.order[first + row + j], 1);
            }
        }
}

// Decodes LANE_COLUMNS columns of rows from column `at` on, or fewer where they end.
template <class Block>
static void decode_rows(const skimkv_matrix &m, int64_t first, int rows, int64_t at, DecodedRows &to) {
    uint8_t copy[Block::BYTES];
    const int64_t end = min(m.columns - at, LANE_COLUMNS);
    for (int r = 0; r < rows; r++) {
        const uint8_t *w = (const uint8_t *)m.data + ((first + r) * m.columns + at) * Block::BYTES / Block::SIZE;
        for (int64_t i = 0; i < end; i += Block::SIZE, w += Block::BYTES) {
            codes code[Block::SIZE / 32];
            decode(Block(), whole_group<Block>(w, end - i, copy), code, to.scale[r] + i / Block::PART,
                   to.offset[r] + i / Block::PART);
            __builtin_memcpy(to.code[r] + i, code, sizeof code);
        }
    }
}

// Multiplies the rows first .. last-1 with all tokens.
template <class Block>
static void multiply_many_tokens(const skimkv_matrix &m, const Tokens &tokens, const char *inputs, int64_t first,
                                 int64_t last) {
    const int64_t groups = (tokens.n + W - 1) / W;
    LaneProducts p;
    for (; first < last; first += LANE_ROWS) {
        const int rows = (int)min(last - first, LANE_ROWS);
        for (int64_t g = 0; g < groups; g++)
            for (int r = 0; r < LANE_ROWS; r++) store(p.sum[g][r], splat(0.f));
        for (int64_t at = 0; at < m.columns; at += LANE_COLUMNS) {
            decode_rows<Block>(m, first, rows, at, p.rows);
            widen_codes(p, rows);
            multiply_decoded_rows<Block::PART>(p, rows, inputs, m.columns, groups, at, Block::HAS_OFFSET);
        }
        store_lanes(m, tokens, first, rows, p.sum);
    }
}

}  // namespace skimkv::SKIMKV_NS
