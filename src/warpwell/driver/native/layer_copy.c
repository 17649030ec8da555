/* Copies and memsets.
 *
 * Pageable memory is read, or written, before a call returns. Pinned memory that the copy's device maps is read and
 * written by the device, in the order of the stream. The bytes of small copies are in the entry itself.
 */
#include "layer.h"
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#define OUT_AHEAD 8u   /* limit of places for one copy from the device */
#define FAR_AHEAD 32u  /* the same if the device is on another host: the round trip takes longer */
#define FEW_PLACES 16u /* with fewer free places, a copy from the device synchronizes its stream first */

#define SMALL_PIECES (4u << 20) /* a copy up to this size is cut into smaller pieces: the device begins sooner */
#define STREAMED (8u << 20)     /* from this size on, a copy to the host uses non-temporal stores */
#define PART (2u << 20)         /* minimum bytes of each part of a large copy, which has a thread of its own */
#define PARTS 4u                /* maximum number of threads of one copy, including the caller's */
#define PART_STACK (1u << 20)
_Static_assert(PART >= WW_PLACE_BYTES, "a part ends at a place's end");

struct copy {
    struct ww_device *device; /* device of the stream */
    uint32_t stream;
    bool waits; /* a synchronous call, or the last row of one */
    uint64_t to, from;
    size_t nbytes;
    bool begins;    /* a synchronous call, or the first row of one: waits for other devices' legacy streams */
    uint32_t piece; /* size in bytes; copy_in and copy_out set it */
    bool seen;      /* an end is pinned memory, which the program may access as soon as the call returns */
};

static uint32_t piece_of(const struct copy *k) {
    return k->nbytes <= SMALL_PIECES && !k->device->facts.remote ? WW_PLACE_BYTES / 4 : WW_PLACE_BYTES;
}

/* Wait until all calls that were posted to a stream are done. */
static int stream_done(struct ww_device *d, uint32_t stream) {
    return ww_call(d, WW_OP_STREAM_SYNC, stream, NULL, 0, NULL, 0);
}

/* Return WW_DONE if a synchronous call must wait until it is done: if an end is pinned memory; on a stream other than
 * the legacy stream, because no other stream is ordered after it; and if other devices use this device's memory,
 * because their streams are not ordered after its legacy stream. */
static uint32_t waiting(const struct copy *k) {
    bool others = k->seen || k->stream != WW_LEGACY || atomic_load_explicit(&k->device->shared, memory_order_relaxed);
    return k->waits && others ? WW_DONE : 0;
}

/* Finish a call. If it is synchronous but has not waited, order all calls that are posted later after it. */
static int posted(const struct copy *k, uint32_t flags, int error) {
    return error || flags || !k->waits ? error : ww_mark_copied(k->device);
}

/* -- threads of a large copy ----------------------------------------------------------------------------------------

One thread copies between the program's memory and places at a third of the device's rate. So a large copy is cut into
parts, each a copy in the same stream. New threads carry out all parts but the first; they end before the call returns.
*/

struct part {
    struct copy copy;
    int (*work)(const struct copy *k);
    int error;
    bool apart;
    bool in_host_thread; /* the caller's: a stream that its host function holds must not hold the parts */
    pthread_t thread;
};

static void *carry(void *p) {
    struct part *part = p;
    ww_in_host_thread = part->in_host_thread;
    part->error = part->work(&part->copy);
    return NULL;
}

/* Carry out a part in a new thread with all signals blocked, or in this thread if a new one cannot be created. */
static void begin_part(struct part *part, const pthread_attr_t *how) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    part->apart = !pthread_create(&part->thread, how, carry, part);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (!part->apart)
        carry(part);
}

static int in_parts(const struct copy *k, int (*work)(const struct copy *k)) {
    size_t most = layer.many_cores ? k->nbytes / PART : 1, n = most < PARTS ? most : PARTS;
    size_t each = n > 1 ? (k->nbytes / n + WW_PLACE_BYTES - 1) / WW_PLACE_BYTES * WW_PLACE_BYTES : 0;
    struct part parts[PARTS];
    pthread_attr_t how;
    int cancel, error;
    if (n < 2 || pthread_attr_init(&how))
        return work(k);
    n = (k->nbytes + each - 1) / each; /* fewer, because `each` was rounded up */
    pthread_attr_setstacksize(&how, PART_STACK);
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel); /* the threads use `parts` on this stack */
    for (size_t i = n; i-- > 0;) {
        size_t at = i * each;
        parts[i] = (struct part){.copy = *k, .work = work, .in_host_thread = ww_in_host_thread};
        parts[i].copy.to += at;
        parts[i].copy.from += at;
        parts[i].copy.nbytes = i + 1 < n ? each : k->nbytes - at;
        if (i)
            begin_part(&parts[i], &how);
    }
    error = work(&parts[0].copy);
    for (size_t i = 1; i < n; i++) {
        if (parts[i].apart)
            pthread_join(parts[i].thread, NULL);
        error = error ? error : parts[i].error;
    }
    pthread_attr_destroy(&how);
    pthread_setcancelstate(cancel, NULL);
    return error;
}

