// AVX-512 (F, BW, DQ and VL, with VNNI where the compiler may use it): vectors of sixteen floats.
//
// Every simd_*.h provides the operations that are described here, so that the kernels are written once. None of them
// needs an aligned pointer.
#pragma once
#ifndef SKIMKV_NS
#define SKIMKV_NS avx512
#endif
#define SKIMKV_SIMD_AVX512
#ifdef __AVX512VNNI__
#define SKIMKV_SIMD_VNNI
#endif

#include <immintrin.h>

#include "element_types.h"

namespace skimkv::SKIMKV_NS {

constexpr int W = 16;                             // lanes of a vector
using vf = __m512;                                // W floats
typedef int vi __attribute__((vector_size(64)));  // W 32-bit integers

// Loads of W elements, converted to float.

static inline vf splat(float x) { return _mm512_set1_ps(x); }
static inline vf load(const float *p) { return _mm512_loadu_ps(p); }
// The first `count` elements, fewer than W; the other lanes are zero.
static inline vf load_first(const float *p, int64_t count) {
    return _mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), p);
}
static inline vf load(const bf16 *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
static inline vf load(const f16 *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
static inline vf load(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
static inline vf load(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
static inline void store(float *p, vf x) { _mm512_storeu_ps(p, x); }
// Rounds W elements, to nearest even.
static inline void store(bf16 *p, vf x) {
    const __m512i bits = _mm512_castps_si512(x),
                  odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i high = _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), is_nan, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(high));
}

// Loads eight elements; the other lanes are zero. The kernels use it where D is not a multiple of W but of 8.
static inline vf load8(const float *p) { return _mm512_zextps256_ps512(_mm256_loadu_ps(p)); }
static inline vf load8(const bf16 *p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)p))), 16));
}
static inline vf load8(const f16 *p) {
    return _mm512_cvtph_ps(_mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)p)));
}

static inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
// The sum and the maximum of the lanes.
static inline float sum_lanes(vf x) { return _mm512_reduce_add_ps(x); }
static inline float max_lanes(vf x) { return _mm512_reduce_max_ps(x); }
// Bit i is set where a[i] >= b[i].
static inline unsigned at_least(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }

// Stores the lanes of x whose bits are set, one after the other. What follows them up to W floats is overwritten.
static inline void pack_lanes(vf x, unsigned lanes, float *p) {
    store(p, _mm512_maskz_compress_ps((__mmask16)lanes, x));
}

// The two parts of exp2 (kernels/vector_math.h): x - floor(x), and p * 2^floor(x).
static inline vf fraction(vf x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF); }
static inline vf times_power(vf p, vf x) { return _mm512_scalef_ps(p, x); }

// The lanes of a and b in turns: a[0], b[0], a[1], b[1], ...
static inline void interleave(vf a, vf b, vf &first, vf &second) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    first = _mm512_permutex2var_ps(a, low, b), second = _mm512_permutex2var_ps(a, high, b);
}

// Loads 2*W elements into two vectors, in an order that restore_order turns into the natural one. Elements of bfloat16
// are cheapest to convert as the two halves of 32-bit words, that is, as even and odd elements.
template <class T> static inline void load_pair(const T *p, vf &a, vf &b) { a = load(p), b = load(p + W); }
template <class T> static inline void restore_order(const T *, vf &, vf &) {}
static inline void load_pair(const bf16 *p, vf &even, vf &odd) {
    __m512i x = _mm512_loadu_si512(p);
    __asm__("" : "+v"(x));  // without this the compiler loads twice
    even = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000)));
}
static inline void restore_order(const bf16 *, vf &a, vf &b) { interleave(a, b, a, b); }

// The sums of the lanes of four vectors, in four parts: lane 4*l + j of the result is that of x[j]'s 128-bit lane l.
static inline vf sums_of_four(const vf *x) {
    const vf a = _mm512_unpacklo_ps(x[0], x[1]) + _mm512_unpackhi_ps(x[0], x[1]);
    const vf b = _mm512_unpacklo_ps(x[2], x[3]) + _mm512_unpackhi_ps(x[2], x[3]);
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    return _mm512_castpd_ps(_mm512_unpacklo_pd(c, d)) + _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
}
// Joins the parts of four times four vectors: lane i of the result is the sum of the lanes of vector i.
static inline vf join_sums(const vf *x) {
    const vf a = _mm512_shuffle_f32x4(x[0], x[1], 0x88) + _mm512_shuffle_f32x4(x[0], x[1], 0xdd);
    const vf b = _mm512_shuffle_f32x4(x[2], x[3], 0x88) + _mm512_shuffle_f32x4(x[2], x[3], 0xdd);
    return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
}
// Lane i of the result is the sum of the lanes of x[i], for W vectors.
static inline vf sums_of(const vf *x) {
    const vf parts[4] = {sums_of_four(x), sums_of_four(x + 4), sums_of_four(x + 8), sums_of_four(x + 12)};
    return join_sums(parts);
}

// Makes lane j of x[i] lane i of x[j], for W vectors.
static inline void transpose(vf *x) {
    vf t[16], u[16];
    for (int i = 0; i < 16; i += 2)
        t[i] = _mm512_unpacklo_ps(x[i], x[i + 1]), t[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            const __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + 2 + j]);
            u[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            u[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    for (int i = 0; i < 4; i++) {
        const vf a = _mm512_shuffle_f32x4(u[i], u[4 + i], 0x88), b = _mm512_shuffle_f32x4(u[8 + i], u[12 + i], 0x88);
        const vf c = _mm512_shuffle_f32x4(u[i], u[4 + i], 0xdd), d = _mm512_shuffle_f32x4(u[8 + i], u[12 + i], 0xdd);
        x[i] = _mm512_shuffle_f32x4(a, b, 0x88), x[8 + i] = _mm512_shuffle_f32x4(a, b, 0xdd);
        x[4 + i] = _mm512_shuffle_f32x4(c, d, 0x88), x[12 + i] = _mm512_shuffle_f32x4(c, d, 0xdd);
    }
}

static inline float as_float(f16 x) { return _cvtsh_ss(x.bits); }
static inline f16 to_f16(float x) { return {_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)}; }

// Products of 16-bit integers, of which a lane holds two: load_int16_pairs widens 2*W integers of 8 bits, repeat_pair
// gives every lane the same two, multiply_add adds the two products of every lane to a sum, and to_floats converts it.
using IntegerSum = vi;
static inline vi load_int16_pairs(const int8_t *p) {
    return (vi)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
}
static inline vi repeat_pair(int32_t two) { return (vi)_mm512_set1_epi32(two); }
#ifdef SKIMKV_SIMD_VNNI
static inline IntegerSum multiply_add(IntegerSum s, vi a, vi b) {
    return (vi)_mm512_dpwssd_epi32((__m512i)s, (__m512i)a, (__m512i)b);
}
#else
static inline IntegerSum multiply_add(IntegerSum s, vi a, vi b) {
    return s + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
}
#endif
static inline vf to_floats(IntegerSum s) { return _mm512_cvtepi32_ps((__m512i)s); }

}  // namespace skimkv::SKIMKV_NS
