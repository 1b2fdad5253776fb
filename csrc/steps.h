// Several steps of attention as one operation.
#pragma once
#include <stdint.h>

#include "skimkv.h"

namespace skimkv {

// Runs steps that are valid, several as tasks of one operation. Returns NULL, or one line that says what is wrong.
const char *run_steps(skimkv_op *const *steps, int64_t count, int threads, skimkv_parallel parallel);

}  // namespace skimkv

extern "C" {

// As skimkv_layers_run, where the rows are those of `parts` caches in every layer, which follow one another:
// steps[i*parts + j] is the attention of layer i for the rows of part j. Either all steps of a layer are NULL, or none.
// Each part is computed by one thread where there are at least as many parts as threads.
SKIMKV_API const char *skimkv_layers_run_parts(const skimkv_layers *op, skimkv_op *const *steps, int64_t parts,
                                               skimkv_attend attend, void *context, const void *x, const void *cos,
                                               const void *sin, void *y, int64_t n, int threads,
                                               skimkv_parallel parallel);

}  // extern "C"
