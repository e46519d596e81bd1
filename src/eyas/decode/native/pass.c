/* A few rows through weights as they lie, and their attention: what decoding does, at the speed memory gives weights.

   A matrix product library wants many rows; for one to eight of them it reads weights at a third of the speed the
   memory has, or computes every row anew. Here a weight is read once whatever the number of rows, from the place
   where the model keeps it: nothing is packed and nothing exists twice.

   Every result is summed in an order that depends on its own row alone. So a row's numbers are the same bits
   whether it comes alone or with others, and with any number of threads: a verify pass says exactly what plain
   decoding says.

   A pass is one team of threads from its first layer to its last. They share out every step by outputs, heads or
   columns and meet between steps; a meeting takes a fraction of a microsecond where waking a thread takes fifty.

   Letters: R rows, K inputs, N outputs; of attention H query heads, G key/value heads, E head width (a multiple of
   eight), T columns held and new. Compiled by kernel.py; gcc and clang. */

#include "attention.h"
#include "norm.h"
#include "product.h"
#include "shape.h"

void eyas_linear(const Linear *of, const float *x, float *y, int64_t R, int64_t threads) {
#pragma omp parallel num_threads((int)threads)
    {
        const Team team = {0, omp_get_thread_num(), omp_get_num_threads()};
        products(&team, of, 1, x, 0, y, R);
    }
}

/* gate and up side by side [R, 2I] -> activated product [R, I], this thread's columns: those whose gate and up it made. */
static void gated(const Team *team, const float *both, float *y, int64_t R, int64_t I, int64_t gelu) {
    int64_t from, to;
    share(team, I, &from, &to);
    for (int64_t r = 0; r < R; r++) {
        const float *gate = both + r * 2 * I, *up = gate + I;
        int64_t i = from;
        for (; i + LANES <= to; i += LANES) STORE(y + r * I + i) = activate(LOAD(gate + i), gelu) * LOAD(up + i);
        if (i < to) {
            const lanes last = activate(rest(gate + i, to - i), gelu);
            for (int64_t t = i; t < to; t++) y[r * I + t] = last[t - i] * up[t];
        }
    }
}

/* x + what ``of`` makes of ``inner``, normed first where there is a gain, in place of x [R, D]; ``spare`` [R, D]. */
static void onto(const Team *team, const Shape *s, const Linear *of, const float *inner, const float *gain, float *spare,
                 float *x, int64_t R) {
    if (gain) {
        products(team, of, 1, inner, 0, spare, R);
        meet(team);
        add_normed(team, x, spare, gain, R, s->D, s->eps);
    } else
        products(team, of, 1, inner, x, x, R);
    meet(team);
}

/* One layer, over the residual stream x [R, D] in place. ``own`` [R, inputs of q k v] is this thread's. */
static void through(const Team *team, const Shape *s, const Layer *layer, const Sight *sight, float *x, float *keys,
                    float *values, const Cache *cache, const Beside *beside, float *own, float *scratch, int64_t R) {
    const int64_t D = s->D, all = (s->H + 2 * s->G) * s->E, wide = D > all ? D : all;
    float *normed = scratch, *heads = normed + R * wide, *both = heads + R * wide, *inner = both + R * 2 * s->I,
          *scores = inner + R * s->I;
    const int64_t width = beside->rows ? 2 * D : D;
    if (beside->rows) norms(beside->rows, beside->gain, own, R, D, width, s->eps);
    norms(x, layer->before_attention, own + (width - D), R, D, width, s->eps);
    products(team, layer->in, 3, own, 0, heads, R);
    meet(team);
    attend(team, s, layer, sight, heads, keys, values, cache, scores, normed, R);
    onto(team, s, &layer->out, normed, layer->after_attention, heads, x, R);
    norms(x, layer->before_mlp, own, R, D, D, s->eps);
    products(team, layer->rise, 2, own, 0, both, R);
    gated(team, both, inner, R, s->I, s->gelu);
    meet(team);
    onto(team, s, &layer->fall, inner, layer->after_mlp, normed, x, R);
}

/* Rows x [R, D] become what leaves the last layer; layer i is handed tap i on its way.

   scratch   R * (2 * max(D, (H + 2G) * E) + 3I + H * capacity + threads * 2D) floats */
void eyas_pass(const Shape *s, const Layer *layers, const Sight *sights, float *x, const Beside *beside,
               const Cache *cache, const Outlet *out, float *scratch, int64_t R, int64_t threads) {
    const int64_t D = s->D, part = s->G * cache->capacity * s->E;
    const Beside nothing = {0, 0};
    Door door;
    atomic_init(&door.arrived, 0);
    atomic_init(&door.turn, 0);
    atomic_init(&door.asleep, 0);
#pragma omp parallel num_threads((int)threads)
    {
        const Team team = {&door, omp_get_thread_num(), omp_get_num_threads()};
        float *own = scratch + team.me * R * 2 * D, *shared = scratch + threads * R * 2 * D;
        for (int64_t i = 0; i <= s->layers; i++) {
            if (out->tapped[i] >= 0 && team.me == 0)
                for (int64_t r = 0; r < R; r++)
                    memcpy(out->taps + r * out->tap_width + out->tapped[i], x + r * D, (size_t)D * sizeof(float));
            if (i < s->layers)
                through(&team, s, layers + i, sights + layers[i].kind, x, cache->keys + i * part,
                        cache->values + i * part, cache, i ? &nothing : beside, own, shared, R);
        }
        norms(x, out->gain, own, R, D, D, s->eps);
        if (team.me == 0) memcpy(out->states, own, (size_t)(R * D) * sizeof(float));
        if (out->logits)
            products(&team, out->head, 1, own + out->first_asked * D, 0, out->logits, R - out->first_asked);
    }
}
