/* The fake driver: images, functions, launches. See fake.h.
 *
 * An image is one of
 *
 *     text that begins with //FAKE   lines `kernel NAME SIZE ..` (bytes of its parameters) and `global NAME BYTES`;
 *                                    these kernels compute, see `KERNELS`
 *     cubin (ELF)                    kernels from sections .text.NAME, parameters from .nv.info.NAME, globals from
 *                                    symbols
 *     PTX                            kernels and parameters from .entry, globals from .global
 *     fatbin, or a wrapper of one    its uncompressed cubin or PTX; if it is compressed, any name is found, as a kernel
 *                                    without parameters
 *
 * Kernels that are not in `KERNELS` do nothing, in the order of their stream. A C++ kernel is found in `KERNELS` by its
 * name without mangling.
 */
#include "fake.h"

#include <ctype.h>
#include <elf.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MOST_PARAMS 256
#define MOST_THREADS 1024
#define MOST_SHARED 232448

struct global {
    char *name;
    uint64_t address, size;
    void *initial; /* bytes, or NULL: zeros */
    struct global *next;
};

struct CUmod_st {
    struct fake_object object;
    int any; /* compressed fatbin: any name is found */
    struct CUfunc_st *functions;
    struct global *globals;
};

struct CUfunc_st {
    struct fake_object object;
    char *name;
    CUmodule module;
    int loaded, nparams, max_dynamic, carveout, most; /* most: maximum number of threads of a block */
    int registers, shared, constants, local;          /* as the image states them */
    uint32_t offsets[MOST_PARAMS], sizes[MOST_PARAMS];
    struct CUfunc_st *next;
};

struct CUlib_st { /* belongs to no context */
    struct fake_object object;
    CUmodule first, modules[FAKE_MOST_DEVICES]; /* first: as loaded. modules: by device, made at first use */
    struct CUkern_st *kernels;
};

struct CUkern_st {
    struct fake_object object;
    char *name;
    CUlibrary library;
    struct CUkern_st *next;
};

static struct CUctx_st no_context;

/* -- reading images ------------------------------------------------------------------------------------------------ */

static CUfunction find_function(CUmodule module, const char *name, size_t n) {
    for (CUfunction f = module->functions; f; f = f->next)
        if (strlen(f->name) == n && !memcmp(f->name, name, n))
            return f;
    return NULL;
}

static CUfunction add_function(CUmodule module, const char *name, size_t n) {
    CUfunction function = find_function(module, name, n);
    if (function)
        return function;
    function = fake_make(FAKE_FUNCTION, sizeof *function, module->object.context);
    function->name = strndup(name, n);
    function->module = module;
    function->registers = 32;
    function->most = MOST_THREADS;
    function->max_dynamic = fake_attribute(CU_DEVICE_SHARED_PER_BLOCK, 0);
    function->next = module->functions;
    module->functions = function;
    return function;
}

/* Append a parameter at the next offset that has its alignment: `align`, or its natural one if that is 0. */
static void add_param(CUfunction function, uint32_t size, uint32_t align) {
    int i = function->nparams;
    uint32_t end = i ? function->offsets[i - 1] + function->sizes[i - 1] : 0;
    if (i == MOST_PARAMS || !size)
        return;
    align = align ? align : size & -size;
    align = align > 16 ? 16 : align;
    function->offsets[i] = (end + align - 1) & -align;
    function->sizes[i] = size;
    function->nparams++;
}

