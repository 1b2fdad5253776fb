// The functions that every instruction set provides: isa/fill_kernel_table.h fills one table per set, and
// instruction_sets.cpp selects the table that operations use.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "skimkv.h"

namespace skimkv {

// The tokens of a layer of a model: x [n,in] and y [n,out].
struct Tokens {
    const void *x;
    void *y;
    int64_t n;
};

// How matrices are multiplied with tokens, whose inputs are prepared first.
struct ProductForm {
    int rows;                                            // that one thread multiplies at once
    int most_tokens;                                     // of one call of multiply
    int64_t (*input_bytes)(int64_t columns, int64_t n);  // of n tokens
    // Prepares the inputs of the tokens first .. last-1.
    void (*prepare_inputs)(const skimkv_matrix &, const Tokens &, char *inputs, int64_t first, int64_t last);
    // Multiplies the rows first .. last-1 with all tokens.
    void (*multiply)(const skimkv_matrix &, const Tokens &, const char *inputs, int64_t first, int64_t last);
};

// One kind of matrices.
struct MatrixKind {
    int32_t kind;
    int weights;    // of a block: a row has whole blocks
    int alignment;  // of the matrix, in bytes
    int rows;       // that are stored together
    ProductForm few, many;
    int64_t many_tokens;  // from which on `many` is the form of a product
    // Writes the weights of the rows first .. last-1 to y; nullptr for floats.
    void (*expand)(const skimkv_matrix &, void *y, int64_t first, int64_t last);
};

// A "unit" is a row of the batch and a KV head. A "task" is a share of the work that one thread takes at a time.
// Every `*_bytes` function says how much scratch memory one call of the kernel below it needs.
struct Kernels {
    // A step of attention; the threads ith of nth share one scratch memory.
    size_t (*attention_scratch_bytes)(const skimkv_op *, int nth);
    void (*attention)(const skimkv_op *, void *scratch, int ith, int nth);
    void (*append)(const skimkv_tokens *, int64_t unit);
    // Codes the tokens from .. to-1 of the tail, which is the last, incomplete group, by the scale of the group before
    // it.
    void (*code_open)(const skimkv_cache *, int64_t unit, int64_t from, int64_t to);
    // Products with matrices: one entry for every kind (kernels/matrix_kinds.h).
    const MatrixKind *matrix_kinds;
    int matrix_kind_count;
    // Causal attention of a prompt.
    size_t (*prompt_scratch_bytes)(const skimkv_prompt *);
    int64_t (*prompt_tasks)(const skimkv_prompt *);
    void (*prompt_attention)(const skimkv_prompt *, void *scratch, int64_t task);
    // Normalises the tokens first .. last-1; y may be x.
    void (*rms_norm)(const skimkv_rms_norm *, const Tokens &, int64_t first, int64_t last);
    // Writes activation(gate) * up to `gate`.
    void (*gate)(int dtype, int activation, void *gate, const void *up, int64_t count);
    // Adds `from` to `to`.
    void (*add)(int dtype, void *to, const void *from, int64_t count);
    // Turns the heads x [heads,D] of one token by the angles whose cosines and sines are given, both [D].
    void (*rotate)(int dtype, const void *cos, const void *sin, int64_t heads, int D, void *x);
    // Turns the keys of row b.
    void (*turn_keys)(const skimkv_turn *, int64_t b);
};

namespace scalar {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace vnni {
extern const Kernels kernels;
}
namespace neon {
extern const Kernels kernels;
}

constexpr char NO_KERNELS[] = "the instruction set that SKIMKV_ISA names is not available";

// The kernels of the instruction set in use, or nullptr if SKIMKV_ISA names a set that this machine does not have.
const Kernels *selected_kernels();

// Whether the instruction set in use multiplies pairs of bfloat16.
bool multiplies_bf16();

// Whether Intel made this processor: it prefetches otherwise than AMD's do, whatever their instruction sets.
bool is_intel_processor();

// The new row of an operation, as tokens to be appended.
static inline skimkv_tokens new_token_of(const skimkv_op *op) {
    return {op->cache, op->k_new, op->v_new, 1, op->n_b, op->n_h, 0, op->n_b, op->n_h, 0, nullptr, nullptr};
}

// Validates a step over the blocks op->paged, and runs it: nullptr, or one line that says what is wrong.
const char *step_in_blocks(const skimkv_op *op, int threads, skimkv_parallel parallel);

// In one line what is wrong with tokens, a matrix or a normalisation, or nullptr.
const char *tokens_error(const Tokens &tokens, int dtype);
const char *matrix_error(const skimkv_matrix *matrix, const MatrixKind *kind);
const char *rms_norm_error(const skimkv_rms_norm *op, const Tokens &tokens);

// In one line what is wrong with keys to be turned, or nullptr.
const char *turn_error(const skimkv_turn *op);

// In one line what is wrong with the attention of a prompt, or nullptr.
const char *prompt_error(const skimkv_prompt *op);

}  // namespace skimkv
