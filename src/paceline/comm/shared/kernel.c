/* Collectives over memory that the ranks of one host share.

   Each rank has a mailbox, a counter of its completed phases, and a ring of slots. All ranks go
   through the same phases in the same order: all ranks have completed phase k once all counters
   have reached k. A long vector passes through the slots in chunks:

     in       copy the parts of this rank's chunk that other ranks reduce into its slot
     reduce   reduce this rank's part over all slots, in rank order: the same bits on every rank
     out      copy the parts that other ranks have reduced from their slots

   These phases overlap: chunk i + 1 is copied in before chunk i is reduced and chunk i - 1 is
   copied out, so that most waits are over before they begin. A short vector is copied into the slot
   as a whole, and every rank reduces all of it.

   A waiting rank spins, then yields its core, then sleeps on the counter (a futex). After each
   sleep it checks whether the awaited rank is alive: each rank holds a POSIX lock on one byte of
   the memory's file, which the kernel releases when the process ends for any reason. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "clock.h"
#include "combine.h"

#define RING 3          /* slots of a rank: one each for the phases in, reduce and out */
#define LINE 64         /* bytes of a cache line; parts of a chunk are aligned to it */
#define WORD 8          /* bytes of the largest element: alignment of parts if lines do not fit */
#define FLAT (16 << 10) /* bytes: largest vector that every rank reduces as a whole */
#define FLAT_ALL (256 << 10) /* bytes: the same limit for the vectors of all ranks together */
#define PAUSES 100
#define YIELDS 200
#define SLICE_NS 50000000 /* longest sleep: delay until the end of a rank is noticed */

/* The low byte of an error; the rank is above it. CLAIMED: a rank is still writing the error. */
enum { OK, DIED, SILENT, DIFFERS, ELSEWHERE, CLAIMED = 255 };
enum { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, BARRIER };

/* The collective that a rank is about to run. If another rank runs a different one, both get an
   error. */
typedef struct {
    uint32_t op, kind, how, root;
    uint64_t bytes;
} Call;

typedef struct {
    _Alignas(2 * LINE) _Atomic uint32_t posted; /* phases that this rank has completed */
    _Atomic uint32_t sleepers;                  /* ranks that sleep until it changes */
    _Atomic int32_t socket;                     /* see sockets.h */
    Call calls[RING];                           /* the collective of each slot's data */
} Mailbox;

/* The first error, for all ranks. After DIFFERS: the two ranks and the collective of each. */
typedef struct {
    _Alignas(2 * LINE) _Atomic uint32_t broken;
    uint32_t who[2];
    Call said[2];
} Head;

typedef struct {
    Head *head;
    Mailbox *boxes;
    char *slots;
    size_t slot, mapped;
    int rank, size, fd;
    uint32_t posted, freed[RING]; /* freed: phase after which the slot may be filled again */
    uint64_t chunk;               /* chunks that have passed through this rank's slots */
    Call call; /* this rank's collective */
    int by;    /* divisor of a mean */
    int sockets, socket, mate, by_socket; /* see sockets.h; mate: index of this rank in its socket */
    int most_mates;                       /* ranks of the largest socket */
    int *order, *begins; /* ranks ordered by socket, and the index of each socket's first rank */
    int64_t timeout_ns;
} Comm;

static size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

size_t paceline_needs(int size, size_t slot) {
    return sizeof(Head) + size * sizeof(Mailbox) + size * RING * rounded(slot, 2 * LINE);
}

/* Map the memory of ``fd`` for a rank; return NULL and set errno if that fails. slot: at least WORD
   bytes for each rank. locks: whether ranks are processes, each of which holds the lock on its byte
   (paceline_hold). */
Comm *paceline_open(int fd, int rank, int size, size_t slot, int locks) {
    if (slot / WORD < (size_t)size) {
        errno = EINVAL;
        return NULL;
    }
    Comm *c = calloc(1, sizeof(Comm));
    if (c == NULL) return NULL;
    slot = rounded(slot, 2 * LINE);
    c->mapped = paceline_needs(size, slot);
    char *base = mmap(NULL, c->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        free(c);
        return NULL;
    }
    c->head = (Head *)base;
    c->boxes = (Mailbox *)(base + sizeof(Head));
    c->slots = base + sizeof(Head) + size * sizeof(Mailbox);
    c->slot = slot, c->rank = rank, c->size = size, c->fd = locks ? fd : -1;
    return c;
}

void paceline_close(Comm *c) {
    munmap(c->head, c->mapped);
    free(c->order);
    free(c);
}

/* Take the lock that shows that this rank is alive; return -1 and set errno on failure. */
int paceline_hold(int fd, int rank) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    return fcntl(fd, F_SETLK, &lock);
}

