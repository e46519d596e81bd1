/* What rows of a pass see of a text's keys and values. */

#pragma once

#include "norm.h"
#include "shape.h"
#include "team.h"

#define FOUR 4   /* keys at a time */
#define BLOCK 64 /* columns whose keys stay in the nearest cache while all rows and heads look at them */

static void rotate(float *x, const float *cos, const float *sin, int64_t E) {
    for (int64_t e = 0; e < E / 2; e++) {
        const float a = x[e], b = x[e + E / 2];
        x[e] = a * cos[e] - b * sin[e];
        x[e + E / 2] = b * cos[e + E / 2] + a * sin[e + E / 2];
    }
}

/* The totals of four vectors, stored side by side, at half of what four times ``total`` costs. */
static inline void totals(const lanes *of, float *to) {
#ifdef __FMA__
#define PAIRS(a, b) _mm256_hadd_ps((__m256)(a), (__m256)(b))
    const __m256 all = PAIRS(PAIRS(of[0], of[1]), PAIRS(of[2], of[3]));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#undef PAIRS
#else
    for (int c = 0; c < FOUR; c++) to[c] = total(of[c]);
#endif
}

/* Q queries [E] against four neighbouring keys [4, E]: a key is loaded once for all of them. */
#define DOTS(Q)                                                                                                      \
    static void dots_##Q(const float *const *queries, const float *keys, float *const *to, int64_t E) {              \
        lanes sum[Q][FOUR];                                                                                          \
        for (int q = 0; q < Q; q++)                                                                                  \
            for (int c = 0; c < FOUR; c++) sum[q][c] = (lanes){0};                                                   \
        for (int64_t e = 0; e < E; e += LANES)                                                                       \
            for (int c = 0; c < FOUR; c++) {                                                                         \
                const lanes key = LOAD(keys + c * E + e);                                                            \
                for (int q = 0; q < Q; q++) sum[q][c] = fused(LOAD(queries[q] + e), key, sum[q][c]);                 \
            }                                                                                                        \
        for (int q = 0; q < Q; q++) totals(sum[q], to[q]);                                                           \
    }
DOTS(3) DOTS(2) DOTS(1)

/* Q rows of shares over the same values, on top of what ``out`` holds of earlier ones: V lanes of the head's width. */
#define MIX(Q, V)                                                                                                    \
    static void mix_##Q##_##V(const float *const *shares, const float *values, float *const *out, int64_t from,      \
                              int64_t to, int64_t E) {                                                               \
        lanes sum[Q][V];                                                                                             \
        for (int q = 0; q < Q; q++)                                                                                  \
            for (int v = 0; v < V; v++) sum[q][v] = LOAD(out[q] + v * LANES);                                        \
        for (int64_t t = from; t < to; t++)                                                                          \
            for (int q = 0; q < Q; q++) {                                                                            \
                const lanes share = (lanes){0} + shares[q][t];                                                       \
                for (int v = 0; v < V; v++) sum[q][v] = fused(share, LOAD(values + t * E + v * LANES), sum[q][v]);   \
            }                                                                                                        \
        for (int q = 0; q < Q; q++)                                                                                  \
            for (int v = 0; v < V; v++) STORE(out[q] + v * LANES) = sum[q][v];                                       \
    }
MIX(3, 4) MIX(1, 4) MIX(3, 1) MIX(1, 1)

/* One row's scores of one head [T, padded to lanes] -> shares that sum to one, 0 for what it may not see. */
static void soften(float *scores, int64_t from, int64_t first, int64_t T, const uint8_t *seen, int64_t tail,
                   int64_t padded, float scaling) {
    const float never = -3.0e38f;
    for (int64_t t = from; t < first; t++) scores[t] = never;
    for (int64_t j = 0; j < tail; j++)
        if (!seen[j]) scores[T - tail + j] = never;
    for (int64_t t = T; t < padded; t++) scores[t] = never;
    lanes highest = (lanes){0} + never;
    for (int64_t t = from; t < padded; t += LANES) {
        const lanes here = LOAD(scores + t);
        const ilanes above = here > highest;
        highest = (lanes)(((ilanes)here & above) | ((ilanes)highest & ~above));
    }
    float most = never;
    for (int c = 0; c < LANES; c++) most = highest[c] > most ? highest[c] : most;
    lanes sum = {0};
    for (int64_t t = from; t < padded; t += LANES) {
        const lanes part = exponential((LOAD(scores + t) - most) * scaling);
        STORE(scores + t) = part;
        sum += part;
    }
    const float whole = 1.0f / total(sum);
    for (int64_t t = from; t < padded; t += LANES) STORE(scores + t) *= whole;
}