static int add_global(CUmodule module, const char *name, size_t n, uint64_t size, const void *initial) {
    struct global *global = calloc(1, sizeof *global);
    if (!global || !(global->address = fake_allocate(module->object.context, size))) {
        free(global);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (initial && (global->initial = malloc(size))) {
        memcpy(global->initial, initial, size);
        memcpy((void *)global->address, initial, size);
    }
    global->name = strndup(name, n);
    global->size = size;
    global->next = module->globals;
    module->globals = global;
    return CUDA_SUCCESS;
}

static int read_fake(CUmodule module, const char *text) {
    int error = CUDA_SUCCESS;
    for (const char *line = strchr(text, '\n'); line && !error; line = strchr(line + 1, '\n')) {
        char name[128];
        int used = 0;
        unsigned long size;
        if (sscanf(line + 1, "kernel %127s%n", name, &used) == 1) {
            CUfunction function = add_function(module, name, strlen(name));
            const char *at = line + 1 + used;
            for (at += strspn(at, " "); isdigit((unsigned char)*at); at += strspn(at, " "))
                add_param(function, (uint32_t)strtoul(at, (char **)&at, 10), 0);
        } else if (sscanf(line + 1, "global %127s %lu", name, &size) == 2) {
            error = add_global(module, name, strlen(name), size, NULL);
        }
    }
    return error;
}

static uint32_t ptx_size(const char *type) {
    for (; *type && !isdigit((unsigned char)*type); type++)
        ;
    return (uint32_t)atoi(type) / 8;
}

static size_t word(const char *text) { return strcspn(text, " \t\r\n[](),;={"); }

/* Parse `.align 4 .b8 name[12]` or `.u64 .ptr .align 1 name`. Return its size in bytes; set its alignment and name. */
static uint64_t ptx_declared(const char *at, const char *end, uint32_t *align, const char **name, size_t *n) {
    uint64_t size = 0, count = 1;
    *align = 0;
    *n = 0;
    while (at < end) {
        at += strspn(at, " \t\r\n");
        if (at >= end)
            break;
        if (*at == '.') {
            size_t length = word(at);
            if (!strncmp(at, ".align", 6)) {
                unsigned value = (unsigned)strtoul(at + 6, (char **)&at, 10);
                *align = size ? *align : value; /* after a type, it is the alignment of the pointer's target */
                continue;
            }
            if (!size && strchr("busf", at[1]) && isdigit((unsigned char)at[2]))
                size = ptx_size(at);
            at += length;
        } else if (*at == '[') {
            uint64_t k = strtoull(at + 1, (char **)&at, 10);
            count *= k ? k : 1;
            at = strchr(at, ']') ? strchr(at, ']') + 1 : end;
        } else if (!*n) {
            *name = at;
            *n = word(at);
            at += *n ? *n : 1;
        } else {
            break;
        }
    }
    return size * count;
}

/* Limit the threads of a block as the directives .maxntid and .maxnreg do. */
static void bound(CUfunction function, const char *at, const char *end) {
    const char *threads = strstr(at, ".maxntid"), *registers = strstr(at, ".maxnreg");
    if (threads && threads < end)
        function->most = atoi(threads + 8);
    if (registers && registers < end) {
        function->registers = atoi(registers + 8);
        int most = 65536 / ((function->registers + 7) / 8 * 256) * 32;
        function->most = most < function->most ? most : function->most;
    }
}

static int read_ptx(CUmodule module, const char *text) {
    uint32_t align;
    const char *name = NULL;
    size_t n;
    for (const char *at = strstr(text, ".entry"); at; at = strstr(at + 1, ".entry")) {
        const char *entry = at + 6 + strspn(at + 6, " \t\r\n");
        const char *close = entry + strcspn(entry, ")"), *body = entry + strcspn(entry, "{");
        CUfunction function = add_function(module, entry, word(entry));
        for (const char *p = strstr(entry, ".param"); p && p < close && p < body; p = strstr(p + 1, ".param")) {
            const char *end = p + strcspn(p, ",)");
            uint32_t size = (uint32_t)ptx_declared(p + 6, end, &align, &name, &n);
            add_param(function, size, align);
        }
        bound(function, close, body);
    }
    for (const char *at = strstr(text, ".global"); at; at = strstr(at + 1, ".global")) {
        const char *end = at + strcspn(at, ";={");
        const char *line = at;
        while (line > text && line[-1] != '\n' && line[-1] != ';')
            line--;
        line += strspn(line, " \t\r");
        if (line != at && strncmp(line, ".visible", 8) && strncmp(line, ".weak", 5)) /* not a declaration */
            continue;
        uint64_t size = ptx_declared(at + 7, end, &align, &name, &n);
        if (size && n && add_global(module, name, n, size, NULL))
            return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return CUDA_SUCCESS;
}

/* Read a kernel's parameters from its .nv.info section, which has records of (format, attribute, size, bytes). */
static void read_info(CUfunction function, const unsigned char *at, const unsigned char *end) {
    while (at + 4 <= end) {
        unsigned format = at[0], attribute = at[1], value = at[2] | at[3] << 8;
        at += 4;
        if (format != 4)
            continue;
        if (attribute == 0x17 && value >= 12 && at + 12 <= end) { /* KPARAM: index, ordinal, offset, size */
            uint16_t ordinal, offset;
            uint32_t flags;
            memcpy(&ordinal, at + 4, 2);
            memcpy(&offset, at + 6, 2);
            memcpy(&flags, at + 8, 4);
            if (ordinal < MOST_PARAMS) {
                function->offsets[ordinal] = offset;
                function->sizes[ordinal] = flags >> 18;
                function->nparams = ordinal + 1 > function->nparams ? ordinal + 1 : function->nparams;
            }
        }
        at += value;
    }
}

/* Read each kernel's bytes of local memory and number of registers from records (symbol, number) of .nv.info. */
static void read_frames(CUmodule module, const unsigned char *at, const unsigned char *end, const Elf64_Sym *symbols,
                        size_t nsymbols, const char *names) {
    while (at + 4 <= end) {
        unsigned format = at[0], attribute = at[1], value = at[2] | at[3] << 8;
        uint32_t record[2];
        at += 4;
        if (format != 4)
            continue;
        if ((attribute == 0x11 || attribute == 0x2f) && value == 8 && at + 8 <= end) {
            memcpy(record, at, 8);
            const char *name = record[0] < nsymbols ? names + symbols[record[0]].st_name : "";
            CUfunction function = find_function(module, name, strlen(name));
            if (function)
                *(attribute == 0x11 ? &function->local : &function->registers) = (int)record[1];
        }
        at += value;
    }
}

/* Read a section about one kernel, whose name ends the section's name. Section .nv.constant3 is about all kernels. */
static void read_section(CUmodule module, const Elf64_Shdr *section, const char *name, const unsigned char *bytes) {
    static const char *const KINDS[] = {".nv.info.", ".nv.shared."};
    int reserved = fake_attribute(CU_DEVICE_RESERVED_SHARED_PER_BLOCK, 0), bytes_shared = (int)section->sh_size;
    for (size_t i = 0; i < sizeof KINDS / sizeof *KINDS; i++) {
        size_t n = strlen(KINDS[i]);
        CUfunction function = strncmp(name, KINDS[i], n) ? NULL : find_function(module, name + n, strlen(name + n));
        if (!function)
            continue;
        if (i == 0)
            read_info(function, bytes, bytes + section->sh_size);
        else
            function->shared = bytes_shared > reserved ? bytes_shared - reserved : bytes_shared;
    }
    for (CUfunction f = module->functions; f && !strcmp(name, ".nv.constant3"); f = f->next)
        f->constants = (int)section->sh_size;
}

static int read_symbols(CUmodule module, const unsigned char *image, const Elf64_Shdr *sections,
                        const Elf64_Shdr *section, const Elf64_Shdr *info) {
    const char *text = (const char *)image + sections[section->sh_link].sh_offset;
    const Elf64_Sym *symbols = (const void *)(image + section->sh_offset);
    size_t n = section->sh_entsize ? section->sh_size / section->sh_entsize : 0;
    for (size_t i = 0; i < n; i++) {
        const char *name = text + symbols[i].st_name;
        const Elf64_Shdr *home = &sections[symbols[i].st_shndx];
        if (ELF64_ST_TYPE(symbols[i].st_info) != STT_OBJECT || !symbols[i].st_size ||
            symbols[i].st_shndx >= SHN_LORESERVE)
            continue;
        bool is_initialized =
            home->sh_type == SHT_PROGBITS && symbols[i].st_value + symbols[i].st_size <= home->sh_size;
        const void *initial = is_initialized ? image + home->sh_offset + symbols[i].st_value : NULL;
        if (add_global(module, name, strlen(name), symbols[i].st_size, initial))
            return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (info)
        read_frames(module, image + info->sh_offset, image + info->sh_offset + info->sh_size, symbols, n, text);
    return CUDA_SUCCESS;
}

static int read_elf(CUmodule module, const unsigned char *image) {
    const Elf64_Ehdr *head = (const void *)image;
    const Elf64_Shdr *sections = (const void *)(image + head->e_shoff);
    if (head->e_ident[EI_CLASS] != ELFCLASS64 || !head->e_shnum || head->e_shentsize != sizeof *sections)
        return CUDA_ERROR_INVALID_IMAGE;
    const char *names = (const char *)image + sections[head->e_shstrndx].sh_offset;
    for (int i = 0; i < head->e_shnum; i++) {
        const char *name = names + sections[i].sh_name;
        if (!strncmp(name, ".text.", 6))
            add_function(module, name + 6, strlen(name + 6));
    }
    const Elf64_Shdr *info = NULL;
    int error = CUDA_SUCCESS;
    for (int i = 0; i < head->e_shnum; i++) {
        const char *name = names + sections[i].sh_name;
        read_section(module, &sections[i], name, image + sections[i].sh_offset);
        if (!strcmp(name, ".nv.info"))
            info = &sections[i];
    }
    for (int i = 0; i < head->e_shnum && !error; i++)
        if (sections[i].sh_type == SHT_SYMTAB)
            error = read_symbols(module, image, sections, &sections[i], info);
    return error;
}

/* Header of an entry of a fatbin; the bytes of the entry follow. */
struct fat_entry {
    uint16_t kind, version; /* 1 PTX, 2 cubin */
    uint32_t header_bytes;
    uint64_t nbytes;
    uint32_t packed_bytes, unused[2], capability; /* major * 10 + minor */
    uint32_t name[2];
    uint64_t flags;
};

#define FAT_PTX 1
#define FAT_COMPRESSED 0xf000u /* flags */

/* Read the first cubin for this device, else the last PTX. If a compressed entry precedes both, any name is found. */
static int read_fatbin(CUmodule module, const unsigned char *image) {
    const struct fat_entry *ptx = NULL;
    uint16_t header_bytes;
    uint64_t nbytes, at = 0;
    int version = 10 * fake_attribute(CU_DEVICE_MAJOR, 0) + fake_attribute(CU_DEVICE_MINOR, 0);
    memcpy(&header_bytes, image + 6, sizeof header_bytes);
    memcpy(&nbytes, image + 8, sizeof nbytes);
    while (nbytes - at >= sizeof(struct fat_entry)) {
        const struct fat_entry *e = (const void *)(image + header_bytes + at);
        uint32_t most = nbytes - at < UINT32_MAX ? (uint32_t)(nbytes - at) : UINT32_MAX;
        if (e->header_bytes < sizeof *e || e->header_bytes > most || e->nbytes > nbytes - at - e->header_bytes ||
            e->flags & FAT_COMPRESSED)
            break;
        if (e->kind != FAT_PTX && e->capability / 10 == (uint32_t)version / 10 && e->capability <= (uint32_t)version)
            return read_elf(module, (const unsigned char *)e + e->header_bytes);
        if (e->kind == FAT_PTX)
            ptx = e;
        at += e->header_bytes + e->nbytes;
    }
    if (ptx)
        return read_ptx(module, (const char *)ptx + ptx->header_bytes);
    if (at == nbytes && at)
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    module->any = 1;
    return CUDA_SUCCESS;
}

static int read_image(CUmodule module, const void *image) {
    uint32_t magic;
    memcpy(&magic, image, 4);
    if (magic == 0x464c457f)
        return read_elf(module, image);
    if (magic == 0xba55ed50)
        return read_fatbin(module, image);
    if (magic == 0x466243b1) {
        const unsigned char *data;
        memcpy(&data, (const char *)image + 8, sizeof data);
        return read_fatbin(module, data);
    }
    if (!memcmp(image, "//FA", 4) && !strncmp(image, "//FAKE", 6))
        return read_fake(module, image);
    if (isprint(*(const unsigned char *)image) || isspace(*(const unsigned char *)image))
        return strstr(image, ".version") ? read_ptx(module, image) : CUDA_ERROR_INVALID_PTX;
    return CUDA_ERROR_INVALID_IMAGE;
}

static void drop_module(CUmodule module) {
    for (CUfunction f = module->functions; f; f = f->next)
        fake_drop(f); /* the memory stays: launches that wait in streams still look at it */
    while (module->globals) {
        struct global *next = module->globals->next;
        fake_release(module->globals->address);
        free(module->globals->name);
        free(module->globals->initial);
        free(module->globals);
        module->globals = next;
    }
    fake_drop(module);
}

static int load(CUmodule *module, const void *image) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    if (!module || !image)
        return leave(CUDA_ERROR_INVALID_VALUE);
    CUmodule made = fake_make(FAKE_MODULE, sizeof *made, context);
    if ((error = read_image(made, image)))
        drop_module(made);
    else
        *module = made;
    return leave(error);
}

/* -- modules, libraries -------------------------------------------------------------------------------------------- */

CUresult cuModuleLoadData(CUmodule *module, const void *image) { return load(module, image); }

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, uint32_t n, int32_t *options, void **values) {
    int error = load(module, image);
    for (uint32_t i = 0; i < n && options && values; i++) { /* logs: one line after an error, else empty */
        char *log = NULL;
        size_t room = 0;
        int wanted = options[i] == CU_JIT_ERROR_LOG ? CU_JIT_ERROR_LOG_BYTES : CU_JIT_INFO_LOG_BYTES;
        if (options[i] != CU_JIT_ERROR_LOG && options[i] != CU_JIT_INFO_LOG)
            continue;
        for (uint32_t k = 0; k < n; k++)
            if (options[k] == wanted) {
                room = (size_t)(uintptr_t)values[k];
                log = values[i];
                const char *text =
                    error && wanted == CU_JIT_ERROR_LOG_BYTES ? "the fake driver cannot read this image" : "";
                if (log && room)
                    snprintf(log, room, "%s", text);
                values[k] = (void *)(uintptr_t)(log && room ? strlen(log) + 1 : 0);
            }
    }
    return error;
}

static int unload(CUmodule module, const char *symbol) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    if (!fake_valid(module, FAKE_MODULE))
        return leave(CUDA_ERROR_INVALID_HANDLE);
    fake_wait_all(context, symbol);
    if (fake_valid(module, FAKE_MODULE))
        drop_module(module);
    return leave(CUDA_SUCCESS);
}

