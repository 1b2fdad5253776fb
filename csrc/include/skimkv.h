/* skimkv: one decode step of attention over a key-value cache of which only a part is read. This is the whole C
 * interface: plain C, without dependencies.
 *
 * Letters: B batch, H KV heads, G query heads per KV head, N cached tokens, D head size, R channels of the index.
 * b, h, g, d, p and c are places in B, H, G, D, N and R.
 *
 * All strides are in elements; strides of quantised rows and of a quantised index are in bytes. The dimension D of q,
 * k, v and y, and the positions of an index, have stride 1. D is at most 576; multiples of 8 from 16 on are fast.
 *
 * Row b of the batch has lengths[b] tokens at the positions 0 .. lengths[b]-1. The last one is the current token, which
 * is always attended to and is not counted in k.
 *
 * A function with `check` in its name validates an operation: it returns NULL, or one line that says what is wrong. A
 * function that runs an operation assumes that it is valid; it returns 0, or -1 if there is no memory or no instruction
 * set. */
#ifndef SKIMKV_H
#define SKIMKV_H

#include <stddef.h>
#include <stdint.h>

#define SKIMKV_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

#define SKIMKV_VERSION 22
#define SKIMKV_GROUP 256    /* tokens that share a scale in a quantised index */
#define SKIMKV_MAX_HEAD 576 /* the largest D, a multiple of 64 */
#define SKIMKV_ROW_SPAN 64  /* channels of a quantised row that share a range */

/* Element types. */
enum { SKIMKV_F32, SKIMKV_BF16, SKIMKV_F16 };
/* The index, a channel-major form of K: none, a copy, or quantised to 8 or 4 bits. */
enum { SKIMKV_NONE, SKIMKV_COPY, SKIMKV_INT8, SKIMKV_INT4 };
/* Methods: dense attention, SparQ, low-rank keys, top-k, top-k whose weights are divided by their sum, Skim, which
 * always attends to the first SKIMKV_SKIM_FIRST tokens and to SKIMKV_SKIM_LAST before the current one, Quest, and TOVA:
 * dense attention to slots, of which the heads of a row overwrite the same one. */
enum { SKIMKV_DENSE, SKIMKV_SPARQ, SKIMKV_LOWRANK, SKIMKV_TOPK, SKIMKV_ORACLE, SKIMKV_SKIM, SKIMKV_QUEST, SKIMKV_TOVA };
#define SKIMKV_SKIM_FIRST 4
#define SKIMKV_SKIM_LAST 16
/* SparQ's temperature: the paper's sqrt(D |q[i1]|_1 / |q|_1), or a constant. */
enum { SKIMKV_COVERAGE, SKIMKV_SQRT_D, SKIMKV_SQRT_R };
/* What becomes of a new row: it is only attended to, appended before the step, or put into a slot after the step. */
enum { SKIMKV_OUTSIDE, SKIMKV_APPEND, SKIMKV_SLOT };

/* The memory of positions start .. start+cap-1 of every row. Memory of positions without a token is never read. */
typedef struct skimkv_chunk {
    int64_t start, cap;
    const void *k, *v; /* k[b,h,p,d] at b*k_b + h*k_h + (p-start)*k_n + d */
    const void *index; /* index[b,h,c,p] at b*x_b + h*x_h + c*x_r + (p-start); NULL for SKIMKV_NONE */
    /* A key is scale*code + zero: scale of the chunk's group g at b*s_b + h*s_h + g*s_g + c*s_r, zero at s_z more. */
    const float *scale;
    int64_t k_b, k_h, k_n, v_b, v_h, v_n;
    int64_t x_b, x_h, x_r;
    int64_t s_b, s_h, s_g, s_z, s_r;
    /* The mean of every channel over every full group, in the cache's dtype: means[b,h,g,c] at b*e_b + h*e_h + g*e_g +
     * c; or NULL. Where means are kept, the last, incomplete group is in the index too, as codes by the scale of the
     * group before it. */
    const void *means;
    int64_t e_b, e_h, e_g;
} skimkv_chunk;

