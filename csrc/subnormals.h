// What a thread does with results below the least normal float32.
#pragma once

namespace skimkv {

enum class Subnormal { ZERO, KEPT };

// While it lives, such results of the calling thread are zero, or are kept. An Intel processor takes some hundred
// cycles for one, and a softmax has many where its logits are spread widely: weights from exp(-87.3) down to
// exp(-103.3) of the largest, and their products with values. So they are zero there. What is stored of a token keeps
// them. An Arm processor takes no longer for them, and keeps all.
class SubnormalResults {
   public:
#if defined(__x86_64__)
    explicit SubnormalResults(Subnormal are) : before(__builtin_ia32_stmxcsr()) {
        set(are == Subnormal::ZERO ? before | FLUSH_TO_ZERO : before & ~FLUSH_TO_ZERO);
    }
    ~SubnormalResults() { set(before); }
    SubnormalResults(const SubnormalResults &) = delete;
    SubnormalResults &operator=(const SubnormalResults &) = delete;

   private:
    static void set(unsigned mode) {
        __asm__ volatile("" ::: "memory");  // the compiler moves no arithmetic on loaded numbers past it
        __builtin_ia32_ldmxcsr(mode);
        __asm__ volatile("" ::: "memory");
    }

    static constexpr unsigned FLUSH_TO_ZERO = 1u << 15;  // of MXCSR; subnormal numbers from memory stay what they are
    const unsigned before;
#else
    explicit SubnormalResults(Subnormal) {}
#endif
};

}  // namespace skimkv
