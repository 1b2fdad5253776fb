// Products with quantised rows where the instruction set does not multiply bytes: codes become floats, and the ranges
// are applied to their sums. A channel of a row is low + step * code, so a dot product is step times the sum of query
// times code, plus low times the sum of the query; and of weighted rows, the weight times the step is what the codes
// are multiplied with.
#pragma once
#include <stdint.h>

#include "kernels/next_rows.h"
#include "kernels/quantised_rows.h"
#include "kernels/vector_math.h"

namespace skimkv::SKIMKV_NS {

// Queries, and the sums over the channels of every span.
struct PreparedQuery {
    const float *q;    // [G][P]
    const float *sum;  // [G][spans][W], which are to be added
    int P;
};
static inline int64_t prepared_floats(int G, int D, int) { return (int64_t)G * spans_of(D) * W; }

constexpr int PREPARED_QUERY_FLOATS = SKIMKV_MAX_HEAD / SPAN_CHANNELS * W;  // of one, at most

// The queries from number g on.
static inline PreparedQuery query_at(const PreparedQuery &q, int g, int D) {
    return {q.q + g * q.P, q.sum + g * spans_of(D) * W, q.P};
}

static PreparedQuery prepare_query(const float *q, int P, int G, int D, int, float *memory) {
    for (int g = 0; g < G; g++)
        for (int s = 0; s < spans_of(D); s++) {
            vf sum = splat(0.f);
            for (int i = s * SPAN_CHANNELS; i < min(P, (s + 1) * SPAN_CHANNELS); i += W)
                sum = sum + load(q + g * P + i);
            store(memory + (g * spans_of(D) + s) * W, sum);
        }
    return {q, memory, P};
}

// The codes of a span of n channels, one byte each. They are in `unpacked` if they are not so in memory; behind the
// codes of a shorter span are zeros.
template <int BITS>
static inline const uint8_t *unpack_codes(const uint8_t *code, int n, uint8_t (&unpacked)[SPAN_CHANNELS]) {
    if (n == SPAN_CHANNELS) {
        if constexpr (BITS == 8) return code;
        split_nibbles(code, unpacked);
        return unpacked;
    }
    for (int i = 0; i < SPAN_CHANNELS; i++) {
        const int half = n / 2;
        unpacked[i] = i >= n ? 0 : BITS == 8 ? code[i] : i < half ? code[i] & 15 : code[i - half] >> 4;
    }
    return unpacked;
}

// The smallest value of a span of a row, and its step.
template <int BITS> static inline void load_range(const QuantisedRow<BITS> *row, int span, float &low, float &step) {
    f16 range[2];
    __builtin_memcpy(range, (const uint8_t *)row + 4 * span, 4);
    low = as_float(range[0]), step = (as_float(range[1]) - low) * (1.f / LEVELS<BITS>);
}

// The dot products of W rows with GB queries, of which `q` is the first, to s[g*ld + j].
template <int BITS, int D_, int GB>
static inline void dot_block(const PreparedQuery &q, int D, const QuantisedRow<BITS> *const *rows, float *s,
                             int64_t ld) {
    const int size = D_ ? D_ : D, spans = spans_of(size);
    vf part[GB][W];
    for (int j = 0; j < W; j++) {
        const uint8_t *code = (const uint8_t *)rows[j] + ranges_bytes(size);
        vf total[GB];
        for (int g = 0; g < GB; g++) total[g] = splat(0.f);
        for (int i = 0; i < spans; i++, code += SPAN_CHANNELS * BITS / 8) {
            const int n = (int)min(size - i * SPAN_CHANNELS, SPAN_CHANNELS);
            uint8_t unpacked[SPAN_CHANNELS];
            const uint8_t *x = unpack_codes<BITS>(code, n, unpacked);
            const float *from = q.q + i * SPAN_CHANNELS;
            float low, step;
            load_range(rows[j], i, low, step);
            vf a[GB], b[GB];
            for (int g = 0; g < GB; g++) a[g] = b[g] = splat(0.f);
            for (int c = 0; c < n; c += 2 * W) {
                const vf x0 = load(x + c);
                for (int g = 0; g < GB; g++) a[g] = fma(load(from + g * q.P + c), x0, a[g]);
                if (c + W >= n) break;
                const vf x1 = load(x + c + W);
                for (int g = 0; g < GB; g++) b[g] = fma(load(from + g * q.P + c + W), x1, b[g]);
            }
            for (int g = 0; g < GB; g++) {
                total[g] = fma(splat(step), a[g] + b[g], total[g]);
                total[g] = fma(splat(low), load(q.sum + (g * spans + i) * W), total[g]);
            }
        }
        for (int g = 0; g < GB; g++) part[g][j] = total[g];
    }
    for (int g = 0; g < GB; g++) store(s + g * ld, sums_of(part[g]));
}

constexpr int WEIGHTED_AT_ONCE = 256;  // rows that are added at once

// How often add_block reads rows of D channels.
template <int BITS, int GB> static inline int passes_of_block(int D) { return spans_of(D); }

// acc_g += sum_j w[g*ld + j] row_j for GB queries and n rows, at most WEIGHTED_AT_ONCE.
template <int BITS, int D_, int GB>
static inline void add_block(float *acc, int P, int D, const QuantisedRow<BITS> *const *rows, const float *w,
                             int64_t ld, int n, NextRows &next) {
    const int size = D_ ? D_ : D, spans = spans_of(size);
    constexpr int PART = W == 4 ? SPAN_CHANNELS / 2 : SPAN_CHANNELS;  // channels whose sums are in registers
    for (int i = 0; i < spans; i++) {
        const int channels = (int)min(size - i * SPAN_CHANNELS, SPAN_CHANNELS);
        float weight[GB][WEIGHTED_AT_ONCE], offset[GB];
        for (int g = 0; g < GB; g++) offset[g] = 0;
        for (int j = 0; j < n; j++) {
            float low, step;
            load_range(rows[j], i, low, step);
            for (int g = 0; g < GB; g++) {
                weight[g][j] = w[g * ld + j] * step;
                offset[g] += w[g * ld + j] * low;
            }
        }
        for (int from = 0; from < channels; from += PART) {
            vf a[GB][PART / W];
            for (int g = 0; g < GB; g++)
                for (int c = 0; c < PART / W; c++) a[g][c] = splat(offset[g]);
            for (int j = 0; j < n; j++) {
                const uint8_t *code = (const uint8_t *)rows[j] + ranges_bytes(size) + i * (SPAN_CHANNELS * BITS / 8);
                uint8_t unpacked[SPAN_CHANNELS];
                if (from == 0 && j % 4 == 0) next.prefetch_share();
                const uint8_t *x = unpack_codes<BITS>(code, channels, unpacked) + from;
#pragma GCC unroll 8
                for (int c = 0; c < PART / W; c++) {
                    const vf v = load(x + c * W);
                    for (int g = 0; g < GB; g++) a[g][c] = fma(splat(weight[g][j]), v, a[g][c]);
                }
            }
            for (int g = 0; g < GB; g++) {
                float *to = acc + g * P + i * SPAN_CHANNELS + from, y[PART];
                for (int c = 0; c < PART / W; c++) store(y + c * W, a[g][c]);
                for (int c = 0; c < PART && from + c < channels; c++) to[c] += y[c];
            }
        }
    }
}

}  // namespace skimkv::SKIMKV_NS
