// Runs what a model has around attention: its layers as one operation, alone or from tokens to logits, and
// normalisation.
#include <cstring>
#include <initializer_list>

#include "element_types.h"
#include "kernel_table.h"
#include "products.h"
#include "scratch_memory.h"
#include "skimkv.h"
#include "steps.h"
#include "threads.h"

namespace {

using skimkv::for_each_part;
using skimkv::input_bytes;
using skimkv::Kernels;
using skimkv::matrix_error;
using skimkv::multiply;
using skimkv::NO_KERNELS;
using skimkv::NO_MEMORY;
using skimkv::selected_kernels;
using skimkv::Sizes;
using skimkv::sizes_of;
using skimkv::threads_for;
using skimkv::Tokens;
using skimkv::value_bytes;

int64_t in_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

const char *norm_error(const skimkv_norm &norm, int dtype) {
    if (!norm.w || skimkv::is_misaligned(norm.w, dtype))
        return "the weights of a normalisation are NULL, or not aligned";
    return norm.eps >= 0 ? nullptr : "eps must be at least 0";
}

// Whether a layer is one of n tokens x -> y of `first`, and its parts fit each other.
const char *layer_error(const skimkv_layer &layer, const skimkv_layer &first, const void *x, void *y, int64_t n) {
    for (const skimkv_matrix *m : {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down}) {
        if (const char *error = matrix_error(*m, {x, y, n})) return error;
        if (sizes_of(*m).dtype != sizes_of(first.q).dtype) return "the matrices are not of one dtype";
    }
    const Sizes q = sizes_of(layer.q), k = sizes_of(layer.k), v = sizes_of(layer.v), o = sizes_of(layer.o);
    const Sizes gate = sizes_of(layer.gate), up = sizes_of(layer.up), down = sizes_of(layer.down);
    if (q.in != sizes_of(first.q).in || layer.D != first.D) return "the layers do not fit each other";
    if (k.in != q.in || v.in != q.in || k.out != v.out) return "q, k and v do not fit each other";
    if (o.in != q.out || o.out != q.in) return "q and o do not fit each other";
    if (gate.in != q.in || up.in != q.in || gate.out != up.out || down.in != gate.out || down.out != q.in)
        return "gate, up and down do not fit each other";
    if (layer.D < 2 || layer.D > SKIMKV_MAX_HEAD || layer.D % 2) return "D must be even and from 2 to 576";
    if (q.out % layer.D || k.out % layer.D) return "the outputs of q, k and v must be heads of D";
    if (!layer.of_q.w != !layer.of_k.w) return "q and k are normalised, or neither is";
    for (const skimkv_norm *norm : {&layer.before, &layer.after})
        if (const char *error = norm_error(*norm, q.dtype)) return error;
    for (const skimkv_norm *norm : {&layer.of_o, &layer.of_down, &layer.of_q, &layer.of_k})
        if (const char *error = norm->w ? norm_error(*norm, q.dtype) : nullptr) return error;
    return layer.activation == SKIMKV_SILU || layer.activation == SKIMKV_GELU_TANH ? nullptr : "unknown activation";
}

const char *layers_error(const skimkv_layers *op, const void *x, const void *cos, const void *sin, void *y, int64_t n) {
    if (!op) return "operation is NULL";
    if (!op->layers || op->count < 1) return "there must be at least one layer";
    if (op->angles < 1) return "there must be at least one cos and sin";
    for (int64_t i = 0; i < op->count; i++) {
        if (const char *error = layer_error(op->layers[i], op->layers[0], x, y, n)) return error;
        if (op->layers[i].angles < 0 || op->layers[i].angles >= op->angles) return "a layer has no cos and sin";
    }
    const int dtype = sizes_of(op->layers->q).dtype;
    if (!cos || !sin) return "cos or sin is NULL";
    if (skimkv::is_misaligned(cos, dtype) || skimkv::is_misaligned(sin, dtype)) return "cos or sin is not aligned";
    return norm_error(op->norm, dtype);
}

// Whether a step of attention is one of tokens as the layer gives them.
const char *step_error(const skimkv_op *step, const skimkv_layer &layer) {
    if (const char *error = skimkv_check(step)) return error;
    const skimkv_cache *c = step->cache;
    const Sizes q = sizes_of(layer.q);
    const int64_t keys = sizes_of(layer.k).out, D = layer.D, GD = c->G * D;
    if (c->D != D || c->H * D != keys || c->H * GD != q.out) return "a cache does not fit its layer";
    if (step->dtype != q.dtype || c->dtype != q.dtype) return "a cache is not of its layer's dtype";
    if (step->q_b != q.out || step->q_h != GD || step->q_g != D || step->y_b != q.out || step->y_h != GD ||
        step->y_g != D || step->n_b != keys || step->n_h != D)
        return "queries, outputs and new rows of a step must be contiguous";
    return step->keep == SKIMKV_OUTSIDE ? "a step must keep its token" : nullptr;
}

// Where a token is between the parts of a layer. `normed` has the size of a token; `inputs` are those of products, in
// the form in which a matrix multiplies them.
struct States {
    char *queries, *keys, *values, *attended, *tokens[2], *normed, *gate, *up, *inputs;
};

// Scratch memory for the states of every layer. Null pointers if there is no memory.
States states_of(const skimkv_layers *op, int64_t n) {
    static thread_local skimkv::ScratchMemory memory;
    const Sizes first = sizes_of(op->layers->q);
    int64_t queries = 0, keys = 0, inner = 0, inputs = 0;
    const auto raise = [](int64_t &most, int64_t value) { most = value > most ? value : most; };
    for (int64_t i = 0; i < op->count; i++) {
        const skimkv_layer &layer = op->layers[i];
        raise(queries, sizes_of(layer.q).out), raise(keys, sizes_of(layer.k).out);
        raise(inner, sizes_of(layer.gate).out);
        raise(inputs, input_bytes(layer.q, n) + input_bytes(layer.k, n) + input_bytes(layer.v, n));
        raise(inputs, input_bytes(layer.gate, n) + input_bytes(layer.up, n));
        raise(inputs, input_bytes(layer.o, n)), raise(inputs, input_bytes(layer.down, n));
    }
    const int64_t bytes = n * value_bytes(first.dtype), token = in_lines(first.in * bytes);
    const int64_t sizes[] = {in_lines(queries * bytes),
                             in_lines(keys * bytes),
                             in_lines(keys * bytes),
                             in_lines(queries * bytes),
                             token,
                             token,
                             token,
                             in_lines(inner * bytes),
                             in_lines(inner * bytes),
                             inputs};
    int64_t all = 0;
    for (int64_t size : sizes) all += size;
    char *next = (char *)memory.get((size_t)all), *parts[10];
    if (!next) return {};
    for (int i = 0; i < 10; i++) parts[i] = next, next += sizes[i];
    return {parts[0], parts[1], parts[2], parts[3], {parts[4], parts[5]}, parts[6], parts[7], parts[8], parts[9]};
}

// How an operation of n tokens computes.
struct Run {
    const Kernels *kernels;
    int64_t n;
    int threads;
    skimkv_parallel parallel;

