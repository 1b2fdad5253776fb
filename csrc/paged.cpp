// Caches in blocks, which a serving engine owns: a step for all rows of a batch, and tokens written by their slots.
//
// A row of the batch is a cache of one row, whose chunks are its blocks in order, or whose slots are one block. So
// every kernel works on blocks as it does on chunks, and all rows share one start of the threads: a thread that finds
// no task left in a row goes on to the next one, and waits for nobody.
#include <atomic>
#include <cstring>

#include "element_types.h"
#include "kernel_table.h"
#include "scratch_memory.h"
#include "skimkv.h"
#include "threads.h"

namespace {

using skimkv::is_misaligned;
using skimkv::Kernels;
using skimkv::ScratchMemory;
using skimkv::selected_kernels;
using skimkv::usable_threads;
using skimkv::value_bytes;

thread_local ScratchMemory rows_memory, work_memory, runs_memory;

// Several threads are started for as many rows as have less scratch memory than this. One thread takes row after row,
// so that each finds the scratch memory of the one before in the CPU's caches.
constexpr size_t WORK_AT_ONCE = 4 << 20;

// Tokens that one task writes at most.
constexpr int64_t TOKENS_OF_A_RUN = 128;

bool is_quantised(const skimkv_cache *c) { return c->channels >= SKIMKV_INT8; }

// What blocks of both kinds have in common.
const char *validate_memory(const skimkv_cache *c, const skimkv_paged *p) {
    if (!c || !p) return "cache or blocks are NULL";
    if (c->B < 1 || c->H < 1 || c->G < 1) return "B, H and G must be at least 1";
    if (c->D < 1 || c->D > SKIMKV_MAX_HEAD) return "D must be from 1 to 576";
    if (c->dtype < SKIMKV_F32 || c->dtype > SKIMKV_F16) return "cache dtype is unknown";
    if (c->mean || c->projection) return "the cache of blocks has no mean and no projection";
    if (p->block.start != 0) return "a block starts at 0";
    if (p->blocks < 1 || p->bytes < 1 || p->bytes % value_bytes(c->dtype))
        return "there must be blocks, and their distance must be a multiple of an element";
    if (!p->block.k || !p->block.v) return "a block's k or v is NULL";
    return nullptr;
}

// Blocks of tokens that follow each other.
const char *validate_blocks(const skimkv_cache *c, const skimkv_paged *p) {
    if (const char *error = validate_memory(c, p)) return error;
    if (p->block.cap < SKIMKV_GROUP || p->block.cap % SKIMKV_GROUP) return "blocks must be of a multiple of 256 tokens";
    if (is_quantised(c) && (!p->open || (p->o_r != p->block.cap && p->o_r != SKIMKV_GROUP)))
        return "blocks of a quantised index need `open`, of a block or of a group";
    if ((is_quantised(c) || p->mean) && p->bytes % 4)
        return "blocks with an index or a mean need a distance that is a multiple of 4";
    if (!p->mean != !p->counts) return "mean and counts must be given together";
    if (!p->block.means != !p->coded) return "means of groups and `coded` must be given together";
    if (p->block.means && (c->channels != SKIMKV_INT4 || !p->mean))
        return "means of groups are for blocks with an index of 4 bits and a mean";
    return nullptr;
}

// Blocks of slots, of which every row has one.
const char *validate_slots(const skimkv_op *op, const skimkv_paged *p) {
    if (const char *error = validate_memory(op->cache, p)) return error;
    if (op->score && p->bytes % 4) return "blocks with scores need a distance that is a multiple of 4";
    if (p->open || p->mean || p->counts || p->block.means || p->coded)
        return "blocks of slots have no index and no mean";
    if (!op->k_new || !op->v_new || !op->slot) return "a step over slots needs the new rows and their slots";
    if (is_misaligned(op->k_new, op->cache->dtype) || is_misaligned(op->v_new, op->cache->dtype))
        return "k_new or v_new is not aligned";
    return nullptr;
}

// Block number i as a chunk that begins at position `start`.
skimkv_chunk chunk_of_block(const skimkv_paged *p, int64_t number, int64_t start) {
    const int64_t at = number * p->bytes;
    skimkv_chunk chunk = p->block;
    chunk.start = start;
    chunk.k = (const char *)chunk.k + at, chunk.v = (const char *)chunk.v + at;
    if (chunk.index) chunk.index = (const char *)chunk.index + at;
    if (chunk.scale) chunk.scale = (const float *)((const char *)chunk.scale + at);
    if (chunk.means) chunk.means = (const char *)chunk.means + at;
    return chunk;
}

// The keys of the incomplete group of a quantised index that begins at position `at` of a block.
const void *open_group_of_block(const skimkv_cache *c, const skimkv_paged *p, int64_t number, int64_t at) {
    return (const char *)p->open + number * p->bytes + at % p->o_r * value_bytes(c->dtype);
}

// The mean of V in block number i for head h, and how many tokens it is of.
float *mean_of_block(const skimkv_paged *p, int64_t number, int64_t h) {
    return (float *)((char *)p->mean + number * p->bytes) + h * p->m_h;
}
int32_t *count_of_block(const skimkv_paged *p, int64_t number, int64_t h) {
    return (int32_t *)((char *)p->counts + number * p->bytes) + h * p->n_h;
}

// How many tokens of the first group of block number i have codes for head h.
int32_t *coded_in_block(const skimkv_paged *p, int64_t number, int64_t h) {
    return (int32_t *)((char *)p->coded + number * p->bytes) + h * p->n_h;
}

// Joins the means of the blocks of row b, which has n tokens, into mean [H,D].
const char *join_means(const skimkv_cache *c, const skimkv_paged *p, int b, int64_t n, float *mean) {
    const int64_t cap = p->block.cap;
    for (int h = 0; h < c->H; h++) {
        for (int d = 0; d < c->D; d++) mean[h * c->D + d] = 0;
        for (int64_t start = 0; start < n; start += cap) {
            const int64_t number = p->table[b * p->table_b + start / cap], count = n - start < cap ? n - start : cap;
            if (*count_of_block(p, number, h) != count) return "a block's mean is not of the tokens that the row has";
            const float *block = mean_of_block(p, number, h), share = (float)count / (float)n;
            for (int d = 0; d < c->D; d++) mean[h * c->D + d] += share * block[d];
        }
    }
    return nullptr;
}

// Makes a cache of one row of another one, or of the tokens of one block: its chunks and its tail are set later.
skimkv_cache one_row(const skimkv_cache *c, const skimkv_paged *p) {
    skimkv_cache row = *c;
    row.B = 1, row.t_b = 0, row.t_h = p->o_h, row.t_r = p->o_r, row.tail = nullptr;
    return row;
}

bool needs_mean(const skimkv_op *op) { return op->use_mean || op->method == SKIMKV_SKIM; }

struct Row {
    skimkv_cache cache;
    skimkv_op op;
    size_t work_bytes;
};

// The operation of row b: its part of what the caller gives for all rows.
skimkv_op part_of_row(const skimkv_op *op, int b) {
    skimkv_op part = *op;
    part.q = (const char *)op->q + b * op->q_b * value_bytes(op->dtype);
    part.y = (char *)op->y + b * op->y_b * value_bytes(op->dtype);
    if (op->rows_read) part.rows_read = op->rows_read + 2 * b;
    return part;
}

// Fills in row b, whose slots are one block, which becomes the chunk.
const char *make_row_of_slots(const skimkv_op *op, const skimkv_paged *p, int b, Row *row, skimkv_chunk *chunk) {
    const skimkv_cache *c = op->cache;
    const int64_t number = p->table[b * p->table_b], at = number * p->bytes;
    const int64_t new_row = b * op->n_b * value_bytes(c->dtype);
    if (number < 0 || number >= p->blocks) return "the table names a block that does not exist";
    *chunk = chunk_of_block(p, number, 0);
    row->cache = one_row(c, p);
    row->cache.lengths = c->lengths + b, row->cache.chunks = chunk, row->cache.n_chunks = 1;
    row->op = part_of_row(op, b);
    row->op.cache = &row->cache;
    row->op.k_new = (const char *)op->k_new + new_row, row->op.v_new = (const char *)op->v_new + new_row;
    row->op.slot = op->slot + b;
    if (op->score) {
        row->op.score = (float *)((char *)op->score + at), row->op.pos = (int32_t *)((char *)op->pos + at);
        row->op.now = op->now + b, row->op.recent = op->recent + b;
    }
    return skimkv_check(&row->op);
}

// Fills in row b, whose chunks are written to `chunks`, and whose mean [H,D] to `mean`.
const char *make_row(const skimkv_op *op, const skimkv_paged *p, int b, Row *row, skimkv_chunk *chunks, float *mean) {
    const skimkv_cache *c = op->cache;
    const int64_t cap = p->block.cap, n = c->lengths[b], count = (n + cap - 1) / cap;
    row->cache = one_row(c, p);
    row->cache.lengths = c->lengths + b, row->cache.chunks = chunks, row->cache.n_chunks = (int32_t)count;
    for (int64_t i = 0; i < count; i++) {
        const int64_t number = p->table[b * p->table_b + i];
        if (number < 0 || number >= p->blocks) return "the table names a block that does not exist";
        chunks[i] = chunk_of_block(p, number, i * cap);
    }
    if (is_quantised(c)) {
        const int64_t number = p->table[b * p->table_b + count - 1], last = (n - 1) % cap / SKIMKV_GROUP * SKIMKV_GROUP;
        row->cache.tail = open_group_of_block(c, p, number, last);
    }
    if (needs_mean(op)) {
        if (!p->mean) return op->use_mean ? "use_mean needs blocks with a mean" : "Skim needs blocks with a mean";
        if (const char *error = join_means(c, p, b, n, mean)) return error;
        row->cache.mean = mean, row->cache.m_h = c->D;
    }
    row->op = part_of_row(op, b);
    row->op.cache = &row->cache;
    return skimkv_check(&row->op);
}

// Codes the new tokens of all rows whose last, incomplete group is the first one of its block, by the scale of the
// group before it: only a step knows which block comes before.
void code_open_groups(const Kernels *kernels, const skimkv_paged *p, const Row *rows, int B, int threads,
                      skimkv_parallel parallel) {
    const int64_t cap = p->block.cap, H = rows->cache.H;
    const auto is_first_of_block = [&](int64_t n) { return n > cap && n % cap > 0 && n % cap < SKIMKV_GROUP; };
    bool is_any = false;
    for (int b = 0; b < B; b++) is_any |= is_first_of_block(rows[b].cache.lengths[0]);
    if (!is_any) return;
    skimkv::for_each_task(B * H, threads, parallel, [&](int64_t unit, int) {
        const int64_t b = unit / H, h = unit % H, n = rows[b].cache.lengths[0], open = n % cap;
        if (!is_first_of_block(n)) return;
        int32_t *coded = coded_in_block(p, p->table[b * p->table_b + n / cap], h);
        if (*coded < open) kernels->code_open(&rows[b].cache, h, n - open + *coded, n), *coded = (int32_t)open;
    });
}

// Runs rows from .. to-1, whose scratch memory is `work`, on all threads at once.
void run_rows(const Kernels *kernels, Row *rows, int from, int to, char *work, int threads, skimkv_parallel parallel) {
    char *at = work;
    for (int b = from; b < to; at += rows[b++].work_bytes) {
        std::memset(at, 0, 64 + sizeof(int) * (size_t)rows[b].cache.H);
        if (rows[b].op.method == SKIMKV_SKIM) std::memset(rows[b].op.rows_read, 0, sizeof(int64_t) * 2);
    }
    skimkv::on_every_thread(threads, parallel, [&](int thread) {
        char *mine = work;
        for (int b = from; b < to; mine += rows[b++].work_bytes) kernels->attention(&rows[b].op, mine, thread, threads);
    });
}

// Tokens that follow each other in the memory of one block, and in one group of a quantised index.
struct Run {
    int64_t number, at;  // of the block, and the position of the first token in it
    skimkv_chunk chunk;
    skimkv_cache cache;
    skimkv_tokens tokens;
};

// Appends a run for head h, and counts its tokens where there is a mean: false if they do not follow the last ones.
bool append_run(const Kernels *kernels, const skimkv_cache *c, const skimkv_paged *p, const Run &run, int64_t h) {
    if (p->mean) {
        int32_t *count = count_of_block(p, run.number, h);
        if (run.at == 0) std::memset(mean_of_block(p, run.number, h), 0, c->D * sizeof(float));
        else if (*count != run.at) return false;
        *count = (int32_t)(run.at + run.tokens.n);
    }
    if (p->coded) {  // what was coded of a block is written anew
        int32_t *coded = coded_in_block(p, run.number, h);
        if (run.at == 0 || *coded > run.at) *coded = (int32_t)run.at;
    }
    kernels->append(&run.tokens, h);
    return true;
}

}  // namespace

