/* Answers of the calls, and the data behind the arguments of the calls whose code is written by hand on both sides:
 * driver_calls.txt, [operations] and [arguments].
 *
 * All structs are packed as written here (each field at its natural alignment), follow the entry's header, and are read
 * from the worker's copy of the entry. A device address is one of the arena, of pinned memory, or of a module's global:
 * the worker checks the whole range.
 */
#ifndef WW_CALLS_H
#define WW_CALLS_H

#include "cu.h"
#include <stdint.h>

#define WW_DONE                                                                                                        \
    1u /* flag of an entry: answer when the stream has passed the call; else when it was issued or refused */
#define WW_SMALL (16u << 10) /* bytes of a copy that travel in the entry itself */

/* Which way the bytes of an entry's place go; in all other entries `place` says nothing. */
enum ww_way { WW_NO_BYTES, WW_BYTES_IN, WW_BYTES_OUT };

static inline enum ww_way ww_place_way(uint16_t op) {
    return op == WW_OP_IN || op == WW_OP_IMAGE ? WW_BYTES_IN : op == WW_OP_OUT ? WW_BYTES_OUT : WW_NO_BYTES;
}

/* -- images, functions --------------------------------------------------------------------------------------------- */

#define WW_IMAGE_MOST (1ull << 30) /* bytes of an image; also the bound that the worker holds */
#define WW_IMAGES 64u              /* images on their way at one time: chosen by the client, 0 .. WW_IMAGES - 1 */
#define WW_MODULES 65536u          /* modules and libraries of a device: chosen by the client, 1 .. */
#define WW_FUNCTIONS 1048576u      /* functions of a device: the worker gives their ids, 1 .. */
#define WW_NAME_MOST 8192u         /* bytes of a function's or global's name */
#define WW_FUNCTION_ATTRIBUTES 16u
#define WW_OPTIONS 32u
#define WW_LOG_MOST 65536u
#define WW_PARAMS_MOST 32768u /* bytes of the parameters of a launch */

struct ww_option { /* CUjit_option without the log buffers and without results (wall time, log sizes) */
    uint32_t option, unused;
    uint64_t value;
};

struct ww_loaded { /* then `functions` times ww_function with its tail, then the logs */
    uint32_t functions, info_bytes, error_bytes, unused;
};

struct ww_function { /* then ww_param[params], then the name with its 0, then zeros up to a multiple of 8 */
    uint32_t id, params, name_bytes, unused;
    int32_t attributes[WW_FUNCTION_ATTRIBUTES]; /* by CUfunction_attribute; -1: the driver has it not */
};

struct ww_param {
    uint32_t offset, size;
};

struct ww_range {
    uint64_t address, nbytes;
};

/* -- launch -------------------------------------------------------------------------------------------------------- */

#define WW_LAUNCH_ATTRIBUTES 8u

#define WW_CLUSTER_SIZE 0x80000000u /* bit of WW_OP_CLUSTERS' function */

struct ww_args_launch { /* then ww_launch_attribute[attributes], then param_bytes bytes: parameters at their native
                           offsets */
    uint32_t function;
    CU_SHAPE;
    uint32_t attributes, param_bytes;
    uint32_t unused[2];
};

struct ww_launch_attribute { /* CUlaunchAttribute: COOPERATIVE 2, CLUSTER_DIMENSION 4, PROGRAMMATIC_STREAM_SERIALIZATION
                                6, PRIORITY 8 */
    uint32_t id;
    uint32_t value[3];
};

/* -- graphs with conditional nodes -----------------------------------------------------------------------------------
 */

#define WW_GRAPHS 65536u /* of a device, and as many executable ones: chosen by the client, 1 .. */
#define WW_BODIES 1024u  /* graphs of a conditional node */

/* -- memory -------------------------------------------------------------------------------------------------------- */

struct ww_mem_info {
    uint64_t free, total;
};

#define WW_PIN_LOWEST 0x200000000000ull /* range of pinned memory, on both sides */
#define WW_PIN_HIGHEST 0x2f0000000000ull

/* -- packets of the socket (said: enum ww_said) -------------------------------------------------------------------- */

/* WW_OPEN is a ww_hello with the client's stdout and stderr (or /dev/null for a closed one); WW_OPENED is a ww_facts
 * with ring, status and staging, in this order. */

struct ww_pinned { /* with one descriptor: the memfd */
    uint32_t said, unused;
    uint64_t address, nbytes;
};

_Static_assert(sizeof(struct ww_function) % 8 == 0 && sizeof(struct ww_args_launch) % 16 == 0,
               "the data behind it is aligned");
#endif
