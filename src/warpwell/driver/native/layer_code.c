/* Modules, libraries, functions. A load is synchronous, and its answer describes all functions of the image.
 *
 * A library belongs to no context: the layer keeps its image, and loads it on a device at the first use there. Each
 * load has functions of its own. Functions of an earlier life of their device are not freed, because a thread may still
 * read them.
 */
#include "layer.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OF_LIBRARY 1u /* flag of a module's handle: it belongs to a library, and only the library's unload ends it */

struct ww_loaded_image { /* an image, loaded on a device */
    struct ww_device *device;
    uint64_t life;
    uint32_t id, nfns, nglobals;
    struct ww_fn **fns;
    uint64_t *globals;        /* addresses of the globals that have spans in the device's table */
    struct ww_object *module; /* its handle, or NULL until the program requests one */
};

struct options { /* JIT options of a load, and the program's buffers for its logs */
    uint32_t n;
    struct ww_option at[WW_OPTIONS];
    struct {
        char *to;
        uint32_t most;
        void **size; /* gets the log's length */
    } logs[2];       /* information, errors */
};

struct kernel {
    char *name;
    struct ww_object *library;
    struct ww_fn *_Atomic fns[WW_DEVICES]; /* by device; valid while `object->life` is the device's life */
};

struct library {
    void *image;
    size_t nbytes;
    struct options options; /* without logs */
    struct ww_loaded_image *codes[WW_DEVICES];
    struct ww_object **kernels;
    uint32_t nkernels;
};

/* -- options ------------------------------------------------------------------------------------------------------- */

static int read_options(struct options *o, unsigned n, const int *names, void **values) {
    memset(o, 0, sizeof *o);
    if (n > WW_OPTIONS || (n && (!names || !values)))
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < n; i++) {
        int log = names[i] >= CU_JIT_ERROR_LOG;
        switch (names[i]) {
        case CU_JIT_INFO_LOG:
        case CU_JIT_ERROR_LOG:
            o->logs[log].to = values[i];
            break;
        case CU_JIT_INFO_LOG_BYTES:
        case CU_JIT_ERROR_LOG_BYTES:
            o->logs[log].most = (uint32_t)(uintptr_t)values[i];
            o->logs[log].size = &values[i];
            break;
        case CU_JIT_WALL_TIME: { /* the result overwrites the option's value */
            float none = 0;
            memcpy(&values[i], &none, sizeof none);
            break;
        }
        default:
            if (names[i] < 0 || names[i] > 31)
                return CUDA_ERROR_INVALID_VALUE;
            if (names[i] >= 18 && names[i] <= 20) /* names and addresses of globals to link with */
                return ww_refused("loading with addresses of globals");
            o->at[o->n++] = (struct ww_option){(uint32_t)names[i], 0, (uintptr_t)values[i]};
        }
    }
    for (int i = 0; i < 2; i++)
        if (!o->logs[i].to || o->logs[i].most > WW_LOG_MOST)
            o->logs[i].most = o->logs[i].to ? WW_LOG_MOST : 0;
    return 0;
}

static void write_log(const struct options *o, int log, const unsigned char *from, uint32_t n) {
    uint32_t most = o->logs[log].most;
    n = most ? n < most ? n : most - 1 : 0;
    if (most) {
        memcpy(o->logs[log].to, from, n);
        o->logs[log].to[n] = 0;
    }
    if (o->logs[log].size)
        *o->logs[log].size = (void *)(uintptr_t)n;
}

/* -- loads --------------------------------------------------------------------------------------------------------- */

static int send_image(struct ww_device *d, const void *image, size_t nbytes) {
    int error = 0;
    for (size_t at = 0; at < nbytes && !error; at += WW_PLACE_BYTES) {
        uint32_t n = nbytes - at < WW_PLACE_BYTES ? (uint32_t)(nbytes - at) : WW_PLACE_BYTES;
        struct ww_args_image args = {at, nbytes};
        error = ww_place_fill(d, WW_OP_IMAGE, 0, 0, (const char *)image + at, n, &args, sizeof args);
    }
    return error;
}

static void free_fn(struct ww_fn *f) {
    if (f->object)
        ww_object_drop(f->object, WW_FUNCTION, NULL);
    free(f->name);
    free(f->params);
    free(f);
}

