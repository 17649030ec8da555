/* Memory of the client: device memory from the arena, and pinned host memory at the same address in client and worker.
 *
 * A free takes effect when the device has passed all calls that were read before it. One group of frees at a time waits
 * for that; frees that are read in the meantime form the next group. An allocation that finds no room is refused only
 * after all pending frees have taken effect.
 */
#include "worker.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

/* Python frees arrays in groups, and soon creates as many again. So some unused memory stays mapped: KEEP_FREE bytes,
 * or the bytes by which use has fallen in the last one or two KEEP_NS, but at most a KEEP_PART-th of the device. */
#define KEEP_FREE (256ull << 20)
#define KEEP_PART 32u
#define KEEP_NS 1000000000u
#define GROW_MOST (64ull << 20)
#define PINS_MOST 65536u
#define WISHES_MOST 4096u /* a correct client waits for one allocation in each slot */

struct wish { /* an allocation that waits for memory */
    struct wish *next;
    uint64_t nbytes;
    uint32_t slot, seq;
};

struct pin {
    uint64_t at, nbytes;
    enum { COMING, HERE, LEAVING, GOING } state; /* LEAVING: calls that were read before the UNPIN may still use it */
    int lends, fd;   /* lends: the client will lend it to its other workers. fd: its memfd, kept for that, or -1 */
    uint64_t *total; /* `pinned` or `borrowed`, which counts its bytes */
};

static struct wish *wishes, **wishes_end = &wishes;
static uint32_t nwishes;
static int mapping;             /* the heavy thread maps or unmaps a range */
static int exact, full;         /* the last mapping failed. exact: it was larger than needed; full: it was not */
static uint64_t *frees, *group; /* addresses: the next group of frees, the group that waits */
static size_t nfrees, frees_room, ngroup;
static uint32_t releases; /* FREE_ASYNC calls that were read, and that the device has not passed */
static struct pin *pins;  /* sorted by address */
static size_t npins, pins_room;
static uint64_t pinned, borrowed; /* bytes; host_most bounds each by itself: the lender counts borrowed memory, too */
static uint64_t keep;             /* KEEP_PART in bytes, but at least KEEP_FREE */
static uint64_t since, high, before; /* start of a KEEP_NS period; most bytes in use in it, and in the one before */

static void grant(void);

/* -- mapping, in the heavy thread ---------------------------------------------------------------------------------- */

static struct cu_mem_prop properties(void) {
    return (struct cu_mem_prop){.type = CU_MEM_PINNED,
                                .handle_types = ww.shareable ? CU_MEM_POSIX_FD : 0,
                                .location = {CU_MEM_ON_DEVICE, ww.device}};
}

static void map(struct ww_job *job) {
    struct cu_mem_prop prop = properties();
    uint64_t handle = 0;
    job->result = native.cuMemCreate(&handle, job->b, &prop, 0);
    if (job->result == CUDA_ERROR_NOT_SUPPORTED || job->result == CUDA_ERROR_NOT_PERMITTED) { /* seen in containers */
        ww.shareable = 0;
        prop = properties();
        job->result = native.cuMemCreate(&handle, job->b, &prop, 0);
    }
    if (job->result || (job->result = ww_map(job->a, job->b, handle)))
        return;
    job->result = ww_links_add(job->a, job->b, handle);
    job->c = handle;
    if (job->result) {
        native.cuMemUnmap(job->a, job->b);
        native.cuMemRelease(handle);
    }
}

static void unmap(struct ww_job *job) {
    ww_links_drop(job->a, job->b);
    job->result = native.cuMemUnmap(job->a, job->b);
    if (!job->result)
        job->result = native.cuMemRelease(job->c);
}

static void mapped(struct ww_job *job) {
    ww_arena_settle(&ww_arena, job->a, job->b, job->result ? 0 : job->c);
    mapping = 0;
    full = job->result && !job->fd;
    exact = job->result && job->fd;
    grant();
}

