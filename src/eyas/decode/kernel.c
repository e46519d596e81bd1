/* A few rows through weights as they lie, and their attention: what decoding does, at the speed memory gives weights.

   A matrix product library wants many rows; for one to eight of them it reads weights at a third of the speed the
   memory has, or computes every row anew. Here a weight is read once whatever the number of rows, from the place
   where the model keeps it: nothing is packed and nothing exists twice.

   Every result is summed in an order that depends on its own row alone. So a row's numbers are the same bits
   whether it comes alone or with others, and with any number of threads: a verify pass says exactly what plain
   decoding says.

   Letters: R rows, K inputs, N outputs; of attention H query heads, G key/value heads, E head width (a multiple of
   eight), T columns held and new. Compiled by kernel.py; gcc and clang. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>
#ifdef __FMA__
#include <immintrin.h>
#endif

#define LANES 8
#define MOST 6 /* rows at a time: what the accumulators of two outputs leave of sixteen registers */
typedef float lanes __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t ilanes __attribute__((vector_size(32)));
#define LOAD(p) (*(const lanes *)(p))
#define STORE(p) (*(lanes *)(p))

/* sum + a * b. Said, not left to the compiler, which fuses the two in one function and not in the next (contraction is
   off): a row would be other bits in a tile of one than in a tile of two. */
