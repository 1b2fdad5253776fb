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

// The same for codes of 4 bits and a whole tile; `at` is in bytes.
template <int GB>
static inline void add_int4_channels(const uint8_t *const *p, const uint8_t *const *ahead, int64_t at, int nc,
                                     const float *w, int64_t wld, bool first, const float *init, float *s, int64_t ld) {
    constexpr int U = W == 16 ? (GB == 4 ? 4 : 8) : GB == 4 ? 2 : GB == 2 ? 4 : 8;
    NibbleTable t[GB][CHANNELS_AT_ONCE];
    for (int c = 0; c < nc; c++)
        for (int g = 0; g < GB; g++) t[g][c] = nibble_table(w[g * wld + c]);
    for (int block = 0; block < GROUP / 128; block++)
        for (int part = 0; part < 16 / W; part++)
            for (int i = 0; i < 8; i += U) {
                float *to = s + block * 128 + part * W + i * 16;
                vf a[GB][U];
                for (int g = 0; g < GB; g++)
                    for (int u = 0; u < U; u++)
                        a[g][u] = first ? splat(init[g]) : load(to + g * ld + u * 16) + splat(init[g]);
                for (int c = 0; c < nc; c++) {
                    const uint8_t *from = p[c] + at + block * 64 + part * 4 * W;
                    if (i == 0 && part == 0) prefetch(ahead[c] + at + block * 64);
                    vi codes = load_dwords(from);
#pragma GCC unroll 8
                    for (int u = 0; u < U; u++)
                        for (int g = 0; g < GB; g++) a[g][u] = a[g][u] + nibble_product(t[g][c], codes, i + u);
                }
                for (int g = 0; g < GB; g++)
                    for (int u = 0; u < U; u++) store(to + g * ld + u * 16, a[g][u]);
            }
}

// The same for every type T of the index.
template <class T, int GB>
static inline void add_typed_channels(const T *const *p, const T *const *ahead, int64_t at, int n, int nc,
                                      const float *w, int64_t wld, bool first, const float *init, float *s,
                                      int64_t ld) {
    using bytes = const uint8_t *const *;
    if constexpr (is_int4<T>) add_int4_channels<GB>((bytes)p, (bytes)ahead, at, nc, w, wld, first, init, s, ld);
    else add_channels<T, GB>(p, ahead, at, n, nc, w, wld, first, init, s, ld);
}

// The same for G queries.
template <class T>
static inline void add_channels_of_queries(const T *const *p, const T *const *ahead, int64_t at, int n, int nc,
                                           const float *w, int64_t wld, int G, bool first, const float *init, float *s,
                                           int64_t ld) {
    int g = 0;
    for (; g + 4 <= G; g += 4)
        add_typed_channels<T, 4>(p, ahead, at, n, nc, w + g * wld, wld, first, init + g, s + g * ld, ld);
    if (g + 2 <= G)
        add_typed_channels<T, 2>(p, ahead, at, n, nc, w + g * wld, wld, first, init + g, s + g * ld, ld), g += 2;
    if (g < G) add_typed_channels<T, 1>(p, ahead, at, n, nc, w + g * wld, wld, first, init + g, s + g * ld, ld);
}

}  // namespace skimkv::SKIMKV_NS
