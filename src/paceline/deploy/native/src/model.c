/* The C interface: arguments are checked, arrays of any strides gathered and scattered, and the
   backend called. */
#include <math.h>
#include <stdio.h>
#include <time.h>

#include "internal.h"

#ifndef PACELINE_BUILT_VERSION
#define PACELINE_BUILT_VERSION "unknown"
#endif

struct paceline_model {
    artifact read;
    const backend *use;
    void *state;
    unsigned flags;
    uint8_t *vectors; /* test vectors; the content of the file is freed */
    size_t vector_bytes;
};

const char *paceline_version(void) { return PACELINE_BUILT_VERSION; }

static const backend *find_backend(const char *name) {
    const backend *const all[] = {&BUILTIN, &ONNXRUNTIME, &AOTINDUCTOR};
    for (int i = 0; i < 3; i++)
        if (!strcmp(all[i]->name, name)) return all[i];
    return NULL;
}

static int open_model(paceline_model *model, const paceline_options *options) {
    artifact *read = &model->read;
    model->use = find_backend(read->backend);
    if (!model->use)
        return fail(PACELINE_ERROR_VERSION, "the file needs the backend %s, which this library does not have. HINT: use the "
                    "library of the Paceline that exported it", read->backend);
    const section *vectors = find_section(read, "vectors");
    if (vectors) {
        if (!(model->vectors = malloc(vectors->bytes + 1))) return fail(PACELINE_ERROR_MEMORY, "no memory");
        memcpy(model->vectors, vectors->data, model->vector_bytes = vectors->bytes);
    }
    int code = model->use->open(read, options, &model->state);
    free(read->file);
    read->file = NULL;
    read->section_count = 0;
    return code;
}

int paceline_load(const char *path, const paceline_options *options, paceline_model **out) {
    if (!out || !path) return fail(PACELINE_ERROR_ARGUMENT, "paceline_load: path and model must not be NULL");
    *out = NULL;
    paceline_options chosen = PACELINE_OPTIONS;
    if (options) {
        if (options->bytes != sizeof chosen)
            return fail(PACELINE_ERROR_ARGUMENT, "paceline_options.bytes is %zu. HINT: paceline_options options = "
                        "PACELINE_OPTIONS", options->bytes);
        chosen = *options;
    }
    if (chosen.flags & ~(unsigned)(PACELINE_CHECK_FINITE | PACELINE_CONVERT) || chosen.threads < 0 ||
        chosen.threads > 4096)
        return fail(PACELINE_ERROR_ARGUMENT, "flags %#x, threads %d: unknown flags, or a wrong number of threads",
                    chosen.flags, chosen.threads);
    paceline_model *model = calloc(1, sizeof *model);
    if (!model) return fail(PACELINE_ERROR_MEMORY, "no memory");
    model->flags = chosen.flags;
    int code = artifact_read(path, &model->read);
    if (!code) code = open_model(model, &chosen);
    if (!code) {
        *out = model;
        return PACELINE_OK;
    }
    paceline_free(model);
    char reason[900];
    snprintf(reason, sizeof reason, "%s", paceline_last_error());
    size_t length = strlen(path); /* reasons of reading begin with the path */
    if (!strncmp(reason, path, length) && (reason[length] == ':' || reason[length] == ' ')) return code;
    return fail(code, "%.100s: %s", path, reason);
}

void paceline_free(paceline_model *model) {
    if (!model) return;
    if (model->state) model->use->close(model->state);
    artifact_close(&model->read);
    free(model->vectors);
    free(model);
}

int paceline_inputs(const paceline_model *model) { return model ? model->read.input_count : 0; }
int paceline_outputs(const paceline_model *model) { return model ? model->read.output_count : 0; }
const char *paceline_backend(const paceline_model *model) { return model ? model->read.backend : ""; }
const char *paceline_describe(const paceline_model *model) { return model ? model->read.manifest : ""; }

