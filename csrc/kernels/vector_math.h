// Mathematics that all kernels share, built on the vector operations of isa/simd_*.h: powers of two, the soft cap,
// conversions of element types, and prefetches.
#pragma once
#include <stdint.h>

#include "element_types.h"
#include "isa/simd.h"
#include "skimkv.h"

namespace skimkv::SKIMKV_NS {

// The logit of a position that is hidden: finite, so that the difference of two of them is not NaN.
constexpr float LOWEST = -3e38f;

static inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static inline vi load_integers(const void *p) {  // of 32 bits, or pairs of 16
    vi x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}
// Prefetches into the L2 cache: one into the L1 cache would take one of the few places that it has for lines on their
// way, and loads would wait for them. To the compiler a prefetch has no effect, and it would drop a function that does
// nothing else; the empty asm keeps it. So __builtin_prefetch is called nowhere else.
static inline void prefetch(const void *p) {
    __builtin_prefetch(p, 0, 2);
    __asm__ volatile("");
}
// The same of memory that will be written.
static inline void prefetch_to_write(const void *p) {
    __builtin_prefetch(p, 1, 3);
    __asm__ volatile("");
}

// 2^x for -126 < x < 127, with a relative error of 2e-7. NaN stays NaN; from -126 down it is at most 2^-126, and below
// -150 it is 0. Logits are kept in units of log 2 (the scale is multiplied by log2 e), so that every softmax uses this
// function.
static inline vf exp2(vf x) {
    vf f = fraction(x), p = splat(1.877576680e-3f);
    p = fma(p, f, splat(8.989340284e-3f));
    p = fma(p, f, splat(5.582631767e-2f));
    p = fma(p, f, splat(2.401536173e-1f));
    p = fma(p, f, splat(6.931530731e-1f));
    p = fma(p, f, splat(9.999999251e-1f));
    return times_power(p, x);
}

static inline float exp2_scalar(float x) {
    float y[W];
    store(y, exp2(splat(x)));
    return y[0];
}

// Whether a lane is NaN.
static inline bool any_nan(vf x) { return at_least(x, x) != (unsigned)((1ull << W) - 1); }

// log2 e.
constexpr float LOG2E = 1.44269504f;

// What the sink of query head `head` adds to the sum of 2^(logit - maximum) of its softmax; 0 without sinks. Above
// 2^126 it makes no difference, because the weights of all positions are then zero. The function is not inlined, so
// that steps without sinks do not carry its code.
__attribute__((noinline)) static float weight_of_sink(float sink, float maximum) {
    const float x = sink * LOG2E - maximum;
    return x < -126 ? 0 : exp2_scalar(x > 126 ? 126 : x);
}
static inline float sink_weight(const float *sinks, int64_t head, float maximum) {
    return __builtin_expect(sinks != nullptr, 0) ? weight_of_sink(sinks[head], maximum) : 0;
}

// cap * tanh(x / cap), where x and cap are in units of log 2. A cap of 0 means none. tanh(y) = 1 - 2 / (exp(2y) + 1)
// cancels near zero; up to 1/4 five terms of its series have a relative error of 1e-8.
static inline vf apply_softcap(vf x, float cap) {
    if (cap == 0) return x;
    const vf y = x * splat(1 / cap), square = y * y;
    vf series = splat(62.f / 2835);
    series = fma(series, square, splat(-17.f / 315));
    series = fma(series, square, splat(2.f / 15));
    series = fma(series, square, splat(-1.f / 3));
    const vf small = fma(x * square, series, x), t = vmin(splat(60.f), vmax(splat(-60.f), y * splat(2 * LOG2E)));
    const vf large = splat(cap) - splat(2 * cap) / (exp2(t) + splat(1.f));
    const vi is_small = (vi)(square < splat(1.f / 16));
    return (vf)(((vi)small & is_small) | ((vi)large & ~is_small));
}

// One element as a float.
static inline float as_float(float x) { return x; }
static inline float as_float(bf16 x) {
    uint32_t u = (uint32_t)x.bits << 16;
    float f;
    __builtin_memcpy(&f, &u, 4);
    return f;
}

// Rounds x to the type of *p, to nearest even.
static inline void round_to(float *p, float x) { *p = x; }
static inline void round_to(f16 *p, float x) { *p = to_f16(x); }
static inline void round_to(bf16 *p, float x) {
    uint32_t u;
    __builtin_memcpy(&u, &x, 4);
    p->bits = x != x ? 0x7fc0 : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

// Conversions of n elements, from and to float.
template <class T> static inline void to_float(const T *from, float *to, int n) {
    int i = 0;
    for (; i + W <= n; i += W) store(to + i, load(from + i));
    for (; i < n; i++) to[i] = as_float(from[i]);
}
template <class T> static inline void from_float(const float *from, T *to, int n) {
    for (int i = 0; i < n; i++) round_to(to + i, from[i]);
}
#ifdef SKIMKV_SIMD_AVX512
static inline void from_float(const float *from, bf16 *to, int n) {
    int i = 0;
    for (; i + W <= n; i += W) store(to + i, load(from + i));
    for (; i < n; i++) round_to(to + i, from[i]);
}
#else
static inline vf load(const int8_t *p) {
    float x[W];
    for (int i = 0; i < W; i++) x[i] = p[i];
    return load(x);
}
#endif
#if !defined(SKIMKV_SIMD_AVX512) && !defined(SKIMKV_SIMD_AVX2)
static inline void pack_lanes(vf x, unsigned lanes, float *p) {
    float y[W];
    store(y, x);
    for (; lanes; lanes &= lanes - 1, p++) __builtin_memcpy(p, y + __builtin_ctz(lanes), sizeof *p);
}
#endif

// The same of integers, and the lanes of a mask: bit i is set where all bits of lane i are.
static inline void pack_lanes(vi x, unsigned lanes, int32_t *p) { pack_lanes((vf)x, lanes, (float *)p); }
static inline unsigned lanes_of(vi mask) { return at_least((vf)(mask & (vi)splat(1.f)), splat(1.f)); }

// The same for a type that is known only at run time: `at` is the first element.
static inline void to_float(int dtype, const void *from, int64_t at, float *to, int n) {
    if (dtype == SKIMKV_F32) to_float((const float *)from + at, to, n);
    else if (dtype == SKIMKV_BF16) to_float((const bf16 *)from + at, to, n);
    else to_float((const f16 *)from + at, to, n);
}
static inline void from_float(int dtype, const float *from, void *to, int64_t at, int n) {
    if (dtype == SKIMKV_F32) from_float(from, (float *)to + at, n);
    else if (dtype == SKIMKV_BF16) from_float(from, (bf16 *)to + at, n);
    else from_float(from, (f16 *)to + at, n);
}

}  // namespace skimkv::SKIMKV_NS
