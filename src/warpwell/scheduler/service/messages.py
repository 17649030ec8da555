"""`Connection`: messages of a scheduler service as JSON over ``SOCK_SEQPACKET``; arrays travel in a sealed memfd.

A message is one JSON object of at most 64 KiB. "type" is the type of the message, and "arrays" lists dtype and shape of
its arrays. These are stored in C order, little-endian, each at a multiple of 64 bytes, in one memfd that is sent with
the message. The seals of the memfd forbid changes of its size and content, so a receiver may map it. Nothing is
unpickled or evaluated. A client first sends a hello with `VERSION`; the layout of this message never changes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import mmap
import os
import resource
import select
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..task import Kind, Profile

VERSION = 5
"""Version of the messages. A peer refuses other versions."""

MAX_TEXT = 1 << 16
"""Maximum size of a message without its arrays, in bytes: below the default send buffer of Linux, 208 KiB."""

MAX_ARRAYS = 1024
"""Maximum number of arrays in a message. Protection, not tuned."""

MAX_DIMENSIONS = 32
"""Maximum number of dimensions of an array, as in NumPy 1."""

MAX_BYTES = 1 << 30
"""Default limit of the size of a message's arrays, in bytes. Protection, not tuned."""

MAX_TASKS, MAX_ARGUMENTS, MAX_THREADS = 256, 256, 1 << 40
"""Maximum numbers of a request's launches, of a launch's arguments and of its threads. Protection, not tuned."""

MAPPED_BYTES = 4 << 20
"""Minimum size of arrays that are mapped, in bytes. Smaller ones are copied from the memfd: a mapping holds a
descriptor, and a process has at most 65,530 mappings."""

TIMEOUT_SECONDS = 10.0
"""Time in which a peer must send its hello, and read messages. Protection, not tuned."""

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
INT64 = range(-(1 << 63), 1 << 63)

ITEMS = frozenset("|b1 |i1 <i2 <i4 <i8 |u1 <u2 <u4 <u8 <f2 <f4 <f8 <c8 <c16".split())
"""Types of array items that can be sent: plain numbers."""

Layout = list[tuple[np.dtype[Any], tuple[int, ...], int]]
"""Dtype, shape and offset of each array in a memfd."""

_ALIGNMENT = 64


