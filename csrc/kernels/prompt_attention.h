// Causal attention of a prompt, block by block with a softmax that is updated (FlashAttention, arXiv 2205.14135):
// skimkv_prompt in skimkv.h.
//
// A task is some queries of one KV head, those of its G heads beside each other. Each lane of a vector has a query:
// logits, maxima, sums and results are [keys or D][lanes], and no step works across lanes. Keys and values are
// broadcast word by word; a word is a float or, where bfloat16 is multiplied as it is, a pair of bfloat16, neighbours
// in D for q and k and in the keys for v.
//
// What a key receives of a query is known when the query has seen all keys. So where that is asked for (H2O, arXiv
// 2306.14048), the weights of all blocks are kept until then, for few panels at a time, and are added up key by key.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kernel_table.h"
#include "kernels/prompt_softmax.h"
#include "kernels/scratch_arena.h"
#include "kernels/vector_math.h"
#include "skimkv.h"
#ifdef SKIMKV_BF16_PRODUCTS
#include "isa/prompt_products_bf16.h"
#endif

namespace skimkv::SKIMKV_NS {

template <int N> struct Number {
    static constexpr int value = N;
};

constexpr int PROMPT_VECTORS = 3;  // vectors of queries that are multiplied together: a panel
constexpr int PANEL = PROMPT_VECTORS * W;
// Rows of a tile, whose sums fit the registers together with a row of the panel.
#if defined(SKIMKV_SIMD_AVX512) || defined(SKIMKV_SIMD_NEON)
constexpr int PROMPT_ROWS = 8;
#else
constexpr int PROMPT_ROWS = 4;
#endif
constexpr int PROMPT_DEPTH = 128;         // words that are multiplied before their sum is rounded to that of all words
constexpr int PROMPT_KEYS = 128;          // keys of a block
constexpr int PROMPT_QUERIES = 384;       // queries of a group, for which a block is prepared once, at most
constexpr int64_t KEPT_BYTES = 16 << 20;  // of weights that are kept, if a panel does not need more

// Scratch memory of a panel, [lanes] last.
struct PromptPanel {
    float *q;                       // [words]
    float *y;                       // [D], rounded up
    float *maximum, *sum, *factor;  // one row each
    int32_t *visible;               // how many positions each query sees
    int lanes, vectors;             // queries, and vectors that they take
    int64_t first, last;            // the fewest and most positions that a query sees
    // Where weights are kept: those of all keys, [keys][lanes], and the maxima after each block of keys.
    float *kept, *kept_maximum;
};

// Scratch memory of a task.
struct PromptScratch {
    float *k;         // [PROMPT_KEYS][words]
    float *v;         // [D/PROMPT_ROWS][PROMPT_KEYS, or pairs of them][PROMPT_ROWS]
    float *s;         // [PROMPT_KEYS][PANEL] logits, then weights
    float *rows;      // [W][D], rounded up: rows that are transposed
    float *scale;     // [PANEL] what logits are multiplied by
    float *received;  // [m], rounded up: what the keys received
    PromptPanel panels[PROMPT_QUERIES / PANEL];
};

static inline int64_t prompt_words(const skimkv_prompt *op, bool pairs) { return pairs ? (op->D + 1) / 2 : op->D; }

// Rows of v in a block.
static constexpr int64_t prompt_depth(bool pairs) { return pairs ? PROMPT_KEYS / 2 : PROMPT_KEYS; }

// Queries of a group: whole panels.
static inline int64_t prompt_queries(const skimkv_prompt *op) {
    const int64_t bytes_of_panel = round_up(op->m, PROMPT_KEYS) * PANEL * (int64_t)sizeof(float);
    return op->received ? max(PANEL, min(PROMPT_QUERIES, KEPT_BYTES / bytes_of_panel * PANEL)) : PROMPT_QUERIES;
}

static PromptScratch take_prompt(Arena &a, const skimkv_prompt *op, bool pairs) {
    const int64_t words = prompt_words(op, pairs), wide = round_up(op->D, max(W, PROMPT_ROWS));
    PromptScratch x;
    x.k = a.take<float>(PROMPT_KEYS * words);
    x.v = a.take<float>(prompt_depth(pairs) * wide);
    x.s = a.take<float>(PROMPT_KEYS * PANEL);
    x.rows = a.take<float>(W * wide);
    x.scale = a.take<float>(PANEL);
    const int64_t kept_keys = op->received ? round_up(op->m, PROMPT_KEYS) : 0;
    x.received = a.take<float>(kept_keys);
    for (int64_t i = 0; i < prompt_queries(op) / PANEL; i++) {
        PromptPanel &panel = x.panels[i];
        panel.kept = a.take<float>(kept_keys * PANEL);
        panel.kept_maximum = a.take<float>(kept_keys / PROMPT_KEYS * PANEL);
        panel.q = a.take<float>(words * PANEL);
        panel.y = a.take<float>(wide * PANEL);
        panel.maximum = a.take<float>(PANEL), panel.sum = a.take<float>(PANEL), panel.factor = a.take<float>(PANEL);
        panel.visible = a.take<int32_t>(PANEL);
    }
    return x;
}

static inline bool prompt_has_pairs([[maybe_unused]] const skimkv_prompt *op) {
#ifdef SKIMKV_BF16_PRODUCTS
    return op->dtype == SKIMKV_BF16 && multiplies_bf16();
#else
    return false;
#endif
}

static size_t prompt_scratch_bytes(const skimkv_prompt *op) {
    Arena a{nullptr};
    take_prompt(a, op, false);  // words that are floats take most
    return a.used;
}

// Groups of queries.
static int64_t prompt_groups(const skimkv_prompt *op) {
    return (op->n * op->G + prompt_queries(op) - 1) / prompt_queries(op);
}

// A row as words; the last pair of an odd D is filled with zero.
template <class T, bool PAIRS> static inline void words_of_row(const T *from, float *to, int64_t D) {
    if constexpr (PAIRS) {
        if (D % 2) to[D / 2] = 0;
        __builtin_memcpy(to, from, D * sizeof(T));
    } else {
        to_float(from, to, (int)D);
    }
}

// Two rows as pairs. A mask of 0 instead of 0xffff makes a row zero.
static inline uint32_t pair_of(bf16 a, uint32_t mask_a, bf16 b, uint32_t mask_b) {
    return (a.bits & mask_a) | (b.bits & mask_b) << 16;
}

// Prepares the keys and values of the positions start .. start+count-1, filled with zeros up to whole tiles.
template <class T, bool PAIRS>
static void prepare_prompt_block(const skimkv_prompt *op, const PromptScratch &x, const T *k, const T *v, int64_t start,
                                 int64_t count) {
    constexpr int64_t R = PROMPT_ROWS, DEPTH = prompt_depth(PAIRS);
    const int64_t D = op->D, words = prompt_words(op, PAIRS), rows = round_up(count, R), whole = D / R * R;
    for (int64_t j = 0; j < count; j++) words_of_row<T, PAIRS>(k + (start + j) * op->k_n, x.k + j * words, D);
    __builtin_memset(x.k + count * words, 0, (rows - count) * words * sizeof(float));
    if (!v) return;
    const auto value = [&](int64_t j) { return v + (start + min(j, count - 1)) * op->v_n; };
    for (int64_t i = 0; i < (PAIRS ? rows / 2 : rows); i++) {
        float *to = x.v + i * R;
        if constexpr (PAIRS) {
            const T *a = value(2 * i), *b = value(2 * i + 1);
            const uint32_t mask_a = 2 * i < count ? 0xffff : 0, mask_b = 2 * i + 1 < count ? 0xffff : 0;
            uint32_t pairs[R];
            for (int64_t d = 0; d < whole; d += R, to += DEPTH * R) {
                for (int r = 0; r < R; r++) pairs[r] = pair_of(a[d + r], mask_a, b[d + r], mask_b);
                __builtin_memcpy(to, pairs, sizeof pairs);
            }
            for (int64_t d = whole; d < D; d++) pairs[d - whole] = pair_of(a[d], mask_a, b[d], mask_b);
            __builtin_memcpy(to, pairs, (D - whole) * sizeof(float));
        } else {
            float values[SKIMKV_MAX_HEAD];
            to_float(value(i), values, (int)D);
            if (i >= count) __builtin_memset(values, 0, D * sizeof(float));
            for (int64_t d = 0; d < whole; d += R, to += DEPTH * R) __builtin_memcpy(to, values + d, R * sizeof(float));
            __builtin_memcpy(to, values + whole, (D - whole) * sizeof(float));
        }
    }
}

// Prepares the queries from `query` on, at most a panel of those before `end`.
template <class T, bool PAIRS>
static void prepare_prompt_panel(const skimkv_prompt *op, const PromptScratch &x, PromptPanel &panel, const T *q,
                                 int64_t query, int64_t end) {
    const int64_t words = prompt_words(op, PAIRS), wide = round_up(words, W), before = op->m - op->n;
    panel.lanes = (int)min(PANEL, end - query), panel.vectors = (panel.lanes + W - 1) / W;
    panel.first = before + query / op->G + 1, panel.last = before + (query + panel.lanes - 1) / op->G + 1;
    const int C = panel.vectors;
    for (int i = 0; i < C * W; i++) {
        panel.visible[i] = (int32_t)(i < panel.lanes ? before + (query + i) / op->G + 1 : panel.last);
        panel.maximum[i] = LOWEST, panel.sum[i] = 0;
    }
    __builtin_memset(panel.y, 0, round_up(op->D, max(W, PROMPT_ROWS)) * C * W * sizeof(float));
    for (int v = 0; v < C; v++) {
        __builtin_memset(x.rows, 0, W * wide * sizeof(float));
        for (int i = 0; i < W && v * W + i < panel.lanes; i++) {
            const int64_t at = query + v * W + i;
            words_of_row<T, PAIRS>(q + at / op->G * op->q_n + at % op->G * op->q_g, x.rows + i * wide, op->D);
        }
        for (int64_t word = 0; word < words; word += W) {
            vf block[W];
            for (int i = 0; i < W; i++) block[i] = load(x.rows + i * wide + word);
            transpose(block);
            for (int i = 0; i < W && word + i < words; i++) store(panel.q + ((word + i) * C + v) * W, block[i]);
        }
    }
}

template <int C, bool PAIRS> static inline void multiply_prompt(const PromptProduct &x, const float *a, float *c) {
#ifdef SKIMKV_BF16_PRODUCTS
    if constexpr (PAIRS) return multiply_prompt_tile_bf16<PROMPT_ROWS, C>(x, a, c);
#endif
    multiply_prompt_tile<PROMPT_ROWS, C>(x, a, c);
}

// Adds a block of `keys` positions from `start` on, a multiple of PROMPT_ROWS, to the results of a panel.
template <int C, bool PAIRS>
static void attend_to_prompt_block(const skimkv_prompt *op, const PromptScratch &x, const PromptPanel &panel,
                                   int64_t start, int64_t keys) {
    constexpr int R = PROMPT_ROWS, L = C * W;
    const int64_t words = prompt_words(op, PAIRS);
    float *s = op->received ? panel.kept + start * L : x.s;
    for (int64_t first = 0; first < words; first += PROMPT_DEPTH) {
        const PromptProduct logits{words,
                                   1,
                                   min(PROMPT_DEPTH, words - first),
                                   panel.q + first * L,
                                   x.scale,
                                   first ? ADD_SCALED : STORE_SCALED};
        for (int64_t j = 0; j < keys; j += R) multiply_prompt<C, PAIRS>(logits, x.k + j * words + first, s + j * L);
    }
    if (op->softcap != 0)
        for (int64_t i = 0; i < keys * L; i += W) store(s + i, apply_softcap(load(s + i), op->softcap * LOG2E));
    for (int64_t j = max(0, panel.first - start); j < keys; j++)
        for (int v = 0; v < C; v++) {
            const int32_t at = (int32_t)(start + j);
            vi visible;
            __builtin_memcpy(&visible, panel.visible + v * W, sizeof visible);
            float *logits = s + j * L + v * W;
            store(logits, (vi)(visible > (visible & 0) + at) ? load(logits) : splat(LOWEST));
        }
#ifdef SKIMKV_BF16_PRODUCTS
    if (PAIRS && op->received) weigh_keys_bf16<C, true>(s, x.s, keys, panel.maximum, panel.sum, panel.factor);
    else if (PAIRS) weigh_keys_bf16<C, false>(s, s, keys, panel.maximum, panel.sum, panel.factor);
#endif
    if (!PAIRS) weigh_keys<C>(s, keys, panel.maximum, panel.sum, panel.factor);
    if (op->received) {
        for (int64_t j = keys; j % W; j++) __builtin_memset(s + j * L, 0, L * sizeof(float));
        __builtin_memcpy(panel.kept_maximum + start / PROMPT_KEYS * L, panel.maximum, L * sizeof(float));
    }
    if (!op->v) return;
    constexpr int64_t DEPTH = prompt_depth(PAIRS);
    const PromptProduct values{1, R, PAIRS ? keys / 2 : keys, PAIRS ? x.s : s, panel.factor, ADD_TO_SCALED};
    for (int64_t d = 0; d < op->D; d += R) multiply_prompt<C, PAIRS>(values, x.v + d * DEPTH, panel.y + d * L);
}

// Lets the sinks join the sums of a panel's weights.
static void add_prompt_sinks(const skimkv_prompt *op, const PromptPanel &panel, int64_t h, int64_t query) {
    for (int64_t i = 0; op->sinks && i < panel.lanes; i++)
        panel.sum[i] += sink_weight(op->sinks, h * op->G + (query + i) % op->G, panel.maximum[i]);
}

// Adds what the queries of a panel gave to every key, the mean over the group.
template <int C>
static void add_to_received(const skimkv_prompt *op, const PromptScratch &x, const PromptPanel &panel) {
    constexpr int L = C * W;
    vf share[C];
    for (int i = 0; i < L; i++) share[i / W][i % W] = i < panel.lanes ? 1 / (panel.sum[i] * (float)op->G) : 0;
    for (int64_t start = 0; start < panel.last; start += PROMPT_KEYS) {
        const float *kept = panel.kept + start * L, *maximum = panel.kept_maximum + start / PROMPT_KEYS * L;
        vf factor[C];
        for (int v = 0; v < C; v++) factor[v] = exp2(load(maximum + v * W) - load(panel.maximum + v * W)) * share[v];
        for (int64_t j = 0; j < min(PROMPT_KEYS, panel.last - start); j += W) {
            vf sum[W];
            for (int i = 0; i < W; i++) {
                sum[i] = load(kept + (j + i) * L) * factor[0];
                for (int v = 1; v < C; v++) sum[i] = fma(load(kept + (j + i) * L + v * W), factor[v], sum[i]);
            }
            float *to = x.received + start + j;
            store(to, load(to) + sums_of(sum));
        }
    }
}

template <class T>
static void store_prompt_panel(const skimkv_prompt *op, const PromptScratch &x, const PromptPanel &panel, T *y,
                               int64_t query) {
    const int64_t D = op->D, wide = round_up(D, W);
    const int C = panel.vectors;
    for (int v = 0; v < C; v++) {
        const vf inverse = splat(1.f) / load(panel.sum + v * W);
        for (int64_t d = 0; d < D; d += W) {
            vf block[W];
            for (int i = 0; i < W; i++) block[i] = load(panel.y + ((d + i) * C + v) * W) * inverse;
            transpose(block);
            for (int i = 0; i < W; i++) store(x.rows + i * wide + d, block[i]);
        }
        for (int i = 0; i < W && v * W + i < panel.lanes; i++) {
            const int64_t at = query + v * W + i;
            from_float(x.rows + i * wide, y + at / op->G * op->y_n + at % op->G * op->y_g, (int)D);
        }
    }
}

// Calls f with the number of vectors of a panel as a constant.
template <class F> static inline void with_vectors(const PromptPanel &panel, const F &f) {
    if (panel.vectors == 3) f(Number<3>{});
    else if (panel.vectors == 2) f(Number<2>{});
    else f(Number<1>{});
}

// A group of queries of KV head h of row b.
template <class T, bool PAIRS>
static void attend_prompt(const skimkv_prompt *op, PromptScratch &x, int64_t b, int64_t h, int64_t group) {
    const int64_t begin = group * prompt_queries(op), end = min(begin + prompt_queries(op), op->n * op->G);
    const T *q = (const T *)op->q + b * op->q_b + h * op->q_h, *k = (const T *)op->k + b * op->k_b + h * op->k_h;
    const T *v = op->v ? (const T *)op->v + b * op->v_b + h * op->v_h : nullptr;
    const int64_t last = op->m - op->n + (end - 1) / op->G + 1, panels = (end - begin + PANEL - 1) / PANEL;
    for (int64_t i = 0; i < panels; i++) prepare_prompt_panel<T, PAIRS>(op, x, x.panels[i], q, begin + i * PANEL, end);
    for (int64_t start = 0; start < last; start += PROMPT_KEYS) {
        prepare_prompt_block<T, PAIRS>(op, x, k, v, start, min(PROMPT_KEYS, last - start));
        for (int64_t i = 0; i < panels; i++) {
            const PromptPanel &panel = x.panels[i];
            if (start >= panel.last) continue;
            const int64_t keys = round_up(min(PROMPT_KEYS, panel.last - start), PROMPT_ROWS);
            with_vectors(panel,
                         [&](auto C) { attend_to_prompt_block<decltype(C)::value, PAIRS>(op, x, panel, start, keys); });
        }
    }
    for (int64_t i = 0; i < panels; i++) {
        const PromptPanel &panel = x.panels[i];
        add_prompt_sinks(op, panel, h, begin + i * PANEL);
        if (v) store_prompt_panel(op, x, panel, (T *)op->y + b * op->y_b + h * op->y_h, begin + i * PANEL);
        if (op->received) with_vectors(panel, [&](auto C) { add_to_received<decltype(C)::value>(op, x, panel); });
    }
}

// A task is a group of queries of one KV head or, where it is asked what the keys receive, a part: every parts-th
// group.
static int64_t prompt_tasks(const skimkv_prompt *op) {
    return (int64_t)op->B * op->H * (op->received ? op->parts : prompt_groups(op));
}

// The first groups have the last queries, which see most.
template <class T, bool PAIRS> static void prompt_task(const skimkv_prompt *op, void *work, int64_t task) {
    Arena a{(char *)work};
    PromptScratch x = take_prompt(a, op, PAIRS);
    const int64_t last = prompt_groups(op) - 1, units = (int64_t)op->B * op->H;
    for (int i = 0; i < PANEL; i++) x.scale[i] = op->scale * LOG2E;
    if (!op->received)
        return attend_prompt<T, PAIRS>(op, x, task % units / op->H, task % units % op->H, last - task / units);
    const int64_t unit = task / op->parts;
    __builtin_memset(x.received, 0, round_up(op->m, PROMPT_KEYS) * sizeof(float));
    for (int64_t i = task % op->parts; i <= last; i += op->parts)
        attend_prompt<T, PAIRS>(op, x, unit / op->H, unit % op->H, last - i);
    __builtin_memcpy(op->received + task * op->m, x.received, op->m * sizeof(float));
}

static void prompt_attention(const skimkv_prompt *op, void *work, int64_t task) {
#ifdef SKIMKV_BF16_PRODUCTS
    if (prompt_has_pairs(op)) return prompt_task<bf16, true>(op, work, task);
#endif
    if (op->dtype == SKIMKV_F32) prompt_task<float, false>(op, work, task);
    else if (op->dtype == SKIMKV_BF16) prompt_task<bf16, false>(op, work, task);
    else prompt_task<f16, false>(op, work, task);
}

}  // namespace skimkv::SKIMKV_NS
