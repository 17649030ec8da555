/* The gate of the client: which calls wait while the arbiter lets another program use the device, and expected times.
 *
 * Expected times matter only while the arbiter bounds the work on the device. Then `ww_gate_must_measure` chooses the
 * calls of a function whose time is measured, each by a mark before it and a mark after it.
 */
#include "worker.h"

#define MIN_IN_FLIGHT 2u /* calls that are allowed whatever their expected time, so that the device does not idle */
#define MARK_NS 100000u  /* expected time of the calls between two marks: a fifth of the usual bound */

static struct ww_cost kinds[WW_HAND_OPS]; /* of calls without a function, indexed by op */

static int is_work(const struct ww_call *call) {
    switch (call->entry.op) {
    case WW_OP_LAUNCH:
    case WW_OP_COPY:
    case WW_OP_IN:
    case WW_OP_OUT:
    case WW_OP_MEMSET:
    case WW_OP_GRAPH_LAUNCH:
        return 1;
    default:
        return 0;
    }
}

static uint64_t budget(void) { return atomic_load_explicit(&ww.gate.slot->budget_ns, memory_order_relaxed); }

static struct ww_cost *cost_of(const struct ww_call *call) {
    return call->function ? &call->function->cost : kinds + call->entry.op;
}

bool ww_gate_admits(const struct ww_call *call) {
    struct ww_gate *g = &ww.gate;
    if (!g->slot || call->todo || call->destroys)
        return true;
    if (g->is_uncounted && ww_gate_is_uncontended(g)) {
        g->issued++;
        return true;
    }
    ww_gate_count(g);
    int work = is_work(call);
    uint64_t most = work ? budget() : 0;
    if (most && g->expected_ns >= most && g->issued - g->done >= MIN_IN_FLIGHT && ww_gate_is_open(g))
        return false;
    if (!ww_gate_enter(g, work))
        return false;
    if (g->slot && ww_gate_is_uncontended(g))
        ww_gate_stop_counting(g);
    return true;
}

int ww_gate_is_contended(void) {
    static uint64_t settled_ns;
    if (ww_gate_is_uncontended(&ww.gate))
        return 0;
    if (!ww_gate_is_open(&ww.gate))
        return 1;
    uint64_t now = ww_now_ns();
    if (now - settled_ns < MARK_NS)
        return 0;
    settled_ns = now;
    return 1;
}

int ww_part_measures(const struct ww_call *call) {
    const struct ww_cost *cost = cost_of(call);
    return is_work(call) && budget() && ww_gate_must_measure(cost->calls);
}

int ww_part_add(struct ww_part *part, const struct ww_call *call) {
    if (!is_work(call) || !budget())
        return 0;
    int is_measured = ww_part_measures(call);
    struct ww_cost *cost = cost_of(call);
    if (!part->since_ns)
        part->since_ns = ww_now_ns();
    part->cost = is_measured ? cost : NULL;
    part->expected_ns += cost->ns;
    ww.gate.expected_ns += cost->ns;
    atomic_store_explicit(&ww.gate.slot->expected_ns, ww.gate.expected_ns, memory_order_relaxed);
    cost->calls++;
    return is_measured || part->expected_ns >= MARK_NS;
}

static void learn(struct ww_cost *cost, uint64_t took) {
    int64_t ns = took < UINT32_MAX ? (int64_t)took : UINT32_MAX;
    cost->ns = cost->ns ? (uint32_t)((int64_t)cost->ns + (ns - (int64_t)cost->ns) / 4) : (uint32_t)ns;
    ww_gate_learn(ww.gate.slot, took);
}

void ww_part_passed(struct ww_part *part, uint64_t *passed_ns, uint64_t calls) {
    if (!ww.gate.slot)
        return;
    if (part->since_ns) {
        uint64_t now = ww_now_ns(), since = part->since_ns > *passed_ns ? part->since_ns : *passed_ns;
        if (part->cost)
            learn(part->cost, now - since);
        *passed_ns = now;
        ww.gate.expected_ns -= part->expected_ns;
        atomic_store_explicit(&ww.gate.slot->expected_ns, ww.gate.expected_ns, memory_order_relaxed);
    }
    ww_gate_pass(&ww.gate, calls);
}
