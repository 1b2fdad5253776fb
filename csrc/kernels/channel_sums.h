// Weighted sums of the channels of a channel-major index: the approximate logits of SparQ's step 1 (arXiv 2312.04985)
// and of the low-rank baseline. A channel is a contiguous run of tokens, so that the memory is read in long streams.
#pragma once
#include <stdint.h>

#include "kernels/cache_layout.h"
#include "kernels/vector_math.h"

namespace skimkv::SKIMKV_NS {

// Channels that are read at once. Hardware prefetchers follow eight long runs; sixteen halve the bandwidth, and
// prefetching by hand does not bring it back.
constexpr int CHANNELS_AT_ONCE = 8;
// How far ahead bytes are prefetched by hand all the same: for CPUs that do not prefetch, and from one run to the next.
constexpr int AHEAD_BYTES = 256;

// The element type of an index of 4 bits; one element is two codes.
struct Int4 {
    uint8_t bits;
};
template <class T> constexpr bool is_int4 = false;
template <> constexpr bool is_int4<Int4> = true;

// Adds init[g] + sum_c w[g*wld + c] p_c[at + x] to s[g*ld + x], or writes it there if `first`, for GB queries, nc
// channels and n tokens, and perhaps for further tokens of the tile. The same places of `ahead` are prefetched.
template <class T, int GB>
static inline void add_channels(const T *const *p, const T *const *ahead, int64_t at, int n, int nc, const float *w,
                                int64_t wld, bool first, const float *init, float *s, int64_t ld) {
    constexpr int U = (W == 16 ? 16 : 8) / GB < 8 ? (W == 16 ? 16 : 8) / GB : 8;
    for (int x = 0; x < n; x += U * W) {
        vf a[GB][U];
        for (int g = 0; g < GB; g++)
            for (int u = 0; u < U; u++) a[g][u] = splat(init[g]);
        for (int c = 0; c < nc; c++) {
            const T *from = p[c] + at + x;
            for (int b = 0; b < (int)(U * W * sizeof(T)) && n == GROUP; b += 64)
                prefetch((const char *)(ahead[c] + at + x) + b);
            vf wc[GB];
            for (int g = 0; g < GB; g++) wc[g] = splat(w[g * wld + c]);
#pragma GCC unroll 8
            for (int u = 0; u < U; u += 2) {
                vf v0, v1;
                load_pair(from + u * W, v0, v1);
                for (int g = 0; g < GB; g++)
                    a[g][u] = fma(wc[g], v0, a[g][u]), a[g][u + 1] = fma(wc[g], v1, a[g][u + 1]);
            }
        }
        for (int g = 0; g < GB; g++)
            for (int u = 0; u < U; u += 2) {
                float *to = s + g * ld + x + u * W;
                restore_order(p[0], a[g][u], a[g][u + 1]);
                store(to, first ? a[g][u] : load(to) + a[g][u]);
                store(to + W, first ? a[g][u + 1] : load(to + W) + a[g][u + 1]);
            }
    }
}

// The same for G queries.
template <class T>
static inline void add_channels_of_queries(const T *const *p, const T *const *ahead, int64_t at, int n, int nc,
                                           const float *w, int64_t wld, int G, bool first, const float *init, float *s,
                                           int64_t ld) {
    int g = 0;
    for (; g + 4 <= G; g += 4)
        add_channels<T, 4>(p, ahead, at, n, nc, w + g * wld, wld, first, init + g, s + g * ld, ld);
    if (g + 2 <= G) add_channels<T, 2>(p, ahead, at, n, nc, w + g * wld, wld, first, init + g, s + g * ld, ld), g += 2;
    if (g < G) add_channels<T, 1>(p, ahead, at, n, nc, w + g * wld, wld, first, init + g, s + g * ld, ld);
}

}  // namespace skimkv::SKIMKV_NS
