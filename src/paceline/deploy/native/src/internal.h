/* What the parts of the runtime share. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "../include/paceline.h"

#define FORMAT_VERSION 1
#define MAX_SYMBOLS 8
#define MAX_SECTIONS 16
#define MAX_CASES 16
#define MAX_NAME 63

#define HIDDEN __attribute__((visibility("hidden")))

/* error.c: store the message of this thread and return the code. */
HIDDEN int fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* sha256.c */
HIDDEN void sha256(const void *data, size_t bytes, uint8_t digest[32]);

/* json.c: a parsed text as a list of nodes; children follow their parent. */
enum { JSON_OBJECT, JSON_ARRAY, JSON_STRING, JSON_NUMBER, JSON_WORD };
typedef struct {
    int kind;
    const char *text; /* of a string, without quotes */
    size_t bytes;
    int next; /* index of the node behind this one and all that it contains */
} json_node;
typedef struct {
    json_node *nodes;
    int count;
} json;
HIDDEN int json_parse(const char *text, size_t bytes, json *parsed);
HIDDEN int json_member(const json *parsed, int object, const char *name); /* node, or -1 */
HIDDEN int json_first(const json *parsed, int node);                      /* first child, or -1 */
HIDDEN int json_after(const json *parsed, int parent, int child);         /* next one, or -1 */
HIDDEN bool json_is(const json *parsed, int node, const char *text);
HIDDEN bool json_integer(const json *parsed, int node, int64_t *value);
HIDDEN bool json_real(const json *parsed, int node, double *value);
HIDDEN bool json_name(const json *parsed, int node, char name[MAX_NAME + 1]);

/* artifact.c */
typedef struct {
    char name[MAX_NAME + 1];
    int64_t min, max;
} symbol;
typedef struct {
    char name[MAX_NAME + 1];
    int rank;
    int64_t shape[PACELINE_MAX_RANK]; /* fixed size, or -1 */
    int symbols[PACELINE_MAX_RANK];   /* index of the symbol, or -1 */
} field;
typedef struct {
    char name[MAX_NAME + 1];
    const uint8_t *data;
    size_t bytes;
} section;
typedef struct {
    uint8_t *file; /* content of the file */
    size_t bytes;
    bool private_file; /* only this user or root can have written it */
    char *manifest;    /* its text, ends with 0 */
    json parsed;
    int dtype, input_count, output_count, symbol_count, section_count, case_count;
    size_t element; /* bytes of an element */
    field inputs[PACELINE_MAX_TENSORS], outputs[PACELINE_MAX_TENSORS];
    symbol symbols[MAX_SYMBOLS];
    section sections[MAX_SECTIONS];
    int64_t cases[MAX_CASES][MAX_SYMBOLS]; /* sizes of the test vectors */
    double tolerance;
    char backend[MAX_NAME + 1];
} artifact;
/* Whether only this user or root can change what a path names: the file and all its folders. */
HIDDEN bool is_private(const char *path, const struct stat *file);
HIDDEN int artifact_read(const char *path, artifact *read);
HIDDEN void artifact_close(artifact *read);
HIDDEN const section *find_section(const artifact *read, const char *name);

/* One call, with all sizes known. Tensors are in row-major order. */
typedef struct {
    const int64_t *sizes; /* by symbol */
    const void *const *inputs;
    void *const *outputs;
    const int64_t (*input_shapes)[PACELINE_MAX_RANK];
    const int64_t (*output_shapes)[PACELINE_MAX_RANK];
} call;

typedef struct {
    const char *name;
    int (*open)(const artifact *read, const paceline_options *options, void **state);
    int (*run)(void *state, const artifact *read, const call *what);
    void (*close)(void *state);
} backend;
extern const backend BUILTIN HIDDEN, ONNXRUNTIME HIDDEN, AOTINDUCTOR HIDDEN;

/* libraries.c: load a library from a path, the system, or the Python packages beside this one. */
HIDDEN int load_library(const char *path, const char *variable, const char *const *names,
                        const char *package, const char *pattern, const char *hint, void **handle);

/* Whether a * b * ... stays below 2^62; *product is the result. */
static inline bool multiply(int64_t a, int64_t b, int64_t *product) {
    return !__builtin_mul_overflow(a, b, product) && *product < ((int64_t)1 << 62);
}
