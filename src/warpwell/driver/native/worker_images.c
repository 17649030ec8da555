/* Images, modules, functions. A library of the client is a module here, because a worker has only one context.
 *
 * The heavy thread loads and unloads modules, and gives functions their ids; the executor looks functions up.
 */
#include "worker.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define IMAGES_MOST (2ull << 30) /* bytes of the images that arrive or are being loaded */
#define GLOBALS_MOST 65536u

struct image {
    unsigned char *bytes;
    uint64_t got, total;
};

struct module {
    CUmodule native;
    uint32_t n;
    struct ww_native_function **functions;
};

struct global {
    uint64_t at, nbytes;
    uint32_t module;
};

struct load { /* used by the heavy thread while a module is loaded */
    struct image image;
    struct module *module;
    uint32_t log_bytes[2]; /* of the information log, of the error log */
    char *logs[2];
    unsigned char *answer;
    size_t bytes, room;
};

static struct image arriving;
static uint64_t image_bytes; /* of `arriving` and of images that the heavy thread loads */
static struct module *modules[WW_MODULES];
static char loading[WW_MODULES]; /* 1: the load or unload of this module id is not finished */
static struct ww_native_function *functions[WW_FUNCTIONS];
static uint32_t *free_ids, nfree_ids, next_id = 1; /* used by the heavy thread alone */
static size_t free_room;
static struct global *globals;
static uint32_t nglobals;
static size_t globals_room;

/* -- images -------------------------------------------------------------------------------------------------------- */

CUresult ww_image(const struct ww_call *call, const struct ww_args_image *args) {
    struct image *image = &arriving;
    if (!call->entry.place || !args->total)
        return CUDA_ERROR_INVALID_VALUE;
    if (args->offset == 0) {
        image_bytes -= image->total;
        free(image->bytes);
        *image = (struct image){0};
        if (args->total > WW_IMAGE_MOST)
            return CUDA_ERROR_INVALID_IMAGE;
        if (args->total > IMAGES_MOST - image_bytes)
            return CUDA_ERROR_OUT_OF_MEMORY;
        image->bytes = calloc(1, args->total + 64); /* the driver expects a 0 after PTX text */
        if (!image->bytes)
            return CUDA_ERROR_OUT_OF_MEMORY;
        image->total = args->total;
        image_bytes += args->total;
    }
    if (!image->bytes || args->total != image->total || args->offset != image->got ||
        call->entry.nbytes > image->total - image->got || call->entry.nbytes > WW_PLACE_BYTES)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(image->bytes + image->got, ww.staging + (size_t)(call->entry.place - 1) * WW_PLACE_BYTES,
           call->entry.nbytes);
    image->got += call->entry.nbytes;
    ww_place_done(call->entry.place, call->entry.use, CUDA_SUCCESS);
    return CUDA_SUCCESS;
}

/* -- loading, in the heavy thread ---------------------------------------------------------------------------------- */

static void put(struct load *l, const void *bytes, size_t n) {
    if (l->bytes + n > l->room) {
        l->room = 2 * (l->bytes + n);
        l->answer = realloc(l->answer, l->room);
        if (!l->answer)
            ww_die("out of memory for the answer of a load");
    }
    memcpy(l->answer + l->bytes, bytes, n);
    l->bytes += n;
}

/* Return true if an option's value is a number, which the client may choose. Other values are pointers or outputs. */
static int is_plain(uint32_t option) {
    static const uint64_t plain = 1 << 0 | 1 << 1 | 1 << 7 | 1 << 8 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 12 | 1 << 13 |
                                  1 << 14 | 1 << 15 | 1 << 20 | 1 << 21 | 1 << 22 | 1 << 23 | 1ull << 30 | 1ull << 31;
    return option < 64 && (plain >> option & 1);
}

static CUresult load_module(struct load *l, const struct ww_call *call, CUmodule *out) {
    const struct ww_args_load *args = (const void *)call->args;
    const struct ww_option *from = (const void *)(args + 1);
    int32_t names[WW_OPTIONS + 4];
    void *values[WW_OPTIONS + 4];
    uint32_t n = 0;
    for (; n < args->options; n++) {
        if (!is_plain(from[n].option))
            return CUDA_ERROR_NOT_SUPPORTED;
        names[n] = (int32_t)from[n].option;
        values[n] = (void *)(uintptr_t)from[n].value;
    }
    uint32_t sizes[2] = {0};
    for (int i = 0; i < 2; i++) {
        if (!l->log_bytes[i])
            continue;
        names[n] = i ? CU_JIT_ERROR_LOG : CU_JIT_INFO_LOG, values[n++] = l->logs[i];
        names[n] = i ? CU_JIT_ERROR_LOG_BYTES : CU_JIT_INFO_LOG_BYTES;
        values[sizes[i] = n++] = (void *)(uintptr_t)l->log_bytes[i];
    }
    CUresult code = native.cuModuleLoadDataEx(out, l->image.bytes, n, names, values);
    /* the driver stores the sizes that it wrote; do not trust a size beyond the buffer */
    for (int i = 0; i < 2; i++)
        if (l->log_bytes[i] && (uint32_t)(uintptr_t)values[sizes[i]] < l->log_bytes[i])
            l->log_bytes[i] = (uint32_t)(uintptr_t)values[sizes[i]];
    return code;
}

