// The table of the kinds of matrices: a new kind is one line here, beside its kernels.
#pragma once
#include "kernels/block_products.h"
#include "kernels/float_products.h"
#include "kernels/panel_products.h"

namespace skimkv::SKIMKV_NS {

static constexpr MatrixKind matrix_kinds[] = {
    float_kind<float>(SKIMKV_KIND_F32),
    float_kind<bf16>(SKIMKV_KIND_BF16),
    float_kind<f16>(SKIMKV_KIND_F16),
    panel_kind(SKIMKV_KIND_PANELS),
    block_kind<BlockQ4_0>(SKIMKV_KIND_Q4_0),
    block_kind<BlockQ4_1>(SKIMKV_KIND_Q4_1),
    block_kind<BlockQ5_0>(SKIMKV_KIND_Q5_0),
    block_kind<BlockQ5_1>(SKIMKV_KIND_Q5_1),
    block_kind<BlockQ8_0>(SKIMKV_KIND_Q8_0),
    block_kind<BlockQ2_K>(SKIMKV_KIND_Q2_K),
    block_kind<BlockQ3_K>(SKIMKV_KIND_Q3_K),
    block_kind<BlockQ4_K>(SKIMKV_KIND_Q4_K),
    block_kind<BlockQ5_K>(SKIMKV_KIND_Q5_K),
    block_kind<BlockQ6_K>(SKIMKV_KIND_Q6_K),
    block_kind<BlockIQ4_NL>(SKIMKV_KIND_IQ4_NL),
    block_kind<BlockIQ4_XS>(SKIMKV_KIND_IQ4_XS),
    block_kind<BlockMXFP4>(SKIMKV_KIND_MXFP4),
};

}  // namespace skimkv::SKIMKV_NS