    // Multiplies x with matrices of one number of inputs.
    template <int count>
    void multiply_all(const void *x, const skimkv_matrix (&matrices)[count], void *const (&y)[count],
                      char *inputs) const {
        Tokens tokens[count];
        int64_t products = 0;
        for (int i = 0; i < count; i++) {
            tokens[i] = {x, y[i], n};
            products += sizes_of(matrices[i]).out * sizes_of(matrices[i]).in;
        }
        multiply(kernels, matrices, tokens, count, inputs, threads_for(products, threads, parallel), parallel);
    }

    // Calls f(first, last) for parts of rows of so many numbers; for all of them at once if there are few.
    template <class F> void for_rows(int64_t rows, int64_t numbers, const F &f) const {
        const int used = threads_for(rows * numbers, threads, parallel);
        if (used == 1) return f(0, rows);
        for_each_part(rows, rows * numbers, used, parallel, f);
    }

    // Normalises x (rows,size) row by row.
    void normalise(const skimkv_norm &norm, int64_t size, int dtype, const void *x, void *y, int64_t rows) const {
        const skimkv_rms_norm op{norm.w, size, norm.eps, dtype, norm.adds_one};
        for_rows(rows, size, [&](int64_t first, int64_t last) { kernels->rms_norm(&op, {x, y, rows}, first, last); });
    }

