/* Call a model that `paceline export` has written, from C, C++ or Fortran.

   Every function returns PACELINE_OK (0) or an error code; paceline_last_error() has the message of
   the last error of the calling thread. No function ends the process, throws an exception or prints.

   A loaded model is constant: any number of threads may call it at the same time. Only
   paceline_free() must not run beside another call of the same model. */
#ifndef PACELINE_H
#define PACELINE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define PACELINE_API __attribute__((visibility("default")))
#else
#define PACELINE_API
#endif

#define PACELINE_MAX_RANK 8
#define PACELINE_MAX_TENSORS 32 /* inputs, and outputs, of a model */

typedef struct paceline_model paceline_model;

enum { PACELINE_FLOAT32 = 1, PACELINE_FLOAT64 = 2 }; /* dtypes */

enum {
    PACELINE_OK = 0,
    PACELINE_ERROR_ARGUMENT = 1,   /* a null pointer, a wrong number of tensors, an unknown option */
    PACELINE_ERROR_SHAPE = 2,      /* rank or size of a tensor differs from the model's */
    PACELINE_ERROR_DTYPE = 3,      /* dtype of a tensor differs from the model's */
    PACELINE_ERROR_BOUNDS = 4,     /* a size is outside of the bounds of the export */
    PACELINE_ERROR_NOT_FINITE = 5, /* NaN or infinity, with PACELINE_CHECK_FINITE */
    PACELINE_ERROR_FILE = 6,       /* the file can't be read */
    PACELINE_ERROR_DAMAGED = 7,    /* not a model file, or damaged */
    PACELINE_ERROR_VERSION = 8,    /* written by a newer version, or for another PyTorch */
    PACELINE_ERROR_PROCESSOR = 9,  /* compiled for another processor */
    PACELINE_ERROR_LIBRARY = 10,   /* a library is missing; the message says which */
    PACELINE_ERROR_UNSAFE = 11,    /* compiled code that other users could have written */
    PACELINE_ERROR_MEMORY = 12,    /* out of memory */
    PACELINE_ERROR_BACKEND = 13    /* the backend reported an error */
};

/* Flags of paceline_options. */
enum {
    PACELINE_CHECK_FINITE = 1, /* each call checks inputs and outputs for NaN and infinity */
    PACELINE_CONVERT = 2       /* tensors of the other dtype are converted, not refused */
};

typedef struct {
    size_t bytes;        /* sizeof(paceline_options); set by PACELINE_OPTIONS */
    unsigned flags;      /* PACELINE_CHECK_FINITE | PACELINE_CONVERT */
    int threads;         /* of ONNX Runtime or libtorch; 0: one. The builtin backend uses one. */
    const char *library; /* path of libonnxruntime.so or libtorch_cpu.so; NULL: searched */
} paceline_options;
#define PACELINE_OPTIONS {sizeof(paceline_options), 0, 0, NULL}

/* An array of the caller. A tensor of rank 2 has element (i, j) at
   data[i * strides[0] + j * strides[1]]; strides count elements and may be negative.
   strides NULL: row-major order (the last index changes fastest, as in C and PyTorch). */
typedef struct {
    void *data;
    int dtype;
    int rank;
    const int64_t *shape;
    const int64_t *strides;
} paceline_tensor;

typedef struct {
    const char *name;
    int dtype;
    int rank;
    int64_t shape[PACELINE_MAX_RANK];       /* -1: a symbolic size */
    const char *symbols[PACELINE_MAX_RANK]; /* name of the symbolic size, or NULL */
    int64_t min[PACELINE_MAX_RANK];         /* bounds of each size */
    int64_t max[PACELINE_MAX_RANK];
} paceline_info;

/* Load and verify a model file. options may be NULL. On error *model is NULL. */
PACELINE_API int paceline_load(const char *path, const paceline_options *options,
                               paceline_model **model);
PACELINE_API void paceline_free(paceline_model *model); /* NULL is allowed */

/* Message of the last error of this thread; "" without one. Valid until its next error. */
PACELINE_API const char *paceline_last_error(void);
PACELINE_API const char *paceline_error_name(int code); /* "PACELINE_ERROR_SHAPE" */
PACELINE_API const char *paceline_version(void);        /* of this library */

PACELINE_API int paceline_inputs(const paceline_model *model);  /* number of inputs */
PACELINE_API int paceline_outputs(const paceline_model *model); /* number of outputs */
PACELINE_API int paceline_input_info(const paceline_model *model, int index, paceline_info *info);
PACELINE_API int paceline_output_info(const paceline_model *model, int index, paceline_info *info);
PACELINE_API const char *paceline_backend(const paceline_model *model);
/* The manifest as JSON: names, units, normalisation, versions, hashes. Valid until paceline_free. */
PACELINE_API const char *paceline_describe(const paceline_model *model);

/* Compute outputs from inputs; the caller owns the memory of both, which must not overlap.
   With a symbolic size of 0, nothing is computed and the result is PACELINE_OK. */
PACELINE_API int paceline_run(const paceline_model *model, const paceline_tensor *inputs,
                              int input_count, const paceline_tensor *outputs, int output_count);

/* A model with one input and one output in row-major order, whose only symbolic size, if any, is the
   first one (batch). */
PACELINE_API int paceline_run_f32(const paceline_model *model, int64_t batch, const float *input,
                                  float *output);
PACELINE_API int paceline_run_f64(const paceline_model *model, int64_t batch, const double *input,
                                  double *output);

/* A model of shapes [batch, F] and [batch, G], called on fields that lie apart: feature f of sample i
   is in[f][i * in_strides[f]], result g of sample i is out[g][i * out_strides[g]]. Strides count
   elements; NULL: 1. A stride of 0 gives all samples the same value (inputs only). */
PACELINE_API int paceline_run_fields_f32(const paceline_model *model, int64_t batch,
                                         const float *const *in, const int64_t *in_strides,
                                         float *const *out, const int64_t *out_strides);
PACELINE_API int paceline_run_fields_f64(const paceline_model *model, int64_t batch,
                                         const double *const *in, const int64_t *in_strides,
                                         double *const *out, const int64_t *out_strides);

/* Run the test vectors of the file. *error: the largest difference to the results of PyTorch at the
   export, relative to the largest output. It is an error if that exceeds the tolerance of the
   export by more than ten times. error may be NULL. */
PACELINE_API int paceline_test(const paceline_model *model, double *error);

/* Measure calls on the test vectors. number: of the test vectors, from 0; they are for growing
   batches. *per_call: median seconds of a call. */
PACELINE_API int paceline_measure(const paceline_model *model, int number, double seconds, double *per_call);

#ifdef __cplusplus
}
#endif
#endif
