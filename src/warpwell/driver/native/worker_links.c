/* Links to the workers that the same client has on other devices of this host. A link maps the other worker's memory
 * here, at the same addresses, and lets streams wait for the other worker's events.
 *
 * A link is a socket pair that the client made, with one end in each worker. The links' thread answers the requests of
 * other workers (reserve, map, unmap) and never waits for another worker. The heavy thread sends requests, one at a
 * time, and waits for each answer. So two workers that send each other requests at the same time do not deadlock.
 *
 * Workers share whole chunks of the arena. When a link is shared, the heavy thread exports all mapped chunks over it.
 * It exports each later chunk before the executor can allocate from it, and before it unmaps a chunk, it lets all
 * linked workers unmap theirs. When the other worker has exited, calls can no longer use its memory, which is unmapped
 * when the device has passed all calls that were read before.
 */
#include "worker.h"

#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#define IMPORTS_MOST 65536u
#define EARLY_MOST (1u << 17) /* signals whose AWAIT call has not been read yet; a ring has room for fewer calls */

struct ww_await { /* an AWAIT call, which waits for a signal */
    struct ww_await *next;
    uint64_t number;
    int is_done;
    CUresult result;
};

struct numbers {
    uint64_t *all;
    size_t n, room;
};

struct link {
    enum { NONE, UP, GONE, ENDING } state; /* `lock` protects this and all fields up to `arrived` */
    int socket;
    uint64_t base, bytes;     /* of the other worker's arena, reserved here; 0: it has shared nothing */
    struct ww_chunk *imports; /* mapped chunks of the other worker, sorted by address */
    size_t nimports, room;
    int answered, owes; /* owes: the answer `owed` could not be sent yet */
    CUresult answer, owed;
    struct numbers arrived;       /* received signals that the executor has not read */
    int shares;                   /* used by the heavy thread alone: the other worker maps this arena's chunks */
    struct numbers early, unsent; /* AWAIT not read yet; to send. Only the executor uses these and awaits */
    struct ww_await *awaits;
};

static struct link links[WW_PEERS];
static struct ww_chunk *own; /* used by the heavy thread alone: mapped chunks of this arena */
static size_t nown, own_room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static _Atomic int news; /* 1: a signal has arrived or a link has ended, and the executor has not handled it */
static int unsent;       /* used by the executor alone: a link has signals to send */
static int bell = -1;

static void append(struct numbers *list, uint64_t number) {
    list->all = ww_grown(list->all, list->n, &list->room, sizeof *list->all);
    list->all[list->n++] = number;
}

/* -- messages ------------------------------------------------------------------------------------------------------ */

static int say(int socket, const struct ww_link_message *message, int fd, int flags) {
    return ww_send_packet(socket, message, sizeof *message, &fd, fd >= 0, flags);
}

/* Receive one packet of at most `n` bytes with at most one descriptor. Return its length, 0 if it is longer or the
 * other side has closed the socket, -1 with errno if no packet is there. */
static ssize_t hear(int socket, void *packet, size_t n, int *fd) {
    int is_cut;
    ssize_t got = ww_receive_packet(socket, packet, n, fd, 1, &is_cut);
    return got > 0 && is_cut ? 0 : got;
}

/* -- the other worker's memory, in the links' thread --------------------------------------------------------------- */

static CUresult reserve(struct link *l, uint64_t at, uint64_t n) {
    if (l->bytes || !n || n > WW_ARENA_STEP || n % ww_arena.piece)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t got = 0;
    CUresult code = native.cuMemAddressReserve(&got, n, 0, at, 0);
    if (code)
        return code;
    if (got != at) { /* other memory of this process is at these addresses */
        native.cuMemAddressFree(got, n);
        return CUDA_ERROR_ALREADY_MAPPED;
    }
    WW_LOCK(&lock);
    l->base = at;
    l->bytes = n;
    return CUDA_SUCCESS;
}

/* Return the index of the import that contains `at`, or else of the next one. The imports must not change meanwhile. */
static size_t find(const struct link *l, uint64_t at) {
    return ww_first_behind(l->imports, l->nimports, sizeof *l->imports, at);
}