static int describe_field(const paceline_model *model, const field *fields, int count, int index, paceline_info *info) {
    if (!model || !info || index < 0 || index >= count)
        return fail(PACELINE_ERROR_ARGUMENT, "there is no input or output %d", index);
    const field *f = &fields[index];
    memset(info, 0, sizeof *info);
    info->name = f->name, info->dtype = model->read.dtype, info->rank = f->rank;
    for (int d = 0; d < f->rank; d++) {
        const symbol *s = f->symbols[d] < 0 ? NULL : &model->read.symbols[f->symbols[d]];
        info->shape[d] = f->shape[d], info->symbols[d] = s ? s->name : NULL;
        info->min[d] = s ? s->min : f->shape[d], info->max[d] = s ? s->max : f->shape[d];
    }
    return PACELINE_OK;
}

int paceline_input_info(const paceline_model *model, int index, paceline_info *info) {
    return describe_field(model, model ? model->read.inputs : NULL, paceline_inputs(model), index, info);
}

int paceline_output_info(const paceline_model *model, int index, paceline_info *info) {
    return describe_field(model, model ? model->read.outputs : NULL, paceline_outputs(model), index, info);
}

static const char *dtype_name(int dtype) {
    return dtype == PACELINE_FLOAT32 ? "float32" : dtype == PACELINE_FLOAT64 ? "float64" : "unknown";
}

/* Write the shape that a field must have: [batch, 6]. */
static void write_shape(const artifact *read, const field *f, char *text, size_t bytes) {
    size_t at = (size_t)snprintf(text, bytes, "[");
    for (int d = 0; d < f->rank && at < bytes; d++) {
        const char *comma = d ? ", " : "";
        at += f->symbols[d] < 0
                  ? (size_t)snprintf(text + at, bytes - at, "%s%lld", comma, (long long)f->shape[d])
                  : (size_t)snprintf(text + at, bytes - at, "%s%s", comma, read->symbols[f->symbols[d]].name);
    }
    if (at < bytes) snprintf(text + at, bytes - at, "]");
}

static int wrong_shape(const artifact *read, const field *f, const char *kind, const paceline_tensor *t) {
    char wanted[256], found[256];
    write_shape(read, f, wanted, sizeof wanted);
    size_t at = (size_t)snprintf(found, sizeof found, "[");
    for (int d = 0; d < t->rank && d < PACELINE_MAX_RANK && at < sizeof found; d++)
        at += (size_t)snprintf(found + at, sizeof found - at, "%s%lld", d ? ", " : "", (long long)t->shape[d]);
    if (at < sizeof found) snprintf(found + at, sizeof found - at, "]");
    return fail(PACELINE_ERROR_SHAPE, "%s %s has shape %s; the model has %s", kind, f->name, found, wanted);
}

/* Check one tensor, and bind the symbolic sizes. */
static int check_tensor(const paceline_model *model, const field *f, const char *kind, const paceline_tensor *t,
                        int64_t *sizes, int64_t *shape, int64_t *elements) {
    const artifact *read = &model->read;
    if (t->dtype != read->dtype) {
        bool known = t->dtype == PACELINE_FLOAT32 || t->dtype == PACELINE_FLOAT64;
        if (!known || !(model->flags & PACELINE_CONVERT))
            return fail(PACELINE_ERROR_DTYPE, "%s %s is %s; the model has %s.%s", kind, f->name, dtype_name(t->dtype),
                        dtype_name(read->dtype), known ? " HINT: load it with PACELINE_CONVERT" : "");
    }
    if (t->rank != f->rank || (t->rank > 0 && !t->shape)) {
        if (!t->shape)
            return fail(PACELINE_ERROR_SHAPE, "%s %s has no shape", kind, f->name);
        return wrong_shape(read, f, kind, t);
    }
    int64_t count = 1;
    for (int d = 0; d < f->rank; d++) {
        int64_t size = t->shape[d];
        int which = f->symbols[d];
        if (which < 0 ? size != f->shape[d] : size < 0 || (sizes[which] >= 0 && sizes[which] != size))
            return wrong_shape(read, f, kind, t);
        if (which >= 0) {
            const symbol *s = &read->symbols[which];
            if (size && (size < s->min || size > s->max))
                return fail(PACELINE_ERROR_BOUNDS, "%s %s: %s is %lld, outside of the bounds of the export, %lld to "
                            "%lld. HINT: paceline export --bound %s=MIN:MAX", kind, f->name, s->name, (long long)size,
                            (long long)s->min, (long long)s->max, s->name);
            sizes[which] = size;
        }
        shape[d] = size;
        if (!multiply(count, size, &count) || count > ((int64_t)1 << 48))
            return fail(PACELINE_ERROR_BOUNDS, "%s %s has too many elements", kind, f->name);
    }
    *elements = count;
    if (count && !t->data) return fail(PACELINE_ERROR_ARGUMENT, "%s %s has data NULL", kind, f->name);
    return PACELINE_OK;
}