static uint32_t take_id(void) {
    if (nfree_ids)
        return free_ids[--nfree_ids];
    return next_id < WW_FUNCTIONS ? next_id++ : 0;
}

static void give_id(uint32_t id) {
    free_ids = ww_grown(free_ids, nfree_ids, &free_room, sizeof *free_ids);
    free_ids[nfree_ids++] = id;
}

static struct ww_native_function *make_function(CUfunction native_function) {
    struct ww_native_function *f = ww_memory(sizeof *f);
    f->native = native_function;
    f->param = ww_memory(4096 * sizeof *f->param);
    size_t offset, size;
    while (f->params < 4096 && !native.cuFuncGetParamInfo(native_function, f->params, &offset, &size))
        f->param[f->params++] = (struct ww_param){(uint32_t)offset, (uint32_t)size};
    struct ww_param *exact = realloc(f->param, (f->params + 1) * sizeof *f->param);
    if (exact)
        f->param = exact;
    return f;
}

static CUresult add_function(struct load *l, CUfunction native_function) {
    static const unsigned char zeros[8];
    const char *name = NULL;
    CUresult code = native.cuFuncGetName(&name, native_function);
    if (code)
        return code;
    size_t length = strlen(name) + 1;
    if (length > WW_NAME_MOST)
        return CUDA_ERROR_INVALID_IMAGE;
    uint32_t id = take_id();
    if (!id)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct ww_native_function *f = make_function(native_function);
    f->id = id;
    functions[id] = f;
    l->module->functions[l->module->n++] = f;
    struct ww_function properties = {.id = id, .params = f->params, .name_bytes = (uint32_t)length};
    for (int i = 0; i < (int)WW_FUNCTION_ATTRIBUTES; i++)
        if (native.cuFuncGetAttribute(properties.attributes + i, i, native_function))
            properties.attributes[i] = -1;
    put(l, &properties, sizeof properties);
    put(l, f->param, f->params * sizeof *f->param);
    put(l, name, length);
    put(l, zeros, (8 - length % 8) % 8);
    return CUDA_SUCCESS;
}

static CUresult add_functions(struct load *l) {
    uint32_t n = 0;
    CUresult code = native.cuModuleGetFunctionCount(&n, l->module->native);
    if (code || !n)
        return code;
    CUfunction *all = ww_memory(n * sizeof *all);
    l->module->functions = ww_memory(n * sizeof *l->module->functions);
    code = native.cuModuleEnumerateFunctions(all, n, l->module->native);
    for (uint32_t i = 0; i < n && !code; i++)
        code = add_function(l, all[i]);
    free(all);
    return code;
}

static void drop_module(struct module *m) {
    for (uint32_t i = 0; i < m->n; i++) {
        struct ww_native_function *f = m->functions[i];
        functions[f->id] = NULL;
        give_id(f->id);
        free(f->param);
        free(f);
    }
    native.cuModuleUnload(m->native);
    free(m->functions);
    free(m);
}

static void load(struct ww_job *job) {
    struct load *l = job->with;
    struct ww_loaded head = {0};
    l->module = ww_memory(sizeof *l->module);
    job->result = load_module(l, job->call, &l->module->native);
    put(l, &head, sizeof head);
    if (job->result) {
        free(l->module);
        l->module = NULL;
    } else {
        job->result = add_functions(l);
        if (job->result) {
            drop_module(l->module);
            l->module = NULL;
            l->bytes = sizeof head;
        }
    }
    head.functions = l->module ? l->module->n : 0;
    head.info_bytes = l->log_bytes[0];
    head.error_bytes = l->log_bytes[1];
    for (int i = 0; i < 2; i++)
        put(l, l->logs[i], l->log_bytes[i]);
    memcpy(l->answer, &head, sizeof head);
    job->data = l->answer;
    job->nbytes = l->bytes;
}

static void loaded(struct ww_job *job) {
    struct load *l = job->with;
    const struct ww_args_load *args = (const void *)job->call->args;
    loading[args->module] = 0;
    modules[args->module] = l->module;
    image_bytes -= l->image.total;
    ww_answer(job->slot, job->seq, job->result, job->data, job->nbytes);
    free(l->image.bytes);
    free(l->logs[0]);
    free(l->logs[1]);
    free(l);
}

