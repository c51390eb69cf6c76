/* One way to run on several threads: the pool of the OpenMP runtime that torch has loaded.
 *
 * Of OpenMP only a bare parallel region is used, which every runtime's GNU interface has had for ten years.
 */
#include "common.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

void run_units(int64_t num_units, int num_threads, unit_body body, void *context) {
    if (num_threads > num_units) num_threads = (int)num_units;
    if (num_threads <= 1) {
        for (int64_t unit = 0; unit < num_units; unit++) body(context, unit, 0);
        return;
    }
#if defined(_OPENMP)
    int64_t next = 0;
#pragma omp parallel num_threads(num_threads)
    {
        int thread = omp_get_thread_num();
        for (;;) {
            int64_t unit = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
            if (unit >= num_units) break;
            body(context, unit, thread);
        }
    }
#else
    for (int64_t unit = 0; unit < num_units; unit++) body(context, unit, 0);
#endif
}

/* How many threads a region of num_threads really gets. */
struct census {
    int64_t seen;
};
static void count_thread(void *context, int64_t unit, int thread) {
    (void)unit;
    __atomic_fetch_or(&((struct census *)context)->seen, (int64_t)1 << thread, __ATOMIC_RELAXED);
    /* Long enough that one thread can't take all units before the others have woken. */
    for (volatile int i = 0; i < 2000000; i++) {}
}
EXPORT int64_t hr_count_threads(int64_t num_threads) {
    struct census census = {0};
    run_units(num_threads * 8, (int)num_threads, count_thread, &census);
    return __builtin_popcountll((unsigned long long)census.seen);
}
