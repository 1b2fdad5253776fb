// Threads that stay together while one of them leads through many short operations.
#pragma once
#include <sched.h>
#include <stdint.h>
#include <time.h>

#include <atomic>
#if defined(__linux__)
#include <sys/resource.h>
#endif

namespace skimkv {

inline int64_t nanoseconds() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// Whether the calling thread has lost its core to another thread since it asked last.
inline bool has_lost_core() {
#if defined(__linux__) && defined(RUSAGE_THREAD)
    static thread_local long known = 0;
    rusage use;
    if (getrusage(RUSAGE_THREAD, &use) || use.ru_nivcsw == known) return false;
    known = use.ru_nivcsw;
    return true;
#else
    return false;
#endif
}

// Waits until a condition holds: first with the core, and if that takes long, with what others leave of it.
template <class Condition> void wait_until(const Condition &holds) {
    constexpr int BEFORE_YIELDING = 2000;
    for (int i = 0; !holds(); i++) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
        if (i >= BEFORE_YIELDING) sched_yield();
    }
}

// The leader opens a round for an operation, and every member that sees it in time takes part. The leader waits for
// those that do, and not for others: so a member that has lost its core delays nobody, unless it lost it within a
// round. Then the leader works alone for a pause.
class Team {
   public:
    static constexpr int64_t LONG_WAIT = 1000000, PAUSE = 4000000;  // nanoseconds

    // Calls f(thread) with thread = 0 on the leader, and 1, 2 and so on, up to threads-1, on others.
    template <class F> void run(int threads, const F &f) {
        if (threads < 2 || is_pausing()) return f(0);
        call = [](const void *data, int thread) { (*(const F *)data)(thread); };
        data = &f, most = threads;
        next_thread.store(1, std::memory_order_relaxed);
        round.store(++last_round);
        f(0);
        round.store(CLOSED);
        if (!inside.load()) return;
        int64_t began = 0, waited = 0;
        wait_until([&] {
            if (!inside.load(std::memory_order_acquire)) return true;
            // The clock takes longer than most waits.
            if (++looks % 64 == 0) {
                if (!began) began = nanoseconds();
                else waited = nanoseconds() - began;
                if (waited >= LONG_WAIT) is_late.store(true, std::memory_order_relaxed);
            }
            return false;
        });
        is_late.store(false, std::memory_order_relaxed);
        if (!has_lost.exchange(false)) return;
        if (waited > longest_wait) longest_wait = waited;
        alone_until = nanoseconds() + PAUSE;
    }
    // What another thread does until the leader ends.
    void follow() {
        has_lost_core();
        for (int64_t seen = CLOSED, now; (now = next_round(seen)) != OVER; seen = now) {
            inside.fetch_add(1);
            if (round.load() == now) {
                const int thread = next_thread.fetch_add(1, std::memory_order_relaxed);
                if (thread < most) call(data, thread);
                if (is_late.load(std::memory_order_relaxed) && has_lost_core()) has_lost = true;
            }
            inside.fetch_sub(1, std::memory_order_release);
        }
    }
    void end() { round.store(OVER); }
    // How long the leader waited for a member that had lost its core; 0 if it did not.
    int64_t wait_for_lost() const { return longest_wait; }

   private:
    static constexpr int64_t CLOSED = 0, OVER = -1;

    bool is_pausing() {
        if (alone_until && nanoseconds() >= alone_until) alone_until = 0;
        return alone_until;
    }
    int64_t next_round(int64_t seen) const {
        int64_t now;
        wait_until([&] { return now = round.load(std::memory_order_acquire), now != CLOSED && now != seen; });
        return now;
    }

    alignas(64) std::atomic<int64_t> round{CLOSED};  // its number, if it is open
    void (*call)(const void *data, int thread) = nullptr;
    const void *data = nullptr;
    int most = 0;
    std::atomic<int> next_thread{0};
    alignas(64) std::atomic<int> inside{0};  // members that take part
    std::atomic<bool> is_late{false}, has_lost{false};
    int64_t last_round = CLOSED, longest_wait = 0, alone_until = 0;  // of the leader
    unsigned looks = 0;
};

inline thread_local Team *led_team = nullptr;  // that the calling thread leads

}  // namespace skimkv
