// Products y = x W^T + bias with 8-bit weights W in panels, which skimkv.h describes.
//
// Sixteen rows of W are interleaved into a panel, so that each lane of a vector is a row: no lanes are summed, and
// every lane has its scale. Inputs are rounded to 16-bit integers with one scale per block of 32, so that products are
// exact in 32 bits; the error is 2^-16 of a block's largest input, which is less than that of bfloat16.
#pragma once
#include <stdint.h>

#include "kernel_table.h"
#include "kernels/rounded_inputs.h"
#include "kernels/vector_math.h"
#include "skimkv.h"

namespace skimkv::SKIMKV_NS {

constexpr int PANEL_ROWS = 16, PANEL_VECTORS = PANEL_ROWS / W;  // rows of a panel, and vectors that hold them
constexpr int64_t PANEL_BLOCK_BYTES = PANEL_ROWS * 34;          // bytes: 16 scales, then 16 times two codes of each row
constexpr int64_t WEIGHTS_AHEAD_BYTES = 4 * PANEL_BLOCK_BYTES;  // how far ahead weights are prefetched
constexpr int TOKENS_AT_ONCE = W == 16 ? 8 : W == 8 ? 4 : 2;    // tokens whose sums fit the registers

// Bytes of one token's inputs as integers: int16 codes, then a float scale for every 32 of them.
static int64_t panel_token_bytes(int64_t columns) { return (columns * 2 + columns / 32 * 4 + 63) / 64 * 64; }

// Rounds one token's inputs.
template <class T> static void round_panel_token(const T *x, int64_t in, char *to) {
    int16_t *code = (int16_t *)to;
    float *scale = (float *)(to + in * 2);
    for (int64_t b = 0; b < in / 32; b++) {
        int32_t rounded[32];
        scale[b] = round_inputs(x + b * 32, 32767, rounded);
        for (int i = 0; i < 32; i++) code[b * 32 + i] = (int16_t)rounded[i];
    }
}

// Adds two sums of integers.
template <class S> static inline S add_sums(S a, S b) {
    if constexpr (sizeof(S) == sizeof(vi)) return a + b;
    else return {a.low + b.low, a.high + b.high};
}

// Multiplies T tokens, rounded and `stride` bytes apart, with P panels of weights, `panel` bytes apart:
// out[t][P*PANEL_ROWS].
template <int T, int P>
static void multiply_tile(const char *w, int64_t panel, int64_t in, const char *x, int64_t stride, float *out) {
    constexpr int CHAINS = T == 1 ? 2 : 1;  // with one token, a single sum would wait for itself
    vf sum[T][P * PANEL_VECTORS];
    for (int t = 0; t < T; t++)
        for (int v = 0; v < P * PANEL_VECTORS; v++) sum[t][v] = splat(0.f);
    for (int64_t b = 0; b < in / 32; b++, w += PANEL_BLOCK_BYTES) {
        IntegerSum part[CHAINS][T][P * PANEL_VECTORS] = {};
        const auto step = [&](int k) __attribute__((always_inline)) {
            if (k * 64 < PANEL_BLOCK_BYTES)
                for (int p = 0; p < P; p++) prefetch(w + p * panel + WEIGHTS_AHEAD_BYTES + k * 64);
            vi codes[P * PANEL_VECTORS];
            for (int v = 0; v < P * PANEL_VECTORS; v++)
                codes[v] = load_int16_pairs((const int8_t *)w + v / PANEL_VECTORS * panel + (1 + k) * 2 * PANEL_ROWS +
                                            v % PANEL_VECTORS * 2 * W);
            for (int t = 0; t < T; t++) {
                int32_t input_pair;
                __builtin_memcpy(&input_pair, x + t * stride + b * 64 + k * 4, 4);
                IntegerSum *to = part[k % CHAINS][t];
                for (int v = 0; v < P * PANEL_VECTORS; v++)
                    to[v] = multiply_add(to[v], codes[v], repeat_pair(input_pair));
            }
        };
        if constexpr (T == 1) {
#pragma GCC unroll 16
            for (int k = 0; k < 16; k++) step(k);
        } else {
#pragma GCC unroll 1  // unrolled, the compiler would widen all codes first and spill the sums
            for (int k = 0; k < 16; k++) step(k);
        }
        for (int v = 0; v < P * PANEL_VECTORS; v++) {
            const vf scale = load((const f16 *)(w + v / PANEL_VECTORS * panel) + v % PANEL_VECTORS * W);
            for (int t = 0; t < T; t++) {
                float input_scale;
                __builtin_memcpy(&input_scale, x + t * stride + in * 2 + b * 4, 4);
                const IntegerSum all = CHAINS == 1 ? part[0][t][v] : add_sums(part[0][t][v], part[CHAINS - 1][t][v]);
                sum[t][v] = fma(to_floats(all), scale * splat(input_scale), sum[t][v]);
            }
        }
    }
    for (int t = 0; t < T; t++)
        for (int v = 0; v < P * PANEL_VECTORS; v++) store(out + t * P * PANEL_ROWS + v * W, sum[t][v]);
}

// The same for n tokens, at most T.
template <int P, int T = TOKENS_AT_ONCE>
static void multiply_tokens(int n, const char *w, int64_t panel, int64_t in, const char *x, int64_t stride,
                            float *out) {
    if (n == T) multiply_tile<T, P>(w, panel, in, x, stride, out);
    else if constexpr (T > 1) multiply_tokens<P, T - 1>(n, w, panel, in, x, stride, out);
}

// Multiplies P panels with all tokens, in groups of about the same size: the first group reads the panels from memory,
// the others from the cache.
template <int P>
static void multiply_panels(const skimkv_matrix &m, const Tokens &tokens, const char *x, int64_t first) {
    const int64_t panel = m.columns / 32 * PANEL_BLOCK_BYTES, stride = panel_token_bytes(m.columns);
    const int64_t groups = (tokens.n + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE;
    const int rows = (int)min(P * PANEL_ROWS, m.rows - first * PANEL_ROWS);
    float y[TOKENS_AT_ONCE * P * PANEL_ROWS], bias[P * PANEL_ROWS] = {};
    if (m.bias) to_float(m.dtype, m.bias, first * PANEL_ROWS, bias, rows);
    for (int64_t g = 0; g < groups; g++) {
        const int64_t from = tokens.n * g / groups, to = tokens.n * (g + 1) / groups;
        multiply_tokens<P>((int)(to - from), (const char *)m.data + first * panel, panel, m.columns, x + from * stride,
                           stride, y);
        for (int64_t t = from; t < to; t++) {
            float *row = y + (t - from) * P * PANEL_ROWS;
            for (int i = 0; i < P * PANEL_ROWS; i++) row[i] += bias[i];
            from_float(m.dtype, row, tokens.y, t * m.rows + first * PANEL_ROWS, rows);
        }
    }
}

static void round_panel_inputs(const skimkv_matrix &m, const Tokens &tokens, char *x, int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++) {
        char *to = x + t * panel_token_bytes(m.columns);
        if (m.dtype == SKIMKV_F32) round_panel_token((const float *)tokens.x + t * m.columns, m.columns, to);
        else if (m.dtype == SKIMKV_BF16) round_panel_token((const bf16 *)tokens.x + t * m.columns, m.columns, to);
        else round_panel_token((const f16 *)tokens.x + t * m.columns, m.columns, to);
    }
}

// Multiplies the panels of the rows first .. last-1: two at a time where the registers allow it, which reads two
// streams of memory and loads every input once for both.
static void multiply_panel_rows(const skimkv_matrix &m, const Tokens &tokens, const char *x, int64_t first,
                                int64_t last) {
    const int64_t to = (last + PANEL_ROWS - 1) / PANEL_ROWS;
    int64_t p = first / PANEL_ROWS;
    if (W == 16 || tokens.n == 1)
        for (; p + 2 <= to; p += 2) multiply_panels<2>(m, tokens, x, p);
    for (; p < to; p++) multiply_panels<1>(m, tokens, x, p);
}

// Writes the weights of the rows first .. last-1 to y.
static void expand_panel_rows(const skimkv_matrix &m, void *y, int64_t first, int64_t last) {
    const int64_t panel = m.columns / 32 * PANEL_BLOCK_BYTES;
    for (int64_t row = first; row < last; row++) {
        const int lane = (int)(row % PANEL_ROWS);
        const char *w = (const char *)m.data + row / PANEL_ROWS * panel;
        for (int64_t at = 0; at < m.columns; at += 32, w += PANEL_BLOCK_BYTES) {
            const float scale = as_float(((const f16 *)w)[lane]);
            int8_t code[32];
            for (int i = 0; i < 16; i++) __builtin_memcpy(code + 2 * i, w + ((1 + i) * PANEL_ROWS + lane) * 2, 2);
            float weight[32];
            for (int i = 0; i < 32; i++) weight[i] = scale * (float)code[i];
            from_float(m.dtype, weight, y, row * m.columns + at, 32);
        }
    }
}

static int64_t panel_input_bytes(int64_t columns, int64_t n) { return n * panel_token_bytes(columns); }

static constexpr MatrixKind panel_kind(int32_t kind) {
    constexpr ProductForm form = {PANEL_ROWS, 256, panel_input_bytes, round_panel_inputs, multiply_panel_rows};
    return {kind, 32, 2, PANEL_ROWS, form, form, 0, expand_panel_rows};
}

}  // namespace skimkv::SKIMKV_NS
