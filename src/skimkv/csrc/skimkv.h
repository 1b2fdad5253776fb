/* skimkv: one decode step of attention over a key-value cache that is read in part. Plain C, no dependencies.
 *
 * Letters: B batch, H KV heads, G query heads per KV head, N cached tokens, D head size, R index channels.
 * All strides are in elements (of codes and coded rows: in bytes); the innermost dimension D of q, k, v and y and the
 * position of an index have stride 1. D is at most 256; multiples of 8 from 16 on are fast. Row b of the batch holds
 * lengths[b] tokens at positions 0 .. lengths[b]-1; the last is the current one, always attended and not counted in k.
 */
#ifndef SKIMKV_H
#define SKIMKV_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define SKIMKV_API __declspec(dllexport)
#else
#define SKIMKV_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define SKIMKV_VERSION 3
#define SKIMKV_GROUP 256 /* tokens that share a scale in a quantised index */
#define SKIMKV_ROW_SPAN 64 /* channels of a coded row that share their ends */

enum { SKIMKV_F32, SKIMKV_BF16, SKIMKV_F16 };                               /* element types */
enum { SKIMKV_NONE, SKIMKV_COPY, SKIMKV_INT8, SKIMKV_INT4 };                /* channel-major index of K */
enum { SKIMKV_DENSE, SKIMKV_SPARQ, SKIMKV_LOWRANK, SKIMKV_TOPK, SKIMKV_ORACLE }; /* methods */
enum { SKIMKV_COVERAGE, SKIMKV_SQRT_D, SKIMKV_SQRT_R };                     /* SparQ temperatures */
enum { SKIMKV_OUTSIDE, SKIMKV_APPEND, SKIMKV_SLOT }; /* a new row: only attended, appended first, put into a slot after */

/* Positions start .. start+cap-1 of every row. Memory that belongs to other positions is never read. */
typedef struct skimkv_chunk {
    int64_t start, cap;
    const void *k, *v;      /* k[b,h,p,d] at b*k_b + h*k_h + (p-start)*k_n + d */
    const void *index;      /* index[b,h,c,p] at b*x_b + h*x_h + c*x_r + (p-start); NULL for SKIMKV_NONE */
    const float *scale;     /* x = scale*code + zero of group g, channel c: s_b, s_h, g*s_g (+ s_z for zero), c*s_r */
    int64_t k_b, k_h, k_n, v_b, v_h, v_n;
    int64_t x_b, x_h, x_r;
    int64_t s_b, s_h, s_g, s_z, s_r;
} skimkv_chunk;

/* int4: 128 tokens are 64 bytes, 16 little-endian dwords; token j is nibble j/16 of dword j%16. Chunks of quantised
 * indexes start at a multiple of 256; the last, incomplete group of a row is in `tail`, column position % 256.
 * Rows of K and V are of dtype, or, where `bits` is 8 or 4, coded: for every 64 channels the least and the greatest as
 * float16, `low` and `high`, then for every 64 (or the rest) n channels the codes, n*bits/8 bytes, x = low + code *
 * (high - low) / (2^bits - 1); of 4 bits byte i is channel i, and in the high nibble i + n/2. D is then even. An index
 * and the mean are those of the decoded rows; a new row is attended as it will be held. */
typedef struct skimkv_cache {
    int32_t B, H, G, D, R;
    int32_t dtype, channels, n_chunks;
    const skimkv_chunk *chunks; /* ascending and without gaps from position 0 */
    const int64_t *lengths;     /* B */
    const void *tail;           /* [b,h,c,256] in dtype, quantised indexes only */
    const float *mean;          /* [b,h,d] running mean of V, or NULL */
    const float *projection;    /* [h,d,R] contiguous, SKIMKV_LOWRANK only */
    int64_t t_b, t_h, t_r, m_b, m_h;
    int32_t bits;               /* of the codes of K and V; 0: none */
} skimkv_cache;

typedef struct skimkv_op {
    const skimkv_cache *cache;
    const void *q; /* [b,h,g,d] */
    void *y;       /* [b,h,g,d] */
    int64_t q_b, q_h, q_g, y_b, y_h, y_g;
    int32_t dtype; /* of q and y */
    int32_t method;
    float scale, softcap;       /* logits = scale q.k; softcap 0: none, else softcap*tanh(logits/softcap) */
    int64_t r, k, local;        /* SparQ: channels, positions, of which the last `local`; else only k */
    int32_t temperature;        /* SparQ */
    int32_t use_mean;           /* SparQ: give the mass left out to the mean of V */
    const void *k_new, *v_new;  /* the current token [b,h,d] in the cache's dtype, if not in the cache yet; or NULL */
    int64_t n_b, n_h;
    int32_t keep;               /* what becomes of k_new; lengths are those before. OUTSIDE and SLOT: dense only */
    const int64_t *slot;        /* SLOT: [b] the position it overwrites; -1: the victim of each head, by score */
    /* Heavy hitters, SLOT only: weights, mean over the group, are added to score; the victim is the lowest of those
     * not among the recent[b] before now[b], the new token's position, kept in pos. recent 0: perhaps the new one. */
    float *score;               /* [b,h,slot], or NULL */
    int32_t *pos;
    int64_t c_b, c_h;           /* of score and pos */
    const int64_t *now, *recent;
} skimkv_op;

/* n new tokens per row for the cache, whose memory is written through its (const) pointers: rows of K and V, the index
 * or its open group and the codes of groups that fill, the running mean. Row b drops its first skip[b] tokens (skip
 * NULL: none), and its first kept token goes to position at[b] (at NULL: lengths[b]). lengths are those before. */
