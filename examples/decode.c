/* One decode step from plain C: dense attention, SparQ over a row-major K, and SparQ over a K with a channel-major
 * copy. Each is compared with naive loops.
 *
 * Build it with the folders of the installed package:
 *   INCLUDE=$(python -c "import skimkv; print(skimkv.include_dir())")
 *   gcc -std=c11 -I$INCLUDE examples/decode.c $INCLUDE/../libskimkv.so -lm */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "skimkv.h"

enum { B = 1, H = 2, G = 3, N = 600, CAP = 768, D = 64, R = 8, TOP = 32, LOCAL = 4, GAP = 16 };

static float k[H][CAP][D + GAP], v[H][CAP][D + GAP], copy[H][D][CAP + GAP], q[H][G][D], y[H][G][D];

static float noise(void) { return (float)rand() / (float)RAND_MAX - 0.5f; }

/* The largest error of y, against the attention of every query over the positions of its head that are set in `take`.
 */
static double error(char take[H][N], double scale) {
    double worst = 0;
    for (int h = 0; h < H; h++)
        for (int g = 0; g < G; g++) {
            double sum = 0, out[D] = {0};
            for (int p = 0; p < N; p++) {
                if (!take[h][p]) continue;
                double dot = 0;
                for (int d = 0; d < D; d++) dot += (double)q[h][g][d] * k[h][p][d];
                const double w = exp(dot * scale);
                sum += w;
                for (int d = 0; d < D; d++) out[d] += w * v[h][p][d];
            }
            for (int d = 0; d < D; d++) {
                const double e = fabs(out[d] / sum - y[h][g][d]);
                if (!(e <= worst)) worst = e; /* also if e is NaN */
            }
        }
    return worst;
}

/* Runs a step: with skimkv_run if nth is 0, else as a custom operation calls it. There every thread does its share with
 * one work area; here the shares are done one after the other. */
static int run(const skimkv_op *op, int nth) {
    const char *wrong = skimkv_check(op);
    if (wrong) return printf("%s\n", wrong), 1;
    if (nth == 0) return skimkv_run(op, 1, NULL);
    void *work = calloc(1, skimkv_work(op, nth));
    if (!work) return 1;
    for (int step = 0; step < 2; step++)
        for (int i = 0; i < nth; i++) skimkv_share(op, work, i, nth);
    free(work);
    return 0;
}

int main(void) {
    static char all[H][N], chosen[H][N];
    for (int h = 0; h < H; h++) {
        for (int g = 0; g < G; g++)
            for (int d = 0; d < D; d++) q[h][g][d] = d % (D / R) == 0 ? 1 + 0.1f * noise() : 0.2f * noise();
        for (int p = 0; p < N; p++) {
            /* TOP - LOCAL positions have large values in the R channels in which q has; the last ones are local */
            const int top = p % 20 == 7 && p / 20 < TOP - LOCAL, near = p >= N - 1 - LOCAL;
            all[h][p] = 1, chosen[h][p] = (char)(top || near);
            for (int d = 0; d < D; d++) {
                k[h][p][d] = noise() + (top && d % (D / R) == 0 ? 4 : 0);
                v[h][p][d] = noise();
                copy[h][d][p] = k[h][p][d];
            }
        }
    }
    const int64_t lengths[B] = {N};
    skimkv_chunk chunk = {
        .start = 0,
        .cap = CAP,
        .k = k,
        .v = v,
        .index = copy,
        .k_b = H * CAP * (D + GAP),
        .k_h = CAP * (D + GAP),
        .k_n = D + GAP,
        .v_b = H * CAP * (D + GAP),
        .v_h = CAP * (D + GAP),
        .v_n = D + GAP,
        .x_b = H * D * (CAP + GAP),
        .x_h = D * (CAP + GAP),
        .x_r = CAP + GAP,
    };
    skimkv_cache cache = {.B = B,
                          .H = H,
                          .G = G,
                          .D = D,
                          .R = D,
                          .dtype = SKIMKV_F32,
                          .channels = SKIMKV_NONE,
                          .n_chunks = 1,
                          .chunks = &chunk,
                          .lengths = lengths};
    skimkv_op op = {.cache = &cache,
                    .q = q,
                    .y = y,
                    .dtype = SKIMKV_F32,
                    .scale = 1 / sqrtf(D),
                    .q_b = H * G * D,
                    .q_h = G * D,
                    .q_g = D,
                    .y_b = H * G * D,
                    .y_h = G * D,
                    .y_g = D};
    double worst = 0;
    for (int nth = 0; nth <= 3; nth += 3)
        for (int test = 0; test < 3; test++) {
            const char *names[] = {"dense", "SparQ, row-major K", "SparQ, channel-major copy"};
            op.method = test ? SKIMKV_SPARQ : SKIMKV_DENSE;
            op.r = R, op.k = TOP, op.local = LOCAL;
            cache.channels = test == 2 ? SKIMKV_COPY : SKIMKV_NONE;
            if (run(&op, nth)) return 1;
            const double e = error(test ? chosen : all, op.scale);
            printf("%-8s %d threads  %-26s error %.1e\n", skimkv_isa(), nth ? nth : 1, names[test], e);
            if (!(e <= worst)) worst = e;
        }
    op.k = 0, op.method = SKIMKV_TOPK;
    printf("refused: %s\n", skimkv_check(&op) ? skimkv_check(&op) : "nothing");
    return worst < 1e-5 && skimkv_check(&op) ? 0 : 1;
}
