"""Client of a scheduler service: `connect`, its connection, and the handles and device arrays that it returns."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, wait
from types import TracebackType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..._check import checked_seconds, shown
from ..._future import Future, require_same_process
from ..._os import socket_peer
from ...targets import at_address, overlap, viewed
from ..accesses import accesses_of
from ..callables import Call, as_launch
from ..data_order import Access
from ..events import Log
from ..handle import TaskFuture
from ..scheduler import checked_launches, require_launch
from ..task import Profile, State, Task, checked_size
from ..tensors import is_foreign, located
from . import address, messages, references
from .messages import Connection, Message

SILENCE_SECONDS = 5.0
"""Time without a message after which the client sends a ping. After the same time again, it opens a new connection."""

MAX_CONNECTS = 8
"""Maximum number of consecutive connections that end before the device process answers. Protection, not tuned."""

_LOST = "the array was lost with an earlier device process: copy the array again with to_device, and submit again"

_clients: weakref.WeakSet[Client] = weakref.WeakSet()
"""Clients of this process. A forked child must close their sockets, because it may exit later."""


def connect(
    path: str | os.PathLike[str] | None = None, *, tenant: str | None = None, timeout: float = SILENCE_SECONDS
) -> Client:
    """Connect to a scheduler service.

    Parameters
    ----------
    path : path, optional
        Path of the service's socket. Default: the socket of this user's `warpwell sched serve`.
    tenant : str, optional
        Tenant that tasks are charged to. A service for a group chooses the tenant itself, by user.
    timeout : float
        Time in seconds within which the service must answer. While a call or task is pending, the client gives up after
        twice this time without a message.

    Raises
    ------
    ServiceError
        No service listens at `path`, or the service refuses, has another version, or does not answer.
    """
    return Client(path, tenant=tenant, timeout=timeout)


class PendingCall(Future):
    """A call without an answer, or an unfinished request, which the client sends again to the next device process.

    Attributes
    ----------
    needs : int or None
        Generation of the device process that has the device arrays of the request.
    """

    def __init__(
        self,
        header: dict[str, Any],
        arrays: Sequence[NDArray[Any]] = (),
        handle: ServiceHandle | None = None,
        needs: int | None = None,
    ) -> None:
        super().__init__(f"answer to {header['type']!r}")
        self.header, self.arrays, self.handle, self.needs = header, arrays, handle, needs

    @property
    def is_cancelled(self) -> bool:
        """True if the request must not be sent, because it was cancelled or an earlier request failed."""
        handle = self.handle
        return handle is not None and (
            handle.cancel_requested or any(earlier.done() and not earlier.succeeded for earlier in handle.after)
        )

    def settle(self, answer: Any = ({}, []), error: BaseException | None = None) -> None:
        """Complete the call, unless it is complete."""
        if not self.done():
            self.set_result(answer) if error is None else self.set_exception(error)

    def end(self, error: errors.WarpwellError | None) -> None:
        """Fail the call and its request, or cancel the request."""
        if self.handle is not None:
            self.handle.settle(error, cancelled=error is None)
        self.settle(error=error)


class Client:
    """A connection to a service, for any thread. It is a context manager, like `Scheduler`.

    If the device process of the service dies, the client connects again and resubmits its unfinished requests. See
    `connect` for the parameters.

    Attributes
    ----------
    tenant : str
        Tenant that tasks are charged to.
    properties : dict
        Policy, device and so on of the service.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, tenant: str | None = None, timeout: float = SILENCE_SECONDS
    ) -> None:
        if references.in_device_process:
            text = "a device process imports this file for its kernels, and cannot be a client"
            raise errors.ServiceError(f"{text}: put the code that connects under if __name__ == '__main__'")
        self._timeout = checked_seconds(timeout, "timeout")
        self.path = address.checked_path(path)
        self._is_own = path is None
        self._requested = tenant
        self._process = os.getpid()
        self._lock, self._sending = threading.Lock(), threading.RLock()
        self._numbers = itertools.count(1)
        self._calls: dict[int, PendingCall] = {}  # in order
        self._writers: dict[ServiceHandle, list[Access]] = {}  # unfinished requests that may change arrays of callers
        self._dead: errors.ServiceError | None = None
        self._session, self.generation = 0, 0
        self._connection = self._connect()
        _clients.add(self)
        self._reader = threading.Thread(target=self._read, name="warpwell-service-reader", daemon=True)
        self._reader.start()

    def submit(self, launch: Any, *args: Any, **options: Any) -> ServiceHandle:
        """Submit a launch; see `Scheduler.submit`.

        Arguments are NumPy arrays, numbers, results of `to_device`, and arrays of other libraries in host memory. The
        service gets copies of the arrays. Before the handle is done, the arrays that the kernel has changed are copied
        back, unless they are read-only: set ``a.flags.writeable = False`` for input. If the task fails or is cancelled,
        nothing is copied back. If an unfinished task of this client may write to one of the arrays, the call first
        waits until that task has ended. So tasks on one array have the same results as if they ran in the order of
        submission.

        Parameters
        ----------
        launch : Launch
            ``kernel[n]`` of a kernel at the top level of a module or a script.
        *args
            Arguments of the kernel.
        **options
            priority, deadline, after (handles of this client), name, memory, size, profile: as for `Scheduler.submit`.

        Raises
        ------
        ArgumentError, DTypeError
            The kernel or an argument cannot be sent, or an option is invalid.
        QuotaError
            The tenant has too much data at the service.
        TaskLostError
            An array on the device is lost.
        ServiceError
            The service is gone, or refuses.
        """
        return self.submit_many([(launch, *args)], **options)

    def submit_many(
        self,
        launches: Sequence[tuple[Any, ...]],
        *,
        name: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        after: Any = (),
        memory: int | str | None = None,
        size: dict[str, float] | None = None,
        profile: Profile | None = None,
        tenant: str | None = None,
    ) -> ServiceHandle:
        """Submit a request of several launches, which run in order, and return its handle; see `submit`."""
        self._check()
        if tenant not in (None, self.tenant):
            text = f"this connection is for tenant {self.tenant!r}: use connect(tenant={tenant!r})"
            raise errors.ArgumentError(text, name="tenant")
        packer = Packer(self)
        tasks = [packer.launch(launch, args) for launch, *args in checked_launches(launches)]
        title = name or tasks[0]["kernel"]["name"]
        # Task raises for invalid options.
        task = Task(title, 1, priority=priority, deadline=deadline, memory=cast(int, 0 if memory is None else memory))
        before = self._require_handles(after)
        handle = ServiceHandle(self, title, packer.targets, [earlier for earlier in before if not earlier.succeeded])
        header = {
            "type": "submit",
            "tasks": tasks,
            "name": name or "",
            "priority": task.priority,
            "deadline": task.deadline,
            "after": [earlier.number for earlier in handle.after],
            "memory": None if memory is None else task.memory,
            "size": checked_size(size) or {},
            "profile": messages.profile_fields(profile),
            "readonly": [k for k, target in enumerate(packer.targets) if target is None],
        }
        try:
            self._send_in_order(call := PendingCall(header, (), handle, packer.generation), packer)
            call.result()
            return handle
        except BaseException as error:
            with self._lock:
                self._calls.pop(handle.number, None)
            handle.settle(None, cancelled=True)
            self._undo(error, {"type": "cancel", "request": handle.number})
            raise

    def to_device(self, array: NDArray[Any]) -> ServiceArray:
        """Copy an array to the device, where kernels of several tasks can use it without moving it.

        Raises
        ------
        DTypeError, QuotaError, ServiceError
            See `submit`.
        TaskMemoryError
            The device, or the tenant's part of it, has too little memory.
        TaskLostError
            The device process has died before the end of the copy.
        """
        values, generation = np.array(array), self.generation
        header: dict[str, Any] = {"type": "put"}
        try:
            self._call(header, generation, [values])  # The array may be too large to send again.
        except BaseException as error:
            self._undo(error, {"type": "free", "buffer": header.get("call", 0)})
            raise
        return ServiceArray(self, header["call"], generation, values.shape, values.dtype.newbyteorder("<"))

    def metrics(self) -> str:
        """Return the service's metrics in Prometheus' text format."""
        return str(self._call({"type": "metrics"})[1][0].tobytes().decode())

    def log(self) -> Log:
        """Return the decisions of the service since its device process started, with their reasons."""
        return Log.read(io.StringIO(self._call({"type": "log"})[1][0].tobytes().decode()))

    def status(self) -> dict[str, Any]:
        """Return the service's policy, device, clients, requests and restarts of the device process."""
        return dict(self._call({"type": "status"})[0]["status"])

    def close(self, *, cancel: bool = False) -> None:
        """Wait for all tasks, or cancel them, then disconnect. In a forked child this does nothing."""
        if self._process != os.getpid():
            return
        if not cancel and self._dead is None:
            wait([call.handle for call in list(self._calls.values()) if call.handle is not None])
        self._die(errors.ServiceError("this connection is closed: connect again"))
        self._connection.interrupt()
        if threading.current_thread() is not self._reader:
            self._reader.join(self._timeout)
        with self._sending:
            self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(cancel=kind is not None)

    def state_of(self, handle: ServiceHandle) -> State:
        """Return the state of a request (`ServiceHandle.state`)."""
        if threading.current_thread() is self._reader:
            return State.RUNNING  # This thread cannot receive the answer.
        return State(self._call({"type": "state", "request": handle.number})[0]["state"])

    def cancel(self, handle: ServiceHandle) -> bool:
        """Cancel a request (`ServiceHandle.cancel`)."""
        call = PendingCall({"type": "cancel", "request": handle.number})
        self._send(call)
        is_reader = threading.current_thread() is self._reader  # This thread cannot receive the answer.
        handle.cancel_requested = is_reader or bool(call.result()[0]["cancelled"])
        return handle.cancel_requested

    def _call(
        self, header: dict[str, Any], needs: int | None = None, arrays: Sequence[NDArray[Any]] = ()
    ) -> tuple[dict[str, Any], list[NDArray[Any]]]:
        """Send a call, and return header and arrays of its answer."""
        self._check()
        call = PendingCall(header, arrays, needs=needs)
        self._send(call)
        answer: tuple[dict[str, Any], list[NDArray[Any]]] = call.result()
        return answer

    # -- sending

    def _undo(self, error: BaseException, header: dict[str, Any]) -> None:
        """Send a call that undoes an interrupted call (Ctrl-C), because the caller has no handle or array."""
        if not isinstance(error, errors.WarpwellError):
            with contextlib.suppress(errors.WarpwellError):
                self._send(PendingCall(header))

    def _require_handles(self, after: Any) -> list[ServiceHandle]:
        """Return the handles of earlier requests; raise ArgumentError for anything else."""
        listed = list(after) if isinstance(after, Iterable) else [after]
        for handle in listed:
            if not isinstance(handle, ServiceHandle) or handle.client is not self:
                raise errors.ArgumentError(f"after= has {handle!r:.80}: give handles of this connection", name="after")
        return listed

    def _check(self) -> None:
        require_same_process(self._process, "this connection")
        if threading.current_thread() is self._reader:
            raise errors.SchedulerError("a callback must not wait for the service: do it in another thread")

    def _send_in_order(self, call: PendingCall, packer: Packer) -> None:
        """Send a request when no unfinished request may change its arrays in the memory of the caller."""
        handle = call.handle
        assert handle is not None
        while True:
            with self._sending:  # Requests of other threads come before or after this request.
                if call.is_cancelled:  # An earlier request has failed.
                    return call.end(None)
                earlier = next((h for h, writes in list(self._writers.items()) if packer.uses(writes)), None)
                if earlier is None:
                    call.arrays = [array.copy() if _may_change(array) else array for array in packer.arrays]
                    handle.add_done_callback(lambda _: self._writers.pop(handle, None))
                    self._writers[handle] = [access for access in packer.accesses if access.writes]
                    return self._send(call)
            with contextlib.suppress(CancelledError):
                earlier.exception()

    def _send(self, call: PendingCall) -> None:
        """Send a call. If the connection is broken, the reader sends it again."""
        number = call.header["call"] = next(self._numbers) if call.handle is None else call.handle.number
        with self._sending:
            try:
                with self._lock:
                    if self._dead is not None:
                        raise errors.ServiceError(str(self._dead))
                    if call.needs not in (None, self.generation):
                        raise errors.TaskLostError(_LOST)
                    self._calls[number] = call
                self._connection.send(call.header, call.arrays)
            except BaseException as error:
                if isinstance(error, OSError) and not isinstance(error, errors.WarpwellError):
                    self._connection.interrupt()
                else:
                    with self._lock:
                        self._calls.pop(number, None)
                    raise

    # -- the reader

    def _is_closed(self) -> bool:
        return self._dead is not None

    def _read(self) -> None:
        try:
            while True:
                self._receive_until_end()
                if self._is_closed():
                    return
                connection = self._connect()
                with self._sending:
                    with self._lock:
                        if self._is_closed():
                            connection.close()
                            return
                        self._connection, former = connection, self._connection
                    former.close()
                    self._resume(connection)
        except errors.WarpwellError as error:
            self._die(errors.ServiceError(str(error)))
        except Exception as error:  # Callers must not wait for a dead thread.
            self._die(errors.ServiceError(f"the service at {self.path} sent an invalid message: {error!r}"))
        self._connection.interrupt()

    def _receive_until_end(self) -> None:
        """Handle messages until the connection ends, or the service does not answer."""
        connection, has_pinged = self._connection, False
        while True:
            try:
                with connection.receive() as message:
                    self._handle(message)
                has_pinged = False
            except BlockingIOError:
                if has_pinged:
                    connection.interrupt()
                    return
                if self._calls:
                    has_pinged = True
                    with contextlib.suppress(OSError):
                        connection.send({"type": "ping"}, wait=False)
            except EOFError:
                return

    def _handle(self, message: Message) -> None:
        if message.kind == "refused":
            raise errors.ServiceError(message.get("message", str))
        if message.kind not in ("reply", "ended"):
            return
        fields = message.header
        number = message.get("call" if message.kind == "reply" else "request", int)
        failed = "error" in fields
        with self._lock:
            call = self._calls.get(number)
            if call is not None and (message.kind == "ended" or call.handle is None or failed):
                del self._calls[number]
        if call is None:
            return
        error = messages.error_of(message.get("error", dict)) if failed else None
        if failed or (message.kind == "ended" and "cancelled" in fields):
            call.end(error)  # A request that was accepted may be refused when it is resubmitted.
        elif message.kind == "reply":
            call.settle((fields, message.arrays()))
        elif call.handle is not None:
            call.settle()
            call.handle.copy_back(dict(zip(message.get("changed", list), message.arrays(), strict=True)))

    def _connect(self) -> Connection:
        """Connect, and return the connection once the device process has answered."""
        for attempt in range(MAX_CONNECTS):
            time.sleep(0.1 if attempt else 0.0)
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection = Connection(sock, f"the service at {self.path}")
            try:
                seconds, fraction = divmod(self._timeout, 1.0)
                limit = struct.pack("@ll", int(seconds), max(1, int(fraction * 1e6)))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                self._open(sock)
                hello = {"type": "hello", "version": messages.VERSION, "tenant": self._requested}
                try:
                    connection.send({**hello, "session": self._session})
                    kind = "starting"
                    while kind == "starting":
                        with connection.receive() as message:
                            kind = message.kind
                except (EOFError, BrokenPipeError, ConnectionResetError):
                    connection.close()
                    continue  # The device process died before it answered.
                except BlockingIOError:
                    text = f"{connection.peer} did not send 'hello' within {self._timeout:g} s: is it stopped?"
                    raise errors.ServiceError(text) from None
                if kind != "hello":
                    raise errors.ServiceError(message.get("message", str, f"{connection.peer} sent {kind!r}"))
                messages.check_version(message, "the service", "your program")
                with self._lock:
                    self.tenant: str = message.get("tenant", str)
                    self.properties: dict[str, Any] = message.get("properties", dict)
                    self._session = message.get("session", int)
                    connection.max_bytes = message.get("max_message", int)
                    self.generation += 1
                return connection
            except BaseException:
                connection.close()
                raise
        raise errors.ServiceError(f"the service at {self.path} closed the connection without 'hello': try again")

    def _open(self, sock: socket.socket) -> None:
        try:
            sock.connect(os.fspath(self.path))
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            text = f"no scheduler service listens at {self.path}: start one with `warpwell sched serve`"
            if self._session:
                text = f"the service at {self.path} is gone: start the service again, and connect again"
            raise errors.ServiceError(text) from None
        except OSError as error:
            text = f"cannot be reached: {error.strerror or error}"
            if isinstance(error, BlockingIOError):
                text = "does not accept connections: is it stopped?"
            elif isinstance(error, PermissionError):
                text = "is closed to you: the socket or its folder allows only its user, or a group without you"
            raise errors.ServiceError(f"the scheduler service at {self.path} {text}") from None
        _, user = socket_peer(sock)
        if self._is_own and user != os.getuid():
            raise errors.ServiceError(f"{self.path} belongs to user {user}: pass path= to use this service anyway")

    def _resume(self, connection: Connection) -> None:
        """Send all unanswered calls and unfinished requests again, in order. The caller holds `_sending`."""
        for number, call in list(self._calls.items()):
            is_lost = call.needs not in (None, self.generation)
            if is_lost or call.is_cancelled:
                self._calls.pop(number, None)
                call.end(errors.TaskLostError(_LOST) if is_lost else None)
                continue
            self._send_while_receiving(connection, call.header, call.arrays)
        self._send_while_receiving(connection, {"type": "resumed", "call": next(self._numbers)}, ())

    def _send_while_receiving(self, connection: Connection, header: dict[str, Any], arrays: Sequence[Any]) -> None:
        """Send a message. The device process does not receive from a client that does not read answers."""
        for _ in range(2**20):
            try:
                connection.send(header, arrays, wait=False)
                return
            except BlockingIOError:
                with contextlib.suppress(EOFError, BlockingIOError), connection.receive() as message:
                    self._handle(message)
            except OSError:
                return  # The next `receive` reports the end.

    def _die(self, reason: errors.ServiceError) -> None:
        """Fail all pending calls and requests."""
        with self._lock:
            if self._dead is None:
                self._dead = reason
            calls, self._calls = self._calls, {}
        for call in calls.values():
            call.end(errors.ServiceError(str(reason)))


