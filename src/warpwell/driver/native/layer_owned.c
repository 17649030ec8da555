/* User objects of graphs, and the memory of ALLOC nodes. Both are freed after ww_graphs is unlocked, because
 * destructors of user objects may be slow, and memory is freed only when no device uses it. Memory is allocated when
 * its node is created, and stays until no graph and no plan refers to it. */
#include "layer.h"
#include <stdlib.h>

pthread_mutex_t ww_graphs = PTHREAD_MUTEX_INITIALIZER;
static struct { /* objects without references, which are freed after ww_graphs is unlocked */
    struct ww_user *users;
    struct ww_graph_memory *memory;
} due;

void ww_user_retain(struct ww_user *user, uint32_t count) { user->refs += count; }

void ww_user_release(struct ww_user *user, uint32_t count) {
    user->refs -= count < user->refs ? count : user->refs;
    if (user->refs)
        return;
    ww_object_drop(user->object, WW_USER, NULL);
    user->next = due.users;
    due.users = user;
}

static void due_memory(struct ww_graph_memory *m) {
    m->next = due.memory;
    due.memory = m;
}

/* -- memory of graphs ---------------------------------------------------------------------------------------------- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct account { /* bytes of a device's graph memory; freed memory counts as used until it is trimmed */
    size_t used, used_high, reserved, reserved_high, freed, idle;
    uint64_t trims;
} accounts[WW_DEVICES];

static struct account *account_of(const struct ww_device *d) { return &accounts[d - layer.devices]; }

struct ww_graph_memory *ww_graph_memory_new(struct ww_device *d, size_t nbytes, bool on_host, int *error) {
    struct ww_graph_memory *m = calloc(1, sizeof *m);
    void *at = NULL;
    if (!m) {
        *error = CUDA_ERROR_OUT_OF_MEMORY;
        return NULL;
    }
    m->refs = 1;
    m->device = d;
    m->life = atomic_load(&d->life);
    m->nbytes = nbytes;
    m->on_host = on_host;
    *error = on_host ? ww_pin(d, &at, nbytes, CU_MEMHOST_PORTABLE | CU_MEMHOST_DEVICEMAP | WW_OF_GRAPH, m)
                     : ww_allocate(d, WW_OP_ALLOC, 0, nbytes, WW_OF_GRAPH, m, &m->address);
    if (*error) {
        free(m);
        return NULL;
    }
    if (on_host)
        m->address = (uintptr_t)at;
    struct account *a = account_of(d);
    WW_LOCK(&lock);
    a->reserved += nbytes;
    if (a->reserved > a->reserved_high)
        a->reserved_high = a->reserved;
    return m;
}

void ww_graph_memory_live(struct ww_graph_memory *m) {
    struct account *a = account_of(m->device);
    if (atomic_exchange(&m->live, 1))
        return;
    WW_LOCK(&lock);
    if (m->freed_in == a->trims + 1)
        a->freed -= m->nbytes;
    else
        a->used += m->nbytes;
    if (a->used > a->used_high)
        a->used_high = a->used;
}

bool ww_graph_memory_freed(struct ww_graph_memory *m) {
    struct account *a = account_of(m->device);
    if (!atomic_exchange(&m->live, 0))
        return false;
    WW_LOCK(&lock);
    a->freed += m->nbytes;
    m->freed_in = a->trims + 1;
    return true;
}

/* Drop a reference, with ww_graphs held. The last one removes the memory's span, so that calls with its address fail.
 */
void ww_graph_memory_drop(struct ww_graph_memory *m) {
    if (atomic_fetch_sub(&m->refs, 1) != 1)
        return;
    ww_graph_memory_freed(m);
    struct account *a = account_of(m->device);
    pthread_mutex_lock(&lock);
    a->idle += m->nbytes; /* until the next trim it is reserved, and used if a launch has allocated it */
    pthread_mutex_unlock(&lock);
    if (m->life != atomic_load(&m->device->life) ||
        !ww_range_take(&m->device->ranges, m->address, m->on_host ? WW_PINNED_MEMORY : WW_ON_DEVICE, &m->range))
        m->range.size = 0;
    due_memory(m);
}

static bool is_unused(void *data) { return ww_peers_are_done(&((struct ww_graph_memory *)data)->users); }

static void free_unused(void *data, int code) {
    struct ww_graph_memory *m = data;
    if (!code)
        ww_send_free(m->device, WW_OP_FREE, 0, m->address);
    free(m);
}

static void free_memory(struct ww_graph_memory *m) {
    if (m->range.size && m->on_host && ww_in_host_thread) { /* at the end of a launch behind a host function */
        ww_unpin_posted(m->device, &m->range, m->life == atomic_load(&m->device->life));
    } else if (m->range.size && m->on_host) {
        ww_unpin_taken(m->device, &m->range);
    } else if (m->range.size && m->life == atomic_load(&m->device->life)) {
        m->users = (struct ww_peers){.owner = m->device};
        if (ww_in_host_thread && !is_unused(m)) { /* a device that uses it may wait for this thread */
            ww_host_post(m->device, 0, false,     /* if that fails, it is freed with the context */
                         &(struct ww_host){.due = is_unused, .then = free_unused, .data = m, .lent = true});
            return;
        }
        ww_peers_done(m->device);
        ww_send_free(m->device, WW_OP_FREE, 0, m->address);
    }
    free(m);
}

/* Unlock ww_graphs, then free objects without references, which may wait for the devices that may use the memory. */
void ww_graphs_leave(void) {
    bool before = ww_in_host_function;
    struct ww_user *user = due.users;
    struct ww_graph_memory *memory = due.memory;
    due.users = NULL;
    due.memory = NULL;
    pthread_mutex_unlock(&ww_graphs);
    while (user) {
        struct ww_user *next = user->next;
        ww_in_host_function = true;
        user->run(user->data);
        ww_in_host_function = before;
        free(user);
        user = next;
    }
    while (memory) {
        struct ww_graph_memory *next = memory->next;
        free_memory(memory);
        memory = next;
    }
}

int ww_body_cuDeviceGraphMemTrim(struct ww_device *d) {
    struct account *a = account_of(d);
    WW_LOCK(&lock);
    a->used -= a->freed;
    a->reserved -= a->idle;
    a->freed = a->idle = 0;
    a->trims++;
    return 0;
}

int ww_body_cuDeviceGetGraphMemAttribute(struct ww_device *d, int attribute, void *to) {
    const struct account *a = account_of(d);
    if (attribute < CU_GRAPH_USED || attribute > CU_GRAPH_RESERVED_HIGH)
        return CUDA_ERROR_INVALID_VALUE;
    WW_LOCK(&lock);
    const uint64_t values[] = {a->used, a->used_high, a->reserved, a->reserved_high}; /* as enum cu_graph_memory */
    *(uint64_t *)to = values[attribute];
    return 0;
}

int ww_body_cuDeviceSetGraphMemAttribute(struct ww_device *d, int attribute, void *from) {
    struct account *a = account_of(d);
    if (*(uint64_t *)from || (attribute != CU_GRAPH_USED_HIGH && attribute != CU_GRAPH_RESERVED_HIGH))
        return CUDA_ERROR_INVALID_VALUE;
    WW_LOCK(&lock);
    if (attribute == CU_GRAPH_USED_HIGH)
        a->used_high = a->used;
    else
        a->reserved_high = a->reserved;
    return 0;
}
