/* Names of errors, addresses of functions by name, and refusals of calls that are not served. */
#include "layer.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define REFUSED_NAMES 256

int ww_error_text(int code, bool name, const char **text) {
    *text = NULL;
    for (size_t i = 0; i < sizeof ww_errors / sizeof *ww_errors && !*text; i++)
        if (ww_errors[i].code == code)
            *text = name ? ww_errors[i].name : ww_errors[i].text;
    return *text ? 0 : CUDA_ERROR_INVALID_VALUE;
}

/* -- functions by name --------------------------------------------------------------------------------------------- */

#define FOUND 0
#define NOT_FOUND 1
#define TOO_OLD 2

/* Return the newest variant of a function that is not newer than `version`. With `per_thread`, prefer a variant whose
 * default stream is the calling thread's. */
static const struct ww_variant *variant_of(const char *name, int version, int per_thread, bool *known) {
    const struct ww_variant *best = NULL;
    *known = false;
    for (const struct ww_variant *v = ww_variants; v->name; v++) {
        if (strcmp(v->name, name))
            continue;
        *known = true;
        if (v->version > version || (v->per_thread && !per_thread))
            continue;
        if (!best || v->per_thread > best->per_thread ||
            (v->per_thread == best->per_thread && v->version > best->version))
            best = v;
    }
    return best;
}

int ww_body_cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    bool known;
    const struct ww_variant *v = variant_of(name, version, (flags & CU_GET_PROC_ADDRESS_PER_THREAD) != 0, &known);
    *function = v ? v->symbol : NULL;
    if (status)
        *status = v ? FOUND : known ? TOO_OLD : NOT_FOUND;
    return v ? 0 : CUDA_ERROR_NOT_FOUND;
}

/* -- refusals ------------------------------------------------------------------------------------------------------ */

/* Return true at the first call with this name in the process. Names are string literals. */
static bool first_time(const char *name) {
    static const char *reported[REFUSED_NAMES];
    static _Atomic int busy; /* no mutex: a forked child may call this, too */
    int expected = 0;
    bool first = true;
    if (!atomic_compare_exchange_strong(&busy, &expected, 1))
        return true;
    int i = 0;
    for (; i < REFUSED_NAMES && reported[i] && first; i++)
        first = strcmp(reported[i], name) != 0;
    if (first && i < REFUSED_NAMES)
        reported[i] = name;
    atomic_store(&busy, 0);
    return first && i < REFUSED_NAMES;
}

static void record(const char *name) {
    const char *path = getenv("WARPWELL_CUDA_REFUSED");
    char line[256];
    int fd = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (fd < 0)
        return;
    int n = snprintf(line, sizeof line, "%s\n", name);
    if (write(fd, line, (size_t)n) < 0)
        ww_say("%s cannot be written", path);
    close(fd);
}

/* NVIDIA's runtime cannot work without the driver's private tables. Report the file that contains it, once. Under
 * `warpwell run` the program ends, because it would continue without a GPU. NVIDIA's bindings for Python contain the
 * runtime, too, but use the driver instead. nvJitLink asks for a table when numba-cuda links a kernel, and works
 * without it (two H200). */
static void refuse_runtime(const void *caller) {
    Dl_info file;
    if (!dladdr(caller, &file) || !file.dli_fname || strstr(file.dli_fname, "/cuda/bindings/") ||
        strstr(file.dli_fname, "/libnvJitLink.so") || !first_time("NVIDIA's runtime"))
        return;
    const char *slash = strrchr(file.dli_fname, '/'), *name = slash ? slash + 1 : file.dli_fname;
    ww_say("%s has NVIDIA's CUDA runtime linked in, which works only with NVIDIA's own driver library. %s", name,
           strstr(name, ".so") ? "Use `--cuda local` for this machine's GPUs."
                               : "Rebuild it with `nvcc -cudart shared` (CMake: -DCMAKE_CUDA_RUNTIME_LIBRARY=Shared), "
                                 "or use `--cuda local` for this machine's GPUs.");
    if (getenv("WARPWELL_CUDA_EXIT"))
        _exit(1);
}

/* The driver's private tables are not available. */
CUresult cuGetExportTable(void *table, void *id) {
    (void)id;
    if (!table)
        return CUDA_ERROR_INVALID_VALUE;
    *(const void **)table = NULL;
    if (first_time("cuGetExportTable"))
        record("cuGetExportTable");
    refuse_runtime(__builtin_return_address(0));
    return CUDA_ERROR_NOT_FOUND;
}

int ww_refused(const char *name) {
    if (first_time(name)) {
        ww_say("%s is not served on pooled GPUs: CUDA_ERROR_NOT_SUPPORTED", name);
        record(name);
    }
    return CUDA_ERROR_NOT_SUPPORTED;
}
