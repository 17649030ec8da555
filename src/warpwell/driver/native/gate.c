/* The program's side of a gate: taking a slot of a GPU's board, and waiting. */
#include "gate.h"

#include <stdio.h>
#include <stdlib.h>

static bool lock_slot(int fd, unsigned index) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = WW_GATE_LOCKS + (off_t)index, .l_len = 1};
    return !fcntl(fd, F_SETLK, &lock);
}

static void take(struct ww_gate *g, enum ww_gate_kind kind, int64_t pid, int64_t priority, const char *tenant) {
    struct ww_gate_slot *s = g->slot;
    uint64_t before = atomic_load(&s->serial) & ~1ull;
    atomic_store(&s->serial, before + 2);                     /* even: the arbiter ignores the slot */
    atomic_store(&s->gate, !atomic_load(&g->head->programs)); /* closed if other programs are attached */
    atomic_store(&s->budget_ns, 0);
    atomic_store(&s->wants, 0);
    atomic_store(&s->issued, 0);
    atomic_store(&s->done, 0);
    atomic_store(&s->expected_ns, 0);
    atomic_store(&s->longest_ns, 0);
    atomic_store(&s->undrained, 0);
    atomic_store(&s->state, 0);
    atomic_store(&s->since_ns, ww_now_ns());
    atomic_store(&s->used_ns, 0);
    atomic_store(&s->launches, 0);
    atomic_store(&s->kind, kind);
    atomic_store(&s->pid, pid);
    atomic_store(&s->priority, priority);
    snprintf(s->tenant, sizeof s->tenant, "%s", tenant);
    g->serial = before + 3;
    atomic_store(&s->serial, g->serial);
}

void ww_gate_ring(struct ww_gate *g) {
    atomic_fetch_add(&g->head->bell, 1);
    ww_wake_all(&g->head->bell);
}

bool ww_gate_attach(struct ww_gate *g, int fd, enum ww_gate_kind kind, int64_t pid, int64_t priority,
                    const char *tenant) {
    unsigned char *board = ww_map_shared(fd, WW_GATE_BYTES, PROT_READ | PROT_WRITE);
    *g = (struct ww_gate){.head = (void *)board, .fd = fd};
    if (board && atomic_load(&g->head->format) == WW_GATE_FORMAT) {
        for (unsigned i = 0; i < WW_GATE_SLOTS; i++) {
            if (!lock_slot(fd, i))
                continue;
            g->slot = (void *)(board + WW_GATE_TABLE + i * WW_GATE_SLOT_BYTES);
            take(g, kind, pid, priority, tenant);
            ww_gate_ring(g);
            return true;
        }
    }
    if (board)
        munmap(board, WW_GATE_BYTES);
    close(fd);
    *g = (struct ww_gate){.fd = -1};
    return false;
}

bool ww_gate_fails_open(struct ww_gate *g) {
    struct ww_gate_slot *s = g->slot;
    if (atomic_load_explicit(&s->serial, memory_order_relaxed) != g->serial) {
        g->slot = NULL; /* the lock was lost, and another program has the slot */
        return true;
    }
    uint64_t now = ww_now_ns(), beat = atomic_load_explicit(&g->head->beat, memory_order_relaxed);
    atomic_store_explicit(&s->wants, now | 1, memory_order_release);
    if (!g->is_waiting || beat != g->beat) {
        g->beat = beat;
        g->beat_seen_ns = now;
    }
    if (!g->is_waiting) {
        g->is_waiting = true;
        ww_gate_ring(g);
    }
    return now - g->beat_seen_ns > WW_GATE_FAIL_OPEN_NS;
}

void ww_gate_stop_waiting(struct ww_gate *g) {
    g->is_waiting = false;
    if (g->slot)
        atomic_store_explicit(&g->slot->wants, 0, memory_order_release);
}

bool ww_gate_parse(const char *share, int64_t *priority, char tenant[WW_GATE_NAME]) {
    char *rest = NULL;
    if (!share || !*share)
        return false;
    *priority = strtoll(share, &rest, 10);
    if (*rest != ':' || !rest[1] || strlen(rest + 1) >= WW_GATE_NAME)
        return false;
    strcpy(tenant, rest + 1);
    return true;
}
