/* What a pass is told: the layers, what rows see, where they come from and where they go. kernel.py has the same. */

#pragma once

#include "product.h"

/* What the rows of a pass see in one kind of layer, and where they stand. */
typedef struct {
    const float *cos, *sin; /* [R, E] */
    const int64_t *first;   /* [R]: the first held column a row sees */
    const uint8_t *seen;    /* [R, tail]: whether a row sees each of the last columns, the pass's own among them */
    int64_t tail;           /* R or more */
} Sight;

typedef struct {
    const float *before_attention, *query, *key, *after_attention, *before_mlp, *after_mlp; /* gains, or none */
    Linear in[3], out, rise[2], fall;                                                      /* q k v, o, gate up, down */
    float scaling;
    int32_t kind; /* of sight */
} Layer;

typedef struct {
    int64_t layers, D, H, G, E, I, gelu;
    float eps;
} Shape;

/* Keys and values [layers, G, capacity, E]; capacity is a multiple of eight, ``held`` columns are there. */
typedef struct {
    float *keys, *values;
    int64_t held, capacity;
} Cache;

/* Rows that come to the first layer with something beside them: its attention is handed [norm(beside) ; norm(x)]. */
typedef struct {
    const float *rows, *gain; /* [R, D], [D]; no rows: nothing is beside */
} Beside;

/* Where rows go on their way out. */
typedef struct {
    const int64_t *tapped; /* for each of layers + 1 taps: where it begins in a row of taps, or -1 */
    float *taps;           /* [R, tap_width] */
    int64_t tap_width;
    const float *gain; /* [D]: the last norm */
    float *states;     /* [R, D]: what it makes of x */
    const Linear *head;
    float *logits;     /* [R - first_asked, head's outputs], or none */
    int64_t first_asked;
} Outlet;
