"""The process at the other end of a Unix socket."""

from __future__ import annotations

import socket
import struct

_CREDENTIALS = struct.Struct("=iII")
"""``struct ucred`` of Linux: process, user, group."""


def socket_peer(connection: socket.socket) -> tuple[int, int]:
    """Return process and user ID of the peer when it connected, as the kernel recorded them."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(data)
    return process, user