/* -- copies from the host ------------------------------------------------------------------------------------------ */

static int in_entry(const struct copy *k) {
    struct ww_args_move args = {k->to, k->nbytes};
    struct ww_post p;
    uint32_t flags = waiting(k);
    int error = ww_begin(k->device, WW_OP_IN, k->stream, flags, sizeof args + k->nbytes, &p);
    if (error)
        return error;
    memcpy(p.entry + 1, &args, sizeof args);
    memcpy((char *)(p.entry + 1) + sizeof args, (const void *)(uintptr_t)k->from, k->nbytes);
    return posted(k, flags, ww_finish(&p));
}

static int in_piece(const struct copy *k, size_t at, uint32_t nbytes, uint32_t flags) {
    struct ww_args_move args = {k->to + at, nbytes};
    const void *from = (const void *)(uintptr_t)(k->from + at);
    return ww_place_fill(k->device, WW_OP_IN, k->stream, flags, from, nbytes, &args, sizeof args);
}

static int in_pieces(const struct copy *k) {
    int error = 0;
    uint32_t flags = waiting(k);
    for (size_t at = 0; at < k->nbytes && !error; at += k->piece) {
        size_t left = k->nbytes - at;
        error = in_piece(k, at, left < k->piece ? (uint32_t)left : k->piece, left > k->piece ? 0 : flags);
    }
    return error;
}

static int copy_in(struct copy *k) {
    k->piece = piece_of(k);
    /* Memory that is pinned for a remote device is read here, and an earlier host function may still write to it. */
    if (k->device->facts.remote && atomic_load(&k->device->holds))
        ww_host_wait(k->device, k->stream);
    return k->nbytes <= WW_SMALL ? in_entry(k) : posted(k, waiting(k), in_parts(k, in_pieces));
}

/* -- copies to the host -------------------------------------------------------------------------------------------- */

struct piece {
    struct ww_channel *channel;
    uint32_t place, nbytes;
};

static int out_post(const struct copy *k, size_t at, bool waits, struct piece *q) {
    size_t left = k->nbytes - at;
    q->nbytes = left < k->piece ? (uint32_t)left : k->piece;
    struct ww_args_move args = {k->from + at, q->nbytes};
    int error = ww_place_take(k->device, k->stream, waits, true, &q->channel, &q->place);
    if (error)
        return error;
    error = ww_place_send(k->device, WW_OP_OUT, k->stream, 0, q->channel, q->place, q->nbytes, &args, sizeof args);
    if (error)
        ww_place_drop(k->device, q->channel, q->place);
    return error;
}

/* Copy with non-temporal stores. They do not read the target's cache lines first, and do not evict the places, which
 * the device has just written into the cache. */
static void copy_streamed(char *to, const char *from, size_t nbytes) {
#if defined(__x86_64__)
    size_t head = -(uintptr_t)to & 63, i = 0;
    if (nbytes < 128)
        head = nbytes;
    memcpy(to, from, head);
    to += head, from += head, nbytes -= head;
    for (; i + 64 <= nbytes; i += 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)(from + i)), b = _mm_loadu_si128((const __m128i *)(from + i + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + i + 32)),
                d = _mm_loadu_si128((const __m128i *)(from + i + 48));
        _mm_stream_si128((__m128i *)(to + i), a);
        _mm_stream_si128((__m128i *)(to + i + 16), b);
        _mm_stream_si128((__m128i *)(to + i + 32), c);
        _mm_stream_si128((__m128i *)(to + i + 48), d);
    }
    _mm_sfence();
    memcpy(to + i, from + i, nbytes - i);
#else
    memcpy(to, from, nbytes);
#endif
}

static int out_take(const struct copy *k, size_t at, const struct piece *q) {
    const char *from = (const char *)q->channel->staging + (size_t)q->place * WW_PLACE_BYTES;
    char *to = (char *)(uintptr_t)(k->to + at);
    int error = ww_place_wait(q->channel, q->place);
    if (!error && k->nbytes >= STREAMED)
        copy_streamed(to, from, q->nbytes);
    else if (!error)
        memcpy(to, from, q->nbytes);
    ww_place_drop(k->device, q->channel, q->place);
    return error;
}

