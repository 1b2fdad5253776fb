// Products with quantised rows in integers, with AVX-512 VNNI, which multiplies unsigned bytes (codes) with signed
// ones.
//
// A channel of a row is low + step * code. So a dot product is step times the sum of query times code, plus low times
// the sum of the query; and the weight of a row times its step is what its codes are multiplied with in a weighted sum.
// Queries are rounded to integers of 22 bits and weights to integers of 24 bits, and each is written as three signed
// digits. The sums of their products with codes are exact. What remains is the rounding, 2^-22 of the largest channel
// of a query and 2^-24 of the largest weight, which is no worse than that of sums of floats.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "isa/simd_avx512.h"
#include "kernels/next_rows.h"
#include "kernels/quantised_rows.h"
#include "kernels/vector_math.h"

namespace skimkv::SKIMKV_NS {

constexpr int DIGITS = 3;
// The bits of a digit, and the largest integer: the sum of four products of a query with codes fits 32 bits. For
// weights, the sums of every digit are taken apart.
constexpr int QUERY_BITS = 7, WEIGHT_BITS = 8;
constexpr float LARGEST_QUERY = 127 << 2 * QUERY_BITS, LARGEST_WEIGHT = 127 << 2 * WEIGHT_BITS;
constexpr int COLUMN_BYTES = 64;  // codes of a row that are loaded at once: 64 channels of 8 bits, 128 of 4 bits

// Columns of a row; channels, spans and bytes of one column; and the mask that loads the bytes of the column at `at`.
static inline int columns_of(int D, int bits) { return (D * bits / 8 + COLUMN_BYTES - 1) / COLUMN_BYTES; }
template <int BITS> constexpr int COLUMN_SPANS = 8 / BITS;
static inline __mmask64 mask_of_column(int D, int bits, int column) {
    const int bytes = D * bits / 8 - column * COLUMN_BYTES;
    return bytes >= COLUMN_BYTES ? ~0ull : (1ull << bytes) - 1;
}

// Writes the digits of sixteen integers of a query to to[0], to[ld] and to[2*ld], the highest first.
static inline void store_query(__m512i x, int8_t *to, int64_t ld) {
    const __m512i half = _mm512_set1_epi32(1 << (QUERY_BITS - 1)), digit = _mm512_set1_epi32((1 << QUERY_BITS) - 1);
    for (int i = DIGITS - 1; i > 0; i--) {
        const __m512i raised = _mm512_add_epi32(x, half);
        const __m512i low = _mm512_sub_epi32(_mm512_and_si512(raised, digit), half);
        _mm_storeu_si128((__m128i *)(to + i * ld), _mm512_cvtepi32_epi8(low));
        x = _mm512_srai_epi32(raised, QUERY_BITS);
    }
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(x));
}

// Queries as integers: query = scale * integer.
struct PreparedQuery {
    const int8_t *digits;  // [G][columns][8/bits][DIGITS][64], in the order of a column's codes
    const float *scale;    // [G]
    const float *sum;      // [G][spans] the sum of the rounded query over the channels of a span
    int64_t digits_ld;
};
static inline int64_t digits_of_query(int D, int bits) {
    return (int64_t)columns_of(D, bits) * (8 / bits) * DIGITS * COLUMN_BYTES;
}
static inline int64_t prepared_floats(int G, int D, int bits) {
    return G * (digits_of_query(D, bits) / 4 + 1 + spans_of(D));
}

constexpr int PREPARED_QUERY_FLOATS = DIGITS * 640 / 4 + 1 + SKIMKV_MAX_HEAD / SPAN_CHANNELS;  // of one, at most

// The queries from number g on.
static inline PreparedQuery query_at(const PreparedQuery &q, int g, int D) {
    return {q.digits + g * q.digits_ld, q.scale + g, q.sum + g * spans_of(D), q.digits_ld};
}

