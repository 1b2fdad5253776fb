// Integer sums of codes of 4 bits on any machine: products of words of 16 bits in the compiler's vector extension,
// summed over the channels that are read at once.
#pragma once
#include <stdint.h>

#include "isa/simd_scalar.h"
#include "kernels/channel_sums.h"
#include "kernels/quantised_index_weights.h"
#include "kernels/vector_math.h"

namespace skimkv::SKIMKV_NS {

typedef uint8_t Bytes8 __attribute__((vector_size(8)));
typedef int16_t Words8 __attribute__((vector_size(16)));

// Adds 128 tokens: the low nibble of byte i is token 32*(i%4) + i/4, and the high one 16 further.
template <bool FIRST, bool LAST, int GB>
static inline void add_int4_tokens(const uint8_t *const *p, const uint8_t *const *ahead, int64_t x,
                                   const TileWeights &w, float *s, int64_t ld) {
    static_assert(CHANNELS_AT_ONCE * 15 * 127 <= INT16_MAX, "the sums fit into words");
    for (int c = 0; c < CHANNELS_AT_ONCE; c++) prefetch(ahead[c] + x);
    for (int i = 0; i < 64; i += 8) {
        Words8 low[GB] = {}, high[GB] = {};
        for (int c = 0; c < CHANNELS_AT_ONCE; c++) {
            Bytes8 bytes;
            __builtin_memcpy(&bytes, p[c] + x + i, 8);
            const Words8 both = __builtin_convertvector(bytes, Words8), first = both & 15, second = both >> 4;
            for (int g = 0; g < GB; g++) {
                const int8_t weight = (int8_t)(w.low[g * w.query_ld + c / 4 * w.quad_ld] >> 8 * (c % 4));
                low[g] += first * weight, high[g] += second * weight;
            }
        }
        for (int g = 0; g < GB; g++)
            for (int e = 0; e < 8; e++)
                for (int half = 0; half < 2; half++) {
                    float *to = s + g * ld + 32 * (e % 4) + (i + e) / 4 + 16 * half;
                    int32_t sum = half ? high[g][e] : low[g][e], earlier;
                    if (!FIRST) __builtin_memcpy(&earlier, to, 4), sum += earlier;
                    if (LAST) *to = (float)sum * w.step[g * w.float_ld] + w.init[g * w.float_ld];
                    else __builtin_memcpy(to, &sum, 4);
                }
    }
}

template <bool FOUR, bool FIRST, bool LAST, int GB>
static inline void add_quantised_group(const uint8_t *const *p, const uint8_t *const *ahead, int64_t at,
                                       const TileWeights &w, float *s, int64_t ld) {
    static_assert(FOUR, "sums of 8-bit codes do not fit into words");
    for (int i = 0; i < 2; i++) add_int4_tokens<FIRST, LAST, GB>(p, ahead, at / 2 + i * 64, w, s + i * 128, ld);
}

}  // namespace skimkv::SKIMKV_NS
