/* State of the process: devices, connections to their servers and workers, and forks. */
#include "layer.h"
#include "system.h"
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>

#define FACTS_MS 20000   /* timeout for facts: the server may start a process that queries the driver */
#define OPENED_MS 120000 /* timeout for a worker that creates its context */
#define GONE_MS 5000     /* timeout for a worker that frees its memory and exits */

struct ww_layer layer;

/* Exported: a worker, or a program under `warpwell share`, looks it up to detect that its driver is a layer. */
__attribute__((visibility("default"))) const int ww_layer = 1;

/* Exported for libcuda.py: 1 if this program's calls wait at gates, so that `ww.turn` needs no lease. */
__attribute__((visibility("default"))) int ww_orders_calls;

void ww_say(const char *format, ...) {
    char line[600];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    dprintf(2, "warpwell: %s\n", line);
}

/* -- the socket ---------------------------------------------------------------------------------------------------- */

static int64_t now_ms(void) { return (int64_t)(ww_now_ns() / 1000000); }

/* Receive one packet with at most `nfds` descriptors; absent ones are -1. Return its size in bytes, 0 if the other side
 * has closed the socket, or -1 with errno. */
int ww_receive(int socket, void *packet, size_t nbytes, int *fds, int nfds, int timeout_ms) {
    int64_t until = now_ms() + timeout_ms;
    for (;;) {
        int64_t left = until - now_ms();
        struct pollfd p = {.fd = socket, .events = POLLIN};
        int ready = poll(&p, 1, left > 0 ? (int)left : 0);
        if (ready < 0 && errno == EINTR)
            continue;
        if (ready <= 0) {
            errno = ready ? errno : ETIMEDOUT;
            return -1;
        }
        int is_cut;
        ssize_t n = ww_receive_packet(socket, packet, nbytes, fds, (size_t)nfds, &is_cut);
        if (n < 0 && (errno == EINTR || errno == EAGAIN))
            continue;
        return (int)n;
    }
}

static int say_hello(int socket, uint32_t type, int ordinal, const int *fds, int nfds) {
    struct ww_hello hello = {
        .type = type, .magic = WW_MAGIC, .hash = WW_HASH, .pid = (uint32_t)getpid(), .ordinal = (uint32_t)ordinal};
    const char *share = getenv("WARPWELL_SHARE");
    if (share && strlen(share) < sizeof hello.share)
        strcpy(hello.share, share);
    ww_orders_calls = hello.share[0] != 0;
    for (;;) {
        if (!ww_send_packet(socket, &hello, sizeof hello, fds, (size_t)nfds, 0))
            return 0;
        if (errno != EINTR)
            return -1;
    }
}

/* Create a socket with a descriptor above 2, because the program may have closed its standard streams. */
static int new_socket(void) {
    int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (s < 0 || s > 2)
        return s;
    int higher = fcntl(s, F_DUPFD_CLOEXEC, 3);
    close(s);
    return higher;
}

/* Connect to the server of a device. Return a socket, or -1 with errno. The address goes through /proc, because the
 * path of the folder may be too long for `sun_path`. */
static int connect_to(const char *folder, int ordinal) {
    int at = open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (at < 0)
        return -1;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d/device-%d", at, ordinal);
    int s = new_socket();
    int failed = s < 0 || connect(s, (struct sockaddr *)&address, sizeof address) ? errno : 0;
    close(at);
    if (failed && s >= 0)
        close(s);
    errno = failed;
    return failed ? -1 : s;
}

/* Receive a packet of type `type` with facts. If the server refuses, print its reason and return its error code. */
static int await_facts(int socket, uint32_t type, int ordinal, struct ww_facts *facts, int *fds, int nfds,
                       int timeout_ms) {
    union {
        uint32_t type;
        struct ww_facts facts;
        struct ww_refused refused;
    } packet;
    int n = ww_receive(socket, &packet, sizeof packet, fds, nfds, timeout_ms);
    if (n == (int)sizeof packet.facts && packet.type == type) {
        *facts = packet.facts;
        return 0;
    }
    if (n == (int)sizeof packet.refused && packet.type == WW_REFUSED) {
        packet.refused.why[sizeof packet.refused.why - 1] = 0;
        ww_say("device %d: %s", ordinal, packet.refused.why);
        return packet.refused.result ? packet.refused.result : CUDA_ERROR_UNKNOWN;
    }
    ww_say("device %d: %s", ordinal,
           n == 0  ? "the server closed the connection"
           : n < 0 ? strerror(errno)
                   : "a wrong answer");
    return CUDA_ERROR_DEVICE_UNAVAILABLE;
}

/* -- visible devices ----------------------------------------------------------------------------------------------- */

/* Read the ordinals in CUDA_VISIBLE_DEVICES up to the first invalid one, as the driver does; without the variable, all
 * ordinals below `most`. Return their number. */
static int visible(int *which, int most) {
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    int n = 0;
    if (!list) {
        for (; n < most; n++)
            which[n] = n;
        return n;
    }
    while (*list && n < most) {
        char *end;
        long k = strtol(list, &end, 10);
        if (end == list || k < 0 || k >= WW_DEVICES)
            break;
        which[n++] = (int)k;
        list = end;
        while (*list == ' ')
            list++;
        if (*list++ != ',')
            break;
    }
    return n;
}

