// How work is spread over the threads of a caller. Every operation of the library uses these functions.
#pragma once
#include <stdint.h>

#include <atomic>

#include "skimkv.h"

namespace skimkv {

// The number of threads that an operation may use: one, if the caller cannot start any.
inline int usable_threads(int threads, skimkv_parallel parallel) { return threads < 1 || !parallel ? 1 : threads; }

// Calls f(thread) once on every thread, with thread = 0, 1, 2 and so on. `parallel` may start fewer threads than
// `threads`, and then the last numbers are left out; if it starts more, the additional ones do nothing.
template <class F> void on_every_thread(int threads, skimkv_parallel parallel, const F &f) {
    threads = usable_threads(threads, parallel);
    if (threads == 1) return f(0);
    struct Call {
        const F &f;
        int threads;
        std::atomic<int> next_thread;
    } call{f, threads, {0}};
    parallel(
        [](void *data) {
            Call *call = (Call *)data;
            const int thread = call->next_thread.fetch_add(1, std::memory_order_relaxed);
            if (thread < call->threads) call->f(thread);
        },
        &call, (unsigned)threads, 0);
}

// Calls f(task, thread) for every task from 0 to tasks-1, on at most as many threads as there are tasks. A thread takes
// its next task when it has finished one, so a thread that was interrupted takes fewer.
template <class F> void for_each_task(int64_t tasks, int threads, skimkv_parallel parallel, const F &f) {
    std::atomic<int64_t> next_task{0};
    on_every_thread(threads < tasks ? threads : (int)tasks, parallel, [&](int thread) {
        for (int64_t task; (task = next_task.fetch_add(1, std::memory_order_relaxed)) < tasks;) f(task, thread);
    });
}

}  // namespace skimkv
