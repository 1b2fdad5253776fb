// Runs products of tokens with matrices of every kind.
#include "products.h"

#include <cstring>

#include "element_types.h"
#include "scratch_memory.h"

namespace skimkv {

namespace {

// An operation with fewer products than this is not worth a second thread.
constexpr int64_t LEAST_PRODUCTS = 1 << 16;

// Weights of a part that a thread takes.
constexpr int64_t LEAST_STREAM = 1 << 17;

// The entry of a matrix in a table of kinds, or nullptr.
const MatrixKind *find(const Kernels &kernels, int32_t kind) {
    for (int i = 0; i < kernels.matrix_kind_count; i++)
        if (kernels.matrix_kinds[i].kind == kind) return &kernels.matrix_kinds[i];
    return nullptr;
}

// The same for the set of instructions in use, or for any if SKIMKV_ISA names one that is not available.
const MatrixKind *kind_of(const skimkv_matrix &m) {
    const Kernels *kernels = selected_kernels();
    return find(kernels ? *kernels : scalar::kernels, m.kind);
}

const ProductForm &form_of(const MatrixKind &kind, int64_t n) { return n < kind.many_tokens ? kind.few : kind.many; }

int64_t units_of(const ProductForm &form, const skimkv_matrix &m) { return (m.rows + form.rows - 1) / form.rows; }

// Prepares the inputs of tokens, by several threads if there are many.
void prepare_inputs(const ProductForm &form, const skimkv_matrix &m, const Tokens &tokens, char *inputs, int threads,
                    skimkv_parallel parallel) {
    if (tokens.n * m.columns < LEAST_PRODUCTS) return form.prepare_inputs(m, tokens, inputs, 0, tokens.n);
    for_each_part(tokens.n, tokens.n * m.columns, threads, parallel,
                  [&](int64_t first, int64_t last) { form.prepare_inputs(m, tokens, inputs, first, last); });
}

// As multiply, for no more tokens than every form of these products takes.
void multiply_some(const Kernels *kernels, const skimkv_matrix *matrices, const Tokens *tokens, int count, char *inputs,
                   int threads, skimkv_parallel parallel) {
    const ProductForm *forms[MOST_MATRICES];
    char *inputs_of[MOST_MATRICES];
    int64_t parts[MOST_MATRICES], all = 0;
    for (int i = 0; i < count; i++) {
        const skimkv_matrix &m = matrices[i];
        forms[i] = &form_of(*find(*kernels, m.kind), tokens[i].n);
        parts[i] = parts_of(units_of(*forms[i], m), m.rows * m.columns, threads), all += parts[i];
        const bool have_one_form = i && forms[i]->prepare_inputs == forms[i - 1]->prepare_inputs;
        inputs_of[i] = have_one_form ? inputs_of[i - 1] : inputs;
        if (have_one_form) continue;
        prepare_inputs(*forms[i], m, tokens[i], inputs, threads, parallel);
        inputs += forms[i]->input_bytes(m.columns, tokens[i].n);
    }
    for_each_task(all, threads, parallel, [&](int64_t part, int) {
        int i = 0;
        while (part >= parts[i]) part -= parts[i++];
        const skimkv_matrix &m = matrices[i];
        const int64_t units = units_of(*forms[i], m), unit = forms[i]->rows;
        const int64_t first = units * part / parts[i] * unit, last = units * (part + 1) / parts[i] * unit;
        forms[i]->multiply(m, tokens[i], inputs_of[i], first, last < m.rows ? last : m.rows);
    });
}

}  // namespace

int threads_for(int64_t products, int threads, skimkv_parallel parallel) {
    return products < LEAST_PRODUCTS ? 1 : usable_threads(threads, parallel);
}

int64_t parts_of(int64_t units, int64_t products, int threads) {
    int64_t parts = products / LEAST_STREAM;
    parts = parts < threads ? threads : parts > 8 * threads ? 8 * threads : parts;
    return threads == 1 ? 1 : parts > units ? units : parts;
}

const char *matrix_error(const skimkv_matrix &m, const Tokens &tokens) {
    const char *error = matrix_error(&m, kind_of(m));
    return error ? error : tokens_error(tokens, m.dtype);
}

const char *embedding_error(const skimkv_matrix &m, const int64_t *ids, int64_t n) {
    const MatrixKind *kind = kind_of(m);
    if (const char *error = matrix_error(&m, kind)) return error;
    const int32_t kinds[] = {SKIMKV_KIND_F32, SKIMKV_KIND_BF16, SKIMKV_KIND_F16};
    if (!kind->expand && m.kind != kinds[m.dtype]) return "an embedding of floats must be of its own dtype";
    for (int64_t t = 0; t < n; t++)
        if (ids[t] < 0 || ids[t] >= m.rows) return "a token is not one of the embedding";
    return nullptr;
}

void embed(const skimkv_matrix &m, const int64_t *ids, void *x, int64_t n) {
    const MatrixKind &kind = *kind_of(m);
    const int64_t bytes = m.columns * value_bytes(m.dtype);
    skimkv_matrix rows = m;
    rows.order = nullptr;
    for (int64_t t = 0; t < n; t++) {
        char *to = (char *)x + t * bytes;
        // A row is written where it would be in a whole matrix, which begins so far before it.
        if (kind.expand) kind.expand(rows, (void *)((uintptr_t)to - (uintptr_t)(ids[t] * bytes)), ids[t], ids[t] + 1);
        else std::memcpy(to, (const char *)m.data + ids[t] * bytes, (size_t)bytes);
    }
}

int64_t input_bytes(const skimkv_matrix &m, int64_t n) {
    const ProductForm &form = form_of(*kind_of(m), n);
    return form.input_bytes(m.columns, n < form.most_tokens ? n : form.most_tokens);
}

void multiply(const Kernels *kernels, const skimkv_matrix *matrices, const Tokens *tokens, int count, char *inputs,
              int threads, skimkv_parallel parallel) {
    const int64_t n = tokens->n;
    int64_t most = n;
    for (int i = 0; i < count; i++) {
        const int64_t limit = form_of(*find(*kernels, matrices[i].kind), n).most_tokens;
        if (limit < most) most = limit;
    }
    // Shares of about the same size: a last one of a few tokens would have another form, which rounds otherwise.
    const int64_t shares = (n + most - 1) / most;
    for (int64_t share = 0; share < shares; share++) {
        const int64_t first = n * share / shares, last = n * (share + 1) / shares;
        Tokens some[MOST_MATRICES];
        for (int i = 0; i < count; i++) {
            const int64_t size = value_bytes(matrices[i].dtype);
            some[i] = {(const char *)tokens[i].x + first * matrices[i].columns * size,
                       (char *)tokens[i].y + first * matrices[i].rows * size, last - first};
        }
        multiply_some(kernels, matrices, some, count, inputs, threads, parallel);
    }
}

}  // namespace skimkv

