#include "bf16_speed.h"

#if defined(__x86_64__) && !defined(SKIMKV_WITHOUT_VNNI)
#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <limits>

namespace {

constexpr int SUMS = 8;  // that do not depend on each other, so that no latency counts
constexpr int TURNS = 256, ROUNDS = 8;
constexpr double MARGIN = 1.3;  // the float32 way converts its operands too

__attribute__((target("avx512f,avx512bf16"))) void multiply_pairs() {
    __m512 sum[SUMS];
    for (__m512 &s : sum) s = _mm512_setzero_ps();
    __m512i pairs = _mm512_setzero_si512();
    for (int i = 0; i < TURNS; i++) {
        asm volatile("" : "+v"(pairs));
#pragma GCC unroll 8  // the sums stay in registers
        for (__m512 &s : sum) s = _mm512_dpbf16_ps(s, (__m512bh)pairs, (__m512bh)pairs);
    }
    for (__m512 &s : sum) asm volatile("" : : "v"(s));
}

__attribute__((target("avx512f"))) void multiply_floats() {
    __m512 sum[SUMS];
    for (__m512 &s : sum) s = _mm512_setzero_ps();
    __m512 x = _mm512_setzero_ps();
    for (int i = 0; i < 2 * TURNS; i++) {
        asm volatile("" : "+v"(x));
#pragma GCC unroll 8
        for (__m512 &s : sum) s = _mm512_fmadd_ps(x, x, s);
    }
    for (__m512 &s : sum) asm volatile("" : : "v"(s));
}

double seconds_of(void (*run)()) {
    const auto start = std::chrono::steady_clock::now();
    run();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

bool measure() {
    double pairs = std::numeric_limits<double>::infinity(), floats = pairs;
    for (int i = 0; i < ROUNDS; i++) {
        pairs = std::min(pairs, seconds_of(multiply_pairs));
        floats = std::min(floats, seconds_of(multiply_floats));
    }
    return pairs < MARGIN * floats;
}

}  // namespace

bool skimkv::has_fast_bf16() {
    static const bool is_fast = measure();
    return is_fast;
}
#endif
