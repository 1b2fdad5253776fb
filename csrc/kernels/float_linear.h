// The linear layer y = x W^T + bias with weights W [out,in] of 32 or 16 bits, row by row as a checkpoint has them, and
// a few tokens x [n,in], such as decode steps have. Products and sums are floats of 32 bits.
#pragma once
#include <stdint.h>

#include "kernel_table.h"
#include "kernels/vector_math.h"
#include "skimkv.h"
#ifdef SKIMKV_BF16_PRODUCTS
#include "isa/linear_rows_bf16.h"
#endif

namespace skimkv::SKIMKV_NS {

constexpr int FLOAT_TOKENS = W == 16 ? 8 : W == 8 ? 4 : 2;  // tokens whose sums fit the registers, for two rows
constexpr int64_t FLOATS_AHEAD_BYTES = 2048;                // how far ahead a row is prefetched

// Writes the inputs as floats, each 2*W of them in the order in which load_pair loads weights of type T.
template <class T, class X> static void order_inputs(const X *x, int64_t count, float *to) {
    T place[2 * W];
    for (int i = 0; i < 2 * W; i++) round_to(place + i, (float)i);
    vf first, second;
    load_pair(place, first, second);
    float order[2 * W];
    store(order, first), store(order + W, second);
    for (int64_t at = 0; at < count; at += 2 * W)
        for (int i = 0; i < 2 * W; i++) to[at + i] = as_float(x[at + (int)order[i]]);
}
// The same where both have one type.
template <class T> static void load_inputs(const T *x, int64_t count, float *to) {
    for (int64_t at = 0; at < count; at += 2 * W) {
        vf first, second;
        load_pair(x + at, first, second);
        store(to + at, first), store(to + at + W, second);
    }
}

// Multiplies R rows, `apart` weights from each other, with N tokens: the lanes of to[R*N] are the parts of a product,
// which do not depend on R and N.
template <class T, int R, int N>
static inline void multiply_float_rows(const T *w, int64_t apart, int64_t in, const float *x, vf *to) {
    constexpr int64_t AHEAD = FLOATS_AHEAD_BYTES / (int64_t)sizeof(T);
    vf sum[R][N];
    for (int r = 0; r < R; r++)
        for (int t = 0; t < N; t++) sum[r][t] = splat(0.f);
    for (int64_t at = 0; at < in; at += 2 * W) {
        vf a[R], b[R];
        for (int r = 0; r < R; r++) {
            for (size_t line = 0; line < 2 * W * sizeof(T); line += 64)
                prefetch((const char *)(w + r * apart + at + AHEAD) + line);
            load_pair(w + r * apart + at, a[r], b[r]);
        }
        for (int t = 0; t < N; t++) {
            const vf p = load(x + t * in + at), q = load(x + t * in + at + W);
            for (int r = 0; r < R; r++) sum[r][t] = fma(b[r], q, fma(a[r], p, sum[r][t]));
        }
    }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < N; t++) to[r * N + t] = sum[r][t];
}

#ifdef SKIMKV_BF16_PRODUCTS
// The same with inputs as they came.
template <class, int R, int N>
static inline void multiply_float_rows(const bf16 *w, int64_t apart, int64_t in, const bf16 *x, vf *to) {
    multiply_rows_bf16<R, N>(w, apart, in, FLOATS_AHEAD_BYTES, x, to);
}
#endif

// Whether inputs are multiplied as they came.
static inline bool multiplies_inputs_as_they_are([[maybe_unused]] const skimkv_float_linear *op) {
#ifdef SKIMKV_BF16_PRODUCTS
    return op->type == SKIMKV_BF16 && op->dtype == SKIMKV_BF16 && multiplies_bf16();
#else
    return false;
#endif
}

// The results of neighbouring rows, which are stored together: in y the results of one row are far apart.
struct Results {
    static constexpr int ROWS = 16;
    float value[SKIMKV_MAX_FLOAT_TOKENS][ROWS];
};

