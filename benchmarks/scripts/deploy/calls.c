/* Call an exported model many times, and print what that took as JSON.

     calls time MODEL SECONDS BATCH...           median processor time of a call, for each batch
     calls check MODEL BATCH CALLS THREADS       that all calls of all threads have the same result, and
                                                 how much memory the process got meanwhile

   Inputs are waves of size 1. The first symbolic size is the batch; others have their least value. */
#include <dirent.h>
#include <math.h>
#include <paceline.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define ROUNDS 3
#define WARM_CALLS 1000 /* before memory is counted: pools of buffers are full then */

typedef struct {
    paceline_model *model;
    int ins, outs, dtype;
    int64_t shapes[2 * PACELINE_MAX_TENSORS][PACELINE_MAX_RANK];
    paceline_tensor tensors[2 * PACELINE_MAX_TENSORS];
    size_t bytes[2 * PACELINE_MAX_TENSORS];
} arrays;

static void stop(const char *what) {
    fprintf(stderr, "%s: %s\n", what, paceline_last_error());
    exit(1);
}

static double now(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* MiB of this process that are in memory. */
static double resident(void) {
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%*s %ld", &pages) != 1) exit(2);
    fclose(file);
    return (double)pages * (double)sysconf(_SC_PAGESIZE) / (1 << 20);
}

/* Seconds of processor time of all threads but the calling one. */
static double time_of_others(void) {
    char path[512];
    double ticks = 0;
    DIR *tasks = opendir("/proc/self/task");
    if (!tasks) exit(2);
    for (struct dirent *one; (one = readdir(tasks));) {
        unsigned long user, system;
        snprintf(path, sizeof path, "/proc/self/task/%s/stat", one->d_name);
        FILE *file = atoi(one->d_name) > 0 && atoi(one->d_name) != getpid() ? fopen(path, "r") : NULL;
        if (!file) continue;
        if (fscanf(file, "%*d (%*[^)]) %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &system) == 2)
            ticks += (double)(user + system);
        fclose(file);
    }
    closedir(tasks);
    return ticks / (double)sysconf(_SC_CLK_TCK);
}

static void make_arrays(paceline_model *model, int64_t batch, arrays *a) {
    a->model = model, a->ins = paceline_inputs(model), a->outs = paceline_outputs(model);
    const char *first = NULL;
    for (int i = 0; i < a->ins + a->outs; i++) {
        paceline_info info;
        if (i < a->ins ? paceline_input_info(model, i, &info) : paceline_output_info(model, i - a->ins, &info))
            stop("info");
        a->dtype = info.dtype;
        size_t element = info.dtype == PACELINE_FLOAT32 ? 4 : 8, count = 1;
        for (int d = 0; d < info.rank; d++) {
            if (info.symbols[d] && !first) first = info.symbols[d];
            int64_t size = !info.symbols[d] ? info.shape[d] : strcmp(info.symbols[d], first) ? info.min[d] : batch;
            a->shapes[i][d] = size;
            count *= (size_t)size;
        }
        void *data = calloc(count, element);
        if (!data) exit(2);
        for (size_t j = 0; i < a->ins && j < count; j++) {
            if (element == 4)
                ((float *)data)[j] = sinf((float)j);
            else
                ((double *)data)[j] = sin((double)j);
        }
        a->bytes[i] = count * element;
        a->tensors[i] = (paceline_tensor){data, info.dtype, info.rank, a->shapes[i], NULL};
    }
}

static void free_arrays(arrays *a) {
    for (int i = 0; i < a->ins + a->outs; i++) free(a->tensors[i].data);
}

static void run(const arrays *a) {
    if (paceline_run(a->model, a->tensors, a->ins, a->tensors + a->ins, a->outs)) stop("run");
}

static int compare(const void *a, const void *b) {
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

static double time_calls(paceline_model *model, int64_t batch, double seconds) {
    arrays a;
    make_arrays(model, batch, &a);
    run(&a);
    double rounds[ROUNDS], begin = now(CLOCK_THREAD_CPUTIME_ID);
    long calls = 0;
    for (; now(CLOCK_THREAD_CPUTIME_ID) - begin < seconds / ROUNDS; calls++) run(&a);
    for (int r = 0; r < ROUNDS; r++) {
        begin = now(CLOCK_THREAD_CPUTIME_ID);
        for (long i = 0; i < calls; i++) run(&a);
        rounds[r] = (now(CLOCK_THREAD_CPUTIME_ID) - begin) / (double)calls;
    }
    qsort(rounds, ROUNDS, sizeof *rounds, compare);
    free_arrays(&a);
    return rounds[ROUNDS / 2];
}

/* One thread of `check`. */
typedef struct {
    const arrays *expected;
    int64_t batch;
    long calls, different;
} work;

static void *check_calls(void *of_thread) {
    work *w = of_thread;
    arrays a;
    make_arrays(w->expected->model, w->batch, &a);
    for (long i = 0; i < w->calls; i++) {
        run(&a);
        int same = 1;
        for (int j = a.ins; j < a.ins + a.outs; j++)
            same = same && !memcmp(a.tensors[j].data, w->expected->tensors[j].data, a.bytes[j]);
        w->different += !same;
    }
    free_arrays(&a);
    return NULL;
}

static void check(paceline_model *model, int64_t batch, long calls, int threads) {
    arrays a;
    make_arrays(model, batch, &a);
    run(&a);
    work warm = {&a, batch, calls < WARM_CALLS ? calls : WARM_CALLS, 0};
    check_calls(&warm);
    work *all = calloc((size_t)threads, sizeof *all);
    pthread_t *started = calloc((size_t)threads, sizeof *started);
    if (!all || !started) exit(2);
    double memory = resident(), begin = now(CLOCK_MONOTONIC);
    long different = warm.different;
    for (int i = 0; i < threads; i++) {
        all[i] = (work){&a, batch, calls, 0};
        if (threads == 1)
            check_calls(&all[i]);
        else if (pthread_create(&started[i], NULL, check_calls, &all[i]))
            exit(2);
    }
    for (int i = 0; i < threads; i++) {
        if (threads > 1) pthread_join(started[i], NULL);
        different += all[i].different;
    }
    printf(", \"different\": %ld, \"memory_growth_mib\": %.3f, \"per_call_s\": %.9f", different, resident() - memory,
           (now(CLOCK_MONOTONIC) - begin) / (double)calls);
    free(all);
    free(started);
    free_arrays(&a);
}

int main(int count, char **arguments) {
    if (count < 5) return 2;
    double memory = resident(), begin = now(CLOCK_MONOTONIC);
    paceline_model *model;
    if (paceline_load(arguments[2], NULL, &model)) stop("load");
    double seconds = now(CLOCK_MONOTONIC) - begin;
    arrays a;
    make_arrays(model, 1, &a);
    run(&a);
    free_arrays(&a);
    printf("{\"backend\": \"%s\", \"load_s\": %.6f, \"load_mib\": %.3f", paceline_backend(model), seconds,
           resident() - memory);
    if (!strcmp(arguments[1], "time")) {
        printf(", \"per_call_s\": [");
        for (int i = 4; i < count; i++)
            printf("%s%.9f", i > 4 ? ", " : "", time_calls(model, atol(arguments[i]), atof(arguments[3])));
        printf("]");
    } else {
        check(model, atol(arguments[3]), atol(arguments[4]), count > 5 ? atoi(arguments[5]) : 1);
    }
    printf(", \"time_of_others_s\": %.2f}\n", time_of_others());
    paceline_free(model);
    return 0;
}
