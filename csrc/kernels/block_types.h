// The types of GGUF blocks that are multiplied as they are.
#pragma once
#include <stdint.h>

#include "isa/simd.h"

namespace skimkv::SKIMKV_NS {

// The order in which a set of instructions may want the inputs of 128 or 256 weights (isa/block_rows_vnni.h).
enum class InputOrder { AS_THEY_ARE, HALVES_OF_32, HALVES_OF_64 };

// The types: SIZE weights in BYTES bytes, in parts of PART weights.
struct BlockQ4_0 {  // four blocks of 32: a float16 scale, then two codes a byte
    static constexpr int SIZE = 128, BYTES = 72, PART = 32;
    static constexpr bool HAS_OFFSET = false;
    static constexpr InputOrder ORDER = InputOrder::HALVES_OF_32;
};
struct BlockQ4_K {  // two float16 scales, of the scales and of the minima; 6 bits of each for every part; codes
    static constexpr int SIZE = 256, BYTES = 144, PART = 32;
    static constexpr bool HAS_OFFSET = true;
    static constexpr InputOrder ORDER = InputOrder::HALVES_OF_64;
};
struct BlockQ5_K {  // the same, with the fifth bits of the codes before the rest of them
    static constexpr int SIZE = 256, BYTES = 176, PART = 32;
    static constexpr bool HAS_OFFSET = true;
    static constexpr InputOrder ORDER = InputOrder::HALVES_OF_64;
};
struct BlockQ6_K {  // four bits of the codes, two bits of the codes, 8-bit scales, and their float16 scale
    static constexpr int SIZE = 256, BYTES = 210, PART = 16;
    static constexpr bool HAS_OFFSET = false;
    static constexpr InputOrder ORDER = InputOrder::AS_THEY_ARE;
};

// The bytes of a group of blocks of which `weights` are left in the row: `w` itself, or a copy filled with zeros.
template <class Block> static inline const uint8_t *whole_group(const uint8_t *w, int64_t weights, uint8_t *copy) {
    if (weights >= Block::SIZE) return w;
    for (int i = 0; i < Block::BYTES; i++) copy[i] = i < weights * Block::BYTES / Block::SIZE ? w[i] : 0;
    return copy;
}

}  // namespace skimkv::SKIMKV_NS