static void unmapped(struct ww_job *job) {
    if (job->result)
        ww_die("the driver does not take memory back");
    ww_arena_settle(&ww_arena, job->a, job->b, 0);
    mapping = full = 0;
    grant();
}

static int give_back(uint64_t keep) {
    struct ww_chunk c;
    if (mapping || !ww_arena_spare(&ww_arena, keep, &c))
        return 0;
    mapping = 1;
    ww_heavy((struct ww_job){.work = unmap, .done = unmapped, .a = c.at, .b = c.size, .c = c.handle});
    return 1;
}

CUresult ww_memory_start(uint32_t ordinal, uint64_t total, uint64_t *base, uint64_t *bytes) {
    int can = 0;
    ww.shareable = native.cuMemExportToShareableHandle && native.cuMemImportFromShareableHandle &&
                   !native.cuDeviceGetAttribute(&can, CU_DEVICE_HANDLE_POSIX_FD, ww.device) && can;
    struct cu_mem_prop prop = properties();
    size_t piece = 0;
    CUresult code = native.cuMemGetAllocationGranularity(&piece, &prop, CU_MEM_GRANULARITY_MINIMUM);
    if (code)
        return code;
    uint64_t want = 2 * total < WW_ARENA_STEP ? (2 * total + piece - 1) / piece * piece : WW_ARENA_STEP;
    code = native.cuMemAddressReserve(base, want, 0, WW_ARENA_BASE + ordinal * WW_ARENA_STEP, 0);
    if (code)
        return code;
    *bytes = want;
    ww_arena_init(&ww_arena, *base, want, piece, ww.quota);
    /* Some programs read a little before their first array. With the driver's own allocator, memory is mapped there. So
     * map the first piece of the arena, never allocate from it, and do not count it. */
    uint64_t handle = 0, size = 0;
    if (ww_arena_choose(&ww_arena, piece, &size)) {
        if (native.cuMemCreate(&handle, piece, &prop, 0) || ww_map(*base, piece, handle))
            ww_arena_settle(&ww_arena, *base, piece, 0);
        else
            ww_arena.mapped -= size;
    }
    keep = total / KEEP_PART > KEEP_FREE ? total / KEEP_PART : KEEP_FREE;
    return CUDA_SUCCESS;
}

/* -- allocations --------------------------------------------------------------------------------------------------- */

static void end_wish(CUresult code, uint64_t address) {
    struct wish *w = wishes;
    wishes = w->next;
    nwishes--;
    if (!wishes)
        wishes_end = &wishes;
    ww_answer(w->slot, w->seq, code, &address, code ? 0 : sizeof address);
    free(w);
}

/* Map `nbytes`, or an eighth of the mapped memory (at most GROW_MOST) if that is more: to map 2 MiB costs 50 us. */
static int start_map(uint64_t nbytes) {
    uint64_t size, more = ww_arena.mapped / 8 < GROW_MOST ? ww_arena.mapped / 8 : GROW_MOST;
    uint64_t at = !exact && more > nbytes ? ww_arena_choose(&ww_arena, more, &size) : 0;
    int spare = at != 0;
    if (!at)
        at = ww_arena_choose(&ww_arena, nbytes, &size);
    if (!at)
        return 0;
    mapping = 1;
    ww_heavy((struct ww_job){.work = map, .done = mapped, .a = at, .b = size, .fd = spare});
    return 1;
}

/* Return how many unused bytes stay mapped now. */
static uint64_t kept(uint64_t now) {
    if (now - since > KEEP_NS) {
        before = now - since > 2ull * KEEP_NS ? ww_arena.used : high;
        high = ww_arena.used;
        since = now;
    }
    if (ww_arena.used > high)
        high = ww_arena.used;
    uint64_t again = (high > before ? high : before) - ww_arena.used;
    return again < KEEP_FREE ? KEEP_FREE : again < keep ? again : keep;
}