static int alive(Comm *c, int rank) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    if (c->fd < 0 || rank == c->rank || fcntl(c->fd, F_GETLK, &lock)) return 1;
    return lock.l_type != F_UNLCK;
}

static void pause_a_moment(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void wake(Mailbox *box) {
    syscall(SYS_futex, &box->posted, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Return the error that has broken the group, or 0. Waits briefly until the error is complete. */
static int broken(Comm *c) {
    uint32_t error = atomic_load(&c->head->broken);
    for (int i = 0; error == CLAIMED && i < YIELDS; i++) {
        sched_yield();
        error = atomic_load(&c->head->broken);
    }
    return (int)error;
}

/* Break the group for all ranks. Return its first error, which is what all ranks report. */
static int fails(Comm *c, int why, int rank, const Call *other) {
    Head *head = c->head;
    uint32_t none = 0, error = (uint32_t)why | (uint32_t)rank << 8;
    if (atomic_compare_exchange_strong(&head->broken, &none, CLAIMED)) {
        if (other) {
            head->who[0] = (uint32_t)rank, head->said[0] = *other;
            head->who[1] = (uint32_t)c->rank, head->said[1] = c->call;
        }
        atomic_store(&head->broken, error);
        for (int q = 0; q < c->size; q++) wake(&c->boxes[q]);
    }
    return broken(c);
}

static int reached(Comm *c, int rank, uint32_t phase) {
    uint32_t posted = atomic_load_explicit(&c->boxes[rank].posted, memory_order_acquire);
    return (int32_t)(posted - phase) >= 0;
}

/* Return the rank that has completed the fewest phases: other ranks may only be waiting for it. */
static int last(Comm *c, int rank) {
    uint32_t least = atomic_load(&c->boxes[rank].posted);
    for (int q = 0; q < c->size; q++) {
        uint32_t posted = atomic_load(&c->boxes[q].posted);
        if ((int32_t)(posted - least) < 0) least = posted, rank = q;
    }
    return rank;
}

/* Wait for a rank that may be late or may have ended. */
static int await_long(Comm *c, int rank, uint32_t phase) {
    Mailbox *box = &c->boxes[rank];
    for (int i = 0; i < PAUSES + YIELDS; i++) {
        if (reached(c, rank, phase)) return OK;
        if (i < PAUSES)
            pause_a_moment();
        else
            sched_yield();
    }
    const struct timespec slice = {.tv_nsec = SLICE_NS};
    const int64_t begun = now_ns();
    int error = OK;
    atomic_fetch_add(&box->sleepers, 1);
    for (;;) {
        uint32_t seen = atomic_load(&box->posted);
        if ((int32_t)(seen - phase) >= 0) break;
        if ((error = broken(c))) break;
        syscall(SYS_futex, &box->posted, FUTEX_WAIT, seen, &slice, NULL, 0);
        if (reached(c, rank, phase)) break;
        /* The rank may have completed the phase just before its process ended. */
        if (!alive(c, rank) && !reached(c, rank, phase)) {
            error = fails(c, DIED, rank, NULL);
            break;
        }
        if (c->timeout_ns && now_ns() - begun > c->timeout_ns) {
            error = fails(c, SILENT, last(c, rank), NULL);
            break;
        }
    }
    atomic_fetch_sub(&box->sleepers, 1);
    return error;
}

static int await(Comm *c, int rank, uint32_t phase) {
    return reached(c, rank, phase) ? OK : await_long(c, rank, phase);
}

static int await_all(Comm *c, uint32_t phase) {
    for (int i = 1, error; i < c->size; i++)
        if ((error = await(c, (c->rank + i) % c->size, phase))) return error;
    return OK;
}

/* Complete a phase on this rank; return its number. */
static uint32_t post(Comm *c) {
    Mailbox *box = &c->boxes[c->rank];
    atomic_store(&box->posted, ++c->posted);
    if (atomic_load(&box->sleepers)) wake(box);
    return c->posted;
}

static char *slot_of(Comm *c, int rank, uint64_t chunk) {
    return c->slots + ((size_t)rank * RING + chunk % RING) * c->slot;
}

/* Return the bytes of each part if a slot holds so many parts of the same size. */
static size_t share_of_slot(Comm *c, int parts) {
    size_t share = c->slot / parts, to = share >= LINE ? LINE : WORD;
    return share / to * to;
}

/* Wait until no rank needs the data in the next chunk's slot, then announce the collective. */
static int claim(Comm *c) {
    int error = await_all(c, c->freed[c->chunk % RING]);
    if (!error) c->boxes[c->rank].calls[c->chunk % RING] = c->call;
    return error;
}

/* Check, after all ranks have filled a chunk's slot, that they run the same collective. */
static int compare(Comm *c, uint64_t chunk) {
    for (int q = 0; q < c->size; q++) {
        Call other = c->boxes[q].calls[chunk % RING];
        if (memcmp(&other, &c->call, sizeof(Call))) return fails(c, DIFFERS, q, &other);
    }
    return OK;
}

static int begin(Comm *c, uint32_t op, uint32_t kind, uint32_t how, uint32_t root, uint64_t bytes,
                 double timeout) {
    c->call = (Call){op, kind, how, root, bytes};
    c->by = c->size;
    c->timeout_ns = timeout_ns(timeout);
    return broken(c);
}

/* Describe the collectives after an error: that of this rank, then (after DIFFERS) those of the two
   ranks that differ. Each takes six numbers, the first of which is the rank. */
void paceline_said(Comm *c, uint64_t *said) {
    const Call *calls[] = {&c->call, &c->head->said[0], &c->head->said[1]};
    const uint32_t who[] = {(uint32_t)c->rank, c->head->who[0], c->head->who[1]};
    for (int i = 0; i < 3; i++) {
        const Call *one = calls[i];
        uint64_t all[] = {who[i], one->op, one->kind, one->how, one->root, one->bytes};
        memcpy(said + 6 * i, all, sizeof all);
    }
}

typedef struct {
    uint64_t chunk;   /* number since the group was opened */
    size_t at, bytes; /* offset and length in the vector */
    size_t part;      /* bytes of each rank's part; the last ones may be shorter or empty */
    uint32_t in, reduced;
} Chunk;

static size_t lies_at(const Chunk *k, int rank) {
    size_t at = k->part * (size_t)rank;
    return at < k->bytes ? at : k->bytes;
}

static size_t length(const Chunk *k, int rank) { return lies_at(k, rank + 1) - lies_at(k, rank); }

static int goes_in(Comm *c, Chunk *k, const char *from) {
    int error = claim(c);
    if (error) return error;
    k->chunk = c->chunk++;
    char *slot = slot_of(c, c->rank, k->chunk);
    size_t mine = lies_at(k, c->rank), after = lies_at(k, c->rank + 1);
    memcpy(slot, from + k->at, mine);
    memcpy(slot + after, from + k->at + after, k->bytes - after);
    k->in = post(c);
    return OK;
}

/* Reduce this rank's part. into: destination of the result; share: whether to copy it also to the
   slot, for the other ranks. */
static int reduce(Comm *c, Chunk *k, const char *own, char *into, int share) {
    int error = await_all(c, k->in);
    if (!error) error = compare(c, k->chunk);
    if (error) return error;
    const char *from[c->size];
    size_t mine = lies_at(k, c->rank);
    for (int q = 0; q < c->size; q++)
        from[q] = q == c->rank ? own : slot_of(c, q, k->chunk) + mine;
    combine(c->call.kind, c->call.how, from, c->size, c->by, into,
            share ? slot_of(c, c->rank, k->chunk) + mine : NULL, length(k, c->rank));
    k->reduced = post(c);
    return OK;
}

static int goes_out(Comm *c, Chunk *k, char *to) {
    int error = OK;
    for (int i = 1; i < c->size; i++) {
        int q = (c->rank + i) % c->size;
        if ((error = await(c, q, k->reduced))) return error;
        memcpy(to + k->at + lies_at(k, q), slot_of(c, q, k->chunk) + lies_at(k, q), length(k, q));
    }
    c->freed[k->chunk % RING] = post(c);
    return OK;
}

#include "sockets.h"

/* All-reduce in place. kind, how: see combine.h. Returns 0 or an error. */
int paceline_all_reduce(Comm *c, char *data, uint64_t bytes, int kind, int how, double timeout) {
    int error = begin(c, ALL_REDUCE, kind, how, 0, bytes, timeout);
    if (error) return error;
    if (bytes <= FLAT && bytes * c->size <= FLAT_ALL && bytes <= c->slot) {
        if ((error = claim(c))) return error;
        uint64_t chunk = c->chunk;
        memcpy(slot_of(c, c->rank, chunk), data, bytes);
        if ((error = await_all(c, post(c))) || (error = compare(c, chunk))) return error;
        const char *from[c->size];
        for (int q = 0; q < c->size; q++) from[q] = slot_of(c, q, chunk);
        combine(kind, how, from, c->size, c->size, data, NULL, bytes);
        c->freed[c->chunk++ % RING] = post(c);
        return OK;
    }
    if (c->by_socket) return all_reduce_by_socket(c, data, bytes);
    Chunk ring[RING];
    size_t count = (bytes + c->slot - 1) / c->slot;
    for (size_t i = 0; i < count + 2; i++) {
        if (i < count) {
            Chunk *k = &ring[i % RING];
            k->at = i * c->slot;
            k->bytes = bytes - k->at < c->slot ? bytes - k->at : c->slot;
            k->part = rounded((k->bytes + c->size - 1) / c->size, LINE);
            if ((error = goes_in(c, k, data))) return error;
        }
        if (i >= 1 && i <= count) {
            Chunk *k = &ring[(i - 1) % RING];
            char *own = data + k->at + lies_at(k, c->rank);
            if ((error = reduce(c, k, own, own, 1))) return error;
        }
        if (i >= 2 && (error = goes_out(c, &ring[(i - 2) % RING], data))) return error;
    }
    return OK;
}

/* Reduce-scatter. from: one vector of ``bytes`` for each rank; to: the reduced vector of this rank;
   by: divisor of a mean, 0 for the number of ranks. */
int paceline_reduce_scatter(Comm *c, const char **from, char *to, uint64_t bytes, int kind, int how,
                            int by, double timeout) {
    int error = begin(c, REDUCE_SCATTER, kind, how, 0, bytes, timeout);
    if (error) return error;
    if (by) c->by = by;
    size_t most = share_of_slot(c, c->size);
    for (size_t at = 0; at < bytes || !at; at += most) {
        size_t part = bytes - at < most ? bytes - at : most;
        Chunk k = {.part = part, .bytes = part * c->size};
        if ((error = claim(c))) return error;
        k.chunk = c->chunk++;
        for (int q = 0; q < c->size; q++)
            if (q != c->rank)
                memcpy(slot_of(c, c->rank, k.chunk) + q * part, from[q] + at, part);
        k.in = post(c);
        if ((error = reduce(c, &k, from[c->rank] + at, to + at, 0))) return error;
        c->freed[k.chunk % RING] = k.reduced;
    }
    return OK;
}

/* All-gather. to: one vector of ``bytes`` for each rank. */
int paceline_all_gather(Comm *c, const char *from, char **to, uint64_t bytes, double timeout) {
    int error = begin(c, ALL_GATHER, 0, 0, 0, bytes, timeout);
    if (error) return error;
    memmove(to[c->rank], from, bytes);
    for (size_t at = 0; at < bytes || !at; at += c->slot) {
        size_t part = bytes - at < c->slot ? bytes - at : c->slot;
        if ((error = claim(c))) return error;
        uint64_t chunk = c->chunk;
        memcpy(slot_of(c, c->rank, chunk), to[c->rank] + at, part);
        if ((error = await_all(c, post(c))) || (error = compare(c, chunk))) return error;
        for (int i = 1; i < c->size; i++) {
            int q = (c->rank + i) % c->size;
            memcpy(to[q] + at, slot_of(c, q, chunk), part);
        }
        c->freed[c->chunk++ % RING] = post(c);
    }
    return OK;
}

/* Break the group because the exchange with other hosts has failed, so that all other ranks of this
   host get an error too. */
void paceline_break(Comm *c, int rank) { fails(c, ELSEWHERE, rank, NULL); }

/* Return the address of the group's error: not 0 once the group is broken. */
_Atomic uint32_t *paceline_broken(Comm *c) { return &c->head->broken; }

int paceline_broadcast(Comm *c, char *data, uint64_t bytes, int root, double timeout) {
    int error = begin(c, BROADCAST, 0, 0, root, bytes, timeout);
    if (error) return error;
    for (size_t at = 0; at < bytes || !at; at += c->slot) {
        size_t part = bytes - at < c->slot ? bytes - at : c->slot;
        if ((error = claim(c))) return error;
        uint64_t chunk = c->chunk;
        if (c->rank == root) memcpy(slot_of(c, root, chunk), data + at, part);
        /* All ranks wait for all: a root that runs ahead would not notice ranks that differ. */
        if ((error = await_all(c, post(c))) || (error = compare(c, chunk))) return error;
        if (c->rank != root) memcpy(data + at, slot_of(c, root, chunk), part);
        c->freed[c->chunk++ % RING] = post(c);
    }
    return OK;
}

int paceline_barrier(Comm *c, double timeout) {
    int error = begin(c, BARRIER, 0, 0, 0, 0, timeout);
    if (error || (error = claim(c))) return error;
    uint64_t chunk = c->chunk;
    if ((error = await_all(c, post(c))) || (error = compare(c, chunk))) return error;
    c->freed[c->chunk++ % RING] = post(c);
    return OK;
}

#include "parts.h"
