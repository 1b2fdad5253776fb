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

// A "unit" is a row of the batch and a KV head. A "task" is a share of the work that one thread takes at a time.
// Every `*_bytes` function says how much scratch memory one call of the kernel below it needs.
struct Kernels {
    // Attention (all methods but SubGenStream); the threads ith of nth share one scratch memory.
    size_t (*attention_scratch_bytes)(const skimkv_op *, int nth);
    // stage_ns as for skimkv_step_timed, or nullptr.
    void (*attention)(const skimkv_op *, void *scratch, int ith, int nth, int64_t *stage_ns);
    void (*append)(const skimkv_tokens *, int64_t unit);
    // SubGenStream.
    size_t (*cluster_scratch_bytes)(const skimkv_clusters *);
    void (*cluster_attention)(const skimkv_clusters *, void *scratch, int64_t unit);
    void (*cluster_append)(const skimkv_clusters *, int64_t unit);
    // The linear layer: the inputs are rounded to 16-bit integers first, then multiplied with the weights.
    void (*linear_round_inputs)(const skimkv_linear *, const Tokens &, char *inputs, int64_t task, int64_t tasks);
    void (*linear_multiply)(const skimkv_linear *, const Tokens &, const char *inputs, int64_t task, int64_t tasks);
    // The linear layer with the blocks of a GGUF file: the inputs are rounded first, then multiplied with the rows
    // first .. last-1; and these rows as floats.
    void (*block_linear_round_inputs)(const skimkv_block_linear *, const Tokens &, char *inputs);
    void (*block_linear_multiply)(const skimkv_block_linear *, const Tokens &, char *inputs, int64_t first,
                                  int64_t last);
    void (*block_linear_expand)(const skimkv_block_linear *, void *y, int64_t first, int64_t last);
    // The linear layer with weights of 32 or 16 bits, likewise.
    void (*float_linear_order_inputs)(const skimkv_float_linear *, const Tokens &, float *inputs);
    void (*float_linear_multiply)(const skimkv_float_linear *, const Tokens &, const float *inputs, int64_t first,
                                  int64_t last);
    // Causal attention of a prompt.
    size_t (*prompt_scratch_bytes)(const skimkv_prompt *);
    int64_t (*prompt_tasks)(const skimkv_prompt *);
    void (*prompt_attention)(const skimkv_prompt *, void *scratch, int64_t task);
    // Normalises the tokens first .. last-1; y may be x.
    void (*rms_norm)(const skimkv_rms_norm *, const Tokens &, int64_t first, int64_t last);
    // Writes silu(gate) * up to `gate`.
    void (*gate)(int dtype, void *gate, const void *up, int64_t count);
    // Adds `from` to `to`.
    void (*add)(int dtype, void *to, const void *from, int64_t count);
    // Turns the heads x [heads,D] of one token by the angles whose cosines and sines are given, both [D].
    void (*rotate)(int dtype, const void *cos, const void *sin, int64_t heads, int D, void *x);
    size_t (*key_scores_scratch_bytes)(const skimkv_columns *);
    void (*key_scores)(const skimkv_columns *, void *scratch, int64_t task);
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

// The kernels of the instruction set in use, or nullptr if SKIMKV_ISA names a set that this machine does not have.
const Kernels *selected_kernels();

// Whether the instruction set in use multiplies pairs of bfloat16.
bool multiplies_bf16();

// The new row of an operation, as tokens to be appended.
static inline skimkv_tokens new_token_of(const skimkv_op *op) {
    return {op->cache, op->k_new, op->v_new, 1, op->n_b, op->n_h, 0, op->n_b, op->n_h, 0, nullptr, nullptr};
}

// In one line what is wrong with a layer or its tokens, or nullptr.
const char *linear_error(const skimkv_linear *op, const Tokens &tokens);
const char *block_linear_error(const skimkv_block_linear *op, const Tokens &tokens);
const char *block_expand_error(const skimkv_block_linear *op, const void *y);
const char *float_linear_error(const skimkv_float_linear *op, const Tokens &tokens);
const char *rms_norm_error(const skimkv_rms_norm *op, const Tokens &tokens);

// In one line what is wrong with the attention of a prompt, or nullptr.
const char *prompt_error(const skimkv_prompt *op);

// Bytes of one token's inputs to a linear layer as integers: [in] int16, then [in/32] float scales.
static inline int64_t rounded_input_bytes(int64_t in) { return (in * 2 + in / 32 * 4 + 63) / 64 * 64; }

}  // namespace skimkv
