/* The message of the last error, of each thread. */
#include <stdarg.h>
#include <stdio.h>

#include "internal.h"

static _Thread_local char message[1024];

int fail(int code, const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(message, sizeof message, format, list);
    va_end(list);
    for (char *c = message; *c; c++) /* names may come from a hostile file */
        if ((unsigned char)*c < ' ' || *c == 0x7f) *c = '?';
    return code;
}

const char *paceline_last_error(void) { return message; }

const char *paceline_error_name(int code) {
    static const char *const names[] = {
        "PACELINE_OK",           "PACELINE_ERROR_ARGUMENT",   "PACELINE_ERROR_SHAPE",
        "PACELINE_ERROR_DTYPE",  "PACELINE_ERROR_BOUNDS",     "PACELINE_ERROR_NOT_FINITE",
        "PACELINE_ERROR_FILE",   "PACELINE_ERROR_DAMAGED",    "PACELINE_ERROR_VERSION",
        "PACELINE_ERROR_PROCESSOR", "PACELINE_ERROR_LIBRARY", "PACELINE_ERROR_UNSAFE",
        "PACELINE_ERROR_MEMORY", "PACELINE_ERROR_BACKEND",
    };
    return code >= 0 && code < (int)(sizeof names / sizeof *names) ? names[code] : "unknown code";
}
