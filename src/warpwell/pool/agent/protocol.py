"""`Op`: the calls between a program and its agents, and their encoding as messages."""

from __future__ import annotations

import enum
import itertools
import marshal
import pickle
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ... import errors
from ...targets.compiler import cloudpickle

INLINE = 64 << 10
"""Maximum size of the data of a copy that is sent inside its message, in bytes."""

ACKNOWLEDGE_CALLS = 256
"""Number of calls after which a lane reports its progress."""

ACKNOWLEDGE_BYTES = 4 << 20
"""Number of bytes in calls after which a lane reports its progress, even after fewer calls."""

WINDOW_CALLS = 2048
"""Maximum number of calls of a stream in flight. It must exceed `ACKNOWLEDGE_CALLS`, or programs would hang."""

WINDOW_BYTES = 64 << 20
"""Maximum number of bytes in the calls of a stream in flight."""


@enum.unique
class Op(enum.IntEnum):
    """Kinds of messages. A comment lists the operands; the first two are stream and sequence."""

    # from the program, for a lane
    ALLOCATE = 1  # buffer, bytes, dtype, shape
    FILL = 2  # buffer, item as bytes
    WRITE = 3  # buffer, data as bytes, or memory and offset of an array of the program
    WRITE_BULK = 4  # buffer, reply, tag, plan
    READ = 5  # buffer, reply, None, or memory and offset of an array of the program
    READ_BULK = 6  # buffer, reply, tag, plan
    COPY = 7  # destination, source, on the same device
    # a copy between agents, which the destination pulls; a stream of -1 does not order it:
    SOURCE = 8  # buffer, copy, rank of the destination, whether the source reports a failure
    PULL = 9  # buffer, copy, (rank of the source, tag, plan, whether the source may write here)
    LAUNCH = 10  # code, configuration, arguments
    CALL = 11  # code, reply, handles, pickled arguments
    CREATE = 12  # object, path, handles, pickled arguments
    METHOD = 13  # object, name, reply, handles, pickled arguments
    GLOBAL = 14  # code, name, handles, pickled value
    RECORD = 15  # event, timing
    WAIT = 16  # event of the same agent
    AWAIT = 17  # signal, rank that sends it
    SYNCHRONIZE = 18  # reply

    ARGUMENT = 21  # handle, reply, tag, plan, shape of the array, which a later call takes

    # from the program, for the main loop; stream and sequence are 0 if they have no meaning
    VIEW = 33  # buffer, base, offset, dtype, shape, strides or None
    FREE = 34  # handle
    CODE = 35  # code, kind, name, bytes
    STREAM = 36  # stream, priority
    STREAM_END = 37  # stream
    NOTIFY = 38  # event, signal, rank that waits for it
    REACHED = 39  # event, reply: whether it was reached
    UNTIL = 40  # event, reply: when it is reached
    ELAPSED = 41  # event, earlier event, reply
    INFO = 42  # reply
    CANCEL = 43  # reply or copy whose data is not needed any more
    CODE_END = 44  # code that the program has dropped
    GOODBYE = 45
    SHARE = 46  # reply, memory, path, bytes
    # to agents whose device joins and leaves:
    JOIN = 47  # reply: as for INFO
    LEAVE = 48  # reply
    RESERVE = 49  # reply, GPUs of the host, count, seconds; until CANCEL

    # from an agent
    DONE = 64  # sequence of the last call that a stream has completed
    FAILED = 65  # call, failure
    REPLY = 66  # reply, value
    REFUSED = 67  # reply, call, failure, whether the failure was reported before
    ANSWER = 68  # reply, pickled result, indices of the arrays in it, and for each array: tag, chunk, shape

    # between agents
    SIGNAL = 96  # signal, failure or None
    WANT = 97  # copy, offer or None, tag, plan: the destination is ready
    SENT = 98  # copy, whether written, whether writing is never possible, failure or None: reply to WANT
    HAVE = 99  # copy, failure or None, whether after WANT: the destination has the bulk data, or has failed
    RELEASE = 103  # block that is not used any more
    RELEASED = 104  # block: it is closed

    # between the communicator and agents of other hosts, see pool/cuda
    CUDA = 112  # kind, operands


