// A decode step for a caller in Python. A tensor is described by the library that it belongs to, through DLPack's C
// interface, and compared with what was checked before an earlier step: once a model has read its weights, nothing of
// Python is in the processor's caches, and a question about a tensor that is asked there takes microseconds.
#include <cstring>

#include "skimkv.h"

namespace {

// DLTensor of DLPack 1: https://dmlc.github.io/dlpack/latest/c_api.html
struct TensorDescription {
    void *data;
    int32_t device_type, device_id;
    int32_t dimensions;
    uint8_t kind, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};
enum { ON_CPU = 1 };             // kDLCPU
enum { FLOAT = 2, BFLOAT = 4 };  // kDLFloat, kDLBfloat

bool has_type(const TensorDescription &t, int dtype) {
    return t.lanes == 1 && t.kind == (dtype == SKIMKV_BF16 ? BFLOAT : FLOAT) &&
           t.bits == (dtype == SKIMKV_F32 ? 32 : 16);
}

// The address of a tensor's first element if it has this form, otherwise NULL.
void *address_of(const skimkv_tensor_step *step, void *object, const skimkv_tensor_form &form) {
    TensorDescription t;
    if (step->describe(object, &t)) {
        step->clear_error();
        return nullptr;
    }
    const size_t bytes = (size_t)form.dimensions * sizeof(int64_t);
    const bool same = t.device_type == ON_CPU && t.dimensions == form.dimensions && has_type(t, form.dtype) &&
                      t.shape && t.strides && !std::memcmp(t.shape, form.shape, bytes) &&
                      !std::memcmp(t.strides, form.strides, bytes);
    return same ? (char *)t.data + t.byte_offset : nullptr;
}

// Copies the numbers of a step from a list. Whether all are there, and the token has room.
bool copy_numbers(const skimkv_tensor_step *step, void *list) {
    for (int i = 0; i < step->count; i++) {
        void *item = step->item_of_list(list, i);
        if (!item) {
            step->clear_error();
            return false;
        }
        step->numbers[i] = step->integer(item);
        if (step->numbers[i] == -1) step->clear_error();  // it is -1 for what is no integer, too
        if (i >= step->place && i < step->place + step->rows && step->numbers[i] >= step->room) return false;
    }
    return true;
}

}  // namespace

extern "C" {

int skimkv_step_tensors(skimkv_tensor_step *step, void *numbers, void *q, void *k, void *v, void *y, int threads) {
    if (!copy_numbers(step, numbers)) return SKIMKV_OTHER_FORM;
    const void *of_q = address_of(step, q, step->q);
    const void *of_k = of_q ? address_of(step, k, step->k) : nullptr;
    const void *of_v = of_k ? address_of(step, v, step->v) : nullptr;
    TensorDescription result;
    if (!of_v) return SKIMKV_OTHER_FORM;
    if (step->describe(y, &result)) {
        step->clear_error();
        return SKIMKV_OTHER_FORM;
    }
    void *state = step->release_python();
    step->error = skimkv_step_timed(step->op, of_q, (char *)result.data + result.byte_offset, of_k, of_v, threads,
                                    step->parallel, step->stage_ns);
    step->take_python(state);
    return step->error ? SKIMKV_REFUSED : SKIMKV_TAKEN;
}

}  // extern "C"
