/* Products of a few rows.

   O outputs that lie ``far`` rows of the weight apart: O streams that the memory's own prefetcher follows each for
   thousands of lines. Neighbouring outputs would be O streams of one row's length, at half the speed. With six rows
   registers leave room for two streams only and there is much to do at each; those are helped along, which would only
   disturb the others (measured with weights on large pages, ``pages``). */

#pragma once

#include "team.h"

#define MOST 6         /* rows at a time: what the accumulators of two outputs leave of sixteen registers */
#define STREAMS_LACK 6 /* rows */
#define AHEAD 512      /* floats */

typedef struct {
    const float *weight, *bias; /* [outputs, inputs]; [outputs] or none */
    int64_t outputs, inputs;
} Linear;

typedef struct {
    const float *bias, *add; /* [N] or none; [R, N] to add to, or none */
    int64_t K, width;        /* width: floats from one row of the result to the next */
} Product;

#define TILE(O, R)                                                                                                   \
    static void tile_##O##_##R(const float *w, const float *x, float *y, int64_t n, int64_t far, const Product *p) { \
        const int64_t K = p->K;                                                                                      \
        lanes sum[O][R];                                                                                             \
        for (int o = 0; o < O; o++)                                                                                  \
            for (int r = 0; r < R; r++) sum[o][r] = (lanes){0};                                                      \
        int64_t k = 0;                                                                                               \
        for (; k + LANES <= K; k += LANES)                                                                           \
            for (int o = 0; o < O; o++) {                                                                            \
                const float *at = w + (n + o * far) * K + k;                                                         \
                const lanes ws = LOAD(at);                                                                           \
                if (R >= STREAMS_LACK && k % 16 == 0) __builtin_prefetch(at + AHEAD);                                \
                for (int r = 0; r < R; r++) sum[o][r] = fused(ws, LOAD(x + r * K + k), sum[o][r]);                   \
            }                                                                                                        \
        for (int o = 0; o < O && k < K; o++)                                                                         \
            for (int r = 0; r < R; r++)                                                                              \
                sum[o][r] = fused(rest(w + (n + o * far) * K + k, K - k), rest(x + r * K + k, K - k), sum[o][r]);    \
        for (int o = 0; o < O; o++)                                                                                  \
            for (int r = 0; r < R; r++) {                                                                            \
                const int64_t at = n + o * far;                                                                      \
                float s = total(sum[o][r]);                                                                          \
                if (p->bias) s += p->bias[at];                                                                       \
                if (p->add) s += p->add[r * p->width + at];                                                          \
                y[r * p->width + at] = s;                                                                            \
            }                                                                                                        \
    }
TILE(8, 1) TILE(4, 2) TILE(4, 3) TILE(3, 4) TILE(2, 1) TILE(2, 2) TILE(2, 3) TILE(2, 4) TILE(2, 5) TILE(2, 6)
TILE(1, 1) TILE(1, 2) TILE(1, 3) TILE(1, 4) TILE(1, 5) TILE(1, 6)

typedef void (*Tile)(const float *, const float *, float *, int64_t, int64_t, const Product *);
static const Tile ALONE[MOST + 1] = {0, tile_8_1, tile_4_2, tile_4_3, tile_3_4, tile_2_5, tile_2_6};
static const int OUTPUTS[MOST + 1] = {0, 8, 4, 4, 3, 2, 2};
static const Tile TWO[MOST + 1] = {0, tile_2_1, tile_2_2, tile_2_3, tile_2_4, tile_2_5, tile_2_6};
static const Tile ONE[MOST + 1] = {0, tile_1_1, tile_1_2, tile_1_3, tile_1_4, tile_1_5, tile_1_6};

/* Outputs [from, to) of all rows. */
static void slab(const float *w, const float *x, float *y, int64_t from, int64_t to, int64_t R, const Product *p) {
    const int64_t blocks = (R + MOST - 1) / MOST;
    const int O = blocks == 1 ? OUTPUTS[R] : 2;
    const int64_t far = (to - from) / O;
    for (int64_t n = from; n < from + far; n++)
        for (int64_t b = 0; b < blocks; b++) { /* more rows than fit: the weights come from the cache again */
            const int64_t r = R * b / blocks, m = R * (b + 1) / blocks - r;
            Product of = *p;
            if (p->add) of.add = p->add + r * p->width;
            (blocks == 1 ? ALONE : TWO)[m](w, x + r * p->K, y + r * p->width, n, far, &of);
        }
    for (int64_t n = from + O * far; n < to; n++)
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t r = R * b / blocks, m = R * (b + 1) / blocks - r;
            Product of = *p;
            if (p->add) of.add = p->add + r * p->width;
            ONE[m](w, x + r * p->K, y + r * p->width, n, 0, &of);
        }
}

/* x [R, K] through weights [N_i, K] side by side -> y [R, sum of N_i], this thread's outputs of each; add [R, N] only
   where there is one weight. */
static void products(const Team *team, const Linear *of, int64_t count, const float *x, const float *add, float *y,
                     int64_t R) {
    int64_t width = 0, first = 0, from, to;
    for (int64_t i = 0; i < count; i++) width += of[i].outputs;
    for (int64_t i = 0; i < count; i++) {
        const Product p = {of[i].bias, add, of[i].inputs, width};
        share(team, of[i].outputs, &from, &to);
        slab(of[i].weight, x, y + first, from, to, R, &p);
        first += of[i].outputs;
    }
}
