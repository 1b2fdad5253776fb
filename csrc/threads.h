// How work is spread over the threads of a caller. Every operation of the library uses these functions.
#pragma once
#include <stdint.h>

#include <atomic>

#include "skimkv.h"
#include "subnormals.h"
#include "team.h"

namespace skimkv {

// The number of threads that an operation may use: one, if the caller cannot start any.
inline int usable_threads(int threads, skimkv_parallel parallel) { return threads < 1 || !parallel ? 1 : threads; }

// How many threads the operations of a calling thread use while other processes take cores.
//
// An operation ends when its last thread does, and a thread of OpenMP that waits keeps its core busy. Where another
// process has one of the cores, two threads of an operation share the other: then the thread that has no work keeps
// that core for the rest of its time slice, some milliseconds, while the one that has work waits for it. One thread
// alone would be done much earlier. So after an operation whose threads waited for a core, the next operations use one
// thread fewer for a pause. The thread that is left out sleeps, and its core is free for others. The next pause is
// longer if threads wait again right after this one.
class ThreadLimit {
   public:
    static constexpr int64_t SHORT = 200000;  // an operation that is shorter teaches nothing

    // How many of `threads` an operation that begins now shall use.
    int use_of(int threads, int64_t now) {
        if (fewer && now >= until) fewer--, until = now + pause, is_trial = true;
        return fewer < threads ? threads - fewer : 1;
    }
    // Learns from an operation of several threads that lasted from began to ended; one of them waited for `waited`.
    void learn(int threads, int64_t waited, int64_t began, int64_t ended) {
        if (ended - began < SHORT) return;
        const bool is_trouble = waited >= LEAST && waited >= (ended - began) / 4;
        if (is_trouble) {
            pause = !is_trial ? FIRST_PAUSE : pause < LONGEST_PAUSE ? 2 * pause : pause;
            until = ended + pause;
            if (fewer < threads - 1) fewer++;
        }
        is_trial = false;
    }

   private:
    static constexpr int64_t LEAST = Team::LONG_WAIT, FIRST_PAUSE = Team::PAUSE, LONGEST_PAUSE = 128000000;
    int fewer = 0;
    int64_t until = 0, pause = FIRST_PAUSE;
    bool is_trial = false;  // whether this is the first operation with one more thread
};

inline thread_local ThreadLimit limit_of_caller;

// Calls operation(thread) once on every thread, with thread = 0, 1, 2 and so on. There may be fewer threads than
// `threads`, and then the last numbers are left out: while other processes take cores, or if `parallel` starts fewer.
// If it starts more, the additional ones do nothing.
template <class F> void on_every_thread(int threads, skimkv_parallel parallel, const F &operation) {
    const auto f = [&](int thread) {
        const SubnormalResults while_it_runs(Subnormal::ZERO);
        operation(thread);
    };
    threads = usable_threads(threads, parallel);
    if (threads == 1) return f(0);
    if (led_team) return led_team->run(threads, f);
    const int64_t began = nanoseconds();
    const int used = limit_of_caller.use_of(threads, began);
    if (used == 1) return f(0);
    struct Call {
        decltype(f) &run;
        const int threads;
        const int64_t began;
        std::atomic<int> next_thread;
        std::atomic<int64_t> first_end, waited;  // when the first thread was done; the longest wait of a thread
    } call{f, used, began, {0}, {0}, {0}};
    parallel(
        [](void *data) {
            Call *call = (Call *)data;
            const int thread = call->next_thread.fetch_add(1, std::memory_order_relaxed);
            if (thread >= call->threads) return;
            const int64_t start = nanoseconds();
            call->run(thread);
            const int64_t end = nanoseconds();
            int64_t first = 0, longest = 0;
            if (call->first_end.compare_exchange_strong(first, end)) first = end;
            // The last thread may only have had more work: then it has not lost its core.
            const bool has_waited = end - call->began >= ThreadLimit::SHORT && has_lost_core();
            const int64_t late = start - call->began, after = has_waited ? end - first : 0;
            const int64_t waited = late > after ? late : after;
            while (waited > longest && !call->waited.compare_exchange_weak(longest, waited)) {
            }
        },
        &call, (unsigned)used, 0);
    limit_of_caller.learn(threads, call.waited, began, nanoseconds());
}

// Calls f() once, so that the operations in it find their threads waiting for them. Without this each operation asks
// for its threads and is left by them, which takes longer than a small matrix.
template <class F> void as_a_team(int threads, skimkv_parallel parallel, const F &f) {
    threads = usable_threads(threads, parallel);
    const int64_t began = nanoseconds();
    const int used = threads == 1 ? 1 : limit_of_caller.use_of(threads, began);
    if (used == 1) return f();
    struct Call {
        const F &f;
        const int threads;
        std::atomic<int> next_thread{0};
        int64_t done = 0;
        Team team{};
    } call{f, used};
    parallel(
        [](void *data) {
            Call *call = (Call *)data;
            const int thread = call->next_thread.fetch_add(1, std::memory_order_relaxed);
            if (thread > 0) return thread < call->threads ? call->team.follow() : void();
            led_team = &call->team;
            call->f();
            led_team = nullptr;
            call->team.end();
            call->done = nanoseconds();
        },
        &call, (unsigned)used, 0);
    const int64_t ended = nanoseconds(), late = ended - call.done, lost = call.team.wait_for_lost();
    const int64_t waited = late > lost ? late : lost;
    limit_of_caller.learn(threads, waited, waited < Team::LONG_WAIT ? began : ended - waited, ended);
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