extern "C" {

const char *skimkv_product_run(const skimkv_matrix *matrix, const void *x, void *y, int64_t n, int threads,
                               skimkv_parallel parallel) {
    static thread_local skimkv::ScratchMemory scratch;
    if (!matrix) return "matrix is NULL";
    const skimkv_matrix &m = *matrix;
    if (const char *error = skimkv::matrix_error(m, {x, y, n})) return error;
    const skimkv::Kernels *kernels = skimkv::selected_kernels();
    if (!kernels) return skimkv::NO_KERNELS;
    char *inputs = (char *)scratch.get((size_t)skimkv::input_bytes(m, n));
    if (!inputs) return skimkv::NO_MEMORY;
    const skimkv::Tokens tokens{x, y, n};
    skimkv::multiply(kernels, &m, &tokens, 1, inputs, skimkv::threads_for(m.rows * m.columns, threads, parallel),
                     parallel);
    return nullptr;
}

const char *skimkv_matrix_expand(const skimkv_matrix *matrix, void *y, int threads, skimkv_parallel parallel) {
    if (!matrix) return "matrix is NULL";
    const skimkv_matrix &m = *matrix;
    if (const char *error = skimkv::matrix_error(m, {y, y, 1})) return error;
    const skimkv::Kernels *kernels = skimkv::selected_kernels();
    if (!kernels) return skimkv::NO_KERNELS;
    const skimkv::MatrixKind &kind = *skimkv::find(*kernels, m.kind);
    if (!kind.expand) return "a matrix of floats is not expanded";
    const int64_t weights = m.rows * m.columns;
    skimkv::for_each_part(m.rows, weights, skimkv::threads_for(weights, threads, parallel), parallel,
                          [&](int64_t first, int64_t last) { kind.expand(m, y, first, last); });
    return nullptr;
}

}  // extern "C"
