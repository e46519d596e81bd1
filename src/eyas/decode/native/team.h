/* The threads of a pass: how they share out a step, and where they meet. */

#pragma once

#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <omp.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "lanes.h"

#define PATIENCE 4000 /* looks, some fifty microseconds; then a thread sleeps, and others may have the processor */

typedef struct {
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int turn;
    atomic_int asleep;
} Door;

typedef struct {
    Door *door;
    int64_t me, all;
} Team;

static void sleep_until_it_turns(Door *door, int turn) {
    atomic_fetch_add(&door->asleep, 1);
    while (atomic_load(&door->turn) == turn) syscall(SYS_futex, &door->turn, FUTEX_WAIT_PRIVATE, turn, 0, 0, 0);
    atomic_fetch_sub(&door->asleep, 1);
}

/* Nobody goes on before all have come. */
static void meet(const Team *team) {
    if (team->all == 1) return;
    Door *door = team->door;
    const int turn = atomic_load_explicit(&door->turn, memory_order_relaxed);
    if (atomic_fetch_add(&door->arrived, 1) == team->all - 1) {
        atomic_store_explicit(&door->arrived, 0, memory_order_relaxed);
        atomic_store(&door->turn, turn + 1);
        if (atomic_load(&door->asleep)) syscall(SYS_futex, &door->turn, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
        return;
    }
    for (int looks = 0; atomic_load_explicit(&door->turn, memory_order_acquire) == turn; looks++) {
        if (looks == PATIENCE) {
            sleep_until_it_turns(door, turn);
            return;
        }
#ifdef __FMA__
        _mm_pause();
#endif
    }
}

/* The part of [0, whole) that is this thread's: [*from, *to). */
static inline void share(const Team *team, int64_t whole, int64_t *from, int64_t *to) {
    *from = whole * team->me / team->all;
    *to = whole * (team->me + 1) / team->all;
}
