"""`ServiceConnection`: messages between a scheduler service, its clients and its owner, over a Unix domain socket.

A message is a prefix of 16 bytes, a header and a body:

    4 bytes   ``WWSM``
    4 bytes   length of the header, little-endian
    8 bytes   length of the body
    header    a JSON object; "type" says what it is, "arrays" lists dtype and shape of each array in the body
    body      the arrays' items, one array after another, in C order, little-endian

Nothing is unpickled, evaluated or looked up by what a peer sends: a header is JSON, and a body is items of plain
numbers. The first message of each side is a hello with `VERSION`; its layout never changes, so that any two versions
can tell each other which they are.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ... import errors

F = TypeVar("F", bound=Callable[..., Any])

VERSION = 2
"""Of the messages. Peers of another version are refused."""

MAGIC = b"WWSM"
MAX_HEADER = 1 << 20
"""Bytes of a header at most."""

OWNER_HEADER = 8 * MAX_HEADER
"""Bytes of a header between service and owner: written again, a client's may be longer (1e15 becomes 18 letters)."""

MAX_BODY = 1 << 30
"""Bytes of a body at most, unless the service says otherwise."""

MAX_ARRAYS = 1024
"""Arrays in a message at most."""

PATIENCE = 10.0
"""Seconds in which a message that has begun must move on, and a peer must answer a hello."""

_PREFIX = struct.Struct("<4sIQ")
_CREDENTIALS = struct.Struct("3i")
# plain numbers: no objects, no strings, no records
ITEMS = frozenset("|b1 |i1 <i2 <i4 <i8 |u1 <u2 <u4 <u8 <f2 <f4 <f8 <c8 <c16".split())
_SLICE, _SMALL = 1 << 20, 1 << 16


@dataclass(frozen=True)
class ServiceMessage:
    """A received message: its header and arrays (writable, owned by the receiver), or why these were dropped."""

    header: dict[str, Any]
    arrays: list[NDArray[Any]] = field(default_factory=list)
    refused: errors.WarpwellError | None = None

    @property
    def kind(self) -> str:
        """Its type."""
        return str(self.header["type"])

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """Return a field of the header; see `checked`."""
        return checked(self.header, name, kind, default)