_ids = itertools.count(1)


def new_id() -> int:
    """Return a number for a buffer, a stream, an event or a request, which is unique in this process."""
    return next(_ids)


def pack(*message: Any) -> bytes:
    """Return a message as bytes. Both processes have the same version of Python."""
    return marshal.dumps(message)


def unpack(message: bytes) -> tuple[Any, ...]:
    """Return the arguments of `pack`."""
    return marshal.loads(message)  # type: ignore[no-any-return]


# -- dtypes ----------------------------------------------------------------------------------------------------


def pack_dtype(dtype: np.dtype[Any]) -> Any:
    """Return a dtype as strings, lists and tuples."""
    return dtype.str if dtype.names is None else np.lib.format.dtype_to_descr(dtype)


def unpack_dtype(packed: Any) -> np.dtype[Any]:
    """Return the argument of `pack_dtype`."""
    return np.dtype(packed) if isinstance(packed, str) else np.lib.format.descr_to_dtype(packed)


# -- arguments of launches -------------------------------------------------------------------------------------

_HANDLE, _SCALAR, _TUPLE = 0, 1, 2
_PLAIN = (int, float, bool, complex)


def pack_arguments(values: Sequence[Any], handle_of: Callable[[Any], int | None]) -> tuple[Any, ...]:
    """Return arguments of a launch in a form that `pack` accepts.

    Parameters
    ----------
    values : sequence
        Numbers, NumPy scalars, tuples of them, and objects on the device.
    handle_of : callable
        Returns the handle of an object on the device, None for any other object.

    Raises
    ------
    ArgumentError
        A value has another type.
    """
    return tuple(_pack_argument(value, handle_of) for value in values)


def _pack_argument(value: Any, handle_of: Callable[[Any], int | None]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    handle = handle_of(value)
    if handle is not None:
        return _HANDLE, handle
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return _SCALAR, pack_dtype(value.dtype), value.tobytes()
    if isinstance(value, tuple):
        return _TUPLE, pack_arguments(value, handle_of)
    if isinstance(value, int):
        return int(value)
    raise errors.ArgumentError(
        f"{value!r:.60} cannot be an argument of a launch on a device of the pool: pass buffers, arrays and numbers"
    )


def unpack_arguments(packed: Sequence[Any], resolve: Callable[[int], Any]) -> list[Any]:
    """Return the arguments, with ``resolve(handle)`` for each object on the device."""
    return [value if type(value) in _PLAIN else _unpack_argument(value, resolve) for value in packed]


def _unpack_argument(packed: Any, resolve: Callable[[int], Any]) -> Any:
    if packed[0] == _HANDLE:
        return resolve(packed[1])
    if packed[0] == _SCALAR:
        return np.frombuffer(packed[2], unpack_dtype(packed[1]))[0]
    return tuple(unpack_arguments(packed[1], resolve))


# -- failures --------------------------------------------------------------------------------------------------


def pack_failure(error: BaseException) -> tuple[str, str, bytes | None]:
    """Return the text of an exception, its traceback, and the pickled exception, or None if pickling fails."""
    text = "".join(traceback.format_exception(error))
    try:
        pickled = cloudpickle().dumps(error)
        pickle.loads(pickled)
    except Exception:  # the exception's own code may raise any exception
        pickled = None
    return _describe(error), text, pickled


def _describe(error: BaseException) -> str:
    try:
        description = str(error)
    except Exception:
        description = "(its text is not available)"
    return f"{type(error).__name__}: {description}" if description else type(error).__name__


def unpack_failure(packed: tuple[str, str, bytes | None], call: str, device: str) -> errors.RemoteError:
    """Return the error for the program. Its cause is the exception of the agent, if it can be unpickled."""
    description, remote, pickled = packed
    error = errors.RemoteError(f"{call} failed on {device}: {description}", call=call, remote_traceback=remote)
    cause: Any = None
    if pickled is not None:
        try:
            cause = pickle.loads(pickled)
        except Exception:  # the exception's class cannot be imported here
            cause = None
    error.__cause__ = cause if isinstance(cause, BaseException) else None
    error.add_note(f"on the device:\n{remote.rstrip()}")
    return error
