"""Client of a scheduler service: `connect`, its connection, and the handles and device arrays that it returns."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import socket
import threading
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..._check import checked_seconds, shown
from ...targets import at_address, overlap, viewed
from ...turns import device_name
from ..callables import Call, as_launch
from ..events import Log
from ..handle import TaskFuture
from ..scheduler import checked_launches, require_launch
from ..task import Profile, State, Task, checked_size
from ..tensors import is_foreign, located, size_of
from . import address, ipc, protocol, references, wire

SILENCE = 5.0
"""Seconds without a word from the service, after which it is asked for one; as long again, and it is given up."""


_left: list[Any] = []
"""What keeps memory that was lent to tasks whose end nobody tells: the owner may still write to it."""

_clients: weakref.WeakSet[Client] = weakref.WeakSet()
"""Those of this process, whose sockets forked children must not keep: they may live longer."""

handles = protocol.Handlers()


def connect(
    path: str | os.PathLike[str] | None = None, *, tenant: str | None = None, timeout: float = SILENCE
) -> Client:
    """Connect to a scheduler service.

    Parameters
    ----------
    path : path, optional
        Of its socket; by default where `warpwell sched serve` of this user listens.
    tenant : str, optional
        Tenant that tasks are charged to. A service for a group decides that itself, by user.
    timeout : float
        Seconds that the service may take to answer; and to say anything while something is waited for, twice.

    Raises
    ------
    ServiceError
        No service listens there, or it refuses, speaks another version, or does not answer.
    """
    return Client(path, tenant=tenant, timeout=timeout)


class Client:
    """A connection to a service. Any thread may use it; a context manager, like `Scheduler`.

    See `connect` for the parameters.

    Attributes
    ----------
    tenant : str
        Tenant that tasks are charged to.
    about : dict
        Policy, device and so on of the service.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, tenant: str | None = None, timeout: float = SILENCE
    ) -> None:
        if references.in_owner:
            raise errors.ServiceError(
                "the service's owner imports this file for its kernels, and cannot be its own client: put what the "
                "file runs under if __name__ == '__main__'"
            )
        timeout = checked_seconds(timeout, "timeout")
        self.path = address.checked_path(path)
        self._lock = threading.Lock()
        self._call_numbers = itertools.count(1)
        self._calls: dict[int, tuple[Future[protocol.ServiceMessage], Sequence[ServiceHandle]]] = {}
        self._handles: dict[int, ServiceHandle] = {}
        self._open: dict[int, tuple[Future[None], list[Any]]] = {}  # what keeps memory that ended tasks were lent
        self._dead: errors.ServiceError | None = None
        self._process = os.getpid()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection = protocol.ServiceConnection(sock, f"the service at {self.path}", patience=timeout)
        _clients.add(self)
        try:
            _connect(sock, self.path)
            _, user = protocol.credentials(sock)
            if path is None and user != os.getuid():
                raise errors.ServiceError(f"{self.path} is user {user}'s, not yours: pass its path to use it anyway")
            protocol.hello(self._connection, tenant=tenant)
            answer = self._connection.expect("hello")
            protocol.check_version(answer, "the service", "your program")
            self.tenant: str = answer.get("tenant", str)
            self.about: dict[str, Any] = answer.get("about", dict)
            self._connection.max_body = answer.get("max_message", int)
            self._reader = threading.Thread(target=self._read, name="warpwell-service-reader", daemon=True)
            self._reader.start()
        except BaseException:
            self._connection.close()
            raise

    def submit(self, launch: Any, *args: Any, **options: Any) -> ServiceHandle:
        """Submit a launch; see `Scheduler.submit`.

        Arguments are NumPy arrays, numbers, what `to_device` returned, and arrays of other libraries. An array is
        copied to the service when it is submitted, and what the kernel wrote is copied back before the handle is done,
        into arrays that can be written to: mark an array read-only (``a.flags.writeable = False``) where nothing is to
        come back. An array of PyTorch, CuPy or Numba on the service's GPU is not copied: the kernel uses it where it
        lies, after all that the GPU was given here. Leave it alone until the handle is done.

        Parameters
        ----------
        launch : Launch
            ``kernel[n]`` of a kernel at the top level of a module or a script.
        *args
            What it is called with.
        **options
            priority, deadline, after (handles of this client), name, memory, size, profile: as for `Scheduler.submit`.

        Raises
        ------
        ArgumentError, DTypeError
            The kernel or an argument cannot be sent, or an option is invalid.
        QuotaError
            The tenant has too much at the service.
        TaskLostError
            An array on the device is gone.
        ServiceError
            The service is gone, or refuses.
        """
        return self.submit_many([(launch, *args)], **options)[0]

    def submit_many(
        self,
        launches: Sequence[tuple[Any, ...]],
        *,
        name: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        after: Future[Any] | Sequence[Future[Any]] = (),
        memory: int | str | None = None,
        size: dict[str, float] | None = None,
        profile: Profile | None = None,
        tenant: str | None = None,
    ) -> list[ServiceHandle]:
        """Submit a request of several launches, which run in order; see `Scheduler.submit_many` and `submit`."""
        self._check()
        if not launches:
            raise errors.ArgumentError("a request without launches: give at least one", name="launches")
        if tenant not in (None, self.tenant):
            raise errors.ArgumentError(
                f"this connection is for tenant {self.tenant!r}: connect(tenant={tenant!r}) makes another",
                name="tenant",
            )
        packer = Packer(self, str(self.about.get("gpu", "")))
        tasks = [packer.launch(launch, args) for launch, *args in checked_launches(launches)]
        numbers = self._after(after)
        # what a scheduler refuses is refused here, by the same words
        title = name or tasks[0]["kernel"]["name"]
        held = cast(int, 0 if memory is None else memory)  # `Task` reads text
        checked = Task(title, 1, priority=priority, deadline=deadline, memory=held)
        header = {
            "type": "submit",
            "tasks": tasks,
            "name": name or "",
            "priority": checked.priority,
            "deadline": checked.deadline,
            "after": numbers,
            "memory": None if memory is None else checked.memory,
            "size": checked_size(size) or {},
            "profile": wire.profile_fields(profile),
            "lent": packer.lent,
            "readonly": [k for k, target in enumerate(packer.targets) if target is None],
        }
        handles = [ServiceHandle(self, task["kernel"]["name"], packer) for task in tasks]
        reply: Future[protocol.ServiceMessage] = Future()
        try:
            self._answer(self._ask(header, packer.arrays, reply, handles))
        except errors.WarpwellError:
            raise
        except BaseException:  # Ctrl-C: the service may have them, and nobody will have their handles
            _left.extend(packer.kept)
            reply.add_done_callback(lambda _: self._withdraw(handles))
            raise
        return handles

    def to_device(self, array: NDArray[Any]) -> ServiceArray:
        """Put a copy of an array on the device, where kernels of several tasks can use it without moving it.

        Raises
        ------
        DTypeError, QuotaError, ServiceError
            See `submit`.
        TaskLostError
            The process that owns the device died meanwhile.
        """
        values = np.asarray(array)
        answer = self.call({"type": "put"}, [values])
        return ServiceArray(self, answer.get("buffer", int), values.shape, values.dtype.newbyteorder("<"))

    def metrics(self) -> str:
        """Return the service's metrics in Prometheus' text format."""
        return self.call({"type": "metrics"}).arrays[0].tobytes().decode()

    def log(self) -> Log:
        """Return the service's log: its decisions and their reasons."""
        return Log.read(io.StringIO(self.call({"type": "log"}).arrays[0].tobytes().decode()))

    def status(self) -> dict[str, Any]:
        """Return the service's policy, device, clients, requests and restarts of the owner."""
        header = self.call({"type": "status"}).header
        return {key: value for key, value in header.items() if key not in ("type", "call")}

    def close(self, *, cancel: bool = False) -> None:
        """Wait for all tasks, or cancel them, and leave. A process that was forked from its own leaves it alone."""
        if self._process != os.getpid():
            self._connection.forget()  # locks of this object may have been held at the fork
            return
        if not cancel and self._dead is None:
            wait(list(self._handles.values()))
            # what is not closed by then is kept for ever
            wait([closed for closed, _ in list(self._open.values())], ipc.CLOSING)
        self._die(errors.ServiceError("this connection is closed: connect again"))
        self._connection.interrupt()
        if threading.current_thread() is not self._reader:
            self._reader.join(self._connection.patience)
        self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(cancel=kind is not None)

    # calls of handles and arrays

    def state_of(self, handle: ServiceHandle) -> State:
        """Return where a task is (`ServiceHandle.state`)."""
        if threading.current_thread() is self._reader:
            return State.RUNNING  # a callback: this thread cannot receive the answer
        return State(self.call({"type": "state", "task": handle.number}).get("state", str))

    def cancel(self, handle: ServiceHandle) -> bool:
        """Cancel a task (`ServiceHandle.cancel`)."""
        if threading.current_thread() is self._reader:
            self._ask({"type": "cancel", "task": handle.number})
            return True
        return bool(self.call({"type": "cancel", "task": handle.number}).get("cancelled", bool))

    # calls

    def _withdraw(self, handles: Sequence[ServiceHandle]) -> None:
        """Forget tasks, and cancel them without waiting for what becomes of them."""
        with contextlib.suppress(errors.WarpwellError):  # where the service has gone, they have too
            for handle in handles:
                with self._lock:
                    self._handles.pop(handle.number, None)
                self._ask({"type": "cancel", "task": handle.number})

    def _after(self, after: Future[Any] | Sequence[Future[Any]]) -> list[int]:
        numbers = []
        for future in after if isinstance(after, Iterable) else [after]:
            if not isinstance(future, ServiceHandle) or future.client is not self:
                raise errors.ArgumentError(f"after= has {future!r:.80}: give handles of this connection", name="after")
            numbers.append(future.number)
        return numbers

    def _check(self) -> None:
        if self._process != os.getpid():
            raise errors.ForkError(f"this connection belongs to process {self._process}, which forked: connect again")
        if self._dead is not None:
            raise errors.ServiceError(str(self._dead))
        if threading.current_thread() is self._reader:
            raise errors.SchedulerError("a callback must not wait for the service: do it in another thread")

    def _ask(
        self,
        header: dict[str, Any],
        arrays: Sequence[NDArray[Any]] = (),
        reply: Future[protocol.ServiceMessage] | None = None,
        handles: Sequence[ServiceHandle] = (),
    ) -> Future[protocol.ServiceMessage]:
        """Send a call; return the future of its answer, which gives `handles` their numbers."""
        reply = Future() if reply is None else reply
        with self._lock:
            if self._dead is not None:
                raise errors.ServiceError(str(self._dead))
            call = next(self._call_numbers)
            self._calls[call] = reply, handles
        try:
            self._connection.send({**header, "call": call}, arrays)
        except errors.WarpwellError:
            with self._lock:
                self._calls.pop(call, None)  # no answer will come
            raise
        return reply

    def call(self, header: dict[str, Any], arrays: Sequence[NDArray[Any]] = ()) -> protocol.ServiceMessage:
        """Make a call, and wait for its answer."""
        self._check()
        return self._answer(self._ask(header, arrays))

    def _answer(self, reply: Future[protocol.ServiceMessage]) -> protocol.ServiceMessage:
        """Wait for an answer. The reader ends every wait when the service says nothing."""
        message = reply.result()
        if "error" in message.header:
            raise wire.error_of(message.get("error", dict))
        return message

    # the thread that receives from the service

    def _read(self) -> None:
        asked = False
        try:
            while True:
                message = self._connection.receive()
                if message is not None:
                    asked = False
                    if message.kind in handles:
                        handles[message.kind](self, message)
                elif asked:
                    raise errors.ServiceError(
                        f"the service at {self.path} has not answered for {2 * self._connection.patience:g} s: is it "
                        "stopped? See `warpwell sched status`"
                    )
                elif self._calls or self._handles or self._open:
                    self._connection.send({"type": "ping"})
                    asked = True
        except EOFError:
            self._die(
                errors.ServiceError(
                    f"the service at {self.path} has gone: "
                    "start it with `warpwell sched serve`, connect and submit again"
                )
            )
        except errors.WarpwellError as error:
            self._die(errors.ServiceError(str(error)))
        except Exception as error:  # callers must not wait for a dead thread
            self._die(errors.ServiceError(f"the service at {self.path} was not understood: {error!r}"))
        self._connection.interrupt()

    @handles("reply")
    def _replied(self, message: protocol.ServiceMessage) -> None:
        with self._lock:
            reply, handles = self._calls.pop(message.get("call", int))
            numbers = [] if "error" in message.header or not handles else message.get("tasks", list)
            for handle, number in zip(handles, numbers, strict=False):
                handle.number = number  # before anything is told of it
                self._handles[number] = handle
        reply.set_result(message)

    @handles("ended")
    def _ended(self, message: protocol.ServiceMessage) -> None:
        with self._lock:
            handle = self._handles.pop(message.get("task", int), None)
            if handle is None:
                return
            kept, handle.kept = handle.kept, []
            if message.get("open", bool, False):
                self._open[handle.number] = Future(), kept
        if "error" in message.header:
            handle.settle(wire.error_of(message.get("error", dict)))
        elif message.get("cancelled", bool, False):
            handle.settle(None, cancelled=True)
        else:
            handle.settle_with(dict(zip(message.get("changed", list, []), message.arrays, strict=True)))

    @handles("closed")
    def _closed(self, message: protocol.ServiceMessage) -> None:
        with self._lock:
            found = self._open.pop(message.get("task", int), None)
        if found is not None:
            found[0].set_result(None)

    @handles("refused")
    def _refused(self, message: protocol.ServiceMessage) -> None:
        raise errors.ServiceError(message.get("message", str))

    def _die(self, why: errors.ServiceError) -> None:
        """Fail all calls and handles that wait: the connection is over."""
        with self._lock:
            if self._dead is None:
                self._dead = why
            calls, self._calls = self._calls, {}
            handles, self._handles = self._handles, {}
            still_open, self._open = self._open, {}
        for closed, kept in still_open.values():
            _left.extend(kept)
            closed.set_result(None)
        for reply, _ in calls.values():
            reply.set_exception(errors.ServiceError(str(why)))
        for handle in handles.values():
            _left.extend(handle.kept)
            handle.settle(errors.ServiceError(str(why), task=handle.name))