CUresult ww_map(uint64_t at, uint64_t n, uint64_t handle) {
    struct cu_mem_access access = {.location = {CU_MEM_ON_DEVICE, ww.device}, .access = CU_MEM_READ_WRITE};
    CUresult code = native.cuMemMap(at, n, 0, handle, 0);
    if (!code && (code = native.cuMemSetAccess(at, n, &access, 1)))
        native.cuMemUnmap(at, n);
    if (code)
        native.cuMemRelease(handle);
    return code;
}

static CUresult import(struct link *l, uint64_t at, uint64_t n, int fd) {
    if (!l->bytes || fd < 0 || !n || n % ww_arena.piece || at % ww_arena.piece || at < l->base || n > l->bytes ||
        at - l->base > l->bytes - n || l->nimports >= IMPORTS_MOST)
        return CUDA_ERROR_INVALID_VALUE;
    size_t i = find(l, at); /* no lock: only this thread changes the imports of a link that is UP */
    if (i < l->nimports && l->imports[i].at < at + n)
        return CUDA_ERROR_ALREADY_MAPPED;
    uint64_t handle = 0;
    CUresult code = native.cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd, CU_MEM_POSIX_FD);
    if (code || (code = ww_map(at, n, handle)))
        return code;
    WW_LOCK(&lock);
    l->imports = ww_grown(l->imports, l->nimports, &l->room, sizeof *l->imports);
    struct ww_chunk chunk = {.at = at, .size = n, .handle = handle};
    ww_insert(l->imports, &l->nimports, sizeof *l->imports, i, &chunk);
    return CUDA_SUCCESS;
}

static CUresult unmap_import(struct link *l, uint64_t at, uint64_t n) {
    size_t i = find(l, at);
    if (i >= l->nimports || l->imports[i].at != at || l->imports[i].size != n)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t handle = l->imports[i].handle;
    pthread_mutex_lock(&lock);
    ww_remove(l->imports, &l->nimports, sizeof *l->imports, i);
    pthread_mutex_unlock(&lock);
    CUresult code = native.cuMemUnmap(at, n);
    return code ? code : native.cuMemRelease(handle);
}

int ww_link_holds(uint64_t at, uint64_t n) {
    WW_LOCK(&lock);
    for (struct link *l = links; l < links + WW_PEERS; l++) {
        if (l->state != UP || at < l->base || at - l->base >= l->bytes)
            continue;
        uint64_t to = at;
        for (size_t i = find(l, at); i < l->nimports && l->imports[i].at <= to; i++) {
            to = l->imports[i].at + l->imports[i].size;
            if (to - at >= n)
                return 1;
        }
    }
    return 0;
}

/* -- the links' thread --------------------------------------------------------------------------------------------- */

static void tell_executor(void) {
    atomic_store(&news, 1);
    ww_wake();
}

static void end_link(struct link *l) {
    WW_LOCK(&lock);
    l->state = GONE;
    pthread_cond_broadcast(&moved);
    tell_executor();
}

static int answer(struct link *l, CUresult result) {
    struct ww_link_message reply = {.type = WW_LINK_DONE, .result = result};
    l->owed = result;
    l->owes = say(l->socket, &reply, -1, MSG_DONTWAIT) != 0;
    return !l->owes || errno == EAGAIN;
}

/* Handle a message. Return 0 if the link must end. */
static int handle_message(struct link *l, const struct ww_link_message *m, int fd) {
    CUresult code;
    if (l->owes && m->type < WW_LINK_DONE)
        return 0;
    switch (m->type) {
    case WW_LINK_RANGE:
        code = reserve(l, m->at, m->nbytes);
        break;
    case WW_LINK_MAP:
        code = import(l, m->at, m->nbytes, fd);
        break;
    case WW_LINK_UNMAP:
        code = unmap_import(l, m->at, m->nbytes);
        break;
    case WW_LINK_DONE: {
        WW_LOCK(&lock);
        l->answered = 1;
        l->answer = m->result;
        pthread_cond_broadcast(&moved);
        return 1;
    }
    case WW_LINK_SIGNAL: {
        WW_LOCK(&lock);
        if (l->arrived.n >= EARLY_MOST)
            return 0;
        append(&l->arrived, m->number);
        tell_executor();
        return 1;
    }
    default:
        return 0;
    }
    return answer(l, ww_living(code));
}