// Where the digits of channel i are within those of a query.
static inline int64_t place_of_channel(int i, int D, int bits) {
    const int span = i / SPAN_CHANNELS, at = i % SPAN_CHANNELS;
    if (bits == 8) return (int64_t)span * DIGITS * COLUMN_BYTES + at;
    const int half = (int)min(D - span * SPAN_CHANNELS, SPAN_CHANNELS) / 2, high = at >= half;
    return ((int64_t)span / 2 * 2 + high) * DIGITS * COLUMN_BYTES + span % 2 * (SPAN_CHANNELS / 2) + at - high * half;
}

// Rounds G queries q [G][P], zero beyond D, into memory of prepared_floats. If a number is not finite, so is the scale.
static PreparedQuery prepare_query(const float *q, int P, int G, int D, int bits, float *memory) {
    const int64_t ld = digits_of_query(D, bits);
    const int spans = spans_of(D);
    float *scale = memory, *sum = scale + G;
    int8_t *digits = (int8_t *)(sum + G * spans);
    for (int g = 0; g < G; g++, q += P) {
        int8_t *to = digits + g * ld;
        vf top = splat(1e-30f), rest = splat(0.f);
        for (int i = 0; i < P; i += W) {
            const vf x = load(q + i);
            top = vmax(top, vmax(x, splat(0.f) - x)), rest = rest + (x - x);
        }
        if (D % (bits == 8 ? 64 : 128))
            for (int64_t i = 0; i < ld; i++) to[i] = 0;
        const float largest = max_lanes(top), inverse = LARGEST_QUERY / largest;
        scale[g] = largest / LARGEST_QUERY + sum_lanes(rest);
        for (int s = 0; s < spans; s++) {
            const int from = s * SPAN_CHANNELS, end = (int)min(D, from + SPAN_CHANNELS);
            __m512i total = _mm512_setzero_si512();
            for (int i = from; i < end; i += W) {
                const __m512i x = _mm512_cvtps_epi32(load(q + i) * splat(inverse));
                total = _mm512_add_epi32(total, x);
                if (end - from == SPAN_CHANNELS) {
                    store_query(x, to + place_of_channel(i, D, bits), COLUMN_BYTES);
                    continue;
                }
                int8_t digit[DIGITS][W];
                store_query(x, digit[0], W);
                for (int j = 0; j < W && i + j < end; j++)
                    for (int d = 0; d < DIGITS; d++)
                        to[place_of_channel(i + j, D, bits) + d * COLUMN_BYTES] = digit[d][j];
            }
            sum[g * spans + s] = sum_lanes(_mm512_cvtepi32_ps(total)) * scale[g];
        }
    }
    return {digits, scale, sum, ld};
}

// The smallest value and the step of one span of sixteen rows.
template <int BITS> static inline void load_ranges(const QuantisedRow<BITS> *const *rows, int span, vf &low, vf &step) {
    const auto range = [&](int j) {
        int32_t two;
        __builtin_memcpy(&two, (const uint8_t *)rows[j] + 4 * span, 4);
        return two;
    };
    const __m512i x =
        _mm512_setr_epi32(range(0), range(1), range(2), range(3), range(4), range(5), range(6), range(7), range(8),
                          range(9), range(10), range(11), range(12), range(13), range(14), range(15));
    low = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x));
    step = (_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16))) - low) * splat(1.f / LEVELS<BITS>);
}

// One number for the lanes of a column's first span, and one for those of its second, if a column has two.
template <int BITS> static inline vf splat_spans(const float *first, const float *second) {
    if (BITS == 8) return splat(*first);
    return _mm512_mask_blend_ps(0xff00, splat(*first), splat(*second));
}

