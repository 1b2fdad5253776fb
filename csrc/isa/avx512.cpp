// The kernels with AVX-512 (F, BW, DQ and VL).
#include "isa/simd_avx512.h"
// The kernels come after the operations that they use.
#include "isa/fill_kernel_table.h"
