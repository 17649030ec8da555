"""`Outgoing` and `Incoming`: messages to and from a peer, packed in fragments of one size.

A fragment is a header of four words (kind, bytes that follow, bytes of messages that the sender has received, what
a DRAIN is about) and its bytes: messages, each behind its length, as many as fit. A long message goes on in the next
fragments. So short messages that wait share a fragment, and a message may have any size.
"""

from __future__ import annotations

import struct
from collections import deque

HEADER = struct.Struct("<qqqq")
FRAGMENT = 32 << 10
"""Bytes of a fragment with its header. Open MPI sends up to 64 KiB over TCP without asking first."""

DATA, GOODBYE, DRAIN, DRAINED = range(4)
"""Kinds of fragments. One without messages is a sign of life. DRAIN asks the peer to take, and drop, what was sent
with an MPI tag of a copy that was given up (its word is ``tag << 32 | bytes of a chunk``), since MPI cannot take back
what it was told to send; DRAINED is the answer that nothing more of it is there."""

_LENGTH = struct.Struct("<q")


class Outgoing:
    """Messages that wait to be sent."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._offset = -1  # of what is left of the first message; -1: not even its length is sent

    def __bool__(self) -> bool:
        return bool(self._messages)

    def append(self, message: bytes) -> None:
        """Let a message wait."""
        self._messages.append(message)

    def fill(self, fragment: memoryview, kind: int, acknowledged: int, drain: int = 0) -> int:
        """Write a fragment with what fits; return how many bytes of it are used."""
        at = HEADER.size
        while self._messages and at + _LENGTH.size <= len(fragment):
            message = self._messages[0]
            if self._offset < 0:
                _LENGTH.pack_into(fragment, at, len(message))
                at += _LENGTH.size
                self._offset = 0
            part = min(len(message) - self._offset, len(fragment) - at)
            fragment[at : at + part] = memoryview(message)[self._offset : self._offset + part]
            at += part
            self._offset += part
            if self._offset < len(message):
                break
            self._messages.popleft()
            self._offset = -1
        HEADER.pack_into(fragment, 0, kind, at - HEADER.size, acknowledged, drain)
        return at


class Incoming:
    """Puts the messages of a peer together again."""

    def __init__(self) -> None:
        self._message = bytearray()
        self._filled = -1  # bytes of the message that are there; -1: none has begun

    def take(self, fragment: memoryview) -> tuple[int, int, list[bytes]]:
        """Return the kind of a fragment, what it acknowledges, and the messages that end in it."""
        kind, nbytes, acknowledged, _ = HEADER.unpack_from(fragment)
        at, end = HEADER.size, HEADER.size + nbytes
        messages = []
        while at < end:
            if self._filled < 0:
                (length,) = _LENGTH.unpack_from(fragment, at)
                at += _LENGTH.size
                self._message, self._filled = bytearray(length), 0
            part = min(len(self._message) - self._filled, end - at)
            self._message[self._filled : self._filled + part] = fragment[at : at + part]
            self._filled += part
            at += part
            if self._filled == len(self._message):
                messages.append(bytes(self._message))
                self._message, self._filled = bytearray(), -1
        return kind, acknowledged, messages
