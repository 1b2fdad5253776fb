// Selects the instruction set whose kernels are used: the best of this machine, or the one that SKIMKV_ISA or
// skimkv_force names.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "bf16_speed.h"
#include "kernel_table.h"
#include "skimkv.h"

namespace {

using skimkv::Kernels;

struct InstructionSet {
    const char *name;
    const Kernels *kernels;
    bool (*is_available)();
    bool (*is_worth_using)();  // where nobody names a set
    bool multiplies_bf16 = false;
};

#if defined(__x86_64__)
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_bf16() { return has_vnni() && __builtin_cpu_supports("avx512bf16"); }
#endif
bool always() { return true; }

// The best set comes first.
const InstructionSet instruction_sets[] = {
#if defined(__x86_64__)
#ifndef SKIMKV_WITHOUT_VNNI
    {"avx512bf16", &skimkv::vnni::kernels, has_bf16, skimkv::has_fast_bf16, true},
    {"avx512vnni", &skimkv::vnni::kernels, has_vnni, always},
#endif
#ifndef SKIMKV_WITHOUT_AVX512
    {"avx512", &skimkv::avx512::kernels, has_avx512, always},
#endif
    {"avx2", &skimkv::avx2::kernels, has_avx2, always},
#elif defined(__aarch64__)
    {"neon", &skimkv::neon::kernels, always, always},
#endif
    {"scalar", &skimkv::scalar::kernels, always, always},
};

// nullptr until the first use.
std::atomic<const InstructionSet *> current{nullptr};

// The set of this name, or the best one for nullptr; nullptr if this machine does not have it.
const InstructionSet *find(const char *name) {
    for (const InstructionSet &set : instruction_sets)
        if (set.is_available() && (name == nullptr ? set.is_worth_using() : std::strcmp(name, set.name) == 0))
            return &set;
    return nullptr;
}

const InstructionSet *selected() {
    const InstructionSet *set = current.load(std::memory_order_acquire);
    if (set == nullptr) {
        const char *name = std::getenv("SKIMKV_ISA");
        set = find(name && *name ? name : nullptr);
        current.store(set, std::memory_order_release);
    }
    return set;
}

}  // namespace

const Kernels *skimkv::selected_kernels() {
    const InstructionSet *set = selected();
    return set ? set->kernels : nullptr;
}

bool skimkv::multiplies_bf16() {
    const InstructionSet *set = selected();
    return set && set->multiplies_bf16;
}

bool skimkv::is_intel_processor() {
#if defined(__x86_64__)
    return __builtin_cpu_is("intel");
#else
    return false;
#endif
}

extern "C" {

int skimkv_version(void) { return SKIMKV_VERSION; }

const char *skimkv_isa(void) {
    const InstructionSet *set = selected();
    return set ? set->name : nullptr;
}

const char *skimkv_isas(void) {
    static char names[64];
    char text[64] = "";
    for (const InstructionSet &set : instruction_sets) {
        const size_t used = std::strlen(text);
        if (set.is_available()) std::snprintf(text + used, sizeof text - used, "%s%s", used ? "," : "", set.name);
    }
    std::memcpy(names, text, sizeof names);
    return names;
}

int skimkv_force(const char *name) {
    const InstructionSet *set = name ? find(name) : nullptr;
    if (name && !set) return -1;
    current.store(set, std::memory_order_release);
    return 0;
}

}  // extern "C"
