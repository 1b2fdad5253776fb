// Tells callers that write the structures of skimkv.h down again where each field lies, so that they can compare.
#include <stddef.h>

#include "skimkv.h"
#include "steps.h"

#define NAME_OF(structure) #structure
#define NAME(structure) NAME_OF(structure)
#define WHOLE {NAME(S), nullptr, 0, (int64_t)sizeof(S)}
#define F(field) {NAME(S), #field, (int64_t)offsetof(S, field), (int64_t)sizeof(S::field)}

static constexpr skimkv_field FIELDS[] = {
#define S skimkv_chunk
    WHOLE,       F(start),       F(cap),      F(k),        F(v),     F(index),      F(scale),    F(k_b),
    F(k_h),      F(k_n),         F(v_b),      F(v_h),      F(v_n),   F(x_b),        F(x_h),      F(x_r),
    F(s_b),      F(s_h),         F(s_g),      F(s_z),      F(s_r),   F(means),      F(e_b),      F(e_h),
    F(e_g),
#undef S
#define S skimkv_cache
    WHOLE,       F(B),           F(H),        F(G),        F(D),     F(R),          F(dtype),    F(channels),
    F(n_chunks), F(chunks),      F(lengths),  F(tail),     F(mean),  F(projection), F(t_b),      F(t_h),
    F(t_r),      F(m_b),         F(m_h),      F(bits),     F(page),  F(n_pages),    F(pages),
#undef S
#define S skimkv_paged
    WHOLE,       F(block),       F(bytes),    F(blocks),   F(table), F(table_b),    F(open),     F(o_h),
    F(o_r),      F(mean),        F(counts),   F(m_h),      F(n_h),   F(coded),
#undef S
#define S skimkv_op
    WHOLE,       F(cache),       F(q),        F(y),        F(q_b),   F(q_h),        F(q_g),      F(y_b),
    F(y_h),      F(y_g),         F(dtype),    F(method),   F(scale), F(softcap),    F(r),        F(k),
    F(local),    F(temperature), F(use_mean), F(k_new),    F(v_new), F(n_b),        F(n_h),      F(keep),
    F(slot),     F(score),       F(pos),      F(c_b),      F(c_h),   F(now),        F(recent),   F(rows_read),
    F(sinks),    F(paged),       F(stage_ns),
#undef S
#define S skimkv_tokens
    WHOLE,       F(cache),       F(k),        F(v),        F(n),     F(k_b),        F(k_h),      F(k_n),
    F(v_b),      F(v_h),         F(v_n),      F(skip),     F(at),
#undef S
#define S skimkv_turn
    WHOLE,       F(source),      F(to),       F(f_b),      F(f_h),   F(f_n),        F(t_b),      F(t_h),
    F(t_n),      F(cos),         F(sin),      F(moves),    F(B),     F(H),          F(n),        F(D),
    F(pairs),    F(interleaved), F(dtype),
#undef S
#define S skimkv_field
    WHOLE,       F(structure),   F(field),    F(offset),   F(size),
#undef S
#define S skimkv_rms_norm
    WHOLE,       F(w),           F(size),     F(eps),      F(dtype), F(adds_one),
#undef S
#define S skimkv_matrix
    WHOLE,       F(data),        F(rows),     F(columns),  F(bias),  F(order),      F(kind),     F(dtype),
#undef S
#define S skimkv_norm
    WHOLE,       F(w),           F(eps),      F(adds_one),
#undef S
#define S skimkv_layer
    WHOLE,       F(q),           F(k),        F(v),        F(o),     F(gate),       F(up),       F(down),
    F(before),   F(after),       F(of_o),     F(of_down),  F(of_q),  F(of_k),       F(D),        F(activation),
    F(angles),
#undef S
#define S skimkv_layers
    WHOLE,       F(layers),      F(count),    F(angles),   F(norm),
#undef S
#define S skimkv_decoder
    WHOLE,       F(layers),      F(embed),    F(head),
#undef S
#define S skimkv_columns
    WHOLE,       F(H),           F(G),        F(D),        F(dtype), F(parts),      F(scale),    F(softcap),
    F(n),        F(m),           F(q),        F(k),        F(q_h),   F(q_g),        F(q_n),      F(k_h),
    F(k_n),      F(sum),         F(sinks),
#undef S
#define S skimkv_prompt
    WHOLE,       F(B),           F(H),        F(G),        F(D),     F(dtype),      F(parts),    F(scale),
    F(softcap),  F(n),           F(m),        F(q),        F(k),     F(v),          F(y),        F(q_b),
    F(q_h),      F(q_g),         F(q_n),      F(k_b),      F(k_h),   F(k_n),        F(v_b),      F(v_h),
    F(v_n),      F(y_b),         F(y_h),      F(y_g),      F(y_n),   F(sinks),      F(received),
#undef S
};

extern "C" const skimkv_field *skimkv_fields(int64_t *count) {
    *count = sizeof(FIELDS) / sizeof(*FIELDS);
    return FIELDS;
}