/* Whether the elements lie in row-major order without gaps. */
static bool is_contiguous(const paceline_tensor *t) {
    if (!t->strides) return true;
    int64_t step = 1;
    for (int d = t->rank; d--; step *= t->shape[d])
        if (t->shape[d] != 1 && t->strides[d] != step) return false;
    return true;
}

static size_t element_bytes(int dtype) { return dtype == PACELINE_FLOAT32 ? 4 : 8; }

/* Copy between an array of the caller and a row-major buffer, converting the dtype. */
static void copy_strided(char *buffer, int dtype, const paceline_tensor *t, int d, int64_t offset, bool gather,
                         char **at) {
    size_t own = element_bytes(dtype), other = element_bytes(t->dtype);
    if (d == 0) *at = buffer;
    if (d < t->rank - 1) {
        for (int64_t i = 0; i < t->shape[d]; i++)
            copy_strided(buffer, dtype, t, d + 1, offset + i * t->strides[d], gather, at);
        return;
    }
    int64_t count = t->rank ? t->shape[d] : 1, step = t->rank ? t->strides[d] : 0;
    char *theirs = (char *)t->data + offset * (int64_t)other;
    for (int64_t i = 0; i < count; i++, theirs += step * (int64_t)other, *at += own) {
        if (own == other && own == 8)
            memcpy(gather ? *at : theirs, gather ? theirs : *at, 8);
        else if (own == other)
            memcpy(gather ? *at : theirs, gather ? theirs : *at, 4);
        else {
            float f;
            double g;
            const void *from = gather ? theirs : *at;
            if ((gather ? other : own) == 4)
                memcpy(&f, from, 4), g = f;
            else
                memcpy(&g, from, 8), f = (float)g;
            if ((gather ? own : other) == 4)
                memcpy(gather ? *at : theirs, &f, 4);
            else
                memcpy(gather ? *at : theirs, &g, 8);
        }
    }
}

static void copy_tensor(char *buffer, int dtype, const paceline_tensor *t, bool gather) {
    int64_t strides[PACELINE_MAX_RANK], step = 1;
    paceline_tensor with = *t;
    if (!t->strides) {
        for (int d = t->rank; d--; step *= t->shape[d]) strides[d] = step;
        with.strides = strides;
    }
    char *at;
    copy_strided(buffer, dtype, &with, 0, 0, gather, &at);
}

static int check_finite(const char *kind, const field *f, const void *data, int64_t count, int dtype) {
    for (int64_t i = 0; i < count; i++) {
        double v = dtype == PACELINE_FLOAT32 ? (double)((const float *)data)[i] : ((const double *)data)[i];
        if (!isfinite(v))
            return fail(PACELINE_ERROR_NOT_FINITE, "%s %s: element %lld (in row-major order) is %s", kind, f->name,
                        (long long)i, isnan(v) ? "NaN" : "infinite");
    }
    return PACELINE_OK;
}

typedef struct {
    int64_t sizes[MAX_SYMBOLS], elements[2 * PACELINE_MAX_TENSORS];
    int64_t shapes[2 * PACELINE_MAX_TENSORS][PACELINE_MAX_RANK];
    void *data[2 * PACELINE_MAX_TENSORS];
    char *copies;
} prepared;

