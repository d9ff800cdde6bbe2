/* Ranks of a node call a model: each one its own, or one process for all, which batches their requests.

     broker alone  MODEL RANKS BATCH CALLS
     broker server MODEL RANKS BATCH CALLS

   Prints the time of a call of all ranks together as JSON. Requests and results lie in shared memory,
   those of all ranks behind each other, so that requests which arrive together are one batch without a
   copy. The server waits for all ranks, but at most 50 us. The model has inputs [batch, ...]. */
#include <math.h>
#include <paceline.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_RANKS 64
#define WAIT_S 50e-6
enum { IDLE, REQUEST, DONE };

typedef struct {
    _Alignas(64) atomic_int state;
} mailbox;
typedef struct {
    atomic_int ready, ended;
    mailbox of[MAX_RANKS];
} board;

static board *shared;
static char *inputs, *outputs; /* of all ranks, in shared memory */
static size_t in_bytes, out_bytes; /* of one rank */
static int ranks, dtype;
static long batch, calls;

static void stop(const char *what) {
    fprintf(stderr, "%s: %s\n", what, paceline_last_error());
    exit(1);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void *share(size_t bytes) {
    void *made = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) exit(2);
    return made;
}

static paceline_model *load(const char *path) {
    paceline_model *model;
    if (paceline_load(path, NULL, &model)) stop("load");
    return model;
}

static size_t sample_bytes(const paceline_info *info) {
    size_t bytes = info->dtype == PACELINE_FLOAT32 ? 4 : 8;
    for (int d = 1; d < info->rank; d++) bytes *= (size_t)info->shape[d];
    return bytes;
}

static void run(const paceline_model *model, long samples, const void *x, void *y) {
    int code = dtype == PACELINE_FLOAT32 ? paceline_run_f32(model, samples, x, y) : paceline_run_f64(model, samples, x, y);
    if (code) stop("run");
}

static void start_together(void) {
    atomic_fetch_add(&shared->ready, 1);
    while (atomic_load(&shared->ready) < ranks) sched_yield();
}

static void call_own_model(int rank, const char *path) {
    paceline_model *model = load(path);
    char *x = inputs + (size_t)rank * in_bytes, *y = outputs + (size_t)rank * out_bytes;
    run(model, batch, x, y);
    start_together();
    for (long i = 0; i < calls; i++) run(model, batch, x, y);
}

static void call_server(int rank) {
    char *x = malloc(in_bytes), *y = malloc(out_bytes); /* arrays of the solver */
    if (!x || !y) exit(2);
    memcpy(x, inputs + (size_t)rank * in_bytes, in_bytes);
    atomic_int *state = &shared->of[rank].state;
    start_together();
    for (long i = 0; i < calls; i++) {
        memcpy(inputs + (size_t)rank * in_bytes, x, in_bytes);
        atomic_store(state, REQUEST);
        while (atomic_load(state) != DONE) sched_yield();
        memcpy(y, outputs + (size_t)rank * out_bytes, out_bytes);
    }
    atomic_fetch_add(&shared->ended, 1);
    free(x);
    free(y);
}

static void serve(const char *path) {
    paceline_model *model = load(path);
    run(model, batch * ranks, inputs, outputs);
    double since = 0;
    while (atomic_load(&shared->ended) < ranks) {
        int waiting = 0;
        for (int r = 0; r < ranks; r++) waiting += atomic_load(&shared->of[r].state) == REQUEST;
        if (waiting && !since) since = now();
        if (!waiting || (waiting < ranks && now() - since < WAIT_S)) {
            sched_yield();
            continue;
        }
        since = 0;
        for (int first = 0, behind; first < ranks; first = behind + 1) { /* requests that lie behind each other */
            for (behind = first; behind < ranks && atomic_load(&shared->of[behind].state) == REQUEST;) behind++;
            if (behind == first) continue;
            run(model, batch * (behind - first), inputs + (size_t)first * in_bytes, outputs + (size_t)first * out_bytes);
            for (int r = first; r < behind; r++) atomic_store(&shared->of[r].state, DONE);
        }
    }
}

int main(int count, char **arguments) {
    if (count != 6) return 2;
    int server = !strcmp(arguments[1], "server");
    ranks = atoi(arguments[3]), batch = atol(arguments[4]), calls = atol(arguments[5]);
    if (ranks < 1 || ranks > MAX_RANKS) return 2;
    paceline_model *model = load(arguments[2]);
    paceline_info x, y;
    if (paceline_input_info(model, 0, &x) || paceline_output_info(model, 0, &y)) stop("info");
    paceline_free(model);
    dtype = x.dtype, in_bytes = sample_bytes(&x) * (size_t)batch, out_bytes = sample_bytes(&y) * (size_t)batch;
    shared = share(sizeof *shared);
    inputs = share(in_bytes * (size_t)ranks);
    outputs = share(out_bytes * (size_t)ranks);
    for (size_t i = 0; i < in_bytes * (size_t)ranks / (dtype == PACELINE_FLOAT32 ? 4 : 8); i++) {
        if (dtype == PACELINE_FLOAT32)
            ((float *)inputs)[i] = sinf((float)i);
        else
            ((double *)inputs)[i] = sin((double)i);
    }
    fflush(stdout);
    for (int i = 0; i < ranks + server; i++) {
        if (fork()) continue;
        if (i == ranks)
            serve(arguments[2]);
        else if (server)
            call_server(i);
        else
            call_own_model(i, arguments[2]);
        exit(0);
    }
    while (atomic_load(&shared->ready) < ranks) usleep(100);
    double begin = now();
    for (int i = 0, status; i < ranks + server; i++) {
        if (wait(&status) < 0 || !WIFEXITED(status) || WEXITSTATUS(status)) return 1;
    }
    printf("{\"per_call_s\": %.9f}\n", (now() - begin) / (double)calls);
    return 0;
}
