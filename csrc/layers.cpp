// Runs what a model has between one attention and the next: several products as one operation, and normalisation.
#include <cstring>
#include <initializer_list>

#include "element_types.h"
#include "kernel_table.h"
#include "products.h"
#include "scratch_memory.h"
#include "skimkv.h"
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

// Scratch memory of the calling thread, which is kept between operations.
thread_local skimkv::ScratchMemory scratch;

const char *gated_error(const skimkv_gated_mlp *op, const Tokens &tokens) {
    if (!op) return "operation is NULL";
    if (tokens.n > SKIMKV_MAX_FLOAT_TOKENS) return "n must be from 1 to 64";
    for (const skimkv_matrix *m : {&op->gate, &op->up, &op->down})
        if (const char *error = matrix_error(*m, tokens)) return error;
    const Sizes gate = sizes_of(op->gate), up = sizes_of(op->up), down = sizes_of(op->down);
    const bool fits = gate.out == up.out && gate.in == up.in && gate.out == down.in;
    if (!fits || gate.dtype != up.dtype || gate.dtype != down.dtype) return "gate, up and down do not fit each other";
    return nullptr;
}

int64_t in_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Bytes of the memory that `gated` works in.
int64_t gated_bytes(const skimkv_gated_mlp *op, int64_t n) {
    const Sizes gate = sizes_of(op->gate);
    const int64_t first = input_bytes(op->gate, n) + input_bytes(op->up, n), second = input_bytes(op->down, n);
    return 2 * in_lines(n * gate.out * value_bytes(gate.dtype)) + (first > second ? first : second);
}

// y = down(silu(gate(x)) * up(x)).
void gated(const Kernels *kernels, const skimkv_gated_mlp *op, const Tokens &tokens, char *work, int threads,
           skimkv_parallel parallel) {
    const Sizes gate = sizes_of(op->gate), down = sizes_of(op->down);
    const int64_t n = tokens.n;
    char *up = work + in_lines(n * gate.out * value_bytes(gate.dtype)), *inputs = up + (up - work);
    const skimkv_matrix first[] = {op->gate, op->up};
    const Tokens first_tokens[] = {{tokens.x, work, n}, {tokens.x, up, n}}, second_tokens{work, tokens.y, n};
    multiply(kernels, first, first_tokens, 2, inputs, threads_for(2 * gate.out * gate.in, threads, parallel), parallel);
    kernels->gate(gate.dtype, work, up, n * gate.out);
    multiply(kernels, &op->down, &second_tokens, 1, inputs, threads_for(down.out * down.in, threads, parallel),
             parallel);
}

const char *layer_end_error(const skimkv_layer_end *op, const Tokens &tokens, const void *residual) {
    if (!op) return "operation is NULL";
    if (tokens.n > SKIMKV_MAX_FLOAT_TOKENS) return "n must be from 1 to 64";
    if (const char *error = matrix_error(op->o, tokens)) return error;
    if (const char *error = gated_error(&op->mlp, tokens)) return error;
    const Sizes o = sizes_of(op->o), gate = sizes_of(op->mlp.gate), down = sizes_of(op->mlp.down);
    if (o.out != gate.in || o.out != down.out || o.dtype != gate.dtype) return "o and mlp do not fit each other";
    if (!op->norm || !residual) return "norm or residual is NULL";
    if (!(op->eps >= 0)) return "eps must be at least 0";
    if (skimkv::is_misaligned(op->norm, o.dtype) || skimkv::is_misaligned(residual, o.dtype))
        return "norm or residual is not aligned to its elements";
    return nullptr;
}

const char *projections_error(const skimkv_projections *op, const Tokens tokens[3], const void *cos, const void *sin) {
    if (!op) return "operation is NULL";
    if (tokens->n > SKIMKV_MAX_FLOAT_TOKENS) return "n must be from 1 to 64";
    const skimkv_matrix *matrices[] = {&op->q, &op->k, &op->v};
    for (int i = 0; i < 3; i++)
        if (const char *error = matrix_error(*matrices[i], tokens[i])) return error;
    const Sizes q = sizes_of(op->q), k = sizes_of(op->k), v = sizes_of(op->v);
    if (q.in != k.in || q.in != v.in || q.dtype != k.dtype || q.dtype != v.dtype)
        return "q, k and v do not fit each other";
    if (op->D < 2 || op->D > SKIMKV_MAX_HEAD || op->D % 2) return "D must be even and from 2 to 576";
    if (q.out % op->D || k.out % op->D || v.out % op->D) return "the outputs of q, k and v must be heads of D";
    if (!cos || !sin) return "cos or sin is NULL";
    if (!op->q_norm != !op->k_norm) return "q and k are normalised, or neither is";
    if (op->q_norm && (!(op->q_eps >= 0) || !(op->k_eps >= 0))) return "eps must be at least 0";
    if (op->norm && !(op->eps >= 0)) return "eps must be at least 0";
    for (const void *p : {cos, sin, op->norm, op->q_norm, op->k_norm})
        if (skimkv::is_misaligned(p, q.dtype)) return "cos, sin or the weights of a normalisation are not aligned";
    return nullptr;
}

