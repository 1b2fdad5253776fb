// Where the time of a thread goes in a step, for a caller that asks. Otherwise a mark costs one predicted branch.
#pragma once
#include <stdint.h>
#include <time.h>

#include "skimkv.h"

namespace skimkv::SKIMKV_NS {

struct StageClock {
    int64_t *total;  // where all threads add their times up; nullptr: nobody asks
    int64_t last, ns[SKIMKV_STAGES];

    static int64_t now() {
        timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    }
    // Begins a thread's part of a step.
    void start(int64_t *of_all_threads) {
        total = of_all_threads;
        if (!total) return;
        for (int64_t &stage : ns) stage = 0;
        last = now();
    }
    // The time since the last mark was spent in this stage.
    void mark(int stage) {
        if (!total) return;
        const int64_t time = now();
        ns[stage] += time - last, last = time;
    }
    // Ends a thread's part of a step.
    void finish() const {
        if (!total) return;
        for (int i = 0; i < SKIMKV_STAGES; i++) __atomic_add_fetch(total + i, ns[i], __ATOMIC_RELAXED);
    }
};

}  // namespace skimkv::SKIMKV_NS
