/* The processor time of a call of ONNX Runtime itself: tensors are made once, and the same ones are
   used by all calls.

     onnxruntime_by_hand LIBRARY MODEL.onnx SECONDS DTYPE RANK_IN SIZES... RANK_OUT SIZES... -- BATCH...

   DTYPE is 1 (float32) or 11 (float64); sizes are those of a sample, without the batch. The wheel has no
   header: positions in the table of functions are those of its C interface. */
#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ROUNDS 3
typedef void (*function)(void);
typedef struct {
    const function *(*get_api)(uint32_t);
    const char *(*get_version)(void);
} api_base;
static const function *api;

static void check(void *status) {
    if (!status) return;
    fprintf(stderr, "%s\n", ((const char *(*)(void *))api[2])(status));
    exit(1);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void *make_tensor(void *memory, int dtype, int rank, const int64_t *shape, int waves) {
    size_t element = dtype == 1 ? 4 : 8, count = 1;
    for (int d = 0; d < rank; d++) count *= (size_t)shape[d];
    void *data = calloc(count, element), *value = NULL;
    for (size_t j = 0; waves && j < count; j++) {
        if (element == 4)
            ((float *)data)[j] = sinf((float)j);
        else
            ((double *)data)[j] = sin((double)j);
    }
    check(((void *(*)(void *, void *, size_t, const int64_t *, size_t, int, void **))api[49])(
        memory, data, count * element, shape, (size_t)rank, dtype, &value));
    return value;
}

static int compare(const void *a, const void *b) {
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

int main(int count, char **arguments) {
    if (count < 8) return 2;
    void *library = dlopen(arguments[1], RTLD_NOW), *environment, *options, *session, *memory;
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    const api_base *(*get_base)(void) = (const api_base *(*)(void))(uintptr_t)dlsym(library, "OrtGetApiBase");
    api = get_base()->get_api(11);
    check(((void *(*)(int, const char *, void **))api[3])(4, "by hand", &environment));
    check(((void *(*)(void **))api[10])(&options));
    check(((void *(*)(void *, int))api[24])(options, 1)); /* threads */
    check(((void *(*)(void *, int))api[25])(options, 1));
    check(((void *(*)(void *, int))api[23])(options, 99)); /* all optimizations */
    check(((void *(*)(void *, const char *, void *, void **))api[7])(environment, arguments[2], options, &session));
    check(((void *(*)(int, int, void **))api[69])(0, 0, &memory));
    double seconds = atof(arguments[3]);
    int dtype = atoi(arguments[4]), at = 5, ranks[2];
    int64_t shapes[2][9];
    for (int i = 0; i < 2; i++) {
        ranks[i] = 1 + atoi(arguments[at++]);
        for (int d = 1; d < ranks[i]; d++) shapes[i][d] = atol(arguments[at++]);
    }
    const char *in_names[] = {"x"}, *out_names[] = {"y"};
    typedef void *(*run_session)(void *, const void *, const char *const *, const void *const *, size_t,
                                 const char *const *, size_t, void **);
    run_session run = (run_session)(uintptr_t)api[9];
    printf("{\"per_call_s\": [");
    for (int first = ++at; at < count; at++) {
        shapes[0][0] = shapes[1][0] = atol(arguments[at]);
        void *in = make_tensor(memory, dtype, ranks[0], shapes[0], 1);
        void *out = make_tensor(memory, dtype, ranks[1], shapes[1], 0);
        double rounds[ROUNDS], begin = now();
        long calls = 0;
        for (; now() - begin < seconds / ROUNDS; calls++)
            check(run(session, NULL, in_names, (const void *const *)&in, 1, out_names, 1, &out));
        for (int r = 0; r < ROUNDS; r++) {
            begin = now();
            for (long i = 0; i < calls; i++)
                check(run(session, NULL, in_names, (const void *const *)&in, 1, out_names, 1, &out));
            rounds[r] = (now() - begin) / (double)calls;
        }
        qsort(rounds, ROUNDS, sizeof *rounds, compare);
        printf("%s%.9f", at > first ? ", " : "", rounds[ROUNDS / 2]);
    }
    printf("]}\n");
    return 0;
}
