// Approximate scores from codes of 4 bits, and of 8 bits where the instruction set has the instructions for it (VNNI
// and NEON), summed in integers; quantised_index_weights.h says how.
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
#else
#include "isa/quantised_index_scalar.h"
#endif

namespace skimkv::SKIMKV_NS {

// Adds CHANNELS_AT_ONCE channels to the scores s of `count` tiles, which are s_ld apart, for GB queries, with the
// arguments of add_quantised_group for the first of these tiles.
template <bool FOUR, bool FIRST, bool LAST, int GB>
static inline void add_quantised_tiles(const uint8_t *const *p, const uint8_t *const *ahead, int64_t at, TileWeights w,
                                       float *s, int64_t s_ld, int64_t count) {
    for (int64_t i = 0; i < count; i++, at += GROUP, s += s_ld) {
        add_quantised_group<FOUR, FIRST, LAST, GB>(p, ahead, at, w, s, GROUP);
        if (!FOUR) w.high++;
        w.low++, w.step++, w.init++;
    }
}

// Adds the channels c0 .. c0+CHANNELS_AT_ONCE-1 of the unit to the scores s of `count` tiles, for GB queries from g on.
// p are the channels' codes, of which token `at` is the first; `tile` counts within the weights' span.
template <bool FOUR, int GB>
static inline void add_quantised_queries(const Unit &u, int G, int g, const uint8_t *const *p,
                                         const uint8_t *const *ahead, int64_t at, const ByteWeights &n, int64_t tile,
                                         int64_t count, int64_t c0, float *s) {
    const int64_t quads = round_up(u.r, CHANNELS_AT_ONCE) / 4;
    const int64_t weights = (g * quads + c0 / 4) * n.tiles + tile, query = g * n.tiles + tile;
    const TileWeights w{FOUR ? nullptr : n.high + weights,
                        n.low + weights,
                        n.tiles,
                        quads * n.tiles,
                        n.step + query,
                        n.init + query,
                        n.tiles};
    const bool first = c0 == 0, last = c0 + CHANNELS_AT_ONCE >= u.r;
    const int64_t ld = G * GROUP;
    s += g * GROUP;
    if (first && last) add_quantised_tiles<FOUR, true, true, GB>(p, ahead, at, w, s, ld, count);
    else if (first) add_quantised_tiles<FOUR, true, false, GB>(p, ahead, at, w, s, ld, count);
    else if (last) add_quantised_tiles<FOUR, false, true, GB>(p, ahead, at, w, s, ld, count);
    else add_quantised_tiles<FOUR, false, false, GB>(p, ahead, at, w, s, ld, count);
}

// The same for every query: codes are unpacked once for several of them.
template <bool FOUR>
static inline void add_quantised_channels(const skimkv_op *op, const Unit &u, const uint8_t *const *p,
                                          const uint8_t *const *ahead, int64_t at, const ByteWeights &n, int64_t tile,
                                          int64_t count, int64_t c0, float *s) {
    const int G = op->cache->G;
    int g = 0;
    for (; g + 4 <= G; g += 4) add_quantised_queries<FOUR, 4>(u, G, g, p, ahead, at, n, tile, count, c0, s);
    if (g + 2 <= G) add_quantised_queries<FOUR, 2>(u, G, g, p, ahead, at, n, tile, count, c0, s), g += 2;
    if (g < G) add_quantised_queries<FOUR, 1>(u, G, g, p, ahead, at, n, tile, count, c0, s);
}

}  // namespace skimkv::SKIMKV_NS
