/* The ONNX Runtime backend, through its C interface. The wheel of ONNX Runtime has no header, so what
   is used of the interface is declared here: a table of functions that only grows, whose first 102
   entries are those of API version 1. */
#include <dlfcn.h>
#include <pthread.h>

#include "internal.h"

#define API_VERSION 11 /* ONNX Runtime 1.11 and later */
#define FLOAT 1        /* ONNXTensorElementDataType */
#define DOUBLE 11
#define LOG_FATAL 4
#define ALL_OPTIMIZATIONS 99

typedef void *status; /* NULL: no error */
/* Positions in the table of API version 1. */
enum {
    GET_ERROR_MESSAGE = 2, CREATE_ENV = 3, CREATE_SESSION_FROM_ARRAY = 8, RUN = 9, CREATE_SESSION_OPTIONS = 10,
    SET_LOG_SEVERITY = 22, SET_OPTIMIZATION = 23, SET_INTRA_THREADS = 24, SET_INTER_THREADS = 25,
    CREATE_TENSOR_WITH_DATA = 49, CREATE_CPU_MEMORY_INFO = 69, RELEASE_ENV = 92, RELEASE_STATUS = 93,
    RELEASE_MEMORY_INFO = 94, RELEASE_SESSION = 95, RELEASE_VALUE = 96, RELEASE_SESSION_OPTIONS = 100
};
typedef void (*function)(void);
typedef struct {
    const function *(*get_api)(uint32_t version);
    const char *(*get_version)(void);
} api_base;
typedef status (*create_tensor)(const void *memory, void *data, size_t bytes, const int64_t *shape, size_t rank,
                                int dtype, void **value);
typedef status (*run_session)(void *session, const void *options, const char *const *input_names,
                              const void *const *inputs, size_t input_count, const char *const *output_names,
                              size_t output_count, void **outputs);
typedef void (*release)(void *);

typedef struct {
    const function *api;
    void *session, *memory;
} session_state;

/* One environment for the process, as ONNX Runtime wants it; it is not released. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const function *shared_api;
static void *environment;

static int check(const function *api, status error) {
    if (!error) return PACELINE_OK;
    const char *text = ((const char *(*)(status))api[GET_ERROR_MESSAGE])(error);
    int code = fail(PACELINE_ERROR_BACKEND, "ONNX Runtime: %.800s", text ? text : "unknown error");
    ((release)api[RELEASE_STATUS])(error);
    return code;
}

static int load_api(const paceline_options *options) {
    static const char *const names[] = {"libonnxruntime.so.1", "libonnxruntime.so", NULL};
    void *library;
    int code = load_library(options->library, "PACELINE_ONNXRUNTIME", names, "onnxruntime/capi", "libonnxruntime.so",
                            "pip install onnxruntime", &library);
    if (code) return code;
    const api_base *(*get_base)(void) = (const api_base *(*)(void))(uintptr_t)dlsym(library, "OrtGetApiBase");
    if (!get_base) return fail(PACELINE_ERROR_LIBRARY, "the library is not ONNX Runtime: it has no OrtGetApiBase");
    const function *api = get_base()->get_api(API_VERSION);
    if (!api)
        return fail(PACELINE_ERROR_LIBRARY, "ONNX Runtime %s is too old. HINT: pip install 'onnxruntime>=1.17'",
                    get_base()->get_version());
    code = check(api, ((status(*)(int, const char *, void **))api[CREATE_ENV])(LOG_FATAL, "paceline", &environment));
    if (!code) shared_api = api;
    return code;
}

static void close_session(void *state) {
    session_state *s = state;
    if (!s) return;
    if (s->session) ((release)s->api[RELEASE_SESSION])(s->session);
    if (s->memory) ((release)s->api[RELEASE_MEMORY_INFO])(s->memory);
    free(s);
}

static int create_session(session_state *s, const section *model, int threads) {
    const function *api = s->api;
    void *options = NULL;
    int code = check(api, ((status(*)(void **))api[CREATE_SESSION_OPTIONS])(&options));
    typedef status (*set)(void *, int);
    if (!code) code = check(api, ((set)api[SET_INTRA_THREADS])(options, threads));
    if (!code) code = check(api, ((set)api[SET_INTER_THREADS])(options, 1));
    if (!code) code = check(api, ((set)api[SET_LOG_SEVERITY])(options, LOG_FATAL));
    if (!code) code = check(api, ((set)api[SET_OPTIMIZATION])(options, ALL_OPTIMIZATIONS));
    if (!code)
        code = check(api, ((status(*)(const void *, const void *, size_t, const void *, void **))
                               api[CREATE_SESSION_FROM_ARRAY])(environment, model->data, model->bytes, options,
                                                               &s->session));
    if (!code)
        code = check(api, ((status(*)(int, int, void **))api[CREATE_CPU_MEMORY_INFO])(0, 0, &s->memory));
    if (options) ((release)api[RELEASE_SESSION_OPTIONS])(options);
    return code;
}

static int open_session(const artifact *read, const paceline_options *options, void **state) {
    const section *model = find_section(read, "onnx");
    if (!model) return fail(PACELINE_ERROR_DAMAGED, "the file has no ONNX model");
    pthread_mutex_lock(&lock);
    int code = shared_api ? PACELINE_OK : load_api(options);
    pthread_mutex_unlock(&lock);
    if (code) return code;
    session_state *s = calloc(1, sizeof *s);
    if (!s) return fail(PACELINE_ERROR_MEMORY, "no memory");
    s->api = shared_api;
    code = create_session(s, model, options->threads > 0 ? options->threads : 1);
    if (code)
        close_session(s);
    else
        *state = s;
    return code;
}

static int64_t bytes_of(const field *f, const int64_t *shape, size_t element) {
    int64_t n = (int64_t)element;
    for (int d = 0; d < f->rank; d++) n *= shape[d]; /* checked in paceline_run */
    return n;
}

static int run_onnx(void *state, const artifact *read, const call *what) {
    const session_state *s = state;
    const char *names[2 * PACELINE_MAX_TENSORS] = {0};
    void *values[2 * PACELINE_MAX_TENSORS] = {0};
    int code = PACELINE_OK, ins = read->input_count, outs = read->output_count, dtype = read->element == 4 ? FLOAT : DOUBLE;
    for (int i = 0; i < ins + outs && !code; i++) {
        const field *f = i < ins ? &read->inputs[i] : &read->outputs[i - ins];
        const int64_t *shape = i < ins ? what->input_shapes[i] : what->output_shapes[i - ins];
        void *data = i < ins ? (void *)(uintptr_t)what->inputs[i] : what->outputs[i - ins];
        names[i] = f->name;
        code = check(s->api, ((create_tensor)s->api[CREATE_TENSOR_WITH_DATA])(
                                 s->memory, data, (size_t)bytes_of(f, shape, read->element), shape, (size_t)f->rank,
                                 dtype, &values[i]));
    }
    if (!code)
        code = check(s->api, ((run_session)s->api[RUN])(s->session, NULL, names, (const void *const *)values,
                                                        (size_t)ins, names + ins, (size_t)outs, values + ins));
    for (int i = 0; i < ins + outs; i++)
        if (values[i]) ((release)s->api[RELEASE_VALUE])(values[i]);
    return code;
}

const backend ONNXRUNTIME = {"onnxruntime", open_session, run_onnx, close_session};