const char *skimkv::step_in_blocks(const skimkv_op *op, int threads, skimkv_parallel parallel) {
    const skimkv_paged *paged = op->paged;
    const bool slots = op->keep == SKIMKV_SLOT;
    if (const char *error = slots ? validate_slots(op, paged) : validate_blocks(op->cache, paged)) return error;
    const skimkv_cache *c = op->cache;
    if (!paged->table || !c->lengths) return "table or lengths are missing";
    if (!slots && (op->keep != SKIMKV_OUTSIDE || op->k_new)) return "tokens are written to blocks before the step";
    if (is_misaligned(op->q, op->dtype) || is_misaligned(op->y, op->dtype)) return "q or y is not aligned";
    const Kernels *kernels = selected_kernels();
    threads = usable_threads(threads, parallel);
    int64_t blocks = 0;
    for (int b = 0; b < c->B; b++) {
        if (c->lengths[b] < 1 || c->lengths[b] > INT32_MAX - SKIMKV_GROUP) return "a row has no token, or too many";
        const int64_t count = slots ? 1 : (c->lengths[b] + paged->block.cap - 1) / paged->block.cap;
        if (count > paged->table_b) return "a row has more tokens than its part of the table has blocks";
        blocks += count;
    }
    const size_t means = needs_mean(op) ? (size_t)c->B * (size_t)c->H * (size_t)c->D * sizeof(float) : 0;
    char *memory = (char *)rows_memory.get(c->B * sizeof(Row) + (size_t)blocks * sizeof(skimkv_chunk) + means);
    if (!kernels) return skimkv::NO_KERNELS;
    if (!memory) return "no memory for the kernels' scratch space";
    Row *rows = (Row *)memory;
    skimkv_chunk *chunks = (skimkv_chunk *)(memory + c->B * sizeof(Row));
    float *mean = (float *)(chunks + blocks);
    for (int b = 0; b < c->B; b++) {
        if (const char *error = slots ? make_row_of_slots(op, paged, b, rows + b, chunks)
                                      : make_row(op, paged, b, rows + b, chunks, mean))
            return error;
        mean += needs_mean(op) ? c->H * c->D : 0;
        rows[b].work_bytes = (kernels->attention_scratch_bytes(&rows[b].op, threads) + 4095) / 4096 * 4096;
        chunks += rows[b].cache.n_chunks;
    }
    if (op->method == SKIMKV_SKIM) code_open_groups(kernels, paged, rows, c->B, threads, parallel);
    for (int from = 0, to; from < c->B; from = to) {
        size_t bytes = rows[from].work_bytes;
        for (to = from + 1; threads > 1 && to < c->B && bytes + rows[to].work_bytes <= WORK_AT_ONCE; to++)
            bytes += rows[to].work_bytes;
        char *work = (char *)work_memory.get(bytes);
        if (!work) return "no memory for the kernels' scratch space";
        run_rows(kernels, rows, from, to, work, threads, parallel);
    }
    return nullptr;
}

