// The table of the kinds of matrices: a new kind is one line here, beside its kernels.
#pragma once
#include "kernels/block_products.h"
#include "kernels/float_products.h"
#include "kernels/panel_products.h"

namespace skimkv::SKIMKV_NS {

static constexpr MatrixKind matrix_kinds[] = {
    float_kind<float>(SKIMKV_KIND_F32),      float_kind<bf16>(SKIMKV_KIND_BF16),
    float_kind<f16>(SKIMKV_KIND_F16),        panel_kind(SKIMKV_KIND_PANELS),
    block_kind<BlockQ4_0>(SKIMKV_KIND_Q4_0), block_kind<BlockQ4_K>(SKIMKV_KIND_Q4_K),
    block_kind<BlockQ5_K>(SKIMKV_KIND_Q5_K), block_kind<BlockQ6_K>(SKIMKV_KIND_Q6_K),
};

}  // namespace skimkv::SKIMKV_NS
