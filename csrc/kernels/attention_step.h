// One step of attention on several threads: how it is split into tasks, and what each thread does.
//
// A task is a unit or, where there are few units, a part of the positions of one. Threads take tasks from a shared
// counter, and the last thread that finishes a part of a unit finishes the unit, so that no thread waits for another.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kernel_table.h"
#include "kernels/append.h"
#include "kernels/approximate_scores.h"
#include "kernels/cache_layout.h"
#include "kernels/dense_attention.h"
#include "kernels/quantised_index_weights.h"
#include "kernels/quantised_rows.h"
#include "kernels/row_attention.h"
#include "kernels/scratch_arena.h"
#include "kernels/skim_attention.h"
#include "kernels/sparse_attention.h"
#include "kernels/stage_clock.h"
#include "kernels/unit.h"
#include "kernels/vector_math.h"
#include "skimkv.h"

namespace skimkv::SKIMKV_NS {

// At the beginning of the scratch memory: the next task, and the threads that have no task left.
struct TaskCounter {
    int next, done;
    char padding[56];
};

// Scratch memory of one thread: of a dense step `dense`, of a sparse one the rest.
struct ThreadScratch {
    DenseScratch dense;
    Unit unit;
    SelectionScratch selection;
    SkimScratch skim;
    ByteWeights weights;
    ExpSums sums;
    Scores scores;  // not if units are split: then each unit has its own
    StageClock clock;
};

// How a step is split, and where its scratch memory lies.
struct Plan {
    int64_t units, parts, longest;  // parts of a unit; tokens of the longest row
    int P;                          // floats of a query row
    TaskCounter *counter;
    int *finished;  // [units]: parts that are finished; of TOVA [B]: KV heads
    float *states;  // dense: [units][MOST_SECTIONS] states of the softmax
    int64_t states_ld;
    float *weights;  // TOVA: [units] softmax weights
    int64_t weights_ld;
    Arena scores;  // sparse, if parts > 1: [units] Scores
    size_t scores_ld;
    char *thread_scratch;  // [nth]
    size_t thread_scratch_ld, total;
};

static ThreadScratch take_thread_scratch(Arena &a, const skimkv_op *op, int64_t n, bool split) {
    ThreadScratch x{};
    if (is_dense(op)) {
        x.dense = take_dense(a, op, n);
        return x;
    }
    x.unit = take_unit(a, op, n);
    x.selection = take_selection(a, op, n);
    if (op->method == SKIMKV_SKIM) x.skim = take_skim(a, op, n);
    x.weights = take_byte_weights(a, op, min(n, SPAN_TILES * GROUP));
    x.sums = take_exp_sums(a, op->cache->G);
    if (!split) x.scores = take_scores(a, op, n);
    return x;
}

static Plan plan_step(const skimkv_op *op, void *work, int nth) {
    const skimkv_cache *c = op->cache;
    Plan p{};
    p.units = (int64_t)c->B * c->H, p.P = padded_head(c->D);
    p.longest = longest_row(c) + (op->k_new ? 1 : 0);
    const bool dense = is_dense(op);
    const int64_t scored = op->method == SKIMKV_QUEST ? p.longest / c->page : p.longest;
    p.parts = ((dense ? 8 : 4) * nth + p.units - 1) / p.units;
    p.parts = min(p.parts, dense ? sections_of(p.longest) : scored_sections(c, scored));
    // Every part of a sparse step chooses the channels again, and its scores go from one core to another: whole units
    // are faster, as long as no thread takes more than 1.5 times its share. And of Skim a part needs the codes of a
    // group that is filled.
    const int64_t most_of_a_thread = (p.units + nth - 1) / nth;
    if (!dense && 2 * most_of_a_thread * nth <= 3 * p.units) p.parts = 1;
    if (nth == 1 || keeps_weights(op) || (op->method == SKIMKV_SKIM && fills_group(op))) p.parts = 1;
    Arena a{(char *)work};
    p.counter = a.take<TaskCounter>(1);
    p.finished = a.take<int>(p.units);
    if (op->method == SKIMKV_TOVA) {
        p.weights_ld = round_up(p.longest, 16);
        p.weights = a.take<float>(p.units * p.weights_ld);
    } else if (dense && !keeps_weights(op)) {
        p.states_ld = round_up(online_softmax_floats(c->G, p.P), 16);
        p.states = a.take<float>(p.units * MOST_SECTIONS * p.states_ld);
    } else if (p.parts > 1) {
        Arena unit_scores{nullptr};
        take_scores(unit_scores, op, p.longest);
        p.scores_ld = unit_scores.used;
        p.scores = Arena{a.take<char>((int64_t)p.scores_ld * p.units)};
    }
    Arena thread{nullptr};
    take_thread_scratch(thread, op, p.longest, p.parts > 1);
    p.thread_scratch_ld = thread.used;
    p.thread_scratch = a.take<char>((int64_t)p.thread_scratch_ld * nth);
    p.total = a.used;
    return p;
}

static size_t attention_scratch_bytes(const skimkv_op *op, int nth) { return plan_step(op, nullptr, nth).total; }

// Notes that a part of the unit is finished; whether it was the last one.
static inline bool is_last_part(const Plan &p, int64_t unit) {
    if (p.parts == 1) return true;
    if (__atomic_add_fetch(p.finished + unit, 1, __ATOMIC_ACQ_REL) < p.parts) return false;
    p.finished[unit] = 0;
    return true;
}

// Appends the new row, if it is among the positions from .. to-1 of a part: no other part reads it.
template <class T> static void append_if_last(const skimkv_op *op, int64_t b, int64_t h, int64_t from, int64_t to) {
    if (!appends_new_row(op) || from >= to || to != cached_tokens(op, b)) return;
    const skimkv_tokens token = new_token_of(op);
    append_unit<T>(&token, b, h);
}

// A task of dense attention: attends to one part, and the last part joins all.
template <class T, class R, int D_>
static void dense_task(const skimkv_op *op, const Plan &p, ThreadScratch &thread, int64_t task) {
    const skimkv_cache *c = op->cache;
    const DenseScratch &x = thread.dense;
    StageClock &clock = thread.clock;
    const int64_t unit = task / p.parts, i = task % p.parts, b = unit / c->H, h = unit % c->H;
    const int64_t n = c->lengths[b] + (op->k_new ? 1 : 0);
    if (keeps_weights(op)) {
        dense_with_weights<T, R, D_>(op, b, h, x, p.weights + unit * p.weights_ld);
        clock.mark(SKIMKV_STAGE_ATTEND);
        if (op->score || __atomic_add_fetch(p.finished + b, 1, __ATOMIC_ACQ_REL) < c->H) return;
        p.finished[b] = 0;
        put_into_common_slot<T, R>(op, b, x, p.weights + b * c->H * p.weights_ld, p.weights_ld);
        return clock.mark(SKIMKV_STAGE_APPEND);
    }
    const int64_t length = section_length(n), sections = sections_of(n);
    const int64_t from = sections * i / p.parts * length, to = min(n, sections * (i + 1) / p.parts * length);
    append_if_last<T>(op, b, h, from, to);
    clock.mark(SKIMKV_STAGE_APPEND);
    float *states = p.states + unit * MOST_SECTIONS * p.states_ld;
    dense_positions<T, R, D_>(op, b, h, from, to, x, length, states, p.states_ld);
    clock.mark(SKIMKV_STAGE_ATTEND);
    if (!is_last_part(p, unit)) return;
    const OnlineSoftmax sum = online_softmax_at(states, c->G);
    for (int64_t j = 1; j < sections; j++)
        merge_softmax(sum, online_softmax_at(states + j * p.states_ld, c->G), c->G, p.P);
    finish_dense(op, b, h, sum);
    clock.mark(SKIMKV_STAGE_ATTEND);
    if (op->keep == SKIMKV_SLOT) put_into_slot<T, R>(op, b, h, x, 0);
    clock.mark(SKIMKV_STAGE_APPEND);
}

// Loads the query of a task's unit, and prepares it for step 1.
template <class T> static void prepare_query(const skimkv_op *op, const Plan &p, ThreadScratch &x, int64_t task) {
    Unit &u = x.unit;
    const int64_t unit = task / p.parts, b = unit / op->cache->H, h = unit % op->cache->H;
    if (appends_new_row(op) && task % p.parts == p.parts - 1) prefetch_new_row<T>(op, b, h);
    load_query(op, u, b, h);
    x.clock.mark(SKIMKV_STAGE_PREPARE);
    // Skim chooses channels by the codes of the last full group, which may be the one that the new row fills.
    if (op->method == SKIMKV_SKIM && p.parts == 1) append_if_last<T>(op, b, h, 0, u.n);
    // Quest scores the pages before that of the new row, which no other part reads.
    if (op->method == SKIMKV_QUEST && task % p.parts == p.parts - 1) append_if_last<T>(op, b, h, 0, u.n);
    x.clock.mark(SKIMKV_STAGE_APPEND);
    if (op->method == SKIMKV_QUEST) prepare_pages(op, u);
    if (op->method == SKIMKV_SPARQ) choose_channels(op, u);
    if (op->method == SKIMKV_SKIM) choose_skim_channels(op, u);
    if (op->method == SKIMKV_LOWRANK) project_query(op, u);
    x.clock.mark(SKIMKV_STAGE_PREPARE);
}

// Step 1 of part i of the thread's unit, into z.
template <class T, class R, int D_>
static void score_part(const skimkv_op *op, const Plan &p, ThreadScratch &x, const Scores &z, int64_t i) {
    const Unit &u = x.unit;
    const bool exact = op->method == SKIMKV_TOPK || op->method == SKIMKV_ORACLE;
    const bool rows = exact || op->cache->channels == SKIMKV_NONE;
    const int64_t sections = scored_sections(op->cache, u.n);
    const int64_t t0 = first_tile(u.n, sections, sections * i / p.parts);
    const int64_t t1 = first_tile(u.n, sections, sections * (i + 1) / p.parts);
    if (t0 >= t1) return;
    if (op->method != SKIMKV_SKIM || p.parts > 1) append_if_last<T>(op, u.b, u.h, t0 * GROUP, min(u.n, t1 * GROUP));
    x.clock.mark(SKIMKV_STAGE_APPEND);
    *x.sums.end = t0;
    if (op->method == SKIMKV_QUEST) score_pages<T, D_>(op, u, z, x.sums, t0, t1);
    else if (rows) score_rows<R, D_>(op, u, exact ? u.q : u.masked_query, z, x.sums, t0, t1);
    else score_channels<T>(op, u, z, x.weights, x.sums, t0, t1);
    x.clock.mark(SKIMKV_STAGE_SCORE);
}

// Steps 2 and 3 of the thread's unit, whose scores are z.
template <class R, int D_> static void finish_unit(const skimkv_op *op, ThreadScratch &x, const Scores &z) {
    Unit &u = x.unit;
    if (op->method == SKIMKV_SKIM) return skim_unit<R, D_>(op, u, z, x.selection, x.skim, x.clock);
    const bool keys = reads_keys(op);
    if (op->method == SKIMKV_QUEST) {
        select_pages(op, u, z, x.selection);
    } else {
        const int64_t local = op->method == SKIMKV_SPARQ ? min(op->local, u.n - 1) : 0;
        prefetch_rows(op, u, nullptr, u.n - 1 - local, u.n, keys, true);
        x.clock.mark(SKIMKV_STAGE_FETCH);
        select_positions(op, u, z, x.selection);
    }
    x.clock.mark(SKIMKV_STAGE_CHOOSE);
    const bool in_turn = prefetches_in_turn(op, u);
    prefetch_rows(op, u, u.chosen, 0, in_turn ? min(u.chosen_count, ROWS_AHEAD) : u.chosen_count, keys, !in_turn);
    x.clock.mark(SKIMKV_STAGE_FETCH);
    if (op->use_mean) sum_selected_mass(op, u, z, x.selection);
    x.clock.mark(SKIMKV_STAGE_CHOOSE);
    attend_selected<R, D_>(op, u, z, x.selection);
    x.clock.mark(SKIMKV_STAGE_ATTEND);
}

// The next task of the step, or -1.
static inline int64_t take_task(const Plan &p) {
    const int64_t task = __atomic_fetch_add(&p.counter->next, 1, __ATOMIC_RELAXED);
    return task < p.units * p.parts ? task : -1;
}

// Tasks that are whole units.
template <class T, class R, int D_> static void run_units(const skimkv_op *op, const Plan &p, ThreadScratch &x) {
    for (int64_t task; (task = take_task(p)) >= 0;) {
        prepare_query<T>(op, p, x, task);
        score_part<T, R, D_>(op, p, x, x.scores, 0);
        finish_unit<R, D_>(op, x, x.scores);
    }
}

// Tasks that are parts of units: the thread that scores the last part finishes the unit.
template <class T, class R, int D_> static void run_parts(const skimkv_op *op, const Plan &p, ThreadScratch &x) {
    for (int64_t task; (task = take_task(p)) >= 0;) {
        const int64_t unit = task / p.parts;
        Arena a{p.scores.at + unit * p.scores_ld};
        const Scores z = take_scores(a, op, p.longest);
        prepare_query<T>(op, p, x, task);
        score_part<T, R, D_>(op, p, x, z, task % p.parts);
        if (is_last_part(p, unit)) finish_unit<R, D_>(op, x, z);
    }
}

// All that thread ith of nth does in a step.
template <class T, class R, int D_> static void run_tasks(const skimkv_op *op, const Plan &p, int ith, int nth) {
    Arena a{p.thread_scratch + ith * p.thread_scratch_ld};
    ThreadScratch x = take_thread_scratch(a, op, p.longest, p.parts > 1);
    x.clock.start(op->stage_ns);
    if (is_dense(op))
        for (int64_t task; (task = take_task(p)) >= 0;) dense_task<T, R, D_>(op, p, x, task);
    else if (p.parts > 1) run_parts<T, R, D_>(op, p, x);
    else run_units<T, R, D_>(op, p, x);
    x.clock.finish();
    // The last thread makes the scratch memory ready for the next step.
    if (__atomic_add_fetch(&p.counter->done, 1, __ATOMIC_ACQ_REL) == nth) p.counter->next = p.counter->done = 0;
}

// Compiles a step for the head sizes of common models (D_), and for any other.
template <class T, class R> static void run_head_size(const skimkv_op *op, const Plan &p, int ith, int nth) {
    const int D = op->cache->D;
    if (D == 64) return run_tasks<T, R, 64>(op, p, ith, nth);
    if (D == 128) return run_tasks<T, R, 128>(op, p, ith, nth);
    if constexpr (row_bits<R> == 0) {
        if (D == 80) return run_tasks<T, R, 80>(op, p, ith, nth);
        if (D == 96) return run_tasks<T, R, 96>(op, p, ith, nth);
        if (D == 256) return run_tasks<T, R, 256>(op, p, ith, nth);
    }
    run_tasks<T, R, 0>(op, p, ith, nth);
}

// Compiles a step for every type of the cache's rows: as they came, or quantised.
template <class T> static void run_row_type(const skimkv_op *op, const Plan &p, int ith, int nth) {
    if (op->cache->bits == 8) run_head_size<T, QuantisedRow<8>>(op, p, ith, nth);
    else if (op->cache->bits == 4) run_head_size<T, QuantisedRow<4>>(op, p, ith, nth);
    else run_head_size<T, T>(op, p, ith, nth);
}

static void attention(const skimkv_op *op, void *work, int ith, int nth) {
    const Plan p = plan_step(op, work, nth);
    if (op->cache->dtype == SKIMKV_F32) run_row_type<float>(op, p, ith, nth);
    else if (op->cache->dtype == SKIMKV_BF16) run_row_type<bf16>(op, p, ith, nth);
    else run_row_type<f16>(op, p, ith, nth);
}

}  // namespace skimkv::SKIMKV_NS
