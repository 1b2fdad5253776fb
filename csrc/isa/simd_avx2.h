// AVX2 with FMA and F16C: vectors of eight floats. simd_avx512.h describes the operations.
#pragma once
#ifndef SKIMKV_NS
#define SKIMKV_NS avx2
#endif
#define SKIMKV_SIMD_AVX2

#include <immintrin.h>

#include "element_types.h"

namespace skimkv::SKIMKV_NS {

constexpr int W = 8;
using vf = __m256;
typedef int vi __attribute__((vector_size(32)));

static inline vf splat(float x) { return _mm256_set1_ps(x); }
static inline vf load(const float *p) { return _mm256_loadu_ps(p); }
// The first `count` elements, fewer than W; the other lanes are zero.
static inline vf load_first(const float *p, int64_t count) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), lane));
}
static inline vf load(const bf16 *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
static inline vf load(const f16 *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
static inline vf load(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
static inline void store(float *p, vf x) { _mm256_storeu_ps(p, x); }
template <class T> static inline vf load8(const T *p) { return load(p); }

static inline vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
static inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline float max_lanes(vf x) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
static inline float sum_lanes(vf x) {
    __m128 m = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1);
    m += _mm_movehl_ps(m, m);
    return _mm_cvtss_f32(_mm_add_ss(m, _mm_movehdup_ps(m)));
}
// The lanes that pack_lanes takes for every mask, in ascending order; a byte for each.
struct PackedLanes {
    uint64_t of[256] = {};
    constexpr PackedLanes() {
        for (int mask = 0; mask < 256; mask++)
            for (int lane = 7; lane >= 0; lane--)
                if (mask >> lane & 1) of[mask] = of[mask] << 8 | (uint64_t)lane;
    }
};
static constexpr PackedLanes PACKED_LANES;
static inline void pack_lanes(vf x, unsigned lanes, float *p) {
    const __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)PACKED_LANES.of[lanes]));
    _mm256_storeu_ps(p, _mm256_permutevar8x32_ps(x, order));
}
static inline unsigned at_least(vf a, vf b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)); }

// The two parts of exp2: x - floor(x), and p * 2^floor(x), or 0 up to -126. Adding 1.5 * 2^23 + 127 rounds a float to
// an integer, whose low bits are then the exponent of 2^floor(x). NaN stays NaN, since p is multiplied.
constexpr float ROUNDS_TO_EXPONENT = 12582912 + 127;
static inline vf exponent(vf x) { return vmax(splat(-126.f), x) - splat(0.5f) + splat(ROUNDS_TO_EXPONENT); }
static inline vf fraction(vf x) { return vmax(splat(-126.f), x) - (exponent(x) - splat(ROUNDS_TO_EXPONENT)); }
static inline vf times_power(vf p, vf x) {
    return _mm256_and_ps(p * (vf)((vi)exponent(x) << 23), _mm256_cmp_ps(x, splat(-126.f), _CMP_NLT_UQ));
}

static inline void interleave(vf a, vf b, vf &first, vf &second) {
    const vf low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
    first = _mm256_permute2f128_ps(low, high, 0x20), second = _mm256_permute2f128_ps(low, high, 0x31);
}
template <class T> static inline void load_pair(const T *p, vf &a, vf &b) { a = load(p), b = load(p + W); }
template <class T> static inline void restore_order(const T *, vf &, vf &) {}
static inline void load_pair(const bf16 *p, vf &even, vf &odd) {
    __m256i x = _mm256_loadu_si256((const __m256i *)p);
    even = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
    odd = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000)));
}
static inline void restore_order(const bf16 *, vf &a, vf &b) { interleave(a, b, a, b); }

static inline vf sums_of(const vf *x) {
    vf a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    vf b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
    return _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
}

static inline void transpose(vf *x) {
    vf t[8], u[8];
    for (int i = 0; i < 8; i += 2)
        t[i] = _mm256_unpacklo_ps(x[i], x[i + 1]), t[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            u[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + 2 + j], 0x44);
            u[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + 2 + j], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        x[i] = _mm256_permute2f128_ps(u[i], u[4 + i], 0x20);
        x[4 + i] = _mm256_permute2f128_ps(u[i], u[4 + i], 0x31);
    }
}

static inline float as_float(f16 x) { return _cvtsh_ss(x.bits); }
static inline f16 to_f16(float x) { return {_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)}; }

using IntegerSum = vi;
static inline vi load_int16_pairs(const int8_t *p) {
    return (vi)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
}
static inline vi repeat_pair(int32_t two) { return (vi)_mm256_set1_epi32(two); }
static inline IntegerSum multiply_add(IntegerSum s, vi a, vi b) {
    return s + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}
static inline vf to_floats(IntegerSum s) { return _mm256_cvtepi32_ps((__m256i)s); }

}  // namespace skimkv::SKIMKV_NS
