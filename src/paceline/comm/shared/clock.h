/* Times in nanoseconds. */
#pragma once
#include <stdint.h>
#include <time.h>

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* Return a timeout in nanoseconds; 0, for no limit, if it is 0 or exceeds a hundred years. */
static int64_t timeout_ns(double seconds) { return seconds < 3e9 ? (int64_t)(seconds * 1e9) : 0; }