/* A cache.
 *
 * An index of 4 bits has 64 bytes for 128 tokens, which are 16 little-endian words of 32 bits: token j is nibble j/16
 * of word j%16. Chunks of a quantised index start at multiples of 256. The last, incomplete group of a row is not
 * quantised: it is in `tail`, at position % 256.
 *
 * Rows of K and V are of type dtype or, if `bits` is 8 or 4, quantised. A quantised row begins with the ranges: for
 * every 64 channels the smallest value `low` and the largest one `high`, as float16. After them come the codes, for
 * every 64 channels (or the rest, n channels) n*bits/8 bytes; a channel is low + code * (high - low) / (2^bits - 1). Of
 * 4 bits, the low nibble of byte i is channel i, and the high nibble is channel i + n/2; D must then be even. Before a
 * row is quantised to 4 bits, every 64 channels are multiplied by Sylvester's Hadamard matrix of that size, divided by
 * its root; of n channels that rest, every m, which is the largest power of two that divides n. The matrix is its own
 * inverse: the index and the mean are made of the rows that it makes of the dequantised ones. A new row is attended to
 * as the cache will hold it. */
typedef struct skimkv_cache {
    int32_t B, H, G, D, R;
    int32_t dtype, channels, n_chunks;
    const skimkv_chunk *chunks; /* ascending and without gaps from position 0 */
    const int64_t *lengths;     /* B */
    const void *tail;           /* [b,h,c,256] in dtype: a quantised index's open group; with means only the first */
    const float *mean;          /* [b,h,d] the running mean of V, or NULL */
    const float *projection;    /* [h,d,R] contiguous, for SKIMKV_LOWRANK */
    int64_t t_b, t_h, t_r, m_b, m_h;
    int32_t bits; /* of quantised rows; 0: rows are of dtype */
    /* Quest: the bounds of keys of pages of `page` tokens, in chunks with pages in the place of positions. The row k of
     * a page has 2D elements of dtype: the smallest key in each channel, then the largest; nothing else of these chunks
     * is used. The last page of a row may be open, and its bounds are those so far. `page` is 0, and the others NULL
     * and 0, without bounds. */
    int32_t page, n_pages;
    const skimkv_chunk *pages;
} skimkv_cache;

/* A cache in blocks that a serving engine owns. Every block has room for block.cap tokens, a multiple of 256, and a row
 * of the batch has some of the blocks, in any order. `block` describes block number 0; its `start` is 0 and its batch
 * strides are not used. Block number i lies i*bytes further, and so do its index, its scales and its means. Of the
 * cache, B, H, G, D, R, dtype, bits, channels and lengths are used.
 *
 * The tokens of a step are in the blocks already. But if op->keep is SKIMKV_SLOT, every row has one block of block.cap
 * slots, of any number, whose rows may be quantised: number table[b*table_b]. op->score and op->pos are those of block
 * number 0; those of block number i lie i*bytes further, and c_b is not used. The new rows go into their slots. */
typedef struct skimkv_paged {
    skimkv_chunk block;
    int64_t bytes, blocks;
    const int32_t *table; /* block i of row b is number table[b*table_b + i]; a row has room for table_b numbers */
    int64_t table_b;
    /* For a quantised index: K in dtype, channel by channel, of a whole block (o_r = block.cap) or of its last group
     * (o_r = 256): open[h,c,p] at h*o_h + c*o_r + p % o_r. The last, incomplete group of a row is read from it, and
     * full groups are quantised from it. */
    const void *open;
    int64_t o_h, o_r;
    /* The mean of V over the tokens of a block, mean[h,d] at h*m_h + d, and how many these are, counts[h] at h*n_h; or
     * NULL. The mean of SparQ and Skim is made of them. */
    float *mean;
    int32_t *counts;
    int64_t m_h, n_h;
    /* Where means of groups are kept: how many tokens of a block's first group have codes by the scale of the group
     * before, which lies in another block, coded[h] at h*n_h; or NULL. A step makes the codes of those that follow. */
    int32_t *coded;
} skimkv_paged;