class ServiceConnection:
    """Messages over a connected socket. One thread receives; any may send.

    Parameters
    ----------
    sock : socket.socket
        A stream socket, which the connection owns from here on.
    peer : str
        Who is there, for messages to people.
    max_body, max_header : int
        Bytes of a body and of a header at most, both ways.
    patience : float
        Seconds in which a message that has begun must move on. A peer that stops in the middle of one is given up.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        *,
        max_body: int = MAX_BODY,
        max_header: int = MAX_HEADER,
        patience: float = PATIENCE,
    ) -> None:
        self.peer = peer
        self.max_body, self.max_header = max_body, max_header
        self.patience = patience
        self._socket = sock
        self._sending = threading.Lock()
        self._broken = False
        # limits of the socket itself: a Python time-out would hold for both directions at once
        sock.setblocking(True)
        seconds, rest = divmod(max(patience, 1e-3), 1.0)
        bound = struct.pack("@ll", int(seconds), int(rest * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)

    def send(self, header: dict[str, Any], arrays: Sequence[NDArray[Any]] = ()) -> None:
        """Send a message; return when the system has all of it.

        Raises
        ------
        DTypeError
            An array has items that do not travel.
        MessageSizeError
            The message is too large. Nothing of it was sent, and others may be.
        ServiceError
            The peer has gone, or has received nothing for `patience` seconds.
        """
        sent = [_plain(array) for array in arrays]
        text = json.dumps(
            {**header, "arrays": [[a.dtype.str, list(a.shape)] for a in sent]}, separators=(",", ":")
        ).encode()
        nbytes = sum(a.nbytes for a in sent)
        if len(text) > self.max_header or nbytes > self.max_body or len(sent) > MAX_ARRAYS:
            raise errors.MessageSizeError(
                f"a message of {len(sent)} arrays, {nbytes} bytes and {len(text)} bytes of header is too large for "
                f"{self.peer}: at most {MAX_ARRAYS}, {self.max_body} and {self.max_header}. Send less at a time, or "
                "start the service with a larger --max-message"
            )
        parts: list[bytes | memoryview] = [_PREFIX.pack(MAGIC, len(text), nbytes) + text]
        parts += [array.reshape(-1).view(np.uint8).data for array in sent if array.nbytes]
        if nbytes <= _SMALL:
            parts = [b"".join(parts)]  # the peer wakes once
        with self._sending:
            if self._broken:
                raise errors.ServiceError(f"{self.peer} has gone: connect again")
            try:
                for part in parts:
                    self._socket.sendall(part)
            except BaseException as error:  # Ctrl-C is among them
                self.interrupt()
                if not isinstance(error, OSError):
                    raise
                raise errors.ServiceError(f"{self.peer} {_reason(error, self.patience)}: connect again") from error

    def receive(self, room: Callable[[int], None] | None = None) -> ServiceMessage | None:
        """Return the next message; None when nothing has begun to come for `patience` seconds.

        Parameters
        ----------
        room : callable, optional
            ``room(nbytes)`` is called before a body of arrays is read. Where it raises one of our errors, the body is
            read and dropped, and `ServiceMessage.refused` is that error.

        Raises
        ------
        EOFError
            The peer has closed the connection, between two messages.
        ServiceError
            The bytes are not a message, or it is too large, or the peer stopped in the middle of one.
        """
        prefix = self._read(_PREFIX.size, idle=True)
        if not prefix.size:
            return None
        magic, header_length, body_length = _PREFIX.unpack(prefix.tobytes())
        if magic != MAGIC:
            raise errors.ServiceError(f"{self.peer} does not speak this protocol: it began with {bytes(magic)!r}")
        if header_length > self.max_header or body_length > self.max_body:
            raise errors.ServiceError(
                f"{self.peer} announced a message of {header_length} + {body_length} bytes: at most {self.max_header} "
                f"+ {self.max_body} are taken. Send less at a time, or start the service with a larger --max-message"
            )
        header = _parse(self._read(header_length), self.peer)
        layout = _layout(header.pop("arrays", []), body_length, self.peer)
        arrays: list[NDArray[Any]] = []
        try:
            if room is not None and body_length:
                room(body_length)
        except errors.WarpwellError as refused:
            for begin in range(0, body_length, _SLICE):
                self._read(min(_SLICE, body_length - begin))
            return ServiceMessage(header, arrays, refused)
        for dtype, shape, nbytes in layout:
            arrays.append(self._read(nbytes).view(dtype).reshape(shape))
        return ServiceMessage(header, arrays)

    def expect(self, kind: str) -> ServiceMessage:
        """Return the next message, which must come within `patience` seconds and be of this type."""
        try:
            message = self.receive()
        except EOFError:
            raise errors.ServiceError(f"{self.peer} closed the connection instead of sending {kind!r}") from None
        if message is None:
            raise errors.ServiceError(f"{self.peer} did not send {kind!r} within {self.patience:g} s: is it stopped?")
        if message.kind == "refused":
            raise errors.ServiceError(str(message.header.get("message", f"{self.peer} refused the call")))
        if message.kind != kind:
            raise errors.ServiceError(f"{self.peer} said {message.kind!r} where {kind!r} was due")
        return message

    def close(self) -> None:
        """Close the connection; a thread that receives from it gets EOFError. May be called twice."""
        self.interrupt()
        self._socket.close()

    def forget(self) -> None:
        """Close the descriptor of this process alone: another one, from which it was forked, has the connection."""
        self._socket.close()

    def interrupt(self) -> None:
        """End both directions, so that a thread that receives wakes up; `close` is still to come."""
        self._broken = True  # half a message may be out: nothing that follows could be read
        with contextlib.suppress(OSError):  # it was gone already
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self, nbytes: int, *, idle: bool = False) -> NDArray[np.uint8]:
        """Read so many bytes; none if nothing comes where a message may begin (`idle`).

        Memory is touched as it fills: who announces much and sends little costs little.
        """
        buffer = np.empty(nbytes, np.uint8)
        view = buffer.data
        done = 0
        while done < nbytes:
            try:
                got = self._socket.recv_into(view[done : done + _SLICE])
            except BlockingIOError:
                if idle and done == 0:
                    return buffer[:0]
                raise errors.ServiceError(
                    f"{self.peer} stopped in the middle of a message: nothing came for {self.patience:g} s"
                ) from None
            except OSError as error:
                raise EOFError(f"{self.peer} {_reason(error, self.patience)}") from error
            if got == 0:
                if idle and done == 0:
                    raise EOFError(f"{self.peer} has closed the connection")
                raise errors.ServiceError(f"{self.peer} closed the connection in the middle of a message")
            done += got
        return buffer


class Handlers(dict[str, Callable[..., Any]]):
    """Handlers of messages, by kind: ``handles = Handlers()``, then ``@handles("submit")`` above each function."""

    def __call__(self, kind: str) -> Callable[[F], F]:
        """Return what registers a function as the handler of a kind of message."""

        def register(function: F) -> F:
            self[kind] = function
            return function

        return register


def hello(connection: ServiceConnection, **fields: Any) -> None:
    """Send a hello with our version."""
    connection.send({"type": "hello", "version": VERSION, **fields})


def check_version(message: ServiceMessage, peer: str, ours: str) -> None:
    """Raise ServiceError if the hello of a peer says that it speaks another version."""
    version = message.get("version", int)
    if version != VERSION:
        raise errors.ServiceError(
            f"{peer} speaks version {version} of the protocol, and {ours} version {VERSION}: install the same version "
            "of Warpwell for both, and start the service again"
        )


def checked(values: dict[str, Any], name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
    """Return ``values[name]``, or the default if it is missing.

    Raises
    ------
    ServiceError
        It is missing, and there is no default, or it has another type. (A boolean is no integer here.)
    """
    value = values.get(name, default)
    if value is default and default is not ...:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if value is ... or (isinstance(value, bool) and bool not in kinds) or not isinstance(value, kinds):
        wanted = " or ".join(k.__name__ for k in kinds)
        told = "is missing" if value is ... else f"is {value!r:.60}"
        raise errors.ServiceError(f"field {name!r} of a message {told}: {wanted} is expected")
    return value


def credentials(sock: socket.socket) -> tuple[int, int]:
    """Return the numbers of the process and user at the other end; the kernel says it, so a peer cannot choose them."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array as it travels: C order, little-endian."""
    dtype = array.dtype.newbyteorder("<")
    if dtype.str not in ITEMS:
        raise errors.DTypeError(
            f"an array of {array.dtype} does not travel to a service: booleans, integers, floats and complex numbers do"
        )
    return np.ascontiguousarray(array, dtype).reshape(array.shape)