static void listen_to(struct link *l) {
    struct ww_link_message m;
    int fd;
    ssize_t got = hear(l->socket, &m, sizeof m, &fd);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    int goes_on = got == (ssize_t)sizeof m && handle_message(l, &m, fd);
    if (fd >= 0)
        close(fd);
    if (!goes_on)
        end_link(l);
}

static void *serve(void *unused) {
    (void)unused;
    if (native.cuCtxSetCurrent(ww.context))
        ww_die("the links' thread cannot enter the context");
    for (;;) {
        struct pollfd all[WW_PEERS + 1] = {{bell, POLLIN, 0}};
        struct link *of[WW_PEERS + 1];
        nfds_t n = 1;
        pthread_mutex_lock(&lock);
        for (struct link *l = links; l < links + WW_PEERS; l++) {
            if (l->state != UP)
                continue;
            all[n] = (struct pollfd){l->socket, (short)(l->owes ? POLLIN | POLLOUT : POLLIN), 0};
            of[n++] = l;
        }
        pthread_mutex_unlock(&lock);
        uint64_t rings;
        if (poll(all, n, -1) <= 0)
            continue;
        if (all[0].revents && read(bell, &rings, sizeof rings) < 0)
            continue;
        for (nfds_t i = 1; i < n; i++) {
            if (all[i].revents & POLLOUT && !answer(of[i], of[i]->owed))
                end_link(of[i]);
            else if (all[i].revents & ~POLLOUT)
                listen_to(of[i]);
        }
    }
    return NULL;
}

/* -- requests, in the heavy thread --------------------------------------------------------------------------------- */

static int is_up(struct link *l) {
    WW_LOCK(&lock);
    return l->state == UP;
}

/* Send a request and wait for the answer. Return its result, or DEVICE_UNAVAILABLE if the other worker has exited. */
static CUresult ask(struct link *l, struct ww_link_message m, int fd) {
    pthread_mutex_lock(&lock);
    int up = l->state == UP;
    l->answered = 0;
    pthread_mutex_unlock(&lock);
    if (!up || say(l->socket, &m, fd, 0))
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    WW_LOCK(&lock);
    while (!l->answered && l->state == UP)
        pthread_cond_wait(&moved, &lock);
    return l->answered ? l->answer : CUDA_ERROR_DEVICE_UNAVAILABLE;
}

static CUresult share(struct link *l, uint64_t at, uint64_t n, uint64_t handle) {
    int fd = -1;
    CUresult code = native.cuMemExportToShareableHandle(&fd, handle, CU_MEM_POSIX_FD, 0);
    if (code)
        return code;
    code = ask(l, (struct ww_link_message){.type = WW_LINK_MAP, .at = at, .nbytes = n}, fd);
    close(fd);
    return code;
}

static void take_back(struct link *l, uint64_t at, uint64_t n) {
    ask(l, (struct ww_link_message){.type = WW_LINK_UNMAP, .at = at, .nbytes = n}, -1);
}

/* Let all workers that share this arena map a new chunk. On an error, let them unmap it, and return the code. */
CUresult ww_links_add(uint64_t at, uint64_t n, uint64_t handle) {
    CUresult code = CUDA_SUCCESS;
    int done = 0;
    for (; done < (int)WW_PEERS && !code; done++) {
        struct link *l = links + done;
        if (!l->shares)
            continue;
        code = share(l, at, n, handle);
        if (code && !is_up(l)) {
            l->shares = 0;
            code = CUDA_SUCCESS;
        }
    }
    if (code) {
        while (done-- > 0)
            if (links[done].shares)
                take_back(links + done, at, n); /* the worker that could not map the chunk refuses, which is ignored */
        return code;
    }
    own = ww_grown(own, nown, &own_room, sizeof *own);
    own[nown++] = (struct ww_chunk){.at = at, .size = n, .handle = handle};
    return CUDA_SUCCESS;
}

/* Let all workers that share this arena unmap a chunk, which is unused and about to be unmapped here. */
void ww_links_drop(uint64_t at, uint64_t n) {
    for (struct link *l = links; l < links + WW_PEERS; l++)
        if (l->shares)
            take_back(l, at, n);
    for (size_t i = 0; i < nown; i++)
        if (own[i].at == at)
            own[i] = own[--nown];
}