/* Ask the servers of `n` devices for facts. No answer is awaited in between, because each server may start a process.
 * Return the number of servers that were asked; if it is less than `n`, *error is the reason. */
static int ask_facts(const char *folder, const int *which, int n, int *sockets, int *error) {
    for (int i = 0; i < n; i++) {
        sockets[i] = connect_to(folder, which[i]);
        if (sockets[i] < 0) {
            *error = errno == ENOENT ? CUDA_ERROR_NO_DEVICE : CUDA_ERROR_DEVICE_UNAVAILABLE;
            return i;
        }
        if (say_hello(sockets[i], WW_HELLO, which[i], NULL, 0)) {
            close(sockets[i]);
            *error = CUDA_ERROR_DEVICE_UNAVAILABLE;
            return i;
        }
    }
    return n;
}

static int start(void) {
    const char *given = getenv("WARPWELL_CUDA"), *strict = getenv("WARPWELL_CUDA_STRICT");
    char *folder = given ? strdup(given) : NULL; /* a program may change its environment later */
    int which[WW_DEVICES], sockets[WW_DEVICES], n = visible(which, WW_DEVICES), error = 0, wrong = 0;
    layer.strict = strict && *strict && strcmp(strict, "0");
    layer.many_cores = ww_many_cores();
    layer.ndevices = 0;
    layer.folder = folder;
    if (!folder) {
        ww_say("WARPWELL_CUDA is not set: this libcuda.so.1 belongs to programs that `warpwell run` starts");
        return CUDA_ERROR_NO_DEVICE;
    }
    n = ask_facts(folder, which, n, sockets, &error);
    for (int i = 0; i < n; i++) {
        struct ww_device *d = &layer.devices[layer.ndevices];
        d->ordinal = which[i];
        wrong = wrong ? wrong : await_facts(sockets[i], WW_FACTS, which[i], &d->facts, NULL, 0, FACTS_MS);
        close(sockets[i]);
        if (wrong)
            continue;
        layer.ndevices++;
        int version = (int)d->facts.driver_version;
        if (!layer.driver_version || version < layer.driver_version)
            layer.driver_version = version;
    }
    error = wrong ? wrong : error;
    if (error == CUDA_ERROR_NO_DEVICE && layer.ndevices)
        error = 0;
    return error ? error : layer.ndevices ? 0 : CUDA_ERROR_NO_DEVICE;
}

int ww_facts_once(void) {
    if (atomic_load_explicit(&layer.state, memory_order_acquire))
        return layer.failed;
    WW_LOCK(&layer.starting);
    if (!layer.state) {
        layer.failed = start();
        atomic_store_explicit(&layer.state, 1, memory_order_release);
    }
    return layer.failed;
}

/* -- workers ------------------------------------------------------------------------------------------------------- */

/* Map memory of the worker. A forked child does not inherit the mapping. */
static void *map_shared(int fd, size_t nbytes, int protection) {
    void *at = ww_map_shared(fd, nbytes, protection);
    if (at)
        madvise(at, nbytes, MADV_DONTFORK);
    return at;
}

static void unmap(struct ww_channel *c) {
    ww_unmap(c->ring, sizeof *c->ring);
    ww_unmap(c->staging, (size_t)WW_PLACES * WW_PLACE_BYTES);
    if (c->socket >= 0)
        close(c->socket);
    c->ring = NULL;
    c->staging = NULL;
    c->socket = -1;
}

static void forget(struct ww_channel *c) {
    ww_unmap(c ? c->status : NULL, sizeof *c->status);
    free(c);
}

/* Drop a reference to a channel; the last one unmaps its ring and staging. Threads that check for errors read `status`
 * without a reference, so the channel and its status stay until four later channels have ended. */
void ww_release(struct ww_channel *c) {
    static struct ww_channel *ended[4];
    static unsigned at;
    if (atomic_fetch_sub(&c->references, 1) != 1)
        return;
    unmap(c);
    WW_LOCK(&layer.ending);
    forget(ended[at % 4]);
    ended[at++ % 4] = c;
}

struct ww_channel *ww_hold(struct ww_device *d) {
    WW_LOCK(&d->post);
    struct ww_channel *c = atomic_load(&d->channel);
    if (c)
        atomic_fetch_add(&c->references, 1);
    return c;
}

