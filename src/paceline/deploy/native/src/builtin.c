/* The builtin backend: a list of operations on data, for MLPs and small CNNs. It is data only: nothing
   is compiled at the export, and nothing but this library is needed.

   Every operation treats each sample of the batch separately. A batch is computed in parts that stay
   in the cache. Buffers ("slots") hold one value after another of each sample; images lie as
   [depth][height][width][channels]. The lists are written by deploy/builtin/. */
#include <math.h>
#include <stdatomic.h>

#include "internal.h"

enum { LINEAR = 1, CONVOLUTION, POOL, UNARY, BINARY, SOFTMAX, NORMALIZE, COPY, FILL, REDUCE, MATRICES };
enum {
    RELU, LEAKY_RELU, TANH, SIGMOID, SILU, GELU, GELU_TANH, ELU, SOFTPLUS, EXP, CLAMP, ABS, NEG, SQRT,
    SQUARE, RECIPROCAL, SIN, COS, LOG, POWER, UNARIES
};
enum { ADD, SUBTRACT, SUBTRACT_FROM, MULTIPLY, DIVIDE, DIVIDE_INTO, MAXIMUM, MINIMUM, BINARIES };
enum { REDUCE_SUM, REDUCE_MEAN, REDUCE_MAX, REDUCE_MIN, REDUCTIONS };
enum { POOL_MAX, POOL_MEAN, POOL_MEAN_WITH_PADDING, POOLS };

#define MAX_SLOTS 4096
#define MAX_OPERATIONS 65536
#define MAX_ARGUMENTS 40
#define MAX_COPY_DIMS 8
#define CACHE_BYTES (384 << 10) /* of the slots of the samples that are computed together */
#define MAX_PART 256            /* samples that are computed together */
#define PATCH_BYTES (64 << 10)

typedef struct {
    int64_t in[3], out[3], kernel[3], stride[3], pad[3], dilation[3], up[3], channels;
} geometry;
typedef struct {
    int64_t size, from, to;
} copy_step;

typedef struct {
    void (*multiply)(const void *a, size_t a_step, size_t m, const void *packed, size_t k, size_t outputs,
                     void *c, size_t c_step);
    size_t (*packed_size)(size_t k, size_t outputs);
    void (*pack)(const void *w, size_t o_step, size_t k_step, const void *bias, size_t k, size_t outputs,
                 void *packed);
    void (*unary)(int function, const void *x, void *y, size_t n, double p, double q);
    void (*binary)(int function, const void *a, const void *b, size_t period, void *y, size_t n);
    void (*softmax)(const void *x, void *y, size_t rows, size_t k);
    void (*normalize)(const void *x, void *y, size_t rows, size_t k, double epsilon);
    void (*reduce)(int function, const void *x, void *y, size_t rows, size_t k);
    void (*patches)(const geometry *g, const void *x, int64_t begin, int64_t end, int64_t channel,
                    int64_t channels, void *to);
    void (*pool)(int function, const geometry *g, const void *x, void *y);
    void (*copy)(const void *x, void *y, const copy_step *step, int dims);
    void (*fill)(void *y, size_t n, double value);
} kernels;

#define JOIN_(a, b, c) a##_##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#define NAME(name) JOIN(name, DTYPE, WIDTH)

/* Sets for the widths of vectors: any processor, AVX2, AVX-512. */
#define WIDTH plain
#define VECTOR_BYTES 16
#define MAX_ROWS 4
#include "both_dtypes.inc"
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(PACELINE_PLAIN)
#define WIDE_SETS
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#undef WIDTH
#undef VECTOR_BYTES
#undef MAX_ROWS
#define WIDTH avx2
#define VECTOR_BYTES 32
#define MAX_ROWS 4
#include "both_dtypes.inc"
#pragma GCC pop_options
#ifndef PACELINE_AVX2
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512bw,fma")
#undef WIDTH
#undef VECTOR_BYTES
#undef MAX_ROWS
#define WIDTH avx512
#define VECTOR_BYTES 64
#define MAX_ROWS 8
#include "both_dtypes.inc"
#pragma GCC pop_options
#endif
#endif