extern "C" {

const char *skimkv_append_paged(const skimkv_tokens *tokens, const skimkv_paged *paged, const int64_t *slots,
                                int threads, skimkv_parallel parallel) {
    if (!tokens) return "tokens is NULL";
    if (const char *error = validate_blocks(tokens->cache, paged)) return error;
    const skimkv_cache *c = tokens->cache;
    const int64_t n = tokens->n, cap = paged->block.cap, size = value_bytes(c->dtype);
    if (n < 0 || (n > 0 && (!tokens->k || !tokens->v || !slots))) return "n is negative, or k, v or slots is NULL";
    if (is_misaligned(tokens->k, c->dtype) || is_misaligned(tokens->v, c->dtype)) return "k or v is not aligned";
    const Kernels *kernels = selected_kernels();
    Run *runs = (Run *)runs_memory.get(((size_t)n + 1) * sizeof(Run));
    if (!kernels) return skimkv::NO_KERNELS;
    if (!runs) return "no memory for the kernels' scratch space";
    int64_t count = 0;
    for (int64_t i = 0; i < n;) {
        const int64_t first = i, slot = slots[i++], at = slot < 0 ? 0 : slot % cap;
        if (slot < 0) continue;
        if (slot / cap >= paged->blocks) return "a slot is beyond the blocks";
        int64_t room = cap - at < TOKENS_OF_A_RUN ? cap - at : TOKENS_OF_A_RUN;
        if (is_quantised(c) && SKIMKV_GROUP - at % SKIMKV_GROUP < room) room = SKIMKV_GROUP - at % SKIMKV_GROUP;
        while (i < n && i - first < room && slots[i] == slot + i - first) i++;
        Run *run = runs + count++;
        run->number = slot / cap, run->at = at;
        run->chunk = chunk_of_block(paged, slot / cap, 0);
        run->cache = one_row(c, paged);
        run->cache.chunks = &run->chunk, run->cache.n_chunks = 1, run->cache.lengths = &run->at;
        if (is_quantised(c))
            run->cache.tail = open_group_of_block(c, paged, slot / cap, at / SKIMKV_GROUP * SKIMKV_GROUP);
        run->tokens = *tokens;
        run->tokens.cache = &run->cache, run->tokens.n = i - first, run->tokens.skip = nullptr;
        run->tokens.at = &run->at;
        run->tokens.k = (const char *)tokens->k + first * tokens->k_n * size;
        run->tokens.v = (const char *)tokens->v + first * tokens->v_n * size;
        if (paged->mean) run->cache.mean = mean_of_block(paged, slot / cap, 0), run->cache.m_h = paged->m_h;
        if (const char *error = skimkv_check_append(&run->tokens)) return error;
    }
    // A run that completes a group of the index reads what other runs write, and a mean grows token by token: the runs
    // of a head keep their order.
    std::atomic<bool> is_in_order{true};
    skimkv::for_each_task(c->H, threads, parallel, [&](int64_t h, int) {
        for (int64_t i = 0; i < count; i++)
            if (!append_run(kernels, c, paged, runs[i], h)) return is_in_order.store(false);
    });
    return is_in_order ? nullptr : "a token does not follow the last one of its block";
}

}  // extern "C"
