// Vector operations as loops over lanes, for sets of four lanes without an instruction for them. simd_avx512.h
// describes the operations.
#pragma once
#include <stdint.h>

#include "isa/simd.h"

namespace skimkv::SKIMKV_NS {

static inline vf load_first(const float *p, int64_t count) {
    vf x = {};
    for (int i = 0; i < W && i < count; i++) x[i] = p[i];
    return x;
}

static inline void transpose(vf *x) {
    for (int i = 0; i < W; i++)
        for (int j = 0; j < i; j++) {
            const float below = x[i][j];
            x[i][j] = x[j][i], x[j][i] = below;
        }
}

}  // namespace skimkv::SKIMKV_NS
