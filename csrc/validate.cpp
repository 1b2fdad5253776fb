// Validates operations before they run: skimkv_check and its like return NULL, or one line that says what is wrong. Of
// the caller's memory they read the structures and the arrays of lengths and positions, but no tensor.
#include <initializer_list>

#include "element_types.h"
#include "kernel_table.h"
#include "skimkv.h"

namespace {

using skimkv::is_misaligned;

bool is_unknown_type(int dtype) { return dtype < SKIMKV_F32 || dtype > SKIMKV_F16; }

int64_t capacity(const skimkv_cache *c) {
    return c->n_chunks ? c->chunks[c->n_chunks - 1].start + c->chunks[c->n_chunks - 1].cap : 0;
}

const char *validate_pages(const skimkv_cache *c) {
    if (!c->page) return c->pages || c->n_pages ? "pages are given without their size" : nullptr;
    if (c->page < 1 || !c->pages || c->n_pages < 0) return "page is negative, or pages are missing";
    int64_t end = 0;
    for (int i = 0; i < c->n_pages; i++) {
        const skimkv_chunk *chunk = c->pages + i;
        if (chunk->start != end || chunk->cap < 1 || !chunk->k) return "chunks of pages must follow each other from 0";
        end += chunk->cap;
    }
    if (end < (capacity(c) + c->page - 1) / c->page) return "there are fewer pages than the chunks' capacity has";
    return nullptr;
}

const char *validate_cache(const skimkv_cache *c) {
    if (!c) return "cache is NULL";
    if (c->B < 1 || c->H < 1 || c->G < 1) return "B, H and G must be at least 1";
    if (c->D < 1 || c->D > SKIMKV_MAX_HEAD) return "D must be from 1 to 576";
    if (is_unknown_type(c->dtype)) return "cache dtype is unknown";
    if (c->bits != 0 && c->bits != 8 && c->bits != 4) return "rows are of 0 (as they are), 8 or 4 bits";
    if (c->bits == 4 && c->D % 2) return "rows of 4 bits need an even D";
    if (c->channels < SKIMKV_NONE || c->channels > SKIMKV_INT4) return "channels is unknown";
    if (!c->chunks || c->n_chunks < 0 || !c->lengths) return "chunks or lengths are missing";
    const bool quantised = c->channels >= SKIMKV_INT8;
    if (quantised && !c->tail) return "a quantised index needs its tail";
    int64_t end = 0;
    for (int i = 0; i < c->n_chunks; i++) {
        const skimkv_chunk *chunk = c->chunks + i;
        if (chunk->start != end || chunk->start % SKIMKV_GROUP || chunk->cap < 1)
            return "chunks must follow each other from 0, each starting at a multiple of 256";
        if (quantised && chunk->cap % SKIMKV_GROUP) return "chunks of a quantised index must be multiples of 256";
        if (!chunk->k || !chunk->v) return "a chunk's k or v is NULL";
        if (c->channels != SKIMKV_NONE && !chunk->index) return "a chunk has no index";
        if (quantised && !chunk->scale) return "a chunk of a quantised index has no scale";
        if (!chunk->means != !c->chunks->means) return "means are of all chunks or of none";
        if (chunk->means && (c->channels != SKIMKV_INT4 || c->projection))
            return "means are for an index of 4 bits, of K itself";
        end += chunk->cap;
    }
    for (int b = 0; b < c->B; b++)
        if (c->lengths[b] < 0 || c->lengths[b] > end || c->lengths[b] > INT32_MAX - SKIMKV_GROUP)
            return "a length is negative or beyond the chunks' capacity";
    return validate_pages(c);
}

// The current token, and what becomes of it.
const char *validate_new_row(const skimkv_op *op) {
    const skimkv_cache *c = op->cache;
    if (op->keep < SKIMKV_OUTSIDE || op->keep > SKIMKV_SLOT) return "keep is unknown";
    if (op->score && op->keep != SKIMKV_SLOT) return "scores are for rows that go into slots";
    if (!op->k_new) return op->keep == SKIMKV_OUTSIDE ? nullptr : "there is no new row to keep";
    if (op->keep == SKIMKV_APPEND) {
        const skimkv_tokens token = skimkv::new_token_of(op);
        return skimkv_check_append(&token);
    }
    if (op->method != SKIMKV_DENSE && op->method != SKIMKV_TOVA)
        return "a row outside the cache, or for a slot, is for dense attention only";
    if (op->keep == SKIMKV_OUTSIDE) return nullptr;
    if (!op->slot) return "slots are missing";
    if (c->channels != SKIMKV_NONE || c->mean) return "a cache with an index or a mean has no slots";
    if (op->score && (!op->pos || !op->now || !op->recent)) return "score needs pos, now and recent";
    for (int b = 0; b < c->B; b++) {
        if (op->slot[b] < (op->score || op->method == SKIMKV_TOVA ? -1 : 0) || op->slot[b] >= capacity(c))
            return "a slot is beyond the capacity";
        if (op->slot[b] < 0 && c->lengths[b] < 1) return "a row without tokens has no victim";
    }
    return nullptr;
}

}  // namespace

