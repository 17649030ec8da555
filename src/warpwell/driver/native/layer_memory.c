/* Device memory, and pinned host memory. */
#include "layer.h"
#include "system.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PIN_TRIES 256
#define PIN_STEP (1ull << 16) /* alignment of addresses */
#define KEEP_BLOCKS 32
#define KEEP_BYTES (64u << 20)
#define LOOKS 50 /* tries, 2 ms apart, while kept memory is being unpinned */

/* -- device memory ------------------------------------------------------------------------------------------------- */

int ww_allocate(struct ww_device *d, uint16_t op, uint32_t stream, size_t nbytes, uint32_t flags, void *owner,
                CUdeviceptr *address) {
    uint64_t at = 0;
    int error = ww_call_alloc(d, op, stream, nbytes, &at, sizeof at);
    if (error)
        return error;
    if ((error = ww_range_add(&d->ranges, at, nbytes, WW_ON_DEVICE, flags, owner))) {
        ww_send_free(d, WW_OP_FREE, 0, at);
        return error == CUDA_ERROR_ALREADY_MAPPED ? CUDA_ERROR_UNKNOWN : error;
    }
    *address = at;
    return 0;
}

/* A block of a host pool that is free stays pinned for the next allocation of the same size. To unpin it would wait for
 * all work of the device, and with some drivers other threads that pin memory would wait for that, too. */
static pthread_mutex_t keeping = PTHREAD_MUTEX_INITIALIZER;
static struct kept {
    struct ww_device *device; /* NULL: no block */
    uint64_t life;
    struct ww_span range;
} kept[KEEP_BLOCKS];
static uint64_t kept_bytes;

static struct kept take_kept(struct kept *k) {
    struct kept was = *k;
    k->device = NULL;
    kept_bytes -= was.range.size;
    return was;
}

/* Keep a free block pinned, or return false. Unmap kept blocks of earlier lives of the device. */
static bool keep(struct ww_device *d, const struct ww_span *r) {
    uint64_t life = atomic_load(&d->life);
    struct kept *room = NULL;
    WW_LOCK(&keeping);
    for (struct kept *k = kept; k < kept + KEEP_BLOCKS; k++) {
        if (k->device == d && k->life != life) {
            struct kept old = take_kept(k);
            munmap((void *)(uintptr_t)old.range.start, old.range.size);
        }
        room = k->device ? room : k;
    }
    if (!room || !r->owner || d->facts.remote || kept_bytes + r->size > KEEP_BYTES)
        return false;
    *room = (struct kept){d, life, *r};
    kept_bytes += r->size;
    return true;
}

/* Take a kept block of this size and with these flags, or return NULL. */
static void *pin_kept(struct ww_device *d, size_t whole, uint32_t flags) {
    WW_LOCK(&keeping);
    for (struct kept *k = kept; k < kept + KEEP_BLOCKS; k++)
        if (k->device == d && k->life == atomic_load(&d->life) && k->range.size == whole && k->range.flags == flags)
            return (void *)(uintptr_t)take_kept(k).range.start;
    return NULL;
}

bool ww_unkeep(struct ww_device *d) {
    bool any = false;
    for (struct kept *k = kept; k < kept + KEEP_BLOCKS; k++) {
        pthread_mutex_lock(&keeping);
        struct kept was = k->device && (!d || k->device == d) ? take_kept(k) : (struct kept){0};
        pthread_mutex_unlock(&keeping);
        if (was.device)
            ww_unpin_posted(was.device, &was.range, was.life == atomic_load(&was.device->life));
        any |= was.device != NULL;
    }
    return any;
}

struct unpinning {
    struct ww_device *device;
    struct ww_span range;
    uint64_t life;
};

/* Does not wait, because other streams may wait for a caller in the thread of host functions. */
void ww_unpin_posted(struct ww_device *d, const struct ww_span *r, bool there) {
    if (there && !d->facts.remote)
        ww_send_free(d, WW_OP_UNPIN, 0, r->start);
    munmap((void *)(uintptr_t)r->start, r->size);
}

