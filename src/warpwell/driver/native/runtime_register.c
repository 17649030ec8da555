/* Code of the program, which nvcc's start-up code registers. See runtime.h.
 *
 * Each registered fatbin becomes one library of the driver, loaded at first use. Kernels and variables are found by
 * their host addresses in a hash table: readers take no lock; entries and tables are never freed, because a thread may
 * still look at them.
 */
#include "runtime.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

struct image {
    const void *data;
    int32_t version; /* of the wrapper; 2: nvcc has linked device code of several files */
    _Atomic(CUlibrary) library;
    _Atomic bool is_gone;
};

struct entry {
    const void *host;
    const char *name;
    struct image *image; /* NULL: a kernel that the program has looked up */
    _Atomic(CUkernel) kernel;
    size_t nbytes;          /* size of a variable; 0: a kernel */
    void **managed;         /* managed variables: the program's pointer to the variable */
    struct entry *previous; /* in the list of all entries, newest first */
};

struct table {
    size_t room;
    struct entry *_Atomic slots[];
};

struct wrapper { /* of a fatbin, as compilers emit it */
    int32_t magic, version;
    const void *data;
    const void *file;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct table *_Atomic entries;
static struct entry *newest; /* under lock */
static size_t nentries;

/* -- table --------------------------------------------------------------------------------------------------------- */

static size_t slot_of(const struct table *t, const void *host) {
    return (size_t)(((uintptr_t)host >> 2) * 0x9e3779b97f4a7c15ull >> 20) & (t->room - 1);
}

static struct entry *find(const void *host) {
    struct table *t = atomic_load_explicit(&entries, memory_order_acquire);
    for (size_t i = t ? slot_of(t, host) : 0; t; i = (i + 1) & (t->room - 1)) {
        struct entry *e = atomic_load_explicit(&t->slots[i], memory_order_acquire);
        if (!e || e->host == host)
            return e && e->image && atomic_load(&e->image->is_gone) ? NULL : e;
    }
    return NULL;
}

static void place(struct table *t, struct entry *e) {
    size_t i = slot_of(t, e->host);
    struct entry *there;
    while ((there = atomic_load_explicit(&t->slots[i], memory_order_relaxed)) && there->host != e->host)
        i = (i + 1) & (t->room - 1);
    atomic_store_explicit(&t->slots[i], e, memory_order_release);
}

/* Return the table; if half of its room is in use, first replace it by a larger one. `lock` is held. */
static struct table *grown(void) {
    struct table *old = atomic_load(&entries);
    if (old && 2 * nentries < old->room)
        return old;
    size_t room = old ? 2 * old->room : 256;
    struct table *t = calloc(1, sizeof *t + room * sizeof *t->slots);
    if (!t)
        return NULL;
    t->room = room;
    for (size_t i = 0; old && i < old->room; i++) {
        struct entry *e = atomic_load(&old->slots[i]);
        if (e)
            place(t, e);
    }
    atomic_store_explicit(&entries, t, memory_order_release);
    return t;
}

static struct entry *add(struct image *image, const void *host, const char *name) {
    struct entry *e = calloc(1, sizeof *e);
    pthread_mutex_lock(&lock);
    struct table *t = e ? grown() : NULL;
    if (t) {
        *e = (struct entry){.host = host, .name = name, .image = image, .previous = newest};
        newest = e;
        nentries++;
        place(t, e);
    }
    pthread_mutex_unlock(&lock);
    if (!t) {
        free(e);
        rt_say("out of memory while registering %s", name ? name : "a kernel");
        return NULL;
    }
    return e;
}

/* -- images -------------------------------------------------------------------------------------------------------- */

static int load(struct image *image, CUlibrary *library) {
    static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
    *library = atomic_load_explicit(&image->library, memory_order_acquire);
    if (*library)
        return 0;
    pthread_mutex_lock(&loading);
    int error = 0;
    if (!(*library = atomic_load(&image->library))) {
        error = cuLibraryLoadData(library, image->data, NULL, NULL, 0, NULL, NULL, 0);
        if (!error)
            atomic_store_explicit(&image->library, *library, memory_order_release);
    }
    pthread_mutex_unlock(&loading);
    if (error == CUDA_ERROR_NO_BINARY_FOR_GPU)
        rt_say("the program has no code for this GPU: build it with -arch=native or with PTX (-arch=compute_75)");
    return error;
}

CUDART_API void **__cudaRegisterFatBinary(void *fatbin) {
    struct image *image = calloc(1, sizeof *image);
    if (image) {
        const struct wrapper *w = fatbin;
        image->data = w->data;
        image->version = w->version;
    }
    return (void **)image;
}

CUDART_API void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }

CUDART_API void __cudaUnregisterFatBinary(void **handle) {
    struct image *image = (struct image *)handle;
    CUlibrary library = image ? atomic_load(&image->library) : NULL;
    if (!image || atomic_exchange(&image->is_gone, true))
        return;
    if (library && !rt_start())
        cuLibraryUnload(library);
}

CUDART_API void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int threads,
                                       void *thread, void *block, void *block_size, void *grid_size, int *warp) {
    (void)device, (void)threads, (void)thread, (void)block, (void)block_size, (void)grid_size, (void)warp;
    if (handle)
        add((struct image *)handle, host, name);
}