CUresult cuModuleUnload(CUmodule module) { return unload(module, "cuModuleUnload"); }

static int get_function(CUfunction *function, CUmodule module, const char *name) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    if (!function || !name || !*name)
        return leave(CUDA_ERROR_INVALID_VALUE);
    if (!fake_valid(module, FAKE_MODULE))
        return leave(CUDA_ERROR_INVALID_HANDLE);
    CUfunction found = find_function(module, name, strlen(name));
    if (!found && module->any)
        found = add_function(module, name, strlen(name));
    if (found)
        *function = found;
    return leave(found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND);
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    return get_function(function, module, name);
}

CUresult cuModuleGetFunctionCount(uint32_t *count, CUmodule module) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    if (!count || !fake_valid(module, FAKE_MODULE))
        return leave(CUDA_ERROR_INVALID_VALUE);
    *count = 0;
    for (CUfunction f = module->functions; f; f = f->next)
        ++*count;
    return leave(CUDA_SUCCESS);
}

CUresult cuModuleEnumerateFunctions(CUfunction *functions, uint32_t room, CUmodule module) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    if (!functions || !fake_valid(module, FAKE_MODULE))
        return leave(CUDA_ERROR_INVALID_VALUE);
    for (CUfunction f = module->functions; f && room; f = f->next, room--)
        *functions++ = f;
    return leave(CUDA_SUCCESS);
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *size, CUmodule module, const char *name) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    if (!name || !fake_valid(module, FAKE_MODULE))
        return leave(CUDA_ERROR_INVALID_VALUE);
    for (struct global *g = module->globals; g; g = g->next)
        if (!strcmp(g->name, name)) {
            if (address)
                *address = g->address;
            if (size)
                *size = g->size;
            return leave(CUDA_SUCCESS);
        }
    return leave(CUDA_ERROR_NOT_FOUND);
}