/* A thread that holds places does not wait for another place, because two such threads would deadlock. */
static int out_pieces(const struct copy *k) {
    struct piece pieces[FAR_AHEAD];
    uint32_t ahead = k->device->facts.remote ? FAR_AHEAD : OUT_AHEAD;
    size_t n = (k->nbytes + k->piece - 1) / k->piece, posted = 0, taken = 0;
    int error = 0;
    while (taken < posted || (posted < n && !error)) {
        bool none = true;
        if (posted < n && !error && posted - taken < ahead) {
            int code = out_post(k, posted * (size_t)k->piece, posted == taken, &pieces[posted % ahead]);
            none = code == CUDA_ERROR_NOT_READY;
            posted += !code;
            error = none ? 0 : code;
        }
        if (none && taken < posted) {
            int failed = out_take(k, taken * (size_t)k->piece, &pieces[taken % ahead]);
            error = error ? error : failed;
            taken++;
        }
    }
    return error;
}

static int copy_out(struct copy *k) {
    k->piece = piece_of(k);
    bool first = k->nbytes > WW_PLACE_BYTES || ww_places_free(k->device) < FEW_PLACES;
    int error = first ? stream_done(k->device, k->stream) : 0;
    if (!error)
        error = in_parts(k, out_pieces);
    return error ? error : ww_earlier(k->device);
}

/* -- copies between addresses that a worker can access ------------------------------------------------------------- */

/* Post a call that copies or fills. */
static int post(const struct copy *k, uint16_t op, const void *args, size_t nargs) {
    uint32_t flags = waiting(k);
    return posted(k, flags, ww_send_flags(k->device, op, k->stream, flags, args, nargs));
}

static int copy_there(const struct copy *k) {
    struct ww_args_copy args = {k->to, k->from, k->nbytes};
    return post(k, WW_OP_COPY, &args, sizeof args);
}

static bool reaches(struct ww_device *d, struct ww_device *owner, const struct ww_span *r) {
    return owner == d || (r->type == WW_ON_DEVICE && ww_reach(d, owner));
}

/* Copy from or to memory of other devices that the stream's device maps. A synchronous call begins after the work in
 * the legacy streams of these devices, and is done when it returns. */
static int copy_directly(const struct copy *k, struct ww_device *to, struct ww_device *from) {
    struct ww_device *ends[2] = {to, from};
    struct ww_args_copy args = {k->to, k->from, k->nbytes};
    int error = 0;
    for (int i = 0; i < 2 && !error; i++)
        error = ends[i] == k->device ? 0 : k->begins ? stream_done(ends[i], WW_LEGACY) : ww_context_code(ends[i]);
    if (error)
        return error;
    error = ww_send_flags(k->device, WW_OP_COPY, k->stream, k->waits ? WW_DONE : 0, &args, sizeof args);
    for (int i = 0; i < 2; i++)
        if (ends[i] != k->device)
            ww_touch(k->device, ends[i]);
    return error;
}

/* Copy between two devices through a buffer of the program, after the earlier work of the stream. The copy is done when
 * this function returns. */
static int copy_across(const struct copy *k, struct ww_device *to, struct ww_device *from) {
    char *buffer = malloc(WW_PLACE_BYTES);
    int error = buffer ? stream_done(k->device, k->stream) : CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t at = 0; at < k->nbytes && !error; at += WW_PLACE_BYTES) {
        size_t left = k->nbytes - at, n = left < WW_PLACE_BYTES ? left : WW_PLACE_BYTES;
        struct copy out = {from, WW_LEGACY, true, (uintptr_t)buffer, k->from + at, n, true, 0, false};
        struct copy in = {to, WW_LEGACY, true, k->to + at, (uintptr_t)buffer, n, true, 0, false};
        if (!(error = copy_out(&out)) && !(error = copy_in(&in)) && left <= WW_PLACE_BYTES)
            error = stream_done(to, WW_LEGACY);
    }
    free(buffer);
    return error;
}

/* -- choice of a method -------------------------------------------------------------------------------------------- */

/* Return the device whose worker can access an address, and the address's span. NULL: only the program can access it.
 */
static struct ww_device *end_of(const struct copy *k, uint64_t at, struct ww_span *r) {
    if (ww_range_find(&k->device->ranges, at, r))
        return r->type == WW_PINNED_MEMORY && k->device->facts.remote ? NULL : k->device;
    struct ww_device *d = ww_range_owner(at, r);
    if (!d || r->type != WW_PINNED_MEMORY)
        return d;
    if (k->stream != WW_RECORDED) {
        ww_use_pinned(k->device);
        d = ww_range_owner(at, r);
    }
    return d && ww_maps_pinned(k->device, d, r) ? k->device : NULL; /* NULL: copied like pageable memory */
}