static inline lanes fused(lanes a, lanes b, lanes sum) {
#ifdef __FMA__
    return (lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return sum + a * b;
#endif
}

/* ``count`` < LANES floats and zeros. */
static inline lanes rest(const float *p, int64_t count) {
    float padded[LANES] = {0};
    memcpy(padded, p, (size_t)count * sizeof(float));
    return LOAD(padded);
}

static inline float total(lanes a) {
    float s0 = a[0] + a[4], s1 = a[1] + a[5], s2 = a[2] + a[6], s3 = a[3] + a[7];
    return (s0 + s2) + (s1 + s3);
}

/* -- products ----------------------------------------------------------------------------------------------------

   O outputs that lie ``far`` rows of the weight apart: O streams that the memory's own prefetcher follows each for
   thousands of lines. Neighbouring outputs would be O streams of one row's length, at half the speed. With many rows
   registers leave room for two streams only; those are helped along, which would only disturb four or eight. */
#define STREAMS_LACK 4 /* rows */
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
TILE(8, 1) TILE(4, 2) TILE(4, 3) TILE(2, 1) TILE(2, 2) TILE(2, 3) TILE(2, 4) TILE(2, 5) TILE(2, 6)
TILE(1, 1) TILE(1, 2) TILE(1, 3) TILE(1, 4) TILE(1, 5) TILE(1, 6)

typedef void (*Tile)(const float *, const float *, float *, int64_t, int64_t, const Product *);
static const Tile ALONE[MOST + 1] = {0, tile_8_1, tile_4_2, tile_4_3, tile_2_4, tile_2_5, tile_2_6};
static const int OUTPUTS[MOST + 1] = {0, 8, 4, 4, 2, 2, 2};
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

/* x [R, K] through weights [N_i, K] side by side -> y [R, sum of N_i]; add [R, N] only where there is one weight. */
static void products(const Linear *of, int64_t count, const float *x, const float *add, float *y, int64_t R,
                     int64_t threads) {
    int64_t width = 0;
    for (int64_t i = 0; i < count; i++) width += of[i].outputs;
#pragma omp parallel num_threads((int)threads)
    {
        const int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
        int64_t first = 0;
        for (int64_t i = 0; i < count; i++) {
            const int64_t N = of[i].outputs;
            const Product p = {of[i].bias, add, of[i].inputs, width};
            slab(of[i].weight, x, y + first, N * me / all, N * (me + 1) / all, R, &p);
            first += N;
        }
    }
}

void eyas_linear(const Linear *of, const float *x, float *y, int64_t R, int64_t threads) {
    products(of, 1, x, 0, y, R, threads);
}

/* -- attention ---------------------------------------------------------------------------------------------------- */

/* e^x for x <= 0, within two units in the last place; exactly 0 far below. The polynomial is Cephes'. */
static inline lanes exponential(lanes x) {
    const ilanes there = x > -87.0f;
    x = (lanes)((ilanes)x & there);
    const lanes n = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* rounds */
    lanes r = x - n * 0.693359375f;
    r -= n * -2.12194440e-4f;
    lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const ilanes power = (__builtin_convertvector(n, ilanes) + 127) << 23;
    return (lanes)((ilanes)(p * (lanes)power) & there);
}

static void rotate(float *x, const float *cos, const float *sin, int64_t E) {
    for (int64_t e = 0; e < E / 2; e++) {
        const float a = x[e], b = x[e + E / 2];
        x[e] = a * cos[e] - b * sin[e];
        x[e + E / 2] = b * cos[e + E / 2] + a * sin[e + E / 2];
    }
}

/* The totals of eight vectors, at a third of what eight times ``total`` costs. */
static inline lanes totals(const lanes *of) {
#ifdef __FMA__
#define PAIRS(a, b) _mm256_hadd_ps((__m256)(a), (__m256)(b))
    const __m256 low = PAIRS(PAIRS(of[0], of[1]), PAIRS(of[2], of[3]));
    const __m256 high = PAIRS(PAIRS(of[4], of[5]), PAIRS(of[6], of[7]));
    return (lanes)_mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
#undef PAIRS
#else
    lanes found;
    for (int c = 0; c < LANES; c++) found[c] = total(of[c]);
    return found;
#endif
}

/* Query [E] against eight neighbouring keys [8, E]. */
static inline lanes dots(const float *query, const float *keys, int64_t E) {
    lanes sum[LANES];
    for (int c = 0; c < LANES; c++) sum[c] = (lanes){0};
    for (int64_t e = 0; e < E; e += LANES) {
        const lanes q = LOAD(query + e);
        for (int c = 0; c < LANES; c++) sum[c] = fused(q, LOAD(keys + c * E + e), sum[c]);
    }
    return totals(sum);
}

/* One row's scores of one head [T, padded to lanes] -> shares that sum to one, 0 for what it may not see. */
static void soften(float *scores, int64_t from, int64_t first, int64_t held, const uint8_t *seen, int64_t R,
                   int64_t padded, float scaling) {
    const float never = -3.0e38f;
    for (int64_t t = from; t < first; t++) scores[t] = never;
    for (int64_t j = 0; j < R; j++)
        if (!seen[j]) scores[held + j] = never;
    for (int64_t t = held + R; t < padded; t++) scores[t] = never;
    float most = never;
    for (int64_t t = from; t < padded; t++) most = scores[t] > most ? scores[t] : most;
    lanes sum = {0};
    for (int64_t t = from; t < padded; t += LANES) {
        const lanes share = exponential((LOAD(scores + t) - most) * scaling);
        STORE(scores + t) = share;
        sum += share;
    }
    const float whole = 1.0f / total(sum);
    for (int64_t t = from; t < padded; t += LANES) STORE(scores + t) *= whole;
}

/* Q rows of shares over the same values: V lanes of the head's width. */
#define MIX(Q, V)                                                                                                    \
    static void mix_##Q##_##V(const float *const *shares, const float *values, float *const *out, int64_t from,      \
                              int64_t T, int64_t E) {                                                                \
        lanes sum[Q][V];                                                                                             \
        for (int q = 0; q < Q; q++)                                                                                  \
            for (int v = 0; v < V; v++) sum[q][v] = (lanes){0};                                                      \
        for (int64_t t = from; t < T; t++)                                                                           \
            for (int q = 0; q < Q; q++) {                                                                            \
                const lanes share = (lanes){0} + shares[q][t];                                                       \
                for (int v = 0; v < V; v++) sum[q][v] = fused(share, LOAD(values + t * E + v * LANES), sum[q][v]);   \
            }                                                                                                        \
        for (int q = 0; q < Q; q++)                                                                                  \
            for (int v = 0; v < V; v++) STORE(out[q] + v * LANES) = sum[q][v];                                       \
    }
MIX(3, 4) MIX(1, 4) MIX(3, 1) MIX(1, 1)

/* What the rows of a pass see in one kind of layer, and where they stand. */
typedef struct {
    const float *cos, *sin; /* [R, E] */
    const int64_t *first;   /* [R]: the first held column a row sees */
    const uint8_t *seen;    /* [R, R]: whether row r sees row j of this pass */
} Sight;

