/* Eight floats at a time, and the few functions of them that are needed. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __FMA__
#include <immintrin.h>
#endif

#define LANES 8
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

/* z / / (1 + e^-z'), z' = z for SiLU; GELU's tanh form is the same with z' a cubic of z. */
static inline lanes activate(lanes z, int64_t gelu) {
    const lanes of = gelu ? (lanes)(z * (z * z * 0.044715f + 1.0f) * 1.5957691216f) : z;
    const ilanes positive = of > 0.0f;
    const lanes small = exponential((lanes)(((ilanes)of & ~positive) | ((ilanes)-of & positive)));
    const lanes one = small * 0.0f + 1.0f;
    return z * (lanes)(((ilanes)one & positive) | ((ilanes)small & ~positive)) / (small + 1.0f);
}
