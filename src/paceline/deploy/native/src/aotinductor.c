/* The AOTInductor backend: code that PyTorch compiled at the export. It needs libtorch of exactly the
   version of the export, and a processor with the same instructions. The code is loaded from memory
   that nobody can change after its SHA-256 was checked, and only if the file and its folders can be
   changed by nobody but this user and root. */
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "internal.h"

#define MODELS 4 /* calls of one model that run at the same time; others wait */
#define MAX_FLAGS 16384

typedef void *handle;
typedef struct {
    handle container;
    void *code;
    int (*remove)(handle);
    int (*run)(handle, handle *inputs, size_t, handle *outputs, size_t, handle stream, handle proxy);
    int (*message)(const char **);
    int threads;
} compiled;

/* Of libtorch. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    void *library;
    uint64_t (*version)(void);
    int (*make)(void *, int64_t, const int64_t *, const int64_t *, int64_t, int32_t, int32_t, int32_t, handle *,
                int32_t, const uint8_t *, int64_t);
    int (*remove)(handle);
    int (*data)(handle, void **);
    int (*sizes)(handle, int64_t **);
    int (*strides)(handle, int64_t **);
    int32_t (*f32)(void), (*f64)(void), (*cpu)(void);
    bool (*gradients)(void);
    void (*set_gradients)(bool);
    int (*threads)(void); /* of OpenMP; may be missing */
    void (*set_threads)(int);
} torch_;

static int find(void *library, const char *name, void *into) {
    void *found = dlsym(library, name);
    memcpy(into, &found, sizeof found);
    return found ? PACELINE_OK : fail(PACELINE_ERROR_LIBRARY, "the library has no function %s", name);
}