class ServiceHandle(TaskFuture):
    """A request that was submitted to a service; a future like `Handle`.

    `result` returns None once the request has ended and its changes are in the caller's arrays. Callbacks run in the
    thread that receives from the service: they must not wait.
    """

    after: Sequence[ServiceHandle]

    def __init__(
        self, client: Client, name: str, targets: Sequence[NDArray[Any] | None], after: Sequence[ServiceHandle]
    ) -> None:
        super().__init__(client, name)
        self.client, self.number, self.after, self._targets = client, next(client._numbers), after, targets
        self.cancel_requested = False
        self._outcomes = itertools.count()

    @property
    def succeeded(self) -> bool:
        """True if the request has ended without an error."""
        return self.done() and self.state is State.DONE

    def settle(self, error: BaseException | None, cancelled: bool = False) -> None:
        """Complete the future, unless it is complete."""
        # Taking a number is one step: the reader and an interrupted `submit` may complete the future concurrently.
        if next(self._outcomes) == 0:
            super().settle(error, cancelled)

    def copy_back(self, changed: dict[int, NDArray[Any]]) -> None:
        """Copy changes into the caller's arrays, and complete the future."""
        error = None
        try:
            for index, values in changed.items():
                if (target := self._targets[index]) is not None:
                    np.copyto(target, values)
        except (ValueError, IndexError) as wrong:
            text = f"the result of task {self.name!r} does not fit into its array ({wrong})"
            error = errors.SchedulerError(f"{text}: do not resize arrays until the task has ended", task=self.name)
        self.settle(error)