static void free_code(struct ww_loaded_image *c) {
    for (uint32_t i = 0; i < c->nfns; i++)
        free_fn(c->fns[i]);
    if (c->module)
        ww_object_drop(c->module, WW_MODULE, NULL);
    free(c->fns);
    free(c->globals);
    free(c);
}

/* Read one function from the answer of a load, and advance *at to its end. NULL: it is malformed, or out of memory. */
static struct ww_fn *read_fn(const unsigned char **at, const unsigned char *end, struct ww_device *d) {
    struct ww_function w;
    size_t left = (size_t)(end - *at), names, all;
    if (left < sizeof w)
        return NULL;
    memcpy(&w, *at, sizeof w);
    names = sizeof w + (size_t)w.params * sizeof(struct ww_param);
    all = (names + w.name_bytes + 7) & ~(size_t)7;
    if (w.params > WW_PARAMS_MOST || !w.name_bytes || w.name_bytes > WW_NAME_MOST || all > left)
        return NULL;
    struct ww_fn *f = calloc(1, sizeof *f);
    if (!f)
        return NULL;
    f->nparams = w.params;
    f->params = malloc(w.params * sizeof *f->params + 1);
    f->name = strndup((const char *)*at + names, w.name_bytes);
    f->object = ww_object_new(WW_FUNCTION, d);
    if (!f->params || !f->name || !f->object) {
        free_fn(f);
        return NULL;
    }
    memcpy(f->params, *at + sizeof w, w.params * sizeof *f->params);
    for (uint32_t i = 0; i < w.params; i++) {
        uint64_t stop = (uint64_t)f->params[i].offset + f->params[i].size;
        if (stop > f->param_bytes)
            f->param_bytes = stop > WW_PARAMS_MOST ? WW_PARAMS_MOST + 1 : (uint32_t)stop;
    }
    for (unsigned i = 0; i < WW_FUNCTION_ATTRIBUTES; i++)
        atomic_init(&f->attributes[i], w.attributes[i]);
    f->object->id = w.id;
    f->object->more = f;
    *at += all;
    return f;
}

