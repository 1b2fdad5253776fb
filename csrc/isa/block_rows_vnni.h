// Products of GGUF blocks with rounded inputs, with AVX-512 VNNI: codes of 8 bits, made unsigned by a bias, are
// multiplied with inputs of two bytes, 128 * high + low, and what the bias adds is taken away. The inputs stand in the
// order in which the codes leave a block, so that no code moves.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "isa/simd_avx512.h"
#include "kernels/block_types.h"
#include "kernels/rounded_inputs.h"
#include "kernels/vector_math.h"

namespace skimkv::SKIMKV_NS {

template <class Block> constexpr InputOrder ORDER_OF_INPUTS = Block::ORDER;

// Where the input i of a token stands, and the fifteen after a sixteenth one.
template <InputOrder ORDER> static inline int64_t place_of_input(int64_t i) {
    const int64_t group = i / 128 * 128, part = i / 32 % 4, rest = i % 32;
    if (ORDER == InputOrder::HALVES_OF_64)  // parts 0 and 2 are low nibbles of 64 bytes, 1 and 3 high ones
        return group + (part % 2 * 2 + part / 2) * 32 + rest;
    if (ORDER == InputOrder::HALVES_OF_32)  // first halves of four blocks are low nibbles, second halves high ones
        return group + rest / 16 * 64 + part * 16 + rest % 16;
    if (ORDER == InputOrder::QUARTERS)  // parts i and 4 + i of eight are the bits 2i and 2i + 1 of 64 bytes
        return i / 256 * 256 + part * 64 + i / 128 % 2 * 32 + rest;
    return i;
}

template <InputOrder ORDER, int BIAS>
static inline void store_inputs(const RoundedInputs &to, int64_t first, const int32_t *code, bool is_two_bytes) {
    const __m128i one = _mm_set1_epi8(1), zero = _mm_setzero_si128();
    for (int half = 0; half < 2; half++) {
        const int64_t at = place_of_input<ORDER>(first + half * 16);
        const __m512i x = _mm512_loadu_si512(code + half * 16);
        const __m512i high = is_two_bytes ? _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(64)), 7) : x;
        const __m128i highs = _mm512_cvtepi32_epi8(high);
        const __m128i lows = _mm512_cvtepi32_epi8(_mm512_sub_epi32(x, _mm512_slli_epi32(high, 7)));
        __m128i sum = _mm_dpbusd_epi32(zero, one, highs);
        if (is_two_bytes) sum = _mm_dpbusd_epi32(_mm_slli_epi32(sum, 7), one, lows);
        _mm_storeu_si128((__m128i *)(to.high + at), highs), _mm_storeu_si128((__m128i *)(to.low + at), lows);
        _mm_storeu_si128((__m128i *)(to.correction + at / 4), _mm_mullo_epi32(sum, _mm_set1_epi32(-BIAS)));
    }
}

// The products of N times 64 codes of a bias with the inputs from place `at` on, of one byte or of two.
template <bool TWO, int BIAS, int N>
static inline __m512i products_of(const __m512i *code, const RoundedInputs &x, int64_t at) {
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < N && BIAS; i++) sum = _mm512_add_epi32(sum, _mm512_loadu_si512(x.correction + at / 4 + i * 16));
    __m512i high = TWO ? _mm512_setzero_si512() : sum;
    for (int i = 0; i < N; i++) high = _mm512_dpbusd_epi32(high, code[i], _mm512_loadu_si512(x.high + at + i * 64));
    if (!TWO) return high;
    sum = _mm512_add_epi32(sum, _mm512_slli_epi32(high, 7));
    for (int i = 0; i < N; i++) sum = _mm512_dpbusd_epi32(sum, code[i], _mm512_loadu_si512(x.low + at + i * 64));
    return sum;
}

static inline __m512 float16_splat(const uint8_t *p) {
    uint16_t bits;
    __builtin_memcpy(&bits, p, 2);
    return _mm512_cvtph_ps(_mm256_set1_epi16((short)bits));
}

static inline __m512i nibbles(__m512i x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
static inline __m512i high_nibbles(__m512i x) { return nibbles(_mm512_srli_epi16(x, 4)); }
// Every lane index i from 0 to 15 divided by 2, and by 4.
static inline __m512i halves() { return _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7); }
static inline __m512i quarters() { return _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3); }

// A group of 128 or 256 weights: codes in the order of place_of_input, the scales of its parts, and in types with an
// offset, the offset of every sixteen weights. Where a block of 32 weights has both, `scale` has them in turns.
struct DecodedGroup {
    __m512i code[4];
    __m512 scale, offset;
};

