/* The machine's functions, and pointers to functions that programs get by name. See passthrough.h. */
#include "passthrough.h"
#include <dlfcn.h>
#include <pthread.h>

WW_API extern const int ww_passthrough; /* looked up to tell this library from a driver (passthrough.py) */
const int ww_passthrough = 1;
WW_API extern int ww_orders_calls; /* 1: calls wait at gates, so that turns need no lease (libcuda.py) */
int ww_orders_calls;
struct ww_machine ww_machine;

/* By function that is defined here: its address from the driver's cuGetProcAddress. */
static void *answered[WW_PASSED];
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* The dynamic linker runs the constructors of the machine's driver before this one. */
__attribute__((constructor)) static void find_machine(void) {
    void *machine = dlopen(WW_MACHINE, RTLD_LAZY | RTLD_NOLOAD);
    for (size_t i = 0; i < WW_PASSED && machine; i++)
        *ww_passed[i].machine = dlsym(machine, ww_passed[i].symbol);
    if (machine)
        ww_orders_calls = ww_prepare_gates(machine);
}

/* -- functions by name --------------------------------------------------------------------------------------------- */

/* Ask the driver for exactly the versions that are defined here. It may return other addresses than the dynamic linker,
 * and a newer version of a name can have other parameters, so a name does not identify a function. */
static void ask_machine(void) {
    for (size_t i = 0; i < WW_PASSED && ww_machine.cuGetProcAddress_v2; i++) {
        const struct ww_passed *p = &ww_passed[i];
        uint64_t flags = p->per_thread ? CU_GET_PROC_ADDRESS_PER_THREAD : CU_GET_PROC_ADDRESS_LEGACY;
        int32_t status;
        if (ww_machine.cuGetProcAddress_v2(p->name, &answered[i], p->version, flags, &status))
            answered[i] = NULL;
    }
}

static void *own_address(void *address) {
    pthread_once(&once, ask_machine);
    for (size_t i = 0; i < WW_PASSED && address; i++)
        if (address == *ww_passed[i].machine || address == answered[i])
            return ww_passed[i].own;
    return address;
}

CUresult cuGetProcAddress(const char *name, void **address, int32_t version, uint64_t flags) {
    if (!ww_machine.cuGetProcAddress)
        return CUDA_ERROR_NOT_SUPPORTED;
    CUresult error = ww_machine.cuGetProcAddress(name, address, version, flags);
    if (!error && address)
        *address = own_address(*address);
    return error;
}

CUresult cuGetProcAddress_v2(const char *name, void **address, int32_t version, uint64_t flags, int32_t *status) {
    if (!ww_machine.cuGetProcAddress_v2)
        return CUDA_ERROR_NOT_SUPPORTED;
    CUresult error = ww_machine.cuGetProcAddress_v2(name, address, version, flags, status);
    if (!error && address)
        *address = own_address(*address);
    return error;
}
