// Chooses an instruction set at first use, checks operations, and runs them on a caller's threads.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "types.h"

namespace {

using skimkv::Kernels;

struct Isa {
    const char *name;
    const Kernels *kernels;
    bool (*available)();
    bool bf16 = false;
};

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_bf16() { return has_vnni() && __builtin_cpu_supports("avx512bf16"); }
#endif
bool always() { return true; }

// Best first.
const Isa isas[] = {
#if defined(__x86_64__)
    {"avx512bf16", &skimkv::vnni_kernels, has_bf16, true},
    {"avx512vnni", &skimkv::vnni_kernels, has_vnni},
#ifndef SKIMKV_FEWER
    {"avx512", &skimkv::avx512_kernels, has_avx512},
#endif
    {"avx2", &skimkv::avx2_kernels, has_avx2},
#elif defined(__aarch64__)
    {"neon", &skimkv::neon_kernels, always},
#endif
    {"scalar", &skimkv::scalar_kernels, always},
};

std::atomic<const Isa *> current{nullptr};

const Isa *find(const char *name) {
    for (const Isa &isa : isas)
        if ((name == nullptr || std::strcmp(name, isa.name) == 0) && isa.available()) return &isa;
    return nullptr;
}

const Isa *chosen() {
    const Isa *isa = current.load(std::memory_order_acquire);
    if (isa == nullptr) {
        const char *name = std::getenv("SKIMKV_ISA");
        isa = find(name && *name ? name : nullptr);
        current.store(isa, std::memory_order_release);
    }
    return isa;
}

// Scratch memory of the calling thread, kept between steps.
struct Scratch {
    void *at = nullptr;
    size_t bytes = 0;
    ~Scratch() { std::free(at); }
    void *get(size_t need) {
        if (need > bytes) {
            std::free(at);
            bytes = (need + need / 4 + 4095) / 4096 * 4096;
            at = std::aligned_alloc(4096, bytes);
            if (at == nullptr) bytes = 0;
        }
        return at;
    }
};
thread_local Scratch scratch;

// f(i) is called once for each thread of the team, i counting up from 0; the team may be smaller than asked for.
template <class F> void team(int threads, skimkv_parallel parallel, const F &f) {
    struct Call {
        const F &f;
        int threads;
        std::atomic<int> ticket;
    } call{f, threads, {0}};
    if (threads == 1) return f(0);
    parallel(
        [](void *data) {
            Call *c = (Call *)data;
            int i = c->ticket.fetch_add(1, std::memory_order_relaxed);
            if (i < c->threads) c->f(i);
        },
        &call, (unsigned)threads, 0);
}

// f(unit, thread) for every unit, on at most as many threads as there are units.
template <class F> void each_unit(int64_t units, int threads, skimkv_parallel parallel, const F &f) {
    std::atomic<int64_t> next{0};
    team((int)std::min<int64_t>(threads, units), parallel, [&](int i) {
        for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < units;) f(unit, i);
    });
}

int usable(int threads, skimkv_parallel parallel) { return threads < 1 || !parallel ? 1 : threads; }

}  // namespace

const Kernels *skimkv::kernels() {
    const Isa *isa = chosen();
    return isa ? isa->kernels : nullptr;
}

bool skimkv::bf16_products() {
    const Isa *isa = chosen();
    return isa && isa->bf16;
}

extern "C" {

int skimkv_version(void) { return SKIMKV_VERSION; }

const char *skimkv_isa(void) {
    const Isa *isa = chosen();
    return isa ? isa->name : nullptr;
}

const char *skimkv_isas(void) {
    static char names[64];
    char text[64] = "";
    for (const Isa &isa : isas)
        if (isa.available()) std::snprintf(text + std::strlen(text), sizeof text - std::strlen(text), "%s%s", *text ? "," : "", isa.name);
    std::memcpy(names, text, sizeof names);
    return names;
}

int skimkv_force(const char *name) {
    const Isa *isa = nullptr;
    if (name && (isa = find(name)) == nullptr) return -1;
    current.store(isa, std::memory_order_release);
    return 0;
}

size_t skimkv_work(const skimkv_op *op, int nth) {
    const Isa *isa = chosen();
    return isa ? isa->kernels->work(op, nth) : 0;
}

void skimkv_share(const skimkv_op *op, void *work, int ith, int nth) { chosen()->kernels->share(op, work, ith, nth); }

int skimkv_run(const skimkv_op *op, int threads, skimkv_parallel parallel) {
    const Isa *isa = chosen();
    if (!isa) return -1;
    threads = usable(threads, parallel);
    void *work = scratch.get(isa->kernels->work(op, threads));
    if (!work) return -1;
    // a smaller team than asked for leaves the counters as they are, so they are cleared before each step
    std::memset(work, 0, 64 + sizeof(int) * (size_t)op->cache->B * (size_t)op->cache->H);
    team(threads, parallel, [&](int ith) { isa->kernels->share(op, work, ith, threads); });
    return 0;
}

const char *skimkv_step(skimkv_op *op, const void *q, void *y, const void *k_new, const void *v_new, int threads,
                        skimkv_parallel parallel) {
    if (!op) return "operation is NULL";
    op->q = q, op->y = y, op->k_new = k_new, op->v_new = v_new;
    if (const char *error = skimkv_check(op)) return error;
    const uintptr_t x = op->dtype == SKIMKV_F32 ? 3 : 1, c = op->cache->dtype == SKIMKV_F32 ? 3 : 1;
    if (((uintptr_t)q | (uintptr_t)y) & x || ((uintptr_t)k_new | (uintptr_t)v_new) & c)
        return "q, y, k or v is not aligned to its elements";
    return skimkv_run(op, threads, parallel) ? "no memory for the kernels' scratch space" : nullptr;
}

int skimkv_append(const skimkv_tokens *a, int threads, skimkv_parallel parallel) {
    const Isa *isa = chosen();
    if (!isa) return -1;
    each_unit((int64_t)a->cache->B * a->cache->H, usable(threads, parallel), parallel,
              [&](int64_t unit, int) { isa->kernels->append(a, unit); });
    return 0;
}

int skimkv_stream(const skimkv_clusters *c, int threads, skimkv_parallel parallel) {
    const Isa *isa = chosen();
    if (!isa) return -1;
    threads = usable(threads, parallel);
    const size_t each = isa->kernels->stream_work(c);
    char *work = (char *)scratch.get(each * (size_t)threads);
    if (!work) return -1;
    each_unit((int64_t)c->B * c->H, threads, parallel,
              [&](int64_t unit, int i) { isa->kernels->stream(c, work + each * (size_t)i, unit); });
    return 0;
}

int skimkv_stream_append(const skimkv_clusters *c, int threads, skimkv_parallel parallel) {
    const Isa *isa = chosen();
    if (!isa) return -1;
    each_unit((int64_t)c->B * c->H, usable(threads, parallel), parallel,
              [&](int64_t unit, int) { isa->kernels->stream_append(c, unit); });
    return 0;
}

}  // extern "C"
