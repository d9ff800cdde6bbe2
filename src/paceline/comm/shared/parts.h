/* The two halves of an all-reduce in this host, with that of other hosts between them: included by
   kernel.c, whose phases these are. */
#pragma once

/* Of a vector that ranks sum up with other hosts (hosts/): rank q has the part of ``part`` bytes from
   q * part on; the last of them is shorter, and the ranks after it have none. */
static size_t within(uint64_t bytes, uint64_t part, int rank, uint64_t at, size_t most) {
    uint64_t from = part * (uint64_t)rank + at, until = part * (uint64_t)(rank + 1);
    if (until > bytes) until = bytes;
    return from >= until ? 0 : until - from < most ? until - from : most;
}

/* Each rank's own part becomes the sum of this host's, where it lies; by: what a mean is divided by,
   the ranks of all hosts. */
int paceline_reduce_parts(Comm *c, char *data, uint64_t bytes, uint64_t part, int kind, int how, int by,
                          double timeout) {
    int error = begin(c, ALL_REDUCE, kind, how, 0, bytes, timeout);
    if (error) return error;
    int owners = (int)((bytes + part - 1) / part);
    if (!bytes) part = 0; /* and no address to begin at */
    size_t most = owners > 1 ? c->slot / owners / LINE * LINE : c->slot;
    for (uint64_t at = 0; at < part || !at; at += most) {
        if ((error = claim(c))) return error;
        uint64_t chunk = c->chunk++;
        size_t each = part - at < most ? rounded(part - at, LINE) : most;
        int by_socket = c->by_socket && owners * each > FLAT;
        for (int q = 0; q < owners; q++)
            if (q != c->rank || by_socket)
                memcpy(slot_of(c, c->rank, chunk) + q * each, data + q * part + at,
                       within(bytes, part, q, at, most));
        if ((error = await_all(c, post(c))) || (error = compare(c, chunk))) return error;
        size_t length = within(bytes, part, c->rank, at, most), mine = c->rank * each;
        char *own = data + c->rank * part + at;
        if (by_socket) {
            within_socket(c, chunk, owners * each);
            if ((error = await_all(c, post(c)))) return error;
            over_sockets(c, chunk, owners * each, mine, mine + length, own, 0);
            c->freed[chunk % RING] = post(c);
            continue;
        }
        const char *from[c->size];
        for (int q = 0; q < c->size; q++)
            from[q] = q == c->rank ? own : slot_of(c, q, chunk) + mine;
        if (length) combine(kind, how, from, c->size, by, own, NULL, length);
        c->freed[chunk % RING] = post(c);
    }
    return OK;
}

/* All ranks get all parts. */
int paceline_gather_parts(Comm *c, char *data, uint64_t bytes, uint64_t part, double timeout) {
    int error = begin(c, ALL_GATHER, 0, 0, 0, bytes, timeout);
    if (error) return error;
    if (!bytes) part = 0;
    for (uint64_t at = 0; at < part || !at; at += c->slot) {
        if ((error = claim(c))) return error;
        uint64_t chunk = c->chunk++;
        memcpy(slot_of(c, c->rank, chunk), data + c->rank * part + at,
               within(bytes, part, c->rank, at, c->slot));
        if ((error = await_all(c, post(c))) || (error = compare(c, chunk))) return error;
        for (int i = 1; i < c->size; i++) {
            int q = (c->rank + i) % c->size;
            memcpy(data + q * part + at, slot_of(c, q, chunk), within(bytes, part, q, at, c->slot));
        }
        c->freed[chunk % RING] = post(c);
    }
    return OK;
}
