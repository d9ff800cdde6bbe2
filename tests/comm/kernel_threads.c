/* Run the shared-memory kernel under a sanitizer: threads act as ranks over one memory and run all
   collectives on vectors that are short, long, and not a multiple of any block size. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>

#include "kernel.c"

#define RANKS 3
#define SLOT 4096
#define ROUNDS 12
#define FAIL(...) (fprintf(stderr, __VA_ARGS__), exit(1))

static Comm *whole; /* one mapping for all threads: sanitizers detect races by address */

static void expect(int error, const char *what) {
    if (error) FAIL("%s: error %d\n", what, error);
}

static void go(Comm *c, int rank, size_t n) {
    double all = 0, *big = malloc(RANKS * (n + 1) * sizeof(double));
    float *x = malloc((n + 1) * sizeof(float));
    for (int q = 0; q < RANKS; q++) all += q + 1;
    for (size_t i = 0; i < n; i++) x[i] = (float)(rank + 1) * (float)(i % 7);
    expect(paceline_all_reduce(c, (char *)x, n * sizeof(float), F32, SUM, 60), "all-reduce");
    for (size_t i = 0; i < n; i++)
        if (x[i] != (float)all * (float)(i % 7)) FAIL("all-reduce: %zu of %zu\n", i, n);

    int64_t *k = malloc((n + 1) * sizeof(int64_t));
    for (size_t i = 0; i < n; i++) k[i] = INT64_MAX - rank; /* wraps around */
    expect(paceline_all_reduce(c, (char *)k, n * sizeof(int64_t), I64, SUM, 60), "wraps");

    const char *from[RANKS];
    char *to[RANKS];
    for (int q = 0; q < RANKS; q++) {
        from[q] = (char *)(big + (size_t)q * n);
        to[q] = (char *)(big + (size_t)q * n);
        for (size_t i = 0; i < n; i++) big[(size_t)q * n + i] = rank + q;
    }
    double *mine = malloc((n + 1) * sizeof(double));
    expect(paceline_reduce_scatter(c, from, (char *)mine, n * sizeof(double), F64, SUM, 0, 60),
           "scatter");
    for (size_t i = 0; i < n; i++)
        if (mine[i] != all - RANKS + RANKS * rank) FAIL("reduce-scatter: %zu of %zu\n", i, n);
    expect(paceline_all_gather(c, (char *)mine, to, n * sizeof(double), 60), "all-gather");
    for (int q = 0; q < RANKS; q++)
        for (size_t i = 0; i < n; i++)
            if (big[(size_t)q * n + i] != all - RANKS + RANKS * q) FAIL("all-gather of %d\n", q);
    expect(paceline_broadcast(c, (char *)mine, n * sizeof(double), RANKS - 1, 60), "broadcast");
    for (size_t i = 0; i < n; i++)
        if (mine[i] != all - RANKS + RANKS * (RANKS - 1)) FAIL("broadcast: %zu of %zu\n", i, n);
    expect(paceline_barrier(c, 60), "barrier");

    uint16_t *h = malloc((n + 1) * sizeof(uint16_t));
    for (int kind = F16; kind <= BF16; kind++) {
        for (size_t i = 0; i < n; i++) h[i] = (uint16_t)(i * 2654435761u >> 7);
        expect(paceline_all_reduce(c, (char *)h, n * 2, kind, MEAN, 60), "16 bits");
    }
    size_t bytes = n * sizeof(float);
    for (int owners = 1; owners <= RANKS; owners++) { /* same as in an exchange with other hosts */
        size_t part = (bytes / owners / LINE + 1) * LINE, at = part * rank / sizeof(float);
        for (size_t i = 0; i < n; i++) x[i] = (float)(rank + 1) * (float)(i % 7);
        expect(paceline_reduce_parts(c, (char *)x, bytes, part, F32, MEAN, 2, 60), "parts");
        for (size_t i = at; i < n && i < at + part / sizeof(float); i++)
            if (x[i] != (float)all / 2 * (float)(i % 7)) FAIL("parts: %zu of %zu\n", i, n);
        expect(paceline_gather_parts(c, (char *)x, bytes, part, 60), "gather");
        for (size_t i = 0; i < n; i++)
            if (x[i] != (float)all / 2 * (float)(i % 7)) FAIL("gather: %zu of %zu\n", i, n);
    }
    free(big), free(x), free(k), free(mine), free(h);
}

static void *rank_of(void *number) {
    int rank = (int)(intptr_t)number;
    Comm c = *whole;
    c.rank = rank;
    paceline_on_socket(&c, rank % 2, 0);
    expect(paceline_barrier(&c, 60), "barrier"); /* all ranks have announced their sockets */
    for (int round = 0; round < ROUNDS; round++) {
        if (round == ROUNDS / 2) { /* ranks 0 and 2 share a socket */
            if (paceline_sockets(&c) != 2) FAIL("sockets\n");
            paceline_by_socket(&c, 1);
        }
        const size_t sizes[] = {0, 1, 37, 1000, 4096, 5001, 20011};
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) go(&c, rank, sizes[i]);
    }
    free(c.order);
    return NULL;
}

int main(void) {
    pthread_t threads[RANKS];
    int memory = memfd_create("test", 0);
    if (memory < 0 || ftruncate(memory, (off_t)paceline_needs(RANKS, SLOT))) FAIL("memory\n");
    whole = paceline_open(memory, 0, RANKS, SLOT, 0);
    if (!whole) FAIL("open\n");
    for (intptr_t r = 0; r < RANKS; r++)
        pthread_create(&threads[r], NULL, rank_of, (void *)r);
    for (int r = 0; r < RANKS; r++) pthread_join(threads[r], NULL);
    paceline_close(whole);
    puts("clean");
    return 0;
}
