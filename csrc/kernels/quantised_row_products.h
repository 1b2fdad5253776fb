// Dot products of queries with quantised rows, and weighted sums of them.
#pragma once
#include <stdint.h>

#include "kernels/next_rows.h"
#include "kernels/quantised_rows.h"
#include "kernels/vector_math.h"
#ifdef SKIMKV_SIMD_VNNI
#include "isa/quantised_rows_vnni.h"
#else
#include "kernels/quantised_row_floats.h"
#endif

namespace skimkv::SKIMKV_NS {

// s[g*ld + j] = q_g . row_j for G queries and n rows, as dot_rows of row_attention.h. `next` are rows to be prefetched.
template <int BITS, int D_>
static void dot_quantised_rows(const PreparedQuery &q, int G, int D, const QuantisedRow<BITS> *const *rows, int n,
                               float *s, int64_t ld, const QuantisedRow<BITS> *const *next = nullptr) {
    NextRows ahead(next, n, quantised_row_bytes(D_ ? D_ : D, BITS), (n + 3) / 4);
    for (int j = 0; j < n; j += W) {
        for (int i = j; i < min(j + W, n); i += 4) ahead.prefetch_share();
        int g = 0;
        for (; g + 4 <= G; g += 4) dot_block<BITS, D_, 4>(query_at(q, g, D), D, rows + j, s + g * ld + j, ld);
        if (g + 2 <= G) dot_block<BITS, D_, 2>(query_at(q, g, D), D, rows + j, s + g * ld + j, ld), g += 2;
        if (g < G) dot_block<BITS, D_, 1>(query_at(q, g, D), D, rows + j, s + g * ld + j, ld);
    }
}

// acc_g += sum_j w[g*ld + j] row_j for G queries and n rows; acc is [G][P]. `next` are n rows to be prefetched.
template <int BITS, int D_>
static void add_quantised_rows(float *acc, int P, int G, int D, const QuantisedRow<BITS> *const *rows, const float *w,
                               int64_t ld, int n, const QuantisedRow<BITS> *const *next = nullptr) {
    for (int j = 0; j < n; j += WEIGHTED_AT_ONCE) {
        const int count = (int)min(n - j, WEIGHTED_AT_ONCE);
        const int size = D_ ? D_ : D,
                  passes = G / 2 * passes_of_block<BITS, 2>(size) + G % 2 * passes_of_block<BITS, 1>(size);
        NextRows ahead(next ? next + j : nullptr, count, quantised_row_bytes(size, BITS), (count + 3) / 4 * passes);
        int g = 0;
        for (; g + 2 <= G; g += 2)
            add_block<BITS, D_, 2>(acc + g * P, P, D, rows + j, w + g * ld + j, ld, count, ahead);
        if (g < G) add_block<BITS, D_, 1>(acc + g * P, P, D, rows + j, w + g * ld + j, ld, count, ahead);
    }
}

}  // namespace skimkv::SKIMKV_NS