static int check_all(const paceline_model *model, const paceline_tensor *inputs, const paceline_tensor *outputs,
                     prepared *p) {
    const artifact *read = &model->read;
    for (int i = 0; i < read->symbol_count; i++) p->sizes[i] = -1;
    int code = PACELINE_OK;
    for (int i = 0; i < read->input_count && !code; i++)
        code = check_tensor(model, &read->inputs[i], "input", &inputs[i], p->sizes, p->shapes[i], &p->elements[i]);
    for (int i = 0, j = read->input_count; i < read->output_count && !code; i++, j++) {
        code = check_tensor(model, &read->outputs[i], "output", &outputs[i], p->sizes, p->shapes[j], &p->elements[j]);
        for (int d = 0; !code && outputs[i].strides && d < outputs[i].rank; d++)
            if (!outputs[i].strides[d] && outputs[i].shape[d] > 1)
                code = fail(PACELINE_ERROR_ARGUMENT, "output %s has stride 0 in dimension %d: results would "
                            "overwrite each other", read->outputs[i].name, d);
    }
    return code;
}

/* Give each tensor that the backend can't use as it is a row-major copy. */
static int make_copies(const paceline_model *model, const paceline_tensor *inputs, const paceline_tensor *outputs,
                       prepared *p) {
    const artifact *read = &model->read;
    size_t total = 0;
    const int ins = read->input_count, all = ins + read->output_count;
    for (int i = 0; i < all; i++) {
        const paceline_tensor *t = i < ins ? &inputs[i] : &outputs[i - ins];
        p->data[i] = is_contiguous(t) && t->dtype == read->dtype && !((uintptr_t)t->data % read->element) ? t->data : NULL;
        if (!p->data[i]) total += ((size_t)p->elements[i] * read->element + 63) / 64 * 64;
    }
    if (!total) return PACELINE_OK;
    void *memory;
    if (posix_memalign(&memory, 64, total))
        return fail(PACELINE_ERROR_MEMORY, "no memory for copies of %zu bytes", total);
    char *next = p->copies = memory;
    for (int i = 0; i < all; i++) {
        if (p->data[i]) continue;
        p->data[i] = next;
        next += ((size_t)p->elements[i] * read->element + 63) / 64 * 64;
        if (i < ins) copy_tensor(p->data[i], read->dtype, &inputs[i], true);
    }
    return PACELINE_OK;
}

static int compute(const paceline_model *model, const paceline_tensor *outputs, prepared *p) {
    const artifact *read = &model->read;
    const int ins = read->input_count;
    bool check = model->flags & PACELINE_CHECK_FINITE;
    int code = PACELINE_OK;
    for (int i = 0; check && i < ins && !code; i++)
        code = check_finite("input", &read->inputs[i], p->data[i], p->elements[i], read->dtype);
    call what = {p->sizes, (const void *const *)p->data, p->data + ins, (const int64_t(*)[PACELINE_MAX_RANK])p->shapes,
                 (const int64_t(*)[PACELINE_MAX_RANK])(p->shapes + ins)};
    if (!code) code = model->use->run(model->state, read, &what);
    for (int i = 0; check && i < read->output_count && !code; i++)
        code = check_finite("output", &read->outputs[i], p->data[ins + i], p->elements[ins + i], read->dtype);
    for (int i = 0; i < read->output_count && !code; i++)
        if (p->data[ins + i] != outputs[i].data) copy_tensor(p->data[ins + i], read->dtype, &outputs[i], false);
    return code;
}

int paceline_run(const paceline_model *model, const paceline_tensor *inputs, int input_count,
                 const paceline_tensor *outputs, int output_count) {
    if (!model) return fail(PACELINE_ERROR_ARGUMENT, "the model is NULL");
    const artifact *read = &model->read;
    if (!inputs || !outputs || input_count != read->input_count || output_count != read->output_count)
        return fail(PACELINE_ERROR_ARGUMENT, "%d inputs and %d outputs were given; the model has %d and %d",
                    inputs ? input_count : 0, outputs ? output_count : 0, read->input_count, read->output_count);
    prepared p;
    p.copies = NULL;
    int code = check_all(model, inputs, outputs, &p);
    if (code) return code;
    for (int i = 0; i < read->symbol_count; i++)
        if (!p.sizes[i]) return PACELINE_OK; /* nothing to compute */
    code = make_copies(model, inputs, outputs, &p);
    if (!code) code = compute(model, outputs, &p);
    free(p.copies);
    return code;
}