/* New rows after those held: queries and keys are turned to their positions, keys and values join the cache, and every
   row looks at what it may.

   heads    [R, H + 2G, E]    queries, keys and values of the rows; queries and keys are turned in place
   scores   [R * H, capacity]
   out      [R, H, E] */
static void attend(const Team *team, const Shape *s, const Layer *layer, const Sight *sight, float *heads, float *keys,
                   float *values, const Cache *cache, float *scores, float *out, int64_t R) {
    const int64_t H = s->H, G = s->G, E = s->E, held = cache->held, capacity = cache->capacity;
    const int64_t T = held + R, padded = (T + LANES - 1) / LANES * LANES, width = (H + 2 * G) * E, group = H / G;
    int64_t from = held, mine, end;
    for (int64_t r = 0; r < R; r++) from = sight->first[r] < from ? sight->first[r] : from;
    from = from / LANES * LANES;

    share(team, H + 2 * G, &mine, &end);
    for (int64_t h = mine; h < end; h++)
        for (int64_t r = 0; r < R; r++) {
            float *head = heads + r * width + h * E;
            if (layer->query && h < H + G) norm(head, h < H ? layer->query : layer->key, head, E, s->eps);
            if (h < H + G) rotate(head, sight->cos + r * E, sight->sin + r * E, E);
            if (h >= H + G)
                memcpy(values + ((h - H - G) * capacity + held + r) * E, head, (size_t)E * sizeof(float));
            else if (h >= H)
                memcpy(keys + ((h - H) * capacity + held + r) * E, head, (size_t)E * sizeof(float));
        }
    meet(team);

    const int64_t blocks = (padded - from + BLOCK - 1) / BLOCK, looks = R * group;
    share(team, G * blocks, &mine, &end);
    for (int64_t b = mine; b < end; b++) {
        const int64_t g = b / blocks, begin = from + b % blocks * BLOCK;
        const int64_t stop = begin + BLOCK < padded ? begin + BLOCK : padded;
        for (int64_t i = 0; i < looks;) {
            const int64_t Q = looks - i < 3 ? looks - i : 3;
            const float *queries[3];
            float *to[3];
            for (int64_t q = 0; q < Q; q++) {
                const int64_t r = (i + q) / group, h = g * group + (i + q) % group;
                queries[q] = heads + r * width + h * E;
                to[q] = scores + (r * H + h) * capacity + begin;
            }
            for (int64_t t = begin; t < stop; t += FOUR) {
                (Q == 3 ? dots_3 : Q == 2 ? dots_2 : dots_1)(queries, keys + (g * capacity + t) * E, to, E);
                for (int64_t q = 0; q < Q; q++) to[q] += FOUR;
            }
            i += Q;
        }
    }
    meet(team);

    share(team, R * H, &mine, &end);
    for (int64_t i = mine; i < end; i++)
        soften(scores + i * capacity, from, sight->first[i / H], T, sight->seen + i / H * sight->tail, sight->tail,
               padded, layer->scaling);
    meet(team);

    const int V = E % (4 * LANES) ? 1 : 4;
    const int64_t slices = E / (V * LANES);
    share(team, G * slices, &mine, &end);
    for (int64_t part = mine; part < end; part++) {
        const int64_t g = part / slices, at = part % slices * V * LANES;
        for (int64_t i = 0; i < looks; i++)
            memset(out + (i / group * H + g * group + i % group) * E + at, 0, (size_t)(V * LANES) * sizeof(float));
        for (int64_t begin = from; begin < T; begin += 2 * BLOCK) {
            const int64_t stop = begin + 2 * BLOCK < T ? begin + 2 * BLOCK : T;
            for (int64_t i = 0; i < looks;) {
                const int64_t Q = i + 3 <= looks ? 3 : 1;
                const float *shares[3];
                float *to[3];
                for (int64_t q = 0; q < Q; q++) {
                    const int64_t head = (i + q) / group * H + g * group + (i + q) % group;
                    shares[q] = scores + head * capacity;
                    to[q] = out + head * E + at;
                }
                (V == 4 ? (Q == 3 ? mix_3_4 : mix_1_4) : (Q == 3 ? mix_3_1 : mix_1_1))(
                    shares, values + g * capacity * E + at, to, begin, stop, E);
                i += Q;
            }
        }
    }
    meet(team);
}