CUresult cuModuleGetLoadingMode(int32_t *mode) {
    const char *wanted = getenv("CUDA_MODULE_LOADING");
    if (!mode)
        return CUDA_ERROR_INVALID_VALUE;
    *mode = wanted && !strcmp(wanted, "EAGER") ? 1 : 2;
    return CUDA_SUCCESS;
}

/* -- libraries ----------------------------------------------------------------------------------------------------- */

CUresult cuLibraryLoadData(CUlibrary *library, const void *image, int32_t *options, void **values, uint32_t n,
                           int32_t *library_options, void **library_values, uint32_t nlibrary) {
    (void)options, (void)values, (void)n, (void)library_options, (void)library_values, (void)nlibrary;
    CUmodule first;
    int error = library ? load(&first, image) : CUDA_ERROR_INVALID_VALUE;
    if (error)
        return error;
    pthread_mutex_lock(&fake_lock);
    *library = fake_make(FAKE_LIBRARY, sizeof **library, &no_context);
    (*library)->first = first;
    (*library)->modules[first->object.context->device] = first;
    return leave(CUDA_SUCCESS);
}

/* Return a library's module in a context. Make it at first use, with the functions and globals of the first module. */
static CUmodule module_in(CUlibrary library, CUcontext context) {
    CUmodule module = library->modules[context->device];
    if (fake_valid(module, FAKE_MODULE))
        return module;
    module = library->modules[context->device] = fake_make(FAKE_MODULE, sizeof *module, context);
    module->any = library->first->any;
    for (CUfunction f = library->first->functions; f; f = f->next) {
        CUfunction copy = add_function(module, f->name, strlen(f->name));
        struct fake_object object = copy->object;
        struct CUfunc_st *next = copy->next;
        char *name = copy->name;
        *copy = *f;
        copy->object = object, copy->next = next, copy->name = name, copy->module = module, copy->loaded = 0;
    }
    for (struct global *g = library->first->globals; g; g = g->next)
        add_global(module, g->name, strlen(g->name), g->size, g->initial);
    return module;
}

