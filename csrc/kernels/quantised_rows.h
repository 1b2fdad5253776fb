// Quantised rows of K and V, in 8 or 4 bits. A row is quantised when it enters the cache.
//
// Every 64 channels share a range from `low` to `high` (float16), and channel x is low + code * (high - low) / (2^bits
// - 1). Rows of 4 bits are rotated before that. skimkv.h describes the bytes.
#pragma once
#include <stdint.h>

#include "kernels/hadamard.h"
#include "kernels/vector_math.h"
#include "skimkv.h"

namespace skimkv::SKIMKV_NS {

constexpr int SPAN_CHANNELS = SKIMKV_ROW_SPAN;

// The element type of a row that is quantised to BITS; one element is one byte.
template <int BITS> struct QuantisedRow {
    uint8_t byte;
};
// The bits of a row type; 0 if it is not quantised.
template <class R> constexpr int row_bits = 0;
template <int BITS> constexpr int row_bits<QuantisedRow<BITS>> = BITS;

// The number of steps from the smallest value of a span to the largest.
template <int BITS> constexpr float LEVELS = (1 << BITS) - 1;

// Whether rows of this number of bits are rotated.
static inline bool is_rotated(int bits) { return bits == 4; }

// Spans of a row of D channels.
static inline int spans_of(int D) { return (D + SPAN_CHANNELS - 1) / SPAN_CHANNELS; }
// Bytes of the ranges at the beginning of a row, and of the whole row.
static inline int ranges_bytes(int D) { return spans_of(D) * 4; }
static inline int64_t quantised_row_bytes(int D, int bits) { return ranges_bytes(D) + D * bits / 8; }

// Quantises the D channels of x into the row at `to`.
template <class T> static void quantise_row(const T *x, int D, int bits, uint8_t *to) {
    const float levels = (float)((1 << bits) - 1);
    float row[SKIMKV_MAX_HEAD];
    uint8_t *byte = to + ranges_bytes(D);
    to_float(x, row, D);
    if (is_rotated(bits)) rotate_row(row, D);
    for (int from = 0; from < D; from += SPAN_CHANNELS, to += 4) {
        const int n = (int)min(D - from, SPAN_CHANNELS), half = n / 2;
        const float *value = row + from;
        float range[2];
        uint8_t code[SPAN_CHANNELS];
        float low = value[0], high = value[0];
        for (int i = 1; i < n; i++) {
            low = value[i] < low || value[i] != value[i] ? value[i] : low;
            high = value[i] > high || value[i] != value[i] ? value[i] : high;
        }
        f16 rounded[2];
        range[0] = low, range[1] = high;
        from_float(range, rounded, 2);
        __builtin_memcpy(to, rounded, 4);
        to_float(rounded, range, 2);
        const float step = (range[1] - range[0]) / levels, divisor = step == 0 ? 1 : step;
        for (int i = 0; i < n; i++) {
            const float y = __builtin_rintf((value[i] - range[0]) / divisor);
            code[i] = y > 0 ? (uint8_t)(y < levels ? y : levels) : 0;
        }
        if (bits == 8) __builtin_memcpy(byte, code, n);
        else
            for (int i = 0; i < half; i++) byte[i] = (uint8_t)(code[i] | code[half + i] << 4);
        byte += n * bits / 8;
    }
}

// The 4-bit codes of 64 channels, one byte each.
static inline void split_nibbles(const uint8_t *code, uint8_t *to) {
    typedef uint8_t half __attribute__((vector_size(SPAN_CHANNELS / 2)));
    half x;
    __builtin_memcpy(&x, code, sizeof x);
    const half first = x & 15, second = x >> 4;
    __builtin_memcpy(to, &first, sizeof x);
    __builtin_memcpy(to + sizeof x, &second, sizeof x);
}

// Dequantises 64 channels with vectors; dequantise_rest does the shorter span that may end a row.
template <int BITS> static inline void dequantise_span(const uint8_t *code, float low, float step, float *to) {
    uint8_t pair[SPAN_CHANNELS];
    if constexpr (BITS == 4) {
        split_nibbles(code, pair);
        code = pair;
    }
    for (int i = 0; i < SPAN_CHANNELS; i += W) store(to + i, fma(splat(step), load(code + i), splat(low)));
}
template <int BITS> static inline void dequantise_rest(const uint8_t *code, int n, float low, float step, float *to) {
    for (int i = 0; i < n; i++) {
        const int half = n / 2, x = BITS == 8 ? code[i] : i < half ? code[i] & 15 : code[i - half] >> 4;
        to[i] = low + step * (float)x;
    }
}

// Dequantises one row of D channels; if it is rotated, so is the result.
template <int BITS> static inline void dequantise_row(const QuantisedRow<BITS> *row, int D, float *to) {
    const uint8_t *ranges = (const uint8_t *)row, *code = ranges + ranges_bytes(D);
    for (int at = 0; at < D; at += SPAN_CHANNELS, ranges += 4, code += SPAN_CHANNELS * BITS / 8) {
        f16 range[2];
        __builtin_memcpy(range, ranges, 4);
        const float low = as_float(range[0]), step = (as_float(range[1]) - low) / (float)((1 << BITS) - 1);
        if (at + SPAN_CHANNELS <= D) dequantise_span<BITS>(code, low, step, to + at);
        else dequantise_rest<BITS>(code, D - at, low, step, to + at);
    }
}

// Reads a quantised row back in the type T: what the cache holds of a new row.
template <class T> static inline void read_back_row(const uint8_t *row, int D, int bits, T *to) {
    float x[SKIMKV_MAX_HEAD];
    if (bits == 8) dequantise_row((const QuantisedRow<8> *)row, D, x);
    else dequantise_row((const QuantisedRow<4> *)row, D, x);
    if (is_rotated(bits)) rotate_row(x, D);
    from_float(x, to, D);
}

}  // namespace skimkv::SKIMKV_NS
