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

/* Attributes of launches that travel, as the first 12 bytes of their values. */
static inline int ww_is_sent(uint32_t attribute) {
    return attribute == CU_LAUNCH_COOPERATIVE || attribute == CU_LAUNCH_CLUSTER_DIMENSION ||
           attribute == CU_LAUNCH_PROGRAMMATIC_SERIALIZATION || attribute == CU_LAUNCH_PRIORITY;
}

#define WW_IMAGE_MOST (1ull << 30) /* bytes of an image; also the bound that the worker holds */

#define WW_CLUSTER_SIZE 0x80000000u /* bit of WW_OP_CLUSTERS' function */

/* -- memory -------------------------------------------------------------------------------------------------------- */

#define WW_PIN_LOWEST 0x200000000000ull /* range of pinned memory, on both sides */
#define WW_PIN_HIGHEST 0x2f0000000000ull

#endif