const char *layers_error(const skimkv_layers *op, const void *x, const void *cos, const void *sin, void *y, int64_t n) {
    if (!op) return "operation is NULL";
    if (!op->layers || op->count < 1) return "there must be at least one layer";
    const Tokens tokens[] = {{x, y, n}, {x, y, n}, {x, y, n}};
    Sizes of_first{};
    for (int64_t i = 0; i < op->count; i++) {
        const skimkv_projections *before = op->layers[i].before;
        const skimkv_layer_end *after = op->layers[i].after;
        if (const char *error = projections_error(before, tokens, cos, sin)) return error;
        if (const char *error = layer_end_error(after, tokens[0], x)) return error;
        const Sizes q = sizes_of(before->q), o = sizes_of(after->o);
        if (i == 0) of_first = q;
        if (sizes_of(before->k).out != sizes_of(before->v).out) return "k and v of a layer differ in size";
        if (q.in != of_first.in || o.out != q.in || o.in != q.out || q.dtype != of_first.dtype || o.dtype != q.dtype ||
            before->D != op->layers[0].before->D)
            return "the layers do not fit each other";
    }
    if (!op->norm || skimkv::is_misaligned(op->norm, of_first.dtype)) return "norm is NULL, or not aligned";
    if (!(op->eps >= 0)) return "eps must be at least 0";
    return nullptr;
}

// Whether a step of attention is that of n tokens as the projections give them.
const char *step_error(const skimkv_op *step, const skimkv_projections *before, int64_t n) {
    if (const char *error = skimkv_check(step)) return error;
    const skimkv_cache *c = step->cache;
    const Sizes q = sizes_of(before->q);
    const int64_t keys = sizes_of(before->k).out, D = before->D, GD = c->G * D;
    if (c->B != n || c->D != D || c->H * D != keys || c->H * GD != q.out) return "a cache does not fit its layer";
    if (step->dtype != q.dtype || c->dtype != q.dtype) return "a cache is not of its layer's dtype";
    if (step->q_b != q.out || step->q_h != GD || step->q_g != D || step->y_b != q.out || step->y_h != GD ||
        step->y_g != D || step->n_b != keys || step->n_h != D)
        return "queries, outputs and new rows of a step must be contiguous";
    return step->keep == SKIMKV_OUTSIDE ? "a step must keep its token" : nullptr;
}

// Where a token is between the parts of a layer.
struct States {
    char *queries, *keys, *values, *attended, *tokens[2];
};

// Scratch memory for the states, which the operations inside do not use. Null pointers if there is no memory.
States states_of(const skimkv_layers *op, int64_t n) {
    static thread_local skimkv::ScratchMemory memory;
    int64_t queries = 0, keys = 0;
    for (int64_t i = 0; i < op->count; i++) {
        const int64_t q = sizes_of(op->layers[i].before->q).out, k = sizes_of(op->layers[i].before->k).out;
        queries = q > queries ? q : queries, keys = k > keys ? k : keys;
    }
    const Sizes first = sizes_of(op->layers->before->q);
    const int64_t bytes = n * value_bytes(first.dtype), of_q = in_lines(queries * bytes), of_k = in_lines(keys * bytes);
    const int64_t of_tokens = in_lines(first.in * bytes);
    char *const start = (char *)memory.get((size_t)(2 * (of_q + of_k + of_tokens)));
    if (!start) return {};
    char *const tokens = start + 2 * (of_q + of_k);
    return {start, start + 2 * of_q, start + 2 * of_q + of_k, start + of_q, {tokens, tokens + of_tokens}};
}

}  // namespace

