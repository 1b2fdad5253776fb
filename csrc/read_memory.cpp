// Reads memory and computes nothing from it: the benchmarks compare the kernels' bytes per second with this.
#include <atomic>

#include "skimkv.h"
#include "threads.h"

namespace {

typedef uint64_t cache_line __attribute__((vector_size(64)));

// Reads `streams` runs of `run` bytes that follow each other from p on, all runs at the same time, and returns a sum of
// what it read: without a result the compiler would drop the loads.
uint64_t read_runs(const char *p, int64_t run, int streams) {
    cache_line a = {}, b = {}, c = {}, d = {};
    for (int64_t i = 0; i < run; i += 256)
        for (int s = 0; s < streams; s++) {
            const char *at = p + s * run + i;
            for (int ahead = 1024; ahead < 1280; ahead += 64) __builtin_prefetch(at + ahead, 0, 2);
            a += *(const cache_line *)at, b += *(const cache_line *)(at + 64);
            c += *(const cache_line *)(at + 128), d += *(const cache_line *)(at + 192);
        }
    a += b + c + d;
    return a[0] + a[1] + a[2] + a[3] + a[4] + a[5] + a[6] + a[7];
}

}  // namespace

extern "C" SKIMKV_API uint64_t skimkv_read(const void *p, int64_t bytes, int streams, int threads,
                                           skimkv_parallel parallel) {
    threads = parallel ? threads : 1;
    if (!p || bytes < 64 || streams < 1 || threads < 1) return 0;
    const char *aligned = (const char *)(((uintptr_t)p + 63) / 64 * 64);
    const int64_t run = (bytes - 64) / threads / streams / 256 * 256;
    std::atomic<uint64_t> sum{0};
    skimkv::for_each_task(threads, threads, parallel,
                          [&](int64_t task, int) { sum += read_runs(aligned + task * run * streams, run, streams); });
    return sum;
}