    // Adds `from` to `to`, both n rows of so many numbers.
    void add(int dtype, int64_t numbers, void *to, const void *from) const {
        const int64_t bytes = numbers * value_bytes(dtype);
        for_rows(n, numbers, [&](int64_t first, int64_t last) {
            kernels->add(dtype, (char *)to + first * bytes, (const char *)from + first * bytes,
                         (last - first) * numbers);
        });
    }
};

// Gives the steps of a layer, which follow one another, their places in the states of n tokens. Returns NULL, or why
// they do not fit.
const char *place_steps(skimkv_op *const *steps, int64_t parts, const skimkv_layer &layer, const States &states,
                        int64_t n) {
    const Sizes q = sizes_of(layer.q);
    const int64_t size = value_bytes(q.dtype), queries = q.out * size, keys = sizes_of(layer.k).out * size;
    int64_t row = 0;
    for (int64_t j = 0; j < parts; j++) {
        skimkv_op *step = steps[j];
        if (!step) return "a step is NULL, and there is no function that attends, or others of its layer are not";
        if (parts > 1 && step->paged) return "a step of several must not be in blocks";
        step->q = states.queries + row * queries, step->y = states.attended + row * queries;
        step->k_new = states.keys + row * keys, step->v_new = states.values + row * keys;
        if (const char *error = step_error(step, layer)) return error;
        row += step->cache->B;
        if (row > n) break;
    }
    return row == n ? nullptr : "a cache does not fit its layer";
}

// Queries, keys and values of the tokens x, normalised and rotated.
void project(const Run &run, const skimkv_layer &layer, const void *x, const void *cos, const void *sin,
             const States &states) {
    const Sizes q = sizes_of(layer.q), k = sizes_of(layer.k);
    const int64_t n = run.n, D = layer.D, size = value_bytes(q.dtype), heads[] = {q.out / D, k.out / D};
    run.normalise(layer.before, q.in, q.dtype, x, states.normed, n);
    run.multiply_all(states.normed, {layer.q, layer.k, layer.v}, {states.queries, states.keys, states.values},
                     states.inputs);
    if (layer.of_q.w) {
        run.normalise(layer.of_q, D, q.dtype, states.queries, states.queries, n * heads[0]);
        run.normalise(layer.of_k, D, q.dtype, states.keys, states.keys, n * heads[1]);
    }
    run.for_rows(n, q.out + k.out, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; t++) {
            const int64_t at = (layer.angles * n + t) * D * size;
            const char *c = (const char *)cos + at, *s = (const char *)sin + at;
            run.kernels->rotate(q.dtype, c, s, heads[0], (int)D, states.queries + t * q.out * size);
            run.kernels->rotate(q.dtype, c, s, heads[1], (int)D, states.keys + t * k.out * size);
        }
    });
}

