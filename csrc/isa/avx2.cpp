// The kernels with AVX2, FMA and F16C.
#include "isa/simd_avx2.h"
// The kernels come after the operations that they use.
#include "isa/fill_kernel_table.h"