/* Answer waiting allocations in order, as far as there is memory. */
static void grant(void) {
    while (wishes && !mapping) {
        uint64_t nbytes = wishes->nbytes, at = ww_arena_take(&ww_arena, nbytes);
        if (at) {
            end_wish(CUDA_SUCCESS, at);
            continue;
        }
        if (!full && start_map(nbytes))
            return;
        full = 0;
        if (give_back(0))
            return;
        if (ngroup || releases) { /* `done_group` and `release` call grant() again */
            return;
        }
        end_wish(CUDA_ERROR_OUT_OF_MEMORY, 0);
    }
    if (!wishes)
        give_back(kept(ww_now_ns()));
}

void ww_memory_rest(uint64_t now) {
    if (ww_arena.free > KEEP_FREE && !wishes)
        give_back(kept(now));
}

CUresult ww_alloc(const struct ww_call *call, const struct ww_args_alloc *args) {
    if (!args->nbytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (args->nbytes > ww_arena.bytes || (ww.quota && args->nbytes > ww.quota))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (call->entry.op == WW_OP_ALLOC_ASYNC && !ww_find_stream(call->entry.stream))
        return CUDA_ERROR_INVALID_HANDLE;
    if (++nwishes > WISHES_MOST)
        ww_die("more calls wait for memory than a client can have");
    struct wish *w = ww_memory(sizeof *w);
    *w = (struct wish){.nbytes = args->nbytes, .slot = call->entry.slot, .seq = call->entry.seq};
    *wishes_end = w;
    wishes_end = &w->next;
    if (wishes == w)
        grant();
    return WW_LATER;
}

/* -- frees --------------------------------------------------------------------------------------------------------- */

static void start_group(void);

static void done_group(struct ww_barrier *barrier) {
    (void)barrier;
    for (size_t i = 0; i < ngroup; i++)
        ww_arena_free(&ww_arena, group[i]);
    free(group);
    group = NULL;
    ngroup = 0;
    if (nfrees)
        start_group();
    grant();
}

static void start_group(void) {
    group = frees;
    ngroup = nfrees;
    frees = NULL;
    nfrees = frees_room = 0;
    ww_barrier((struct ww_barrier){.then = done_group});
}

CUresult ww_free(const struct ww_args_free *args) {
    if (!ww_arena_freeing(&ww_arena, args->address))
        return CUDA_ERROR_INVALID_VALUE;
    frees = ww_grown(frees, nfrees, &frees_room, sizeof *frees);
    frees[nfrees++] = args->address;
    if (!ngroup)
        start_group();
    return CUDA_SUCCESS;
}

CUresult ww_free_check(const struct ww_args_free *args) {
    if (!ww_arena_freeing(&ww_arena, args->address))
        return CUDA_ERROR_INVALID_VALUE;
    releases++;
    return CUDA_SUCCESS;
}

/* The device has passed a FREE_ASYNC. */
static void release(uint32_t unused, uint64_t address) {
    (void)unused;
    releases--;
    ww_arena_free(&ww_arena, address);
    grant();
}

CUresult ww_free_issue(struct ww_stream *s, const struct ww_args_free *args) {
    ww_stream_mark(s, (struct ww_todo){.kind = WW_THEN, .then = release, .address = args->address});
    return CUDA_SUCCESS;
}

static void read_info(struct ww_job *job) {
    size_t left = 0, total = 0;
    job->result = native.cuMemGetInfo_v2(&left, &total);
    job->a = left;
    job->b = total;
}

static void tell_info(struct ww_job *job) {
    struct ww_mem_info info = {.free = job->a + ww_arena.free, .total = job->b};
    if (ww.quota && ww.quota < info.total) {
        uint64_t own = ww.quota - (ww_arena.mapped - ww_arena.free);
        info.total = ww.quota;
        if (info.free > own)
            info.free = own;
    }
    ww_answer(job->slot, job->seq, job->result, &info, job->result ? 0 : sizeof info);
}

CUresult ww_mem_info(const struct ww_call *call) {
    return ww_heavy_for(call, (struct ww_job){.work = read_info, .done = tell_info});
}

/* -- pinned memory ------------------------------------------------------------------------------------------------- */

/* Return the index of the pin that contains `at`, or else of the next one. */
static size_t find_pin(uint64_t at) { return ww_first_behind(pins, npins, sizeof *pins, at); }

enum ww_where ww_where(uint64_t at, uint64_t n) {
    if (at >= WW_PIN_LOWEST && at < WW_PIN_HIGHEST) {
        size_t i = find_pin(at);
        int here = i < npins && (pins[i].state == HERE || pins[i].state == LEAVING);
        int inside = here && at >= pins[i].at && n <= pins[i].nbytes && at - pins[i].at <= pins[i].nbytes - n;
        return inside ? WW_HOST : WW_NOWHERE;
    }
    return ww_arena_holds(&ww_arena, at, n) || ww_is_global(at, n) || ww_link_holds(at, n) ? WW_DEVICE : WW_NOWHERE;
}

static void register_pin(struct ww_job *job) {
    void *at = (void *)(uintptr_t)job->a;
    job->result = native.cuMemHostRegister_v2(at, job->b, CU_MEMHOST_PORTABLE | CU_MEMHOST_DEVICEMAP);
    uint64_t seen = 0;
    if (!job->result) {
        native.cuMemHostGetDevicePointer_v2(&seen, at, 0);
        if (seen == job->a)
            return;
        native.cuMemHostUnregister(at);
        job->result = CUDA_ERROR_NOT_SUPPORTED;
    }
    munmap(at, job->b);
}

static void pin(struct ww_job *job) {
    void *at = (void *)(uintptr_t)job->a;
    if (!ww_share_memory("warpwell-pinned", at, job->b, false, &job->fd)) {
        job->result = errno == EEXIST ? CUDA_ERROR_ALREADY_MAPPED : CUDA_ERROR_OUT_OF_MEMORY;
        return; /* `was_pinned` closes the file */
    }
    register_pin(job);
}

/* Map pinned memory of another worker. It must have F_SEAL_SHRINK: a truncated file would crash this worker. */
static void borrow(struct ww_job *job) {
    void *at = (void *)(uintptr_t)job->a, *got = MAP_FAILED;
    int fd = ww_take_descriptor((uint32_t)job->c), seals = fd < 0 ? -1 : fcntl(fd, F_GET_SEALS);
    struct stat s;
    bool is_whole = seals >= 0 && seals & F_SEAL_SHRINK && !fstat(fd, &s) && (uint64_t)s.st_size >= job->b;
    if (is_whole)
        got = mmap(at, job->b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, fd, 0);
    if (fd >= 0)
        close(fd);
    if (got == at) {
        register_pin(job);
        return;
    }
    if (got != MAP_FAILED) /* Linux before 4.17 treats the address as a hint */
        munmap(got, job->b);
    job->result = is_whole ? CUDA_ERROR_ALREADY_MAPPED : CUDA_ERROR_INVALID_VALUE;
}

static void unpin(struct ww_job *job) {
    job->result = native.cuMemHostUnregister((void *)(uintptr_t)job->a);
    munmap((void *)(uintptr_t)job->a, job->b);
}

static void forget_pin(uint64_t at) {
    size_t i = find_pin(at);
    if (pins[i].fd >= 0)
        close(pins[i].fd);
    *pins[i].total -= pins[i].nbytes;
    ww_remove(pins, &npins, sizeof *pins, i);
}

/* Answer a PIN or a BORROW. */
static void settle(struct ww_job *job) {
    if (job->result)
        forget_pin(job->a);
    else
        pins[find_pin(job->a)].state = HERE;
    ww_answer(job->slot, job->seq, job->result, NULL, 0);
}

static int send_pin(uint64_t at, uint64_t n, int fd) {
    struct ww_pinned packet = {.type = WW_PINNED, .address = at, .nbytes = n};
    return ww_send_packet(ww.socket, &packet, sizeof packet, &fd, 1, MSG_DONTWAIT);
}

/* Return true if `fd` may stay open: half of the process's descriptors are reserved for other uses. */
static int may_keep(int fd) {
    struct rlimit most;
    return !getrlimit(RLIMIT_NOFILE, &most) && (rlim_t)fd < most.rlim_cur / 2;
}

static void was_pinned(struct ww_job *job) {
    if (!job->c && !job->result && send_pin(job->a, job->b, job->fd)) {
        close(job->fd); /* the client does not read its socket */
        struct ww_job again = {
            .work = unpin, .waits = 1, .done = was_pinned, .a = job->a, .b = job->b, .fd = -1, .c = 1};
        again.slot = job->slot, again.seq = job->seq;
        ww_heavy(again);
        return;
    }
    struct pin *p = pins + find_pin(job->a);
    if (p->lends && !job->result && may_keep(job->fd))
        p->fd = job->fd;
    else if (job->fd >= 0)
        close(job->fd);
    if (job->c)
        job->result = CUDA_ERROR_OUT_OF_MEMORY;
    settle(job);
}

/* Add a COMING pin at addresses that the client chose. Return 0 or a code. */
static CUresult add_pin(const struct ww_args_pin *args, uint64_t *total) {
    if (args->address % 4096 || args->nbytes % 4096 || !args->nbytes || args->address < WW_PIN_LOWEST ||
        args->address >= WW_PIN_HIGHEST || args->nbytes > WW_PIN_HIGHEST - args->address)
        return CUDA_ERROR_INVALID_VALUE;
    if (args->nbytes > ww.host_most - *total || npins >= PINS_MOST)
        return CUDA_ERROR_OUT_OF_MEMORY;
    size_t i = find_pin(args->address);
    if (i < npins && pins[i].at < args->address + args->nbytes)
        return CUDA_ERROR_ALREADY_MAPPED;
    pins = ww_grown(pins, npins, &pins_room, sizeof *pins);
    struct pin added = {args->address, args->nbytes, COMING, args->lends != 0, -1, total};
    ww_insert(pins, &npins, sizeof *pins, i, &added);
    *total += args->nbytes;
    return CUDA_SUCCESS;
}

CUresult ww_pin(const struct ww_call *call, const struct ww_args_pin *args) {
    struct ww_job job = {.work = pin, .done = was_pinned, .a = args->address, .b = args->nbytes, .fd = -1};
    CUresult code = add_pin(args, &pinned);
    return code ? code : ww_heavy_for(call, job);
}

CUresult ww_borrow(const struct ww_call *call, const struct ww_args_pin *args) {
    struct ww_job job = {.work = borrow, .done = settle, .a = args->address, .b = args->nbytes, .c = args->serial};
    CUresult code = add_pin(args, &borrowed);
    return code ? code : ww_heavy_for(call, job);
}

CUresult ww_lend(const struct ww_args_free *args) {
    size_t i = find_pin(args->address);
    if (i >= npins || pins[i].at != args->address || pins[i].state != HERE || pins[i].fd < 0)
        return CUDA_ERROR_INVALID_VALUE;
    return send_pin(pins[i].at, pins[i].nbytes, pins[i].fd) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

static void was_unpinned(struct ww_job *job) {
    forget_pin(job->a);
    ww_answer(job->slot, job->seq, job->result, NULL, 0);
}

static void start_unpin(struct ww_barrier *barrier) {
    struct pin *p = pins + find_pin(barrier->key);
    p->state = GOING;
    struct ww_job job = {.work = unpin, .waits = 1, .done = was_unpinned, .a = p->at, .b = p->nbytes};
    ww_heavy_behind(barrier, job);
}

CUresult ww_unpin(const struct ww_call *call, const struct ww_args_free *args) {
    size_t i = find_pin(args->address);
    if (i >= npins || pins[i].at != args->address || pins[i].state != HERE)
        return CUDA_ERROR_INVALID_VALUE;
    pins[i].state = LEAVING;
    return ww_barrier_for(call, (struct ww_barrier){.then = start_unpin, .key = args->address});
}
