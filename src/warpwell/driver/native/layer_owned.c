/* User objects of graphs, and the memory of ALLOC nodes. Both are freed when the lock of all graphs is left, because
 * destructors of user objects may take their time and may not call the driver. An address is reserved when its node is
 * made and stays until no graph and no plan names it. */
#include "layer.h"
#include <stdlib.h>

pthread_mutex_t ww_graphs = PTHREAD_MUTEX_INITIALIZER;
static struct { /* without references; freed when the lock is left */
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
static struct account { /* of a device's launches of graphs. Freed memory counts until it is trimmed, as with the
                           driver */
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
    pthread_mutex_lock(&lock);
    a->reserved += nbytes;
    if (a->reserved > a->reserved_high)
        a->reserved_high = a->reserved;
    pthread_mutex_unlock(&lock);
    return m;
}

void ww_graph_memory_live(struct ww_graph_memory *m) {
    struct account *a = account_of(m->device);
    if (atomic_exchange(&m->live, 1))
        return;
    pthread_mutex_lock(&lock);
    if (m->freed_in == a->trims + 1)
        a->freed -= m->nbytes;
    else
        a->used += m->nbytes;
    if (a->used > a->used_high)
        a->used_high = a->used;
    pthread_mutex_unlock(&lock);
}

bool ww_graph_memory_freed(struct ww_graph_memory *m) {
    struct account *a = account_of(m->device);
    if (!atomic_exchange(&m->live, 0))
        return false;
    pthread_mutex_lock(&lock);
    a->freed += m->nbytes;
    m->freed_in = a->trims + 1;
    pthread_mutex_unlock(&lock);
    return true;
}

/* Drop a reference, with ww_graphs held. The address of memory without references is not found from here on. */
void ww_graph_memory_drop(struct ww_graph_memory *m) {
    if (atomic_fetch_sub(&m->refs, 1) != 1)
        return;
    ww_graph_memory_freed(m);
    struct account *a = account_of(m->device);
    pthread_mutex_lock(&lock);
    a->idle += m->nbytes; /* and counts as used until then, too, if a launch has allocated it */
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
    if (m->range.size && m->on_host && ww_in_host_thread) { /* the end of a launch behind a host function */
        ww_unpin_posted(m->device, &m->range, m->life == atomic_load(&m->device->life));
    } else if (m->range.size && m->on_host) {
        ww_unpin_taken(m->device, &m->range);
    } else if (m->range.size && m->life == atomic_load(&m->device->life)) {
        m->users = (struct ww_peers){.owner = m->device};
        if (ww_in_host_thread && !is_unused(m)) { /* a device that uses it may wait for a host function */
            ww_host_post(m->device, 0, false,     /* without memory for that it goes with the context */
                         &(struct ww_host){.due = is_unused, .then = free_unused, .data = m, .lent = true});
            return;
        }
        ww_peers_done(m->device);
        ww_send_free(m->device, WW_OP_FREE, 0, m->address);
    }
    free(m);
}

/* Free objects without references: a destructor may take its time, and memory waits for the devices that may use it. */
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
    pthread_mutex_lock(&lock);
    a->used -= a->freed;
    a->reserved -= a->idle;
    a->freed = a->idle = 0;
    a->trims++;
    pthread_mutex_unlock(&lock);
    return 0;
}

int ww_body_cuDeviceGetGraphMemAttribute(struct ww_device *d, int attribute, void *to) {
    const struct account *a = account_of(d);
    if (attribute < CU_GRAPH_USED || attribute > CU_GRAPH_RESERVED_HIGH)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    const uint64_t values[] = {a->used, a->used_high, a->reserved, a->reserved_high}; /* as enum cu_graph_memory */
    *(uint64_t *)to = values[attribute];
    pthread_mutex_unlock(&lock);
    return 0;
}

int ww_body_cuDeviceSetGraphMemAttribute(struct ww_device *d, int attribute, void *from) {
    struct account *a = account_of(d);
    if (*(uint64_t *)from || (attribute != CU_GRAPH_USED_HIGH && attribute != CU_GRAPH_RESERVED_HIGH))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (attribute == CU_GRAPH_USED_HIGH)
        a->used_high = a->used;
    else
        a->reserved_high = a->reserved;
    pthread_mutex_unlock(&lock);
    return 0;
}