/* Shapes of the only input and output for a batch. */
static int single_shapes(const paceline_model *model, int64_t batch, int64_t shapes[2][PACELINE_MAX_RANK]) {
    if (!model) return fail(PACELINE_ERROR_ARGUMENT, "the model is NULL");
    const artifact *read = &model->read;
    bool good = read->input_count == 1 && read->output_count == 1;
    for (int i = 0; good && i < 2; i++) {
        const field *f = i ? read->outputs : read->inputs;
        good = f->rank > 0;
        for (int d = 0; d < f->rank; d++) {
            good = good && (d == 0 || f->symbols[d] < 0);
            shapes[i][d] = d == 0 ? batch : f->shape[d];
        }
    }
    return good ? PACELINE_OK
                : fail(PACELINE_ERROR_ARGUMENT, "the model has not one input and one output whose first size only is "
                       "symbolic. HINT: paceline_run");
}

static int run_single(const paceline_model *model, int64_t batch, const void *in, void *out, int dtype) {
    int64_t shapes[2][PACELINE_MAX_RANK];
    int code = single_shapes(model, batch, shapes);
    if (code) return code;
    paceline_tensor x = {(void *)(uintptr_t)in, dtype, model->read.inputs->rank, shapes[0], NULL};
    paceline_tensor y = {out, dtype, model->read.outputs->rank, shapes[1], NULL};
    return paceline_run(model, &x, 1, &y, 1);
}

int paceline_run_f32(const paceline_model *model, int64_t batch, const float *in, float *out) {
    return run_single(model, batch, in, out, PACELINE_FLOAT32);
}

int paceline_run_f64(const paceline_model *model, int64_t batch, const double *in, double *out) {
    return run_single(model, batch, in, out, PACELINE_FLOAT64);
}

/* Samples are gathered in parts, so that a large field needs no copy of its size. Only the builtin
   backend refuses models that couple the samples of a batch: the others get it whole. */
#define PART_ELEMENTS 16384

static void copy_fields(bool gather, char *buffer, void *const *fields, const int64_t *strides, int64_t features,
                        int64_t begin, int64_t count, size_t element) {
    for (int64_t f = 0; f < features; f++) {
        int64_t step = strides ? strides[f] : 1;
        char *theirs = (char *)fields[f] + begin * step * (int64_t)element, *own = buffer + (size_t)f * element;
        const size_t row = (size_t)features * element;
        for (int64_t i = 0; i < count; i++, theirs += step * (int64_t)element, own += row) {
            if (element == 8)
                memcpy(gather ? own : theirs, gather ? theirs : own, 8);
            else
                memcpy(gather ? own : theirs, gather ? theirs : own, 4);
        }
    }
}

static int check_fields(const paceline_model *model, int64_t batch, void *const *in, void *const *out,
                        const int64_t *out_strides, int64_t shapes[2][PACELINE_MAX_RANK]) {
    int code = single_shapes(model, batch, shapes);
    if (code) return code;
    const artifact *read = &model->read;
    if (read->inputs->rank != 2 || read->outputs->rank != 2)
        return fail(PACELINE_ERROR_ARGUMENT, "the input and the output must have two dimensions");
    if (!in || !out) return fail(PACELINE_ERROR_ARGUMENT, "the list of fields is NULL");
    const symbol *s = read->inputs->symbols[0] < 0 ? NULL : &read->symbols[read->inputs->symbols[0]];
    if (batch < 0 || (!s && batch != read->inputs->shape[0]) || (s && batch && (batch < s->min || batch > s->max)))
        return fail(PACELINE_ERROR_BOUNDS, "the batch is %lld, outside of the bounds of the export, %lld to %lld",
                    (long long)batch, (long long)(s ? s->min : read->inputs->shape[0]),
                    (long long)(s ? s->max : read->inputs->shape[0]));
    for (int64_t f = 0; batch && f < shapes[0][1]; f++)
        if (!in[f]) return fail(PACELINE_ERROR_ARGUMENT, "input field %lld is NULL", (long long)f);
    for (int64_t f = 0; batch && f < shapes[1][1]; f++) {
        if (!out[f]) return fail(PACELINE_ERROR_ARGUMENT, "output field %lld is NULL", (long long)f);
        if (out_strides && !out_strides[f] && batch > 1)
            return fail(PACELINE_ERROR_ARGUMENT, "output field %lld has stride 0", (long long)f);
    }
    return PACELINE_OK;
}

