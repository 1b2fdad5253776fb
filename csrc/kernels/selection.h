// The k largest of n scores, exactly and without sorting: first a bound that at least k scores reach, from the maxima
// of small sets of scores; then one pass that keeps the few scores that reach it; then a bisection on those.
#pragma once
#include <stdint.h>

#include "kernels/vector_math.h"

namespace skimkv::SKIMKV_NS {

// A float as an integer with the same order, and back.
static inline int32_t to_ordered_int(float x) {
    int32_t i;
    __builtin_memcpy(&i, &x, 4);
    return i < 0 ? i ^ 0x7fffffff : i;
}
static inline float from_ordered_int(int32_t i) {
    i = i < 0 ? i ^ 0x7fffffff : i;
    float x;
    __builtin_memcpy(&x, &i, 4);
    return x;
}

// Writes `first` plus the place of every set bit to `out`, and returns how many they are. Most words have no more than
// two, so two are always written: a processor cannot predict a branch that depends on random bits.
static inline int64_t places_of_bits(uint64_t bits, int64_t first, int32_t *out) {
    const int64_t count = __builtin_popcountll(bits);
    for (int64_t i = 0; i < 2 || i < count; i++, bits &= bits - 1)
        out[i] = (int32_t)(first + __builtin_ctzll(bits | 1ull << 63));
    return count;
}

// How many of x[0] .. x[n-1] are at least t. Up to the next multiple of 16, x must be readable and LOWEST.
static inline int64_t count_at_least(const float *x, int64_t n, float t) {
    int64_t count = 0, i = 0;
    const vf least = splat(t);
    for (; W == 16 && i + 64 <= n; i += 64) {
        const uint64_t a = at_least(load(x + i), least) | at_least(load(x + i + W), least) << 16;
        const uint64_t b = at_least(load(x + i + 2 * W), least) | at_least(load(x + i + 3 * W), least) << 16;
        count += __builtin_popcountll(a | b << 32);
    }
    for (; i < n; i += W) count += __builtin_popcount(at_least(load(x + i), least));
    return count;
}

// A bound that at least k of x[0] .. x[n-1] reach, and at most k + slack unless equal values make more. 1 <= k <= n.
static float kth_largest_bound(const float *x, int64_t n, int64_t k, int64_t slack) {
    vf top = splat(LOWEST);
    for (int64_t i = 0; i < n; i += W) top = vmax(top, load(x + i));
    // `low` is reached by k values or more, `high` by fewer.
    int64_t low = to_ordered_int(LOWEST), high = (int64_t)to_ordered_int(max_lanes(top)) + 1;
    // Most of the range of floats holds no value: try near the maximum first.
    for (int64_t step = 1 << 20; high - low > 2 * step && step < (1ll << 30); step *= 4) {
        int64_t c = count_at_least(x, n, from_ordered_int((int32_t)(high - step)));
        if (c >= k) {
            low = high - step;
            if (c <= k + slack) return from_ordered_int((int32_t)low);
            break;
        }
        high -= step;
    }
    while (high - low > 1) {
        int64_t middle = (low + high) >> 1, c = count_at_least(x, n, from_ordered_int((int32_t)middle));
        if (c >= k) {
            low = middle;
            if (c <= k + slack) break;
        } else {
            high = middle;
        }
    }
    return from_ordered_int((int32_t)low);
}

// Writes the positions of the k largest of s[0] .. s[n-1] to `out`, ascending; of equal scores the earlier ones are
// taken. Returns how many there are: k, or fewer if scores are NaN.
//
// lane_max[16*t + i] is the maximum of s[256*t + i + 16*j] over j. From n up to a multiple of 256, s and lane_max are
// LOWEST. `value` and `at` are scratch memory for scores and their positions: n rounded up to a multiple of 256, and 16
// more. `out` has room for k + 1.
static int64_t select_largest(const float *s, const float *lane_max, int64_t n, int64_t k, int32_t *out, float *value,
                              int32_t *at) {
    if (k <= 0) return 0;
    if (k >= n) {
        for (int64_t i = 0; i < n; i++) out[i] = (int32_t)i;
        return n;
    }
    const int64_t tiles = (n + 255) / 256;
    // A maximum that reaches the bound is a score that reaches it, so at least k scores do.
    float t = tiles * 16 >= 2 * k ? kth_largest_bound(lane_max, tiles * 16, k, k / 8 + 8)
                                  : kth_largest_bound(s, n, k, k / 8 + 8);
    int64_t m = 0;
    vf low = splat(t);
    for (int64_t tile = 0; tile < tiles; tile++) {
        unsigned any = 0;
        for (int i = 0; i < 16; i += W) any |= at_least(load(lane_max + 16 * tile + i), low);
        if (!any) continue;
        for (int64_t i = 256 * tile; i < 256 * tile + 256; i += 64) {
            uint64_t bits = 0;
            for (int x = 0; x < 64; x += W) bits |= (uint64_t)at_least(load(s + i + x), low) << x;
            m += places_of_bits(bits, i, at + m);
        }
    }
    while (m && at[m - 1] >= n) m--;  // only if the bound is LOWEST itself
    if (m <= k) {
        for (int64_t i = 0; i < m; i++) out[i] = at[i];
        return m;
    }
    for (int64_t i = 0; i < m; i++) value[i] = s[at[i]];
    for (int i = 0; i < 16; i++) value[m + i] = LOWEST;
    float exact = kth_largest_bound(value, m, k, 0);
    int64_t above = 0, count = 0;
    for (int64_t i = 0; i < m; i++) above += value[i] > exact;
    int64_t ties = k - above;
    for (int64_t i = 0; i < m; i++) {
        const bool tie = value[i] == exact;
        out[count] = at[i];
        count += (value[i] > exact) | (tie & (ties > 0)), ties -= tie;
    }
    return count;
}

}  // namespace skimkv::SKIMKV_NS
