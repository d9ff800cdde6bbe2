/* Reduction in two levels on several CPU sockets: first over the ranks of each socket, then over
   the results of all sockets. A mean is divided in both: by the number of ranks of the largest
   socket, so that a result fits the type if all values do, and by the rest of the divisor. With n
   ranks on s sockets, a reduction reads n / s times less data
   from other sockets. Included by kernel.c, which describes the phases. */
#pragma once

/* Announce the socket of this rank, before any rank calls paceline_sockets. socket: -1 if it is not
   bound to one; wanted: whether reduction by socket is enabled on this rank. */
void paceline_on_socket(Comm *c, int socket, int wanted) {
    atomic_store(&c->boxes[c->rank].socket, 2 * socket + (wanted != 0));
}

/* Return the number of sockets after all ranks have announced theirs; 0 if reduction by socket is
   not possible or would not help (one socket, or one rank on each); -1 if it is enabled on only
   some of the ranks. */
int paceline_sockets(Comm *c) {
    int all = 0, wanted = 0, nowhere = 0;
    for (int q = 0; q < c->size; q++) {
        int said = atomic_load(&c->boxes[q].socket);
        wanted += said & 1;
        nowhere += said < 0;
    }
    if (wanted != 0 && wanted != c->size) return -1;
    if (c->size == 1 || nowhere) return 0;
    free(c->order);
    c->order = calloc(2 * (size_t)c->size + 1, sizeof(int));
    if (c->order == NULL) return 0;
    c->begins = c->order + c->size;
    c->most_mates = 0;
    for (int q = 0, at = 0; q < c->size; q++) { /* order sockets by their first ranks */
        int socket = atomic_load(&c->boxes[q].socket), seen = 0;
        for (int before = 0; before < q; before++)
            seen |= atomic_load(&c->boxes[before].socket) == socket;
        if (seen) continue;
        for (int mate = q; mate < c->size; mate++) {
            if (atomic_load(&c->boxes[mate].socket) != socket) continue;
            if (mate == c->rank) c->socket = all, c->mate = at - c->begins[all];
            c->order[at++] = mate;
        }
        int mates = at - c->begins[all];
        if (mates > c->most_mates) c->most_mates = mates;
        c->begins[++all] = at;
    }
    c->sockets = all > 1 && all < c->size ? all : 0;
    return c->sockets;
}

/* Enable or disable reduction by socket from the next collective on. All ranks have to call this
   while no collective is running. */
void paceline_by_socket(Comm *c, int by) { c->by_socket = by && c->sockets; }

static int mates(Comm *c, int socket) { return c->begins[socket + 1] - c->begins[socket]; }

/* Return the bytes that each rank of a socket reduces. */
static size_t piece(Comm *c, int socket, size_t bytes) {
    return rounded((bytes + mates(c, socket) - 1) / mates(c, socket), LINE);
}

/* Reduce this rank's piece of the ``bytes`` in each slot over its socket, into its own slot. */
static void within_socket(Comm *c, uint64_t chunk, size_t bytes) {
    size_t each = piece(c, c->socket, bytes), at = each * c->mate;
    if (at >= bytes || (mates(c, c->socket) == 1 && c->call.how != MEAN)) return;
    const char *from[c->size];
    for (int i = 0; i < mates(c, c->socket); i++)
        from[i] = slot_of(c, c->order[c->begins[c->socket] + i], chunk) + at;
    combine(c->call.kind, c->call.how, from, mates(c, c->socket), c->most_mates,
            slot_of(c, c->rank, chunk) + at, NULL, bytes - at < each ? bytes - at : each);
}

/* Reduce the results of within_socket over all sockets, from ``at`` until ``end``. to, share: same
   as for reduce. */
static void over_sockets(Comm *c, uint64_t chunk, size_t bytes, size_t at, size_t end, char *to,
                         int share) {
    const char *from[c->size];
    while (at < end) {
        size_t next = end;
        for (int s = 0; s < c->sockets; s++) {
            size_t each = piece(c, s, bytes), of = at / each;
            if (each * (of + 1) < next) next = each * (of + 1);
            from[s] = slot_of(c, c->order[c->begins[s] + of], chunk) + at;
        }
        combine(c->call.kind, c->call.how, from, c->sockets, (double)c->by / c->most_mates, to,
                share ? slot_of(c, c->rank, chunk) + at : NULL, next - at);
        to += next - at, at = next;
    }
}

/* All-reduce a long vector in chunks, same as paceline_all_reduce but with one more phase. */
static int all_reduce_by_socket(Comm *c, char *data, size_t bytes) {
    Chunk ring[RING];
    size_t count = (bytes + c->slot - 1) / c->slot;
    int error;
    for (size_t i = 0; i < count + 2; i++) {
        if (i < count) {
            Chunk *k = &ring[i % RING];
            k->at = i * c->slot;
            k->bytes = bytes - k->at < c->slot ? bytes - k->at : c->slot;
            k->part = rounded((k->bytes + c->size - 1) / c->size, LINE);
            if ((error = claim(c))) return error;
            k->chunk = c->chunk++;
            memcpy(slot_of(c, c->rank, k->chunk), data + k->at, k->bytes);
            k->in = post(c);
        }
        Chunk *last = &ring[(i + 1) % RING]; /* i - 2 */
        if (i >= 2) {
            if ((error = await_all(c, last->reduced))) return error; /* within the sockets */
            size_t from = lies_at(last, c->rank), to = lies_at(last, c->rank + 1);
            over_sockets(c, last->chunk, last->bytes, from, to, data + last->at + from, 1);
            last->reduced = post(c);
        }
        if (i >= 1 && i <= count) {
            Chunk *k = &ring[(i - 1) % RING];
            if ((error = await_all(c, k->in)) || (error = compare(c, k->chunk))) return error;
            within_socket(c, k->chunk, k->bytes);
            k->reduced = post(c);
        }
        if (i >= 2 && (error = goes_out(c, last, data))) return error;
    }
    return OK;
}