/* One decode step of attention. */
typedef struct skimkv_op {
    const skimkv_cache *cache;
    const void *q; /* [b,h,g,d] */
    void *y;       /* [b,h,g,d] */
    int64_t q_b, q_h, q_g, y_b, y_h, y_g;
    int32_t dtype; /* of q and y */
    int32_t method;
    float scale, softcap; /* logits = scale q.k; if softcap is not 0, softcap*tanh(logits/softcap) */
    int64_t r;            /* SparQ and Skim: channels */
    int64_t k;            /* positions besides the current one, for Skim besides those drawn; not for dense attention.
                           * Quest: pages besides the one of the current token, from 0 on */
    int64_t local;        /* SparQ: how many of the k are the last ones */
    int32_t temperature;  /* SparQ */
    int32_t use_mean;     /* SparQ: the mean of V gets the weight of what is not attended to */
    const void *k_new, *v_new; /* the current token [b,h,d] in the cache's dtype, or NULL if the cache has it */
    int64_t n_b, n_h;
    int32_t keep; /* what becomes of k_new; lengths do not count it yet. OUTSIDE: dense only; SLOT: dense, TOVA */
    const int64_t *slot; /* SLOT: [b] the position that k_new overwrites; -1: every head chooses it by score,
                          * or TOVA the one with the least softmax weight, the mean over all heads of the row; the new
                          * token is dropped if its own is less */
    /* Heavy hitters (SLOT): softmax weights, averaged over the group, are added to `score`. The slot with the lowest
     * score is overwritten, of those whose position `pos` is not among the recent[b] before now[b], the new token's. If
     * recent[b] is 0, the new token itself may be the lowest; it is then dropped. */
    float *score; /* [b,h,slot], or NULL */
    int32_t *pos;
    int64_t c_b, c_h; /* of score and pos */
    const int64_t *now, *recent;
    /* Skim: [b,2] rows of K and of V that were read, without the current token's. skimkv_share adds to them; the
     * functions that take a whole step set them. */
    int64_t *rows_read;
    /* Attention sinks: a logit of every query head that joins the sum of each of its softmaxes, and has no value. It is
     * neither scaled nor capped; -INFINITY is no sink, and any other number is finite. */
    const float *sinks;        /* [h,g] contiguous, or NULL */
    const skimkv_paged *paged; /* the blocks of a serving engine that have the cache's memory, or NULL: its chunks do */
    int64_t *stage_ns;         /* [SKIMKV_STAGES] where the nanoseconds of all threads are added up, or NULL */
} skimkv_op;

/* n new tokens for every row of the cache. The cache's memory is written although its pointers are const: rows of K and
 * V, the index or its tail, the codes of groups that become full, and the running mean. Row b drops its first skip[b]
 * tokens (none if skip is NULL), and the next one goes to position at[b] (lengths[b] if `at` is NULL). lengths do not
 * count the new tokens yet. */
typedef struct skimkv_tokens {
    const skimkv_cache *cache;
    const void *k, *v; /* [b,h,i,d] in the cache's dtype */
    int64_t n, k_b, k_h, k_n, v_b, v_h, v_n;
    const int64_t *skip, *at;
} skimkv_tokens;

/* A function that runs fn(data) on n threads and returns when all have finished. GOMP_parallel has this type. */
typedef void (*skimkv_parallel)(void (*fn)(void *), void *data, unsigned n, unsigned flags);

SKIMKV_API int skimkv_version(void);

/* Where every field of the structures of this header lies, for callers that write these structures down again. The row
 * of a whole structure comes before those of its fields: its field is NULL, and its size is that of the structure. */
typedef struct skimkv_field {
    const char *structure, *field;
    int64_t offset, size;
} skimkv_field;

SKIMKV_API const skimkv_field *skimkv_fields(int64_t *count);

SKIMKV_API const char *skimkv_check(const skimkv_op *op);

/* Runs one step on at most `threads` threads of `parallel`, or on the calling thread if that is NULL. Fewer are used
 * while other processes take cores; the result does not depend on that. */
SKIMKV_API int skimkv_run(const skimkv_op *op, int threads, skimkv_parallel parallel);

/* Sets q, y, k_new and v_new of the operation (NULL: no new row), validates it and the alignment of these pointers, and
 * runs it. Returns NULL, or one line that says what is wrong. */