// The dot products of W rows with GB queries, of which `q` is the first, to s[g*ld + j].
template <int BITS, int D_, int GB>
static inline void dot_block(const PreparedQuery &q, int D, const QuantisedRow<BITS> *const *rows, float *s,
                             int64_t ld) {
    const int n = D_ ? D_ : D, columns = columns_of(n, BITS), spans = spans_of(n);
    float step[SKIMKV_MAX_HEAD / SPAN_CHANNELS + 1][W];
    vf sum[GB], part[GB][4];
    for (int g = 0; g < GB; g++) sum[g] = splat(0.f);
    for (int i = 0; i < spans; i++) {
        vf low, x;
        load_ranges<BITS>(rows, i, low, x);
        store(step[i], x);
        for (int g = 0; g < GB; g++) sum[g] = fma(low, splat(q.sum[g * spans + i]), sum[g]);
    }
    if (spans % COLUMN_SPANS<BITS>) store(step[spans], splat(0.f));
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        vf a[GB][4];  // of four rows, which are joined at once, so that they need not wait in memory
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const uint8_t *code = (const uint8_t *)rows[4 * k + j] + ranges_bytes(n);
            for (int g = 0; g < GB; g++) a[g][j] = splat(0.f);
#pragma GCC unroll 4
            for (int i = 0; i < columns; i++) {
                const __m512i x = _mm512_maskz_loadu_epi8(mask_of_column(n, BITS, i), code + i * COLUMN_BYTES);
                const __m512i nibble = _mm512_set1_epi8(15), first = BITS == 8 ? x : _mm512_and_si512(x, nibble);
                const __m512i second = _mm512_and_si512(_mm512_srli_epi16(x, 4), nibble);
                const float *steps = step[i * COLUMN_SPANS<BITS>] + 4 * k + j;
                const vf of_lanes = splat_spans<BITS>(steps, steps + W);
#pragma GCC unroll 4
                for (int g = 0; g < GB; g++) {
                    const int8_t *digits = q.digits + g * q.digits_ld + i * (8 / BITS) * DIGITS * COLUMN_BYTES;
                    __m512i dot = _mm512_setzero_si512();
#pragma GCC unroll 3
                    for (int d = 0; d < DIGITS; d++) {
                        dot = _mm512_dpbusd_epi32(_mm512_slli_epi32(dot, QUERY_BITS), first,
                                                  _mm512_loadu_si512(digits + d * COLUMN_BYTES));
                        if (BITS == 4)
                            dot = _mm512_dpbusd_epi32(dot, second,
                                                      _mm512_loadu_si512(digits + (DIGITS + d) * COLUMN_BYTES));
                    }
                    a[g][j] = fma(_mm512_cvtepi32_ps(dot), of_lanes, a[g][j]);
                }
            }
        }
        for (int g = 0; g < GB; g++) part[g][k] = sums_of_four(a[g]);
    }
    for (int g = 0; g < GB; g++) store(s + g * ld, fma(join_sums(part[g]), splat(q.scale[g]), sum[g]));
}

constexpr int WEIGHTED_AT_ONCE = 256;  // rows whose weights are rounded together

// The weights of rows times their steps, rounded, for the spans of one column and GB queries.
template <int BITS, int GB> struct RowWeights {
    // Of every four rows, the lowest digits of all, then the next, then the highest; the last four bytes have no use.
    alignas(64) int8_t digits[GB][COLUMN_SPANS<BITS>][WEIGHTED_AT_ONCE / 4][4][4];
    float scale[GB][COLUMN_SPANS<BITS>];   // weight * step = scale * integer
    float offset[GB][COLUMN_SPANS<BITS>];  // the sum of weight * low
};

// Writes the digits of sixteen integers into RowWeights.
static inline void store_weights(__m512i x, int8_t *to) {
    const __m512i half = _mm512_set1_epi32(0x808080);  // the bytes of x + half are the digits + 128
    const __m512i order = _mm512_set4_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400);
    const __m512i digits = _mm512_xor_si512(_mm512_add_epi32(x, half), half);
    _mm512_storeu_si512(to, _mm512_shuffle_epi8(digits, order));
}

