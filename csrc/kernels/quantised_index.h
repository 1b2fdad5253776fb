// Approximate scores from codes of 8 or 4 bits, summed in integers (quantised_index_weights.h says how) where the
// instruction set has the instructions for it: VNNI, AVX2 and NEON.
#pragma once
#include <stdint.h>

#include "kernels/channel_sums.h"
#include "kernels/quantised_index_weights.h"
#include "kernels/unit.h"
#include "skimkv.h"
#if defined(SKIMKV_SIMD_VNNI)
#include "isa/quantised_index_vnni.h"
#elif defined(SKIMKV_SIMD_AVX2) || defined(SKIMKV_SIMD_AVX512)
#include "isa/quantised_index_avx2.h"
#elif defined(SKIMKV_SIMD_NEON)
#include "isa/quantised_index_neon.h"
#endif

namespace skimkv::SKIMKV_NS {

// Adds the channels c0 .. c0+CHANNELS_AT_ONCE-1 of the unit to the scores s of one tile, for every query. p are the
// channels' codes, of which token `at` is the first; `tile` counts within the weights' span.
template <bool FOUR>
static inline void add_quantised_tile(const skimkv_op *op, const Unit &u, const uint8_t *const *p,
                                      const uint8_t *const *ahead, int64_t at, const ByteWeights &n, int64_t tile,
                                      int64_t c0, float *s) {
    const int64_t quads = round_up(u.r, CHANNELS_AT_ONCE) / 4;
    const bool first = c0 == 0, last = c0 + CHANNELS_AT_ONCE >= u.r;
    for (int g = 0; g < op->cache->G; g++, s += u.padded_n) {
        const int64_t weights = (g * quads + c0 / 4) * n.tiles + tile, query = g * n.tiles + tile;
        const TileWeights w{n.high + weights, n.low + weights, n.tiles, n.step[query], n.init[query]};
        if (first && last) add_quantised_group<FOUR, true, true>(p, ahead, at, w, s);
        else if (first) add_quantised_group<FOUR, true, false>(p, ahead, at, w, s);
        else if (last) add_quantised_group<FOUR, false, true>(p, ahead, at, w, s);
        else add_quantised_group<FOUR, false, false>(p, ahead, at, w, s);
    }
}

}  // namespace skimkv::SKIMKV_NS
