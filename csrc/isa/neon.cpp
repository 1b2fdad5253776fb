// The kernels with NEON of arm64.
#include "isa/simd_neon.h"
// The kernels come after the operations that they use.
#include "isa/fill_kernel_table.h"
