/* Device memory of one client: a reserved range of addresses, mapped where it is used.
 *
 * One array contains all blocks, sorted by address; together they cover the whole range. Only the executor changes the
 * array. The heavy thread makes the driver calls that may block (create, map and unmap memory), for a block that is
 * BUSY until they have returned.
 */
#include "worker.h"

#include <stdlib.h>
#include <string.h>

struct ww_arena ww_arena;

void ww_arena_init(struct ww_arena *a, uint64_t base, uint64_t bytes, uint64_t piece, uint64_t quota) {
    memset(a, 0, sizeof *a);
    a->base = base;
    a->bytes = bytes;
    a->piece = piece;
    a->quota = quota;
    a->blocks = ww_grown(a->blocks, a->n + 1, &a->room, sizeof *a->blocks);
    a->blocks[0] = (struct ww_block){.at = base, .size = bytes, .state = WW_UNMAPPED};
    a->n = 1;
}

/* Return the index of the block that contains address `at`, or -1. */
static ptrdiff_t find(const struct ww_arena *a, uint64_t at) {
    if (at < a->base || at - a->base >= a->bytes)
        return -1;
    return (ptrdiff_t)ww_first_behind(a->blocks, a->n, sizeof *a->blocks, at);
}

/* Shorten block i to `size` bytes. The rest becomes the next block, in the same state. */
static void cut(struct ww_arena *a, size_t i, uint64_t size) {
    if (a->blocks[i].size == size)
        return;
    a->blocks = ww_grown(a->blocks, a->n + 1, &a->room, sizeof *a->blocks);
    struct ww_block rest = a->blocks[i];
    rest.at += size;
    rest.size -= size;
    ww_insert(a->blocks, &a->n, sizeof rest, i + 1, &rest);
    a->blocks[i].size = size;
}

/* Merge block i with adjacent blocks in the same state. Return the index of the merged block. */
static size_t join(struct ww_arena *a, size_t i) {
    if (i + 1 < a->n && a->blocks[i + 1].state == a->blocks[i].state) {
        a->blocks[i].size += a->blocks[i + 1].size;
        ww_remove(a->blocks, &a->n, sizeof *a->blocks, i + 1);
    }
    if (i && a->blocks[i - 1].state == a->blocks[i].state) {
        a->blocks[i - 1].size += a->blocks[i].size;
        ww_remove(a->blocks, &a->n, sizeof *a->blocks, i);
        i--;
    }
    return i;
}

static uint64_t rounded(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

/* Allocate `n` bytes of mapped memory. Return the address, or 0. Best fit, so that large blocks are kept for large
 * allocations. */
uint64_t ww_arena_take(struct ww_arena *a, uint64_t n) {
    n = rounded(n, WW_ALIGN);
    ptrdiff_t best = -1;
    for (size_t i = 0; i < a->n && n <= a->free; i++) {
        if (a->blocks[i].state != WW_FREE || a->blocks[i].size < n)
            continue;
        if (best < 0 || a->blocks[i].size < a->blocks[best].size)
            best = (ptrdiff_t)i;
        if (a->blocks[best].size == n)
            break;
    }
    if (best < 0)
        return 0;
    cut(a, (size_t)best, n);
    a->blocks[best].state = WW_USED;
    a->free -= n;
    a->used += n;
    return a->blocks[best].at;
}

/* Choose a range of at least `n` bytes for the heavy thread to map. Return 0 if there is no room or the quota is used
 * up. */
uint64_t ww_arena_choose(struct ww_arena *a, uint64_t n, uint64_t *size) {
    n = rounded(n, a->piece);
    if (a->quota && a->mapped + n > a->quota)
        return 0;
    for (size_t i = 0; i < a->n; i++) {
        if (a->blocks[i].state != WW_UNMAPPED || a->blocks[i].size < n)
            continue;
        cut(a, i, n);
        a->blocks[i].state = WW_BUSY;
        a->mapped += n;
        *size = n;
        return a->blocks[i].at;
    }
    return 0;
}

static void add_chunk(struct ww_arena *a, struct ww_chunk chunk) {
    a->chunks = ww_grown(a->chunks, a->nchunks, &a->chunk_room, sizeof *a->chunks);
    a->chunks[a->nchunks++] = chunk;
}

/* The heavy thread is done with a BUSY range, which is mapped to the memory `handle`, or not mapped if that is 0. */
void ww_arena_settle(struct ww_arena *a, uint64_t at, uint64_t size, uint64_t handle) {
    ptrdiff_t i = find(a, at);
    if (i < 0 || a->blocks[i].at != at || a->blocks[i].size != size || a->blocks[i].state != WW_BUSY)
        ww_die("the table of blocks is broken");
    a->blocks[i].state = handle ? WW_FREE : WW_UNMAPPED;
    if (handle) {
        a->free += size;
        add_chunk(a, (struct ww_chunk){.at = at, .size = size, .handle = handle});
    } else {
        a->mapped -= size;
    }
    join(a, (size_t)i);
}

/* Choose an unused chunk to unmap, if more than `keep` bytes are unused. Return 0 if there is no such chunk, else 1. */
int ww_arena_spare(struct ww_arena *a, uint64_t keep, struct ww_chunk *out) {
    for (size_t k = a->nchunks; k-- > 0 && a->free > keep;) {
        struct ww_chunk c = a->chunks[k];
        ptrdiff_t i = find(a, c.at);
        struct ww_block b = a->blocks[i];
        if (b.state != WW_FREE || c.at - b.at + c.size > b.size)
            continue;
        if (c.at > b.at)
            cut(a, (size_t)i++, c.at - b.at);
        cut(a, (size_t)i, c.size);
        a->blocks[i].state = WW_BUSY;
        a->free -= c.size;
        a->chunks[k] = a->chunks[--a->nchunks];
        *out = c;
        return 1;
    }
    return 0;
}

/* Return the size of the allocation that begins at `at`, or 0. */
static uint64_t size_of(const struct ww_arena *a, uint64_t at) {
    ptrdiff_t i = find(a, at);
    return i >= 0 && a->blocks[i].at == at && a->blocks[i].state == WW_USED ? a->blocks[i].size : 0;
}

/* Return 1 if one USED or FREEING block contains [at, at + n): calls read before a free may still use the memory. */
int ww_arena_holds(const struct ww_arena *a, uint64_t at, uint64_t n) {
    ptrdiff_t i = find(a, at);
    if (i < 0)
        return 0;
    const struct ww_block *b = a->blocks + i;
    return (b->state == WW_USED || b->state == WW_FREEING) && n <= b->size && at - b->at <= b->size - n;
}

int ww_arena_freeing(struct ww_arena *a, uint64_t at) {
    if (!size_of(a, at))
        return 0;
    a->blocks[find(a, at)].state = WW_FREEING;
    return 1;
}

/* Free a FREEING block, which the device does not use any more. */
void ww_arena_free(struct ww_arena *a, uint64_t at) {
    ptrdiff_t i = find(a, at);
    if (i < 0 || a->blocks[i].at != at || a->blocks[i].state != WW_FREEING)
        ww_die("the table of blocks is broken");
    a->blocks[i].state = WW_FREE;
    a->free += a->blocks[i].size;
    a->used -= a->blocks[i].size;
    join(a, (size_t)i);
}
