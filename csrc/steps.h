// Several steps of attention as one operation, alone or among the layers of a model.
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

// The layers of a model between an embedding, whose row i stands for token i, and the matrix of its logits, all of one
// dtype. The bias and the order of the embedding are not used; without its data tokens are given as they are embedded.
typedef struct skimkv_decoder {
    skimkv_layers layers;
    skimkv_matrix embed, head;
} skimkv_decoder;

// As skimkv_layers_run_parts, from tokens to logits [n,rows of head]. The tokens are `ids` or, where these are NULL, x.
// largest [n] is where the first of the largest logits of each token is.
SKIMKV_API const char *skimkv_decoder_run(const skimkv_decoder *op, skimkv_op *const *steps, int64_t parts,
                                          skimkv_attend attend, void *context, const int64_t *ids, const void *x,
                                          const void *cos, const void *sin, void *logits, int64_t *largest, int64_t n,
                                          int threads, skimkv_parallel parallel);

}  // extern "C"