/* Check a library, and find its module in the current context. Without an error, fake_lock is held. */
static int enter_library(CUlibrary library, CUmodule *module) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    if (!fake_valid(library, FAKE_LIBRARY))
        return leave(CUDA_ERROR_INVALID_HANDLE);
    *module = module_in(library, context);
    return CUDA_SUCCESS;
}

CUresult cuLibraryUnload(CUlibrary library) {
    CUmodule module;
    int error = enter_library(library, &module);
    if (error)
        return error;
    for (struct CUkern_st *k = library->kernels; k; k = k->next)
        fake_drop(k);
    fake_drop(library);
    leave(CUDA_SUCCESS);
    return unload(module, "cuLibraryUnload"); /* the library's modules in other contexts stay loaded */
}

static CUkernel kernel_named(CUlibrary library, const char *name) {
    CUkernel k = library->kernels;
    while (k && strcmp(k->name, name) != 0)
        k = k->next;
    if (k)
        return k;
    k = fake_make(FAKE_KERNEL, sizeof *k, &no_context);
    k->name = strdup(name);
    k->library = library;
    k->next = library->kernels;
    return library->kernels = k;
}

CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    CUmodule module;
    int error = enter_library(library, &module);
    if (error)
        return error;
    if (!kernel || !name || !*name)
        return leave(CUDA_ERROR_INVALID_VALUE);
    if (!module->any && !find_function(module, name, strlen(name)))
        return leave(CUDA_ERROR_NOT_FOUND);
    *kernel = kernel_named(library, name);
    return leave(CUDA_SUCCESS);
}

CUresult cuLibraryGetKernelCount(uint32_t *count, CUlibrary library) {
    CUmodule module;
    int error = enter_library(library, &module);
    return error ? error : (leave(CUDA_SUCCESS), cuModuleGetFunctionCount(count, module));
}

