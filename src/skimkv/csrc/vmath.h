// What the kernels build on the vector operations: exp, soft caps, conversions, prefetches.
#pragma once

namespace skimkv::SKIMKV_NS {

constexpr float LOWEST = -3e38f;

static inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t roundup(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
// A prefetch is no side effect to the compiler, and a function that does nothing else would be dropped: hence the asm.
static inline void prefetch(const void *p) {
    __builtin_prefetch(p, 0, 3);
    __asm__ volatile("");
}
// Into the L2 cache, which has far more lines on their way at once than L1.
static inline void prefetch_far(const void *p) {
    __builtin_prefetch(p, 0, 2);
    __asm__ volatile("");
}

// 2^x for x < 127, relative error 2e-7; NaN stays NaN, and below -126 it is all but zero. Logits are kept in units of
// log 2 (the scale carries log2 e), so that this serves every softmax.
static inline vf vexp2(vf x) {
    vf f = fraction(x), p = splat(1.877576680e-3f);
    p = fma(p, f, splat(8.989340284e-3f));
    p = fma(p, f, splat(5.582631767e-2f));
    p = fma(p, f, splat(2.401536173e-1f));
    p = fma(p, f, splat(6.931530731e-1f));
    p = fma(p, f, splat(9.999999251e-1f));
    return times_power(p, x);
}

static inline float exp2f1(float x) {
    float y[W];
    put(y, vexp2(splat(x)));
    return y[0];
}

constexpr float LOG2E = 1.44269504f;

// cap * tanh(x / cap), x and cap in units of log 2; cap 0: x itself.
static inline vf softcapped(vf x, float cap) {
    if (cap == 0) return x;
    vf t = vmin(splat(60.f), vmax(splat(-60.f), x * splat(2 * LOG2E / cap)));  // tanh by 1 - 2 / (exp(2x) + 1)
    return splat(cap) - splat(2 * cap) / (vexp2(t) + splat(1.f));
}

static inline float scalar(float x) { return x; }
static inline float scalar(bf16 x) {
    uint32_t u = (uint32_t)x.bits << 16;
    float f;
    __builtin_memcpy(&f, &u, 4);
    return f;
}

static inline void round_to(float *p, float x) { *p = x; }
static inline void round_to(f16 *p, float x) { *p = half(x); }
static inline void round_to(bf16 *p, float x) {
    uint32_t u;
    __builtin_memcpy(&u, &x, 4);
    p->bits = x != x ? 0x7fc0 : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

template <class T> static inline void to_float(const T *from, float *to, int n) {
    for (int i = 0; i < n; i++) to[i] = scalar(from[i]);
}
template <class T> static inline void from_float(const float *from, T *to, int n) {
    for (int i = 0; i < n; i++) round_to(to + i, from[i]);
}

// The same for a type known only at run time.
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
