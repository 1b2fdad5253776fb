// Compiles all kernels for one instruction set and fills its table. A file isa/<set>.cpp includes its simd_*.h first,
// which names the namespace, and then this header.
//
// The kernels use nothing of the standard library: an inline function of it that was compiled for AVX-512 may be the
// copy that the linker keeps for everybody.
#pragma once
#include "isa/simd.h"
#include "kernel_table.h"
#include "kernels/append.h"
#include "kernels/attention_step.h"
#include "kernels/matrix_kinds.h"
#include "kernels/prompt_attention.h"
#include "kernels/rms_norm.h"
#include "kernels/rotation.h"
#include "kernels/values.h"

namespace skimkv::SKIMKV_NS {

extern const Kernels kernels;
const Kernels kernels = {
    attention_scratch_bytes,
    attention,
    append,
    code_open,
    matrix_kinds,
    (int)(sizeof matrix_kinds / sizeof matrix_kinds[0]),
    prompt_scratch_bytes,
    prompt_tasks,
    prompt_attention,
    rms_norm,
    gate,
    add,
    rotate,
    turn_keys,
};

}  // namespace skimkv::SKIMKV_NS