CUresult cuLibraryEnumerateKernels(CUkernel *kernels, uint32_t room, CUlibrary library) {
    CUmodule module;
    int error = enter_library(library, &module);
    if (error)
        return error;
    for (CUfunction f = kernels ? module->functions : NULL; f && room; f = f->next, room--)
        *kernels++ = kernel_named(library, f->name);
    return leave(kernels ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult cuLibraryGetModule(CUmodule *module, CUlibrary library) {
    CUmodule found;
    int error = enter_library(library, &found);
    if (error)
        return error;
    if (module)
        *module = found;
    return leave(module ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult cuLibraryGetGlobal(CUdeviceptr *address, size_t *size, CUlibrary library, const char *name) {
    CUmodule module;
    int error = enter_library(library, &module);
    return error ? error : (leave(CUDA_SUCCESS), cuModuleGetGlobal_v2(address, size, module, name));
}

/* All devices share the memory of this process, so any global is managed memory. */
CUresult cuLibraryGetManaged(CUdeviceptr *address, size_t *size, CUlibrary library, const char *name) {
    return cuLibraryGetGlobal(address, size, library, name);
}

/* -- functions ----------------------------------------------------------------------------------------------------- */

/* Return the function in a context that a handle means: a CUfunction, or a CUkernel, whose function is found there. */
static CUfunction function_in(CUfunction function, CUcontext context) {
    CUkernel kernel = (CUkernel)(void *)function;
    if (fake_valid(function, FAKE_FUNCTION))
        return function->object.context == context ? function : NULL;
    if (!fake_valid(kernel, FAKE_KERNEL))
        return NULL;
    CUmodule module = module_in(kernel->library, context);
    CUfunction found = find_function(module, kernel->name, strlen(kernel->name));
    return found ? found : add_function(module, kernel->name, strlen(kernel->name));
}

/* Replace a handle, CUfunction or CUkernel, by its function. Without an error, fake_lock is held. */
static int enter_function(CUfunction *function) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    CUfunction found = fake_valid(*function, FAKE_FUNCTION) ? *function : function_in(*function, context);
    if (!found)
        return leave(CUDA_ERROR_INVALID_HANDLE);
    *function = found;
    return CUDA_SUCCESS;
}

CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
    CUfunction found = (CUfunction)(void *)kernel;
    int error = enter_function(&found);
    if (error)
        return error;
    if (function)
        *function = found;
    return leave(function ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult cuFuncGetName(const char **name, CUfunction function) {
    int error = enter_function(&function);
    if (error)
        return error;
    if (name)
        *name = function->name;
    return leave(name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult cuKernelGetName(const char **name, CUkernel kernel) { return cuFuncGetName(name, (CUfunction)kernel); }

CUresult cuFuncGetModule(CUmodule *module, CUfunction function) {
    int error = enter_function(&function);
    if (error)
        return error;
    if (module)
        *module = function->module;
    return leave(module ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult cuKernelGetLibrary(CUlibrary *library, CUkernel kernel) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    if (!fake_valid(kernel, FAKE_KERNEL))
        return leave(CUDA_ERROR_INVALID_HANDLE);
    if (library)
        *library = kernel->library;
    return leave(library ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size) {
    int error = enter_function(&function);
    if (error)
        return error;
    if (!offset || index >= (size_t)function->nparams)
        return leave(CUDA_ERROR_INVALID_VALUE);
    *offset = function->offsets[index];
    if (size)
        *size = function->sizes[index];
    return leave(CUDA_SUCCESS);
}

CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t *offset, size_t *size) {
    return cuFuncGetParamInfo((CUfunction)kernel, index, offset, size);
}

CUresult cuFuncGetAttribute(int32_t *value, int32_t attribute, CUfunction function) {
    int error = enter_function(&function);
    if (error)
        return error;
    if (!value || attribute < 0 || attribute >= CU_FUNC_ATTRIBUTES)
        return leave(CUDA_ERROR_INVALID_VALUE);
    switch (attribute) {
    case CU_FUNC_MAX_THREADS:
        *value = function->most;
        break;
    case CU_FUNC_SHARED_BYTES:
        *value = function->shared;
        break;
    case CU_FUNC_CONST_BYTES:
        *value = function->constants;
        break;
    case CU_FUNC_LOCAL_BYTES:
        *value = function->local;
        break;
    case CU_FUNC_REGISTERS:
        *value = function->registers;
        break;
    case CU_FUNC_PTX_VERSION:
    case CU_FUNC_BINARY_VERSION:
        *value = 90;
        break;
    case CU_FUNC_MAX_DYNAMIC_SHARED:
        *value = function->max_dynamic;
        break;
    case CU_FUNC_SHARED_CARVEOUT:
        *value = function->carveout;
        break;
    default:
        *value = 0;
    }
    return leave(CUDA_SUCCESS);
}

CUresult cuKernelGetAttribute(int32_t *value, int32_t attribute, CUkernel kernel, CUdevice device) {
    (void)device;
    return cuFuncGetAttribute(value, attribute, (CUfunction)kernel);
}

CUresult cuFuncSetAttribute(CUfunction function, int32_t attribute, int32_t value) {
    int error = enter_function(&function);
    if (error)
        return error;
    if (attribute == CU_FUNC_MAX_DYNAMIC_SHARED && value >= 0 && value <= MOST_SHARED)
        function->max_dynamic = value;
    else if (attribute == CU_FUNC_SHARED_CARVEOUT && value >= -1 && value <= 100)
        function->carveout = value;
    else
        return leave(CUDA_ERROR_INVALID_VALUE);
    return leave(CUDA_SUCCESS);
}

CUresult cuKernelSetAttribute(int32_t attribute, int32_t value, CUkernel kernel, CUdevice device) {
    (void)device;
    return cuFuncSetAttribute((CUfunction)kernel, attribute, value);
}

CUresult cuFuncSetCacheConfig(CUfunction function, int32_t config) {
    int error = enter_function(&function);
    return error ? error : leave(config >= 0 && config <= 3 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult cuKernelSetCacheConfig(CUkernel kernel, int32_t config, CUdevice device) {
    (void)device;
    return cuFuncSetCacheConfig((CUfunction)kernel, config);
}

CUresult cuFuncSetSharedMemConfig(CUfunction function, int32_t config) {
    (void)config;
    int error = enter_function(&function);
    return error ? error : leave(CUDA_SUCCESS);
}

CUresult cuFuncIsLoaded(int32_t *state, CUfunction function) {
    int error = enter_function(&function);
    if (error)
        return error;
    if (state)
        *state = function->loaded;
    return leave(state ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult cuFuncLoad(CUfunction function) {
    int error = enter_function(&function);
    if (error)
        return error;
    function->loaded = 1;
    return leave(CUDA_SUCCESS);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int32_t *blocks, CUfunction function, int32_t threads,
                                                     size_t shared) {
    int error = enter_function(&function);
    if (error)
        return error;
    if (!blocks || threads < 1)
        return leave(CUDA_ERROR_INVALID_VALUE);
    size_t by_shared = (size_t)fake_attribute(CU_DEVICE_SHARED_PER_MULTIPROCESSOR, 0) / (shared + 1024);
    int by_threads = threads > MOST_THREADS ? 0 : 2048 / ((threads + 31) & ~31);
    by_threads = by_threads > 32 ? 32 : by_threads;
    *blocks = by_shared < (size_t)by_threads ? (int)by_shared : by_threads;
    return leave(CUDA_SUCCESS);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int32_t *blocks, CUfunction function, int32_t threads,
                                                              size_t shared, uint32_t flags) {
    return flags > 1 ? CUDA_ERROR_INVALID_VALUE
                     : cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, CUfunction function, int32_t blocks, int32_t threads) {
    int error = enter_function(&function);
    if (error)
        return error;
    if (!bytes || blocks < 1 || threads < 1)
        return leave(CUDA_ERROR_INVALID_VALUE);
    *bytes = (size_t)(fake_attribute(CU_DEVICE_SHARED_PER_MULTIPROCESSOR, 0) / blocks - 1024);
    return leave(CUDA_SUCCESS);
}

CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(int32_t *grid, int32_t *block, CUfunction function, void *shared_of,
                                                   size_t shared, int32_t most, uint32_t flags) {
    size_t (*shared_for)(int) = (size_t (*)(int))shared_of;
    int best = 0;
    if (!grid || !block || flags > 1)
        return CUDA_ERROR_INVALID_VALUE;
    most = most > 0 && most < MOST_THREADS ? most : MOST_THREADS;
    for (int threads = most; threads > 0; threads -= threads % 32 ? threads % 32 : 32) {
        int blocks, error = cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, threads,
                                                                        shared_for ? shared_for(threads) : shared);
        if (error)
            return error;
        if (blocks * threads > best) {
            best = blocks * threads;
            *block = threads;
            *grid = blocks * fake_attribute(CU_DEVICE_MULTIPROCESSORS, 0);
        }
    }
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxPotentialBlockSize(int32_t *grid, int32_t *block, CUfunction function, void *shared_of,
                                          size_t shared, int32_t most) {
    return cuOccupancyMaxPotentialBlockSizeWithFlags(grid, block, function, shared_of, shared, most, 0);
}

static uint32_t cluster_size(const struct cu_launch_config *c) {
    for (uint32_t i = 0; i < c->nattributes; i++)
        if (c->attributes[i].id == CU_LAUNCH_CLUSTER_DIMENSION)
            return c->attributes[i].value.cluster[0] * c->attributes[i].value.cluster[1] *
                   c->attributes[i].value.cluster[2];
    return 1;
}

/* Count as if 64 multiprocessors ran a block each, in clusters of at most 8 blocks. */
CUresult cuOccupancyMaxActiveClusters(int32_t *n, CUfunction function, void *config) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    if (!n || !config || !function_in(function, context))
        return leave(CUDA_ERROR_INVALID_VALUE);
    *n = cluster_size(config) > 8 ? 0 : 64 / (int32_t)cluster_size(config);
    return leave(CUDA_SUCCESS);
}

CUresult cuOccupancyMaxPotentialClusterSize(int32_t *n, CUfunction function, void *config) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    if (!n || !config || !function_in(function, context))
        return leave(CUDA_ERROR_INVALID_VALUE);
    *n = ((const struct cu_launch_config *)config)->block[0] > 512 ? 4 : 8;
    return leave(CUDA_SUCCESS);
}

/* -- kernels of the fake ------------------------------------------------------------------------------------------- */

static uint64_t param(const struct fake_op *op, int i) {
    uint64_t value = 0;
    if (i < op->function->nparams) {
        uint32_t size = op->function->sizes[i];
        memcpy(&value, (char *)op->data + op->function->offsets[i], size < 8 ? size : 8);
    }
    return value;
}

/* fill(dst, n, value): n 32-bit words. */
static int kernel_fill(struct fake_op *op) {
    uint32_t *dst = (uint32_t *)param(op, 0);
    uint64_t n = param(op, 1);
    if (n > UINT64_MAX / 4 || !fake_reachable(op->context, (uint64_t)dst, 4 * n))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    for (uint64_t i = 0; i < n; i++)
        dst[i] = (uint32_t)param(op, 2);
    return CUDA_SUCCESS;
}

/* copy(dst, src, n): n bytes. */
static int kernel_copy(struct fake_op *op) {
    uint64_t dst = param(op, 0), src = param(op, 1), n = param(op, 2);
    if (!fake_reachable(op->context, dst, n) || !fake_reachable(op->context, src, n))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    memmove((void *)dst, (const void *)src, n);
    return CUDA_SUCCESS;
}

/* add(dst, src, n): dst[i] += src[i] for n 32-bit words. */
static int kernel_add(struct fake_op *op) {
    uint32_t *dst = (uint32_t *)param(op, 0);
    const uint32_t *src = (const uint32_t *)param(op, 1);
    uint64_t n = param(op, 2);
    if (n > UINT64_MAX / 4 || !fake_reachable(op->context, (uint64_t)dst, 4 * n) ||
        !fake_reachable(op->context, (uint64_t)src, 4 * n))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    for (uint64_t i = 0; i < n; i++)
        dst[i] += src[i];
    return CUDA_SUCCESS;
}

/* nap(us) */
static int kernel_nap(struct fake_op *op) {
    uint64_t us = param(op, 0);
    struct timespec t = {(time_t)(us / 1000000), (long)(us % 1000000) * 1000};
    nanosleep(&t, NULL);
    return CUDA_SUCCESS;
}

/* flag(addr, value): run until the 32-bit word has the value, or the context is lost or reset. */
static int kernel_flag(struct fake_op *op) {
    uint64_t address = param(op, 0);
    for (;;) {
        pthread_rwlock_rdlock(&fake_memory);
        int known = fake_reachable(op->context, address, 4);
        int there = known && __atomic_load_n((uint32_t *)address, __ATOMIC_ACQUIRE) == (uint32_t)param(op, 1);
        pthread_rwlock_unlock(&fake_memory);
        if (!known)
            return CUDA_ERROR_ILLEGAL_ADDRESS;
        if (there || __atomic_load_n(&op->context->life, __ATOMIC_RELAXED) != op->life ||
            __atomic_load_n(&op->context->sticky, __ATOMIC_RELAXED))
            return CUDA_SUCCESS;
        usleep(50);
    }
}

/* fault(): the context is lost. */
static int kernel_fault(struct fake_op *op) {
    (void)op;
    return CUDA_ERROR_ILLEGAL_ADDRESS;
}

/* fail(): an assertion of device code: a line on stderr, and the context is lost. */
static int kernel_fail(struct fake_op *op) {
    (void)op;
    static const char line[] = "fake.cu:1: block: [0,0,0], thread: [0,0,0] Assertion `fail` failed.\n";
    return write(2, line, sizeof line - 1) < 0 ? CUDA_ERROR_UNKNOWN : CUDA_ERROR_ASSERT;
}

/* print(value): print a line, which appears at the next synchronization. */
static int kernel_print(struct fake_op *op) {
    CUcontext context = op->context;
    char line[64];
    int n = snprintf(line, sizeof line, "fake print %llu\n", (unsigned long long)param(op, 0));
    pthread_mutex_lock(&fake_lock);
    if (context->life == op->life) {
        context->printed = realloc(context->printed, context->nprinted + (size_t)n);
        if (!context->printed)
            abort();
        memcpy(context->printed + context->nprinted, line, (size_t)n);
        context->nprinted += (size_t)n;
    }
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}

/* condition(handle, value): set the value of a conditional node's handle. */
static int kernel_condition(struct fake_op *op) { return fake_set_condition(param(op, 0), (uint32_t)param(op, 1)); }

/* count(addr, handle): decrement a 32-bit word, and set the value of a conditional node's handle to it. */
static int kernel_count(struct fake_op *op) {
    uint32_t *word = (uint32_t *)param(op, 0);
    if (!fake_reachable(op->context, (uint64_t)word, 4))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    return fake_set_condition(param(op, 1), --*word);
}

static const struct {
    const char *name;
    int (*run)(struct fake_op *op);
    int memory; /* true: the kernel runs with fake_memory locked */
} KERNELS[] = {
    {"fill", kernel_fill, 1},   {"copy", kernel_copy, 1},   {"add", kernel_add, 1},
    {"nap", kernel_nap, 0},     {"flag", kernel_flag, 0},   {"fault", kernel_fault, 0},
    {"fail", kernel_fail, 0},   {"print", kernel_print, 0}, {"condition", kernel_condition, 0},
    {"count", kernel_count, 1},
};

/* Return true if a function has a name. C++ mangles it: _Z, the length of the name, the name, its parameters. */
static bool is_named(const char *function, const char *name) {
    size_t n = strlen(name);
    if (strncmp(function, "_Z", 2) != 0)
        return !strcmp(function, name);
    char *after;
    return strtoul(function + 2, &after, 10) == n && !strncmp(after, name, n);
}

static int run_kernel(struct fake_op *op) {
    for (size_t i = 0; i < sizeof KERNELS / sizeof *KERNELS; i++) {
        if (!is_named(op->function->name, KERNELS[i].name))
            continue;
        if (!KERNELS[i].memory)
            return KERNELS[i].run(op);
        pthread_rwlock_rdlock(&fake_memory);
        int error = KERNELS[i].run(op);
        pthread_rwlock_unlock(&fake_memory);
        return error;
    }
    return CUDA_SUCCESS;
}

/* -- launches ------------------------------------------------------------------------------------------------------ */

static int check_shape(const struct cu_launch_config *c, CUfunction function) {
    static const uint64_t GRID[3] = {2147483647, 65535, 65535}, BLOCK[3] = {1024, 1024, 64};
    uint64_t threads = 1;
    for (int i = 0; i < 3; i++) {
        if (!c->grid[i] || !c->block[i] || c->grid[i] > GRID[i] || c->block[i] > BLOCK[i])
            return CUDA_ERROR_INVALID_VALUE;
        threads *= c->block[i];
    }
    if (threads > MOST_THREADS || c->shared > (uint32_t)function->max_dynamic)
        return CUDA_ERROR_INVALID_VALUE;
    for (uint32_t i = 0; i < c->nattributes; i++)
        if (c->attributes[i].id > 18)
            return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

/* Pack the parameters as the kernel sees them, from `params` or from the buffer in `extra`. */
static int pack(struct fake_op *op, CUfunction function, void **params, void **extra) {
    int last = function->nparams - 1;
    size_t bytes = last >= 0 ? function->offsets[last] + function->sizes[last] : 0, given = 0;
    const void *buffer = NULL;
    for (; extra && *extra != CU_LAUNCH_END; extra += 2) {
        if (*extra == CU_LAUNCH_BUFFER)
            buffer = extra[1];
        else if (*extra == CU_LAUNCH_BUFFER_SIZE)
            given = *(size_t *)extra[1];
        else
            return CUDA_ERROR_INVALID_VALUE;
    }
    if (bytes && !params && (!buffer || given < bytes))
        return CUDA_ERROR_INVALID_VALUE;
    op->data = calloc(1, bytes + 8);
    if (!op->data)
        abort();
    for (int i = 0; params && i < function->nparams; i++)
        memcpy((char *)op->data + function->offsets[i], params[i], function->sizes[i]);
    if (!params && bytes)
        memcpy(op->data, buffer, bytes);
    return CUDA_SUCCESS;
}

static int launch(int per_thread, const struct cu_launch_config *config, CUfunction function, void **params,
                  void **extra, const char *symbol) {
    CUcontext context;
    CUstream stream, handle = config->stream;
    int error = enter(&context), mode;
    if (error)
        return error;
    if (!handle && per_thread)
        handle = CU_STREAM_PER_THREAD;
    if (!(function = function_in(function, context)))
        return leave(CUDA_ERROR_INVALID_HANDLE);
    if ((error = fake_stream(handle, context, &stream)) || (error = check_shape(config, function)))
        return leave(error);
    if (!function->loaded && !cuModuleGetLoadingMode(&mode) && mode == 2)
        fake_wait_all(context, symbol); /* lazy loading: the first launch of a kernel loads its code */
    function->loaded = 1;
    struct fake_op *op = fake_op(context, run_kernel);
    op->function = function;
    if ((error = pack(op, function, params, extra))) {
        free(op);
        return leave(error);
    }
    fake_enqueue(stream, op, 0, symbol);
    return leave(context->sticky);
}

CUresult ww_cuLaunchKernelEx(int per_thread, void *config, CUfunction function, void **params, void **extra) {
    return config ? launch(per_thread, config, function, params, extra, "cuLaunchKernelEx") : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuLaunchKernel(CUfunction function, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by,
                        uint32_t bz, uint32_t shared, CUstream stream, void **params, void **extra) {
    struct cu_launch_config config = {.grid = {gx, gy, gz}, .block = {bx, by, bz}, .shared = shared, .stream = stream};
    usleep((useconds_t)fake_number("FAKE_LAUNCH_US", 0));
    return launch(0, &config, function, params, extra, "cuLaunchKernel");
}

CUresult cuLaunchCooperativeKernel(CUfunction function, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by,
                                   uint32_t bz, uint32_t shared, CUstream stream, void **params) {
    struct cu_launch_config config = {.grid = {gx, gy, gz}, .block = {bx, by, bz}, .shared = shared, .stream = stream};
    return launch(0, &config, function, params, NULL, "cuLaunchCooperativeKernel");
}
