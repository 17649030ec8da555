"""Wire format of NVMe: commands, completions, status codes, registers and data structures of controllers; no I/O.

- wire.py        the 64-byte submission entry, the 16-byte completion entry, opcodes
- key_value.py   the submission entry of a command on keys and values
- status.py      the table of status codes

Only drives use:

- controller.py  registers of a controller, and admin commands
- identify.py    data structures of Identify
- prp.py         addresses of data that cross a page of memory
"""

from .key_value import (
    MAX_KEY_BYTES,
    STORE_IF_EXISTS,
    STORE_IF_MISSING,
    key_value_word5,
    key_words,
    word5_key_size,
    word5_options,
    word5_value_size,
)
from .prp import MAX_TRANSFER, PAGE, data_pointers
from .status import (
    ABORTED_BY_HOST,
    CAPACITY_EXCEEDED,
    COMMAND_INTERRUPTED,
    DATA_TRANSFER_ERROR,
    INTERNAL_ERROR,
    INVALID_FIELD,
    INVALID_NAMESPACE,
    INVALID_OPCODE,
    KV_INVALID_KEY_SIZE,
    KV_INVALID_VALUE_SIZE,
    KV_KEY_DOES_NOT_EXIST,
    KV_KEY_EXISTS,
    KV_UNRECOVERED_ERROR,
    LBA_OUT_OF_RANGE,
    NAMESPACE_NOT_READY,
    NAMESPACE_WRITE_PROTECTED,
    UNRECOVERED_READ_ERROR,
    WRITE_FAULT,
    describe,
    status_dnr,
    status_of,
)
from .wire import (
    COMMAND,
    COMPLETION,
    FLUSH,
    KV_DELETE,
    KV_EXIST,
    KV_LIST,
    KV_RETRIEVE,
    KV_STORE,
    READ,
    WRITE,
    command_word0,
    command_word6,
    completion_word0,
    completion_word1,
    word0_cid,
    word0_nsid,
    word0_opc,
    word1_cid,
    word1_phase,
    word1_sqhd,
    word1_sqid,
    word1_status,
    word5_slba,
    word6_nlb,
)