static void unpin_later(void *data, int code) {
    struct unpinning *u = data;
    bool there = !code && u->life == atomic_load(&u->device->life);
    if (!there || !keep(u->device, &u->range))
        ww_unpin_posted(u->device, &u->range, there);
    free(u);
}

int ww_unpin_in_stream(struct ww_device *d, uint32_t stream, struct ww_device *owner, const struct ww_span *r) {
    struct unpinning *u = malloc(sizeof *u);
    if (!u)
        return ww_unpin_taken(owner, r);
    *u = (struct unpinning){owner, *r, atomic_load(&owner->life)};
    int error = ww_host_after(d, stream, unpin_later, u);
    if (error) {
        free(u);
        return ww_unpin_taken(owner, r);
    }
    return 0;
}

/* -- pinned memory ------------------------------------------------------------------------------------------------- */

/* Reserve unused addresses in the range for pinned memory. Each try takes the addresses after the previous try's. */
static void *reserve(size_t nbytes) {
    static _Atomic uint64_t next = WW_PIN_LOWEST;
    for (int i = 0; i < PIN_TRIES; i++) {
        uint64_t step = (nbytes + PIN_STEP - 1) & ~(PIN_STEP - 1), at = atomic_fetch_add(&next, step);
        if (at + step > WW_PIN_HIGHEST) {
            atomic_store(&next, WW_PIN_LOWEST);
            continue;
        }
        if (ww_reserve((void *)(uintptr_t)at, nbytes))
            return (void *)(uintptr_t)at;
    }
    return NULL;
}

/* Receive the memory that the worker has allocated, and map it at the reserved addresses. */
static int map_pinned(struct ww_channel *c, void *at, size_t nbytes) {
    int fd = ww_receive_pinned(c, (uintptr_t)at, nbytes);
    bool good = fd >= 0 && mmap(at, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == at;
    if (fd >= 0)
        close(fd);
    if (good)
        madvise(at, nbytes, MADV_DONTFORK);
    return good ? 0 : CUDA_ERROR_OUT_OF_MEMORY;
}

static int unpin(struct ww_device *d, uint64_t at, size_t nbytes) {
    int error = d->facts.remote ? 0 : ww_call_free(d, WW_OP_UNPIN, 0, at, NULL, 0);
    munmap((void *)(uintptr_t)at, nbytes);
    return error;
}

int ww_unpin_taken(struct ww_device *d, const struct ww_span *r) {
    ww_unshare(r);
    return unpin(d, r->start, r->size);
}

static int pin_at(struct ww_device *d, struct ww_channel *c, void *at, size_t whole, bool lends) {
    pthread_mutex_lock(&c->pinning);
    int error = ww_call_pin(d, WW_OP_PIN, 0, (uintptr_t)at, whole, lends, 0, NULL, 0);
    int unmapped = error ? 0 : map_pinned(c, at, whole);
    pthread_mutex_unlock(&c->pinning);
    if (unmapped)
        unpin(d, (uintptr_t)at, whole);
    else if (error)
        munmap(at, whole);
    return error ? error : unmapped;
}

/* Allocate pinned memory for a device of another host: memory that only the program can access, so that copies use
 * staging. The limit is the same as a worker's. */
static int pin_here(struct ww_device *d, void **address, size_t whole, uint32_t flags, void *owner) {
    uint64_t most = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE) / 2;
    if (whole > most || ww_ranges_pinned(&d->ranges) > most - whole)
        return CUDA_ERROR_OUT_OF_MEMORY;
    void *at = reserve(whole);
    if (!at)
        return CUDA_ERROR_OUT_OF_MEMORY;
    int error = mprotect(at, whole, PROT_READ | PROT_WRITE) ? CUDA_ERROR_OUT_OF_MEMORY : 0;
    if (!error)
        error = ww_range_add(&d->ranges, (uintptr_t)at, whole, WW_PINNED_MEMORY, flags, owner);
    if (error)
        munmap(at, whole);
    else
        *address = at;
    return error == CUDA_ERROR_ALREADY_MAPPED ? CUDA_ERROR_OUT_OF_MEMORY : error;
}