static int dispatch(struct copy *k) {
    struct ww_span to, from;
    struct ww_device *there = end_of(k, k->to, &to), *here = end_of(k, k->from, &from);
    if ((there && !ww_range_holds(&to, k->to, k->nbytes)) || (here && !ww_range_holds(&from, k->from, k->nbytes)))
        return CUDA_ERROR_INVALID_VALUE;
    k->seen = (there && to.type == WW_PINNED_MEMORY) || (here && from.type == WW_PINNED_MEMORY);
    if (there == k->device && here == k->device)
        return copy_there(k);
    if (there && here && reaches(k->device, there, &to) && reaches(k->device, here, &from))
        return copy_directly(k, there, here);
    if (k->stream == WW_RECORDED) /* do not wait for places: streams that have places may wait for this thread */
        return ww_refused("copies of plain memory between kernels and conditional nodes of a graph, or within these");
    if (there && here)
        return copy_across(k, there, here);
    struct copy other = *k; /* memory of another device: in its legacy stream, after this stream's earlier work */
    int error = 0;
    if ((there && there != k->device) || (here && here != k->device)) {
        error = stream_done(k->device, k->stream);
        other.device = there ? there : here;
        other.stream = WW_LEGACY;
        other.waits = true;
    }
    if (there && !error)
        return copy_in(&other);
    if (here && !error)
        return copy_out(&other);
    if (!error && !(error = stream_done(k->device, k->stream)))
        memmove((void *)(uintptr_t)k->to, (const void *)(uintptr_t)k->from, k->nbytes);
    return error;
}

int ww_copy_line(struct ww_device *d, uint32_t stream, uint64_t to, uint64_t from, size_t nbytes, bool waits) {
    struct copy k = {d, stream, waits, to, from, nbytes, waits, 0, false};
    return dispatch(&k);
}

/* -- rows and boxes ------------------------------------------------------------------------------------------------ */

/* Return the address at which one end of a copy begins, or 0 if it is an array or invalid. */
static uint64_t start_of(const struct cu_end3 *e) {
    uint64_t at = e->type == CU_MEMORY_HOST ? (uintptr_t)e->host : e->device;
    if (!at || e->type == CU_MEMORY_ARRAY || e->type < CU_MEMORY_HOST || e->type > CU_MEMORY_UNIFIED)
        return 0;
    return at + e->x + e->y * e->pitch + e->z * e->pitch * e->height;
}

/* Compute the bytes in front of an end's first row, and from there to the end of its last row. Return false on
 * overflow.
 */
static bool extent_of(const struct cu_end3 *e, const struct cu_copy3 *c, size_t *before, size_t *nbytes) {
    size_t rows = e->height ? e->height : c->height;
    return !__builtin_mul_overflow(e->z, e->height, before) && !__builtin_add_overflow(*before, e->y, before) &&
           !__builtin_mul_overflow(*before, e->pitch, before) && !__builtin_add_overflow(*before, e->x, before) &&
           !__builtin_mul_overflow(c->depth - 1, rows, nbytes) &&
           !__builtin_add_overflow(*nbytes, c->height - 1, nbytes) &&
           !__builtin_mul_overflow(*nbytes, e->pitch, nbytes) && !__builtin_add_overflow(*nbytes, c->width, nbytes);
}

static int check_end(struct ww_device *d, const struct cu_end3 *e, const struct cu_copy3 *c) {
    struct copy k = {.device = d, .stream = WW_RECORDED}; /* ww_graphs may be held: do not wait for other devices */
    struct ww_span r;
    uint64_t at = start_of(e);
    size_t rows = e->height ? e->height : c->height, before, nbytes;
    if (e->type == CU_MEMORY_ARRAY)
        return ww_refused("copies of arrays");
    if (!at || !extent_of(e, c, &before, &nbytes) || at < before || at + nbytes < at ||
        (c->height > 1 && e->pitch < c->width) || (c->depth > 1 && rows < c->height))
        return CUDA_ERROR_INVALID_VALUE;
    struct ww_device *owner = end_of(&k, at, &r);
    if (!owner)
        return e->type == CU_MEMORY_DEVICE && !ww_range_owner(at, &r) ? CUDA_ERROR_INVALID_VALUE : 0;
    return ww_range_holds(&r, at, nbytes) ? 0 : CUDA_ERROR_INVALID_VALUE;
}

