// Products y = x W^T + bias with weights W of 32 or 16 bits, row by row as a checkpoint has them, and a few tokens,
// such as decode steps have. Products and sums are floats of 32 bits.
#pragma once
#include <stdint.h>

#include "kernel_table.h"
#include "kernels/vector_math.h"
#include "skimkv.h"
#ifdef SKIMKV_BF16_PRODUCTS
#include "isa/float_rows_bf16.h"
#endif

namespace skimkv::SKIMKV_NS {

constexpr int FLOAT_TOKENS = W == 16 ? 8 : W == 8 ? 4 : 2;  // tokens whose sums fit the registers, for two rows
constexpr int64_t FLOATS_AHEAD_BYTES = 2048;                // how far ahead a row is prefetched
constexpr int MOST_FLOAT_TOKENS = 64;                       // whose results are kept until rows are stored

// The number of a type of elements.
template <class T> constexpr int DTYPE_OF = SKIMKV_F32;
template <> constexpr int DTYPE_OF<bf16> = SKIMKV_BF16;
template <> constexpr int DTYPE_OF<f16> = SKIMKV_F16;

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
static inline bool multiplies_inputs_as_they_are([[maybe_unused]] const skimkv_matrix &m) {
#ifdef SKIMKV_BF16_PRODUCTS
    return m.kind == SKIMKV_KIND_BF16 && m.dtype == SKIMKV_BF16 && multiplies_bf16();
#else
    return false;
#endif
}

// The results of neighbouring rows, which are stored together: in y the results of one row are far apart.
struct Results {
    static constexpr int ROWS = 16;
    float value[MOST_FLOAT_TOKENS][ROWS];
};

// Multiplies R rows with the tokens first .. last-1, at most N of them: into to[R].value[token][place].
template <class T, int R, int N, class X>
static void multiply_some_tokens(const skimkv_matrix &m, const X *x, int64_t row, int64_t apart, int64_t first,
                                 int64_t last, Results *to, int place) {
    if constexpr (N > 1)
        if (last - first < N) return multiply_some_tokens<T, R, N - 1>(m, x, row, apart, first, last, to, place);
    constexpr int COUNT = (R * N + W - 1) / W * W;
    vf sum[COUNT];
    float y[COUNT];
    multiply_float_rows<T, R, N>((const T *)m.data + row * m.columns, apart * m.columns, m.columns,
                                 x + first * m.columns, sum);
    for (int i = R * N; i < COUNT; i++) sum[i] = splat(0.f);
    for (int i = 0; i < COUNT; i += W) store(y + i, sums_of(sum + i));
    for (int r = 0; r < R; r++)
        for (int t = 0; t < N; t++) to[r].value[first + t][place] = y[r * N + t];
}

// Stores the results of the rows first .. first+rows-1, after it has added their bias.
static void store_results(const skimkv_matrix &m, const Tokens &tokens, int64_t first, int rows, Results &results) {
    float bias[Results::ROWS] = {};
    if (m.bias) to_float(m.dtype, m.bias, first, bias, rows);
    for (int64_t t = 0; t < tokens.n; t++) {
        float *value = results.value[t];
        for (int i = 0; i < rows; i++) value[i] += bias[i];
        from_float(m.dtype, value, tokens.y, t * m.rows + first, rows);
    }
}

// Multiplies the rows first .. last-1, R at a time, each of them from another part of these rows, which reads R streams
// of memory. Of many tokens, the first few read the rows from memory, the others from the cache.
template <class T, int R, int N, class X>
static void multiply_streams(const skimkv_matrix &m, const Tokens &tokens, const X *x, int64_t first, int64_t last) {
    const int64_t apart = (last - first) / R;
    Results results[R];
    for (int64_t row = first; row < first + apart; row += Results::ROWS) {
        const int rows = (int)min(Results::ROWS, first + apart - row);
        for (int i = 0; i < rows; i++)
            for (int64_t t = 0; t < tokens.n; t += N)
                multiply_some_tokens<T, R, N>(m, x, row + i, apart, t, min(tokens.n, t + N), results, i);
        for (int r = 0; r < R; r++) store_results(m, tokens, row + r * apart, rows, results[r]);
    }
    if constexpr (R > 1) multiply_streams<T, 1, N>(m, tokens, x, first + apart * R, last);
}

template <class T, class X>
static void multiply_floats(const skimkv_matrix &m, const Tokens &tokens, const X *x, int64_t first, int64_t last) {
    // Two rows are two streams of memory, and share each load of an input. Pairs of bfloat16 need fewer registers.
    constexpr int ROWS = sizeof(X) == 2 ? 3 : 2;
    if (tokens.n == 1) multiply_streams<T, 2, 1>(m, tokens, x, first, last);
    else multiply_streams<T, ROWS, FLOAT_TOKENS>(m, tokens, x, first, last);
}

static int64_t float_input_bytes(int64_t columns, int64_t n) { return n * columns * (int64_t)sizeof(float); }

template <class T>
static void order_float_inputs(const skimkv_matrix &m, const Tokens &tokens, char *inputs, int64_t first,
                               int64_t last) {
    if (multiplies_inputs_as_they_are(m)) return;
    const int64_t at = first * m.columns, count = (last - first) * m.columns;
    float *to = (float *)inputs + at;
    if (m.dtype == DTYPE_OF<T>) load_inputs((const T *)tokens.x + at, count, to);
    else if (m.dtype == SKIMKV_F32) order_inputs<T>((const float *)tokens.x + at, count, to);
    else if (m.dtype == SKIMKV_BF16) order_inputs<T>((const bf16 *)tokens.x + at, count, to);
    else order_inputs<T>((const f16 *)tokens.x + at, count, to);
}

template <class T>
static void multiply_rows_of_floats(const skimkv_matrix &m, const Tokens &tokens, const char *inputs, int64_t first,
                                    int64_t last) {
#ifdef SKIMKV_BF16_PRODUCTS
    if constexpr (sizeof(T) == 2)
        if (multiplies_inputs_as_they_are(m))
            return multiply_floats<bf16>(m, tokens, (const bf16 *)tokens.x, first, last);
#endif
    multiply_floats<T>(m, tokens, (const float *)inputs, first, last);
}

template <class T> static constexpr MatrixKind float_kind(int32_t kind) {
    constexpr ProductForm form = {1, MOST_FLOAT_TOKENS, float_input_bytes, order_float_inputs<T>,
                                  multiply_rows_of_floats<T>};
    return {kind, 32, sizeof(T), 1, form, form, 0, nullptr};
}

}  // namespace skimkv::SKIMKV_NS
