// Runs operations with the kernels of the instruction set in use, spread over the threads of the caller.
#include <cstdlib>
#include <cstring>

#include "element_types.h"
#include "kernel_table.h"
#include "kernels/block_inputs.h"
#include "scratch_memory.h"
#include "skimkv.h"
#include "threads.h"

namespace {

using skimkv::for_each_task;
using skimkv::Kernels;
using skimkv::selected_kernels;
using skimkv::Tokens;
using skimkv::usable_threads;

// Scratch memory of the calling thread, which is kept between steps.
thread_local skimkv::ScratchMemory scratch;

// A part of a linear layer smaller than this many products is not worth a second thread.
constexpr int64_t LEAST_PRODUCTS = 1 << 16;

// Weights of a part that a thread takes.
constexpr int64_t LEAST_STREAM = 1 << 17;

// Calls f(first, last) for parts of the rows of weights: several a thread, so that one that was interrupted takes
// fewer, but none so short that its stream of memory is over before it is fast.
template <class F>
void for_each_part(int64_t rows, int64_t weights, int threads, skimkv_parallel parallel, const F &f) {
    int64_t parts = weights / LEAST_STREAM;
    parts = parts < threads ? threads : parts > 8 * threads ? 8 * threads : parts;
    parts = threads == 1 ? 1 : parts > rows ? rows : parts;
    for_each_task(parts, threads, parallel, [&](int64_t i, int) { f(rows * i / parts, rows * (i + 1) / parts); });
}

constexpr char NO_KERNELS[] = "the instruction set that SKIMKV_ISA names is not available";
constexpr char NO_MEMORY[] = "no memory for the inputs of a linear layer";

// Tokens of a prompt for which the weights are read once.
constexpr int64_t TOKENS_AT_ONCE = 256;

}  // namespace