static const kernels *choose_kernels(int dtype) {
    bool single = dtype == PACELINE_FLOAT32;
#ifdef WIDE_SETS
    __builtin_cpu_init();
#ifndef PACELINE_AVX2
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
        return single ? &set_f32_avx512 : &set_f64_avx512;
#endif
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return single ? &set_f32_avx2 : &set_f64_avx2;
#endif
    return single ? &set_f32_plain : &set_f64_plain;
}

typedef struct {
    int kind, function, in, second, out, dims;
    bool inputs_second; /* the second operand is a slot, not weights */
    int64_t rows, k, outputs, period, n, in_offset, out_offset, groups;
    size_t second_offset; /* into the weights */
    double p, q;
    void *packed; /* weights as the kernels need them */
    geometry *shape;
    copy_step *steps;
} operation;

#define POOLED 64 /* working memory that is kept for the next calls */

typedef struct {
    const kernels *use;
    size_t element;
    int slot_count, operation_count, input_count, output_count;
    int64_t *slots;  /* elements of each sample */
    int *placed;     /* -1: working memory, else number of the input, or inputs + that of the output */
    int ends[2 * PACELINE_MAX_TENSORS]; /* slots of inputs, then of outputs */
    operation *operations;
    void *weights;
    int64_t part;       /* samples that are computed together */
    size_t patch_bytes; /* working memory beside the slots */
    size_t work_bytes;
    _Atomic(void *) pool[POOLED];
} program;

/* Reading. Words are int64; floating-point numbers are float64 with the same bits. */
typedef struct {
    const uint8_t *at, *end;
    bool failed;
} reader;

static int64_t word(reader *r) {
    int64_t value = 0;
    if (r->end - r->at < 8) {
        r->failed = true;
        return 0;
    }
    for (int i = 8; i--;) value = (int64_t)((uint64_t)value << 8 | r->at[i]);
    r->at += 8;
    return value;
}

static int64_t within(reader *r, int64_t least, int64_t most) {
    int64_t value = word(r);
    if (value < least || value > most) r->failed = true;
    return r->failed ? least : value;
}

#define LARGEST ((int64_t)1 << 40)

