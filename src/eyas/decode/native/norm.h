/* RMS norms. */

#pragma once

#include "team.h"

/* 1 / root mean square of x [E] */
static float evened(const float *x, int64_t E, float eps) {
    lanes squares = {0};
    int64_t e = 0;
    for (; e + LANES <= E; e += LANES) squares = fused(LOAD(x + e), LOAD(x + e), squares);
    if (e < E) squares = fused(rest(x + e, E - e), rest(x + e, E - e), squares);
    return 1.0f / sqrtf(total(squares) / (float)E + eps);
}

/* x [E] / its root mean square * gain [E]; x itself where there is no gain. */
static void norm(const float *x, const float *gain, float *y, int64_t E, float eps) {
    if (!gain) {
        memcpy(y, x, (size_t)E * sizeof(float));
        return;
    }
    const float scale = evened(x, E, eps);
    for (int64_t e = 0; e < E; e++) y[e] = x[e] * scale * gain[e];
}

/* x [R, D] -> y, ``width`` floats from one row of it to the next. */
static void norms(const float *x, const float *gain, float *y, int64_t R, int64_t D, int64_t width, float eps) {
    for (int64_t r = 0; r < R; r++) norm(x + r * D, gain, y + r * width, D, eps);
}

/* x + norm(y), in place of x, this thread's columns. */
static void add_normed(const Team *team, float *x, const float *y, const float *gain, int64_t R, int64_t D, float eps) {
    int64_t from, to;
    share(team, D, &from, &to);
    for (int64_t r = 0; r < R; r++) {
        const float scale = evened(y + r * D, D, eps);
        for (int64_t d = from; d < to; d++) {
            const float normed = y[r * D + d] * scale * gain[d];
            x[r * D + d] += normed;
        }
    }
}