extern "C" {

size_t skimkv_work(const skimkv_op *op, int nth) {
    const Kernels *kernels = selected_kernels();
    return kernels ? kernels->attention_scratch_bytes(op, nth) : 0;
}

void skimkv_share(const skimkv_op *op, void *work, int ith, int nth) {
    selected_kernels()->attention(op, work, ith, nth, nullptr);
}

static int run_step(const skimkv_op *op, int threads, skimkv_parallel parallel, int64_t *stage_ns) {
    const Kernels *kernels = selected_kernels();
    if (!kernels) return -1;
    threads = usable_threads(threads, parallel);
    void *work = scratch.get(kernels->attention_scratch_bytes(op, threads));
    if (!work) return -1;
    // If fewer threads than asked for took part in the last step, its counters are not zero: clear them every time.
    std::memset(work, 0, 64 + sizeof(int) * (size_t)op->cache->B * (size_t)op->cache->H);
    skimkv::on_every_thread(threads, parallel,
                            [&](int thread) { kernels->attention(op, work, thread, threads, stage_ns); });
    return 0;
}

int skimkv_run(const skimkv_op *op, int threads, skimkv_parallel parallel) {
    return run_step(op, threads, parallel, nullptr);
}

const char *skimkv_step(skimkv_op *op, const void *q, void *y, const void *k_new, const void *v_new, int threads,
                        skimkv_parallel parallel) {
    return skimkv_step_timed(op, q, y, k_new, v_new, threads, parallel, nullptr);
}

const char *skimkv_step_timed(skimkv_op *op, const void *q, void *y, const void *k_new, const void *v_new, int threads,
                              skimkv_parallel parallel, int64_t *stage_ns) {
    if (!op) return "operation is NULL";
    op->q = q, op->y = y, op->k_new = k_new, op->v_new = v_new;
    if (const char *error = skimkv_check(op)) return error;
    const int type = op->dtype, cache_type = op->cache->dtype;
    if (skimkv::is_misaligned(q, type) || skimkv::is_misaligned(y, type) || skimkv::is_misaligned(k_new, cache_type) ||
        skimkv::is_misaligned(v_new, cache_type))
        return "q, y, k or v is not aligned to its elements";
    return run_step(op, threads, parallel, stage_ns) ? "no memory for the kernels' scratch space" : nullptr;
}

int skimkv_append(const skimkv_tokens *tokens, int threads, skimkv_parallel parallel) {
    const Kernels *kernels = selected_kernels();
    if (!kernels) return -1;
    for_each_task((int64_t)tokens->cache->B * tokens->cache->H, threads, parallel,
                  [&](int64_t unit, int) { kernels->append(tokens, unit); });
    return 0;
}

int skimkv_stream(const skimkv_clusters *clusters, int threads, skimkv_parallel parallel) {
    const Kernels *kernels = selected_kernels();
    if (!kernels) return -1;
    threads = usable_threads(threads, parallel);
    const size_t bytes = kernels->cluster_scratch_bytes(clusters);
    char *work = (char *)scratch.get(bytes * (size_t)threads);
    if (!work) return -1;
    for_each_task((int64_t)clusters->B * clusters->H, threads, parallel, [&](int64_t unit, int thread) {
        kernels->cluster_attention(clusters, work + bytes * (size_t)thread, unit);
    });
    return 0;
}

int skimkv_stream_append(const skimkv_clusters *clusters, int threads, skimkv_parallel parallel) {
    const Kernels *kernels = selected_kernels();
    if (!kernels) return -1;
    for_each_task((int64_t)clusters->B * clusters->H, threads, parallel,
                  [&](int64_t unit, int) { kernels->cluster_append(clusters, unit); });
    return 0;
}

const char *skimkv_linear_run(const skimkv_linear *op, const void *x, void *y, int64_t n, int threads,
                              skimkv_parallel parallel) {
    if (const char *error = skimkv::linear_error(op, {x, y, n})) return error;
    const Kernels *kernels = selected_kernels();
    if (!kernels) return NO_KERNELS;
    threads = op->out * op->in < LEAST_PRODUCTS ? 1 : usable_threads(threads, parallel);
    const int64_t most = n < TOKENS_AT_ONCE ? n : TOKENS_AT_ONCE;
    char *inputs = (char *)scratch.get((size_t)(most * skimkv::rounded_input_bytes(op->in)));
    if (!inputs) return NO_MEMORY;
    const int64_t size = op->dtype == SKIMKV_F32 ? 4 : 2;
    for (int64_t first = 0; first < n; first += most) {
        const Tokens part{(const char *)x + first * op->in * size, (char *)y + first * op->out * size,
                          n - first < most ? n - first : most};
        // Every thread has several tasks, so that one that was interrupted takes fewer.
        const int rounding_threads = part.n * op->in < LEAST_PRODUCTS ? 1 : threads;
        const int64_t rounding_tasks = rounding_threads == 1 ? 1 : 4 * rounding_threads;
        const int64_t tasks = threads == 1 ? 1 : 4 * threads;
        for_each_task(rounding_tasks, rounding_threads, parallel,
                      [&](int64_t task, int) { kernels->linear_round_inputs(op, part, inputs, task, rounding_tasks); });
        for_each_task(tasks, threads, parallel,
                      [&](int64_t task, int) { kernels->linear_multiply(op, part, inputs, task, tasks); });
    }
    return nullptr;
}

const char *skimkv_block_linear_run(const skimkv_block_linear *op, const void *x, void *y, int64_t n, int threads,
                                    skimkv_parallel parallel) {
    const Tokens tokens{x, y, n};
    if (const char *error = skimkv::block_linear_error(op, tokens)) return error;
    const Kernels *kernels = selected_kernels();
    if (!kernels) return NO_KERNELS;
    threads = op->out * op->in < LEAST_PRODUCTS ? 1 : usable_threads(threads, parallel);
    char *inputs = (char *)scratch.get((size_t)(n * skimkv::block_input_bytes(op->in)));
    if (!inputs) return NO_MEMORY;
    kernels->block_linear_round_inputs(op, tokens, inputs);
    for_each_part(op->out, op->out * op->in, threads, parallel, [&](int64_t first, int64_t last) {
        kernels->block_linear_multiply(op, tokens, inputs, first, last);
    });
    return nullptr;
}

const char *skimkv_block_expand(const skimkv_block_linear *op, void *y, int threads, skimkv_parallel parallel) {
    if (const char *error = skimkv::block_expand_error(op, y)) return error;
    const Kernels *kernels = selected_kernels();
    if (!kernels) return NO_KERNELS;
    threads = op->out * op->in < LEAST_PRODUCTS ? 1 : usable_threads(threads, parallel);
    for_each_part(op->out, op->out * op->in, threads, parallel,
                  [&](int64_t first, int64_t last) { kernels->block_linear_expand(op, y, first, last); });
    return nullptr;
}

const char *skimkv_float_linear_run(const skimkv_float_linear *op, const void *x, void *y, int64_t n, int threads,
                                    skimkv_parallel parallel) {
    const Tokens tokens{x, y, n};
    if (const char *error = skimkv::float_linear_error(op, tokens)) return error;
    const Kernels *kernels = selected_kernels();
    if (!kernels) return NO_KERNELS;
    threads = op->out * op->in < LEAST_PRODUCTS ? 1 : usable_threads(threads, parallel);
    float *inputs = (float *)scratch.get((size_t)(n * op->in) * sizeof(float));
    if (!inputs) return NO_MEMORY;
    kernels->float_linear_order_inputs(op, tokens, inputs);
    for_each_part(op->out, op->out * op->in, threads, parallel, [&](int64_t first, int64_t last) {
        kernels->float_linear_multiply(op, tokens, inputs, first, last);
    });
    return nullptr;
}

const char *skimkv_prompt_attention_run(const skimkv_prompt *op, int threads, skimkv_parallel parallel) {
    if (const char *error = skimkv::prompt_error(op)) return error;
    const Kernels *kernels = selected_kernels();
    if (!kernels) return NO_KERNELS;
    const int64_t tasks = kernels->prompt_tasks(op);
    threads = usable_threads(threads < tasks ? threads : (int)tasks, parallel);
    const size_t bytes = kernels->prompt_scratch_bytes(op);
    char *work = (char *)scratch.get(bytes * (size_t)threads);
    if (!work) return "no memory for the attention of a prompt";
    for_each_task(tasks, threads, parallel, [&](int64_t task, int thread) {
        kernels->prompt_attention(op, work + bytes * (size_t)thread, task);
    });
    return nullptr;
}

const char *skimkv_rms_norm_run(const skimkv_rms_norm *op, const void *x, void *y, int64_t n, int threads,
                                skimkv_parallel parallel) {
    const Tokens tokens{x, y, n};
    if (const char *error = skimkv::rms_norm_error(op, tokens)) return error;
    const Kernels *kernels = selected_kernels();
    if (!kernels) return NO_KERNELS;
    threads = n * op->size < LEAST_PRODUCTS ? 1 : usable_threads(threads, parallel);
    for_each_part(n, n * op->size, threads, parallel,
                  [&](int64_t first, int64_t last) { kernels->rms_norm(op, tokens, first, last); });
    return nullptr;
}

int skimkv_columns_run(const skimkv_columns *op, int threads, skimkv_parallel parallel) {
    const Kernels *kernels = selected_kernels();
    if (!kernels) return -1;
    const int64_t tasks = (int64_t)op->H * op->parts;
    threads = usable_threads(threads < tasks ? threads : (int)tasks, parallel);
    const size_t bytes = (kernels->key_scores_scratch_bytes(op) + 63) / 64 * 64;
    char *work = (char *)std::aligned_alloc(64, bytes * (size_t)threads);
    if (!work) return -1;
    for_each_task(tasks, threads, parallel,
                  [&](int64_t task, int thread) { kernels->key_scores(op, work + bytes * (size_t)thread, task); });
    std::free(work);
    return 0;
}

}  // extern "C"