// Makes them of the weights w[g*ld + j] of n rows. `rows` is valid up to the next multiple of W.
template <int BITS, int GB>
static inline void round_weights(const QuantisedRow<BITS> *const *rows, int n, int span, int spans, const float *w,
                                 int64_t ld, RowWeights<BITS, GB> &to) {
    vf product[GB][WEIGHTED_AT_ONCE / W], top[GB], offset[GB];
    for (int e = 0; e < COLUMN_SPANS<BITS>; e++) {
        if (span + e >= spans) {  // the column ends after its first span
            for (int g = 0; g < GB; g++) to.scale[g][e] = to.offset[g][e] = 0;
            continue;
        }
        for (int g = 0; g < GB; g++) top[g] = splat(1e-30f), offset[g] = splat(0.f);
        for (int j = 0; j < n; j += W) {
            const __mmask16 valid = n - j >= W ? 0xffff : (__mmask16)((1u << (n - j)) - 1);
            vf low, step;
            load_ranges<BITS>(rows + j, span + e, low, step);
            for (int g = 0; g < GB; g++) {
                const vf weight = _mm512_maskz_loadu_ps(valid, w + g * ld + j), x = weight * step;
                offset[g] = fma(weight, low, offset[g]), top[g] = vmax(top[g], vmax(x, splat(0.f) - x));
                product[g][j / W] = x;
            }
        }
        for (int g = 0; g < GB; g++) {
            const float largest = max_lanes(top[g]);
            to.scale[g][e] = largest / LARGEST_WEIGHT;
            vf rest = splat(0.f);
            for (int j = 0; j < n; j += W) {
                const vf x = product[g][j / W] * splat(LARGEST_WEIGHT / largest);
                const __m512i rounded = _mm512_cvtps_epi32(x);
                rest = rest + (x - _mm512_cvtepi32_ps(rounded));
                store_weights(rounded, to.digits[g][e][j / 4][0]);
            }
            // What rounding takes from the mean code is given back. If a product is infinite, the result is NaN.
            const float lost = sum_lanes(rest) * to.scale[g][e] * (LEVELS<BITS> / 2);
            to.offset[g][e] = sum_lanes(offset[g]) + lost + (largest - largest);
        }
    }
}

// The weights of four rows for the lanes of a column.
template <int BITS, int GB>
static inline __m512i splat_weights(const RowWeights<BITS, GB> &w, int g, int digit, int row) {
    int32_t first, second;
    __builtin_memcpy(&first, w.digits[g][0][row / 4][DIGITS - 1 - digit], 4);
    if (BITS == 8) return _mm512_set1_epi32(first);
    __builtin_memcpy(&second, w.digits[g][COLUMN_SPANS<BITS> - 1][row / 4][DIGITS - 1 - digit], 4);
    return _mm512_mask_blend_epi32(0xff00, _mm512_set1_epi32(first), _mm512_set1_epi32(second));
}

// Brings sums into the order of a column's bytes: word e of 128-bit lane l of sum[j] belongs to byte 16*l + 4*j + e.
static inline void restore_byte_order(vf *sum) {
    const vf a = _mm512_shuffle_f32x4(sum[0], sum[1], 0x44), b = _mm512_shuffle_f32x4(sum[0], sum[1], 0xee);
    const vf c = _mm512_shuffle_f32x4(sum[2], sum[3], 0x44), d = _mm512_shuffle_f32x4(sum[2], sum[3], 0xee);
    sum[0] = _mm512_shuffle_f32x4(a, c, 0x88), sum[1] = _mm512_shuffle_f32x4(a, c, 0xdd);
    sum[2] = _mm512_shuffle_f32x4(b, d, 0x88), sum[3] = _mm512_shuffle_f32x4(b, d, 0xdd);
}

// How often the rows of a column are read: the sums must fit in the registers.
template <int BITS, int GB> constexpr int passes_of_column = BITS == 8 && GB == 1 ? 1 : 2;

