// Finds the largest of many numbers: the token that greedy decoding takes.
#include <limits>

#include "element_types.h"
#include "skimkv.h"

namespace {

// The bits of a number as an integer of the same order: -0 is 0, and NaN is the largest.
template <class I> inline I order_of(I bits, I infinity) {
    const I sign = (I)(bits >> (8 * sizeof(I) - 1)), size = (I)(bits & std::numeric_limits<I>::max());
    const I is_nan = (I) - (size > infinity);
    return (I)((((size ^ sign) - sign) & ~is_nan) | (std::numeric_limits<I>::max() & is_nan));
}

template <class I> int64_t argmax(const I *x, int64_t n, I infinity) {
    constexpr int64_t PART = 1024;  // numbers whose largest is found by vectors, before its place is looked for
    int64_t place = 0;
    I largest = std::numeric_limits<I>::min();
    for (int64_t from = 0; from < n; from += PART) {
        const int64_t to = n - from < PART ? n : from + PART;
        I found = std::numeric_limits<I>::min();
        for (int64_t i = from; i < to; i++) {
            const I order = order_of(x[i], infinity);
            found = order > found ? order : found;
        }
        if (found > largest) largest = found, place = from;
    }
    while (order_of(x[place], infinity) != largest) place++;
    return place;
}

}  // namespace

extern "C" int64_t skimkv_argmax(const void *x, int dtype, int64_t n) {
    if (!x || n < 1 || dtype < SKIMKV_F32 || dtype > SKIMKV_F16 || skimkv::is_misaligned(x, dtype)) return -1;
    if (dtype == SKIMKV_F32) return argmax<int32_t>((const int32_t *)x, n, 0x7f800000);
    return argmax<int16_t>((const int16_t *)x, n, dtype == SKIMKV_BF16 ? 0x7f80 : 0x7c00);
}
