// Whether AVX512_BF16 is worth using on this processor.
#pragma once

namespace skimkv {

// Whether an instruction that multiplies pairs of bfloat16 takes no longer than the two float32 instructions that do
// the same; on an Intel it takes 1.7 to 2 times as long. It is measured once, in less than a millisecond. The processor
// must have AVX512_BF16.
bool has_fast_bf16();

}  // namespace skimkv