static double real(reader *r) {
    int64_t bits = word(r);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static int slot(reader *r, const program *p) { return (int)within(r, 0, p->slot_count - 1); }

static int64_t product(reader *r, int64_t a, int64_t b) {
    int64_t value;
    if (multiply(a, b, &value) && value <= LARGEST) return value;
    r->failed = true;
    return 0;
}

/* Fail unless a slot has `elements` values. */
static void fits(reader *r, const program *p, int which, int64_t elements) {
    if (r->failed || elements < 0 || p->slots[which] < elements) r->failed = true;
}

static const uint8_t *weights_at(reader *r, const section *weights, size_t element, int64_t offset, int64_t count) {
    if (r->failed || offset < 0 || count < 0 || (uint64_t)offset > weights->bytes / element ||
        (uint64_t)count > weights->bytes / element - (uint64_t)offset) {
        r->failed = true;
        return NULL;
    }
    return weights->data + (size_t)offset * element;
}

static void read_three(reader *r, int64_t into[3], int64_t least, int64_t most) {
    for (int d = 0; d < 3; d++) into[d] = within(r, least, most);
}

static bool pack_weights(reader *r, program *p, operation *o, const section *weights, int64_t k, int64_t outputs,
                         int64_t groups) {
    int64_t at = within(r, 0, LARGEST), bias_at = within(r, -1, LARGEST);
    int64_t count = product(r, product(r, k, outputs), groups);
    const uint8_t *w = weights_at(r, weights, p->element, at, count);
    const uint8_t *bias = bias_at < 0 ? NULL : weights_at(r, weights, p->element, bias_at, product(r, outputs, groups));
    if (r->failed) return true;
    size_t each = p->use->packed_size((size_t)k, (size_t)outputs) * p->element;
    each = (each + 63) / 64 * 64;
    int64_t bytes = product(r, (int64_t)each, groups);
    if (r->failed) return true;
    if (posix_memalign(&o->packed, 64, (size_t)bytes)) {
        o->packed = NULL;
        return false;
    }
    for (int64_t g = 0; g < groups; g++)
        p->use->pack(w + (size_t)(g * k * outputs) * p->element, (size_t)k, 1,
                     bias ? bias + (size_t)(g * outputs) * p->element : NULL, (size_t)k, (size_t)outputs,
                     (char *)o->packed + (size_t)g * each);
    return true;
}

/* Read the sizes of a convolution or of pooling, and check them against the slots. */
static bool read_geometry(reader *r, program *p, operation *o) {
    geometry *g = o->shape = calloc(1, sizeof *g);
    if (!g) return false;
    const int64_t most = 1 << 20;
    g->channels = within(r, 1, most);
    o->outputs = within(r, 1, most);
    o->groups = within(r, 1, most);
    read_three(r, g->in, 1, most);
    read_three(r, g->out, 1, most);
    read_three(r, g->kernel, 1, most);
    read_three(r, g->stride, 1, most);
    read_three(r, g->pad, -most, most);
    read_three(r, g->dilation, 1, most);
    read_three(r, g->up, 1, most);
    if (r->failed || g->channels % o->groups || o->outputs % o->groups) {
        r->failed = true;
        return true;
    }
    for (int d = 0; d < 3; d++) /* what is larger covers padding only */
        if (g->kernel[d] > g->in[d] * g->up[d] + 2 * (g->pad[d] > 0 ? g->pad[d] : 0)) r->failed = true;
    int64_t in = product(r, product(r, g->in[0], g->in[1]), g->in[2]);
    int64_t out = o->rows = product(r, product(r, g->out[0], g->out[1]), g->out[2]);
    fits(r, p, o->in, product(r, in, g->channels));
    fits(r, p, o->out, product(r, out, o->outputs));
    return true;
}

static bool read_convolution(reader *r, program *p, operation *o, const section *weights) {
    if (!read_geometry(r, p, o)) return false;
    if (r->failed) return true;
    const geometry *g = o->shape;
    o->k = product(r, product(r, product(r, g->kernel[0], g->kernel[1]), g->kernel[2]), g->channels / o->groups);
    int64_t row = product(r, o->k, (int64_t)p->element);
    if (r->failed) return true;
    o->n = row < PATCH_BYTES ? PATCH_BYTES / row : 1; /* output positions at a time */
    if (o->n > o->rows) o->n = o->rows;
    if (o->n > 8) o->n -= o->n % 8;
    if ((size_t)(o->n * row) > p->patch_bytes) p->patch_bytes = (size_t)(o->n * row);
    return pack_weights(r, p, o, weights, o->k, o->outputs / o->groups, o->groups);
}

static bool read_copy(reader *r, program *p, operation *o) {
    o->in_offset = within(r, 0, LARGEST);
    o->out_offset = within(r, 0, LARGEST);
    o->dims = (int)within(r, 0, MAX_COPY_DIMS);
    o->steps = calloc(MAX_COPY_DIMS, sizeof *o->steps);
    if (!o->steps) return false;
    int64_t last_in = o->in_offset, last_out = o->out_offset;
    for (int d = 0; d < o->dims && !r->failed; d++) {
        copy_step *s = &o->steps[d];
        s->size = within(r, 1, LARGEST);
        s->from = within(r, 0, LARGEST);
        s->to = within(r, 0, LARGEST);
        last_in += product(r, s->size - 1, s->from);
        last_out += product(r, s->size - 1, s->to);
    }
    fits(r, p, o->in, last_in + 1);
    fits(r, p, o->out, last_out + 1);
    return true;
}

/* Read one operation. False: no memory; r->failed: not valid. */
static bool read_operation(reader *r, program *p, operation *o, const section *weights) {
    o->kind = (int)within(r, LINEAR, MATRICES);
    o->function = (int)within(r, 0, UNARIES);
    o->in = slot(r, p);
    o->out = slot(r, p);
    bool in_place = o->kind == FILL || o->kind == UNARY || o->kind == BINARY || o->kind == SOFTMAX || o->kind == NORMALIZE;
    if (p->placed[o->out] >= 0 && p->placed[o->out] < p->input_count) r->failed = true; /* an input */
    if (o->in == o->out && !in_place) r->failed = true;
    if (r->failed) return true;
    switch (o->kind) {
        case LINEAR:
            o->rows = within(r, 1, LARGEST), o->k = within(r, 1, LARGEST), o->outputs = within(r, 1, LARGEST);
            fits(r, p, o->in, product(r, o->rows, o->k));
            fits(r, p, o->out, product(r, o->rows, o->outputs));
            return pack_weights(r, p, o, weights, o->k, o->outputs, 1);
        case CONVOLUTION: return read_convolution(r, p, o, weights);
        case POOL:
            if (o->function >= POOLS) r->failed = true;
            if (!read_geometry(r, p, o)) return false;
            if (!r->failed && o->outputs != o->shape->channels) r->failed = true;
            return true;
        case UNARY:
            if (o->function >= UNARIES) r->failed = true;
            o->n = within(r, 1, LARGEST), o->p = real(r), o->q = real(r);
            fits(r, p, o->in, o->n);
            fits(r, p, o->out, o->n);
            return true;
        case BINARY:
            if (o->function >= BINARIES) r->failed = true;
            o->n = within(r, 1, LARGEST), o->inputs_second = within(r, 0, 1);
            o->period = within(r, 1, LARGEST);
            if (o->inputs_second) {
                o->second = slot(r, p);
                if (o->period != o->n) r->failed = true;
                fits(r, p, o->second, o->n);
            } else {
                o->second_offset = (size_t)within(r, 0, LARGEST);
                weights_at(r, weights, p->element, (int64_t)o->second_offset, o->period);
            }
            if (!r->failed && o->n % o->period) r->failed = true;
            fits(r, p, o->in, o->n);
            fits(r, p, o->out, o->n);
            return true;
        case SOFTMAX:
        case NORMALIZE:
        case REDUCE:
            if (o->kind == REDUCE && o->function >= REDUCTIONS) r->failed = true;
            o->rows = within(r, 1, LARGEST), o->k = within(r, 1, LARGEST), o->p = real(r);
            fits(r, p, o->in, product(r, o->rows, o->k));
            fits(r, p, o->out, product(r, o->rows, o->kind == REDUCE ? 1 : o->k));
            return true;
        case COPY: return read_copy(r, p, o);
        case FILL:
            o->out_offset = within(r, 0, LARGEST), o->n = within(r, 1, LARGEST), o->p = real(r);
            fits(r, p, o->out, o->out_offset + o->n);
            return true;
        default: /* MATRICES: out[g][m][n] = sum over k of in[g][m][k] second[g][k][n] */
            o->second = slot(r, p);
            o->groups = within(r, 1, LARGEST), o->rows = within(r, 1, LARGEST);
            o->k = within(r, 1, LARGEST), o->outputs = within(r, 1, LARGEST);
            if (o->second == o->out) r->failed = true;
            fits(r, p, o->in, product(r, o->groups, product(r, o->rows, o->k)));
            fits(r, p, o->second, product(r, o->groups, product(r, o->k, o->outputs)));
            fits(r, p, o->out, product(r, o->groups, product(r, o->rows, o->outputs)));
            if (r->failed) return true;
            size_t bytes = p->use->packed_size((size_t)o->k, (size_t)o->outputs) * p->element;
            if (bytes > p->patch_bytes) p->patch_bytes = bytes;
            return true;
    }
}

static void close_builtin(void *state) {
    program *p = state;
    if (!p) return;
    for (int i = 0; i < p->operation_count; i++) {
        free(p->operations[i].packed);
        free(p->operations[i].shape);
        free(p->operations[i].steps);
    }
    for (int i = 0; i < POOLED; i++) free(atomic_load(&p->pool[i]));
    free(p->operations);
    free(p->slots);
    free(p->placed);
    free(p->weights);
    free(p);
}

/* Elements of a sample of an input or output, or -1 if the backend can't compute such a shape. */
static int64_t sample_elements(const field *f) {
    int64_t n = 1;
    for (int d = 1; d < f->rank; d++)
        if (f->symbols[d] >= 0 || !multiply(n, f->shape[d], &n)) return -1;
    return n;
}

/* The samples are those of the first dimension, the same for all inputs and outputs. */
static bool is_batched(const artifact *read, int64_t elements[2 * PACELINE_MAX_TENSORS]) {
    const field *first = &read->inputs[0];
    for (int i = 0; i < read->input_count + read->output_count; i++) {
        const field *f = i < read->input_count ? &read->inputs[i] : &read->outputs[i - read->input_count];
        if (f->rank < 1 || f->shape[0] != first->shape[0] || f->symbols[0] != first->symbols[0]) return false;
        if ((elements[i] = sample_elements(f)) < 0) return false;
    }
    return true;
}

static bool read_slots(reader *r, program *p, const int64_t *elements) {
    p->slot_count = (int)within(r, 1, MAX_SLOTS);
    p->slots = calloc((size_t)p->slot_count, sizeof *p->slots);
    p->placed = calloc((size_t)p->slot_count, sizeof *p->placed);
    if (!p->slots || !p->placed) return false;
    for (int i = 0; i < p->slot_count; i++) p->slots[i] = within(r, 1, LARGEST), p->placed[i] = -1;
    for (int i = 0; i < p->input_count + p->output_count; i++) {
        int which = p->ends[i] = slot(r, p);
        if (r->failed || p->placed[which] >= 0 || p->slots[which] != elements[i]) r->failed = true;
        p->placed[which] = i;
    }
    return true;
}

static void choose_part(program *p) {
    int64_t sample = 0;
    size_t work = 0;
    for (int i = 0; i < p->slot_count; i++) {
        sample += p->slots[i] * (int64_t)p->element; /* at most 2^12 times 2^43 */
        if (sample > CACHE_BYTES) sample = CACHE_BYTES;
    }
    p->part = CACHE_BYTES / (sample ? sample : 1);
    p->part = p->part < 1 ? 1 : p->part > MAX_PART ? MAX_PART : p->part;
    if (p->part > 8) p->part -= p->part % 8;
    for (int i = 0; i < p->slot_count; i++)
        if (p->placed[i] < 0) work += ((size_t)(p->slots[i] * p->part) * p->element + 63) / 64 * 64;
    p->work_bytes = work + (p->patch_bytes + 63) / 64 * 64 + 64;
}

static int open_builtin(const artifact *read, const paceline_options *options, void **state) {
    (void)options;
    const section *list = find_section(read, "program"), *weights = find_section(read, "weights");
    int64_t elements[2 * PACELINE_MAX_TENSORS];
    if (!list || !weights || !is_batched(read, elements))
        return fail(PACELINE_ERROR_DAMAGED, "the file has no list of operations");
    program *p = calloc(1, sizeof *p);
    if (!p) return fail(PACELINE_ERROR_MEMORY, "no memory");
    p->use = choose_kernels(read->dtype), p->element = read->element;
    p->input_count = read->input_count, p->output_count = read->output_count;
    reader r = {list->data, list->data + list->bytes, false};
    bool memory = read_slots(&r, p, elements);
    int count = memory ? (int)within(&r, 0, MAX_OPERATIONS) : 0;
    if (memory && !r.failed && count) {
        memory = (p->operations = calloc((size_t)count, sizeof *p->operations)) != NULL;
        for (int i = 0; memory && !r.failed && i < count; i++) {
            p->operation_count = i + 1;
            memory = read_operation(&r, p, &p->operations[i], weights);
        }
    }
    bool valid = !r.failed && r.at == r.end;
    if (memory && valid) {
        memory = (p->weights = malloc(weights->bytes + 1)) != NULL;
        if (memory) memcpy(p->weights, weights->data, weights->bytes);
        choose_part(p);
    }
    if (memory && valid) {
        *state = p;
        return PACELINE_OK;
    }
    close_builtin(p);
    return memory ? fail(PACELINE_ERROR_DAMAGED, "the list of operations is not valid")
                  : fail(PACELINE_ERROR_MEMORY, "no memory for the model");
}

static void *take_work(program *p, int *place) {
    uintptr_t start = (uintptr_t)&place >> 16; /* differs between threads */
    for (int i = 0; i < POOLED; i++) {
        *place = (int)((start + (uintptr_t)i) % POOLED);
        if (!atomic_load_explicit(&p->pool[*place], memory_order_relaxed)) continue;
        void *work = atomic_exchange(&p->pool[*place], NULL);
        if (work) return work;
    }
    *place = (int)(start % POOLED);
    void *work;
    return posix_memalign(&work, 64, p->work_bytes) ? NULL : work;
}

static void return_work(program *p, void *work, int place) {
    for (int i = 0; i < POOLED; i++) {
        void *none = NULL;
        if (atomic_compare_exchange_strong(&p->pool[(place + i) % POOLED], &none, work)) return;
    }
    free(work);
}

static void convolve(const program *p, const operation *o, const char *in, char *out, int64_t samples, void *patches) {
    const geometry *g = o->shape;
    const size_t e = p->element;
    const int64_t channels = g->channels / o->groups, outputs = o->outputs / o->groups;
    const size_t packed = (p->use->packed_size((size_t)o->k, (size_t)outputs) * e + 63) / 64 * 64;
    int64_t inputs = g->in[0] * g->in[1] * g->in[2];
    bool plain = o->k == g->channels && o->groups == 1 && inputs == o->rows; /* 1 x 1 */
    for (int d = 0; d < 3; d++) plain = plain && g->stride[d] == 1 && !g->pad[d] && g->up[d] == 1;
    if (plain) {
        p->use->multiply(in, (size_t)o->k, (size_t)(samples * o->rows), o->packed, (size_t)o->k, (size_t)o->outputs,
                         out, (size_t)o->outputs);
        return;
    }
    for (int64_t s = 0; s < samples; s++) {
        const char *x = in + (size_t)(s * p->slots[o->in]) * e;
        char *y = out + (size_t)(s * p->slots[o->out]) * e;
        for (int64_t begin = 0; begin < o->rows; begin += o->n) {
            int64_t end = begin + o->n < o->rows ? begin + o->n : o->rows;
            for (int64_t i = 0; i < o->groups; i++) {
                p->use->patches(g, x, begin, end, i * channels, channels, patches);
                p->use->multiply(patches, (size_t)o->k, (size_t)(end - begin), (char *)o->packed + (size_t)i * packed,
                                 (size_t)o->k, (size_t)outputs,
                                 y + (size_t)(begin * o->outputs + i * outputs) * e, (size_t)o->outputs);
            }
        }
    }
}

static void multiply_matrices(const program *p, const operation *o, const char *a, const char *b, char *c, void *packed) {
    const size_t e = p->element, m = (size_t)o->rows, k = (size_t)o->k, n = (size_t)o->outputs;
    for (int64_t g = 0; g < o->groups; g++, a += m * k * e, b += k * n * e, c += m * n * e) {
        p->use->pack(b, 1, n, NULL, k, n, packed);
        p->use->multiply(a, k, m, packed, k, n, c, n);
    }
}

/* Whether an operation covers its slots completely: then samples follow each other without gaps. */
static bool is_dense(const program *p, const operation *o, int64_t in, int64_t out) {
    return p->slots[o->in] == in && p->slots[o->out] == out;
}

static void run_operation(const program *p, const operation *o, char *const *at, int64_t samples, void *patches) {
    const size_t e = p->element;
    const kernels *use = p->use;
    int64_t in = 0, out = 0; /* elements that it uses of each sample */
    switch (o->kind) {
        case LINEAR: in = o->rows * o->k, out = o->rows * o->outputs; break;
        case UNARY:
        case BINARY: in = out = o->n; break;
        case SOFTMAX:
        case NORMALIZE: in = out = o->rows * o->k; break;
        case REDUCE: in = o->rows * o->k, out = o->rows; break;
        case CONVOLUTION: {
            const geometry *g = o->shape;
            in = g->in[0] * g->in[1] * g->in[2] * g->channels, out = o->rows * o->outputs;
            break;
        }
    }
    bool dense = is_dense(p, o, in, out);
    if (o->kind == BINARY && o->inputs_second) dense = dense && p->slots[o->second] == o->n;
    int64_t together = dense ? samples : 1; /* samples in one call of a kernel */
    for (int64_t s = 0; s < samples; s += together) {
        const char *x = at[o->in] + (size_t)(s * p->slots[o->in]) * e;
        char *y = at[o->out] + (size_t)(s * p->slots[o->out]) * e;
        size_t n = (size_t)(o->n * together), rows = (size_t)(o->rows * together), k = (size_t)o->k;
        switch (o->kind) {
            case LINEAR: use->multiply(x, k, rows, o->packed, k, (size_t)o->outputs, y, (size_t)o->outputs); break;
            case CONVOLUTION: convolve(p, o, x, y, together, patches); break;
            case POOL: use->pool(o->function, o->shape, x, y); break;
            case UNARY: use->unary(o->function, x, y, n, o->p, o->q); break;
            case BINARY: {
                const char *b = o->inputs_second ? at[o->second] + (size_t)(s * p->slots[o->second]) * e
                                                 : (const char *)p->weights + o->second_offset * e;
                use->binary(o->function, x, b, o->inputs_second ? n : (size_t)o->period, y, n);
                break;
            }
            case SOFTMAX: use->softmax(x, y, rows, k); break;
            case NORMALIZE: use->normalize(x, y, rows, k, o->p); break;
            case REDUCE: use->reduce(o->function, x, y, rows, k); break;
            case COPY: use->copy(x + (size_t)o->in_offset * e, y + (size_t)o->out_offset * e, o->steps, o->dims); break;
            case FILL: use->fill(y + (size_t)o->out_offset * e, (size_t)o->n, o->p); break;
            case MATRICES:
                multiply_matrices(p, o, x, at[o->second] + (size_t)(s * p->slots[o->second]) * e, y, patches);
                break;
        }
    }
}

static int run_builtin(void *state, const artifact *read, const call *what) {
    program *p = state;
    int place;
    char *work = take_work(p, &place);
    if (!work) return fail(PACELINE_ERROR_MEMORY, "no memory for %zu bytes of working memory", p->work_bytes);
    int64_t samples = what->input_shapes[0][0];
    (void)read;
    char *few[64], **at = p->slot_count <= 64 ? few : malloc((size_t)p->slot_count * sizeof *at);
    if (!at) {
        return_work(p, work, place);
        return fail(PACELINE_ERROR_MEMORY, "no memory");
    }
    char *next = work + (p->patch_bytes + 63) / 64 * 64;
    for (int i = 0; i < p->slot_count; i++)
        if (p->placed[i] < 0) {
            at[i] = next;
            next += ((size_t)(p->slots[i] * p->part) * p->element + 63) / 64 * 64;
        }
    for (int64_t begin = 0; begin < samples; begin += p->part) {
        int64_t count = samples - begin < p->part ? samples - begin : p->part;
        for (int i = 0; i < p->input_count + p->output_count; i++) {
            int which = p->ends[i];
            /* inputs are never written: read_operation */
            char *base = i < p->input_count ? (char *)(uintptr_t)what->inputs[i] : what->outputs[i - p->input_count];
            at[which] = base + (size_t)(begin * p->slots[which]) * p->element;
        }
        for (int i = 0; i < p->operation_count; i++) run_operation(p, &p->operations[i], at, count, work);
    }
    if (at != few) free(at);
    return_work(p, work, place);
    return PACELINE_OK;
}

const backend BUILTIN = {"builtin", open_builtin, run_builtin, close_builtin};