// sum += the products of codes and weights.
static inline void add_products(__m512i &sum, __m512i codes, __m512i weights) {
    sum = _mm512_dpbusd_epi32(sum, codes, weights);
    __asm__("" : "+v"(sum));  // without this the compiler copies every sum
}

// Sums the weighted codes of a column to y[g][part][j] for j from FROM to FROM + COUNT - 1: word e of 128-bit lane l
// belongs to byte 16*l + 4*j + e. Part 0 are the codes or, of 4 bits, the low nibbles, and part 1 the high ones. Whole
// bytes are multiplied, 16 * high nibble + low nibble, and then the low nibbles alone: the difference is 16 times the
// product of the high nibbles.
template <int BITS, int GB, int FROM, int COUNT>
static inline void sum_column(const QuantisedRow<BITS> *const *rows, int64_t at, int n, __mmask64 mask,
                              const RowWeights<BITS, GB> &w, vf y[GB][8 / BITS][4], NextRows &next) {
    constexpr int PARTS = 8 / BITS;
    __m512i sum[GB][PARTS][DIGITS][COUNT];
#pragma GCC unroll 2
    for (int g = 0; g < GB; g++)
#pragma GCC unroll 2
        for (int i = 0; i < PARTS; i++)
#pragma GCC unroll 3
            for (int d = 0; d < DIGITS; d++)
#pragma GCC unroll 4
                for (int j = 0; j < COUNT; j++) sum[g][i][d][j] = _mm512_setzero_si512();
    for (int row = 0; row < n; row += 4) {
        next.prefetch_share();
        const __m512i c0 = _mm512_maskz_loadu_epi8(mask, rows[row] + at);
        const __m512i c1 = _mm512_maskz_loadu_epi8(mask, rows[row + 1] + at);
        const __m512i c2 = _mm512_maskz_loadu_epi8(mask, rows[row + 2] + at);
        const __m512i c3 = _mm512_maskz_loadu_epi8(mask, rows[row + 3] + at);
        __m512i t[COUNT];
#pragma GCC unroll 2
        for (int j = 0; j < COUNT; j += 2) {
            const bool upper = FROM + j >= 2;
            const __m512i a = upper ? _mm512_unpackhi_epi8(c0, c1) : _mm512_unpacklo_epi8(c0, c1);
            const __m512i b = upper ? _mm512_unpackhi_epi8(c2, c3) : _mm512_unpacklo_epi8(c2, c3);
            t[j] = _mm512_unpacklo_epi16(a, b), t[j + 1] = _mm512_unpackhi_epi16(a, b);
        }
#pragma GCC unroll 2
        for (int g = 0; g < GB; g++)
#pragma GCC unroll 3
            for (int d = 0; d < DIGITS; d++) {
                const __m512i weight = splat_weights<BITS, GB>(w, g, d, row);
#pragma GCC unroll 4
                for (int j = 0; j < COUNT; j++) {
                    add_products(sum[g][0][d][j], t[j], weight);
                    if (BITS == 8) continue;
                    const __m512i low = _mm512_and_si512(t[j], _mm512_set1_epi8(15));
                    add_products(sum[g][PARTS - 1][d][j], low, weight);
                }
            }
    }
#pragma GCC unroll 2
    for (int g = 0; g < GB; g++) {
        const vf scale = splat_spans<BITS>(w.scale[g], w.scale[g] + COLUMN_SPANS<BITS> - 1);
        const vf offset = splat_spans<BITS>(w.offset[g], w.offset[g] + COLUMN_SPANS<BITS> - 1);
#pragma GCC unroll 2
        for (int i = 0; i < PARTS; i++)
#pragma GCC unroll 4
            for (int j = 0; j < COUNT; j++) {
                vf total = splat(0.f);
#pragma GCC unroll 3
                for (int d = 0; d < DIGITS; d++) {
                    __m512i x = sum[g][PARTS - 1][d][j];
                    if (BITS == 4 && i == 1) x = _mm512_srai_epi32(_mm512_sub_epi32(sum[g][0][d][j], x), 4);
                    total = fma(total, splat((float)(1 << WEIGHT_BITS)), _mm512_cvtepi32_ps(x));
                }
                y[g][i][FROM + j] = fma(total, scale, offset);
            }
    }
}

