/* One rank's connections to ranks on other hosts, and the steps of a collective over them.

   A step is a set of sends and receives that run at the same time. Received data either goes
   directly to its final place, or is reduced into the data there: block by block as it arrives, in
   the order of hosts, so that the result depends bitwise on neither the order of arrival nor the
   rank. Every message begins with a header that describes the sender's collective (operation,
   dtype, bytes); the receiver compares it with its own collective. */
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

#include "../shared/clock.h"
#include "../shared/combine.h"

#define YIELDS 50            /* tries without progress, each with a yield, before sleeping */
#define SLICE_MS 50          /* longest sleep: delay until a broken group on this host is noticed */
#define FOLD_AT (32 << 10)   /* least bytes to reduce at once, except at the end of a message */
#define WAKE_AT (256 << 10)  /* received bytes that wake a sleeper if more than these are missing */
#define SHORT (64 << 10)     /* bytes: yield before sleeping if no more than these are missing */
#define ALIGN 64

enum { OK, CLOSED, SILENT, DIFFERS, BROKEN, NO_MEMORY };

/* The collective that a rank is in, and its sequence number. */
typedef struct {
    uint32_t op, kind, how, root;
    uint64_t bytes, number;
} Call;

typedef struct {
    int host, fd;
    char *at;
    uint64_t bytes, done; /* of the payload, which follows the header */
    Call header;
    uint64_t headed; /* header bytes transferred */
} Message;

typedef struct {
    int hosts, me;
    int *fds, *wakes; /* by host; wakes: received bytes that wake a sleeper */
    char *scratch;
    size_t room;
    Message *messages; /* sends, then receives */
    struct pollfd *polled;
    int64_t timeout_ns;
    Call call;
    const _Atomic uint32_t *broken;
    uint64_t number;
    Call theirs; /* after DIFFERS: the other rank's collective */
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

/* Return the other rank's collective after DIFFERS. */
void paceline_wire_said(Wire *w, uint64_t *said) {
    const Call *one = &w->theirs;
    uint64_t all[] = {one->op, one->kind, one->how, one->root, one->bytes};
    memcpy(said, all, sizeof all);
}

static int failed(int why, int host) { return why | host << 8; }

static int ended(const Message *m) { return m->headed == sizeof(Call) && m->done == m->bytes; }

/* Send or receive. Return the bytes transferred, 0 if that would block, or -1 if the connection is
   closed. */
static ssize_t moved(Message *m, int out) {
    struct iovec parts[2] = {
        {(char *)&m->header + m->headed, sizeof(Call) - m->headed},
        {m->at + m->done, m->bytes - m->done},
    };
    int skip = m->headed == sizeof(Call);
    /* The payload is received only after the header has been compared. */
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

/* Transfer all that does not block. any: set to 1 if any bytes were transferred. */
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

/* Reduce the bytes that all hosts have delivered into the data in place. Bytes that are also sent
   from that place have to be sent before they are overwritten. */
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
    int how = w->call.how == MEAN ? SUM : (int)w->call.how; /* each host has already divided */
    combine((int)w->call.kind, how, from, n, 1, f->into + f->done, NULL, until - f->done);
    f->done = until;
}

/* Set the received bytes that wake a sleeper, so that not each packet of a long message does. */
static void wakes_at(Wire *w, const Message *m) {
    uint64_t left = m->bytes - m->done;
    int bytes = left > WAKE_AT ? WAKE_AT : left > SHORT ? (int)left : 1;
    if (w->wakes[m->host] == bytes) return;
    w->wakes[m->host] = bytes;
    setsockopt(m->fd, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
}

/* Sleep until a transfer is possible. After a time out the error names the awaited host. */
static int asleep(Wire *w, int sends, int count, int64_t since) {
    int n = 0, waits = -1;
    for (int i = 0; i < count; i++) {
        Message *m = &w->messages[i];
        if (ended(m)) continue;
        if (i >= sends) wakes_at(w, m);
        w->polled[n++] = (struct pollfd){m->fd, i < sends ? POLLOUT : POLLIN, 0};
        waits = m->host; /* receives come last: report a receive rather than a send */
    }
    if (poll(w->polled, (nfds_t)n, SLICE_MS) > 0) return OK;
    if (atomic_load(w->broken)) return failed(BROKEN, 0);
    if (w->timeout_ns && now_ns() - since > w->timeout_ns) return failed(SILENT, waits);
    return OK;
}

static int step(Wire *w, int sends, int receives, Folding *f) {
    int count = sends + receives, error = OK, idle = 0;
    int64_t since = 0; /* begin of the time without transfers */
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

/* Run the steps of one collective. steps: for each step the number of sends, the number of receives
   and whether these are reduced into the data; then host, offset in ``data`` and bytes of each send
   and receive, in the order of hosts. -1 ends the steps. said: op, kind, how, root and bytes of the
   collective. timeout: seconds without any transfer; 0: no limit. Returns 0, or an error in the
   low byte with the host above it. */
int paceline_wire_run(Wire *w, const int64_t *steps, char *data, const uint64_t *said, double timeout) {
    w->call = (Call){(uint32_t)said[0], (uint32_t)said[1], (uint32_t)said[2], (uint32_t)said[3],
                     said[4], ++w->number};
    w->timeout_ns = timeout_ns(timeout);
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