static int run_fields(const paceline_model *model, int64_t batch, void *const *in, const int64_t *in_strides,
                      void *const *out, const int64_t *out_strides, int dtype) {
    int64_t shapes[2][PACELINE_MAX_RANK];
    int code = check_fields(model, batch, in, out, out_strides, shapes);
    if (code || !batch) return code;
    const symbol *s = model->read.inputs->symbols[0] < 0 ? NULL : &model->read.symbols[model->read.inputs->symbols[0]];
    int64_t features = shapes[0][1], results = shapes[1][1], wide = features > results ? features : results;
    int64_t part = PART_ELEMENTS / wide < 64 ? 64 : PART_ELEMENTS / wide;
    /* Other sizes may be refused. */
    if (model->use != &BUILTIN || !s || s->min > 1 || part > batch) part = batch;
    size_t element = element_bytes(dtype), total;
    if (__builtin_mul_overflow((size_t)part * element, (size_t)(features + results), &total))
        return fail(PACELINE_ERROR_BOUNDS, "the batch is too large");
    char *memory = malloc(total);
    if (!memory) return fail(PACELINE_ERROR_MEMORY, "no memory for %zu bytes", total);
    char *y = memory + (size_t)(part * features) * element;
    for (int64_t begin = 0; begin < batch && !code; begin += part) {
        int64_t count = batch - begin < part ? batch - begin : part;
        copy_fields(true, memory, in, in_strides, features, begin, count, element);
        code = run_single(model, count, memory, y, dtype);
        if (!code) copy_fields(false, y, out, out_strides, results, begin, count, element);
    }
    free(memory);
    return code;
}

int paceline_run_fields_f32(const paceline_model *model, int64_t batch, const float *const *in,
                            const int64_t *in_strides, float *const *out, const int64_t *out_strides) {
    return run_fields(model, batch, (void *const *)(uintptr_t)in, in_strides, (void *const *)(uintptr_t)out, out_strides, PACELINE_FLOAT32);
}

int paceline_run_fields_f64(const paceline_model *model, int64_t batch, const double *const *in,
                            const int64_t *in_strides, double *const *out, const int64_t *out_strides) {
    return run_fields(model, batch, (void *const *)(uintptr_t)in, in_strides, (void *const *)(uintptr_t)out, out_strides, PACELINE_FLOAT64);
}

/* Test vectors need not be aligned. */
static double value_at(const void *data, int64_t i, int dtype) {
    float single;
    double twice;
    if (dtype == PACELINE_FLOAT64) return memcpy(&twice, (const char *)data + i * 8, 8), twice;
    return memcpy(&single, (const char *)data + i * 4, 4), (double)single;
}

/* The larger one; NaN if one is NaN. */
static double larger(double a, double b) { return isnan(a) || a > b ? a : b; }

/* The tensors of one case of the test vectors. */
typedef struct {
    paceline_tensor tensors[2 * PACELINE_MAX_TENSORS]; /* inputs, then outputs */
    int64_t shapes[2 * PACELINE_MAX_TENSORS][PACELINE_MAX_RANK], counts[2 * PACELINE_MAX_TENSORS];
    const uint8_t *expected[2 * PACELINE_MAX_TENSORS];
    void *results[PACELINE_MAX_TENSORS];
} test_vectors;

static void free_case(test_vectors *v) {
    for (int i = 0; i < PACELINE_MAX_TENSORS; i++) free(v->results[i]);
    free(v);
}

