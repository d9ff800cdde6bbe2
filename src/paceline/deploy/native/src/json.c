/* A parser of JSON that others may have written: depth, number of nodes and lengths are limited.
   Numbers are read without the locale of the program, which may have a decimal comma. */
#include "internal.h"

#define MAX_DEPTH 16
#define MAX_NODES (1 << 20)

typedef struct {
    const char *at, *end;
    json *out;
    int room;
} parser;

static int add(parser *p, int kind) {
    json *out = p->out;
    if (out->count == p->room) {
        int room = p->room ? 2 * p->room : 256;
        json_node *nodes = room <= MAX_NODES ? realloc(out->nodes, room * sizeof *nodes) : NULL;
        if (!nodes) return -1;
        out->nodes = nodes, p->room = room;
    }
    out->nodes[out->count] = (json_node){.kind = kind, .text = p->at};
    return out->count++;
}

static void blank(parser *p) {
    while (p->at < p->end && (*p->at == ' ' || *p->at == '\n' || *p->at == '\t' || *p->at == '\r')) p->at++;
}

static bool value(parser *p, int depth);

static bool string(parser *p) {
    if (p->at >= p->end || *p->at != '"') return false;
    p->at++;
    int node = add(p, JSON_STRING);
    if (node < 0) return false;
    const char *begin = p->at;
    while (p->at < p->end && *p->at != '"') {
        if ((unsigned char)*p->at < ' ') return false;
        p->at += *p->at == '\\' ? 2 : 1;
    }
    if (p->at >= p->end) return false;
    p->out->nodes[node].bytes = (size_t)(p->at++ - begin);
    p->out->nodes[node].next = p->out->count;
    return true;
}

static bool container(parser *p, bool object, int depth) {
    int node = add(p, object ? JSON_OBJECT : JSON_ARRAY);
    if (node < 0 || depth > MAX_DEPTH) return false;
    p->at++;
    char close = object ? '}' : ']';
    blank(p);
    if (p->at < p->end && *p->at == close) {
        p->at++;
    } else {
        for (;;) {
            blank(p);
            if (object) {
                if (!string(p)) return false;
                blank(p);
                if (p->at >= p->end || *p->at++ != ':') return false;
            }
            if (!value(p, depth + 1)) return false;
            blank(p);
            if (p->at >= p->end) return false;
            char mark = *p->at++;
            if (mark == close) break;
            if (mark != ',') return false;
        }
    }
    p->out->nodes[node].next = p->out->count;
    return true;
}

static bool plain(char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' ||
           c == '+' || c == '.';
}

static bool value(parser *p, int depth) {
    blank(p);
    if (p->at >= p->end) return false;
    char c = *p->at;
    if (c == '{' || c == '[') return container(p, c == '{', depth);
    if (c == '"') return string(p);
    int node = add(p, c == '-' || (c >= '0' && c <= '9') ? JSON_NUMBER : JSON_WORD);
    if (node < 0) return false;
    const char *begin = p->at;
    while (p->at < p->end && plain(*p->at)) p->at++;
    p->out->nodes[node].bytes = (size_t)(p->at - begin);
    p->out->nodes[node].next = p->out->count;
    return p->at > begin;
}

int json_parse(const char *text, size_t bytes, json *parsed) {
    *parsed = (json){NULL, 0};
    parser p = {text, text + bytes, parsed, 0};
    bool good = value(&p, 0);
    blank(&p);
    if (good && p.at == p.end) return PACELINE_OK;
    free(parsed->nodes);
    *parsed = (json){NULL, 0};
    return fail(PACELINE_ERROR_DAMAGED, "the manifest is not JSON, or too large");
}

int json_first(const json *parsed, int node) {
    if (node < 0 || parsed->nodes[node].kind > JSON_ARRAY) return -1;
    return parsed->nodes[node].next > node + 1 ? node + 1 : -1;
}

int json_after(const json *parsed, int parent, int child) {
    int next = parsed->nodes[child].next;
    return next < parsed->nodes[parent].next ? next : -1;
}

int json_member(const json *parsed, int object, const char *name) {
    if (object < 0 || parsed->nodes[object].kind != JSON_OBJECT) return -1;
    for (int key = json_first(parsed, object); key >= 0;) {
        if (json_is(parsed, key, name)) return key + 1;
        key = json_after(parsed, object, key + 1);
    }
    return -1;
}

bool json_is(const json *parsed, int node, const char *text) {
    if (node < 0) return false;
    const json_node *one = &parsed->nodes[node];
    return one->kind == JSON_STRING && one->bytes == strlen(text) && !memcmp(one->text, text, one->bytes);
}

bool json_integer(const json *parsed, int node, int64_t *value) {
    if (node < 0 || parsed->nodes[node].kind != JSON_NUMBER) return false;
    const json_node *one = &parsed->nodes[node];
    bool negative = one->text[0] == '-';
    if (one->bytes - negative < 1 || one->bytes - negative > 18) return false;
    int64_t sum = 0;
    for (size_t i = negative; i < one->bytes; i++) {
        if (one->text[i] < '0' || one->text[i] > '9') return false;
        sum = 10 * sum + (one->text[i] - '0');
    }
    *value = negative ? -sum : sum;
    return true;
}

bool json_real(const json *parsed, int node, double *value) {
    if (node < 0 || parsed->nodes[node].kind != JSON_NUMBER) return false;
    const char *at = parsed->nodes[node].text, *end = at + parsed->nodes[node].bytes;
    double sum = 0;
    int exponent = 0, shift = 0;
    bool negative = *at == '-', point = false, minus = false;
    for (at += negative; at < end && *at != 'e' && *at != 'E'; at++) {
        if (*at == '.' && !point) {
            point = true;
            continue;
        }
        if (*at < '0' || *at > '9') return false;
        sum = 10 * sum + (*at - '0');
        shift += point;
    }
    if (at < end) {
        at++;
        if (at < end && (*at == '-' || *at == '+')) minus = *at++ == '-';
        for (; at < end; at++) {
            if (*at < '0' || *at > '9' || exponent > 1000) return false;
            exponent = 10 * exponent + (*at - '0');
        }
    }
    exponent = (minus ? -exponent : exponent) - shift;
    for (; exponent > 0; exponent--) sum *= 10;
    for (; exponent < 0; exponent++) sum /= 10;
    *value = negative ? -sum : sum;
    return true;
}

bool json_name(const json *parsed, int node, char name[MAX_NAME + 1]) {
    if (node < 0 || parsed->nodes[node].kind != JSON_STRING) return false;
    const json_node *one = &parsed->nodes[node];
    if (!one->bytes || one->bytes > MAX_NAME) return false;
    for (size_t i = 0; i < one->bytes; i++) {
        char c = one->text[i];
        if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
              c == '.'))
            return false;
    }
    memcpy(name, one->text, one->bytes);
    name[one->bytes] = 0;
    return true;
}