@dataclass
class Message:
    """A received message. It owns its descriptor: use it in a ``with`` statement.

    Attributes
    ----------
    header : dict
        Its JSON object.
    layout : list of tuple
        Dtype, shape and offset of each array.
    nbytes : int
        Size of its memfd.
    size : int
        Size of its JSON text.
    fd : int
        The descriptor that was sent with the message, or -1.
    """

    header: dict[str, Any]
    layout: Layout = field(default_factory=list)
    nbytes: int = 0
    size: int = 0
    fd: int = -1

    @property
    def kind(self) -> str:
        """Its type."""
        return str(self.header["type"])

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """Return a field of the header; see `checked`."""
        return checked(self.header, name, kind, default)

    def arrays(self) -> list[NDArray[Any]]:
        """Return new private, writable copies of the arrays (mappings, if they are large).

        Raise ServiceError if the descriptor is not a sealed memfd of the right size without holes in normal pages:
        another file could shrink, or fail to provide a page, and end this process by SIGBUS.
        """
        memory: Any = np.empty(self.nbytes, np.uint8)
        if self.nbytes:
            try:
                status = os.fstat(self.fd)
                sealed = fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & SEALS == SEALS
                filled = status.st_size == self.nbytes <= 512 * status.st_blocks
                usable = sealed and filled and os.fstatvfs(self.fd).f_bsize == mmap.PAGESIZE
            except OSError:
                usable = False
            if not usable:
                raise errors.ServiceError("the arrays of a message are not in a sealed memfd of their size")
            mapped = None
            if self.nbytes >= MAPPED_BYTES:
                with contextlib.suppress(OSError):  # The process has too many mappings or descriptors.
                    # A mapping keeps a descriptor open. Half of all descriptors stay free for clients and messages.
                    os.close(lowest := os.dup(self.fd))
                    if lowest < resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
                        mapped = mmap.mmap(self.fd, self.nbytes, flags=mmap.MAP_PRIVATE)
            if mapped is not None:
                memory = np.frombuffer(mapped, np.uint8)
            elif os.preadv(self.fd, [memory], 0) != self.nbytes:
                raise errors.ServiceError("the arrays of a message cannot be read")
        return [
            memory[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            for dtype, shape, offset in self.layout
        ]

    def close(self) -> None:
        """Close its descriptor. May be called twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Message:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Connection:
    """Messages over a connected socket of type ``SOCK_SEQPACKET``. One thread receives; any thread may send.

    Parameters
    ----------
    sock : socket.socket
        The connection owns it. Its file description may be shared with another process, so its mode is not changed.
    peer : str
        Name of the other end, for messages.
    max_bytes : int
        Maximum size of the arrays of a message.
    """

    def __init__(self, sock: socket.socket, peer: str, max_bytes: int = MAX_BYTES) -> None:
        self.sock, self.peer, self.max_bytes = sock, peer, max_bytes

    def send(
        self, header: dict[str, Any], arrays: Sequence[NDArray[Any]] = (), *, wait: bool = True, fd: int = -1
    ) -> None:
        """Send a message, with arrays or with a descriptor.

        Raises
        ------
        DTypeError
            The items of an array cannot be sent.
        MessageSizeError
            The message is too large. The connection stays usable.
        OSError
            The peer is gone, or (BlockingIOError) does not read.
        """
        arrays = [_plain(array) for array in arrays]
        listed = [[array.dtype.str, list(array.shape)] for array in arrays]
        text = json.dumps({**header, "arrays": listed} if listed else header, separators=(",", ":")).encode()
        layout, nbytes = _layout(listed)
        if len(text) > MAX_TEXT or nbytes > self.max_bytes or len(arrays) > MAX_ARRAYS:
            raise errors.MessageSizeError(
                f"a message of {len(arrays)} arrays, {nbytes} bytes and {len(text)} bytes of JSON is too large: at "
                f"most {MAX_ARRAYS}, {self.max_bytes} and {MAX_TEXT}. Send less, or start a service with --max-message"
            )
        if nbytes and not wait and not self.is_writable():  # Fail before the arrays are copied.
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        with contextlib.ExitStack() as stack:
            if nbytes:
                fd = _seal(arrays, layout, nbytes)
                stack.callback(os.close, fd)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))] if fd >= 0 else []
            self.sock.sendmsg([text], rights, 0 if wait else socket.MSG_DONTWAIT)

    def receive(self, *, wait: bool = True) -> Message:
        """Return the next message.

        Raises
        ------
        EOFError
            The peer has closed the connection.
        BlockingIOError
            No message arrived: at once without `wait`, else within the time limit of the socket.
        ServiceError
            The message is invalid.
        """
        flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        while True:
            try:
                text, ancillary, received, _ = self.sock.recvmsg(MAX_TEXT, socket.CMSG_LEN(4), flags)
                break
            except ConnectionResetError:  # The peer closed with unread messages, but its messages can still be read.
                continue
            except BlockingIOError:
                raise
            except OSError as error:
                raise EOFError(f"{self.peer} is gone ({error.strerror or error})") from error
        message = Message({}, size=len(text))
        for _, kind, data in ancillary:
            if kind == socket.SCM_RIGHTS and len(data) >= 4:
                (message.fd,) = struct.unpack("i", data[:4])
        try:
            if not text:
                raise EOFError(f"{self.peer} has closed the connection")
            if received & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise errors.ServiceError(f"{self.peer} sent more than {MAX_TEXT} bytes or one descriptor: send less")
            message.header = _parse(text, self.peer)
            try:
                message.layout, message.nbytes = _layout(message.header.pop("arrays", []))
                is_valid = len(message.layout) <= MAX_ARRAYS and message.nbytes <= self.max_bytes
            except (TypeError, ValueError):
                is_valid = False
            if not is_valid:
                problem = f"{self.peer} sent a list of arrays that is invalid or has more than {self.max_bytes} bytes"
                raise errors.ServiceError(f"{problem}: send less, or start the service with --max-message")
        except BaseException:
            message.close()
            raise
        return message

    def is_writable(self) -> bool:
        """Return True if a message can be sent at once, and the peer has read most of the earlier ones."""
        poll = select.poll()
        poll.register(self.sock, select.POLLOUT)
        return bool(poll.poll(0))

    def interrupt(self) -> None:
        """End both directions for all processes that have the socket; `close` is still necessary."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket of this process. May be called twice."""
        self.sock.close()


def check_version(hello: Message, peer: str, receiver: str) -> None:
    """Raise ServiceError if the hello of a peer has another version."""
    version = hello.get("version", int)
    if version != VERSION:
        text = f"{peer} has version {version} of the protocol, and {receiver} version {VERSION}"
        raise errors.ServiceError(f"{text}: install one version of Warpwell for both, and start the service again")


def checked(values: Any, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
    """Return ``values[name]``, or the default; raise ServiceError if it is missing or has another type."""
    value = values.get(name, default) if isinstance(values, dict) else ...
    if value is default and default is not ...:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if value is ... or (isinstance(value, bool) and bool not in kinds) or not isinstance(value, kinds):
        expected = " or ".join(k.__name__ for k in kinds)
        found = "is missing" if value is ... else f"is {value!r:.60}"
        raise errors.ServiceError(f"field {name!r} of a message {found}: {expected} is expected")
    return value


def checked_shape(task: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of a received launch; raise ServiceError if it is invalid."""
    shape = checked(task, "shape", list)
    if not (1 <= len(shape) <= 3 and all(type(n) is int and n >= 1 for n in shape)) or math.prod(shape) > MAX_THREADS:
        raise errors.ServiceError(f"shape {shape!r:.60} is not 1 to 3 positive integers with at most 2**40 threads")
    return tuple(shape)


def arguments_of(task: dict[str, Any], arrays: Sequence[Any], buffers: Any) -> list[Any]:
    """Return the arguments of a received launch; raise ServiceError if one is invalid.

    Each is a pair: ["array", index in the message], ["scalar", index of an array with one item], ["buffer", number of
    an array on the device], or ["value", number or boolean]. ``buffers(number)`` returns an array on the device.
    """
    found: list[Any] = []
    listed = checked(task, "arguments", list)
    if len(listed) > MAX_ARGUMENTS:
        raise errors.ServiceError(f"a launch has {len(listed)} arguments; at most {MAX_ARGUMENTS} are allowed")
    for pair in listed:
        kind, value = pair if isinstance(pair, list) and len(pair) == 2 else (None, -1)
        is_index = type(value) is int and 0 <= value < len(arrays)
        if kind == "array" and is_index:
            found.append(arrays[value])
        elif kind == "scalar" and is_index and arrays[value].shape == ():
            found.append(arrays[value][()])
        elif kind == "buffer" and type(value) is int:
            found.append(buffers(value))
        elif kind == "value" and (type(value) in (bool, float) or (type(value) is int and value in INT64)):
            found.append(value)
        else:
            raise errors.ServiceError(f"an argument of kind {kind!r:.20} has the invalid value {value!r:.40}")
    return found


def error_fields(error: BaseException) -> dict[str, Any]:
    """Return an error as plain data: name of its class, message and plain attributes."""
    name, text = type(error).__name__, str(error)[: MAX_TEXT // 16]
    if not isinstance(error, errors.WarpwellError):
        name, text = "SchedulerError", f"{name}: {text}"
    plain = {k: v for k, v in vars(error).items() if isinstance(v, str | int | float | bool) and len(str(v)) <= 1024}
    return {"class": name, "message": text, "attributes": plain}


def error_of(fields: dict[str, Any]) -> errors.WarpwellError:
    """Return the error that a peer described; it is always a class of `warpwell.errors`."""
    name = checked(fields, "class", str)
    cls = getattr(errors, name) if name in errors.__all__ else errors.SchedulerError
    error: errors.WarpwellError = cls(checked(fields, "message", str))
    for key, value in checked(fields, "attributes", dict, {}).items():
        if key in error._attribute_names() and isinstance(value, str | int | float | bool):
            setattr(error, key, value)
    return error


def profile_fields(profile: Profile | None) -> dict[str, Any] | None:
    """Return a profile as plain data."""
    if profile is None:
        return None
    return {**vars(profile), "kind": None if profile.kind is None else profile.kind.value}


def profile_of(fields: Any) -> Profile | None:
    """Return the profile that a peer described; raise ServiceError if it is invalid."""
    if fields is None:
        return None
    try:
        kind = None if fields.get("kind") is None else Kind(fields["kind"])
        return Profile(**{**fields, "kind": kind, "source": "given"})
    except (AttributeError, TypeError, ValueError) as error:
        raise errors.ServiceError(f"the profile of a request is invalid: {error}") from None


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array as it is sent: in C order, little-endian."""
    dtype = array.dtype.newbyteorder("<")
    if dtype.str not in ITEMS or array.ndim > MAX_DIMENSIONS:
        text = f"an array of {array.dtype} with {array.ndim} dimensions cannot be sent to a service"
        raise errors.DTypeError(f"{text}: use plain numbers in at most {MAX_DIMENSIONS} dimensions")
    return np.ascontiguousarray(array, dtype).reshape(array.shape)


def _seal(arrays: Sequence[NDArray[Any]], layout: Layout, nbytes: int) -> int:
    """Return a sealed memfd with arrays."""
    fd = os.memfd_create("warpwell-arrays", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for array, (_, _, offset) in zip(arrays, layout, strict=True):
            view = memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
            while view.nbytes:
                written = os.pwrite(fd, view, offset)
                view, offset = view[written:], offset + written
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _parse(text: bytes, peer: str) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise errors.ServiceError(f"{peer} sent a message that is not JSON: {error}") from None
    checked(header, "type", str)
    return dict(header)


def _layout(listed: Any) -> tuple[Layout, int]:
    """Return dtype, shape and offset of each array of a list, and the size of their memfd in bytes.

    Raise TypeError or ValueError if the list is invalid.
    """
    layout: Layout = []
    end = 0
    for name, shape in listed:
        is_shape = isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS
        if name not in ITEMS or not is_shape or not all(type(n) is int and 0 <= n <= 1 << 48 for n in shape):
            raise ValueError(f"{name!r:.20} and {shape!r:.40} are not a dtype and a shape")
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        layout.append((np.dtype(name), tuple(shape), offset))
        end = offset + np.dtype(name).itemsize * math.prod(shape)
    return layout, end