// Adds the weighted codes of one column to acc [GB][P], which begins at the column's first channel; `channels` is how
// many of these there are.
template <int BITS, int GB>
static inline void add_column(float *acc, int P, int channels, const QuantisedRow<BITS> *const *rows, int64_t at, int n,
                              __mmask64 mask, const RowWeights<BITS, GB> &w, NextRows &next) {
    constexpr int PARTS = 8 / BITS;
    vf sums[GB][PARTS][4];
    if constexpr (passes_of_column<BITS, GB> == 1) {
        sum_column<BITS, GB, 0, 4>(rows, at, n, mask, w, sums, next);
    } else {
        sum_column<BITS, GB, 0, 2>(rows, at, n, mask, w, sums, next);
        sum_column<BITS, GB, 2, 2>(rows, at, n, mask, w, sums, next);
    }
    for (int g = 0; g < GB; g++) {
        vf(&y)[PARTS][4] = sums[g];
        for (int i = 0; i < PARTS; i++) restore_byte_order(y[i]);
        float *to = acc + g * P;
        if (channels == COLUMN_BYTES * PARTS) {
            for (int i = 0; i < PARTS; i++)
                for (int j = 0; j < 4; j++) {
                    float *x = to + (BITS == 8 ? j * W : j / 2 * SPAN_CHANNELS + i * SPAN_CHANNELS / 2 + j % 2 * W);
                    store(x, load(x) + y[i][j]);
                }
            continue;
        }
        float rest[PARTS][COLUMN_BYTES];
        for (int i = 0; i < PARTS; i++)
            for (int j = 0; j < 4; j++) store(rest[i] + j * W, y[i][j]);
        for (int i = 0; i < channels; i++) {
            const int span = i / SPAN_CHANNELS, at = i % SPAN_CHANNELS;
            const int half = BITS == 8 ? SPAN_CHANNELS : (int)min(channels - span * SPAN_CHANNELS, SPAN_CHANNELS) / 2;
            to[i] += rest[at / half][span * (SPAN_CHANNELS / PARTS) + at % half];
        }
    }
}

// How often add_block reads rows of D channels.
template <int BITS, int GB> static inline int passes_of_block(int D) {
    return passes_of_column<BITS, GB> * columns_of(D, BITS);
}

// acc_g += sum_j w[g*ld + j] row_j for GB queries and n rows, at most WEIGHTED_AT_ONCE.
template <int BITS, int D_, int GB>
static inline void add_block(float *acc, int P, int D, const QuantisedRow<BITS> *const *rows, const float *w,
                             int64_t ld, int n, NextRows &next) {
    const int size = D_ ? D_ : D, columns = columns_of(size, BITS), spans = spans_of(size);
    constexpr int CHANNELS = COLUMN_BYTES * 8 / BITS;
    const QuantisedRow<BITS> *padded[WEIGHTED_AT_ONCE];
    if (n % W) {
        for (int j = 0; j < round_up(n, W); j++) padded[j] = rows[min(j, n - 1)];
        rows = padded;
    }
    for (int i = 0; i < columns; i++) {
        RowWeights<BITS, GB> weights;
        round_weights<BITS, GB>(rows, n, i * COLUMN_SPANS<BITS>, spans, w, ld, weights);
        add_column<BITS, GB>(acc + i * CHANNELS, P, (int)min(size - i * CHANNELS, CHANNELS), rows,
                             ranges_bytes(size) + i * COLUMN_BYTES, n, mask_of_column(size, BITS, i), weights, next);
    }
}

}  // namespace skimkv::SKIMKV_NS
