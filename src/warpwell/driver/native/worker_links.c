/* Links to the workers that the same client has on other devices of this host: their memory at its own addresses, and
 * their events, for which streams here wait.
 *
 * A link is a pair of sockets that the client made. Its thread answers what the other side asks (reserve, map, unmap)
 * and never waits for another worker; the heavy thread asks, one request at a time, and waits for each answer. So two
 * workers that ask each other at one time are both answered.
 *
 * Memory is shared by whole chunks of the arena: the heavy thread shares those that it has, and from then on each new
 * one before the executor knows of it; before it gives one back it asks for that by all who have it. When the other
 * side has ended, its memory is named no more here, and let go when all that was read before has been passed.
 */
#include "worker.h"

#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#define IMPORTS_MOST 65536u
#define EARLY_MOST (1u << 17) /* signals that came before the call that waits for them was read: a ring has fewer */

struct ww_await { /* a call that waits for a signal */
    struct ww_await *next;
    uint64_t number;
    int came;
    CUresult result;
};

struct numbers {
    uint64_t *all;
    size_t n, room;
};

struct link {
    enum { NONE, UP, GONE, ENDING } state; /* under the lock, as all up to `came` */
    int socket;
    uint64_t base, bytes;     /* of the other arena, reserved here; 0: it shares nothing */
    struct ww_chunk *imports; /* by address */
    size_t nimports, room;
    int answered, owes; /* owes: an answer that the socket did not take */
    CUresult answer, owed;
    struct numbers came;          /* signals */
    int shares;                   /* the heavy thread's: this arena is mapped there */
    struct numbers early, unsent; /* the executor's, as all below */
    struct ww_await *awaits;
};

static struct link links[WW_PEERS];
static struct ww_chunk *own; /* the heavy thread's: mapped chunks of this arena */
static size_t nown, own_room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static _Atomic int news; /* the executor has something to look at */
static int unsent;       /* the executor's: a link has signals that its socket did not take */
static int bell = -1;

static void append(struct numbers *list, uint64_t number) {
    list->all = ww_grown(list->all, list->n, &list->room, sizeof *list->all);
    list->all[list->n++] = number;
}

/* -- messages ------------------------------------------------------------------------------------------------------ */

static int say(int socket, const struct ww_link_message *message, int fd, int flags) {
    return ww_send_packet(socket, message, sizeof *message, &fd, fd >= 0, flags);
}

/* Receives one packet of `n` bytes with at most one descriptor: its length, 0 at the end or if it is longer, -1 if none
 * is there. */
static ssize_t hear(int socket, void *packet, size_t n, int *fd) {
    int is_cut;
    ssize_t got = ww_receive_packet(socket, packet, n, fd, 1, &is_cut);
    return got > 0 && is_cut ? 0 : got;
}

/* -- the other side's memory, in the links' thread ----------------------------------------------------------------- */

static CUresult reserve(struct link *l, uint64_t at, uint64_t n) {
    if (l->bytes || !n || n > WW_ARENA_STEP || n % ww_arena.piece)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t got = 0;
    CUresult code = native.cuMemAddressReserve(&got, n, 0, at, 0);
    if (code)
        return code;
    if (got != at) { /* something else is there */
        native.cuMemAddressFree(got, n);
        return CUDA_ERROR_ALREADY_MAPPED;
    }
    pthread_mutex_lock(&lock);
    l->base = at;
    l->bytes = n;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

/* Index of the first import that ends behind `at`; lock held. */
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
    size_t i = find(l, at); /* this thread alone changes them */
    if (i < l->nimports && l->imports[i].at < at + n)
        return CUDA_ERROR_ALREADY_MAPPED;
    uint64_t handle = 0;
    CUresult code = native.cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd, CU_MEM_POSIX_FD);
    if (code || (code = ww_map(at, n, handle)))
        return code;
    pthread_mutex_lock(&lock);
    l->imports = ww_grown(l->imports, l->nimports, &l->room, sizeof *l->imports);
    memmove(l->imports + i + 1, l->imports + i, (l->nimports - i) * sizeof *l->imports);
    l->imports[i] = (struct ww_chunk){.at = at, .size = n, .handle = handle};
    l->nimports++;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static CUresult let_go(struct link *l, uint64_t at, uint64_t n) {
    size_t i = find(l, at);
    if (i >= l->nimports || l->imports[i].at != at || l->imports[i].size != n)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t handle = l->imports[i].handle;
    pthread_mutex_lock(&lock);
    memmove(l->imports + i, l->imports + i + 1, (l->nimports - i - 1) * sizeof *l->imports);
    l->nimports--;
    pthread_mutex_unlock(&lock);
    CUresult code = native.cuMemUnmap(at, n);
    return code ? code : native.cuMemRelease(handle);
}

