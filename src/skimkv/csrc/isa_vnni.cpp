// AVX-512 whose VNNI multiplies and adds integers of 8 and 16 bits in one instruction. Functions of rows_bf16.h, compiled
// for one feature more, are called where the set in use is avx512bf16.
#define SKIMKV_PAIRS
#define SKIMKV_NS vnni
#define SKIMKV_TABLE vnni_kernels
#include "simd_avx512.h"
#include "isa.h"
