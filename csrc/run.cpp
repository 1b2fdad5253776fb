// Runs attention and its like with the kernels of the instruction set in use, spread over the threads of the caller.
#include <atomic>
#include <cstring>

#include "element_types.h"
#include "kernel_table.h"
#include "scratch_memory.h"
#include "skimkv.h"
#include "steps.h"
#include "threads.h"

namespace {

using skimkv::for_each_task;
using skimkv::Kernels;
using skimkv::NO_KERNELS;
using skimkv::selected_kernels;
using skimkv::usable_threads;

// Scratch memory of the calling thread, which is kept between steps.
thread_local skimkv::ScratchMemory scratch;

constexpr char NO_MEMORY[] = "no memory for the kernels' scratch space";

// Scratch memory of the calling thread for a step on these threads; NULL if there is none. If fewer threads than
// asked for took part in the last step, its counters are not zero: they are cleared every time, as is what the kernels
// count.
void *work_of(const Kernels *kernels, const skimkv_op *op, int threads) {
    void *work = scratch.get(kernels->attention_scratch_bytes(op, threads));
    if (op->method == SKIMKV_SKIM) std::memset(op->rows_read, 0, sizeof(int64_t) * 2 * (size_t)op->cache->B);
    if (work) std::memset(work, 0, 64 + sizeof(int) * (size_t)op->cache->B * (size_t)op->cache->H);
    return work;
}

}  // namespace

const char *skimkv::run_steps(skimkv_op *const *steps, int64_t count, int threads, skimkv_parallel parallel) {
    // Where every thread has steps of its own, none waits for another.
    if (count == 1 || count < usable_threads(threads, parallel)) {
        for (int64_t i = 0; i < count; i++) {
            skimkv_op *op = steps[i];
            if (const char *error = skimkv_step(op, op->q, op->y, op->k_new, op->v_new, threads, parallel))
                return error;
        }
        return nullptr;
    }
    const Kernels *kernels = selected_kernels();
    if (!kernels) return NO_KERNELS;
    std::atomic<bool> has_memory{true};
    for_each_task(count, threads, parallel, [&](int64_t i, int) {
        void *work = work_of(kernels, steps[i], 1);
        if (work) kernels->attention(steps[i], work, 0, 1);
        else has_memory = false;
    });
    return has_memory ? nullptr : NO_MEMORY;
}

extern "C" {

size_t skimkv_work(const skimkv_op *op, int nth) {
    const Kernels *kernels = selected_kernels();
    return kernels ? kernels->attention_scratch_bytes(op, nth) : 0;
}

void skimkv_share(const skimkv_op *op, void *work, int ith, int nth) {
    selected_kernels()->attention(op, work, ith, nth);
}

int skimkv_run(const skimkv_op *op, int threads, skimkv_parallel parallel) {
    const Kernels *kernels = selected_kernels();
    if (!kernels) return -1;
    threads = usable_threads(threads, parallel);
    void *work = work_of(kernels, op, threads);
    if (!work) return -1;
    skimkv::on_every_thread(threads, parallel, [&](int thread) { kernels->attention(op, work, thread, threads); });
    return 0;
}

const char *skimkv_step(skimkv_op *op, const void *q, void *y, const void *k_new, const void *v_new, int threads,
                        skimkv_parallel parallel) {
    if (!op) return "operation is NULL";
    op->q = q, op->y = y, op->k_new = k_new, op->v_new = v_new;
    if (op->paged) return skimkv::step_in_blocks(op, threads, parallel);
    if (const char *error = skimkv_check(op)) return error;
    const int type = op->dtype, cache_type = op->cache->dtype;
    if (skimkv::is_misaligned(q, type) || skimkv::is_misaligned(y, type) || skimkv::is_misaligned(k_new, cache_type) ||
        skimkv::is_misaligned(v_new, cache_type))
        return "q, y, k or v is not aligned to its elements";
    return skimkv_run(op, threads, parallel) ? NO_MEMORY : nullptr;
}

int skimkv_append(const skimkv_tokens *tokens, int threads, skimkv_parallel parallel) {
    const Kernels *kernels = selected_kernels();
    if (!kernels) return -1;
    for_each_task((int64_t)tokens->cache->B * tokens->cache->H, threads, parallel,
                  [&](int64_t unit, int) { kernels->append(tokens, unit); });
    return 0;
}

const char *skimkv_turn_keys(const skimkv_turn *op) {
    if (const char *error = skimkv::turn_error(op)) return error;
    const Kernels *kernels = selected_kernels();
    if (!kernels) return NO_KERNELS;
    for (int64_t b = 0; b < op->B; b++)
        if (op->moves[b]) kernels->turn_keys(op, b);
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

int skimkv_columns_run(const skimkv_columns *op, int threads, skimkv_parallel parallel) {
    skimkv_prompt prompt{};
    prompt.B = 1, prompt.H = op->H, prompt.G = op->G, prompt.D = op->D, prompt.dtype = op->dtype;
    prompt.scale = op->scale, prompt.softcap = op->softcap, prompt.n = op->n, prompt.m = op->m;
    prompt.q = op->q, prompt.q_h = op->q_h, prompt.q_g = op->q_g, prompt.q_n = op->q_n;
    prompt.k = op->k, prompt.k_h = op->k_h, prompt.k_n = op->k_n;
    prompt.sinks = op->sinks, prompt.received = op->sum, prompt.parts = op->parts;
    return skimkv_prompt_attention_run(&prompt, threads, parallel) ? -1 : 0;
}

}  // extern "C"
