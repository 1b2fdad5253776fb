// The kernels with AVX-512 and VNNI, which multiplies and adds integers of 8 and 16 bits in one instruction. The
// functions of isa/row_dots_bf16.h and isa/float_rows_bf16.h need one feature more; they are called only where the set
// in use is avx512bf16.
#define SKIMKV_NS vnni
#define SKIMKV_BF16_PRODUCTS
#include "isa/simd_avx512.h"
// The kernels come after the operations that they use.
#include "isa/fill_kernel_table.h"