SKIMKV_API const char *skimkv_step(skimkv_op *op, const void *q, void *y, const void *k_new, const void *v_new,
                                   int threads, skimkv_parallel parallel);

/* The stages of a step: the query is loaded and its channels are chosen; positions are scored; some are chosen; their
 * rows are requested from memory; they are attended to; the new row is put into the cache. */
enum {
    SKIMKV_STAGE_PREPARE,
    SKIMKV_STAGE_SCORE,
    SKIMKV_STAGE_CHOOSE,
    SKIMKV_STAGE_FETCH,
    SKIMKV_STAGE_ATTEND,
    SKIMKV_STAGE_APPEND,
    SKIMKV_STAGES
};

/* Appends tokens to a cache. */
SKIMKV_API const char *skimkv_check_append(const skimkv_tokens *tokens);
SKIMKV_API int skimkv_append(const skimkv_tokens *tokens, int threads, skimkv_parallel parallel);

/* Keys that move to other positions of their text. Keys of rotary position embeddings are turned: of the pairs of
 * channels f = 0 .. pairs-1, (a, b) becomes (a cos - b sin, b cos + a sin). The pairs are (2f, 2f+1) if `interleaved`,
 * else (f, f + pairs); other channels are copied. */
typedef struct skimkv_turn {
    const void *source; /* [b,h,i,d] */
    void *to;           /* likewise; it does not overlap with `source` */
    int64_t f_b, f_h, f_n, t_b, t_h, t_n;
    const float *cos, *sin;    /* [b,pairs] contiguous */
    const int64_t *moves;      /* [b] a row with 0 is left as it is */
    int32_t B, H, n, D, pairs; /* n keys of each head */
    int32_t interleaved, dtype;
} skimkv_turn;

/* Validates, turns the keys in the calling thread, and returns as skimkv_step. */
SKIMKV_API const char *skimkv_turn_keys(const skimkv_turn *op);

/* Writes tokens to blocks: token i [h,d] at i*k_n + h*k_h goes to position slots[i] % block.cap of block number
 * slots[i] / block.cap; a token with a negative slot is left out. The tokens of a block must be written in order. The
 * table, `skip` and `at` are not used. Validates, runs, and returns as skimkv_step. */
SKIMKV_API const char *skimkv_append_paged(const skimkv_tokens *tokens, const skimkv_paged *paged, const int64_t *slots,
                                           int threads, skimkv_parallel parallel);

/* A step for callers that have started their threads already, such as a custom operation of ggml: every thread ith of
 * nth calls skimkv_share with the same `work`. That is memory of skimkv_work(op, nth) bytes, which must be zero before
 * the first step and must not be changed between steps. */
SKIMKV_API size_t skimkv_work(const skimkv_op *op, int nth);
SKIMKV_API void skimkv_share(const skimkv_op *op, void *work, int ith, int nth);

/* Products y = x W^T + bias of n tokens x [n,columns] -> y [n,rows]. A structure says what the weights are, so it can
 * be made once for a matrix and used by several threads at the same time. */

/* How a matrix is stored: by GGUF's number of the type, or in panels.
 *
 * Floats of 32 or 16 bits stand row by row. Panels are 8-bit weights, blocks of 32 codes with one float16 scale as in
 * GGUF's Q8_0: the blocks of sixteen rows follow each other in 544 bytes, 16 scales, then 16 times two codes of each
 * row; a last panel of fewer rows is padded with zeros. All others are the blocks of a GGUF file, as they are there:
 * each row's blocks follow each other, and row follows row. */
enum {
    SKIMKV_KIND_F32 = 0,
    SKIMKV_KIND_F16 = 1,
    SKIMKV_KIND_Q4_0 = 2,
    SKIMKV_KIND_Q4_1 = 3,
    SKIMKV_KIND_Q5_0 = 6,
    SKIMKV_KIND_Q5_1 = 7,
    SKIMKV_KIND_Q8_0 = 8,
    SKIMKV_KIND_Q2_K = 10,
    SKIMKV_KIND_Q3_K = 11,
    SKIMKV_KIND_Q4_K = 12,
    SKIMKV_KIND_Q5_K = 13,
    SKIMKV_KIND_Q6_K = 14,
    SKIMKV_KIND_IQ4_NL = 20,
    SKIMKV_KIND_IQ4_XS = 23,
    SKIMKV_KIND_BF16 = 30,
    SKIMKV_KIND_MXFP4 = 39,
    SKIMKV_KIND_PANELS = 1000
};