extern "C" {

const char *skimkv_gated_mlp_run(const skimkv_gated_mlp *op, const void *x, void *y, int64_t n, int threads,
                                 skimkv_parallel parallel) {
    if (const char *error = gated_error(op, {x, y, n})) return error;
    const Kernels *kernels = selected_kernels();
    if (!kernels) return NO_KERNELS;
    char *work = (char *)scratch.get((size_t)gated_bytes(op, n));
    if (!work) return NO_MEMORY;
    gated(kernels, op, {x, y, n}, work, threads, parallel);
    return nullptr;
}

const char *skimkv_layer_end_run(const skimkv_layer_end *op, const void *x, const void *residual, void *y, int64_t n,
                                 int threads, skimkv_parallel parallel) {
    if (const char *error = layer_end_error(op, {x, y, n}, residual)) return error;
    const Kernels *kernels = selected_kernels();
    if (!kernels) return NO_KERNELS;
    const Sizes o = sizes_of(op->o);
    const int64_t count = n * o.out, bytes = in_lines(count * value_bytes(o.dtype));
    const int64_t first = input_bytes(op->o, n), second = gated_bytes(&op->mlp, n);
    char *const values = (char *)scratch.get((size_t)(bytes + (first > second ? first : second)));
    if (!values) return NO_MEMORY;
    char *const work = values + bytes;
    const skimkv_rms_norm norm{op->norm, o.out, op->eps, o.dtype};
    const Tokens tokens{x, y, n};
    multiply(kernels, &op->o, &tokens, 1, work, threads_for(o.out * o.in, threads, parallel), parallel);
    kernels->add(o.dtype, y, residual, count);
    kernels->rms_norm(&norm, {y, values, n}, 0, n);
    gated(kernels, &op->mlp, {values, values, n}, work, threads, parallel);
    kernels->add(o.dtype, y, values, count);
    return nullptr;
}

const char *skimkv_projections_run(const skimkv_projections *op, const void *x, const void *cos, const void *sin,
                                   void *queries, void *keys, void *values, int64_t n, int threads,
                                   skimkv_parallel parallel) {
    Tokens tokens[] = {{x, queries, n}, {x, keys, n}, {x, values, n}};
    if (const char *error = projections_error(op, tokens, cos, sin)) return error;
    const Kernels *kernels = selected_kernels();
    if (!kernels) return NO_KERNELS;
    const Sizes q = sizes_of(op->q), k = sizes_of(op->k), v = sizes_of(op->v);
    const int64_t size = value_bytes(q.dtype), D = op->D, heads[] = {q.out / D, k.out / D};
    const int64_t normed_bytes = op->norm ? in_lines(n * q.in * size) : 0;
    const int64_t all_inputs = input_bytes(op->q, n) + input_bytes(op->k, n) + input_bytes(op->v, n);
    char *const normed = (char *)scratch.get((size_t)(normed_bytes + all_inputs)), *const inputs =
                                                                                       normed + normed_bytes;
    if (!normed) return NO_MEMORY;
    if (op->norm) {
        const skimkv_rms_norm norm{op->norm, q.in, op->eps, q.dtype};
        kernels->rms_norm(&norm, {x, normed, n}, 0, n);
        for (Tokens &part : tokens) part.x = normed;
    }
    const skimkv_matrix matrices[] = {op->q, op->k, op->v};
    threads = threads_for((q.out + k.out + v.out) * q.in, threads, parallel);
    multiply(kernels, matrices, tokens, 3, inputs, threads, parallel);
    if (op->q_norm) {
        const skimkv_rms_norm of_q{op->q_norm, D, op->q_eps, q.dtype}, of_k{op->k_norm, D, op->k_eps, q.dtype};
        kernels->rms_norm(&of_q, {queries, queries, n * heads[0]}, 0, n * heads[0]);
        kernels->rms_norm(&of_k, {keys, keys, n * heads[1]}, 0, n * heads[1]);
    }
    for (int64_t t = 0; t < n; t++) {
        const char *c = (const char *)cos + t * D * size, *s = (const char *)sin + t * D * size;
        kernels->rotate(q.dtype, c, s, heads[0], (int)D, (char *)queries + t * q.out * size);
        kernels->rotate(q.dtype, c, s, heads[1], (int)D, (char *)keys + t * k.out * size);
    }
    return nullptr;
}

const char *skimkv_layers_run(const skimkv_layers *op, skimkv_op *const *steps, const void *x, const void *cos,
                              const void *sin, void *y, int64_t n, int threads, skimkv_parallel parallel) {
    if (const char *error = layers_error(op, x, cos, sin, y, n)) return error;
    if (!selected_kernels()) return NO_KERNELS;
    const States states = states_of(op, n);
    if (!states.queries) return NO_MEMORY;
    for (int64_t i = 0; steps && i < op->count; i++) {
        if (!steps[i]) return "a step is NULL";
        steps[i]->q = states.queries, steps[i]->y = states.attended;
        steps[i]->k_new = states.keys, steps[i]->v_new = states.values;
        if (const char *error = step_error(steps[i], op->layers[i].before, n)) return error;
    }
    const Sizes first = sizes_of(op->layers->before->q);
    const void *now = x;
    for (int64_t i = 0; i < op->count; i++) {
        const skimkv_projections *before = op->layers[i].before;
        char *const next = states.tokens[i % 2];
        const char *error = skimkv_projections_run(before, now, cos, sin, states.queries, states.keys, states.values, n,
                                                   threads, parallel);
        if (error) return error;
        if (steps) {
            error =
                skimkv_step(steps[i], states.queries, states.attended, states.keys, states.values, threads, parallel);
        } else {
            std::memset(states.attended, 0, (size_t)(n * sizes_of(before->q).out * value_bytes(first.dtype)));
        }
        if (!error) error = skimkv_layer_end_run(op->layers[i].after, states.attended, now, next, n, threads, parallel);
        if (error) return error;
        now = next;
    }
    const skimkv_rms_norm norm{op->norm, first.in, op->eps, first.dtype};
    return skimkv_rms_norm_run(&norm, now, y, n, threads, parallel);
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