class ServiceHandle(TaskFuture):
    """A task that was submitted to a service; a future like `Handle`.

    `result` returns None once the task has ended and what it wrote is in the caller's arrays. Callbacks run in the
    thread that receives from the service: they must not wait.
    """

    def __init__(self, client: Client, name: str, packer: Packer) -> None:
        super().__init__(client, name)
        self.number = -1
        self.client = client
        self.kept = packer.kept
        self._targets = packer.targets

    def settle_with(self, changed: dict[int, NDArray[Any]]) -> None:
        """Put what came into the caller's arrays, and tell everybody who waits."""
        error = None
        try:
            for place, values in changed.items():
                target = self._targets[place]
                if target is not None:
                    np.copyto(target, values)
        except (ValueError, IndexError) as wrong:
            error = errors.SchedulerError(
                f"the result of task {self.name!r} does not fit into the array that was passed ({wrong}): leave arrays "
                "as they are until the task has ended",
                task=self.name,
            )
        self.settle(error)


class ServiceArray:
    """An array on the device of a service; kernels take it as an argument, and it stays there between them.

    It dies with the client's connection, and with the process that owns the device: then tasks that use it raise
    `TaskLostError`.
    """

    def __init__(self, client: Client, number: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.client = client
        self.number = number
        self.shape = shape
        self.dtype = dtype

    def numpy(self) -> NDArray[Any]:
        """Return a copy in host memory. Tasks that write to it should have ended.

        Raises
        ------
        TaskLostError
            The process that owned it is gone.
        ServiceError
            The service is gone.
        """
        return self.client.call({"type": "get", "buffer": self.number}).arrays[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("a ServiceArray is on a device: NumPy can only get a copy of it")
        host = self.numpy()
        return host if dtype is None else host.astype(dtype, copy=False)

    def free(self) -> None:
        """Give the memory back. Tasks that were submitted before go on with it."""
        self.client.call({"type": "free", "buffer": self.number})

    def __repr__(self) -> str:
        return f"<ServiceArray {self.number}: {self.dtype} {self.shape}>"


class Packer:
    """Collects the launches of a request and their arrays, each array once.

    Parameters
    ----------
    client : Client
        Whose arrays on the device may be among the arguments.
    gpu : str
        Name of the GPU whose memory may be lent.

    Attributes
    ----------
    lent : list of dict
        Arrays in memory of this process on the GPU, as the owner opens them.
    kept : list
        What keeps them.
    arrays : list of ndarray
        What is sent.
    targets : list of ndarray or None
        Where the result of each array goes: the caller's own array, or None where it is read-only.
    """

    def __init__(self, client: Client | None = None, gpu: str = "") -> None:
        self._client = client
        self._gpu = gpu
        self.lent: list[dict[str, Any]] = []
        self.kept: list[Any] = []
        self.arrays: list[NDArray[Any]] = []
        self.targets: list[NDArray[Any] | None] = []
        self._known: dict[int, list[Any]] = {}  # arguments by the ids of arrays that are kept here

    def launch(self, launch: Any, args: Sequence[Any]) -> dict[str, Any]:
        """Return a launch as plain data.

        Raises
        ------
        ArgumentError, DTypeError
            The kernel or an argument cannot travel.
        """
        if isinstance(as_launch(launch, ())[0], Call):
            raise errors.ArgumentError(
                f"{launch!r:.80} is a function or a graph, and a service runs kernels alone: submit it to a Scheduler "
                "of your own process"
            )
        require_launch(launch)
        named = references.reference(launch.kernel)
        given = viewed(launch.kernel, args)
        return {
            "kernel": named,
            "shape": list(launch.shape),
            "arguments": [self._argument(value, k, named["name"]) for k, value in enumerate(given)],
        }

    def _argument(self, value: Any, place: int, kernel: str) -> list[Any]:
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, ServiceArray):
            if value.client is not self._client:
                raise errors.ArgumentError(
                    f"argument {place} of kernel {kernel!r} is on the device for another connection: use one for both",
                    name="args",
                )
            return ["buffer", value.number]
        if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):  # a mask would be lost
            return self._array(value, value)
        if isinstance(value, np.generic):
            self.arrays.append(np.asarray(value))
            self.targets.append(None)
            return ["scalar", len(self.arrays) - 1]
        if isinstance(value, bool):
            return ["bool", value]
        if isinstance(value, int) and value in wire.INTS:
            return ["int", value]
        if isinstance(value, float):
            return ["float", value]
        if is_foreign(value):
            return self._located(value, f"argument {place} of kernel {kernel!r}")
        # to print an object of others may take long: that of a query runs it
        its = shown(value) if isinstance(value, int | str | None) else f"a {type(value).__name__}"
        raise errors.ArgumentError(
            f"argument {place} of kernel {kernel!r} is {its}, which does not travel to a service: NumPy arrays, "
            "numbers of 64 bits and what to_device returned do, so convert it (a masked array by `filled()`)",
            name="args",
        )

    def _located(self, value: Any, what: str) -> list[Any]:
        """Return an array of another library as an argument: sent if the host has it, or lent to the owner."""
        tensor, dtype = located(value, what)
        self.kept.append((value, tensor))
        if tensor.on_host or not size_of(tensor, dtype):
            array = at_address("cpu", tensor.address, tensor.shape, dtype, tensor.keep)
            array.flags.writeable = tensor.writable
            return self._array(array, value)
        if dtype.str not in protocol.ITEMS:
            raise errors.DTypeError(f"{what} has items of {dtype}, which do not travel: convert it first")
        lent = ipc.lend(tensor.address, size_of(tensor, dtype))
        if device_name(lent.ordinal) != self._gpu:
            raise errors.ArgumentError(
                f"{what} is on another device than the service's ({self._gpu or 'the CPU'}): copy it to the host",
                name="args",
            )
        shape = list(tensor.shape) or [1]
        self.lent.append({"handle": lent.handle.hex(), "offset": lent.offset, "dtype": dtype.str, "shape": shape})
        return self._known.setdefault(id(value), ["lent", len(self.lent) - 1])

    def _array(self, array: NDArray[Any], value: Any) -> list[Any]:
        """Return the argument for an array of the host, which stands for a value."""
        for other, target in zip(self.arrays, self.targets, strict=True):
            writes = target is not None or array.flags.writeable
            if writes and overlap(other, array):
                raise errors.ArgumentError(
                    "two arrays of a request overlap in memory, and would be separated when they are sent: pass the "
                    "same array object twice, or copies",
                    name="args",
                )
        self.arrays.append(array)
        self.targets.append(array if array.flags.writeable else None)
        return self._known.setdefault(id(value), ["array", len(self.arrays) - 1])


def _connect(sock: socket.socket, path: os.PathLike[str]) -> None:
    """Connect; where a crowd waits to be let in, within the seconds that the socket has for sending."""
    try:
        sock.connect(os.fspath(path))
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        raise errors.ServiceError(
            f"no scheduler service listens at {path}: start one with `warpwell sched serve`, or name its --socket"
        ) from None
    except OSError as error:
        told = f"cannot be reached: {error.strerror or error}"
        if isinstance(error, BlockingIOError):
            told = "does not take connections: is it stopped?"
        elif isinstance(error, PermissionError):
            told = "is not open to you: it, or its folder, is for its user alone, or for a group that you are not in"
        raise errors.ServiceError(f"the scheduler service at {path} {told}") from None


def _after_fork() -> None:
    """Leave connections to the parent: the service hears that it has ended though this child lives."""
    for client in list(_clients):
        client._connection.forget()
    _clients.clear()


os.register_at_fork(after_in_child=_after_fork)