/* New rows after ``held`` columns: queries and keys are turned to their positions, keys and values join the cache,
   and every row looks at what it may.

   heads    [R, H + 2G, E]     queries, keys and values of the rows; queries and keys are turned in place
   keys     [G, capacity, E]   of one layer, values likewise; capacity is a multiple of eight
   scratch  [R * H, capacity]
   out      [R, H, E] */
static void attend(float *heads, const Sight *sight, float *keys, float *values, float *scratch, float *out, int64_t R,
                   int64_t H, int64_t G, int64_t E, int64_t held, int64_t capacity, float scaling, int64_t threads) {
    const float *cos = sight->cos, *sin = sight->sin;
    const int64_t *first = sight->first;
    const uint8_t *seen = sight->seen;
    const int64_t T = held + R, padded = (T + LANES - 1) / LANES * LANES, width = (H + 2 * G) * E, group = H / G;
    int64_t from = held;
    for (int64_t r = 0; r < R; r++) from = first[r] < from ? first[r] : from;
    from = from / LANES * LANES;
    for (int64_t r = 0; r < R; r++) {
        float *row = heads + r * width;
        for (int64_t h = 0; h < H + G; h++) rotate(row + h * E, cos + r * E, sin + r * E, E);
        for (int64_t g = 0; g < G; g++)
            for (int64_t e = 0; e < E; e++) {
                keys[(g * capacity + held + r) * E + e] = row[(H + g) * E + e];
                values[(g * capacity + held + r) * E + e] = row[(H + G + g) * E + e];
            }
    }
    const int64_t block = 128, blocks = (padded - from + block - 1) / block;
    const int V = E % (4 * LANES) ? 1 : 4;
    const int64_t slices = E / (V * LANES);
    const int worth = R * H * (padded - from) * E > 400000; /* less is done before a second thread has woken up */
#pragma omp parallel num_threads((int)threads) if (worth)
    {
#pragma omp for schedule(static) collapse(2)
        for (int64_t g = 0; g < G; g++)
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t begin = from + b * block, end = begin + block < padded ? begin + block : padded;
                for (int64_t r = 0; r < R; r++)
                    for (int64_t h = g * group; h < (g + 1) * group; h++)
                        for (int64_t t = begin; t < end; t += LANES)
                            STORE(scratch + (r * H + h) * capacity + t) =
                                dots(heads + r * width + h * E, keys + (g * capacity + t) * E, E);
            }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < R * H; i++)
            soften(scratch + i * capacity, from, first[i / H], held, seen + i / H * R, R, padded, scaling);
#pragma omp for schedule(static) collapse(2)
        for (int64_t g = 0; g < G; g++)
            for (int64_t s = 0; s < slices; s++) {
                const float *held_values = values + g * capacity * E + s * V * LANES;
                for (int64_t i = 0; i < R * group;) {
                    const float *shares[3];
                    float *to[3];
                    const int64_t Q = i + 3 <= R * group ? 3 : 1;
                    for (int64_t q = 0; q < Q; q++) {
                        const int64_t head = (i + q) / group * H + g * group + (i + q) % group;
                        shares[q] = scratch + head * capacity;
                        to[q] = out + head * E + s * V * LANES;
                    }
                    (V == 4 ? (Q == 3 ? mix_3_4 : mix_1_4) : (Q == 3 ? mix_3_1 : mix_1_1))(shares, held_values, to,
                                                                                        from, T, E);
                    i += Q;
                }
            }
    }
}

/* -- a pass ------------------------------------------------------------------------------------------------------- */

/* x [E] / its root mean square * gain [E] */
static void norm(const float *x, const float *gain, float *y, int64_t E, float eps) {
    lanes squares = {0};
    int64_t e = 0;
    for (; e + LANES <= E; e += LANES) squares = fused(LOAD(x + e), LOAD(x + e), squares);
    if (e < E) squares = fused(rest(x + e, E - e), rest(x + e, E - e), squares);
    const float scale = 1.0f / sqrtf(total(squares) / (float)E + eps);
    for (e = 0; e < E; e++) y[e] = x[e] * scale * gain[e];
}

static void norms(const float *x, const float *gain, float *y, int64_t R, int64_t D, float eps) {
    for (int64_t r = 0; r < R; r++) norm(x + r * D, gain, y + r * D, D, eps);
}

