// Rows of K and V in 8 or 4 bits (skimkv.h says how): encoded as they come, decoded a few at a time while they are in L1.
#pragma once

namespace skimkv::SKIMKV_NS {

constexpr int ROW_SPAN = SKIMKV_ROW_SPAN;

// A row in memory: of floats, or of bytes that hold codes.
template <int BITS> struct Coded {
    uint8_t byte;
};
template <class R> constexpr int row_bits = 0;
template <int BITS> constexpr int row_bits<Coded<BITS>> = BITS;

static inline int ends_bytes(int D) { return (D + ROW_SPAN - 1) / ROW_SPAN * 4; }
static inline int64_t coded_bytes(int D, int bits) { return ends_bytes(D) + D * bits / 8; }

template <class T> static void encode(const T *x, int D, int bits, uint8_t *to) {
    const float levels = (float)((1 << bits) - 1);
    uint8_t *byte = to + ends_bytes(D);
    for (int from = 0; from < D; from += ROW_SPAN, to += 4) {
        const int n = (int)min(D - from, ROW_SPAN), half = n / 2;
        float value[ROW_SPAN], end[2];
        uint8_t code[ROW_SPAN];
        to_float(x + from, value, n);
        float low = value[0], high = value[0];
        for (int i = 1; i < n; i++) {
            low = value[i] < low || value[i] != value[i] ? value[i] : low;
            high = value[i] > high || value[i] != value[i] ? value[i] : high;
        }
        f16 ends[2];
        end[0] = low, end[1] = high;
        from_float(end, ends, 2);
        __builtin_memcpy(to, ends, 4);
        to_float(ends, end, 2);
        const float step = (end[1] - end[0]) / levels, divisor = step == 0 ? 1 : step;
        for (int i = 0; i < n; i++) {
            const float y = __builtin_rintf((value[i] - end[0]) / divisor);
            code[i] = y > 0 ? (uint8_t)(y < levels ? y : levels) : 0;
        }
        if (bits == 8) __builtin_memcpy(byte, code, n);
        else
            for (int i = 0; i < half; i++) byte[i] = (uint8_t)(code[i] | code[half + i] << 4);
        byte += n * bits / 8;
    }
}

// A whole span of a row, in vectors, and the shorter one that may end it.
template <int BITS> static inline void decode_span(const uint8_t *code, float low, float step, float *to) {
    uint8_t pair[ROW_SPAN];
    if constexpr (BITS == 4) {
        typedef uint8_t half __attribute__((vector_size(ROW_SPAN / 2)));
        half x;
        __builtin_memcpy(&x, code, sizeof x);
        const half first = x & 15, second = x >> 4;
        __builtin_memcpy(pair, &first, sizeof x);
        __builtin_memcpy(pair + sizeof x, &second, sizeof x);
        code = pair;
    }
    for (int i = 0; i < ROW_SPAN; i += W) put(to + i, fma(splat(step), get(code + i), splat(low)));
}
template <int BITS> static inline void decode_rest(const uint8_t *code, int n, float low, float step, float *to) {
    for (int i = 0; i < n; i++) {
        const int half = n / 2, x = BITS == 8 ? code[i] : i < half ? code[i] & 15 : code[i - half] >> 4;
        to[i] = low + step * (float)x;
    }
}

template <int BITS> static inline void decode(const Coded<BITS> *row, int D, float *to) {
    const uint8_t *ends = (const uint8_t *)row, *code = ends + ends_bytes(D);
    for (int at = 0; at < D; at += ROW_SPAN, ends += 4, code += ROW_SPAN * BITS / 8) {
        f16 end[2];
        __builtin_memcpy(end, ends, 4);
        const float low = scalar(end[0]), step = (scalar(end[1]) - low) / (float)((1 << BITS) - 1);
        if (at + ROW_SPAN <= D) decode_span<BITS>(code, low, step, to + at);
        else decode_rest<BITS>(code, D - at, low, step, to + at);
    }
}

constexpr int DECODED = 16;  // rows at once

// Rows j < n (at most DECODED) as floats; up to the next multiple of W the last one again.
template <int BITS> static inline void decode_rows(const Coded<BITS> *const *rows, int n, int D, float *x, const float **to) {
    const int P = (int)roundup(D, 16);
    for (int j = 0; j < n; j++) decode(rows[j], D, x + j * P), to[j] = x + j * P;
    for (int j = n; j < roundup(n, W); j++) to[j] = to[n - 1];
}

// What the cache holds of a new row.
template <class T> static inline void round_trip(const uint8_t *coded, int D, int bits, T *to) {
    float x[256];
    if (bits == 8) decode((const Coded<8> *)coded, D, x);
    else decode((const Coded<4> *)coded, D, x);
    from_float(x, to, D);
}

}  // namespace skimkv::SKIMKV_NS
