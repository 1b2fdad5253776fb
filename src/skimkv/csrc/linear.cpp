// The 8-bit product: checks, and how it is spread over the caller's threads.
#include <atomic>
#include <cstdlib>

#include "types.h"

namespace {

using skimkv::Linear;

constexpr int64_t TOKENS_AT_ONCE = 256;  // of a prompt: what the weights are read for once

struct Team {
    const skimkv_linear *op;
    const Linear *kernel;
    char *x;
    int parts;
    bool narrow;
    std::atomic<int> ticket;
};

void team_share(void *data) {
    Team *team = (Team *)data;
    for (;;) {
        const int part = team->ticket.fetch_add(1, std::memory_order_relaxed);
        if (part >= team->parts) return;
        if (team->narrow) team->kernel->narrow(team->op, team->x, part, team->parts);
        else team->kernel->share(team->op, team->x, part, team->parts);
    }
}

void run(const skimkv_linear *op, const Linear *kernel, char *x, bool narrow, int threads, skimkv_parallel parallel) {
    // several parts for each thread, so that one that was held up takes fewer
    Team team{op, kernel, x, threads == 1 ? 1 : 4 * threads, narrow, {0}};
    if (threads == 1) team_share(&team);
    else parallel(team_share, &team, (unsigned)threads, 0);
}

const Linear *kernel() {
    const skimkv::Kernels *kernels = skimkv::kernels();
    return kernels ? &kernels->linear : nullptr;
}

}  // namespace

extern "C" {

const char *skimkv_linear_check(const skimkv_linear *op) {
    if (!op) return "operation is NULL";
    if (!op->w || !op->x || !op->y) return "w, x or y is NULL";
    if (op->out < 1 || op->n < 1) return "out and n must be at least 1";
    if (op->in < 32 || op->in % 32) return "in must be a multiple of 32";
    if (op->out > INT32_MAX || op->in > INT32_MAX || op->n > INT32_MAX) return "a size is beyond 2^31";
    if (op->dtype < SKIMKV_F32 || op->dtype > SKIMKV_F16) return "dtype is unknown";
    if (skimkv::misaligned(op->x, op->dtype) || skimkv::misaligned(op->y, op->dtype) || skimkv::misaligned(op->bias, op->dtype))
        return "x, y or bias is not aligned to its elements";
    if (skimkv::misaligned(op->w, SKIMKV_F16)) return "w is not aligned to its scales";
    if (op->n > 1 && (op->x_n < op->in || op->y_n < op->out)) return "tokens overlap: x_n < in or y_n < out";
    return nullptr;
}

int skimkv_linear_run(const skimkv_linear *op, int threads, skimkv_parallel parallel) {
    const Linear *linear = kernel();
    if (!linear) return -1;
    if (threads < 1 || !parallel || op->out * op->in < 1 << 16) threads = 1;
    const int64_t most = op->n < TOKENS_AT_ONCE ? op->n : TOKENS_AT_ONCE, bytes = skimkv::narrow_bytes(op->in);
    char *x = (char *)std::aligned_alloc(64, (size_t)(most * bytes));
    if (!x) return -1;
    const size_t size = op->dtype == SKIMKV_F32 ? 4 : 2;
    for (int64_t t = 0; t < op->n; t += most) {
        skimkv_linear part = *op;
        part.n = op->n - t < most ? op->n - t : most;
        part.x = (const char *)op->x + (size_t)(t * op->x_n) * size;
        part.y = (char *)op->y + (size_t)(t * op->y_n) * size;
        run(&part, linear, x, true, part.n * op->in < 1 << 16 ? 1 : threads, parallel);
        run(&part, linear, x, false, threads, parallel);
    }
    std::free(x);
    return 0;
}

}  // extern "C"
