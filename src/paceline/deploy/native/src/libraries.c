/* Find and load a library that a backend needs: the path that the caller gives, that of an environment
   variable, a name that the system finds, or the package beside Paceline's in site-packages. A path
   is never taken from a model file. */
#include <dirent.h>
#include <dlfcn.h>
#include <stdio.h>

#include "internal.h"

static void *open_quietly(const char *path) { return dlopen(path, RTLD_NOW | RTLD_LOCAL); }

/* The first entry of a folder that begins with `name`; false without one. */
static bool find_in(const char *folder, const char *name, char *path, size_t bytes) {
    DIR *open = opendir(folder);
    bool found = false;
    for (struct dirent *one; open && !found && (one = readdir(open));)
        if (!strncmp(one->d_name, name, strlen(name)))
            found = snprintf(path, bytes, "%s/%s", folder, one->d_name) < (int)bytes;
    if (open) closedir(open);
    return found;
}

static void *open_package(const char *package, const char *pattern) {
    Dl_info info;
    char folder[4096], path[4352];
    if (!dladdr((void *)(uintptr_t)paceline_version, &info) || !info.dli_fname) return NULL;
    char *real = realpath(info.dli_fname, NULL); /* site-packages/paceline/deploy/native/lib/ */
    if (!real) return NULL;
    for (int i = 0; i < 5; i++) {
        char *slash = strrchr(real, '/');
        if (slash) *slash = 0;
    }
    int length = snprintf(folder, sizeof folder, "%s/%s", real, package);
    free(real);
    if (length >= (int)sizeof folder || !find_in(folder, pattern, path, sizeof path)) return NULL;
    return open_quietly(path);
}

int load_library(const char *path, const char *variable, const char *const *names, const char *package,
                 const char *pattern, const char *hint, void **handle) {
    const char *given = path && *path ? path : getenv(variable);
    if (given && *given) {
        if ((*handle = open_quietly(given))) return PACELINE_OK;
        return fail(PACELINE_ERROR_LIBRARY, "%s can't be loaded: %s", given, dlerror());
    }
    for (; *names; names++)
        if ((*handle = open_quietly(*names))) return PACELINE_OK;
    if ((*handle = open_package(package, pattern))) return PACELINE_OK;
    return fail(PACELINE_ERROR_LIBRARY, "%s* was not found. HINT: %s, or set %s to the path of the library", pattern,
                hint, variable);
}