extern "C" {

const char *skimkv_check(const skimkv_op *op) {
    if (!op) return "operation is NULL";
    if (const char *error = validate_cache(op->cache)) return error;
    const skimkv_cache *c = op->cache;
    if (!op->q || !op->y) return "q or y is NULL";
    if (is_unknown_type(op->dtype)) return "dtype of q is unknown";
    if (op->method < SKIMKV_DENSE || op->method > SKIMKV_TOVA) return "method is unknown";
    const bool dense = op->method == SKIMKV_DENSE || op->method == SKIMKV_TOVA;
    if (op->method == SKIMKV_TOVA && (op->keep != SKIMKV_SLOT || op->score)) return "TOVA needs slots without scores";
    if (!dense && op->k < (op->method == SKIMKV_QUEST ? 0 : 1)) return "k must be at least 1, of Quest at least 0";
    if (op->method == SKIMKV_QUEST && !c->page) return "Quest needs the bounds of pages";
    if (is_misaligned(op->sinks, SKIMKV_F32)) return "sinks is not aligned to its elements";
    if (!op->k_new != !op->v_new) return "k_new and v_new must be given together";
    for (int b = 0; b < c->B; b++)
        if (c->lengths[b] < 1 && !op->k_new) return "a row has no token";
    if (const char *error = validate_new_row(op)) return error;
    if (op->method == SKIMKV_SPARQ) {
        if (op->r < 1 || op->r > c->D) return "r must be from 1 to D";
        if (op->local < 0 || op->local > op->k) return "local must be from 0 to k";
        if (op->temperature < SKIMKV_COVERAGE || op->temperature > SKIMKV_SQRT_R) return "temperature is unknown";
        if (op->use_mean && !c->mean) return "use_mean needs the mean of V";
        if (c->channels != SKIMKV_NONE && c->R != c->D) return "SparQ needs an index of R = D channels";
    } else if (op->use_mean) {
        return "use_mean is for SparQ only";
    }
    if (op->method == SKIMKV_SKIM) {
        if (op->r < 1 || op->r > c->D || c->R != c->D || c->projection)
            return "Skim needs r from 1 to D, and an index of D channels";
        if (c->channels != SKIMKV_INT4 || (c->n_chunks && !c->chunks->means))
            return "Skim needs an index of 4 bits with means";
        if (!c->mean || !op->rows_read) return "Skim needs the mean of V, and rows_read";
    }
    if (op->method == SKIMKV_LOWRANK && (!c->projection || c->channels == SKIMKV_NONE || c->R < 1 || c->R > c->D))
        return "low rank needs a projection and an index of R <= D channels";
    return nullptr;
}

const char *skimkv_check_append(const skimkv_tokens *a) {
    if (!a) return "tokens is NULL";
    if (const char *error = validate_cache(a->cache)) return error;
    const skimkv_cache *c = a->cache;
    if (a->n < 0 || (a->n > 0 && (!a->k || !a->v))) return "n is negative, or k or v is NULL";
    if ((c->channels != SKIMKV_NONE || c->projection) && (c->R < 1 || c->R > c->D || (!c->projection && c->R != c->D)))
        return "an index has D channels, or fewer with a projection";
    for (int b = 0; b < c->B; b++) {
        int64_t skip = a->skip ? a->skip[b] : 0, at = a->at ? a->at[b] : c->lengths[b];
        if (skip < 0 || skip > a->n) return "skip must be from 0 to n";
        if (at < 0 || at + a->n - skip > capacity(c)) return "the tokens do not fit into the chunks";
    }
    return nullptr;
}

const char *skimkv_columns_check(const skimkv_columns *op) {
    if (!op) return "operation is NULL";
    if (!op->q || !op->k || !op->sum) return "q, k or sum is NULL";
    if (op->H < 1 || op->G < 1 || op->parts < 1) return "H, G and parts must be at least 1";
    if (op->D < 1 || op->D > SKIMKV_MAX_HEAD) return "D must be from 1 to 576";
    if (op->n < 1 || op->m < op->n || op->m > INT32_MAX) return "n must be from 1 to m, and m below 2^31";
    if (is_unknown_type(op->dtype)) return "dtype is unknown";
    if (is_misaligned(op->q, op->dtype) || is_misaligned(op->k, op->dtype) || is_misaligned(op->sum, SKIMKV_F32) ||
        is_misaligned(op->sinks, SKIMKV_F32))
        return "q, k, sum or sinks is not aligned to its elements";
    return nullptr;
}

}  // extern "C"