int ww_link_holds(uint64_t at, uint64_t n) {
    int holds = 0;
    pthread_mutex_lock(&lock);
    for (struct link *l = links; l < links + WW_PEERS && !holds; l++) {
        if (l->state != UP || at < l->base || at - l->base >= l->bytes)
            continue;
        size_t i = find(l, at);
        uint64_t to = at;
        for (; i < l->nimports && l->imports[i].at <= to && !holds; i++) {
            to = l->imports[i].at + l->imports[i].size;
            holds = to - at >= n;
        }
    }
    pthread_mutex_unlock(&lock);
    return holds;
}

/* -- the links' thread --------------------------------------------------------------------------------------------- */

static void tell_executor(void) {
    atomic_store(&news, 1);
    ww_wake();
}

static void end_link(struct link *l) {
    pthread_mutex_lock(&lock);
    l->state = GONE;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
    tell_executor();
}

static int answer(struct link *l, CUresult result) {
    struct ww_link_message said = {.said = WW_LINK_DONE, .result = result};
    l->owed = result;
    l->owes = say(l->socket, &said, -1, MSG_DONTWAIT) != 0;
    return !l->owes || errno == EAGAIN;
}

/* Carries out a message; returns 0 if the link must end. */
static int heed(struct link *l, const struct ww_link_message *m, int fd) {
    CUresult code;
    if (l->owes && m->said < WW_LINK_DONE)
        return 0;
    switch (m->said) {
    case WW_LINK_RANGE:
        code = reserve(l, m->at, m->nbytes);
        break;
    case WW_LINK_MAP:
        code = import(l, m->at, m->nbytes, fd);
        break;
    case WW_LINK_UNMAP:
        code = let_go(l, m->at, m->nbytes);
        break;
    case WW_LINK_DONE:
        pthread_mutex_lock(&lock);
        l->answered = 1;
        l->answer = m->result;
        pthread_cond_broadcast(&moved);
        pthread_mutex_unlock(&lock);
        return 1;
    case WW_LINK_SIGNAL:
        pthread_mutex_lock(&lock);
        int few = l->came.n < EARLY_MOST;
        if (few)
            append(&l->came, m->number);
        pthread_mutex_unlock(&lock);
        if (few)
            tell_executor();
        return few;
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
    int goes_on = got == (ssize_t)sizeof m && heed(l, &m, fd);
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

/* -- asking, in the heavy thread ----------------------------------------------------------------------------------- */

static int is_up(struct link *l) {
    pthread_mutex_lock(&lock);
    int up = l->state == UP;
    pthread_mutex_unlock(&lock);
    return up;
}

/* DEVICE_UNAVAILABLE: the other side has ended. */
static CUresult ask(struct link *l, struct ww_link_message m, int fd) {
    pthread_mutex_lock(&lock);
    int up = l->state == UP;
    l->answered = 0;
    pthread_mutex_unlock(&lock);
    if (!up || say(l->socket, &m, fd, 0))
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    pthread_mutex_lock(&lock);
    while (!l->answered && l->state == UP)
        pthread_cond_wait(&moved, &lock);
    CUresult code = l->answered ? l->answer : CUDA_ERROR_DEVICE_UNAVAILABLE;
    pthread_mutex_unlock(&lock);
    return code;
}

static CUresult share(struct link *l, uint64_t at, uint64_t n, uint64_t handle) {
    int fd = -1;
    CUresult code = native.cuMemExportToShareableHandle(&fd, handle, CU_MEM_POSIX_FD, 0);
    if (code)
        return code;
    code = ask(l, (struct ww_link_message){.said = WW_LINK_MAP, .at = at, .nbytes = n}, fd);
    close(fd);
    return code;
}

static void take_back(struct link *l, uint64_t at, uint64_t n) {
    ask(l, (struct ww_link_message){.said = WW_LINK_UNMAP, .at = at, .nbytes = n}, -1);
}

/* A new chunk is mapped: all who share this arena map it, or none does and a code is returned. */
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
                take_back(links + done, at, n); /* a link that could not refuses */
        return code;
    }
    own = ww_grown(own, nown, &own_room, sizeof *own);
    own[nown++] = (struct ww_chunk){.at = at, .size = n, .handle = handle};
    return CUDA_SUCCESS;
}

