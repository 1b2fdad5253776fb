// Random numbers that depend on what they are drawn for, not on the order of the draws: so they are the same for any
// batch size and padding, and when a step is repeated. src/skimkv/ops/hashing.py computes the same words.
#pragma once
#include <stdint.h>

#include "isa/simd.h"

namespace skimkv::SKIMKV_NS {

// W words of 32 bits; their arithmetic is modulo 2^32.
typedef uint32_t vw __attribute__((vector_size(4 * W)));

constexpr uint32_t GOLDEN = 0x9E3779B1;

// The finaliser of MurmurHash3, of one word or of W.
template <class T> static inline T mix_bits(T h) {
    h = (h ^ h >> 16) * 0x85EBCA6Bu;
    h = (h ^ h >> 13) * 0xC2B2AE35u;
    return h ^ h >> 16;
}
// The hash of what h is the hash of, and one word more.
static inline uint32_t add_word(uint32_t h, uint32_t word) { return mix_bits(h * GOLDEN + word); }

// Writes the hashes of first, first + 1 and following, without their last bits, as floats: n of them, a multiple of W.
static inline void hashes_as_floats(uint32_t first, float *to, int n) {
    uint32_t lanes[W];
    for (int i = 0; i < W; i++) lanes[i] = first + (uint32_t)i;
    vw word;
    __builtin_memcpy(&word, lanes, sizeof word);
    for (int i = 0; i < n; i += W, word += (uint32_t)W)
        store(to + i, __builtin_convertvector((vi)(mix_bits(word) >> 1), vf));
}

}  // namespace skimkv::SKIMKV_NS
