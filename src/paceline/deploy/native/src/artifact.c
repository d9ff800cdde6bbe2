/* Read and verify a model file. Its content is not trusted: all sizes and offsets are checked, and
   the SHA-256 of the manifest and of every section, before anything is used.

   Bytes 0 to 63: magic (8), version (u32), bytes of the manifest (u32), bytes of the file (u64),
   SHA-256 of the manifest (32), zero (8). Then the manifest, and the sections, each at a multiple of
   64; bytes between them are zero. Integers are little-endian. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "internal.h"

#define HEADER 64
#define MAX_MANIFEST (16 << 20)
static const uint8_t MAGIC[8] = {0x89, 'P', 'C', 'L', 'N', '\r', '\n', 0x1a};

static uint64_t little(const uint8_t *at, int bytes) {
    uint64_t value = 0;
    for (int i = bytes; i--;) value = value << 8 | at[i];
    return value;
}

bool is_private(const char *path, const struct stat *file) {
    if ((file->st_uid != geteuid() && file->st_uid != 0) || file->st_mode & 022) return false;
    char *real = realpath(path, NULL);
    bool good = real != NULL;
    for (char *slash; good && (slash = strrchr(real, '/'));) {
        struct stat folder;
        *slash = 0;
        good = !stat(*real ? real : "/", &folder) &&
               (folder.st_uid == geteuid() || folder.st_uid == 0) &&
               (!(folder.st_mode & 022) || folder.st_mode & S_ISVTX);
    }
    free(real);
    return good;
}

static int read_file(const char *path, artifact *read_) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return fail(PACELINE_ERROR_FILE, "%s: %s", path, strerror(errno));
    struct stat status;
    int code = PACELINE_OK;
    if (fstat(fd, &status) || !S_ISREG(status.st_mode)) {
        code = fail(PACELINE_ERROR_FILE, "%s is not a regular file", path);
    } else if (status.st_size < HEADER) {
        code = fail(PACELINE_ERROR_DAMAGED, "%s has %lld bytes and is not a model file", path,
                    (long long)status.st_size);
    } else if (!(read_->file = malloc((size_t)status.st_size))) {
        code = fail(PACELINE_ERROR_MEMORY, "%s: no memory for %lld bytes", path, (long long)status.st_size);
    }
    while (!code && read_->bytes < (size_t)status.st_size) {
        ssize_t got = read(fd, read_->file + read_->bytes, (size_t)status.st_size - read_->bytes);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0)
            code = fail(PACELINE_ERROR_FILE, "%s: %s", path, got ? strerror(errno) : "became shorter");
        else
            read_->bytes += (size_t)got;
    }
    if (!code) read_->private_file = is_private(path, &status);
    close(fd);
    return code;
}

static int damaged(const char *what) {
    return fail(PACELINE_ERROR_DAMAGED, "the file is damaged: %s. HINT: copy it again, or export again", what);
}

static int check_header(artifact *read, size_t *manifest) {
    const uint8_t *file = read->file;
    if (memcmp(file, MAGIC, sizeof MAGIC))
        return fail(PACELINE_ERROR_DAMAGED, "not a model file. HINT: paceline export writes one");
    uint64_t version = little(file + 8, 4);
    if (version != FORMAT_VERSION)
        return fail(PACELINE_ERROR_VERSION,
                    "the file has format %llu; this library reads format %d. HINT: use the library of "
                    "the Paceline that exported it",
                    (unsigned long long)version, FORMAT_VERSION);
    *manifest = little(file + 12, 4);
    if (little(file + 16, 8) != read->bytes) return damaged("its size differs from its header");
    if (*manifest > MAX_MANIFEST || *manifest > read->bytes - HEADER) return damaged("the manifest's size");
    uint8_t digest[32];
    sha256(file + HEADER, *manifest, digest);
    if (memcmp(digest, file + 24, 32)) return damaged("the SHA-256 of the manifest differs");
    if (little(file + 56, 8)) return damaged("reserved bytes are not zero");
    return PACELINE_OK;
}

static bool is_hex_of(const json *parsed, int node, const uint8_t digest[32]) {
    char text[65];
    for (int i = 0; i < 32; i++) snprintf(text + 2 * i, 3, "%02x", digest[i]);
    return json_is(parsed, node, text);
}

static int read_sections(artifact *read, size_t manifest) {
    const json *parsed = &read->parsed;
    size_t at = HEADER + manifest;
    int list = json_member(parsed, 0, "sections");
    for (int one = json_first(parsed, list); one >= 0; one = json_after(parsed, list, one)) {
        int64_t offset, bytes;
        section *into = &read->sections[read->section_count];
        if (read->section_count++ == MAX_SECTIONS ||
            !json_name(parsed, json_member(parsed, one, "name"), into->name) ||
            !json_integer(parsed, json_member(parsed, one, "offset"), &offset) ||
            !json_integer(parsed, json_member(parsed, one, "bytes"), &bytes) || bytes < 0 ||
            offset < 0 || offset % 64 || (size_t)offset < at || (size_t)offset > read->bytes ||
            (size_t)bytes > read->bytes - (size_t)offset || (size_t)offset - at >= 64)
            return damaged("the list of sections");
        for (; at < (size_t)offset; at++)
            if (read->file[at]) return damaged("bytes between sections are not zero");
        uint8_t digest[32];
        sha256(read->file + offset, (size_t)bytes, digest);
        if (!is_hex_of(parsed, json_member(parsed, one, "sha256"), digest))
            return damaged("the SHA-256 of a section differs");
        into->data = read->file + offset, into->bytes = (size_t)bytes;
        at += (size_t)bytes;
    }
    return at == read->bytes ? PACELINE_OK : damaged("bytes behind the last section");
}

static int read_symbols(artifact *read) {
    const json *parsed = &read->parsed;
    int list = json_member(parsed, 0, "symbols");
    for (int one = json_first(parsed, list); one >= 0; one = json_after(parsed, list, one)) {
        symbol *into = &read->symbols[read->symbol_count];
        if (read->symbol_count++ == MAX_SYMBOLS ||
            !json_name(parsed, json_member(parsed, one, "name"), into->name) ||
            !json_integer(parsed, json_member(parsed, one, "min"), &into->min) ||
            !json_integer(parsed, json_member(parsed, one, "max"), &into->max) || into->min < 0 ||
            into->max < into->min || into->max > ((int64_t)1 << 40))
            return damaged("its symbolic sizes");
    }
    return PACELINE_OK;
}

static int read_fields(artifact *read, const char *key, field *fields, int *count) {
    const json *parsed = &read->parsed;
    int list = json_member(parsed, 0, key);
    for (int one = json_first(parsed, list); one >= 0; one = json_after(parsed, list, one)) {
        field *into = &fields[*count];
        if ((*count)++ == PACELINE_MAX_TENSORS ||
            !json_name(parsed, json_member(parsed, one, "name"), into->name))
            return damaged("its inputs or outputs");
        int shape = json_member(parsed, one, "shape");
        for (int size = json_first(parsed, shape); size >= 0; size = json_after(parsed, shape, size)) {
            int at = into->rank++, which = -1;
            if (at == PACELINE_MAX_RANK) return damaged("a tensor has too many dimensions");
            for (int i = 0; i < read->symbol_count; i++)
                if (json_is(parsed, size, read->symbols[i].name)) which = i;
            into->symbols[at] = which;
            into->shape[at] = -1;
            if (which < 0 && (!json_integer(parsed, size, &into->shape[at]) || into->shape[at] < 1 ||
                              into->shape[at] > ((int64_t)1 << 40)))
                return damaged("a shape");
        }
    }
    return *count ? PACELINE_OK : damaged("it has no inputs or no outputs");
}

static int read_cases(artifact *read) {
    const json *parsed = &read->parsed;
    int list = json_member(parsed, 0, "vectors");
    for (int one = json_first(parsed, list); one >= 0; one = json_after(parsed, list, one)) {
        if (read->case_count == MAX_CASES) return damaged("too many test vectors");
        int number = 0;
        for (int size = json_first(parsed, one); size >= 0; size = json_after(parsed, one, size), number++) {
            if (number >= read->symbol_count) return damaged("its test vectors");
            int64_t *into = &read->cases[read->case_count][number];
            if (!json_integer(parsed, size, into) || *into < read->symbols[number].min ||
                *into > read->symbols[number].max)
                return damaged("its test vectors");
        }
        if (number != read->symbol_count) return damaged("its test vectors");
        read->case_count++;
    }
    return PACELINE_OK;
}

static int read_manifest(artifact *read, size_t bytes) {
    if (!(read->manifest = malloc(bytes + 1))) return fail(PACELINE_ERROR_MEMORY, "no memory");
    memcpy(read->manifest, read->file + HEADER, bytes);
    read->manifest[bytes] = 0;
    int code = json_parse(read->manifest, bytes, &read->parsed);
    if (code) return code;
    const json *parsed = &read->parsed;
    int dtype = json_member(parsed, 0, "dtype");
    if (json_is(parsed, dtype, "float32"))
        read->dtype = PACELINE_FLOAT32, read->element = 4;
    else if (json_is(parsed, dtype, "float64"))
        read->dtype = PACELINE_FLOAT64, read->element = 8;
    else
        return damaged("its dtype");
    if (!json_name(parsed, json_member(parsed, 0, "backend"), read->backend) ||
        !json_real(parsed, json_member(parsed, 0, "tolerance"), &read->tolerance))
        return damaged("its backend");
    if ((code = read_symbols(read)) || (code = read_fields(read, "inputs", read->inputs, &read->input_count)) ||
        (code = read_fields(read, "outputs", read->outputs, &read->output_count)) ||
        (code = read_cases(read)))
        return code;
    return read_sections(read, bytes);
}

int artifact_read(const char *path, artifact *read) {
    *read = (artifact){0};
    size_t manifest = 0;
    int code = read_file(path, read);
    if (!code) code = check_header(read, &manifest);
    if (!code) code = read_manifest(read, manifest);
    if (code) artifact_close(read);
    return code;
}

void artifact_close(artifact *read) {
    free(read->file);
    free(read->manifest);
    free(read->parsed.nodes);
    *read = (artifact){0};
}

const section *find_section(const artifact *read, const char *name) {
    for (int i = 0; i < read->section_count; i++)
        if (!strcmp(read->sections[i].name, name)) return &read->sections[i];
    return NULL;
}