int ww_pin(struct ww_device *d, void **address, size_t nbytes, uint32_t flags, void *owner) {
    size_t whole = (nbytes + 4095) & ~(size_t)4095;
    if (d->facts.remote)
        return pin_here(d, address, whole, flags, owner);
    struct ww_channel *c = ww_hold(d);
    struct timespec step = {.tv_nsec = 2000000};
    int error = c ? CUDA_ERROR_ALREADY_MAPPED : CUDA_ERROR_CONTEXT_IS_DESTROYED, looks = 0;
    void *at = NULL;
    bool lends = !owner && layer.ndevices > 1;
    if (c && owner && (at = pin_kept(d, whole, flags)))
        error = 0;
    for (int i = 0; i < PIN_TRIES && error == CUDA_ERROR_ALREADY_MAPPED; i++) {
        error = (at = reserve(whole)) ? pin_at(d, c, at, whole, lends) : CUDA_ERROR_OUT_OF_MEMORY;
        if (error == CUDA_ERROR_OUT_OF_MEMORY && (looks ? looks++ < LOOKS : ww_unkeep(d) && ++looks)) {
            nanosleep(&step, NULL); /* until ww_unkeep's memory is unpinned */
            error = CUDA_ERROR_ALREADY_MAPPED;
        }
    }
    if (c)
        ww_release(c);
    if (!error && (error = ww_range_add(&d->ranges, (uintptr_t)at, whole, WW_PINNED_MEMORY, flags, owner)))
        unpin(d, (uintptr_t)at, whole);
    if (error)
        return error == CUDA_ERROR_ALREADY_MAPPED ? CUDA_ERROR_OUT_OF_MEMORY : error;
    if (lends)
        atomic_fetch_add(&ww_pins, 1);
    *address = at;
    return 0;
}

/* -- registered pages of the program ------------------------------------------------------------------------------- */

/* Return true if the whole range is writable private anonymous memory, and not a stack; or, with `shared`, writable
 * shared memory of a file, such as a memfd. */
static bool has_pages(uintptr_t at, size_t nbytes, bool shared) {
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512], rights[5];
    uintptr_t start, end;
    unsigned long inode;
    while (maps && nbytes && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s %*s %*s %lu", &start, &end, rights, &inode) != 4 ||
            at < start || at >= end)
            continue;
        if (strcmp(rights, shared ? "rw-s" : "rw-p") != 0 || !inode == shared || strstr(line, "[stack"))
            break;
        size_t part = nbytes < end - at ? nbytes : end - at;
        at += part;
        nbytes -= part;
    }
    if (maps)
        fclose(maps);
    return maps && !nbytes;
}

/* Writes of other threads to the pages between memcpy and mremap are lost. */
int ww_pin_pages(struct ww_device *d, void *address, size_t nbytes, void **alias) {
    struct ww_span r;
    if (d->facts.remote)
        return ww_refused("cuMemHostRegister of memory that a device of another host maps");
    if (((uintptr_t)address | nbytes) % 4096 || !has_pages((uintptr_t)address, nbytes, false))
        return ww_refused("cuMemHostRegister of memory that the device maps, other than whole private pages,");
    int error = ww_pin(d, alias, nbytes, CU_MEMHOST_DEVICEMAP, NULL);
    if (error)
        return error;
    memcpy(*alias, address, nbytes);
    /* With an old size of 0, mremap maps the same shared pages a second time, over the program's pages. */
    if (mremap(*alias, 0, nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, address) == address) {
        madvise(address, nbytes, MADV_DOFORK); /* a forked child shares them */
        return 0;
    }
    if (ww_range_take(&d->ranges, (uintptr_t)*alias, WW_PINNED_MEMORY, &r))
        ww_unpin_taken(d, &r);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Without this, a forked child would share the pages, and the program could not register them again. If the program has
 * freed its memory, or the system is out of memory, nothing changes. */
void ww_unpin_pages(void *address, size_t nbytes) {
    if (!has_pages((uintptr_t)address, nbytes, true))
        return;
    void *own = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (own == MAP_FAILED)
        return;
    memcpy(own, address, nbytes);
    if (mremap(own, nbytes, nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, address) != address)
        munmap(own, nbytes);
}