namespace skimkv {

const char *tokens_error(const Tokens &tokens, int dtype) {
    if (!tokens.x || !tokens.y) return "x or y is NULL";
    if (tokens.n < 1 || tokens.n > INT32_MAX) return "n must be at least 1 and below 2^31";
    if (is_misaligned(tokens.x, dtype) || is_misaligned(tokens.y, dtype))
        return "x or y is not aligned to its elements";
    return nullptr;
}

const char *matrix_error(const skimkv_matrix *m, const MatrixKind *kind) {
    if (!m) return "matrix is NULL";
    if (!kind) return "the kind of a matrix is unknown";
    if (!m->data) return "the data of a matrix are NULL";
    if (m->rows < 1) return "rows must be at least 1";
    if (m->columns < kind->weights || m->columns % kind->weights)
        return kind->weights == 32 ? "columns must be a multiple of 32" : "columns must be a multiple of 256";
    if (m->rows > INT32_MAX || m->columns > INT32_MAX) return "a size is beyond 2^31";
    if (is_unknown_type(m->dtype)) return "dtype is unknown";
    if (is_misaligned(m->bias, m->dtype)) return "bias is not aligned to its elements";
    if ((uintptr_t)m->data % (unsigned)kind->alignment) return "the data of a matrix are not aligned to their elements";
    if (m->order && (kind->rows > 1 || !kind->expand)) return "only a matrix of blocks has an order";
    if ((uintptr_t)m->order & 3) return "order is not aligned to its elements";
    for (int64_t i = 0; m->order && i < m->rows; i++)
        if (m->order[i] < 0 || m->order[i] >= m->rows) return "order names an output that does not exist";
    return nullptr;
}

const char *turn_error(const skimkv_turn *op) {
    if (!op) return "operation is NULL";
    if (op->B < 1 || op->H < 1 || op->n < 1) return "B, H and n must be at least 1";
    if (op->D < 1 || op->D > SKIMKV_MAX_HEAD) return "D must be from 1 to 576";
    if (op->pairs < 0 || 2 * op->pairs > op->D) return "pairs must be from 0 to D/2";
    if (is_unknown_type(op->dtype)) return "dtype is unknown";
    if (!op->source || !op->to || !op->moves || (op->pairs && (!op->cos || !op->sin)))
        return "source, to, moves, cos or sin is NULL";
    if (is_misaligned(op->source, op->dtype) || is_misaligned(op->to, op->dtype))
        return "source or to is not aligned to its elements";
    return nullptr;
}

const char *prompt_error(const skimkv_prompt *op) {
    if (!op) return "operation is NULL";
    if (op->B < 1 || op->H < 1 || op->G < 1) return "B, H and G must be at least 1";
    if (op->D < 1 || op->D > SKIMKV_MAX_HEAD) return "D must be from 1 to 576";
    if (op->n < 1 || op->m < op->n || op->m > INT32_MAX - SKIMKV_GROUP)
        return "n must be from 1 to m, and m below 2^31";
    if (is_unknown_type(op->dtype)) return "dtype is unknown";
    if (!op->q || !op->k || !op->v != !op->y || (!op->v && !op->received)) return "q, k, v or y is NULL";
    for (const void *p : {op->q, op->k, op->v, (const void *)op->y})
        if (is_misaligned(p, op->dtype)) return "q, k, v or y is not aligned to its elements";
    if (op->received ? op->parts < 1 : op->parts != 0) return "parts must be at least 1 with `received`, or else 0";
    if (is_misaligned(op->received, SKIMKV_F32)) return "received is not aligned to its elements";
    return is_misaligned(op->sinks, SKIMKV_F32) ? "sinks is not aligned to its elements" : nullptr;
}

const char *rms_norm_error(const skimkv_rms_norm *op, const Tokens &tokens) {
    if (!op) return "operation is NULL";
    if (!op->w) return "w is NULL";
    if (op->size < 1 || op->size > INT32_MAX) return "size must be at least 1 and below 2^31";
    if (!(op->eps >= 0)) return "eps must be at least 0";
    if (is_unknown_type(op->dtype)) return "dtype is unknown";
    if (is_misaligned(op->w, op->dtype)) return "w is not aligned to its elements";
    return tokens_error(tokens, op->dtype);
}

}  // namespace skimkv
