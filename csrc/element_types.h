// The 16-bit element types. An instruction set converts them with instructions of its own (isa/simd_*.h).
#pragma once
#include <stdint.h>

#include "skimkv.h"

namespace skimkv {

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

static inline int64_t value_bytes(int dtype) { return dtype == SKIMKV_F32 ? 4 : 2; }

// Whether a pointer to elements of this type lies between two of them.
static inline bool is_misaligned(const void *p, int dtype) { return (uintptr_t)p & (dtype == SKIMKV_F32 ? 3 : 1); }

}  // namespace skimkv
