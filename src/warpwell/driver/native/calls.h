/* Flags, limits and rules of calls that hand-written code serves in layer and worker. The structs of their arguments
 * and answers are generated: driver_calls.txt, [operations], [arguments] and [structs].
 *
 * Arguments follow the entry's header, and the worker reads them from its copy of the entry. A device address in them
 * is in the arena, in pinned memory, or in a module's global: the worker checks the whole range.
 */
#ifndef WW_CALLS_H
#define WW_CALLS_H

#include "cu.h"
#include <stdint.h>

#define WW_DONE 1u /* flag of an entry: answer when the stream has passed the call; else when the call is issued */
#define WW_SMALL (16u << 10) /* the bytes of copies up to this size are in the entry itself */

/* Direction of the bytes in an entry's place. For WW_NO_BYTES, the entry's `place` has no meaning. */
enum ww_way { WW_NO_BYTES, WW_BYTES_IN, WW_BYTES_OUT };

static inline enum ww_way ww_place_way(uint16_t op) {
    return op == WW_OP_IN || op == WW_OP_IMAGE ? WW_BYTES_IN : op == WW_OP_OUT ? WW_BYTES_OUT : WW_NO_BYTES;
}

/* Return true for attributes of launches that are sent to the worker, with the first 12 bytes of their values. */
static inline int ww_is_sent(uint32_t attribute) {
    return attribute == CU_LAUNCH_COOPERATIVE || attribute == CU_LAUNCH_CLUSTER_DIMENSION ||
           attribute == CU_LAUNCH_PROGRAMMATIC_SERIALIZATION || attribute == CU_LAUNCH_PRIORITY;
}

#define WW_IMAGE_MOST (1ull << 30) /* maximum bytes of an image, in layer and worker */

#define WW_CLUSTER_SIZE 0x80000000u /* bit in `function` of WW_OP_CLUSTERS: return the maximum cluster size */

/* -- memory -------------------------------------------------------------------------------------------------------- */

#define WW_PIN_LOWEST 0x200000000000ull /* addresses of pinned memory, in program and worker */
#define WW_PIN_HIGHEST 0x2f0000000000ull

#endif