CUresult ww_load(const struct ww_call *call, const struct ww_args_load *args) {
    if (!args->module || args->module >= WW_MODULES || args->options > WW_OPTIONS ||
        args->options * sizeof(struct ww_option) > call->nargs - sizeof *args || modules[args->module] ||
        loading[args->module])
        return CUDA_ERROR_INVALID_VALUE;
    if (!arriving.bytes || arriving.got != arriving.total)
        return CUDA_ERROR_INVALID_IMAGE;
    if (args->info_most > WW_LOG_MOST || args->error_most > WW_LOG_MOST)
        return CUDA_ERROR_INVALID_VALUE;
    struct load *l = ww_memory(sizeof *l);
    l->image = arriving;
    arriving = (struct image){0};
    loading[args->module] = 1;
    l->log_bytes[0] = args->info_most;
    l->log_bytes[1] = args->error_most;
    for (int i = 0; i < 2; i++)
        l->logs[i] = ww_memory(l->log_bytes[i] + 1);
    return ww_heavy_for(call, (struct ww_job){.work = load, .done = loaded, .with = l, .call = ww_copy_call(call)});
}

/* -- unloading ----------------------------------------------------------------------------------------------------- */

static void unload(struct ww_job *job) {
    drop_module(job->with);
    job->result = CUDA_SUCCESS;
}

static void unloaded(struct ww_job *job) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < nglobals; i++)
        if (globals[i].module != job->a)
            globals[kept++] = globals[i];
    nglobals = kept;
    loading[job->a] = 0;
    ww_answer(job->slot, job->seq, job->result, NULL, 0);
}

static void start_unload(struct ww_barrier *barrier) {
    ww_heavy_behind(barrier,
                    (struct ww_job){.work = unload, .done = unloaded, .a = barrier->key, .with = barrier->with});
}

CUresult ww_unload(const struct ww_call *call, const struct ww_args_id *args) {
    struct module *m = args->id < WW_MODULES ? modules[args->id] : NULL;
    if (!m)
        return CUDA_ERROR_INVALID_HANDLE;
    modules[args->id] = NULL;
    loading[args->id] = 1;
    for (uint32_t i = 0; i < m->n; i++)
        functions[m->functions[i]->id] = NULL; /* calls that are read later do not find the function */
    return ww_barrier_for(call, (struct ww_barrier){.then = start_unload, .key = args->id, .with = m});
}

/* -- functions, globals -------------------------------------------------------------------------------------------- */

struct ww_native_function *ww_function(uint32_t id) { return id < WW_FUNCTIONS ? functions[id] : NULL; }

int ww_find_function(uint32_t id, CUfunction *out) {
    struct ww_native_function *f = ww_function(id);
    if (!f)
        return CUDA_ERROR_INVALID_HANDLE;
    *out = f->native;
    return CUDA_SUCCESS;
}

static void set_function(struct ww_job *job) {
    const struct ww_args_function_set *args = (const void *)job->call->args;
    CUfunction f;
    job->result = ww_find_function(args->function, &f);
    if (!job->result)
        job->result = native.cuFuncSetAttribute(f, (int32_t)args->attribute, args->value);
}

CUresult ww_function_set(const struct ww_call *call) {
    return ww_heavy_for(call, (struct ww_job){.work = set_function, .call = ww_copy_call(call)});
}

static void find_global(struct ww_job *job) {
    const struct ww_args_global *args = (const void *)job->call->args;
    const struct module *m = job->with;
    CUdeviceptr at = 0;
    size_t n = 0;
    job->result = native.cuModuleGetGlobal_v2(&at, &n, m->native, (const char *)(args + 1));
    job->a = at;
    job->b = n;
}

static void found_global(struct ww_job *job) {
    const struct ww_args_global *args = (const void *)job->call->args;
    struct ww_range range = {job->a, job->b};
    if (!job->result && !ww_is_global(job->a, job->b) && nglobals < GLOBALS_MOST &&
        modules[args->module] == job->with) {
        globals = ww_grown(globals, nglobals, &globals_room, sizeof *globals);
        globals[nglobals++] = (struct global){job->a, job->b, args->module};
    }
    ww_answer(job->slot, job->seq, job->result, &range, job->result ? 0 : sizeof range);
}

CUresult ww_global(const struct ww_call *call, const struct ww_args_global *args) {
    if (!args->name_bytes || args->name_bytes > WW_NAME_MOST || args->name_bytes > call->nargs - sizeof *args ||
        call->args[sizeof *args + args->name_bytes - 1])
        return CUDA_ERROR_INVALID_VALUE;
    if (args->module >= WW_MODULES || !modules[args->module])
        return CUDA_ERROR_INVALID_HANDLE;
    struct ww_job job = {.work = find_global, .done = found_global, .with = modules[args->module]};
    job.call = ww_copy_call(call);
    return ww_heavy_for(call, job);
}

int ww_is_global(uint64_t at, uint64_t n) {
    for (uint32_t i = 0; i < nglobals; i++)
        if (at >= globals[i].at && n <= globals[i].nbytes && at - globals[i].at <= globals[i].nbytes - n)
            return 1;
    return 0;
}
