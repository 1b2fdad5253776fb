// The weights with which a quantised index is multiplied in integers.
//
// A code stands for scale * code + zero, with one scale and zero per channel and group of 256 tokens. So the weight of
// a channel times the scale of a group becomes an integer of that group, and the sums of its products with codes are
// exact. What remains is the rounding of the weights, which must be far less than the rounding of the codes, half a
// step of each:
//
// - Codes of 8 bits, where the CPU multiplies bytes: integers of 16 bits, whose high and low bytes are multiplied and
//   summed apart. A weight errs by 2^-16 of the largest.
// - Codes of 4 bits: integers of 8 bits. A weight errs by e <= 1/254 of the largest; what that adds for the mean code
//   7.5 is known and taken back, so that a logit errs by e * 7.5 at most in every channel, or 0.03 of the largest
//   weight (usually a tenth of that) beside 0.5 of the own weight by the rounding of the code.
#pragma once
#include <stdint.h>

#include "kernels/channel_sums.h"
#include "kernels/scratch_arena.h"
#include "kernels/unit.h"
#include "kernels/vector_math.h"
#include "skimkv.h"

namespace skimkv::SKIMKV_NS {

// The weights of one span of tiles; scratch memory of one thread. Four channels are a "quad".
struct ByteWeights {
    int32_t *high, *low;  // [G][quads][tiles]: the high and the low bytes of four channels' weights; of 4 bits low only
    float *step, *init;   // [G][tiles]: logit = step * integer sum + init
    int64_t tiles;
};

// The weights of one tile for the channels that are read at once, and several queries. Those of the next quad are
// `quad_ld` further, and those of the next query `query_ld`; its step and init are `float_ld` further.
struct TileWeights {
    const int32_t *high, *low;
    int64_t quad_ld, query_ld;
    const float *step, *init;
    int64_t float_ld;
};

// Whether scores from an index of element type E are summed in integers.
#if defined(SKIMKV_SIMD_VNNI) || defined(SKIMKV_SIMD_NEON)
template <class E> constexpr bool sums_in_integers = sizeof(E) == 1;
#else
// (Two products with codes of 8 bits would not fit in 16 bits.)
template <class E> constexpr bool sums_in_integers = is_int4<E>;
#endif

// Memory for the weights of n tokens; none if the index is not summed in integers.
static ByteWeights take_byte_weights(Arena &a, const skimkv_op *op, int64_t n) {
    const skimkv_cache *c = op->cache;
    const bool two_bytes = c->channels == SKIMKV_INT8 && sums_in_integers<uint8_t>;
    if (!two_bytes && c->channels != SKIMKV_INT4) return {};
    const int64_t tiles = round_up(n, 16 * 256) / 256, quads = round_up(max(op->r, c->R), CHANNELS_AT_ONCE) / 4;
    const int64_t words = c->G * quads * tiles;
    return {a.take<int32_t>(two_bytes ? words : 0), a.take<int32_t>(words), a.take<float>(c->G * tiles),
            a.take<float>(c->G * tiles), tiles};
}

// Loads the scales or the zeros of one channel in W groups, `stride` apart. Only `count` groups are left; the other
// lanes are zero.
static inline vf load_scales(const float *p, int64_t stride, int64_t count) {
    if (stride == 1) return count >= W ? load(p) : load_first(p, count);
    float lanes[W] = {};
    for (int i = 0; i < min(count, W); i++) lanes[i] = p[i * stride];
    return load(lanes);
}

// Makes the weights of tiles t0 .. t1-1 of one chunk for every query, W tiles at a time. FOUR: of codes of 4 bits. For
// Skim, to.init holds what the channels that are not read add to the logits.
template <bool FOUR>
static void make_byte_weights(const skimkv_op *op, const Unit &u, const skimkv_chunk *chunk, const ByteWeights &to,
                              int64_t t0, int64_t t1) {
    const int r = (int)u.r, sets = (r + CHANNELS_AT_ONCE - 1) / CHANNELS_AT_ONCE, quads = sets * CHANNELS_AT_ONCE / 4;
    const float *scale = chunk->scale + u.b * chunk->s_b + u.h * chunk->s_h + (t0 - chunk->start / GROUP) * chunk->s_g;
    // The largest weight: its low byte must fit, and the sum of r products with codes of 8 bits must fit 32 bits.
    const float largest = FOUR ? 127 : (float)min(32639, INT32_MAX / (255 * r));
    const float nearest = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, which the low bits then hold
    int bits;
    __builtin_memcpy(&bits, &nearest, 4);
    vf value[SKIMKV_MAX_HEAD];
    for (int c = r; c < quads * 4; c++) value[c] = splat(0.f);
    for (int g = 0; g < op->cache->G; g++)
        for (int64_t t = 0; t < t1 - t0; t += W) {
            vf top = splat(1e-30f), rest = splat(0.f), init = splat(0.f);
            if (op->method == SKIMKV_SKIM) init = load(to.init + g * to.tiles + t);
            for (int c = 0; c < r; c++) {
                const float *from = scale + t * chunk->s_g + u.channel[c] * chunk->s_r;
                const vf w = splat(u.channel_weight[g * r + c]);
                value[c] = w * load_scales(from, chunk->s_g, t1 - t0 - t);
                init = fma(w, load_scales(from + chunk->s_z, chunk->s_g, t1 - t0 - t), init);
                top = vmax(top, vmax(value[c], splat(0.f) - value[c]));
            }
            const vf inverse = splat(largest) / top;
            for (int quad = 0; quad < quads; quad++) {
                vi high = {}, low = {};
                for (int e = 3; e >= 0; e--) {
                    const vf x = value[4 * quad + e] * inverse, rounded = x + splat(nearest);
                    const vi q = (vi)rounded - bits;
                    if (FOUR) rest = rest + (x - (rounded - splat(nearest)));
                    high = (high << 8) | (((q + 128) >> 8) & 255);
                    low = (low << 8) | (q & 255);
                }
                if (!FOUR) store((float *)to.high + (g * quads + quad) * to.tiles + t, (vf)high);
                store((float *)to.low + (g * quads + quad) * to.tiles + t, (vf)low);
            }
            const vf step = top * splat(1 / largest);
            store(to.step + g * to.tiles + t, step);
            store(to.init + g * to.tiles + t, FOUR ? fma(step * splat(7.5f), rest, init) : init);
        }
}

// Adds CHANNELS_AT_ONCE channels of a tile of 256 tokens to s[g*ld + x] of GB queries, which holds integer sums until
// the LAST channels make logits of them; the FIRST channels write it. p are the channels' codes, FOUR bits each or
// eight, and token `at` is the first. The same places of `ahead` are prefetched. Every instruction set that sums in
// integers defines it.
template <bool FOUR, bool FIRST, bool LAST, int GB>
static inline void add_quantised_group(const uint8_t *const *p, const uint8_t *const *ahead, int64_t at,
                                       const TileWeights &w, float *s, int64_t ld);

}  // namespace skimkv::SKIMKV_NS
