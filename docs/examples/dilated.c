/* The step of dilated.py in C, for caches of float32: window is op->k, and stride is op->r. Build it with
 *
 *     cc -O3 -shared -fPIC -I "$(python -c 'import skimkv; print(skimkv.include_dir())')" dilated.c -lm -o libdilated.so
 */
#include <math.h>
#include <skimkv.h>
#include <stddef.h>
#include <string.h>

/* The memory of position p. */
static const skimkv_chunk *chunk_of(const skimkv_cache *cache, int64_t p) {
    const skimkv_chunk *chunk = cache->chunks;
    while (p >= chunk->start + chunk->cap) chunk++;
    return chunk;
}

static float *key(const skimkv_cache *cache, int64_t b, int64_t h, int64_t p) {
    const skimkv_chunk *chunk = chunk_of(cache, p);
    return (float *)chunk->k + b * chunk->k_b + h * chunk->k_h + (p - chunk->start) * chunk->k_n;
}

static float *value(const skimkv_cache *cache, int64_t b, int64_t h, int64_t p) {
    const skimkv_chunk *chunk = chunk_of(cache, p);
    return (float *)chunk->v + b * chunk->v_b + h * chunk->v_h + (p - chunk->start) * chunk->v_n;
}

/* Attention of one query q [D] to the chosen ones of n tokens -> y [D]; the largest logit so far divides the sums. */
static void attend(const skimkv_op *op, int64_t b, int64_t h, int64_t n, const float *q, float *y) {
    const int64_t D = op->cache->D, recent = n - 1 - op->k > 0 ? n - 1 - op->k : 0;
    float most = -INFINITY, sum = 0;
    memset(y, 0, D * sizeof *y);
    for (int64_t p = 0; p < n; p = p < recent && p + op->r < recent ? p + op->r : p < recent ? recent : p + 1) {
        const float *k = key(op->cache, b, h, p), *v = value(op->cache, b, h, p);
        float logit = 0;
        for (int64_t d = 0; d < D; d++) logit += q[d] * k[d];
        logit *= op->scale;
        if (op->softcap != 0) logit = op->softcap * tanhf(logit / op->softcap);
        const float larger = fmaxf(most, logit), before = expf(most - larger), weight = expf(logit - larger);
        for (int64_t d = 0; d < D; d++) y[d] = y[d] * before + weight * v[d];
        sum = sum * before + weight, most = larger;
    }
    for (int64_t d = 0; d < D; d++) y[d] /= sum;
}

/* Called as skimkv_step is: the tensors and the strides in `op` are checked. Returns NULL, or what is wrong. */
const char *dilated_step(skimkv_op *op, const void *q, void *y, const void *k_new, const void *v_new, int threads,
                         skimkv_parallel parallel) {
    const skimkv_cache *cache = op->cache;
    if (cache->dtype != SKIMKV_F32 || op->dtype != SKIMKV_F32) return "the kernel of Dilated needs float32";
    if (op->sinks) return "the kernel of Dilated knows no attention sinks";
    for (int64_t b = 0; b < cache->B; b++)
        for (int64_t h = 0; h < cache->H; h++) {
            int64_t n = cache->lengths[b];
            if (k_new) { /* the current token enters the cache before the step */
                const int64_t at = b * op->n_b + h * op->n_h;
                memcpy(key(cache, b, h, n), (const float *)k_new + at, cache->D * sizeof(float));
                memcpy(value(cache, b, h, n), (const float *)v_new + at, cache->D * sizeof(float));
                n++;
            }
            for (int64_t g = 0; g < cache->G; g++)
                attend(op, b, h, n, (const float *)q + b * op->q_b + h * op->q_h + g * op->q_g,
                       (float *)y + b * op->y_b + h * op->y_h + g * op->y_g);
        }
    (void)threads, (void)parallel; /* a kernel for real use divides the rows and heads among these threads */
    return NULL;
}
