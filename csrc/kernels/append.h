// Appends tokens to a cache: rows of K and V, their channels in the channel-major index, groups of the index that
// became full and are quantised, and the running mean of V.
#pragma once
#include <stdint.h>

#include "kernel_table.h"
#include "kernels/cache_layout.h"
#include "kernels/quantised_rows.h"
#include "kernels/vector_math.h"
#include "skimkv.h"
#include "subnormals.h"

namespace skimkv::SKIMKV_NS {

// Tokens that are appended at a time: what is read back or projected of their keys lies on the stack.
constexpr int64_t APPENDED_AT_ONCE = 64;

// The code of a number, of which a step is 1/divisor.
static inline uint8_t code_of(float x, float low, float divisor, float most) {
    const float y = __builtin_rintf((x - low) / divisor);
    return y > 0 ? (uint8_t)(y < most ? y : most) : 0;
}

// Writes the means of a full group, of which x holds 256 tokens of each of R channels.
template <class T> static void average_group(const T *x, int64_t ld, int R, T *means) {
    for (int c = 0; c < R; c++) {
        float value[GROUP], sum = 0;
        to_float(x + c * ld, value, GROUP);
        for (int i = 0; i < GROUP; i++) sum += value[i];
        round_to(means + c, sum / GROUP);
    }
}

// Codes n tokens of a group that is not full, the first of which is token `at` of the group, in 4 bits by the scale of
// the group before it.
template <class T>
static void code_open_tokens(const T *const *rows, int64_t n, int64_t at, int R, uint8_t *codes, int64_t codes_ld,
                             const float *scale, int64_t s_r, int64_t s_z) {
    // The scales lie in many cache lines: all are read before the first is used.
    float low[SKIMKV_MAX_HEAD], divisor[SKIMKV_MAX_HEAD];
    for (int c = 0; c < R; c++) low[c] = scale[c * s_r + s_z], divisor[c] = scale[c * s_r];
    for (int c = 0; c < R; c++) divisor[c] = divisor[c] == 0 ? 1 : divisor[c];
    for (int64_t i = 0; i < n; i++) {
        const int64_t block = (at + i) / 128, nibble = (at + i) % 128 / 16, word = (at + i) % 16;
        const int shift = 4 * (nibble % 2);
        uint8_t *byte = codes + block * 64 + word * 4 + nibble / 2, code[SKIMKV_MAX_HEAD];
        for (int c = 0; c < R; c++) code[c] = code_of(as_float(rows[i][c]), low[c], divisor[c], 15);
        for (int c = 0; c < R; c++, byte += codes_ld) *byte = (uint8_t)((*byte & ~(15 << shift)) | code[c] << shift);
    }
}

// Quantises one full group: x holds 256 tokens of each of R channels, which are `ld` apart. Codes of channel c go to
// codes + c*codes_ld; its scale goes to scale[c*s_r], and its zero s_z further. Both are NaN if a number is.
template <class T>
static void quantise_group(const T *x, int64_t ld, int R, int bits, uint8_t *codes, int64_t codes_ld, float *scale,
                           int64_t s_r, int64_t s_z) {
    const float steps = (float)((1 << bits) - 1);
    for (int c = 0; c < R; c++) {
        float value[GROUP];
        to_float(x + c * ld, value, GROUP);
        float low = value[0], high = value[0];
        for (int i = 1; i < GROUP; i++) {  // a NaN stays in both
            low = value[i] < low || value[i] != value[i] ? value[i] : low;
            high = value[i] > high || value[i] != value[i] ? value[i] : high;
        }
        const float step = (high - low) / steps, divisor = step == 0 ? 1 : step;
        uint8_t code[GROUP];
        for (int i = 0; i < GROUP; i++) code[i] = code_of(value[i], low, divisor, steps);
        scale[c * s_r] = step, scale[c * s_r + s_z] = low;
        uint8_t *to = codes + c * codes_ld;
        if (bits == 8) {
            __builtin_memcpy(to, code, GROUP);
            continue;
        }
        for (int i = 0; i < GROUP / 2; i++) {  // byte i%64 of block i/64: nibbles 2*e and 2*e + 1 of word d
            const int block = i / 64 * 128, d = i % 64 / 4, e = i % 4;
            to[i] = code[block + 32 * e + d] | code[block + 32 * e + 16 + d] << 4;
        }
    }
}

// Writes channel c of token i to to[c*ld + i], from rows x[i]: a few rows at a time, so that they stay in the L1 cache.
template <class T> static void transpose(const T *const *x, int64_t n, int R, T *to, int64_t ld) {
    for (int64_t from = 0; from < n; from += 32) {
        const int64_t stop = min(n, from + 32);
        for (int c = 0; c < R; c++)
            for (int64_t i = from; i < stop; i++) to[c * ld + i] = x[i][c];
    }
}

// Whether the token at position p enters the index as codes at once, by the scale of the group before it, and not the
// open group of numbers first.
static inline bool is_coded_at_once(const skimkv_chunk *chunk, int64_t p) { return chunk->means && p >= GROUP; }

// Lets the key of position p widen the bounds of its page; a NaN stays in both.
template <class T> static void widen_page(const skimkv_cache *c, int64_t b, int64_t h, int64_t p, const T *k) {
    const skimkv_chunk *chunk = chunk_of(c->pages, p / c->page);
    T *low = (T *)key_row<T>(chunk, b, h, p / c->page), *high = low + c->D;
    if (p % c->page == 0) {
        __builtin_memcpy(low, k, c->D * sizeof(T)), __builtin_memcpy(high, k, c->D * sizeof(T));
        return;
    }
    for (int d = 0; d < c->D; d++) {
        const float x = as_float(k[d]), l = as_float(low[d]), m = as_float(high[d]);
        low[d] = x < l || x != x ? k[d] : low[d], high[d] = x > m || x != x ? k[d] : high[d];
    }
}

// Where the row of position p lies in memory, of K or of V (if `value`).
template <class T>
static char *cached_row(const skimkv_cache *c, const skimkv_chunk *chunk, bool value, int64_t b, int64_t h, int64_t p) {
    if (c->bits) return (char *)(value ? value_row<char>(chunk, b, h, p) : key_row<char>(chunk, b, h, p));
    return (char *)(value ? value_row<T>(chunk, b, h, p) : key_row<T>(chunk, b, h, p));
}

// Writes a row into the cache and returns what the cache then holds: the row, or where it was quantised `rounded`.
template <class T> static const T *store_row(const skimkv_cache *c, const T *row, char *to, T *rounded) {
    if (!c->bits) return (T *)__builtin_memcpy(to, row, c->D * sizeof(T)), row;
    quantise_row(row, c->D, c->bits, (uint8_t *)to);
    if (c->channels != SKIMKV_NONE || c->mean || c->page) read_back_row((const uint8_t *)to, c->D, c->bits, rounded);
    return rounded;
}

// Prefetches the memory that the new row of an operation will be written to.
template <class T> static void prefetch_new_row(const skimkv_op *op, int64_t b, int64_t h) {
    const skimkv_cache *c = op->cache;
    const int64_t p = c->lengths[b];
    const skimkv_chunk *chunk = chunk_of(c->chunks, p);
    if (c->channels != SKIMKV_NONE) {
        const bool copy = c->channels == SKIMKV_COPY;
        const bool coded = is_coded_at_once(chunk, p);
        const T *index = copy ? (const T *)chunk->index + b * chunk->x_b + h * chunk->x_h + p - chunk->start
                              : (const T *)c->tail + b * c->t_b + h * c->t_h + p % GROUP;
        for (int i = 0; i < c->R && !coded; i++) prefetch_to_write(index + i * (copy ? chunk->x_r : c->t_r));
        const char *codes =
            (const char *)chunk->index + b * chunk->x_b + h * chunk->x_h + (p - chunk->start) / 128 * 64;
        for (int i = 0; i < c->R && coded; i++) prefetch_to_write(codes + i * chunk->x_r);
        if (coded) {  // the scale of the group before
            const skimkv_chunk *before = chunk_of(c->chunks, p / GROUP * GROUP - 1);
            const float *scale = before->scale + b * before->s_b + h * before->s_h +
                                 (p / GROUP - 1 - before->start / GROUP) * before->s_g;
            for (int i = 0; i < c->R; i++)
                prefetch(scale + i * before->s_r), prefetch(scale + i * before->s_r + before->s_z);
        }
    }
    for (int i = 0; i < c->D && c->mean; i += 16) prefetch_to_write(c->mean + b * c->m_b + h * c->m_h + i);
    for (int64_t i = 0; i < row_bytes(c); i += 64) {
        prefetch_to_write(cached_row<T>(c, chunk, false, b, h, p) + i);
        prefetch_to_write(cached_row<T>(c, chunk, true, b, h, p) + i);
    }
}

// Writes the keys of the group that begins at position `start` to `to`, which holds 256 tokens of each of R channels.
template <class T>
static void collect_group(const skimkv_cache *c, const skimkv_chunk *chunk, int64_t b, int64_t h, int64_t start,
                          T *to) {
    for (int64_t from = 0; from < GROUP; from += APPENDED_AT_ONCE) {
        const T *rows[APPENDED_AT_ONCE];
        T decoded[APPENDED_AT_ONCE][SKIMKV_MAX_HEAD];
        for (int64_t i = 0; i < APPENDED_AT_ONCE; i++) {
            const char *row = cached_row<T>(c, chunk, false, b, h, start + from + i);
            rows[i] = c->bits ? decoded[i] : (const T *)row;
            if (c->bits) read_back_row((const uint8_t *)row, c->D, c->bits, decoded[i]);
        }
        transpose(rows, APPENDED_AT_ONCE, c->R, to + from, c->t_r);
    }
}

// Codes the keys `rows` of n tokens from position p on, which are of a group that is not full, by the scale of the
// group before it, which may lie in another chunk.
template <class T>
static void code_open_rows(const skimkv_cache *c, int64_t b, int64_t h, int64_t p, int64_t n, const T *const *rows) {
    const int64_t group = p / GROUP;
    const skimkv_chunk *chunk = chunk_of(c->chunks, p), *before = chunk_of(c->chunks, group * GROUP - 1);
    const float *scale =
        before->scale + b * before->s_b + h * before->s_h + (group - 1 - before->start / GROUP) * before->s_g;
    uint8_t *codes = (uint8_t *)chunk->index + b * chunk->x_b + h * chunk->x_h + (group * GROUP - chunk->start) / 2;
    code_open_tokens(rows, n, p % GROUP, c->R, codes, chunk->x_r, scale, before->s_r, before->s_z);
}

// Appends the tokens of unit (b, h).
template <class T> static void append_unit(const skimkv_tokens *a, int64_t b, int64_t h) {
    const SubnormalResults while_it_runs(Subnormal::KEPT);
    const skimkv_cache *c = a->cache;
    const int D = c->D, R = c->R, bits = c->channels == SKIMKV_INT8 ? 8 : 4;
    const bool quantised = c->channels >= SKIMKV_INT8;
    const int64_t skip = a->skip ? a->skip[b] : 0, n = a->n - skip, first = a->at ? a->at[b] : c->lengths[b];
    const T *k = (const T *)a->k + b * a->k_b + h * a->k_h + skip * a->k_n;
    const T *v = (const T *)a->v + b * a->v_b + h * a->v_h + skip * a->v_n;
    float sum[SKIMKV_MAX_HEAD] = {};
    for (int64_t p = first; p < first + n;) {
        const skimkv_chunk *chunk = chunk_of(c->chunks, p);
        // Go no further than the chunk and than the group: a group is quantised before the next one begins.
        const int64_t end = min(min(first + n, chunk->start + chunk->cap), p / GROUP * GROUP + GROUP);
        const int64_t stop = min(end, p + APPENDED_AT_ONCE);
        const T *rows[APPENDED_AT_ONCE];
        T index_row[APPENDED_AT_ONCE][SKIMKV_MAX_HEAD], value[SKIMKV_MAX_HEAD];
        for (int64_t i = p; i < stop; i++) {
            const T *kr =
                store_row(c, k + (i - first) * a->k_n, cached_row<T>(c, chunk, false, b, h, i), index_row[i - p]);
            const T *vr = store_row(c, v + (i - first) * a->v_n, cached_row<T>(c, chunk, true, b, h, i), value);
            rows[i - p] = kr;
            if (c->page) widen_page(c, b, h, i, kr);
            if (c->mean)
                for (int d = 0; d < D; d++) sum[d] += as_float(vr[d]);
            if (c->projection) {
                float x[SKIMKV_MAX_HEAD] = {};
                for (int d = 0; d < D; d++)
                    for (int r = 0; r < R; r++) x[r] += as_float(kr[d]) * c->projection[(h * D + d) * R + r];
                from_float(x, index_row[i - p], R);
                rows[i - p] = index_row[i - p];
            }
        }
        if (quantised) {
            T *tail = (T *)c->tail + b * c->t_b + h * c->t_h;
            const bool coded = is_coded_at_once(chunk, p);
            if (!coded) transpose(rows, stop - p, R, tail + p % GROUP, c->t_r);
            if (stop % GROUP == 0) {
                const int64_t at = stop - GROUP - chunk->start;
                if (coded) collect_group(c, chunk, b, h, stop - GROUP, tail);
                uint8_t *codes = (uint8_t *)chunk->index + b * chunk->x_b + h * chunk->x_h + at * bits / 8;
                float *scale = (float *)chunk->scale + b * chunk->s_b + h * chunk->s_h + at / GROUP * chunk->s_g;
                quantise_group(tail, c->t_r, R, bits, codes, chunk->x_r, scale, chunk->s_r, chunk->s_z);
                if (chunk->means) average_group(tail, c->t_r, R, group_means<T>(chunk, b, h, at / GROUP));
            } else if (coded) {
                code_open_rows(c, b, h, p, stop - p, rows);
            }
        } else if (c->channels == SKIMKV_COPY) {
            transpose(rows, stop - p, R, (T *)chunk->index + b * chunk->x_b + h * chunk->x_h + p - chunk->start,
                      chunk->x_r);
        }
        p = stop;
    }
    if (c->mean && n > 0) {
        float *mean = (float *)c->mean + b * c->m_b + h * c->m_h;
        for (int d = 0; d < D; d++) mean[d] += (sum[d] - (float)n * mean[d]) / (float)(first + n);
    }
}

static void append(const skimkv_tokens *a, int64_t unit) {
    const int64_t b = unit / a->cache->H, h = unit % a->cache->H;
    if (a->cache->dtype == SKIMKV_F32) append_unit<float>(a, b, h);
    else if (a->cache->dtype == SKIMKV_BF16) append_unit<bf16>(a, b, h);
    else append_unit<f16>(a, b, h);
}

template <class T> static void code_open_unit(const skimkv_cache *c, int64_t b, int64_t h, int64_t from, int64_t to) {
    const SubnormalResults while_it_runs(Subnormal::KEPT);
    const T *tail = (const T *)c->tail + b * c->t_b + h * c->t_h;
    for (int64_t p = from; p < to; p += APPENDED_AT_ONCE) {
        const int64_t n = min(to - p, APPENDED_AT_ONCE);
        const T *rows[APPENDED_AT_ONCE];
        T row[APPENDED_AT_ONCE][SKIMKV_MAX_HEAD];
        for (int64_t i = 0; i < n; i++) {
            for (int r = 0; r < c->R; r++) row[i][r] = tail[r * c->t_r + (p + i) % GROUP];
            rows[i] = row[i];
        }
        code_open_rows(c, b, h, p, n, rows);
    }
}

static void code_open(const skimkv_cache *c, int64_t unit, int64_t from, int64_t to) {
    const int64_t b = unit / c->H, h = unit % c->H;
    if (c->dtype == SKIMKV_F32) code_open_unit<float>(c, b, h, from, to);
    else if (c->dtype == SKIMKV_BF16) code_open_unit<bf16>(c, b, h, from, to);
    else code_open_unit<f16>(c, b, h, from, to);
}

}  // namespace skimkv::SKIMKV_NS
