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

/* Whether only this user or root can change a file or folder, and the folders above it. */
static bool is_safe(const char *path) {
    struct stat status;
    return !stat(path, &status) && is_private(path, &status);
}

#define PLACE "/paceline/deploy/native/lib/libpaceline.so"

/* The library of a package beside Paceline's in site-packages; *unsafe: it was found, but others can
   change it. Of a copy of this library elsewhere, nothing is known of the folders beside it. */
static void *open_package(const char *package, const char *pattern, char *path, size_t bytes, bool *unsafe) {
    Dl_info info;
    char folder[4096];
    if (!dladdr((void *)(uintptr_t)paceline_version, &info) || !info.dli_fname) return NULL;
    char *real = realpath(info.dli_fname, NULL);
    if (!real) return NULL;
    size_t length = strlen(real), place = strlen(PLACE);
    bool found = length > place && !strcmp(real + length - place, PLACE);
    if (found) {
        real[length - place] = 0;
        found = snprintf(folder, sizeof folder, "%s/%s", real, package) < (int)sizeof folder &&
                find_in(folder, pattern, path, bytes);
        *unsafe = found && !(is_safe(real) && is_safe(folder) && is_safe(path)); /* each may be a link */
    }
    free(real);
    return found && !*unsafe ? open_quietly(path) : NULL;
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
    char beside[4352];
    bool unsafe = false;
    if ((*handle = open_package(package, pattern, beside, sizeof beside, &unsafe))) return PACELINE_OK;
    if (unsafe)
        return fail(PACELINE_ERROR_UNSAFE, "%s was not loaded, as other users can change it or a folder above it. "
                    "HINT: take away their right to write, or set %s to the path of the library", beside, variable);
    return fail(PACELINE_ERROR_LIBRARY, "%s* was not found. HINT: %s, or set %s to the path of the library", pattern,
                hint, variable);
}