class ServiceArray:
    """An array on the device of a service. Kernels take it as an argument, and it stays on the device between launches.

    The array is lost when the client's connection breaks or the device process dies. Then tasks that use it raise
    `TaskLostError`.
    """

    def __init__(
        self, client: Client, number: int, generation: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.client, self.number, self.generation = client, number, generation
        self.shape, self.dtype = shape, dtype

    def numpy(self) -> NDArray[Any]:
        """Return a copy in host memory. First wait for all tasks that write to the array.

        Raises
        ------
        TaskLostError
            The device process has died.
        ServiceError
            The service is gone.
        """
        return self.client._call({"type": "get", "buffer": self.number}, self.generation)[1][0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("a ServiceArray is on a device, so NumPy cannot share its memory: omit copy=False")
        host = self.numpy()
        return host if dtype is None else host.astype(dtype, copy=False)

    def free(self) -> None:
        """Free the memory. Tasks that were submitted before this call can still use the array."""
        with contextlib.suppress(errors.TaskLostError):
            self.client._call({"type": "free", "buffer": self.number}, self.generation)

    def __repr__(self) -> str:
        return f"<ServiceArray {self.number}: {self.dtype} {self.shape}>"


class Packer:
    """Collects the launches of a request and their arrays, each array once.

    Attributes
    ----------
    arrays : list of ndarray
        Arrays to send.
    targets : list of ndarray or None
        For each array, the caller's array that receives changes, or None if it is read-only.
    generation : int or None
        Generation of the device process that has the device arrays.
    accesses : list of Access
        Memory of the caller's arrays.
    """

    def __init__(self, client: Client | None = None) -> None:
        self._client = client
        self.arrays: list[NDArray[Any]] = []
        self.targets: list[NDArray[Any] | None] = []
        self.generation: int | None = None
        self.accesses: list[Access] = []
        self._packed: dict[int, tuple[Any, list[Any]]] = {}  # arrays and their arguments, by the arrays' ids

    def launch(self, launch: Any, args: Sequence[Any]) -> dict[str, Any]:
        """Return a launch as plain data; raise ArgumentError or DTypeError if kernel or arguments cannot be sent."""
        if isinstance(as_launch(launch, ())[0], Call):
            text = f"{launch!r:.80} is a function or a graph, but a service runs only kernels"
            raise errors.ArgumentError(f"{text}: submit it to a Scheduler of your own process")
        require_launch(launch)
        named = references.reference(launch.kernel)
        values = viewed(launch.kernel, args)
        arguments = [self._argument(value, k, named["name"]) for k, value in enumerate(values)]
        memory = [
            self.arrays[k] if kind == "array" else value for (kind, k), value in zip(arguments, values, strict=True)
        ]
        self.accesses += accesses_of(launch, memory)
        return {"kernel": named, "shape": list(launch.shape), "arguments": arguments}

    def uses(self, writes: Sequence[Access]) -> bool:
        """Return True if the launches use memory of these accesses."""
        return any(w.start < a.end and a.start < w.end for w in writes for a in self.accesses)

    def _argument(self, value: Any, index: int, kernel: str) -> list[Any]:
        label = f"argument {index} of kernel {kernel!r}"
        if id(value) in self._packed:
            return self._packed[id(value)][1]
        if isinstance(value, ServiceArray):
            if value.client is not self._client:
                raise errors.ArgumentError(f"{label} belongs to another connection: use one", name="args")
            self.generation = min(value.generation, self.generation or value.generation)  # Older arrays are lost.
            return ["buffer", value.number]
        if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):  # The mask would not be sent.
            return self._array(value, value)
        if isinstance(value, np.generic):
            self.arrays.append(np.asarray(value))
            self.targets.append(None)
            return ["scalar", len(self.arrays) - 1]
        if isinstance(value, float) or (isinstance(value, int) and value in messages.INT64):
            return ["value", value]
        if is_foreign(value):
            tensor, dtype = located(value, label)
            if not tensor.on_host and 0 not in tensor.shape:
                text = f"{label} is in GPU memory of your process: copy it to the host, or use to_device of the service"
                raise errors.ArgumentError(text, name="args")
            array = at_address("cpu", tensor.address, tensor.shape, dtype, tensor.keep)
            array.flags.writeable = tensor.writable
            return self._array(array, value)
        # The text of an object of another library may take long, or run a query.
        text = shown(value) if isinstance(value, int | str | None) else f"a {type(value).__name__}"
        text = f"{label} is {text}, which cannot be sent to a service: expected a NumPy array without a mask, a number"
        raise errors.ArgumentError(f"{text} of 64 bits, or a result of to_device", name="args")

    def _array(self, array: NDArray[Any], value: Any) -> list[Any]:
        """Return the argument for an array in host memory that represents `value`."""
        for array_before, target in zip(self.arrays, self.targets, strict=True):
            writes = target is not None or array.flags.writeable
            if writes and overlap(array_before, array):
                text = "two arrays of a request overlap, and a service gets copies: pass one array object twice"
                raise errors.ArgumentError(text, name="args")
        self.arrays.append(array)
        self.targets.append(array if array.flags.writeable else None)
        self._packed[id(value)] = value, ["array", len(self.arrays) - 1]
        return self._packed[id(value)][1]


def _may_change(array: NDArray[Any]) -> bool:
    """Return True if NumPy lets the program write the memory of an array, through it or through its base."""
    return array.flags.writeable or (isinstance(array.base, np.ndarray) and _may_change(array.base))


def _after_fork() -> None:
    """Close the connections of the parent, so that the service notices its end while this child lives."""
    for client in list(_clients):
        client._connection.close()
    _clients.clear()


os.register_at_fork(after_in_child=_after_fork)