// The scales and offsets of Q4_K and Q5_K: 6-bit scales and minima of eight parts, in 12 bytes.
static inline void decode_six_bit_scales(const uint8_t *p, DecodedGroup &to) {
    const __m128i packed = _mm_loadu_si128((const __m128i *)(p + 4));  // words a, b, c: see decode_six_bits
    const __m128i low = _mm_and_si128(_mm_srlv_epi32(_mm_shuffle_epi32(packed, 0x98), _mm_setr_epi32(0, 0, 0, 4)),
                                      _mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f));  // a, c, b, c
    const __m128i top = _mm_and_si128(_mm_srli_epi32(_mm_shuffle_epi32(packed, 0x50), 2),
                                      _mm_setr_epi32(0, 0x30303030, 0, 0x30303030));  // a, a, b, b
    const __m512i codes = _mm512_cvtepu8_epi32(_mm_or_si128(low, top));               // 8 scales, 8 minima
    uint32_t two;
    __builtin_memcpy(&two, p, 4);
    two ^= 0x80000000;  // minima are taken from the weights
    const __m256i eight = _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3,
                                           2, 3, 2, 3, 2, 3);
    const __m512 of_codes = _mm512_cvtph_ps(_mm256_shuffle_epi8(_mm256_set1_epi32((int)two), eight));
    const __m512 both = _mm512_cvtepi32_ps(codes) * of_codes;
    to.scale = _mm512_zextps256_ps512(_mm512_castps512_ps256(both));
    to.offset = _mm512_permutexvar_ps(_mm512_add_epi32(halves(), _mm512_set1_epi32(8)), both);
}

static inline void decode(BlockQ4_K, const uint8_t *p, DecodedGroup &to) {
    decode_six_bit_scales(p, to);
    for (int i = 0; i < 2; i++) {
        const __m512i two = _mm512_loadu_si512(p + 16 + i * 64);
        to.code[2 * i] = nibbles(two), to.code[2 * i + 1] = high_nibbles(two);
    }
}

static inline void decode(BlockQ5_K, const uint8_t *p, DecodedGroup &to) {
    decode_six_bit_scales(p, to);
    const __m512i top = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(p + 16)));
    const auto add_bit = [&](__m512i code, int i) {  // 16 where bit i is set, or bit i+2 in the last 32 bytes
        const __m512i bits = _mm512_inserti64x4(_mm512_set1_epi8((char)(1 << i)), _mm256_set1_epi8((char)(4 << i)), 1);
        return _mm512_mask_add_epi8(code, _mm512_test_epi8_mask(top, bits), code, _mm512_set1_epi8(16));
    };
    for (int i = 0; i < 2; i++) {
        const __m512i two = _mm512_loadu_si512(p + 48 + i * 64);
        to.code[2 * i] = add_bit(nibbles(two), 4 * i), to.code[2 * i + 1] = add_bit(high_nibbles(two), 4 * i + 1);
    }
}

static inline void decode(BlockQ6_K, const uint8_t *p, DecodedGroup &to) {
    const __m512i shift = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(2), 1);
    const __m512i top_bits = _mm512_set1_epi8(0x30);
    to.scale =
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p + 192)))) * float16_splat(p + 208);
    for (int i = 0; i < 2; i++) {
        const __m512i low = _mm512_loadu_si512(p + i * 64);
        const __m512i tops = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(p + 128 + i * 32)));
        const __m512i top = _mm512_srlv_epi16(tops, shift);
        to.code[2 * i] = _mm512_or_si512(nibbles(low), _mm512_and_si512(_mm512_slli_epi16(top, 4), top_bits));
        to.code[2 * i + 1] = _mm512_or_si512(high_nibbles(low), _mm512_and_si512(top, top_bits));
    }
}

// The codes of 2 bits, the bits 2i and 2i + 1 of 64 bytes.
static inline __m512i two_bits(const uint8_t *p, int i) {
    return _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(p), (unsigned)(2 * i)), _mm512_set1_epi8(3));
}

static inline void decode(BlockQ2_K, const uint8_t *p, DecodedGroup &to) {
    const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    for (int i = 0; i < 4; i++) to.code[i] = two_bits(p + 16, i);
    to.scale = _mm512_cvtepi32_ps(_mm512_and_si512(both, _mm512_set1_epi32(15))) * float16_splat(p + 80);
    to.offset = _mm512_cvtepi32_ps(_mm512_srli_epi32(both, 4)) * (splat(0.f) - float16_splat(p + 82));
}