CUDART_API void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external,
                                  size_t nbytes, int constant, int global) {
    (void)device, (void)external, (void)constant, (void)global;
    struct entry *e = handle ? add((struct image *)handle, host, name) : NULL;
    if (e)
        e->nbytes = nbytes;
}

CUDART_API void __cudaRegisterManagedVar(void **handle, void **host, char *device, const char *name, int external,
                                         size_t nbytes, int constant, int global) {
    (void)device, (void)external, (void)constant, (void)global;
    struct entry *e = handle ? add((struct image *)handle, host, name) : NULL;
    if (e) {
        e->nbytes = nbytes;
        e->managed = host;
    }
}

/* Called before the program uses a managed variable of an image for the first time: set its pointers to them. */
CUDART_API char __cudaInitModule(void **handle) {
    struct image *image = (struct image *)handle;
    CUlibrary library;
    CUdeviceptr address;
    size_t nbytes;
    int error = rt_enter();
    if (error || !image || (error = load(image, &library))) {
        rt_result(error);
        return 0;
    }
    pthread_mutex_lock(&lock);
    struct entry *e = newest;
    pthread_mutex_unlock(&lock);
    for (; e && !error; e = e->previous)
        if (e->image == image && e->managed && !(error = cuLibraryGetManaged(&address, &nbytes, library, e->name)))
            *e->managed = (void *)(uintptr_t)address;
    if (error) { /* otherwise the program would use invalid pointers */
        rt_say("__managed__ variables cannot be used here: %s", cudaGetErrorName(error));
        exit(1);
    }
    return 1;
}

/* -- kernels ------------------------------------------------------------------------------------------------------- */

int rt_kernel(const void *function, CUkernel *kernel) {
    struct entry *e = find(function);
    CUlibrary library;
    if (!e || e->nbytes || e->managed)
        return RT_FUNCTION;
    *kernel = atomic_load_explicit(&e->kernel, memory_order_acquire);
    if (*kernel)
        return 0;
    int error = load(e->image, &library);
    if (error || (error = cuLibraryGetKernel(kernel, library, e->name)))
        return error == CUDA_ERROR_NOT_FOUND ? RT_FUNCTION : error;
    atomic_store_explicit(&e->kernel, *kernel, memory_order_release);
    return 0;
}

int rt_add_kernel(CUkernel kernel) {
    struct entry *e = find(kernel);
    if (e || !kernel)
        return 0;
    if (!(e = add(NULL, kernel, NULL)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    atomic_store_explicit(&e->kernel, kernel, memory_order_release);
    return 0;
}

void *rt_host_function(CUkernel kernel) {
    pthread_mutex_lock(&lock);
    struct entry *e = newest;
    pthread_mutex_unlock(&lock);
    while (e && (!e->image || atomic_load(&e->kernel) != kernel))
        e = e->previous;
    return e ? (void *)(uintptr_t)e->host : (void *)kernel;
}

const char *rt_kernel_name(const void *function) {
    const struct entry *e = find(function);
    return e ? e->name : NULL;
}

CUDART_API int __cudaGetKernel(CUkernel *kernel, const void *function) {
    int error = rt_enter();
    return rt_result(error ? error : rt_kernel(function, kernel));
}

CUDART_API int cudaGetKernel(CUkernel *kernel, const void *function) {
    int error = kernel ? __cudaGetKernel(kernel, function) : CUDA_ERROR_INVALID_VALUE;
    return rt_result(error ? error : rt_add_kernel(*kernel));
}

/* -- variables ----------------------------------------------------------------------------------------------------- */

/* Find a managed variable by its address, which programs pass instead of the address of the host variable. */
static const struct entry *managed_at(const void *symbol) {
    pthread_mutex_lock(&lock);
    const struct entry *e = newest;
    pthread_mutex_unlock(&lock);
    while (e && (!e->managed || atomic_load(&e->image->is_gone) || *e->managed != symbol))
        e = e->previous;
    return e;
}

int rt_symbol(const void *symbol, CUdeviceptr *address, size_t *nbytes) {
    const struct entry *e = symbol ? find(symbol) : NULL;
    CUlibrary library;
    if (!e && symbol && (e = managed_at(symbol))) {
        *address = (uintptr_t)symbol;
        *nbytes = e->nbytes;
        return 0;
    }
    if (!e || !e->nbytes)
        return RT_SYMBOL;
    int error = load(e->image, &library);
    if (!error)
        error = cuLibraryGetGlobal(address, nbytes, library, e->name);
    return error == CUDA_ERROR_NOT_FOUND ? RT_SYMBOL : error;
}

CUDART_API int cudaGetSymbolAddress(void **address, const void *symbol) {
    CUdeviceptr at;
    size_t nbytes;
    int error = rt_enter();
    if (error || !address || (error = rt_symbol(symbol, &at, &nbytes)))
        return rt_result(error ? error : CUDA_ERROR_INVALID_VALUE);
    *address = (void *)(uintptr_t)at;
    return 0;
}

CUDART_API int cudaGetSymbolSize(size_t *nbytes, const void *symbol) {
    CUdeviceptr at;
    int error = rt_enter();
    return rt_result(error ? error : !nbytes ? CUDA_ERROR_INVALID_VALUE : rt_symbol(symbol, &at, nbytes));
}
