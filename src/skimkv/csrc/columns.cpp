// Column sums of a prompt's attention: checks, and how they are spread over the caller's threads.
#include <atomic>
#include <cstdlib>

#include "types.h"

namespace {

struct Team {
    const skimkv_columns *op;
    const skimkv::Kernels *kernels;
    char *work;
    size_t each;
    int64_t tasks;
    std::atomic<int64_t> member, task;
};

void team_share(void *data) {
    Team *team = (Team *)data;
    char *own = team->work + (size_t)team->member.fetch_add(1, std::memory_order_relaxed) * team->each;
    for (int64_t task; (task = team->task.fetch_add(1, std::memory_order_relaxed)) < team->tasks;)
        team->kernels->columns(team->op, own, task);
}

}  // namespace

extern "C" {

const char *skimkv_columns_check(const skimkv_columns *op) {
    if (!op) return "operation is NULL";
    if (!op->q || !op->k || !op->sum) return "q, k or sum is NULL";
    if (op->H < 1 || op->G < 1 || op->parts < 1) return "H, G and parts must be at least 1";
    if (op->D < 1 || op->D > 256) return "D must be from 1 to 256";
    if (op->n < 1 || op->m < op->n || op->m > INT32_MAX) return "n must be from 1 to m, and m below 2^31";
    if (op->dtype < SKIMKV_F32 || op->dtype > SKIMKV_F16) return "dtype is unknown";
    if (skimkv::misaligned(op->q, op->dtype) || skimkv::misaligned(op->k, op->dtype) || skimkv::misaligned(op->sum, SKIMKV_F32))
        return "q, k or sum is not aligned to its elements";
    return nullptr;
}

int skimkv_columns_run(const skimkv_columns *op, int threads, skimkv_parallel parallel) {
    const skimkv::Kernels *kernels = skimkv::kernels();
    if (!kernels) return -1;
    const int64_t tasks = (int64_t)op->H * op->parts;
    if (threads < 1 || !parallel) threads = 1;
    if (threads > tasks) threads = (int)tasks;
    const size_t each = (kernels->columns_work(op) + 63) / 64 * 64;
    char *work = (char *)std::aligned_alloc(64, each * (size_t)threads);
    if (!work) return -1;
    Team team{op, kernels, work, each, tasks, {0}, {0}};
    if (threads == 1) team_share(&team);
    else parallel(team_share, &team, (unsigned)threads, 0);
    std::free(work);
    return 0;
}

}  // extern "C"