// y = t + of_down(down(activation(gate(after(t))) * up(after(t)))), where t = x + of_o(o(attended)).
void finish(const Run &run, const skimkv_layer &layer, const void *x, const States &states, void *y) {
    const Sizes o = sizes_of(layer.o);
    const int64_t n = run.n, inner = sizes_of(layer.gate).out;
    run.multiply_all(states.attended, {layer.o}, {y}, states.inputs);
    if (layer.of_o.w) run.normalise(layer.of_o, o.out, o.dtype, y, y, n);
    run.add(o.dtype, o.out, y, x);
    run.normalise(layer.after, o.out, o.dtype, y, states.normed, n);
    run.multiply_all(states.normed, {layer.gate, layer.up}, {states.gate, states.up}, states.inputs);
    run.for_rows(n, inner, [&](int64_t first, int64_t last) {
        const int64_t at = first * inner * value_bytes(o.dtype);
        run.kernels->gate(o.dtype, layer.activation, states.gate + at, states.up + at, (last - first) * inner);
    });
    run.multiply_all(states.gate, {layer.down}, {states.normed}, states.inputs);
    if (layer.of_down.w) run.normalise(layer.of_down, o.out, o.dtype, states.normed, states.normed, n);
    run.add(o.dtype, o.out, y, states.normed);
}

// All layers, from x to the last normalisation.
const char *run_layers(const Run &run, const skimkv_layers *op, skimkv_op *const *steps, int64_t parts,
                       skimkv_attend attend, void *context, const void *x, const void *cos, const void *sin, void *y,
                       const States &states) {
    const Sizes first = sizes_of(op->layers->q);
    const void *now = x;
    for (int64_t i = 0; i < op->count; i++) {
        const skimkv_layer &layer = op->layers[i];
        project(run, layer, now, cos, sin, states);
        if (steps && steps[i * parts]) {
            if (const char *error = skimkv::run_steps(steps + i * parts, parts, run.threads, run.parallel))
                return error;
        } else if (steps) {
            if (attend(context, i, states.queries, states.keys, states.values, states.attended))
                return "attention of a layer failed";
        } else {
            std::memset(states.attended, 0, (size_t)(run.n * sizes_of(layer.q).out * value_bytes(first.dtype)));
        }
        finish(run, layer, now, states, states.tokens[i % 2]);
        now = states.tokens[i % 2];
    }
    const skimkv_rms_norm norm{op->norm.w, first.in, op->norm.eps, first.dtype, op->norm.adds_one};
    return skimkv_rms_norm_run(&norm, now, y, run.n, run.threads, run.parallel);
}

// Validates and runs all layers, in whose team first() gives x, and last() is called when y is complete.
template <class First, class Last>
const char *run_team(const skimkv_layers *op, skimkv_op *const *steps, int64_t parts, skimkv_attend attend,
                     void *context, const void *x, const void *cos, const void *sin, void *y, int64_t n, int threads,
                     skimkv_parallel parallel, const First &first, const Last &last) {
    if (const char *error = layers_error(op, x, cos, sin, y, n)) return error;
    if (parts < 1 || parts > n) return "parts must be from 1 to n";
    const Run run{selected_kernels(), n, threads, parallel};
    if (!run.kernels) return NO_KERNELS;
    const States states = states_of(op, n);
    if (!states.queries) return NO_MEMORY;
    bool calls_back = false;  // whether a function of the caller attends, which may use the threads itself
    for (int64_t i = 0; steps && i < op->count; i++) {
        skimkv_op *const *own = steps + i * parts;
        bool attends = false;
        for (int64_t j = 0; j < parts; j++) attends |= own[j] != nullptr;
        if (!attends && attend) {
            calls_back = true;
            continue;
        }
        if (const char *error = place_steps(own, parts, op->layers[i], states, n)) return error;
    }
    const char *error = nullptr;
    const auto run_all = [&] {
        first();
        error = run_layers(run, op, steps, parts, attend, context, x, cos, sin, y, states);
        if (!error) error = last();
    };
    if (calls_back) run_all();
    else skimkv::as_a_team(threads, parallel, run_all);
    return error;
}

