// Scratch memory, from which pieces are taken one after the other.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kernels/vector_math.h"

namespace skimkv::SKIMKV_NS {

// Every piece begins at a multiple of 64 bytes. Without memory (at = nullptr) an arena only counts the bytes that the
// same calls would take from it.
struct Arena {
    char *at;
    size_t used = 0;
    template <class T> T *take(int64_t n) {
        T *p = at ? (T *)(at + used) : nullptr;
        used += round_up(n * (int64_t)sizeof(T), 64);
        return p;
    }
};

}  // namespace skimkv::SKIMKV_NS