/* Weights W [rows,columns]. `columns` is a multiple of 32, and of the weights in a block. */
typedef struct skimkv_matrix {
    const void *data;
    int64_t rows, columns;
    const void *bias;     /* [rows] or NULL */
    const int32_t *order; /* [rows] the output that each row gives, a permutation, or NULL: row i gives output i. Only
                           * for matrices of blocks. */
    int32_t kind;
    int32_t dtype; /* of x, y and bias */
} skimkv_matrix;

/* Validates, multiplies, and returns NULL, or in one line why it did not. */
SKIMKV_API const char *skimkv_product_run(const skimkv_matrix *matrix, const void *x, void *y, int64_t n, int threads,
                                          skimkv_parallel parallel);

/* Writes the weights of a matrix of blocks or panels to y [rows,columns] as elements of dtype; the bias is not used. */
SKIMKV_API const char *skimkv_matrix_expand(const skimkv_matrix *matrix, void *y, int threads,
                                            skimkv_parallel parallel);

/* Root-mean-square normalisation of n tokens x [n,size] -> y [n,size]: w * x / sqrt(mean(x^2) + eps), where the
 * quotient is rounded to dtype before the product; or, as Gemma has it, (1 + w) * x / sqrt(mean(x^2) + eps), of which
 * the result alone is rounded. */
typedef struct skimkv_rms_norm {
    const void *w; /* [size] */
    int64_t size;
    float eps;        /* at least 0 */
    int32_t dtype;    /* of w, x and y */
    int32_t adds_one; /* 1 if the factor is 1 + w, 0 if it is w */
} skimkv_rms_norm;

SKIMKV_API const char *skimkv_rms_norm_run(const skimkv_rms_norm *op, const void *x, void *y, int64_t n, int threads,
                                           skimkv_parallel parallel);

/* Where the first of the largest of n numbers is, NaN being larger than any; -1 if x is NULL, not aligned, or of no
 * known dtype, or n below 1. */
SKIMKV_API int64_t skimkv_argmax(const void *x, int dtype, int64_t n);

/* A root-mean-square normalisation inside an operation of several: its weights, and eps, at least 0. */
typedef struct skimkv_norm {
    const void *w;
    float eps;
    int32_t adds_one; /* as in skimkv_rms_norm */
} skimkv_norm;

/* What is between the products of a feed-forward layer, x / (1 + exp(-z)): silu has z = x, and the approximation of
 * gelu with tanh has z = sqrt(8/pi) (x + 0.044715 x^3). */
enum { SKIMKV_SILU, SKIMKV_GELU_TANH };

/* A layer of a model: t = x + of_o(o(attention(q, k, v))), then y = t + of_down(down(activation(gate(u)) * up(u))),
 * where q, k and v are products of before(x), and u = after(t). The heads of q and k may be normalised; then they are
 * rotated: channel d becomes x[d] cos[d] - x[d + D/2] sin[d], and channel d + D/2 becomes
 * x[d + D/2] cos[d + D/2] + x[d] sin[d + D/2]. Every value is rounded to dtype. */
typedef struct skimkv_layer {
    skimkv_matrix q, k, v, o, gate, up, down;
    skimkv_norm before, after; /* of tokens */
    skimkv_norm of_o, of_down; /* of what is added to tokens; without w it is added as it is */
    skimkv_norm of_q, of_k;    /* of heads; w is NULL in both, or in neither */
    int64_t D;
    int32_t activation, angles; /* angles: the number of its cos and sin */
} skimkv_layer;

/* The layers of a model as one operation, for a decode step. All are of one dtype, and of one size of tokens and of
 * heads. */
typedef struct skimkv_layers {
    const skimkv_layer *layers; /* [count] */
    int64_t count, angles;      /* angles: how many cos and sin there are */
    skimkv_norm norm;           /* after the last layer */
} skimkv_layers;