// What is wrong with what a model has before and after its layers, for n tokens, or nullptr.
const char *ends_error(const skimkv_decoder *op, const int64_t *ids, const void *y, void *logits, int64_t n) {
    const Sizes first = sizes_of(op->layers.layers->q), head = sizes_of(op->head);
    if (const char *error = matrix_error(op->head, {y, logits, n})) return error;
    if (head.in != first.in || head.dtype != first.dtype) return "the matrix of logits does not fit the layers";
    if (!ids) return nullptr;
    if (const char *error = skimkv::embedding_error(op->embed, ids, n)) return error;
    const Sizes embedding = sizes_of(op->embed);
    return embedding.in == first.in && embedding.dtype == first.dtype ? nullptr
                                                                      : "the embedding does not fit the layers";
}

}  // namespace

extern "C" {

const char *skimkv_layers_run(const skimkv_layers *op, skimkv_op *const *steps, skimkv_attend attend, void *context,
                              const void *x, const void *cos, const void *sin, void *y, int64_t n, int threads,
                              skimkv_parallel parallel) {
    return skimkv_layers_run_parts(op, steps, 1, attend, context, x, cos, sin, y, n, threads, parallel);
}

const char *skimkv_layers_run_parts(const skimkv_layers *op, skimkv_op *const *steps, int64_t parts,
                                    skimkv_attend attend, void *context, const void *x, const void *cos,
                                    const void *sin, void *y, int64_t n, int threads, skimkv_parallel parallel) {
    return run_team(
        op, steps, parts, attend, context, x, cos, sin, y, n, threads, parallel, [] {},
        [] { return (const char *)nullptr; });
}

const char *skimkv_decoder_run(const skimkv_decoder *op, skimkv_op *const *steps, int64_t parts, skimkv_attend attend,
                               void *context, const int64_t *ids, const void *x, const void *cos, const void *sin,
                               void *logits, int64_t *largest, int64_t n, int threads, skimkv_parallel parallel) {
    static thread_local skimkv::ScratchMemory memory;
    if (!op || !op->layers.layers || op->layers.count < 1) return "there must be at least one layer";
    if (!largest || (!ids && !x)) return "tokens, or the place of the largest logits, are NULL";
    if (const char *error = matrix_error(op->layers.layers->q, {logits, logits, n})) return error;
    const Sizes first = sizes_of(op->layers.layers->q);
    const int64_t bytes = in_lines(n * first.in * value_bytes(first.dtype));
    char *embedded = (char *)memory.get((size_t)(2 * bytes)), *y = embedded + bytes;
    if (!embedded) return NO_MEMORY;
    if (const char *error = ends_error(op, ids, embedded, logits, n)) return error;
    const auto begin = [&] {
        if (ids) skimkv::embed(op->embed, ids, embedded, n);
    };
    const auto end = [&] {
        const char *error = skimkv_product_run(&op->head, y, logits, n, threads, parallel);
        const int64_t row = op->head.rows * value_bytes(first.dtype);
        for (int64_t t = 0; t < n && !error; t++)
            largest[t] = skimkv_argmax((const char *)logits + t * row, first.dtype, op->head.rows);
        return error;
    };
    return run_team(&op->layers, steps, parts, attend, context, ids ? embedded : x, cos, sin, y, n, threads, parallel,
                    begin, end);
}

const char *skimkv_rms_norm_run(const skimkv_rms_norm *op, const void *x, void *y, int64_t n, int threads,
                                skimkv_parallel parallel) {
    const Tokens tokens{x, y, n};
    if (const char *error = skimkv::rms_norm_error(op, tokens)) return error;
    const Kernels *kernels = selected_kernels();
    if (!kernels) return NO_KERNELS;
    for_each_part(n, n * op->size, threads_for(n * op->size, threads, parallel), parallel,
                  [&](int64_t first, int64_t last) { kernels->rms_norm(op, tokens, first, last); });
    return nullptr;
}

}  // extern "C"