static inline void decode(BlockQ3_K, const uint8_t *p, DecodedGroup &to) {
    const __m512i top = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)p));
    uint32_t high;
    uint64_t low;
    __builtin_memcpy(&low, p + 96, 8), __builtin_memcpy(&high, p + 104, 4);
    const __m128i lows = _mm_and_si128(_mm_set_epi64x((int64_t)(low >> 4), (int64_t)low), _mm_set1_epi8(15));
    const __m128i highs = _mm_srlv_epi32(_mm_set1_epi32((int)high), _mm_setr_epi32(0, 2, 4, 6));
    const __m128i codes = _mm_or_si128(lows, _mm_slli_epi16(_mm_and_si128(highs, _mm_set1_epi8(3)), 4));
    const __m512i signed_codes = _mm512_sub_epi32(_mm512_cvtepu8_epi32(codes), _mm512_set1_epi32(32));
    to.scale = _mm512_cvtepi32_ps(signed_codes) * float16_splat(p + 108);
    for (int i = 0; i < 4; i++) {
        const __m512i bits = _mm512_inserti64x4(_mm512_set1_epi8((char)(1 << i)), _mm256_set1_epi8((char)(16 << i)), 1);
        const __m512i code = two_bits(p + 32, i);
        to.code[i] = _mm512_mask_add_epi8(code, _mm512_test_epi8_mask(top, bits), code, _mm512_set1_epi8(4));
    }
}

// What a code of 4 bits stands for, by a table of signed values, and the bias.
template <int BIAS> static inline __m512i look_up(const int8_t *values, __m512i code) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)values));
    return _mm512_shuffle_epi8(_mm512_add_epi8(table, _mm512_set1_epi8((char)BIAS)), code);
}

static inline void decode(BlockIQ4_XS, const uint8_t *p, DecodedGroup &to) {
    uint16_t high;
    uint32_t low;
    __builtin_memcpy(&high, p + 2, 2), __builtin_memcpy(&low, p + 4, 4);
    const __m256i lows =
        _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32((int)low), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28)),
                         _mm256_set1_epi32(15));
    const __m256i highs = _mm256_and_si256(
        _mm256_srlv_epi32(_mm256_set1_epi32(high), _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14)), _mm256_set1_epi32(3));
    const __m256i codes = _mm256_sub_epi32(_mm256_or_si256(lows, _mm256_slli_epi32(highs, 4)), _mm256_set1_epi32(32));
    to.scale = _mm512_zextps256_ps512(_mm256_cvtepi32_ps(codes) * _mm512_castps512_ps256(float16_splat(p)));
    for (int i = 0; i < 2; i++) {
        const __m512i two = _mm512_loadu_si512(p + 8 + i * 64);
        to.code[2 * i] = look_up<128>(IQ4_VALUES, nibbles(two));
        to.code[2 * i + 1] = look_up<128>(IQ4_VALUES, high_nibbles(two));
    }
}