static int read_loaded(struct ww_loaded_image *c, const unsigned char *all, size_t nall, struct options *o) {
    struct ww_loaded w;
    const unsigned char *at = all + sizeof w, *end = all + nall;
    if (nall < sizeof w)
        return CUDA_ERROR_UNKNOWN;
    memcpy(&w, all, sizeof w);
    if (w.functions > WW_FUNCTIONS || !(c->fns = calloc(w.functions + 1, sizeof *c->fns)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (; c->nfns < w.functions; c->nfns++)
        if (!(c->fns[c->nfns] = read_fn(&at, end, c->device)) || c->fns[c->nfns]->param_bytes > WW_PARAMS_MOST)
            return CUDA_ERROR_UNKNOWN;
    if ((size_t)(end - at) < (size_t)w.info_bytes + w.error_bytes)
        return CUDA_ERROR_UNKNOWN;
    write_log(o, 0, at, w.info_bytes);
    write_log(o, 1, at + w.info_bytes, w.error_bytes);
    return 0;
}

/* Load an image on a device; layer.loading is locked. */
static int load(struct ww_device *d, const void *image, size_t nbytes, struct options *o,
                struct ww_loaded_image **made) {
    struct {
        struct ww_args_load args;
        struct ww_option options[WW_OPTIONS];
    } m = {.args = {0, o->n, o->logs[0].most, o->logs[1].most}};
    struct ww_loaded_image *c = calloc(1, sizeof *c);
    unsigned char *all = NULL;
    size_t nall = 0;
    if (!c)
        return CUDA_ERROR_OUT_OF_MEMORY;
    c->device = d;
    c->life = atomic_load(&d->life);
    memcpy(m.options, o->at, o->n * sizeof *o->at);
    int error = send_image(d, image, nbytes);
    if (!error && !(error = ww_id_take(&d->modules, &c->id))) {
        m.args.module = c->id;
        error = ww_ask(d, WW_OP_LOAD, &m, sizeof m.args + o->n * sizeof *o->at, &all, &nall);
        int bad = all ? read_loaded(c, all, nall, o) : error ? 0 : CUDA_ERROR_UNKNOWN;
        if (error)
            ww_id_give(d, &d->modules, c->life, c->id);
        error = error ? error : bad;
        free(all);
    }
    if (error) {
        free_code(c);
        return error;
    }
    *made = c;
    return 0;
}

/* Unload an image and free its data. The worker of an earlier life has exited, so it needs no call. */
static int unload(struct ww_loaded_image *c) {
    struct ww_device *d = c->device;
    struct ww_span r;
    int error = 0;
    if (c->life == atomic_load(&d->life)) {
        for (uint32_t i = 0; i < c->nglobals; i++)
            ww_range_take(&d->ranges, c->globals[i], WW_GLOBAL, &r);
        error = ww_call_id(d, WW_OP_UNLOAD, 0, c->id, NULL, 0);
        ww_id_give(d, &d->modules, c->life, c->id);
    }
    free_code(c);
    return error;
}

static struct ww_fn *fn_named(const struct ww_loaded_image *c, const char *name) {
    for (uint32_t i = 0; i < c->nfns; i++)
        if (!strcmp(c->fns[i]->name, name))
            return c->fns[i];
    return NULL;
}

/* Find a global's address, and add a span to the device's table, so that copies find the global. layer.loading is
 * locked. */
int ww_global(struct ww_loaded_image *c, const char *name, CUdeviceptr *address, size_t *nbytes) {
    size_t n = strlen(name) + 1;
    struct {
        struct ww_args_global args;
        char name[WW_NAME_MOST];
    } m;
    struct ww_range r;
    if (n > sizeof m.name)
        return CUDA_ERROR_NOT_FOUND;
    m.args = (struct ww_args_global){c->id, (uint32_t)n};
    memcpy(m.name, name, n);
    int error = ww_call(c->device, WW_OP_GLOBAL, 0, &m, sizeof m.args + n, &r, sizeof r);
    if (error)
        return error;
    if (r.nbytes && !ww_range_add(&c->device->ranges, r.address, r.nbytes, WW_GLOBAL, 0, NULL) &&
        ww_grow(&c->globals, c->nglobals, sizeof *c->globals))
        c->globals[c->nglobals++] = r.address;
    if (address)
        *address = r.address;
    if (nbytes)
        *nbytes = r.nbytes;
    return 0;
}

static int module_handle(struct ww_loaded_image *c, CUmodule *module) {
    if (!c->module && (c->module = ww_object_new(WW_MODULE, c->device)))
        c->module->more = c;
    *module = (CUmodule)(void *)c->module;
    return c->module ? 0 : CUDA_ERROR_OUT_OF_MEMORY;
}

/* -- modules ------------------------------------------------------------------------------------------------------- */

/* most: bytes of the image, or WW_IMAGE_MOST if only its address is known. */
int ww_load_module(CUmodule *module, const void *image, size_t most, unsigned n, int *names, void **values) {
    struct ww_device *d;
    struct options o;
    struct ww_loaded_image *c;
    const void *start;
    size_t nbytes;
    int error = ww_need(&d);
    if (error || !module || !image)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    if ((error = read_options(&o, n, names, values)) || (error = ww_image_length(image, most, &start, &nbytes)))
        return error;
    WW_LOCK(&layer.loading);
    return (error = load(d, start, nbytes, &o, &c)) ? error : module_handle(c, module);
}

/* Read a file into malloc'd memory and append a zero byte, which *nbytes includes. */
static int read_file(const char *path, char **all, size_t *nbytes) {
    size_t n = 0, room = 1 << 16, got;
    FILE *f = path ? fopen(path, "rbe") : NULL;
    if (!f)
        return path ? CUDA_ERROR_FILE_NOT_FOUND : CUDA_ERROR_INVALID_VALUE;
    char *bytes = malloc(room);
    while (bytes && n <= WW_IMAGE_MOST && (got = fread(bytes + n, 1, room - n - 1, f)) > 0) {
        n += got;
        if (n + 1 == room) {
            char *more = realloc(bytes, room *= 2);
            if (!more)
                free(bytes);
            bytes = more;
        }
    }
    int error = !bytes ? CUDA_ERROR_OUT_OF_MEMORY : ferror(f) || n > WW_IMAGE_MOST || !n ? CUDA_ERROR_INVALID_IMAGE : 0;
    fclose(f);
    if (bytes)
        memset(bytes + n, 0, room - n);
    if (error)
        free(bytes);
    *all = error ? NULL : bytes;
    *nbytes = n + 1;
    return error;
}

int ww_body_cuModuleLoad(CUmodule *module, const char *path) {
    char *image = NULL;
    size_t nbytes;
    int error = read_file(path, &image, &nbytes);
    error = error ? error : ww_load_module(module, image, nbytes, 0, NULL, NULL);
    free(image);
    return error;
}

int ww_body_cuModuleUnload(struct ww_object *o) {
    return o->flags == OF_LIBRARY ? CUDA_ERROR_NOT_PERMITTED : unload(o->more);
}

int ww_body_cuModuleGetFunction(struct ww_object *o, CUfunction *function, const char *name) {
    struct ww_fn *f = fn_named(o->more, name);
    if (!f)
        return CUDA_ERROR_NOT_FOUND;
    f->module = o;
    *function = (CUfunction)(void *)f->object;
    return 0;
}

/* -- libraries ----------------------------------------------------------------------------------------------------- */

/* Find a library's image on a device; load it at its first use there. layer.loading is locked. */
static int code_on(struct library *l, struct ww_device *d, struct options *logs, struct ww_loaded_image **c) {
    struct ww_loaded_image **at = &l->codes[d - layer.devices];
    int error = ww_open(d);
    if (!error && (!*at || (*at)->life != atomic_load(&d->life))) {
        *at = NULL;
        error = load(d, l->image, l->nbytes, logs ? logs : &l->options, at);
    }
    *c = *at;
    return error;
}

/* Return a device for a query that does not depend on the device: the current one, or one with a worker. */
static struct ww_device *some_device(void) {
    struct ww_device *d = ww_current();
    for (int i = 0; i < layer.ndevices && !d; i++)
        if (atomic_load(&layer.devices[i].channel))
            d = &layer.devices[i];
    return d;
}

static void free_library(struct library *l) {
    for (int i = 0; i < WW_DEVICES; i++)
        if (l->codes[i])
            unload(l->codes[i]);
    for (uint32_t i = 0; i < l->nkernels; i++) {
        struct ww_object was;
        if (!ww_object_drop(l->kernels[i], WW_KERNEL, &was)) {
            struct kernel *k = was.more;
            free(k->name);
            free(k);
        }
    }
    free(l->kernels);
    free(l->image);
    free(l);
}

static int new_library(CUlibrary *library, const void *image, size_t nbytes, struct options *o) {
    struct library *l = calloc(1, sizeof *l);
    struct ww_device *d = ww_current();
    struct ww_object *h = NULL;
    struct ww_loaded_image *c;
    int error = CUDA_ERROR_OUT_OF_MEMORY;
    if (l && (l->image = malloc(nbytes)) && (h = ww_object_new(WW_LIBRARY, NULL))) {
        memcpy(l->image, image, nbytes);
        l->nbytes = nbytes;
        l->options.n = o->n;
        memcpy(l->options.at, o->at, sizeof o->at);
        h->more = l;
        WW_LOCK(&layer.loading);
        error = d ? code_on(l, d, o, &c) : 0; /* else at first use, as the driver does */
    }
    if (error) {
        if (h)
            ww_object_drop(h, WW_LIBRARY, NULL);
        if (l)
            free_library(l);
        return error;
    }
    *library = (CUlibrary)(void *)h;
    return 0;
}

/* The image is copied, so the library options by which a program promises to keep it have no effect. */
int ww_load_library(CUlibrary *library, const void *image, size_t most, int *names, void **values, unsigned n) {
    struct options o;
    const void *start;
    size_t nbytes;
    int error = ww_ready();
    if (error || !library || !image)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    if ((error = read_options(&o, n, names, values)) || (error = ww_image_length(image, most, &start, &nbytes)))
        return error;
    return new_library(library, start, nbytes, &o);
}

int ww_body_cuLibraryLoadFromFile(CUlibrary *library, const char *path, int *names, void **values, unsigned n) {
    char *image = NULL;
    size_t nbytes;
    int error = read_file(path, &image, &nbytes);
    error = error ? error : ww_load_library(library, image, nbytes, names, values, n);
    free(image);
    return error;
}

int ww_body_cuLibraryUnload(CUlibrary h) {
    struct ww_object was;
    int error = ww_object_drop(h, WW_LIBRARY, &was);
    if (!error)
        free_library(was.more);
    return error;
}

/* Find the handle of a library's kernel by its name, or create it. layer.loading is locked. */
static int kernel_named(struct ww_object *library, const char *name, CUkernel *kernel) {
    struct library *l = library->more;
    for (uint32_t i = 0; i < l->nkernels; i++) {
        if (!strcmp(((struct kernel *)l->kernels[i]->more)->name, name)) {
            *kernel = (CUkernel)(void *)l->kernels[i];
            return 0;
        }
    }
    struct kernel *k = ww_grow(&l->kernels, l->nkernels, sizeof *l->kernels) ? calloc(1, sizeof *k) : NULL;
    struct ww_object *o = k && (k->name = strdup(name)) ? ww_object_new(WW_KERNEL, NULL) : NULL;
    if (!o) {
        free(k ? k->name : NULL);
        free(k);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    k->library = library;
    o->more = k;
    l->kernels[l->nkernels++] = o;
    *kernel = (CUkernel)(void *)o;
    return 0;
}

/* Find a library, and its image on the device that some_device returns. layer.loading is locked. */
int ww_library(CUlibrary h, struct ww_object **o, struct ww_loaded_image **c) {
    struct ww_device *d = some_device();
    *o = ww_object(h, WW_LIBRARY);
    return !*o ? CUDA_ERROR_INVALID_HANDLE : !d ? CUDA_ERROR_INVALID_CONTEXT : code_on((*o)->more, d, NULL, c);
}

int ww_body_cuLibraryGetKernel(struct ww_loaded_image *c, struct ww_object *o, CUkernel *kernel, const char *name) {
    return fn_named(c, name) ? kernel_named(o, name, kernel) : CUDA_ERROR_NOT_FOUND;
}

int ww_body_cuLibraryGetKernelCount(struct ww_loaded_image *c, unsigned *count) {
    *count = c->nfns;
    return 0;
}

int ww_body_cuLibraryEnumerateKernels(struct ww_loaded_image *c, struct ww_object *o, CUkernel *kernels,
                                      unsigned most) {
    int error = 0;
    for (unsigned i = 0; i < most && i < c->nfns && !error; i++)
        error = kernel_named(o, c->fns[i]->name, &kernels[i]);
    return error;
}

int ww_body_cuLibraryGetModule(struct ww_loaded_image *c, CUmodule *module) {
    int error = module_handle(c, module);
    if (!error)
        c->module->flags = OF_LIBRARY;
    return error;
}

/* -- functions ----------------------------------------------------------------------------------------------------- */

/* Find the function of a library's kernel on a device; load the library at its first use there. */
static int fn_on(struct ww_object *o, struct ww_device *d, struct ww_fn **f) {
    struct kernel *k = o->more;
    struct ww_loaded_image *c;
    *f = atomic_load_explicit(&k->fns[d - layer.devices], memory_order_acquire);
    if (__builtin_expect(*f && (*f)->object->life == atomic_load_explicit(&d->life, memory_order_relaxed), 1))
        return 0;
    WW_LOCK(&layer.loading);
    int error = ww_object(o, WW_KERNEL) ? code_on(k->library->more, d, NULL, &c) : CUDA_ERROR_INVALID_HANDLE;
    if (error || !(*f = fn_named(c, k->name)))
        return error ? error : CUDA_ERROR_NOT_FOUND;
    (*f)->kernel = o;
    atomic_store_explicit(&k->fns[d - layer.devices], *f, memory_order_release);
    return 0;
}

int ww_fn_of(void *h, struct ww_device *d, struct ww_fn **f) {
    struct ww_object *o = ww_object(h, WW_FUNCTION);
    if (o) {
        *f = o->more;
        return o->device == d ? 0 : CUDA_ERROR_INVALID_HANDLE;
    }
    o = ww_object(h, WW_KERNEL);
    return o ? fn_on(o, d, f) : CUDA_ERROR_INVALID_HANDLE;
}

int ww_function(void *h, struct ww_device *d, uint32_t *id) {
    struct ww_fn *f;
    int error = ww_fn_of(h, d, &f);
    if (!error)
        *id = f->object->id;
    return error;
}

int ww_fn_any(void *h, struct ww_fn **f) {
    struct ww_object *o = ww_object(h, WW_FUNCTION);
    struct ww_device *d;
    int error = o ? ww_ready() : ww_need(&d);
    return error ? error : ww_fn_of(h, o ? o->device : d, f);
}

int ww_get_attribute(const struct ww_fn *f, int attribute, int *value) {
    if (!value || attribute < 0 || attribute >= (int)WW_FUNCTION_ATTRIBUTES)
        return CUDA_ERROR_INVALID_VALUE;
    *value = atomic_load_explicit(&((struct ww_fn *)f)->attributes[attribute], memory_order_relaxed);
    return *value == -1 && attribute > CU_FUNC_SHARED_CARVEOUT ? CUDA_ERROR_INVALID_VALUE : 0;
}

int ww_set_attribute(struct ww_fn *f, int attribute, int value) {
    if (attribute < 0 || attribute >= (int)WW_FUNCTION_ATTRIBUTES)
        return CUDA_ERROR_INVALID_VALUE;
    int error = ww_call_function_set(f->object->device, WW_OP_FUNCTION_SET, 0, f->object->id, (uint32_t)attribute,
                                     value, NULL, 0);
    if (!error)
        atomic_store_explicit(&f->attributes[attribute], value, memory_order_relaxed);
    return error;
}

int ww_body_cuKernelSetCacheConfig(struct ww_fn *f, int config) {
    struct ww_args_cuFuncSetCacheConfig args = {f->object->id, config};
    return ww_call(f->object->device, WW_OP_cuFuncSetCacheConfig, 0, &args, sizeof args, NULL, 0);
}

int ww_param_info(const struct ww_fn *f, size_t i, size_t *offset, size_t *nbytes) {
    if (i >= f->nparams || !offset)
        return CUDA_ERROR_INVALID_VALUE;
    *offset = f->params[i].offset;
    if (nbytes)
        *nbytes = f->params[i].size;
    return 0;
}

int ww_body_cuFuncGetModule(struct ww_fn *f, CUmodule *module) {
    if (f->kernel)
        return cuLibraryGetModule(module, (CUlibrary)(void *)((struct kernel *)f->kernel->more)->library);
    *module = (CUmodule)(void *)f->module;
    return f->module ? 0 : CUDA_ERROR_INVALID_HANDLE;
}

int ww_body_cuKernelGetName(struct ww_object *o, const char **name) {
    *name = ((struct kernel *)o->more)->name;
    return 0;
}

int ww_body_cuKernelGetLibrary(struct ww_object *o, CUlibrary *library) {
    *library = (CUlibrary)(void *)((struct kernel *)o->more)->library;
    return 0;
}

/* -- occupancy ----------------------------------------------------------------------------------------------------- */

/* Find the block size with the most resident threads on a multiprocessor; of equal sizes, the largest. Each size is a
 * query to the driver. */
int ww_body_cuOccupancyMaxPotentialBlockSizeWithFlags(struct ww_device *d, struct ww_fn *f, int *grid, int *block,
                                                      CUfunction h, void *shared_of, size_t shared, int limit,
                                                      unsigned flags) {
    int error, best = 0, n;
    int most = f->attributes[CU_FUNC_MAX_THREADS], warp = d->facts.attributes[CU_DEVICE_WARP_SIZE];
    size_t (*callback)(int) = (size_t (*)(int))(uintptr_t)shared_of;
    most = limit > 0 && limit < most ? limit : most;
    *grid = *block = 0;
    for (int size = most; size > 0 && warp > 0; size = size % warp ? size - size % warp : size - warp) {
        size_t bytes = callback ? callback(size) : shared;
        if ((error = cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&n, h, size, bytes, flags)))
            return error;
        if (n * size > best) {
            best = n * size;
            *block = size;
            *grid = n * d->facts.attributes[CU_DEVICE_MULTIPROCESSORS];
        }
    }
    return 0;
}
