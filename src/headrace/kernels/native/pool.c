/* The kernels' threads. Whoever calls `run_units` works itself; helpers join while there are units left.
 *
 * OpenMP ends a region when every thread of the team has been there. On a machine whose cores are also wanted by
 * others, that makes each region wait for a helper to be scheduled, hundreds of times a step. Here the caller never
 * waits for a helper that hasn't begun: it takes all units itself, closes the door and waits only for helpers inside.
 *
 * Invariant: a job's fields are written only while the door is closed and nobody is inside.
 */
#define _GNU_SOURCE
#include "common.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define OPEN 0x40000000
#define INSIDE 0x3fffffff
/* A helper looks for the next job this long before it sleeps: about what lies between two kernels of a step. */
#define LOOK_NS 50000

static struct {
    int door;     /* OPEN or not, and how many helpers are inside */
    int bell;     /* counts jobs; helpers sleep on it */
    int sleepers; /* helpers that sleep, or are about to */
    int waiting;  /* the caller sleeps on the door, or is about to */
    int busy;     /* a caller has the pool */
    int num_helpers;

    unit_body body;
    void *context;
    int64_t num_units, next_unit;
    int max_inside, next_thread;
} pool __attribute__((aligned(64)));

static void sleep_on(int *word, int value) { syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0); }
static void wake(int *word, int count) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0); }

INLINE void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}
static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Looks at a word for a while. Returns whether it changed. */
static int look(int *word, int value) {
    int64_t end = now_ns() + LOOK_NS;
    do {
        for (int i = 0; i < 16; i++) {
            if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != value) return 1;
            relax();
        }
    } while (now_ns() < end);
    return 0;
}

static int can_enter(void) {
    int door = __atomic_load_n(&pool.door, __ATOMIC_ACQUIRE);
    while ((door & OPEN) && (door & INSIDE) < pool.max_inside)
        if (__atomic_compare_exchange_n(&pool.door, &door, door + 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE)) return 1;
    return 0;
}
static void help(void) {
    int thread = -1;
    for (;;) {
        int64_t unit = __atomic_fetch_add(&pool.next_unit, 1, __ATOMIC_RELAXED);
        if (unit >= pool.num_units) break;
        if (thread < 0) thread = __atomic_add_fetch(&pool.next_thread, 1, __ATOMIC_RELAXED);
        pool.body(pool.context, unit, thread);
    }
    int door = __atomic_sub_fetch(&pool.door, 1, __ATOMIC_SEQ_CST);
    if (door == 0 && __atomic_load_n(&pool.waiting, __ATOMIC_SEQ_CST)) wake(&pool.door, 1);
}
static void *helper(void *unused) {
    for (;;) {
        int seen = __atomic_load_n(&pool.bell, __ATOMIC_ACQUIRE);
        if (can_enter()) help();
        if (look(&pool.bell, seen)) continue;
        __atomic_fetch_add(&pool.sleepers, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(&pool.bell, __ATOMIC_SEQ_CST) == seen) sleep_on(&pool.bell, seen);
        __atomic_fetch_sub(&pool.sleepers, 1, __ATOMIC_SEQ_CST);
    }
    return unused;
}

/* A forked child has none of its parent's helpers. */
static void forget_helpers(void) { memset(&pool, 0, sizeof pool); }

static void grow(int num_helpers) {
    static int watches_forks = 0;
    if (!watches_forks) watches_forks = pthread_atfork(NULL, NULL, forget_helpers) == 0;
    pthread_attr_t attributes;
    if (!watches_forks || pthread_attr_init(&attributes) != 0) return;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    for (pthread_t thread; pool.num_helpers < num_helpers; pool.num_helpers++)
        if (pthread_create(&thread, &attributes, helper, NULL) != 0) break;
    pthread_attr_destroy(&attributes);
}

static void run_alone(int64_t num_units, unit_body body, void *context) {
    for (int64_t unit = 0; unit < num_units; unit++) body(context, unit, 0);
}

void run_units(int64_t num_units, int num_threads, unit_body body, void *context) {
    if (num_threads > num_units) num_threads = (int)num_units;
    int idle = 0;
    /* A second caller at the same time has its own thread only. */
    if (num_threads <= 1 || !__atomic_compare_exchange_n(&pool.busy, &idle, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
        run_alone(num_units, body, context);
        return;
    }
    if (pool.num_helpers < num_threads - 1) grow(num_threads - 1);
    pool.body = body;
    pool.context = context;
    pool.num_units = num_units;
    pool.next_unit = 0;
    pool.next_thread = 0;
    pool.max_inside = num_threads - 1;
    __atomic_store_n(&pool.waiting, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&pool.door, OPEN, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&pool.bell, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool.sleepers, __ATOMIC_SEQ_CST) > 0) wake(&pool.bell, num_threads - 1);
    for (;;) {
        int64_t unit = __atomic_fetch_add(&pool.next_unit, 1, __ATOMIC_RELAXED);
        if (unit >= num_units) break;
        body(context, unit, 0);
    }
    int door = __atomic_and_fetch(&pool.door, INSIDE, __ATOMIC_SEQ_CST);
    while (door > 0) {
        if (!look(&pool.door, door)) {
            __atomic_store_n(&pool.waiting, 1, __ATOMIC_SEQ_CST);
            sleep_on(&pool.door, door);
        }
        door = __atomic_load_n(&pool.door, __ATOMIC_ACQUIRE);
    }
    __atomic_store_n(&pool.busy, 0, __ATOMIC_RELEASE);
}

/* ---- how many threads work on units ---- */

struct census {
    int64_t seen, wanted;
};
static void count_thread(void *context, int64_t unit, int thread) {
    (void)unit;
    struct census *census = context;
    __atomic_fetch_or(&census->seen, (int64_t)1 << thread, __ATOMIC_RELAXED);
    for (int wait = 0; wait < 50000; wait++) {
        int64_t seen = __atomic_load_n(&census->seen, __ATOMIC_RELAXED);
        if (__builtin_popcountll((unsigned long long)seen) >= census->wanted) return;
        usleep(100);
    }
}
/* Threads that a job of num_threads really gets, once all have had five seconds to wake. */
EXPORT int64_t hr_count_threads(int64_t num_threads) {
    struct census census = {0, num_threads};
    run_units(num_threads * 8, (int)num_threads, count_thread, &census);
    return __builtin_popcountll((unsigned long long)census.seen);
}
