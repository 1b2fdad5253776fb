// Products of tokens with matrices of every kind, as parts of larger operations.
#pragma once
#include <stdint.h>

#include "kernel_table.h"
#include "skimkv.h"
#include "threads.h"

namespace skimkv {

constexpr char NO_MEMORY[] = "no memory for the inputs of a linear layer";

// The most matrices of one `multiply`.
constexpr int MOST_MATRICES = 3;

struct Sizes {
    int64_t out, in;
    int dtype;
};

inline Sizes sizes_of(const skimkv_matrix &m) { return {m.rows, m.columns, m.dtype}; }

// In one line what is wrong with a matrix or its tokens, or nullptr.
const char *matrix_error(const skimkv_matrix &m, const Tokens &tokens);

// In one line what is wrong with a matrix whose row i stands for token i, and with n tokens, or nullptr.
const char *embedding_error(const skimkv_matrix &m, const int64_t *ids, int64_t n);

// Writes the rows of n tokens, which are valid, to x [n,columns]; the bias and the order are not used.
void embed(const skimkv_matrix &m, const int64_t *ids, void *x, int64_t n);

// Bytes of n tokens' inputs in the form in which a matrix, which is valid, multiplies them.
int64_t input_bytes(const skimkv_matrix &m, int64_t n);

// How many threads an operation of this number of products uses.
int threads_for(int64_t products, int threads, skimkv_parallel parallel);

// Into how many parts the units of an operation are split: several a thread, so that a thread that was interrupted
// takes fewer, but none so short that its stream of memory is over before it is fast.
int64_t parts_of(int64_t units, int64_t products, int threads);

// Calls f(first, last) for parts of `units`.
template <class F>
void for_each_part(int64_t units, int64_t products, int threads, skimkv_parallel parallel, const F &f) {
    const int64_t parts = parts_of(units, products, threads);
    for_each_task(parts, threads, parallel, [&](int64_t i, int) { f(units * i / parts, units * (i + 1) / parts); });
}

// Products of the same tokens with several matrices, as one operation: the threads start and end once. `inputs` has
// room for the inputs of every matrix.
void multiply(const Kernels *kernels, const skimkv_matrix *matrices, const Tokens *tokens, int count, char *inputs,
              int threads, skimkv_parallel parallel);

}  // namespace skimkv