/* An unused chunk is about to be unmapped. */
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
            ask(l, (struct ww_link_message){.said = WW_LINK_RANGE, .at = ww_arena.base, .nbytes = ww_arena.bytes}, -1);
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

/* The descriptor that was sent with the serial; descriptors of calls that were never made are closed. */
int ww_take_descriptor(uint32_t serial) {
    for (int i = 0; i < 64; i++) {
        struct ww_link_packet packet;
        int fd;
        ssize_t got = hear(ww.socket, &packet, sizeof packet, &fd);
        if (got <= 0)
            return -1;
        if (got == (ssize_t)sizeof packet && packet.said == WW_LINK && packet.serial == serial)
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

/* Signals the other side; if its socket is full, later. */
static void signal_peer(uint32_t peer, uint64_t number) {
    struct link *l = links + peer % WW_PEERS;
    struct ww_link_message m = {.said = WW_LINK_SIGNAL, .number = number};
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
    struct ww_link_message m = {.said = WW_LINK_SIGNAL};
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

/* At reading: finds the signal for which the call waits. */
CUresult ww_await_check(struct ww_call *call, const struct ww_args_signal *args) {
    if (args->peer >= WW_PEERS)
        return CUDA_ERROR_INVALID_VALUE;
    struct link *l = links + args->peer;
    pthread_mutex_lock(&lock);
    int ends =
        l->state == NONE || l->state == ENDING; /* one that is GONE and not yet so begins to end behind this call */
    pthread_mutex_unlock(&lock);
    struct ww_await *a = call->await = ww_memory(sizeof *a);
    a->number = args->number;
    for (size_t i = 0; i < l->early.n && !a->came; i++) {
        if (l->early.all[i] != args->number)
            continue;
        l->early.all[i] = l->early.all[--l->early.n];
        a->came = 1;
    }
    if (ends && !a->came) {
        free(a);
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    }
    if (a->came)
        return CUDA_SUCCESS;
    struct ww_await **end = &l->awaits;
    while (*end)
        end = &(*end)->next;
    *end = a;
    return CUDA_SUCCESS;
}

int ww_await_is_due(const struct ww_call *call) { return call->await->came; }

CUresult ww_await_issue(struct ww_stream *s, struct ww_call *call) {
    (void)s;
    CUresult code = call->await->result;
    free(call->await); /* it left the list when it came */
    call->await = NULL;
    return code;
}

static void came(struct link *l, uint64_t number) {
    for (struct ww_await **at = &l->awaits; *at; at = &(*at)->next) {
        if ((*at)->number != number)
            continue;
        (*at)->came = 1;
        *at = (*at)->next;
        return;
    }
    if (l->early.n >= EARLY_MOST)
        ww_die("more signals came than calls can wait for");
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
    pthread_mutex_lock(&lock);
    l->nimports = l->came.n = l->early.n = l->unsent.n = 0;
    l->base = l->bytes = 0;
    l->state = NONE;
    pthread_mutex_unlock(&lock);
}

static void start_forget(struct ww_barrier *barrier) {
    ww_heavy((struct ww_job){.work = forget, .done = forgotten, .a = barrier->what});
}

/* The other side has ended: calls that wait for it fail, and its memory is unmapped when all earlier calls are passed.
 */
static void begin_end(struct link *l) {
    for (struct ww_await *a = l->awaits, *next; a; a = next) {
        next = a->next;
        a->came = 1;
        a->result = CUDA_ERROR_DEVICE_UNAVAILABLE;
    }
    l->awaits = NULL;
    l->unsent.n = 0;
    ww_barrier((struct ww_barrier){.then = start_forget, .what = (uint64_t)(l - links)});
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
        struct numbers numbers = l->came;
        int gone = l->state == GONE;
        l->came = (struct numbers){0};
        if (gone)
            l->state = ENDING;
        pthread_mutex_unlock(&lock);
        for (size_t i = 0; i < numbers.n; i++)
            came(l, numbers.all[i]);
        free(numbers.all);
        if (gone)
            begin_end(l);
    }
    return 1;
}

int ww_links_busy(void) { return unsent; }
