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
    const void *weight; /* [outputs, inputs]: floats, or where there is a scale whole numbers of eight bits */
    const float *bias;  /* [outputs] or none */
    const float *scale; /* [outputs] or none: what a whole number of an output's row counts */
    int64_t outputs, inputs;
} Linear;

typedef struct {
    const float *bias, *scale, *add; /* [N] or none; [N] or none; [R, N] to add to, or none */
    int64_t K, width;                /* width: floats from one row of the result to the next */
} Product;

/* Eight weights, and the last few of a row, of either kind. */
typedef int8_t Whole;
static inline lanes eight_float(const float *p) { return LOAD(p); }
static inline lanes few_float(const float *p, int64_t count) { return rest(p, count); }
static inline lanes eight_Whole(const Whole *p) {
#ifdef __FMA__
    return (lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    lanes found;
    for (int c = 0; c < LANES; c++) found[c] = p[c];
    return found;
#endif
}
static inline lanes few_Whole(const Whole *p, int64_t count) {
    lanes found = {0};
    for (int64_t c = 0; c < count; c++) found[c] = p[c];
    return found;
}

#define TILE(KIND, O, R)                                                                                             \
    static void tile_##KIND##_##O##_##R(const void *weight, const float *x, float *y, int64_t n, int64_t far,        \
                                        const Product *p) {                                                          \
        const KIND *w = weight;                                                                                      \
        const int64_t K = p->K;                                                                                      \
        lanes sum[O][R];                                                                                             \
        for (int o = 0; o < O; o++)                                                                                  \
            for (int r = 0; r < R; r++) sum[o][r] = (lanes){0};                                                      \
        int64_t k = 0;                                                                                               \
        for (; k + LANES <= K; k += LANES)                                                                           \
            for (int o = 0; o < O; o++) {                                                                            \
                const KIND *at = w + (n + o * far) * K + k;                                                          \
                const lanes ws = eight_##KIND(at);                                                                   \
                if (sizeof(KIND) == 4 && R >= STREAMS_LACK && k % 16 == 0) __builtin_prefetch(at + AHEAD);           \
                for (int r = 0; r < R; r++) sum[o][r] = fused(ws, LOAD(x + r * K + k), sum[o][r]);                   \
            }                                                                                                        \
        for (int o = 0; o < O && k < K; o++)                                                                         \
            for (int r = 0; r < R; r++)                                                                              \
                sum[o][r] = fused(few_##KIND(w + (n + o * far) * K + k, K - k), rest(x + r * K + k, K - k),          \
                                  sum[o][r]);                                                                        \
        for (int o = 0; o < O; o++)                                                                                  \
            for (int r = 0; r < R; r++) {                                                                            \
                const int64_t at = n + o * far;                                                                      \
                float s = total(sum[o][r]);                                                                          \
                if (p->scale) s *= p->scale[at];                                                                     \
                if (p->bias) s += p->bias[at];                                                                       \
                if (p->add) s += p->add[r * p->width + at];                                                          \
                y[r * p->width + at] = s;                                                                            \
            }                                                                                                        \
    }

typedef void (*Tile)(const void *, const float *, float *, int64_t, int64_t, const Product *);
static const int OUTPUTS[MOST + 1] = {0, 8, 4, 4, 3, 2, 2};

/* By rows: as many outputs at once as there are registers for, two, and one. */
typedef struct {
    Tile alone[MOST + 1], two[MOST + 1], one[MOST + 1];
} Tiles;

#define TILES(KIND)                                                                                                  \
    TILE(KIND, 8, 1)                                                                                                 \
    TILE(KIND, 4, 2) TILE(KIND, 4, 3) TILE(KIND, 3, 4)                                                               \
    TILE(KIND, 2, 1) TILE(KIND, 2, 2) TILE(KIND, 2, 3) TILE(KIND, 2, 4) TILE(KIND, 2, 5) TILE(KIND, 2, 6)            \
    TILE(KIND, 1, 1) TILE(KIND, 1, 2) TILE(KIND, 1, 3) TILE(KIND, 1, 4) TILE(KIND, 1, 5) TILE(KIND, 1, 6)            \
    static const Tiles tiles_##KIND = {                                                                              \
        {0, tile_##KIND##_8_1, tile_##KIND##_4_2, tile_##KIND##_4_3, tile_##KIND##_3_4, tile_##KIND##_2_5,           \
         tile_##KIND##_2_6},                                                                                         \
        {0, tile_##KIND##_2_1, tile_##KIND##_2_2, tile_##KIND##_2_3, tile_##KIND##_2_4, tile_##KIND##_2_5,           \
         tile_##KIND##_2_6},                                                                                         \
        {0, tile_##KIND##_1_1, tile_##KIND##_1_2, tile_##KIND##_1_3, tile_##KIND##_1_4, tile_##KIND##_1_5,           \
         tile_##KIND##_1_6}};
TILES(float)
TILES(Whole)

/* Outputs [from, to) of all rows. */
static void slab(const void *w, const float *x, float *y, int64_t from, int64_t to, int64_t R, const Product *p) {
    const Tiles *tiles = p->scale ? &tiles_Whole : &tiles_float;
    const int64_t blocks = (R + MOST - 1) / MOST;
    const int O = blocks == 1 ? OUTPUTS[R] : 2;
    const int64_t far = (to - from) / O;
    for (int64_t n = from; n < from + far; n++)
        for (int64_t b = 0; b < blocks; b++) { /* more rows than fit: the weights come from the cache again */
            const int64_t r = R * b / blocks, m = R * (b + 1) / blocks - r;
            Product of = *p;
            if (p->add) of.add = p->add + r * p->width;
            (blocks == 1 ? tiles->alone : tiles->two)[m](w, x + r * p->K, y + r * p->width, n, far, &of);
        }
    for (int64_t n = from + O * far; n < to; n++)
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t r = R * b / blocks, m = R * (b + 1) / blocks - r;
            Product of = *p;
            if (p->add) of.add = p->add + r * p->width;
            tiles->one[m](w, x + r * p->K, y + r * p->width, n, 0, &of);
        }
}

/* x [R, K] through weights [N_i, K] side by side -> y [R, sum of N_i], this thread's outputs of each; add [R, N] only
   where there is one weight. */
static void products(const Team *team, const Linear *of, int64_t count, const float *x, const float *add, float *y,
                     int64_t R) {
    int64_t width = 0, first = 0, from, to;
    for (int64_t i = 0; i < count; i++) width += of[i].outputs;
    for (int64_t i = 0; i < count; i++) {
        const Product p = {of[i].bias, of[i].scale, add, of[i].inputs, width};
        share(team, of[i].outputs, &from, &to);
        slab(of[i].weight, x, y + first, from, to, R, &p);
        first += of[i].outputs;
    }
}