def _parse(text: NDArray[np.uint8], peer: str) -> dict[str, Any]:
    try:
        header = json.loads(text.tobytes())
    except (ValueError, RecursionError) as error:
        raise errors.ServiceError(f"{peer} sent a header that is not JSON: {error}") from None
    if not isinstance(header, dict) or not isinstance(header.get("type"), str):
        raise errors.ServiceError(f"{peer} sent a header that is not an object with a type")
    return header


def _layout(listed: Any, nbytes: int, peer: str) -> list[tuple[np.dtype[Any], tuple[int, ...], int]]:
    """Return dtype, shape and bytes of each array; they must fill the body exactly."""
    wrong = errors.ServiceError(f"{peer} sent a list of arrays that does not fit its body of {nbytes} bytes")
    if not isinstance(listed, list) or len(listed) > MAX_ARRAYS:
        raise wrong
    found: list[tuple[np.dtype[Any], tuple[int, ...], int]] = []
    left = nbytes
    for entry in listed:
        if not isinstance(entry, list) or len(entry) != 2:
            raise wrong
        name, shape = entry
        if not isinstance(name, str) or name not in ITEMS or not isinstance(shape, list) or len(shape) > 32:
            raise wrong
        if not all(type(n) is int and 0 <= n <= 1 << 48 for n in shape):
            raise wrong
        dtype = np.dtype(name)
        size = dtype.itemsize * math.prod(shape)
        if size > left:
            raise wrong
        left -= size
        found.append((dtype, tuple(shape), size))
    if left:
        raise wrong
    return found


def _reason(error: OSError, patience: float) -> str:
    if isinstance(error, BlockingIOError):
        return f"has received nothing for {patience:g} s"
    return f"has gone ({error.strerror or error})"
