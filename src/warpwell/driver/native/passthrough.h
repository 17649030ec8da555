/* The pass-through driver: a libcuda.so.1 in front of the machine's own driver, in the same process.
 *
 * The machine's driver is a dependency of this library, under the name WW_MACHINE. So the dynamic linker itself finds
 * each function that is not defined here, for linked programs and for dlsym: those of future drivers, too, and NVIDIA's
 * private tables, which nothing here reads. The functions that are defined here are those of generate.PASSED.
 */
#ifndef WW_PASSTHROUGH_H
#define WW_PASSTHROUGH_H

#include "gen_calls.h"

#define WW_MACHINE "libcuda-machine.so.1"

/* A function that is defined here. */
struct ww_passed {
    const char *symbol, *name; /* of the driver's library, and for cuGetProcAddress */
    int version, per_thread;
    void *own;
    void **machine; /* where the machine's function is stored; NULL there: its driver does not have it */
};

#include "gen_passthrough.h"

#endif
