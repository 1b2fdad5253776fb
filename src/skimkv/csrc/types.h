// Element types shared by all instruction sets, and the table of entry points each of them fills.
#pragma once
#include "skimkv.h"

namespace skimkv {

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

// The 8-bit product: activations to 16-bit integers, then this thread's share of the rows.
struct Linear {
    void (*narrow)(const skimkv_linear *, char *x, int ith, int nth);
    void (*share)(const skimkv_linear *, const char *x, int ith, int nth);
};

// Everything an instruction set provides; isa.h fills it once per set. A unit is a row of the batch and a KV head.
struct Kernels {
    size_t (*work)(const skimkv_op *, int nth);
    void (*share)(const skimkv_op *, void *work, int ith, int nth);
    void (*append)(const skimkv_tokens *, int64_t unit);
    size_t (*stream_work)(const skimkv_clusters *);
    void (*stream)(const skimkv_clusters *, void *work, int64_t unit);
    void (*stream_append)(const skimkv_clusters *, int64_t unit);
    Linear linear;
    size_t (*columns_work)(const skimkv_columns *);
    void (*columns)(const skimkv_columns *, void *work, int64_t task);
};

extern const Kernels scalar_kernels, avx2_kernels, avx512_kernels, vnni_kernels, neon_kernels;

const Kernels *kernels();  // of the instruction set in use, or nullptr
bool bf16_products();      // whether that set multiplies bfloat16 pairs

// The new row of an operation as an append.
static inline skimkv_tokens tokens(const skimkv_op *op) {
    return {op->cache, op->k_new, op->v_new, 1, op->n_b, op->n_h, 0, op->n_b, op->n_h, 0, nullptr, nullptr};
}

static inline bool misaligned(const void *p, int dtype) { return (uintptr_t)p & (dtype == SKIMKV_F32 ? 3 : 1); }

// Bytes of one token's activations as integers: [in] int16, then [in/32] float scales.
static inline int64_t narrow_bytes(int64_t in) { return (in * 2 + in / 32 * 4 + 63) / 64 * 64; }

}  // namespace skimkv