static int adopt(struct ww_channel *c, const int *fds) {
    c->ring = map_shared(fds[0], sizeof *c->ring, PROT_READ | PROT_WRITE);
    c->status = map_shared(fds[1], sizeof *c->status, PROT_READ);
    c->staging = map_shared(fds[2], (size_t)WW_PLACES * WW_PLACE_BYTES, PROT_READ | PROT_WRITE);
    return c->ring && c->status && c->staging ? 0 : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Get descriptors for the worker's stdout and stderr: the program's own, or /dev/null if the program has closed them.
 * Return the descriptor of /dev/null. */
static int outputs(int *fds) {
    int none = open("/dev/null", O_WRONLY | O_CLOEXEC);
    for (int i = 0; i < 2; i++)
        fds[i] = fcntl(i + 1, F_GETFD) < 0 ? none : i + 1;
    return none;
}

static int open_channel(struct ww_device *d, struct ww_channel *c) {
    int given[2], fds[3] = {-1, -1, -1};
    const char *wait = getenv("WARPWELL_CUDA_WAIT"); /* seconds to wait for other jobs */
    int opened_ms = OPENED_MS + (wait ? atoi(wait) * 1000 : 0);
    c->socket = connect_to(layer.folder, d->ordinal);
    if (c->socket < 0) {
        ww_say("device %d: its server is gone", d->ordinal);
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    }
    int none = outputs(given), error = CUDA_ERROR_DEVICE_UNAVAILABLE;
    if (none >= 0 && !say_hello(c->socket, WW_HELLO, d->ordinal, NULL, 0))
        error = await_facts(c->socket, WW_FACTS, d->ordinal, &d->facts, NULL, 0, FACTS_MS);
    if (!error && say_hello(c->socket, WW_OPEN, d->ordinal, given, 2))
        error = CUDA_ERROR_DEVICE_UNAVAILABLE;
    if (!error)
        error = await_facts(c->socket, WW_OPENED, d->ordinal, &d->facts, fds, 3, opened_ms);
    if (!error)
        error = adopt(c, fds);
    for (int i = 0; i < 3; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    if (none >= 0)
        close(none);
    return error;
}

int ww_open(struct ww_device *d) {
    if (atomic_load_explicit(&d->channel, memory_order_acquire))
        return 0; /* also if the channel is lost, which the next call reports */
    WW_LOCK(&d->opening);
    if (atomic_load(&d->channel))
        return 0;
    struct ww_channel *c = calloc(1, sizeof *c);
    int error = c ? open_channel(d, c) : CUDA_ERROR_OUT_OF_MEMORY;
    if (error) {
        if (c)
            unmap(c);
        forget(c);
        return error;
    }
    c->ordinal = d->ordinal;
    c->device = d;
    atomic_store(&c->references, 1);
    pthread_mutex_init(&c->pinning, NULL);
    /* Reserve the addresses of device memory, so that mmap does not return them to the program. If the program already
     * uses some of them, a copy takes such an address for device memory when the device has allocated it, too. */
    ww_reserve((void *)(uintptr_t)d->facts.arena, d->facts.arena_bytes);
    atomic_store_explicit(&d->channel, c, memory_order_release);
    return 0;
}

void ww_await_end(struct ww_channel *c) {
    char byte;
    int64_t until = now_ms() + GONE_MS;
    shutdown(c->socket, SHUT_WR); /* the worker reads the end of the stream, frees the device's memory, and exits */
    while (ww_receive(c->socket, &byte, 1, NULL, 0, GONE_MS) > 0 && now_ms() < until)
        ;
}

bool ww_alive(struct ww_channel *c) {
    char byte;
    if (atomic_load(&c->lost))
        return false;
    ssize_t n = recv(c->socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR)))
        return true;
    int code = (int)atomic_load(&c->status->sticky), alive = 0; /* the worker stores `sticky` before it exits */
    if (atomic_compare_exchange_strong(&c->lost, &alive, code ? code : CUDA_ERROR_DEVICE_UNAVAILABLE) && !code)
        ww_say("device %d: its worker has ended; its memory is lost until the primary context is reset", c->ordinal);
    return false;
}

/* -- fork ---------------------------------------------------------------------------------------------------------- */

static void make_locks(void) {
    pthread_mutex_init(&layer.starting, NULL);
    pthread_mutex_init(&layer.loading, NULL);
    pthread_mutex_init(&layer.linking, NULL);
    pthread_mutex_init(&layer.ending, NULL);
    pthread_mutex_init(&layer.registered.lock, NULL);
    for (int i = 0; i < WW_DEVICES; i++) {
        struct ww_device *d = &layer.devices[i];
        pthread_mutex_init(&d->opening, NULL);
        pthread_mutex_init(&d->post, NULL);
        pthread_mutex_init(&d->ranges.lock, NULL);
    }
}

/* In a forked child: use nothing of the parent's, because threads that do not exist here may hold its locks. A child of
 * an initialized process cannot use the driver; other children initialize it for themselves. */
static void after_fork(void) {
    if (layer.state < 2) {
        make_locks();
        ww_objects_after_fork();
        atomic_store(&layer.state, 0);
        return;
    }
    atomic_store(&layer.forked, 1);
    for (int i = 0; i < WW_DEVICES; i++) {
        struct ww_channel *c = atomic_load(&layer.devices[i].channel);
        if (c)
            close(c->socket); /* otherwise the worker would not notice that the parent has exited */
    }
}

__attribute__((constructor)) static void begin(void) {
    make_locks();
    for (int i = 0; i < WW_DEVICES; i++)
        ww_ids_clear(&layer.devices[i]);
    pthread_atfork(NULL, NULL, after_fork);
}
