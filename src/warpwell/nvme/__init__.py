"""The wire format of NVMe: commands, completions, registers, what Identify answers, status codes; no I/O.

Files, in the order in which a command meets them:

- opcodes.py     what a command asks for, in both command sets
- command.py     the 64-byte submission entry of a read or write
- key_value.py   the same entry of a command on keys and values
- completion.py  the 16-byte completion entry
- status.py      how a command went, in 15 bits and in words

and those that only drives need, in the order in which one is started:

- registers.py   what a controller has in memory space: capabilities, configuration, status, doorbells
- admin.py       commands about queues, features and logs
- identify.py    what a controller says of itself and of its namespaces
- prp.py         how a command names data that are longer than a page of memory

and, for all of them:

- _check.py      the check at import that a struct has the specification's layout
"""

from .command import (
    COMMAND,
    COMMAND_BYTES,
    COMMAND_WORDS,
    CONTROL_FUA,
    CONTROL_LIMITED_RETRY,
    FUSE_FIRST,
    FUSE_SECOND,
    MAX_BLOCKS,
    PSDT_SGL,
    WORD_CDW2,
    WORD_CDW10,
    WORD_CDW12,
    WORD_CDW14,
    WORD_ID,
    WORD_MPTR,
    WORD_PRP1,
    WORD_PRP2,
    command_word0,
    command_word5,
    command_word6,
    word0_cid,
    word0_flags,
    word0_nsid,
    word0_opc,
    word5_slba,
    word6_control,
    word6_nlb,
    word_high,
    word_low,
    word_of,
)
from .completion import (
    COMPLETION,
    COMPLETION_BYTES,
    COMPLETION_WORDS,
    WORD_RESULT,
    WORD_STATUS,
    completion_word0,
    completion_word1,
    word1_cid,
    word1_phase,
    word1_sqhd,
    word1_sqid,
    word1_status,
)
from .key_value import (
    KEY_VALUE_COMMAND,
    MAX_KEY_BYTES,
    RETRIEVE_RAW,
    STORE_IF_EXISTS,
    STORE_IF_MISSING,
    WORD_KEY_HIGH,
    WORD_KEY_LOW,
    WORD_SIZES,
    key_of_words,
    key_value_word5,
    key_words,
    word5_key_size,
    word5_options,
    word5_value_size,
)
from .opcodes import (
    COMPARE,
    DATASET_MANAGEMENT,
    FLUSH,
    KV_DELETE,
    KV_EXIST,
    KV_LIST,
    KV_RETRIEVE,
    KV_STORE,
    READ,
    WRITE,
    WRITE_UNCORRECTABLE,
    WRITE_ZEROES,
    key_value_opcode_name,
    opcode_name,
)
from .status import (
    ABORTED_BY_HOST,
    ABORTED_BY_REQUEST,
    ABORTED_POWER_LOSS,
    ABORTED_SQ_DELETION,
    ACCESS_DENIED,
    CAPACITY_EXCEEDED,
    COMMAND_ID_CONFLICT,
    COMMAND_INTERRUPTED,
    COMMAND_SEQUENCE_ERROR,
    COMPARE_FAILURE,
    DATA_TRANSFER_ERROR,
    DEALLOCATED_BLOCK,
    INTERNAL_ERROR,
    INVALID_FIELD,
    INVALID_LOG_PAGE,
    INVALID_NAMESPACE,
    INVALID_OPCODE,
    INVALID_QUEUE_DELETION,
    INVALID_QUEUE_ID,
    INVALID_QUEUE_SIZE,
    KV_INVALID_KEY_SIZE,
    KV_INVALID_VALUE_SIZE,
    KV_KEY_DOES_NOT_EXIST,
    KV_KEY_EXISTS,
    KV_UNRECOVERED_ERROR,
    LBA_OUT_OF_RANGE,
    NAMESPACE_NOT_READY,
    NAMESPACE_WRITE_PROTECTED,
    PRP_OFFSET_INVALID,
    SUCCESS,
    UNRECOVERED_READ_ERROR,
    WRITE_FAULT,
    WRITE_TO_READ_ONLY_RANGE,
    describe,
    status_code,
    status_dnr,
    status_more,
    status_of,
    status_sc,
    status_sct,
)