// Multiplies R rows with the tokens first .. last-1, at most N of them: into to[R].value[token][place].
template <class T, int R, int N, class X>
static void multiply_some_tokens(const skimkv_float_linear *op, const X *x, int64_t row, int64_t apart, int64_t first,
                                 int64_t last, Results *to, int place) {
    if constexpr (N > 1)
        if (last - first < N) return multiply_some_tokens<T, R, N - 1>(op, x, row, apart, first, last, to, place);
    constexpr int COUNT = (R * N + W - 1) / W * W;
    vf sum[COUNT];
    float y[COUNT];
    multiply_float_rows<T, R, N>((const T *)op->w + row * op->in, apart * op->in, op->in, x + first * op->in, sum);
    for (int i = R * N; i < COUNT; i++) sum[i] = splat(0.f);
    for (int i = 0; i < COUNT; i += W) store(y + i, sums_of(sum + i));
    for (int r = 0; r < R; r++)
        for (int t = 0; t < N; t++) to[r].value[first + t][place] = y[r * N + t];
}

// Stores the results of the rows first .. first+rows-1, after it has added their bias.
static void store_results(const skimkv_float_linear *op, const Tokens &tokens, int64_t first, int rows,
                          Results &results) {
    float bias[Results::ROWS] = {};
    if (op->bias) to_float(op->dtype, op->bias, first, bias, rows);
    for (int64_t t = 0; t < tokens.n; t++) {
        float *value = results.value[t];
        for (int i = 0; i < rows; i++) value[i] += bias[i];
        from_float(op->dtype, value, tokens.y, t * op->out + first, rows);
    }
}

// Multiplies the rows first .. last-1, R at a time, each of them from another part of these rows, which reads R streams
// of memory. Of many tokens, the first few read the rows from memory, the others from the cache.
template <class T, int R, int N, class X>
static void multiply_streams(const skimkv_float_linear *op, const Tokens &tokens, const X *x, int64_t first,
                             int64_t last) {
    const int64_t apart = (last - first) / R;
    Results results[R];
    for (int64_t row = first; row < first + apart; row += Results::ROWS) {
        const int rows = (int)min(Results::ROWS, first + apart - row);
        for (int i = 0; i < rows; i++)
            for (int64_t t = 0; t < tokens.n; t += N)
                multiply_some_tokens<T, R, N>(op, x, row + i, apart, t, min(tokens.n, t + N), results, i);
        for (int r = 0; r < R; r++) store_results(op, tokens, row + r * apart, rows, results[r]);
    }
    if constexpr (R > 1) multiply_streams<T, 1, N>(op, tokens, x, first + apart * R, last);
}

template <class T, class X>
static void multiply_floats(const skimkv_float_linear *op, const Tokens &tokens, const X *x, int64_t first,
                            int64_t last) {
    // Two rows are two streams of memory, and share each load of an input. Pairs of bfloat16 need fewer registers.
    constexpr int ROWS = sizeof(X) == 2 ? 3 : 2;
    if (tokens.n == 1) multiply_streams<T, 2, 1>(op, tokens, x, first, last);
    else multiply_streams<T, ROWS, FLOAT_TOKENS>(op, tokens, x, first, last);
}

template <class T> static void prepare_inputs(const skimkv_float_linear *op, const Tokens &tokens, float *to) {
    const int64_t count = tokens.n * op->in;
    if (op->type == op->dtype) load_inputs((const T *)tokens.x, count, to);
    else if (op->dtype == SKIMKV_F32) order_inputs<T>((const float *)tokens.x, count, to);
    else if (op->dtype == SKIMKV_BF16) order_inputs<T>((const bf16 *)tokens.x, count, to);
    else order_inputs<T>((const f16 *)tokens.x, count, to);
}

static void float_linear_order_inputs(const skimkv_float_linear *op, const Tokens &tokens, float *to) {
    if (multiplies_inputs_as_they_are(op)) return;
    if (op->type == SKIMKV_F32) prepare_inputs<float>(op, tokens, to);
    else if (op->type == SKIMKV_BF16) prepare_inputs<bf16>(op, tokens, to);
    else prepare_inputs<f16>(op, tokens, to);
}

// Multiplies the rows first .. last-1 with the ordered inputs.
static void float_linear_multiply(const skimkv_float_linear *op, const Tokens &tokens, const float *x, int64_t first,
                                  int64_t last) {
#ifdef SKIMKV_BF16_PRODUCTS
    if (multiplies_inputs_as_they_are(op))
        return multiply_floats<bf16>(op, tokens, (const bf16 *)tokens.x, first, last);
#endif
    if (op->type == SKIMKV_F32) multiply_floats<float>(op, tokens, x, first, last);
    else if (op->type == SKIMKV_BF16) multiply_floats<bf16>(op, tokens, x, first, last);
    else multiply_floats<f16>(op, tokens, x, first, last);
}

}  // namespace skimkv::SKIMKV_NS
