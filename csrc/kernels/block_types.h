// The types of GGUF blocks that are multiplied as they are.
#pragma once
#include <stdint.h>

#include "isa/simd.h"

namespace skimkv::SKIMKV_NS {

// The order in which a set of instructions may want the inputs of 64 to 256 weights (isa/block_rows_vnni.h, _avx2.h).
enum class InputOrder { AS_THEY_ARE, HALVES_OF_32, HALVES_OF_64, QUARTERS, HALVES_OF_TWO };

// `Size` weights in `Bytes` bytes, in parts of `Part` weights that have a scale. They may have an offset too. Codes are
// signed where `Bias` is not 0, which makes them unsigned when it is added.
template <int Size, int Bytes, int Part, bool HasOffset, int Bias, InputOrder Order> struct BlockType {
    static constexpr int SIZE = Size, BYTES = Bytes, PART = Part, BIAS = Bias;
    static constexpr bool HAS_OFFSET = HasOffset;
    static constexpr InputOrder ORDER = Order;
};

constexpr int FOUR_BLOCKS = 128;  // weights of a group of the smaller blocks, of which a row may have any number

// Four blocks of 32 weights, each `Bytes` bytes with its codes from byte `Codes` on: two codes a byte, the second half
// of them in the high bits.
template <int Bytes, int Codes, bool HasOffset, int Bias>
struct FourBlocks : BlockType<FOUR_BLOCKS, 4 * Bytes, 32, HasOffset, Bias, InputOrder::HALVES_OF_32> {
    static constexpr int ONE = Bytes, CODES = Codes;
};
struct BlockQ4_0 : FourBlocks<18, 2, false, 8> {};      // a float16 scale
struct BlockQ4_1 : FourBlocks<20, 4, true, 0> {};       // a float16 scale and offset
struct BlockQ5_0 : FourBlocks<22, 6, false, 16> {};     // a float16 scale, then the fifth bits of the codes
struct BlockQ5_1 : FourBlocks<24, 8, true, 0> {};       // a float16 scale and offset, then the fifth bits
struct BlockQ8_0 : FourBlocks<34, 2, false, 128> {};    // a float16 scale, and a code a byte
struct BlockIQ4_NL : FourBlocks<18, 2, false, 128> {};  // a float16 scale; a code is a place in a table
struct BlockMXFP4 : FourBlocks<17, 1, false, 16> {};    // a scale that is the exponent of a float; codes of floats

// 16 bytes with 4 bits of a scale and of a minimum, codes of 2 bits, and float16 scales of the scales and the minima.
struct BlockQ2_K : BlockType<256, 84, 16, true, 0, InputOrder::QUARTERS> {};
// The third bits of the codes, the rest of them, 16 scales of 6 bits, and their float16 scale.
struct BlockQ3_K : BlockType<256, 110, 16, false, 4, InputOrder::QUARTERS> {};
// Two float16 scales, of the scales and of the minima; 6 bits of each for every part; the codes.
struct BlockQ4_K : BlockType<256, 144, 32, true, 0, InputOrder::HALVES_OF_64> {};
// The same, with the fifth bits of the codes before the rest of them.
struct BlockQ5_K : BlockType<256, 176, 32, true, 0, InputOrder::HALVES_OF_64> {};
// Four bits of the codes, two bits of the codes, 8-bit scales, and their float16 scale.
struct BlockQ6_K : BlockType<256, 210, 16, false, 32, InputOrder::AS_THEY_ARE> {};
// A float16 scale of the scales, which have 6 bits, and codes as those of IQ4_NL.
struct BlockIQ4_XS : BlockType<256, 136, 32, false, 128, InputOrder::HALVES_OF_32> {};

// What a code of IQ4_NL and IQ4_XS stands for, and twice what a code of MXFP4 does.
alignas(16) constexpr int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                               1,    13,   25,  38,  53,  69,  89,  113};
alignas(16) constexpr int8_t MXFP4_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// The bytes of a group of blocks of which `weights` are left in the row: `w` itself, or a copy filled with zeros.
// Larger blocks are a group each.
template <class Block> static inline const uint8_t *whole_group(const uint8_t *w, int64_t weights, uint8_t *copy) {
    if (weights >= Block::SIZE || Block::SIZE != FOUR_BLOCKS) return w;
    constexpr int ONE = Block::BYTES / 4;
    for (int b = 0; b < 4; b++)
        if (b * 32 < weights) __builtin_memcpy(copy + b * ONE, w + b * ONE, ONE);
        else __builtin_memset(copy + b * ONE, 0, ONE);
    return copy;
}

}  // namespace skimkv::SKIMKV_NS
