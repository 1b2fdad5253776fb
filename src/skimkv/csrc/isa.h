// The kernels, compiled once per instruction set by a file that defines SKIMKV_NS and includes its simd_*.h first.
// No standard library below: an inline function compiled for AVX-512 may be the copy that the linker keeps for all.
#pragma once
#include "vmath.h"
#include "rowcode.h"
#include "rows.h"
#ifdef SKIMKV_PAIRS
#include "rows_bf16.h"
#endif
#include "channels.h"
#include "select.h"
#include "unit.h"
#include "coded.h"
#include "score.h"
#include "sparse.h"
#include "dense.h"
#include "append.h"
#include "share.h"
#include "clusters.h"
#include "linear.h"
#include "columns.h"

namespace skimkv {
extern const Kernels SKIMKV_TABLE;
const Kernels SKIMKV_TABLE = {SKIMKV_NS::work,   SKIMKV_NS::share,         SKIMKV_NS::append, SKIMKV_NS::stream_work,
                              SKIMKV_NS::stream, SKIMKV_NS::stream_append, {SKIMKV_NS::linear_narrow, SKIMKV_NS::linear_share},
                              SKIMKV_NS::columns_work, SKIMKV_NS::columns};
}  // namespace skimkv
