/* The model computes y[i][j] = 10 (j + 1) + sum over k of (k + 1) x[i][k]: of [batch,3] to [batch,2]. */
#include <math.h>
#include <paceline.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, paceline_last_error()); \
            exit(1);                                                                      \
        }                                                                                 \
    } while (0)

static paceline_model *model;

static double expected(const double *x, int j) { return 10 * (j + 1) + x[0] + 2 * x[1] + 3 * x[2]; }

static void *many_calls(void *seed) {
    for (int call = 0; call < 2000; call++) {
        double x[300][3], y[300][2];
        int batch = 1 + (call * 7 + *(int *)seed) % 300;
        for (int i = 0; i < batch; i++)
            for (int k = 0; k < 3; k++) x[i][k] = sin(i + k + call + *(int *)seed);
        CHECK(paceline_run_f64(model, batch, &x[0][0], &y[0][0]) == PACELINE_OK);
        for (int i = 0; i < batch; i++)
            for (int j = 0; j < 2; j++) CHECK(fabs(y[i][j] - expected(x[i], j)) < 1e-12);
    }
    return NULL;
}

int main(int count, char **arguments) {
    (void)count;
    CHECK(paceline_load(arguments[1], NULL, &model) == PACELINE_OK);
    CHECK(paceline_inputs(model) == 1 && paceline_outputs(model) == 1);
    paceline_info info;
    CHECK(paceline_input_info(model, 0, &info) == PACELINE_OK && !strcmp(info.name, "x") && info.rank == 2);
    CHECK(info.shape[0] == -1 && !strcmp(info.symbols[0], "batch") && info.max[0] == 400 && info.shape[1] == 3);
    CHECK(paceline_input_info(model, 1, &info) == PACELINE_ERROR_ARGUMENT);
    CHECK(strstr(paceline_describe(model), "paceline-model"));

    /* Three fields of a solver, one of them with a stride, into two fields. */
    double a[4] = {1, 2, 3, 4}, b[8] = {5, 0, 6, 0, 7, 0, 8, 0}, c = 0.25, u[4], v[8];
    const double *in[3] = {a, b, &c};
    double *out[2] = {u, v};
    int64_t in_strides[3] = {1, 2, 0}, out_strides[2] = {1, 2};
    CHECK(paceline_run_fields_f64(model, 4, in, in_strides, out, out_strides) == PACELINE_OK);
    for (int i = 0; i < 4; i++) {
        double x[3] = {a[i], b[2 * i], c};
        CHECK(fabs(u[i] - expected(x, 0)) < 1e-12 && fabs(v[2 * i] - expected(x, 1)) < 1e-12);
    }
    /* float32 arrays only if they are to be converted. */
    float single[3] = {1, 2, 3}, result[2];
    CHECK(paceline_run_f32(model, 1, single, result) == PACELINE_ERROR_DTYPE);
    paceline_options options = PACELINE_OPTIONS;
    options.flags = PACELINE_CONVERT | PACELINE_CHECK_FINITE;
    paceline_model *converting;
    CHECK(paceline_load(arguments[1], &options, &converting) == PACELINE_OK);
    CHECK(paceline_run_f32(converting, 1, single, result) == PACELINE_OK && fabsf(result[0] - 24) < 1e-5f);
    single[1] = NAN;
    CHECK(paceline_run_f32(converting, 1, single, result) == PACELINE_ERROR_NOT_FINITE);
    CHECK(strstr(paceline_last_error(), "element 1"));
    paceline_free(converting);
    /* Wrong calls. */
    double x[3] = {0}, y[2];
    CHECK(paceline_run_f64(NULL, 1, x, y) == PACELINE_ERROR_ARGUMENT);
    CHECK(paceline_run_f64(model, 1, NULL, y) == PACELINE_ERROR_ARGUMENT);
    CHECK(paceline_run_f64(model, 401, x, y) == PACELINE_ERROR_BOUNDS);
    CHECK(paceline_run_f64(model, -1, x, y) == PACELINE_ERROR_SHAPE);
    CHECK(paceline_run_f64(model, 0, x, y) == PACELINE_OK);
    CHECK(paceline_run(model, NULL, 0, NULL, 0) == PACELINE_ERROR_ARGUMENT);
    CHECK(!strcmp(paceline_error_name(PACELINE_ERROR_SHAPE), "PACELINE_ERROR_SHAPE"));

    pthread_t threads[16];
    int seeds[16];
    for (int i = 0; i < 16; i++) {
        seeds[i] = i;
        CHECK(!pthread_create(&threads[i], NULL, many_calls, &seeds[i]));
    }
    for (int i = 0; i < 16; i++) pthread_join(threads[i], NULL);
    paceline_free(model);
    puts("right");
    return 0;
}