/* Return 0 if both ends of the copy are valid memory. */
int ww_copy_check(struct ww_device *d, const struct cu_copy3 *c) {
    if (!c->width || !c->height || !c->depth)
        return 0;
    int error = check_end(d, &c->to, c);
    return error ? error : check_end(d, &c->from, c);
}

/* Post the rows of a box one after another; adjacent rows, and adjacent planes, are one copy. */
int ww_copy_post(struct ww_device *d, uint32_t stream, const struct cu_copy3 *c, bool waits) {
    uint64_t to = start_of(&c->to), from = start_of(&c->from);
    size_t row = c->width, rows = c->height, planes = c->depth;
    size_t plane_to = c->to.pitch * (c->to.height ? c->to.height : rows);
    size_t plane_from = c->from.pitch * (c->from.height ? c->from.height : rows);
    int error = ww_copy_check(d, c);
    if (error || !row || !rows || !planes)
        return error;
    if (rows == 1 || (c->to.pitch == row && c->from.pitch == row)) { /* the rows of a plane are adjacent */
        row *= rows;
        rows = 1;
        if (planes > 1 && plane_to == row && plane_from == row) {
            row *= planes;
            planes = 1;
        }
    }
    for (size_t z = 0; z < planes && !error; z++)
        for (size_t y = 0; y < rows && !error; y++) {
            struct copy k = {d,
                             stream,
                             waits && z + 1 == planes && y + 1 == rows,
                             to + z * plane_to + y * c->to.pitch,
                             from + z * plane_from + y * c->from.pitch,
                             row,
                             waits && !z && !y,
                             0,
                             false};
            error = dispatch(&k);
        }
    return error;
}

/* -- memsets ------------------------------------------------------------------------------------------------------- */

/* Fill memory that is pinned for a device of another host, after the stream's earlier work: only the program has it. */
static int fill_here(struct ww_device *d, uint32_t stream, uint64_t to, const struct cu_node_set *s, size_t count) {
    int error = stream_done(d, stream);
    for (size_t i = 0; i < count * s->width && !error; i += s->width)
        memcpy((char *)(uintptr_t)to + i, &s->value, s->width);
    return error;
}

/* Return the device of the memory that a memset writes, or NULL if the memset is invalid. */
static struct ww_device *set_owner(const struct cu_node_set *s, struct ww_span *r) {
    size_t row = s->columns * s->width;
    struct ww_device *owner = ww_range_owner(s->to, r);
    if (!owner || (s->width != 1 && s->width != 2 && s->width != 4) || s->to % s->width || s->columns > SIZE_MAX / 4 ||
        (s->rows > 1 && (s->pitch < row || s->pitch % s->width || s->rows - 1 > (SIZE_MAX / 2 - row) / s->pitch)))
        return NULL;
    return ww_range_holds(r, s->to, (s->rows - 1) * s->pitch + row) ? owner : NULL;
}

int ww_set_check(const struct cu_node_set *s) {
    struct ww_span r;
    return !s->columns || !s->rows ? CUDA_ERROR_INVALID_VALUE : set_owner(s, &r) ? 0 : CUDA_ERROR_INVALID_VALUE;
}

static int fill_row(struct copy *k, uint64_t to, const struct cu_node_set *s, size_t count) {
    struct ww_args_memset args = {to, count, s->value, s->width};
    return post(k, WW_OP_MEMSET, &args, sizeof args);
}

int ww_set_post(struct ww_device *d, uint32_t stream, const struct cu_node_set *s, bool waits) {
    struct copy k = {.device = d, .stream = stream};
    struct ww_span r;
    struct ww_device *owner = set_owner(s, &r);
    size_t columns = s->columns, rows = s->rows;
    int error = 0;
    if (!owner)
        return CUDA_ERROR_INVALID_VALUE;
    bool here = r.type == WW_PINNED_MEMORY && owner->facts.remote;
    if (owner != d && !here) {
        if ((error = stream_done(d, stream)))
            return error;
        k.device = owner;
        k.stream = WW_LEGACY;
    }
    if (s->pitch == columns * s->width) {
        columns *= rows;
        rows = 1;
    }
    for (size_t y = 0; y < rows && !error; y++) {
        k.waits = (waits || owner != d) && y + 1 == rows;
        k.seen = r.type == WW_PINNED_MEMORY;
        error = here ? fill_here(d, stream, s->to + y * s->pitch, s, columns)
                     : fill_row(&k, s->to + y * s->pitch, s, columns);
    }
    return error;
}
