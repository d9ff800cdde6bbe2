/* The two halves of an all-reduce on this host; the exchange with other hosts runs between them.
   Included by kernel.c, which describes the phases. */
#pragma once

/* Return the bytes that a rank's part has from ``at`` on, at most ``most``. A vector that is also
   reduced over other hosts (hosts/) is divided into parts: rank q owns the ``part`` bytes from
   q * part on. The last part may be shorter, and the ranks after it own none. */
static size_t within(uint64_t bytes, uint64_t part, int rank, uint64_t at, size_t most) {
    uint64_t from = part * (uint64_t)rank + at, until = part * (uint64_t)(rank + 1);
    if (until > bytes) until = bytes;
    return from >= until ? 0 : until - from < most ? until - from : most;
}

/* Reduce each rank's part over the ranks of this host, in place. by: divisor of a mean, the number
   of ranks on all hosts. */
int paceline_reduce_parts(Comm *c, char *data, uint64_t bytes, uint64_t part, int kind, int how, int by,
                          double timeout) {
    int error = begin(c, ALL_REDUCE, kind, how, 0, bytes, timeout);
    if (error) return error;
    c->by = by;
    int owners = (int)((bytes + part - 1) / part);
    if (!bytes) part = 0; /* no part begins in an empty vector */
    size_t most = owners > 1 ? share_of_slot(c, owners) : c->slot;
    for (uint64_t at = 0; at < part || !at; at += most) {
        if ((error = claim(c))) return error;
        uint64_t chunk = c->chunk++;
        size_t each = rounded(part - at, LINE);
        if (each > most) each = most;
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

/* Gather the parts of all ranks on all ranks. */
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
