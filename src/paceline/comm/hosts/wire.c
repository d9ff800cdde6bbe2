/* One rank's connections to ranks of other hosts, and the steps of a collective over them.

   A step is sends and receives that go on at the same time. What is received either lies where it
   belongs at once, or is folded into what is there: block by block as it comes, in the order of hosts,
   so that the bits hang on neither the order of arrival nor the rank. Every message begins with what
   its sender does (kind, bytes, type), which is compared. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#include "../shared/combine.h"

#define YIELDS 50            /* looks at the connections before it sleeps */
#define SLICE_MS 50          /* asleep at once: so late at most is noticed that the host has given up */
#define FOLD_AT (32 << 10)   /* bytes that are folded in at once, but for the last ones */
#define WAKE_AT (256 << 10)  /* bytes that have to have come to wake it, where so many are missing */
#define SHORT (64 << 10)     /* bytes: where no more are missing it yields before it sleeps */
#define ALIGN 64

enum { OK, CLOSED, SILENT, DIFFERS, BROKEN, NO_MEMORY };

/* What this rank does, and the how manieth of its collectives that is. */
typedef struct {
    uint32_t op, kind, how, root;
    uint64_t bytes, number;
} Call;

typedef struct {
    int host, fd;
    char *at;
    uint64_t bytes, done; /* of the message; header first */
    Call header;
    uint64_t headed; /* bytes of the header */
} Message;

typedef struct {
    int hosts, me;
    int *fds, *wakes; /* by host: the bytes that wake a sleeper */
    char *scratch;
    size_t room;
    Message *messages; /* sends, then receives */
    struct pollfd *polled;
    int64_t timeout_ns;
    Call call;
    const _Atomic uint32_t *broken;
    uint64_t number;
    Call theirs; /* where they differ */
} Wire;

Wire *paceline_wire_open(int hosts, int me, const int *fds, const _Atomic uint32_t *broken) {
    Wire *w = calloc(1, sizeof(Wire));
    if (w == NULL) return NULL;
    w->hosts = hosts, w->me = me, w->broken = broken;
    w->fds = calloc(2 * hosts, sizeof(int));
    w->wakes = w->fds ? w->fds + hosts : NULL;
    w->messages = calloc(2 * hosts, sizeof(Message));
    w->polled = calloc(2 * hosts, sizeof(struct pollfd));
    if (w->fds == NULL || w->messages == NULL || w->polled == NULL) {
        free(w->fds), free(w->messages), free(w->polled), free(w);
        return NULL;
    }
    memcpy(w->fds, fds, hosts * sizeof(int));
    return w;
}

void paceline_wire_close(Wire *w) {
    free(w->fds), free(w->messages), free(w->polled), free(w->scratch), free(w);
}

