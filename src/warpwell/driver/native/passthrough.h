/* The pass-through driver: a libcuda.so.1 in front of the machine's own driver, in the same process.
 *
 * The machine's driver is a dependency of this library, under the name WW_MACHINE. So the dynamic linker itself finds
 * each function that is not defined here, for linked programs and for dlsym. That includes functions of future drivers
 * and NVIDIA's private tables, which nothing here reads. generate.PASSED matches the functions that are defined here.
 *
 * While another program is attached to the board of a GPU, the streams of this one get gates: the GPU marks the gate as
 * reached, waits until the word `gate` of the program's slot is 1, and marks the gate as passed. The host does not
 * wait, and the arbiter stops the program between two gates (passthrough_gate.c). While no other program is attached, a
 * thread counts one call in each round of the marker, which stands for all until the next round. Without the variable
 * WARPWELL_SHARE there are no gates.
 */
#ifndef WW_PASSTHROUGH_H
#define WW_PASSTHROUGH_H

#include "gen_calls.h"
#include <stdatomic.h>
#include <stdbool.h>

#define WW_MACHINE "libcuda-machine.so.1"

/* A function of the driver that this library defines. */
struct ww_passed {
    const char *symbol, *name; /* of the driver's library, and for cuGetProcAddress */
    int version, per_thread;
    void *own;
    void **machine; /* address of the pointer to the machine's function, which is NULL if its driver lacks it */
};

#include "gen_passthrough.h"

/* -- gates --------------------------------------------------------------------------------------------------------- */

#define WW_WATCHED 16u /* maximum number of devices that one process shares */
#define WW_LOOK_EACH 256u

struct ww_stream;

/* A call between `ww_before` and `ww_after`. */
struct ww_call {
    struct ww_stream *stream;
    int timing;      /* index of the pair of events around the call, or -1 */
    uint64_t number; /* number of the call in its stream, if all earlier calls have left the driver; else 0 */
};

extern _Atomic uint32_t ww_nwatched, ww_must_look; /* number of attached devices; 1: calls still try to attach one */
extern _Atomic uint32_t ww_round;                  /* number of the marker's round */
extern _Atomic uint64_t *ww_watched[WW_WATCHED];   /* by device: number of attached programs, on its board */
extern __thread uint32_t ww_calls __attribute__((tls_model("initial-exec")));
extern __thread uint32_t ww_counted_round __attribute__((tls_model("initial-exec"))); /* the last with a counted call */

/* Return true if the call may need a gate, or must be counted. One in WW_LOOK_EACH calls of a thread attaches further
 * devices. */
static inline bool ww_must_enter(void) {
    if (ww_calls++ % WW_LOOK_EACH == 0 || atomic_load_explicit(&ww_round, memory_order_relaxed) != ww_counted_round)
        return true;
    uint32_t n = atomic_load_explicit(&ww_nwatched, memory_order_acquire);
    for (uint32_t i = 0; i < n; i++)
        if (atomic_load_explicit(ww_watched[i], memory_order_relaxed) > 1)
            return true;
    return !n && atomic_load_explicit(&ww_must_look, memory_order_relaxed);
}

/* Read the functions that gates need from the machine's library, and the variable WARPWELL_SHARE. Return false if there
 * are no gates. */
bool ww_prepare_gates(void *machine);

/* Prepare a call that gives work to a stream. Calls with the same `key` are expected to take equally long. Return false
 * if the call does not need ww_after. */
bool ww_before(CUstream stream, uint64_t key, struct ww_call *call);
void ww_after(const struct ww_call *call, bool is_done);

/* Called before and after a call that waits until all earlier work of a stream (NULL: of each stream of the context) is
 * done. entered: by stream, number of the calls that are then done. */
void ww_before_wait(CUstream stream, uint64_t entered[]);
void ww_after_wait(const uint64_t entered[]);
#define WW_STREAMS 16u

CUresult ww_wait_event(CUstream stream, CUevent event, uint32_t flags, CUresult (*wait)(CUstream, CUevent, uint32_t));
void ww_forget_stream(CUstream stream);
void ww_forget_contexts(CUcontext context); /* a destroyed context; NULL: all destroyed primary contexts */

static inline uint64_t ww_size_key(uint64_t kind, uint64_t nbytes) {
    return kind << 8 | (uint64_t)(64 - __builtin_clzll(nbytes | 1));
}

#endif
