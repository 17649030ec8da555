"""Words that an `MpiTransport`'s native loop and Python share: byte offsets in its three kinds of blocks."""

SLOTS = 4
"""Fragments to and from a peer that are under way at once."""

AHEAD = 4
"""Chunks of a transfer that are under way at once. Each waits for its receiver: memory in flight stays bounded."""

MS = 1_000_000
SHORTEST, LONGEST, IN_FLIGHT = 20_000, 500_000, 100_000
"""Nanoseconds of naps: the first, the longest, and the longest while something is under way."""

LAST_WORDS = 300 * MS
"""Nanoseconds for which what a process has sent may still come after its end: a packet may have to be sent again."""

HOT = 1 * MS
"""Nanoseconds without a find after which naps become longer: an answer takes some hundred microseconds."""

LOOKS = 8
"""Calls of MPI without a find before a nap: Open MPI looks at its sockets only every eighth time."""

AGAIN = 2 * MS
"""Nanoseconds after which a peer is asked again to take what is left of a copy that was given up."""

QUIET = 2 * LOOKS
"""Looks without a find, besides, after which nothing comes any more of a process that has ended."""

# -- the whole ------------------------------------------------------------------------------------------------
(
    G_DOORBELL,  # signals: of Python to the loop,
    G_ARRIVED,  # that a message came,
    G_ACKNOWLEDGED,  # that a peer has received some
    G_LOSSES,  # peers lost that Python has not heard of
    G_CLOSE_BY,  # when closing has to be over, 0: not closing
    G_WATCHED,  # when somebody last looked for silent peers
    G_COMM,  # handles and functions of MPI
    G_BYTE,
    G_ISEND,
    G_ISSEND,
    G_IRECV,
    G_TEST,
    G_CANCEL,
    G_IMPROBE,
    G_IMRECV,
    G_MALLOC,
    G_FREE,
    G_SYSCALL,
    G_FUTEX,
    G_SILENCE,
    G_PEERS,  # how many, and where the blocks are
    G_PEER_TABLE,
    G_ROWS,
    G_ROW_TABLE,
    G_INBOX,  # ring of (peer, address, bytes): where, how many fit, taken by Python, put by the loop
    G_INBOX_ROOM,
    G_INBOX_HEAD,
    G_INBOX_TAIL,
    G_ENDED,  # how many transfers the loop is done with
    G_FLAG,  # scratch: MPI's flag, its status, a timespec
    G_STATUS,
    G_STATUS_END,
) = range(0, 8 * 32, 8)
G_TIME = G_STATUS + 8 * 16
GLOBAL_WORDS = G_TIME // 8 + 2

# -- a peer ---------------------------------------------------------------------------------------------------
(
    P_RANK,
    P_GONE,  # why it is lost, 0: it is not
    P_CODE,  # MPI's error
    P_TOLD,  # Python has heard of the loss, so transfers may fail
    P_ACKNOWLEDGED,  # bytes of messages that the peer has received
    P_CONSUMED,  # that Python has received of it
    P_REPORTED,  # that the peer knows of
    P_HEARD,  # when it last said something
    P_SAID,  # when it was last told something
    P_GOODBYE,  # 1: said
    P_ENDED,  # since when it is known that its process has ended, 0: it has not
    P_QUIET,  # looks since then, one after the other, that found nothing of it
    P_OUT,  # ring of (address, bytes): where, how many fit, taken by the loop, put by Python
    P_OUT_ROOM,
    P_OUT_HEAD,
    P_OUT_TAIL,
    P_OFFSET,  # bytes of the first message that are sent, -1: not even its length
    P_MESSAGE,  # what is put together: where, bytes, bytes there (-1: nothing)
    P_LENGTH,
    P_FILLED,
    P_SENT,  # fragments: sent, and under way or sent
    P_SENDS,
    P_RECEIVED,
    P_SEND_BUFFERS,
    P_RECEIVE_BUFFERS,
    P_ASK,  # what the peer is to be asked to drain, 0: nothing
    P_ASKING,  # row of the transfer for which it was asked and has not answered, 0: none
    P_DRAIN,  # what the peer has asked to be drained here, 0: nothing
    P_ANSWER,  # 1: it is to be told that this is done
    P_SCRATCH,  # memory for it, 0: none yet; the message that it is for, and its request
    P_SCRATCH_MESSAGE,
    P_SCRATCH_REQUEST,
    P_SEND_REQUESTS,
) = range(0, 8 * 33, 8)
P_RECEIVE_REQUESTS = P_SEND_REQUESTS + 8 * SLOTS
PEER_BYTES = P_RECEIVE_REQUESTS + 8 * SLOTS

SILENT, SAID_GOODBYE, MPI_FAILED, ENDED = 1, 2, 3, 4
"""Why a peer is gone."""

# -- a transfer -----------------------------------------------------------------------------------------------
(
    R_STATE,
    R_PEER,  # address of the peer's block
    R_OUTGOING,
    R_TAG,
    R_WORDS,  # address of the `Transfer`'s words
    R_ADDRESS,  # the region
    R_NBYTES,
    R_CHUNK,
    R_SLOTS,
    R_CHUNKS,
    R_POSTED,
    R_DONE,
    R_ASKED,  # when the peer last answered that what this one had sent is drained
    R_REQUESTS,
) = range(0, 8 * 14, 8)
ROW_BYTES = R_REQUESTS + 8 * AHEAD

FREE, READY, OVER, ABANDONED = range(4)
"""States of a row: unused, the loop's, Python's to clear up, and never to be used again."""