/* Read the case at *offset of the test vectors. */
static int read_case(const paceline_model *model, const int64_t *sizes, size_t *offset, test_vectors **read_) {
    const artifact *read = &model->read;
    const int ins = read->input_count, all = ins + read->output_count;
    test_vectors *v = *read_ = calloc(1, sizeof *v);
    if (!v) return fail(PACELINE_ERROR_MEMORY, "no memory");
    for (int i = 0; i < all; i++) {
        const field *f = i < ins ? &read->inputs[i] : &read->outputs[i - ins];
        int64_t count = 1;
        bool good = true;
        for (int d = 0; d < f->rank; d++) {
            v->shapes[i][d] = f->symbols[d] < 0 ? f->shape[d] : sizes[f->symbols[d]];
            good = good && multiply(count, v->shapes[i][d], &count);
        }
        if (!good || (uint64_t)count > (model->vector_bytes - *offset) / read->element)
            return fail(PACELINE_ERROR_DAMAGED, "the file is damaged: its test vectors are too short");
        v->expected[i] = model->vectors + *offset;
        v->counts[i] = count;
        *offset += (size_t)count * read->element;
        void *data = (void *)(uintptr_t)v->expected[i];
        if (i >= ins && !(data = v->results[i - ins] = calloc((size_t)count + 1, read->element)))
            return fail(PACELINE_ERROR_MEMORY, "no memory");
        v->tensors[i] = (paceline_tensor){data, read->dtype, f->rank, v->shapes[i], NULL};
    }
    return PACELINE_OK;
}

static int run_case(const paceline_model *model, const test_vectors *v) {
    const int ins = model->read.input_count;
    return paceline_run(model, v->tensors, ins, v->tensors + ins, model->read.output_count);
}

/* Run one case; *worst is updated. */
static int test_case(const paceline_model *model, const int64_t *sizes, size_t *offset, double *worst) {
    test_vectors *v;
    const int ins = model->read.input_count, dtype = model->read.dtype;
    int code = read_case(model, sizes, offset, &v);
    if (!code) code = run_case(model, v);
    for (int i = ins; i < ins + model->read.output_count && !code; i++) {
        double largest = 0, difference = 0;
        for (int64_t j = 0; j < v->counts[i]; j++) {
            double want = value_at(v->expected[i], j, dtype), found = value_at(v->results[i - ins], j, dtype);
            largest = fmax(largest, fabs(want));
            difference = larger(difference, fabs(want - found));
        }
        *worst = larger(*worst, largest > 0 ? difference / largest : difference);
    }
    if (v) free_case(v);
    return code;
}

int paceline_test(const paceline_model *model, double *error) {
    if (!model) return fail(PACELINE_ERROR_ARGUMENT, "the model is NULL");
    size_t offset = 0;
    double worst = 0;
    for (int i = 0; i < model->read.case_count; i++) {
        int code = test_case(model, model->read.cases[i], &offset, &worst);
        if (code) return code;
    }
    if (error) *error = worst;
    if (!(worst <= 10 * model->read.tolerance))
        return fail(PACELINE_ERROR_BACKEND, "the test vectors differ by %.3g of the largest output from PyTorch's "
                    "results at the export", worst);
    return PACELINE_OK;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static int compare(const void *a, const void *b) { return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b); }

#define ROUNDS 9

int paceline_measure(const paceline_model *model, int number, double seconds, double *per_call) {
    if (!model || !per_call || number < 0 || number >= model->read.case_count || !(seconds > 0 && seconds < 3600))
        return fail(PACELINE_ERROR_ARGUMENT, "paceline_measure: there are no test vectors %d, or the time is wrong", number);
    size_t offset = 0;
    test_vectors *v = NULL;
    int code = PACELINE_OK;
    for (int i = 0; i <= number && !code; i++) {
        if (v) free_case(v);
        code = read_case(model, model->read.cases[i], &offset, &v);
    }
    if (!code) code = run_case(model, v); /* the first call allocates */
    double rounds[ROUNDS], begin = now();
    int64_t calls = 0;
    while (!code && now() - begin < seconds / 10) code = run_case(model, v), calls++;
    calls = 1 + (int64_t)((double)calls * 9 / ROUNDS);
    for (int r = 0; r < ROUNDS && !code; r++) {
        begin = now();
        for (int64_t i = 0; i < calls && !code; i++) code = run_case(model, v);
        rounds[r] = (now() - begin) / (double)calls;
    }
    if (!code) qsort(rounds, ROUNDS, sizeof *rounds, compare), *per_call = rounds[ROUNDS / 2];
    if (v) free_case(v);
    return code;
}