static void share_all(struct ww_job *job) {
    struct link *l = links + job->a;
    if (l->shares && is_up(l))
        return;
    l->shares = 0;
    job->result = ww.shareable ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
    if (!job->result)
        job->result =
            ask(l, (struct ww_link_message){.type = WW_LINK_RANGE, .at = ww_arena.base, .nbytes = ww_arena.bytes}, -1);
    size_t done = 0;
    for (; done < nown && !job->result; done++)
        job->result = share(l, own[done].at, own[done].size, own[done].handle);
    if (!job->result)
        l->shares = 1;
    while (job->result && done-- > 0)
        take_back(l, own[done].at, own[done].size);
}

static int is_ours(int fd) {
    int domain = 0, type = 0;
    socklen_t n = sizeof domain, m = sizeof type;
    return fd >= 0 && !getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &n) &&
           !getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &m) && domain == AF_UNIX && type == SOCK_SEQPACKET;
}

/* Return the descriptor that was sent with `serial`, or -1. Close the descriptors of calls that were never made. */
int ww_take_descriptor(uint32_t serial) {
    for (int i = 0; i < 64; i++) {
        struct ww_link_packet packet;
        int fd;
        ssize_t got = hear(ww.socket, &packet, sizeof packet, &fd);
        if (got <= 0)
            return -1;
        if (got == (ssize_t)sizeof packet && packet.type == WW_LINK && packet.serial == serial)
            return fd;
        if (fd >= 0)
            close(fd);
    }
    return -1;
}

static CUresult start_thread(void) {
    pthread_t thread;
    if (bell >= 0)
        return CUDA_SUCCESS;
    bell = eventfd(0, EFD_CLOEXEC);
    if (bell < 0 || pthread_create(&thread, NULL, serve, NULL))
        return CUDA_ERROR_OPERATING_SYSTEM;
    pthread_detach(thread);
    return CUDA_SUCCESS;
}

static void make_link(struct ww_job *job) {
    struct link *l = links + job->a;
    uint64_t ring = 1;
    int fd = ww_take_descriptor((uint32_t)job->b);
    job->result = is_ours(fd) ? start_thread() : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (!job->result && l->state != NONE)
        job->result = CUDA_ERROR_NOT_READY;
    if (!job->result) {
        l->socket = fd;
        l->state = UP;
        l->shares = l->owes = 0;
    }
    pthread_mutex_unlock(&lock);
    if (!job->result && write(bell, &ring, sizeof ring) < 0)
        ww_die("the links' thread cannot be woken");
    if (job->result && fd >= 0)
        close(fd);
}

static CUresult from_ring(const struct ww_call *call, void (*work)(struct ww_job *job)) {
    const struct ww_args_link *args = (const void *)call->args;
    return args->peer >= WW_PEERS
               ? CUDA_ERROR_INVALID_VALUE
               : ww_heavy_for(call, (struct ww_job){.work = work, .a = args->peer, .b = args->serial});
}

CUresult ww_link(const struct ww_call *call) { return from_ring(call, make_link); }

CUresult ww_share(const struct ww_call *call) { return from_ring(call, share_all); }

/* -- signals, in the executor -------------------------------------------------------------------------------------- */

/* Send a signal to the other worker, or put it in `unsent` if the socket is full. */
static void signal_peer(uint32_t peer, uint64_t number) {
    struct link *l = links + peer % WW_PEERS;
    struct ww_link_message m = {.type = WW_LINK_SIGNAL, .number = number};
    if (!is_up(l))
        return;
    if (!l->unsent.n && !say(l->socket, &m, -1, MSG_DONTWAIT))
        return;
    append(&l->unsent, number);
    unsent = 1;
}

CUresult ww_signal(const struct ww_call *call, const struct ww_args_signal *args) {
    return ww_event_passed(
        call, (struct ww_todo){.kind = WW_THEN, .then = signal_peer, .a = args->peer, .address = args->number});
}

static int send_rest(struct link *l) {
    struct ww_link_message m = {.type = WW_LINK_SIGNAL};
    size_t sent = 0;
    for (; sent < l->unsent.n; sent++) {
        m.number = l->unsent.all[sent];
        if (say(l->socket, &m, -1, MSG_DONTWAIT))
            break;
    }
    memmove(l->unsent.all, l->unsent.all + sent, (l->unsent.n - sent) * sizeof *l->unsent.all);
    l->unsent.n -= sent;
    return sent != 0;
}

