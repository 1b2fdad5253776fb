// The kernels with the compiler's own vectors of four floats, which every machine has.
#include "isa/simd_scalar.h"
// The kernels come after the operations that they use.
#include "isa/fill_kernel_table.h"