// The 16 bytes at p of four blocks.
template <class Block> static inline __m512i sixteen_of_each(const uint8_t *p) {
    const auto codes = [&](int i) { return _mm_loadu_si128((const __m128i *)(p + i * Block::ONE)); };
    const __m256i first = _mm256_inserti128_si256(_mm256_castsi128_si256(codes(0)), codes(1), 1);
    const __m256i second = _mm256_inserti128_si256(_mm256_castsi128_si256(codes(2)), codes(3), 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
}

// Words of two bytes: those from byte 0 and from byte SECOND on of four blocks.
template <class Block, int SECOND> static inline __m128i two_words_of_each(const uint8_t *p) {
    constexpr int LATER = Block::BYTES > 128 ? 2 * Block::ONE : Block::BYTES - 64;  // where a second load begins
    const auto word = [](int byte) { return (short)(byte < 63 ? byte / 2 : 32 + (byte - LATER) / 2); };
    const __m128i places =
        _mm_setr_epi16(word(0), word(Block::ONE), word(2 * Block::ONE), word(3 * Block::ONE), word(SECOND),
                       word(Block::ONE + SECOND), word(2 * Block::ONE + SECOND), word(3 * Block::ONE + SECOND));
    return _mm512_castsi512_si128(_mm512_permutex2var_epi16(_mm512_loadu_si512(p), _mm512_castsi128_si512(places),
                                                            _mm512_loadu_si512(p + LATER)));
}

template <class Block> static inline void decode_scales(const uint8_t *p, DecodedGroup &to) {
    to.scale = _mm512_zextps128_ps512(_mm256_castps256_ps128(_mm256_cvtph_ps(two_words_of_each<Block, 0>(p))));
}
template <> inline void decode_scales<BlockMXFP4>(const uint8_t *p, DecodedGroup &to) {  // see scale_of
    const __m128i words = _mm_cvtepu16_epi32(two_words_of_each<BlockMXFP4, 0>(p));
    const __m128i e = _mm_and_si128(_mm_srlv_epi32(words, _mm_setr_epi32(0, 8, 0, 8)), _mm_set1_epi32(255));
    const __m128i tiny = _mm_sllv_epi32(_mm_set1_epi32(0x200000), e);
    const __m128i bits = _mm_slli_epi32(_mm_sub_epi32(e, _mm_set1_epi32(1)), 23);
    const __m128i scale = _mm_mask_blend_epi32(_mm_cmplt_epi32_mask(e, _mm_set1_epi32(2)), bits, tiny);
    to.scale = _mm512_zextps128_ps512(_mm_castsi128_ps(scale));
}

template <class Block> static inline void decode_codes(Block, const uint8_t *p, DecodedGroup &to) {
    const __m512i two = sixteen_of_each<Block>(p + Block::CODES);
    to.code[0] = nibbles(two), to.code[1] = high_nibbles(two);
}
template <class Block> static inline void add_fifth_bits(const uint8_t *p, DecodedGroup &to) {
    const auto bits = [&](int half, int i) {
        uint16_t x;
        __builtin_memcpy(&x, p + i * Block::ONE + Block::CODES - 4 + 2 * half, 2);
        return (uint64_t)x << 16 * i;
    };
    const __m512i fifth = _mm512_set1_epi8(16);
    const uint64_t first = bits(0, 0) | bits(0, 1) | bits(0, 2) | bits(0, 3);
    const uint64_t second = bits(1, 0) | bits(1, 1) | bits(1, 2) | bits(1, 3);
    to.code[0] = _mm512_mask_add_epi8(to.code[0], first, to.code[0], fifth);
    to.code[1] = _mm512_mask_add_epi8(to.code[1], second, to.code[1], fifth);
}
static inline void decode_codes(BlockQ5_0, const uint8_t *p, DecodedGroup &to) {
    decode_codes<BlockQ5_0>(BlockQ5_0(), p, to), add_fifth_bits<BlockQ5_0>(p, to);
}
static inline void decode_codes(BlockQ8_0, const uint8_t *p, DecodedGroup &to) {
    to.code[0] = _mm512_xor_si512(sixteen_of_each<BlockQ8_0>(p + 2), _mm512_set1_epi8(-128));
    to.code[1] = _mm512_xor_si512(sixteen_of_each<BlockQ8_0>(p + 18), _mm512_set1_epi8(-128));
}
static inline void decode_codes(BlockIQ4_NL, const uint8_t *p, DecodedGroup &to) {
    decode_codes<BlockIQ4_NL>(BlockIQ4_NL(), p, to);
    to.code[0] = look_up<128>(IQ4_VALUES, to.code[0]), to.code[1] = look_up<128>(IQ4_VALUES, to.code[1]);
}
static inline void decode_codes(BlockMXFP4, const uint8_t *p, DecodedGroup &to) {
    decode_codes<BlockMXFP4>(BlockMXFP4(), p, to);
    to.code[0] = look_up<16>(MXFP4_VALUES, to.code[0]), to.code[1] = look_up<16>(MXFP4_VALUES, to.code[1]);
}

template <class Block, int = Block::ONE> static inline void decode(Block, const uint8_t *p, DecodedGroup &to) {
    decode_scales<Block>(p, to), decode_codes(Block(), p, to);
}

// Four blocks of 32 weights that have a scale and an offset each: their parts are words of four bytes.
template <class Block> constexpr bool HAS_PAIRS = Block::HAS_OFFSET && Block::SIZE == FOUR_BLOCKS;

// Of each of four blocks, the COUNT words from byte FIRST on.
template <class Block, int FIRST, int COUNT> static inline __m512i words_of_each(const uint8_t *p) {
    constexpr int LATER = Block::BYTES - 64;  // where a second load begins
    static_assert(Block::ONE % 4 == 0 && LATER % 4 == 0 && LATER <= 64, "two loads have all words of four blocks");
    alignas(64) static constexpr auto PLACES = [] {
        struct {
            int32_t of_lane[16];
        } places{};
        for (int i = 0; i < 4 * COUNT; i++) {
            const int byte = i / COUNT * Block::ONE + FIRST + i % COUNT * 4;
            places.of_lane[i] = byte < 64 ? byte / 4 : 16 + (byte - LATER) / 4;
        }
        return places;
    }();
    return _mm512_permutex2var_epi32(_mm512_loadu_si512(p), _mm512_load_si512(&PLACES), _mm512_loadu_si512(p + LATER));
}
template <class Block> static inline void decode_pairs(const uint8_t *p, DecodedGroup &to) {
    const __m512i two = words_of_each<Block, Block::CODES, 4>(p);
    to.code[0] = nibbles(two), to.code[1] = high_nibbles(two);
    to.scale = _mm512_zextps256_ps512(_mm256_cvtph_ps(_mm512_castsi512_si128(words_of_each<Block, 0, 1>(p))));
}
static inline void decode(BlockQ4_1, const uint8_t *p, DecodedGroup &to) { decode_pairs<BlockQ4_1>(p, to); }
static inline void decode(BlockQ5_1, const uint8_t *p, DecodedGroup &to) {
    decode_pairs<BlockQ5_1>(p, to), add_fifth_bits<BlockQ5_1>(p, to);
}

// A token's scales for the parts of a group, in turns with sums where the group's are with offsets; and its sums of
// every sixteen inputs.
template <class Block> static inline __m512 input_scales(const RoundedInputs &x, int64_t at) {
    if (HAS_PAIRS<Block>) return _mm512_zextps256_ps512(_mm256_loadu_ps(x.sum + at / 16));
    if (Block::SIZE == FOUR_BLOCKS) return _mm512_zextps128_ps512(_mm_loadu_ps(x.scale + at / 32));
    const __m512 eight = _mm512_zextps256_ps512(_mm256_loadu_ps(x.scale + at / 32));
    return Block::PART == 16 ? _mm512_permutexvar_ps(halves(), eight) : eight;
}
static inline __m512 input_sums(const RoundedInputs &x, int64_t at) { return load(x.sum + at / 16); }

// The part of a group that each lane of the products of code vector i belongs to.
template <InputOrder ORDER> static inline __m512i part_of_lanes(int i) {
    const auto second_half = [](int parts) {
        return _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(parts), 1);
    };
    if (ORDER == InputOrder::HALVES_OF_64)  // the parts 0 and 2, 1 and 3, 4 and 6, 5 and 7
        return _mm512_add_epi32(second_half(2), _mm512_set1_epi32(i / 2 * 4 + i % 2));
    if (ORDER == InputOrder::QUARTERS)  // of 16: the parts 2i, 2i + 1, 8 + 2i and 9 + 2i
        return _mm512_add_epi32(_mm512_add_epi32(quarters(), second_half(6)), _mm512_set1_epi32(2 * i));
    return _mm512_add_epi32(quarters(), _mm512_set1_epi32(ORDER == InputOrder::HALVES_OF_32 ? i * 2 : i * 4));
}