/* x + norm(y), in place of x. */
static void add_normed(float *x, float *y, const float *gain, int64_t R, int64_t D, float eps) {
    norms(y, gain, y, R, D, eps);
    for (int64_t i = 0; i < R * D; i++) x[i] += y[i];
}

/* z / (1 + e^-z'), z' = z for SiLU; GELU's tanh form is the same with z' a cubic of z. */
static inline lanes activate(lanes z, int64_t gelu) {
    const lanes of = gelu ? (lanes)(z * (z * z * 0.044715f + 1.0f) * 1.5957691216f) : z;
    const ilanes positive = of > 0.0f;
    const lanes small = exponential((lanes)(((ilanes)of & ~positive) | ((ilanes)-of & positive)));
    const lanes one = small * 0.0f + 1.0f;
    return z * (lanes)(((ilanes)one & positive) | ((ilanes)small & ~positive)) / (small + 1.0f);
}

/* gate and up side by side [R, 2I] -> activated product [R, I]. */
static void gated(const float *both, float *y, int64_t R, int64_t I, int64_t gelu) {
    for (int64_t r = 0; r < R; r++) {
        const float *gate = both + r * 2 * I, *up = gate + I;
        int64_t i = 0;
        for (; i + LANES <= I; i += LANES) STORE(y + r * I + i) = activate(LOAD(gate + i), gelu) * LOAD(up + i);
        if (i < I) {
            const lanes last = activate(rest(gate + i, I - i), gelu);
            for (int64_t t = i; t < I; t++) y[r * I + t] = last[t - i] * up[t];
        }
    }
}

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

/* Rows x [R, D], the embeddings, become what leaves the last layer; layer i is handed tap i on its way.

   keys, values  [layers, G, capacity, E]
   tapped        for each of layers + 1 taps: where it goes in a row of taps, or -1
   taps          [R, tap_width]
   gain, states  [D], [R, D]: the last norm, and what it makes of x
   scratch       R * (2 * max(D, (H + 2G) * E) + 3I + H * capacity) floats */
void eyas_pass(const Shape *s, const Layer *layers, const Sight *sights, float *x, float *keys, float *values,
               const int64_t *tapped, float *taps, int64_t tap_width, const float *gain, float *states, float *scratch,
               int64_t R, int64_t held, int64_t capacity, int64_t threads) {
    const int64_t D = s->D, all = (s->H + 2 * s->G) * s->E, wide = D > all ? D : all;
    const int64_t part = s->G * capacity * s->E;
    float *normed = scratch, *heads = normed + R * wide, *both = heads + R * wide, *inner = both + R * 2 * s->I,
          *scores = inner + R * s->I;
    for (int64_t i = 0; i <= s->layers; i++) {
        if (tapped[i] >= 0)
            for (int64_t r = 0; r < R; r++)
                memcpy(taps + r * tap_width + tapped[i], x + r * D, (size_t)D * sizeof(float));
        if (i == s->layers) break;
        const Layer *layer = layers + i;
        norms(x, layer->before_attention, normed, R, D, s->eps);
        products(layer->in, 3, normed, 0, heads, R, threads);
        for (int64_t r = 0; r < R && layer->query; r++) {
            float *head = heads + r * all;
            for (int64_t h = 0; h < s->H + s->G; h++, head += s->E)
                norm(head, h < s->H ? layer->query : layer->key, head, s->E, s->eps);
        }
        attend(heads, sights + layer->kind, keys + i * part, values + i * part, scores, normed, R, s->H, s->G, s->E,
               held, capacity, layer->scaling, threads);
        if (layer->after_attention) {
            products(&layer->out, 1, normed, 0, heads, R, threads);
            add_normed(x, heads, layer->after_attention, R, D, s->eps);
        } else
            products(&layer->out, 1, normed, x, x, R, threads);
        norms(x, layer->before_mlp, normed, R, D, s->eps);
        products(layer->rise, 2, normed, 0, both, R, threads);
        gated(both, inner, R, s->I, s->gelu);
        if (layer->after_mlp) {
            products(&layer->fall, 1, inner, 0, normed, R, threads);
            add_normed(x, normed, layer->after_mlp, R, D, s->eps);
        } else
            products(&layer->fall, 1, inner, x, x, R, threads);
    }
    norms(x, gain, states, R, D, s->eps);
}