/* Run when the call is read: take the signal for which it waits, if it has arrived, or enter the call in `awaits`. */
CUresult ww_await_check(struct ww_call *call, const struct ww_args_signal *args) {
    if (args->peer >= WW_PEERS)
        return CUDA_ERROR_INVALID_VALUE;
    struct link *l = links + args->peer;
    pthread_mutex_lock(&lock);
    int ends =
        l->state == NONE || l->state == ENDING; /* if the link is GONE, begin_end() will run later and fail the call */
    pthread_mutex_unlock(&lock);
    struct ww_await *a = call->await = ww_memory(sizeof *a);
    a->number = args->number;
    for (size_t i = 0; i < l->early.n && !a->is_done; i++) {
        if (l->early.all[i] != args->number)
            continue;
        l->early.all[i] = l->early.all[--l->early.n];
        a->is_done = 1;
    }
    if (ends && !a->is_done) {
        free(a);
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    }
    if (a->is_done)
        return CUDA_SUCCESS;
    struct ww_await **end = &l->awaits;
    while (*end)
        end = &(*end)->next;
    *end = a;
    return CUDA_SUCCESS;
}

int ww_await_is_due(const struct ww_call *call) { return call->await->is_done; }

CUresult ww_await_issue(struct ww_stream *s, struct ww_call *call) {
    (void)s;
    CUresult code = call->await->result;
    free(call->await); /* finish_await() or begin_end() has removed it from the list */
    call->await = NULL;
    return code;
}

static void finish_await(struct link *l, uint64_t number) {
    for (struct ww_await **at = &l->awaits; *at; at = &(*at)->next) {
        if ((*at)->number != number)
            continue;
        (*at)->is_done = 1;
        *at = (*at)->next;
        return;
    }
    if (l->early.n >= EARLY_MOST)
        ww_die("more signals arrived than calls can wait for");
    append(&l->early, number);
}

/* -- the end of a link --------------------------------------------------------------------------------------------- */

static void forget(struct ww_job *job) {
    struct link *l = links + job->a;
    for (size_t i = 0; i < l->nimports; i++) {
        native.cuMemUnmap(l->imports[i].at, l->imports[i].size);
        native.cuMemRelease(l->imports[i].handle);
    }
    if (l->bytes)
        native.cuMemAddressFree(l->base, l->bytes);
    close(l->socket);
    l->shares = 0;
}

static void forgotten(struct ww_job *job) {
    struct link *l = links + job->a;
    WW_LOCK(&lock);
    l->nimports = l->arrived.n = l->early.n = l->unsent.n = 0;
    l->base = l->bytes = 0;
    l->state = NONE;
}

static void start_forget(struct ww_barrier *barrier) {
    ww_heavy((struct ww_job){.work = forget, .done = forgotten, .a = barrier->key});
}

/* The other worker has exited: let calls that wait for it fail, and unmap its memory when the device has passed all
 * calls that have been read. */
static void begin_end(struct link *l) {
    for (struct ww_await *a = l->awaits, *next; a; a = next) {
        next = a->next;
        a->is_done = 1;
        a->result = CUDA_ERROR_DEVICE_UNAVAILABLE;
    }
    l->awaits = NULL;
    l->unsent.n = 0;
    ww_barrier((struct ww_barrier){.then = start_forget, .key = (uint64_t)(l - links)});
}

int ww_links_step(void) {
    int some = 0, left = 0;
    for (struct link *l = links; unsent && l < links + WW_PEERS; l++) {
        some |= l->unsent.n && send_rest(l);
        left |= l->unsent.n != 0;
    }
    unsent = left;
    if (!atomic_load_explicit(&news, memory_order_relaxed) || !atomic_exchange(&news, 0))
        return some;
    for (struct link *l = links; l < links + WW_PEERS; l++) {
        pthread_mutex_lock(&lock);
        struct numbers numbers = l->arrived;
        int gone = l->state == GONE;
        l->arrived = (struct numbers){0};
        if (gone)
            l->state = ENDING;
        pthread_mutex_unlock(&lock);
        for (size_t i = 0; i < numbers.n; i++)
            finish_await(l, numbers.all[i]);
        free(numbers.all);
        if (gone)
            begin_end(l);
    }
    return 1;
}

int ww_links_busy(void) { return unsent; }
