"""Submission and completion rings that device threads and a controller share.

Files, in the order in which a command meets them:

- submission.py  take a command id, put a command in the ring, ring the doorbell
- completion.py  drain the ring, deliver each completion to its waiter, give up waiting
- loss.py        a controller that fails or violates the protocol: the latch, and recovery of the queues
- layout.py      the words of queue, id and port records
- pair.py        `QueuePairs`, which owns the memory of rings, ids and staging (host)
"""

from .completion import drain, orphan, poll, result_of, take_async_id, take_ready
from .layout import (
    ASYNC,
    I8,
    ID_COUNT,
    ID_OPCODE,
    ID_PAGE,
    ID_STATE,
    ID_STATUS,
    ID_USER,
    ID_USER_WORDS,
    ORPHAN,
    Q_IN_USE,
    Q_N_IDS,
    Q_PROGRESS,
    Q_WORDS,
)
from .loss import lost
from .pair import QueuePairs
from .submission import (
    field,
    id_record,
    prp2_of,
    release_id,
    reuse_id,
    staging_of,
    state_word,
    submit,
    submit_entry,
    take_id,
)

__all__ = ["QueuePairs"]
