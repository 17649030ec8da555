"""The records of a queue pair, in 64-bit words.

A *queue record* in device memory has the fields that device threads share; a *port record* in shared host memory has
the fields that the controller needs to serve the same pair. Both have the addresses of the rings, which are in shared
memory with the sizes and bits of the NVMe specification.
"""

from __future__ import annotations

import numpy as np

I8 = np.dtype(np.int64)

# -- queue record (device memory). Fields for which threads contend have their own 128-byte lines. -----------

Q_SQ = 0
"""Address of the submission ring (64-byte Commands)."""
Q_CQ = 1
"""Address of the completion ring (16-byte Completions)."""
Q_DEPTH_SHIFT = 2
"""log2 of the entries of each ring."""
Q_SQ_DOORBELL = 3
"""Address of the submission tail doorbell."""
Q_CQ_DOORBELL = 4
"""Address of the completion head doorbell."""
Q_TURNS = 5
"""Address of the turn counters, one word for each submission entry."""
Q_MARKS = 6
"""Address of the marks, one word for each submission entry."""
Q_IDS = 7
"""Address of the id records."""
Q_N_IDS = 8
"""Number of command ids, half of the ring's entries (see `queues.submission`)."""
Q_STAGING = 9
"""Address of the staging arena, `Q_STAGING_BYTES` for each id."""
Q_STAGING_BYTES = 10
Q_READY = 11
"""Address of the ring of completed asynchronous and orphaned ids (`Q_N_IDS` words)."""
Q_RESULTS = 13
"""If not 0, dw0 and dw1 of completions are stored in `ID_RESULT`, and the low half of dw1 must be below this value."""
Q_USER = 14
"""Address of a record of the owner of the queues, or 0."""
Q_SQID = 15
"""Identifier of the queue in commands and completions, from 1."""
Q_TICKET = 16
Q_TAIL = 32
Q_CQ_LOCK = 48
Q_CQ_HEAD = 49
Q_SQ_HEAD = 50
Q_READY_TAIL = 51
Q_READY_HEAD = 64
Q_IN_USE = 80
Q_HINT = 96
Q_PROGRESS = 12
"""Address of the count of completions drained from all pairs: the watchdog's sign of life. The word after it is 1 once
device code has latched a loss."""
Q_LOSS = 112
"""Address of the loss record of all pairs (shared memory)."""
Q_LISTS = 113
"""Address of the PRP lists, ``1 << Q_LIST_SHIFT`` bytes for each id; 0 if the controller needs none, like Warpwell's
own."""
Q_LIST_SHIFT = 114
Q_TURN_NS = 115
"""Nanoseconds after which a thread stops waiting for its turn."""
Q_GENERATION = 117
"""Increment of an id's cid from one use to the next: `Q_N_IDS`, or 0 for key-value commands: their cids do not change,
because the controller counts the uses."""
Q_WORDS = 128

# -- id record (device memory) -------------------------------------------------------------------------------

ID_STATE = 0
"""A kind (see below) in bits 0 to 7, and from bit 8 on the generation: the bits of the cid above the id (see
`queues.submission`)."""
ID_STATUS = 1
"""Status field of the completion (asynchronous and orphaned ids)."""
ID_PAGE = 2
"""First page of the transfer."""
ID_COUNT = 3
"""Pages of the transfer."""
ID_OPCODE = 4
ID_RESULT = 5
"""dw0 of the completion, and dw1 above it, if `Q_RESULTS` is not 0 (`completion.result_of`)."""
ID_USER = 8
"""`ID_USER_WORDS` words whose use the owner of the queues defines."""
ID_USER_WORDS = 8
ID_WORDS = ID_USER + ID_USER_WORDS

KIND = 0xFF
"""Mask of an id state without generation and status."""
FREE = 0
"""Id state: free. The state has the generation of the next owner."""
TAKEN = 1
"""Id state: a thread will wait for the completion."""
ASYNC = 2
"""Id state: the thread that finds the completion publishes the page (prefetch)."""
ORPHAN = 3
"""Id state: quarantined after its waiter gave up; staging and frames stay reserved until the completion."""
FOUND = 4
"""Added to ASYNC or ORPHAN once the completion was found: the id is in the ready ring, or was taken from it."""
DONE = 8
"""Id state: completed; bits from 8 on have the status field instead of the generation."""

MEMORY_PAGE = 4096
"""Bytes of a memory page of the controller (CC.MPS 0): a transfer that crosses one needs prp2."""
LIST_MAX = MEMORY_PAGE // 8
"""Maximum number of entries of a PRP list in one page, so a command moves at most 2 MiB."""

# -- port record (shared host memory) ------------------------------------------------------------------------

P_SQ = 0
P_CQ = 1
P_DEPTH_SHIFT = 2
P_SQ_DOORBELL = 3
P_CQ_DOORBELL = 4
P_SQ_HEAD = 5
"""Commands fetched so far (not reduced by the depth)."""
P_CQ_TAIL = 6
"""Completions posted so far: `P_SQ_HEAD` minus this number of commands are in flight."""
P_POST_LOCK = 7
P_SQID = 8
P_FETCH_LOCK = 9
"""1 while a service thread fetches."""
P_WEIGHT = 10
"""Weight of the port if commands wait in several ports; the host writes it before the port is served."""
P_BURST = 11
"""Number of commands that a thread fetches in one turn if no window limits commands in flight, in proportion to the
weight."""
P_USER = 12
"""Address of a record of the owner of the queues, or 0."""
P_WORDS = 16

# -- loss record (shared host memory, one for all pairs; see `queues.loss`) ------------------------------------

LOSS_KIND = 0
"""ALIVE, or why the controller is lost. Stored last."""
LOSS_QUEUE = 1
"""Identifier of the queue in which the loss was found."""
LOSS_ENTRY = 2
"""Word 1 of the invalid completion."""
LOSS_WORDS = 16

ALIVE = 0
LOST = 1
"""Loss: the host or a relay found that the controller does not respond."""
BAD_COMPLETION = 2
"""Loss: a completion that answers no command."""
NO_TURN = 3
"""Loss: the submission queue head did not move for a long time, although commands completed."""