/* Attention of a layer that the caller computes: queries [n,rows of q], keys and values [n,rows of k] -> y like the
 * queries, all of the layers' dtype. It takes the tokens into the layer's cache. It returns 0, or another number, which
 * ends the operation. It is called in the thread of the operation, and must not run layers itself. */
typedef int (*skimkv_attend)(void *context, int64_t layer, const void *queries, const void *keys, const void *values,
                             void *y);

/* x and y [n,size] are one token for each row of the caches; cos and sin [angles,n,D] are given for each
 * token. steps[i] is the attention of layer i: q, y, k_new and v_new are contiguous and of the layers' dtype; their
 * addresses are set here. All of it is validated before the first layer runs. Where steps[i] is NULL, `attend` is
 * called; where none is NULL, `parallel` is called once for all layers. Without steps (NULL) attention gives zeros, so
 * that the rest can be timed. Returns NULL, or in one line why it did not compute. */
SKIMKV_API const char *skimkv_layers_run(const skimkv_layers *op, skimkv_op *const *steps, skimkv_attend attend,
                                         void *context, const void *x, const void *cos, const void *sin, void *y,
                                         int64_t n, int threads, skimkv_parallel parallel);

/* The key scores of a prompt: the causal softmax weights that every key receives, summed over n queries, which are the
 * last of m positions, and averaged over the group: skimkv_prompt of one row without v, whose `received` is `sum`. */
typedef struct skimkv_columns {
    int32_t H, G, D, dtype, parts;
    float scale, softcap; /* as in skimkv_op */
    int64_t n, m;
    const void *q, *k; /* [h,g,i,d] and [h,p,d] in dtype */
    int64_t q_h, q_g, q_n, k_h, k_n;
    float *sum;         /* [H,parts,m] */
    const float *sinks; /* as in skimkv_op */
} skimkv_columns;

SKIMKV_API const char *skimkv_columns_check(const skimkv_columns *op);
SKIMKV_API int skimkv_columns_run(const skimkv_columns *op, int threads, skimkv_parallel parallel);

/* Causal attention of a prompt: n queries of each of H*G heads, the last of m positions, and all keys and values of
 * these positions. Query i sees the positions up to m - n + i. Validates, computes, and returns NULL, or in one line
 * why it did not. A result does not depend on the number of threads. */
typedef struct skimkv_prompt {
    int32_t B, H, G, D, dtype; /* of q, k, v and y */
    int32_t parts;             /* of `received`, at least 1; else 0 */
    float scale, softcap;      /* as in skimkv_op */
    int64_t n, m;
    const void *q, *k, *v; /* [b,h,g,i,d], [b,h,p,d], [b,h,p,d] */
    void *y;               /* [b,h,g,i,d] */
    int64_t q_b, q_h, q_g, q_n, k_b, k_h, k_n, v_b, v_h, v_n, y_b, y_h, y_g, y_n;
    const float *sinks; /* as in skimkv_op */
    /* What every key receives: the softmax weights of all queries, added up and averaged over the group. [b,h,parts,m]
     * contiguous, or NULL. Part i is of every parts-th block of queries: the caller adds the parts up. v and y may then
     * be NULL, if only this is wanted. */
    float *received;
} skimkv_prompt;

SKIMKV_API const char *skimkv_prompt_attention_run(const skimkv_prompt *op, int threads, skimkv_parallel parallel);

/* The instruction set in use: "scalar", "avx2", "avx512", "avx512vnni", "avx512bf16" or "neon". It is selected at the
 * first use: the one that the environment variable SKIMKV_ISA names, or else the best one. NULL if this machine does
 * not have the set that SKIMKV_ISA names. */
SKIMKV_API const char *skimkv_isa(void);

/* The instruction sets of this machine, separated by commas, the best one first. */
SKIMKV_API const char *skimkv_isas(void);

/* Selects an instruction set, or for NULL selects again as at the first use. Returns 0, or -1 if this machine does not
 * have it. */
SKIMKV_API int skimkv_force(const char *isa);

#ifdef __cplusplus
}
#endif
#endif