typedef struct skimkv_tokens {
    const skimkv_cache *cache;
    const void *k, *v; /* [b,h,i,d] in the cache's dtype */
    int64_t n, k_b, k_h, k_n, v_b, v_h, v_n;
    const int64_t *skip, *at;
} skimkv_tokens;

/* SubGen algorithm 1: per KV head m clusters, each with a representative, t samples and a size, in blocks that hold
 * clusters start .. start+cap-1; a reservoir of s keys and values; mu, the sum of squared norms of all values. All
 * tensors are contiguous. Appending to a row of m clusters needs room for m+1. */
typedef struct skimkv_block {
    int64_t start, cap;
    void *rep, *samples; /* [B,H,cap,D], [B,H,cap,t,D] */
    int32_t *size;       /* [B,H,cap] */
} skimkv_block;

typedef struct skimkv_clusters {
    int32_t B, H, G, D, t, s, dtype, n_blocks;
    const skimkv_block *blocks;
    int64_t *m;          /* [B,H] */
    void *k, *v;         /* [B,H,s,D] */
    double *mu;          /* [B,H] */
    /* the estimator: q and y [B,H,G,D] contiguous, of type q_dtype */
    const void *q;
    void *y;
    int32_t q_dtype;
    float scale;
    /* appending one token: k_new, v_new [B,H,D] in dtype, lengths[b] tokens before it */
    const void *k_new, *v_new;
    const int64_t *lengths;
    double delta;
    uint32_t seed;
} skimkv_clusters;

/* Runs fn(data) on n threads and returns when all are done; GOMP_parallel has this type. */
typedef void (*skimkv_parallel)(void (*fn)(void *), void *data, unsigned n, unsigned flags);

SKIMKV_API int skimkv_version(void);

/* NULL if the operation is valid, else one line that says what is wrong. */
SKIMKV_API const char *skimkv_check(const skimkv_op *op);

/* One step on `threads` threads of `parallel` (NULL: on the calling thread alone). 0, or -1 if out of memory. */
SKIMKV_API int skimkv_run(const skimkv_op *op, int threads, skimkv_parallel parallel);

/* Sets op's q, y, k_new and v_new (NULL: no new row), checks it, the alignment included, and runs it. NULL, or one
 * line that says what is wrong. */
SKIMKV_API const char *skimkv_step(skimkv_op *op, const void *q, void *y, const void *k_new, const void *v_new,
                                   int threads, skimkv_parallel parallel);

SKIMKV_API const char *skimkv_check_append(const skimkv_tokens *tokens);
SKIMKV_API int skimkv_append(const skimkv_tokens *tokens, int threads, skimkv_parallel parallel);
SKIMKV_API const char *skimkv_check_clusters(const skimkv_clusters *clusters);
SKIMKV_API int skimkv_stream(const skimkv_clusters *clusters, int threads, skimkv_parallel parallel);
SKIMKV_API int skimkv_stream_append(const skimkv_clusters *clusters, int threads, skimkv_parallel parallel);

/* The same for callers with threads of their own, such as a ggml custom op: every thread ith of nth calls share with
 * the same work, skimkv_work(op, nth) bytes that were zero before the first step and are left alone between steps. */
SKIMKV_API size_t skimkv_work(const skimkv_op *op, int nth);
SKIMKV_API void skimkv_share(const skimkv_op *op, void *work, int ith, int nth);

/* y = x W^T + bias with W in 8 bits: out rows of in inputs, in blocks of 32 codes with one fp16 scale (the weights of
 * GGUF's Q8_0). Sixteen rows are a panel, whose blocks follow each other: 544 bytes, 16 scales, then 16 times two codes
 * of each of the 16 rows. A last panel of fewer rows is padded with zeros. */
typedef struct skimkv_linear {
    const void *w;
    int64_t out, in, n;     /* rows, inputs (a multiple of 32), tokens */
    const void *x;          /* [n,in], token t at t*x_n */
    void *y;                /* [n,out], token t at t*y_n */
    int64_t x_n, y_n;
    const void *bias;       /* [out] or NULL */
    int32_t dtype;          /* of x, y and bias */
} skimkv_linear;

SKIMKV_API const char *skimkv_linear_check(const skimkv_linear *op);
SKIMKV_API int skimkv_linear_run(const skimkv_linear *op, int threads, skimkv_parallel parallel);

/* What each key of a prompt received: sum over the n queries, the last of the m positions, of causal softmax weights,
 * mean over the group. Part i of `parts` takes every parts-th block of queries; the parts are to be added up. */
typedef struct skimkv_columns {
    int32_t H, G, D, dtype, parts;
    float scale, softcap;   /* as in skimkv_op */
    int64_t n, m;
    const void *q, *k;      /* [h,g,i,d] and [h,p,d] in dtype */
    int64_t q_h, q_g, q_n, k_h, k_n;
    float *sum;             /* [H,parts,m] */
} skimkv_columns;

SKIMKV_API const char *skimkv_columns_check(const skimkv_columns *op);
SKIMKV_API int skimkv_columns_run(const skimkv_columns *op, int threads, skimkv_parallel parallel);

/* The instruction set in use ("scalar", "avx2", "avx512", "avx512vnni", "avx512bf16", "neon"), chosen at first use or by
 * SKIMKV_ISA; NULL if that names none of this machine. skimkv_isas lists those available, comma separated, best first. */
SKIMKV_API const char *skimkv_isa(void);
SKIMKV_API const char *skimkv_isas(void);
SKIMKV_API int skimkv_force(const char *isa); /* 0, or -1 if unknown or unavailable; NULL chooses again */

#ifdef __cplusplus
}
#endif
#endif