static int load_torch(const paceline_options *options) {
    static const char *const names[] = {"libtorch_cpu.so", NULL};
    void *library;
    int code = load_library(options->library, "PACELINE_LIBTORCH", names, "torch/lib", "libtorch_cpu.so",
                            "install the PyTorch of the export, and add its torch/lib to LD_LIBRARY_PATH", &library);
    if (code) return code;
    const struct {
        const char *name;
        void *into;
    } functions[] = {
        {"aoti_torch_abi_version", &torch_.version}, {"aoti_torch_create_tensor_from_blob_v2", &torch_.make},
        {"aoti_torch_delete_tensor_object", &torch_.remove}, {"aoti_torch_get_data_ptr", &torch_.data},
        {"aoti_torch_get_sizes", &torch_.sizes}, {"aoti_torch_get_strides", &torch_.strides},
        {"aoti_torch_dtype_float32", &torch_.f32}, {"aoti_torch_dtype_float64", &torch_.f64},
        {"aoti_torch_device_type_cpu", &torch_.cpu}, {"aoti_torch_grad_mode_is_enabled", &torch_.gradients},
        {"aoti_torch_grad_mode_set_enabled", &torch_.set_gradients},
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if ((code = find(library, functions[i].name, functions[i].into))) return code;
    void *get = dlsym(library, "omp_get_max_threads"), *set = dlsym(library, "omp_set_num_threads");
    memcpy(&torch_.threads, &get, sizeof get);
    memcpy(&torch_.set_threads, &set, sizeof set);
    torch_.library = library;
    return PACELINE_OK;
}

/* The version of PyTorch is in the upper three bytes: 2.13.0 is 0x020d00. */
static int check_version(const artifact *read) {
    int64_t wanted;
    uint64_t found = torch_.version() >> 40;
    if (!json_integer(&read->parsed, json_member(&read->parsed, 0, "torch_abi"), &wanted))
        return fail(PACELINE_ERROR_DAMAGED, "the file does not say the version of PyTorch");
    if ((uint64_t)wanted == found) return PACELINE_OK;
    return fail(PACELINE_ERROR_VERSION,
                "the model was compiled for PyTorch %d.%d.%d; this is %d.%d.%d. HINT: export again with this PyTorch, "
                "or set PACELINE_LIBTORCH to the other libtorch_cpu.so",
                (int)(wanted >> 16 & 255), (int)(wanted >> 8 & 255), (int)(wanted & 255), (int)(found >> 16 & 255),
                (int)(found >> 8 & 255), (int)(found & 255));
}

/* Whether a line of /proc/cpuinfo has a word. */
static bool has_word(const char *line, const char *word, size_t bytes) {
    for (const char *at = line; (at = strstr(at, " ")) && at[1];) {
        at++;
        if (!strncmp(at, word, bytes) && (at[bytes] == ' ' || at[bytes] == '\n' || !at[bytes])) return true;
    }
    return false;
}

static void read_flags(char *line, int bytes) {
    FILE *file = fopen("/proc/cpuinfo", "re");
    bool found = false;
    while (file && !found && fgets(line, bytes, file))
        found = !strncmp(line, "flags", 5) || !strncmp(line, "Features", 8);
    if (!found) *line = 0;
    if (file) fclose(file);
}

static int check_processor(const artifact *read) {
    const json *parsed = &read->parsed;
    struct utsname system;
    int processor = json_member(parsed, 0, "processor"), list = json_member(parsed, processor, "features");
    if (uname(&system) || !json_is(parsed, json_member(parsed, processor, "architecture"), system.machine))
        return fail(PACELINE_ERROR_PROCESSOR, "the model was compiled for another architecture than %s. HINT: export "
                    "on this one, or with --backend builtin or onnxruntime", system.machine);
    char *line = malloc(MAX_FLAGS);
    if (!line) return fail(PACELINE_ERROR_MEMORY, "no memory");
    read_flags(line, MAX_FLAGS);
    int code = PACELINE_OK;
    for (int one = json_first(parsed, list); one >= 0 && !code; one = json_after(parsed, list, one)) {
        const json_node *node = &parsed->nodes[one];
        if (!has_word(line, node->text, node->bytes))
            code = fail(PACELINE_ERROR_PROCESSOR,
                        "the model was compiled for a processor with %.*s, which this one lacks. HINT: export on "
                        "this node, or with --backend builtin or onnxruntime",
                        (int)(node->bytes < 40 ? node->bytes : 40), node->text);
    }
    free(line);
    return code;
}

/* Write the path of a descriptor in a spelling of its own. dlopen returns the library that it has
   loaded before under the same path, even if another file lies there now. */
static void write_path(int fd, char *path, size_t bytes) {
    static atomic_uint loads;
    unsigned number = atomic_fetch_add(&loads, 1);
    size_t at = (size_t)snprintf(path, bytes, "/proc/self/fd/");
    for (int bit = 0; bit < 32; bit++)
        at += (size_t)snprintf(path + at, bytes - at, "%s", number >> bit & 1 ? "./" : "/");
    snprintf(path + at, bytes - at, "%d", fd);
}

/* Load verified code from sealed memory. */
static int load_code(const section *code, void **loaded) {
    int fd = memfd_create("paceline-model", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return fail(PACELINE_ERROR_BACKEND, "no memory file for the compiled model");
    size_t done = 0;
    while (done < code->bytes) {
        ssize_t wrote = write(fd, code->data + done, code->bytes - done);
        if (wrote <= 0) break;
        done += (size_t)wrote;
    }
    char path[128];
    write_path(fd, path, sizeof path);
    if (done < code->bytes || fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL)) {
        close(fd);
        return fail(PACELINE_ERROR_MEMORY, "no memory for the compiled model");
    }
    *loaded = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    int result = *loaded ? PACELINE_OK : fail(PACELINE_ERROR_LIBRARY, "the compiled model can't be loaded: %s", dlerror());
    close(fd);
    return result;
}

static void close_compiled(void *state) {
    compiled *c = state;
    if (!c) return;
    if (c->container) c->remove(c->container);
    if (c->code) dlclose(c->code);
    free(c);
}

static int report(const compiled *c, const char *what) {
    const char *text = NULL;
    if (c->message) c->message(&text);
    return fail(PACELINE_ERROR_BACKEND, "AOTInductor: %s%s%.700s", what, text ? ": " : "", text ? text : "");
}

static int open_container(compiled *c, const section *code) {
    int (*create)(handle *, size_t, const char *, const char *);
    int result = load_code(code, &c->code);
    if (!result) result = find(c->code, "AOTInductorModelContainerCreateWithDevice", &create);
    if (!result) result = find(c->code, "AOTInductorModelContainerDelete", &c->remove);
    if (!result) result = find(c->code, "AOTInductorModelContainerRun", &c->run);
    if (result) return result;
    void *message = dlsym(c->code, "AOTInductorGetLastError"); /* newer versions have it */
    memcpy(&c->message, &message, sizeof message);
    return create(&c->container, MODELS, "cpu", NULL) ? report(c, "the model can't be created") : PACELINE_OK;
}

static int open_compiled(const artifact *read, const paceline_options *options, void **state) {
    const section *code = find_section(read, "aotinductor");
    if (!code) return fail(PACELINE_ERROR_DAMAGED, "the file has no compiled model");
    if (!read->private_file)
        return fail(PACELINE_ERROR_UNSAFE, "the file has compiled code, and users other than you and root can write "
                    "it or one of its folders. HINT: chmod go-w, or copy it to a folder of yours");
    int result = check_processor(read);
    pthread_mutex_lock(&lock);
    if (!result && !torch_.library) result = load_torch(options);
    pthread_mutex_unlock(&lock);
    if (!result) result = check_version(read);
    if (result) return result;
    compiled *c = calloc(1, sizeof *c);
    if (!c) return fail(PACELINE_ERROR_MEMORY, "no memory");
    c->threads = options->threads > 0 ? options->threads : 1;
    result = open_container(c, code);
    if (result)
        close_compiled(c);
    else
        *state = c;
    return result;
}

/* Copy a result, whose strides may be any, to the caller's array. */
static int copy_result(handle from, const field *f, const int64_t *shape, size_t element, char *to) {
    void *data;
    int64_t *sizes, *strides, index[PACELINE_MAX_RANK] = {0}, total = 1;
    if (torch_.data(from, &data) || torch_.sizes(from, &sizes) || torch_.strides(from, &strides))
        return fail(PACELINE_ERROR_BACKEND, "AOTInductor: a result can't be read");
    bool dense = true;
    for (int d = f->rank; d--; total *= shape[d]) {
        if (sizes[d] != shape[d])
            return fail(PACELINE_ERROR_BACKEND, "AOTInductor: output %s has an unexpected shape", f->name);
        dense = dense && (strides[d] == total || shape[d] == 1);
    }
    if (dense) {
        memcpy(to, data, (size_t)total * element);
        return PACELINE_OK;
    }
    for (int64_t i = 0; i < total; i++, to += element) {
        int64_t at = 0;
        for (int d = 0; d < f->rank; d++) at += index[d] * strides[d];
        memcpy(to, (char *)data + at * (int64_t)element, element);
        for (int d = f->rank - 1; d >= 0 && ++index[d] == shape[d]; d--) index[d] = 0;
    }
    return PACELINE_OK;
}

static int make_input(const field *f, const int64_t *shape, const void *data, int dtype, handle *made) {
    int64_t strides[PACELINE_MAX_RANK], step = 1;
    for (int d = f->rank; d--; step *= shape[d]) strides[d] = step;
    int error = torch_.make((void *)(uintptr_t)data, f->rank, shape, strides, 0,
                            dtype == PACELINE_FLOAT32 ? torch_.f32() : torch_.f64(), torch_.cpu(), 0, made, 0, NULL, 0);
    return error ? fail(PACELINE_ERROR_BACKEND, "AOTInductor: input %s can't be passed", f->name) : PACELINE_OK;
}

static int run_compiled(void *state, const artifact *read, const call *what) {
    compiled *c = state;
    handle in[PACELINE_MAX_TENSORS] = {0}, out[PACELINE_MAX_TENSORS] = {0};
    int code = PACELINE_OK, made = 0;
    for (; made < read->input_count && !code; made++)
        code = make_input(&read->inputs[made], what->input_shapes[made], what->inputs[made], read->dtype, &in[made]);
    if (code) {
        for (int i = 0; i < made; i++)
            if (in[i]) torch_.remove(in[i]);
        return code;
    }
    int threads = torch_.threads ? torch_.threads() : 0; /* of this thread's next parallel regions */
    bool gradients = torch_.gradients();
    if (torch_.set_threads && threads != c->threads) torch_.set_threads(c->threads);
    if (gradients) torch_.set_gradients(false);
    if (c->run(c->container, in, (size_t)read->input_count, out, (size_t)read->output_count, NULL, NULL))
        code = report(c, "the call failed"); /* inputs belong to the model since the call */
    if (gradients) torch_.set_gradients(true);
    if (torch_.set_threads && threads > 0 && threads != c->threads) torch_.set_threads(threads);
    for (int i = 0; i < read->output_count; i++) {
        if (!out[i]) continue;
        if (!code) code = copy_result(out[i], &read->outputs[i], what->output_shapes[i], read->element, what->outputs[i]);
        torch_.remove(out[i]);
    }
    return code;
}

const backend AOTINDUCTOR = {"aotinductor", open_compiled, run_compiled, close_compiled};