// Adds the products of a group, whose first column is `at`, with T tokens to sum[T].
template <bool TWO, int T, class Block>
__attribute__((always_inline)) static inline void add_group(const uint8_t *p, int64_t at, int64_t,
                                                            const RoundedInputs *x, vf *sum) {
    constexpr int JOINED = Block::ORDER == InputOrder::HALVES_OF_32 ? 2 : 1;
    DecodedGroup group;
    decode(Block(), p, group);
    for (int t = 0; t < T; t++) {
        const __m512 scale = group.scale * input_scales<Block>(x[t], at);
        for (int i = 0; i < Block::SIZE / 64; i += JOINED) {
            const __m512i products = products_of<TWO, Block::BIAS, JOINED>(group.code + i, x[t], at + i * 64);
            __m512i part = part_of_lanes<Block::ORDER>(i);
            if (HAS_PAIRS<Block>) part = _mm512_add_epi32(part, part);
            sum[t] = fma(_mm512_cvtepi32_ps(products), _mm512_permutexvar_ps(part, scale), sum[t]);
        }
        if (HAS_PAIRS<Block>) sum[t] = _mm512_mask_add_ps(sum[t], 0xaa, sum[t], scale);  // offsets times sums
        else if (Block::HAS_OFFSET) sum[t] = fma(group.offset, input_sums(x[t], at), sum[t]);
    }
}

}  // namespace skimkv::SKIMKV_NS
