// Step 1 over a channel-major index: approximate logits from a few channels, each a long contiguous run.
#pragma once

namespace skimkv::SKIMKV_NS {

constexpr int GROUP = SKIMKV_GROUP;
// Channels streamed at once. Eight long runs are what hardware prefetchers follow; twice as many halve the bandwidth,
// and prefetching by hand does not bring it back.
constexpr int TOGETHER = 8;
constexpr int AHEAD = 256;  // bytes prefetched by hand all the same: for cores that do not prefetch, and from run to run

struct Code4 {
    uint8_t bits;
};
template <class T> constexpr bool is_code4 = false;
template <> constexpr bool is_code4<Code4> = true;

// s[g*ld + x] = init[g] + sum_c w[g*wld + c] p_c[at + x] for n tokens and perhaps some more of the 256, added to what
// is there unless `first`. What lies as far into `ahead` is prefetched.
template <class T, int GB>
static inline void stream(const T *const *p, const T *const *ahead, int64_t at, int n, int nc, const float *w, int64_t wld,
                          bool first, const float *init, float *s, int64_t ld) {
    constexpr int U = (W == 16 ? 16 : 8) / GB < 8 ? (W == 16 ? 16 : 8) / GB : 8;
    for (int x = 0; x < n; x += U * W) {
        vf a[GB][U];
        for (int g = 0; g < GB; g++)
            for (int u = 0; u < U; u++) a[g][u] = splat(init[g]);
        for (int c = 0; c < nc; c++) {
            const T *from = p[c] + at + x;
            for (int b = 0; b < (int)(U * W * sizeof(T)) && n == GROUP; b += 64) prefetch((const char *)(ahead[c] + at + x) + b);
            vf wc[GB];
            for (int g = 0; g < GB; g++) wc[g] = splat(w[g * wld + c]);
#pragma GCC unroll 8
            for (int u = 0; u < U; u += 2) {
                vf v0, v1;
                get2(from + u * W, v0, v1);
                for (int g = 0; g < GB; g++)
                    a[g][u] = fma(wc[g], v0, a[g][u]), a[g][u + 1] = fma(wc[g], v1, a[g][u + 1]);
            }
        }
        for (int g = 0; g < GB; g++)
            for (int u = 0; u < U; u += 2) {
                float *to = s + g * ld + x + u * W;
                zip(p[0], a[g][u], a[g][u + 1]);
                put(to, first ? a[g][u] : get(to) + a[g][u]);
                put(to + W, first ? a[g][u + 1] : get(to + W) + a[g][u + 1]);
            }
    }
}

// The same for int4 codes, `at` in bytes.
template <int GB>
static inline void stream4(const uint8_t *const *p, const uint8_t *const *ahead, int64_t at, int nc, const float *w,
                           int64_t wld, bool first, const float *init, float *s, int64_t ld) {
    constexpr int U = W == 16 ? (GB == 4 ? 4 : 8) : GB == 4 ? 2 : GB == 2 ? 4 : 8;
    Table t[GB][TOGETHER];
    for (int c = 0; c < nc; c++)
        for (int g = 0; g < GB; g++) t[g][c] = table(w[g * wld + c]);
    for (int block = 0; block < GROUP / 128; block++)
        for (int part = 0; part < 16 / W; part++)
            for (int i = 0; i < 8; i += U) {
                float *to = s + block * 128 + part * W + i * 16;
                vf a[GB][U];
                for (int g = 0; g < GB; g++)
                    for (int u = 0; u < U; u++) a[g][u] = first ? splat(init[g]) : get(to + g * ld + u * 16) + splat(init[g]);
                for (int c = 0; c < nc; c++) {
                    const uint8_t *from = p[c] + at + block * 64 + part * 4 * W;
                    if (i == 0 && part == 0) prefetch(ahead[c] + at + block * 64);
                    vi codes = dwords(from);
#pragma GCC unroll 8
                    for (int u = 0; u < U; u++)
                        for (int g = 0; g < GB; g++) a[g][u] = a[g][u] + pick(t[g][c], codes, i + u);
                }
                for (int g = 0; g < GB; g++)
                    for (int u = 0; u < U; u++) put(to + g * ld + u * 16, a[g][u]);
            }
}

template <class T, int GB>
static inline void stream_any(const T *const *p, const T *const *ahead, int64_t at, int n, int nc, const float *w,
                              int64_t wld, bool first, const float *init, float *s, int64_t ld) {
    using bytes = const uint8_t *const *;
    if constexpr (is_code4<T>) stream4<GB>((bytes)p, (bytes)ahead, at, nc, w, wld, first, init, s, ld);
    else stream<T, GB>(p, ahead, at, n, nc, w, wld, first, init, s, ld);
}

template <class T>
static inline void stream_heads(const T *const *p, const T *const *ahead, int64_t at, int n, int nc, const float *w,
                                int64_t wld, int G, bool first, const float *init, float *s, int64_t ld) {
    int g = 0;
    for (; g + 4 <= G; g += 4) stream_any<T, 4>(p, ahead, at, n, nc, w + g * wld, wld, first, init + g, s + g * ld, ld);
    if (g + 2 <= G) stream_any<T, 2>(p, ahead, at, n, nc, w + g * wld, wld, first, init + g, s + g * ld, ld), g += 2;
    if (g < G) stream_any<T, 1>(p, ahead, at, n, nc, w + g * wld, wld, first, init + g, s + g * ld, ld);
}

}  // namespace skimkv::SKIMKV_NS