/* After DIFFERS: what the other one does. */
void paceline_wire_said(Wire *w, uint64_t *said) {
    const Call *one = &w->theirs;
    uint64_t all[] = {one->op, one->kind, one->how, one->root, one->bytes};
    memcpy(said, all, sizeof all);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static int failed(int why, int host) { return why | host << 8; }

static int ended(const Message *m) { return m->headed == sizeof(Call) && m->done == m->bytes; }

/* Bytes moved; 0: none at the moment; -1: the connection is closed. */
static ssize_t moved(Message *m, int out) {
    struct iovec parts[2] = {
        {(char *)&m->header + m->headed, sizeof(Call) - m->headed},
        {m->at + m->done, m->bytes - m->done},
    };
    int skip = m->headed == sizeof(Call);
    /* What follows a header is read only once that has been compared. */
    int count = out ? 2 - skip : 1;
    struct msghdr message = {.msg_iov = parts + skip, .msg_iovlen = (size_t)count};
    ssize_t n = out ? sendmsg(m->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT)
                    : recvmsg(m->fd, &message, MSG_DONTWAIT);
    if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -1;
    if (n == 0) return -1;
    uint64_t head = sizeof(Call) - m->headed;
    head = (uint64_t)n < head ? (uint64_t)n : head;
    m->headed += head;
    m->done += (uint64_t)n - head;
    return n;
}

static int compared(Wire *w, Message *m) {
    if (memcmp(&m->header, &w->call, sizeof(Call)) == 0) return OK;
    w->theirs = m->header;
    return failed(DIFFERS, m->host);
}

/* All that can be moved now; whether anything was. */
static int move(Wire *w, int sends, int count, int *any) {
    for (int i = 0; i < count; i++) {
        Message *m = &w->messages[i];
        while (!ended(m)) {
            int was_headed = m->headed == sizeof(Call);
            ssize_t n = moved(m, i < sends);
            if (n < 0) return failed(CLOSED, m->host);
            if (n == 0) break;
            *any = 1;
            if (i >= sends && !was_headed && m->headed == sizeof(Call)) {
                int error = compared(w, m);
                if (error) return error;
            }
        }
    }
    return OK;
}

typedef struct {
    char *into;
    uint64_t done, bytes;
} Folding;

/* What has come from all of them is folded into what is there; what is sent from the same place goes
   first. */
static void fold_in(Wire *w, int sends, int count, Folding *f) {
    uint64_t come = f->bytes;
    for (int i = 0; i < count; i++) {
        const Message *m = &w->messages[i];
        if ((i >= sends || m->at == f->into) && m->done < come) come = m->done;
    }
    size_t each = SIZES[w->call.kind];
    uint64_t until = come == f->bytes ? come : come / each * each;
    if (until <= f->done || (until < f->bytes && until - f->done < FOLD_AT)) return;
    const char *from[w->hosts];
    int n = 0, own = 0;
    for (int i = sends; i < count; i++) { /* in the order of hosts */
        Message *m = &w->messages[i];
        if (m->host > w->me && !own) from[n++] = f->into + f->done, own = 1;
        from[n++] = m->at + f->done;
    }
    if (!own) from[n++] = f->into + f->done;
    int how = w->call.how == MEAN ? SUM : (int)w->call.how; /* divided already, in each host */
    combine((int)w->call.kind, how, from, n, 1, f->into + f->done, NULL, until - f->done);
    f->done = until;
}

/* Nobody is woken for each packet of a long message. */
static void wakes_at(Wire *w, const Message *m) {
    uint64_t left = m->bytes - m->done;
    int bytes = left > WAKE_AT ? WAKE_AT : left > SHORT ? (int)left : 1;
    if (w->wakes[m->host] == bytes) return;
    w->wakes[m->host] = bytes;
    setsockopt(m->fd, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
}

/* Asleep until something can be moved. The host that is waited for, on silence. */
static int asleep(Wire *w, int sends, int count, int64_t since) {
    int n = 0, waits = -1;
    for (int i = 0; i < count; i++) {
        Message *m = &w->messages[i];
        if (ended(m)) continue;
        if (i >= sends) wakes_at(w, m);
        w->polled[n++] = (struct pollfd){m->fd, i < sends ? POLLOUT : POLLIN, 0};
        waits = m->host; /* a receive rather than a send */
    }
    if (poll(w->polled, (nfds_t)n, SLICE_MS) > 0) return OK;
    if (atomic_load(w->broken)) return failed(BROKEN, 0);
    if (w->timeout_ns && now_ns() - since > w->timeout_ns) return failed(SILENT, waits);
    return OK;
}

static int step(Wire *w, int sends, int receives, Folding *f) {
    int count = sends + receives, error = OK, idle = 0;
    int64_t since = 0; /* nothing was moved */
    for (;;) {
        int any = 0, left = 0;
        uint64_t missing = 0;
        if ((error = move(w, sends, count, &any))) return error;
        if (f) fold_in(w, sends, count, f);
        for (int i = 0; i < count; i++) {
            const Message *m = &w->messages[i];
            left += !ended(m);
            missing += m->bytes - m->done;
        }
        if (!left) return OK;
        if (any) {
            idle = 0, since = 0;
        } else if (missing <= SHORT && idle++ < YIELDS) {
            sched_yield();
        } else {
            if (!since) since = now_ns();
            if ((error = asleep(w, sends, count, since))) return error;
        }
    }
}

/* steps: for each step the numbers of sends, of receives, and whether these are folded in; then host,
   place in ``data`` and bytes of each send and receive, by their hosts' order. -1 is the end. said: op,
   kind, how, root and bytes of the collective. Returns 0 or an error, with the host above its byte. */
int paceline_wire_run(Wire *w, const int64_t *steps, char *data, const uint64_t *said, double timeout) {
    w->call = (Call){(uint32_t)said[0], (uint32_t)said[1], (uint32_t)said[2], (uint32_t)said[3],
                     said[4], ++w->number};
    w->timeout_ns = (int64_t)(timeout * 1e9);
    for (const int64_t *s = steps; *s >= 0;) {
        int sends = (int)s[0], receives = (int)s[1], fold = (int)s[2];
        s += 3;
        Folding f = {0};
        for (int i = 0; i < sends + receives; i++, s += 3)
            w->messages[i] = (Message){.host = (int)s[0], .fd = w->fds[s[0]], .at = data + s[1],
                                       .bytes = (uint64_t)s[2], .header = w->call,
                                       .headed = 0};
        if (fold) {
            f.into = w->messages[sends].at, f.bytes = w->messages[sends].bytes;
            size_t each = (f.bytes + ALIGN - 1) / ALIGN * ALIGN, room = each * (size_t)receives;
            if (room > w->room) {
                free(w->scratch);
                w->scratch = malloc(room);
                w->room = w->scratch ? room : 0;
                if (!w->scratch) return failed(NO_MEMORY, 0);
            }
            for (int i = 0; i < receives; i++) w->messages[sends + i].at = w->scratch + i * each;
        }
        int error = step(w, sends, receives, fold ? &f : NULL);
        if (error) return error;
    }
    return OK;
}
